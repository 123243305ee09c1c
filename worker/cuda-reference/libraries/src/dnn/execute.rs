//! Execution of plans.

use super::descriptors::finalized;
use super::graphs::Finalized;
use super::plans::{BoundPlan, bind};
use super::{BAD_PARAM, EXECUTION_FAILED, done, handle, refused};
use crate::abi::{self, Pointer};
use crate::fault;
use crate::gpu::Gpu;
use std::sync::atomic::{AtomicU64, Ordering};

/// Number of executions so far.
static EXECUTED: AtomicU64 = AtomicU64::new(0);

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnBackendExecute(raw: Pointer, plan: Pointer, pack: Pointer) -> i32 {
    const CALL: &str = "cudnnBackendExecute";
    // SAFETY: per the header's contract.
    let run = || unsafe {
        let stream = handle(CALL, raw)?.stream;
        let (plan, pack) = (finalized(CALL, plan)?, finalized(CALL, pack)?);
        let (Finalized::Plan(plan), Finalized::Pack(pack)) = (&*plan, &*pack) else {
            return refused(CALL, BAD_PARAM, "no plan, or no addresses");
        };
        let number = 1 + EXECUTED.fetch_add(1, Ordering::Relaxed);
        if fault::requested().is_ok_and(|faults| faults.cudnn_fails == Some(number)) {
            return refused(CALL, EXECUTION_FAILED, "injected fault");
        }
        let ready = bind(CALL, plan, pack)?;
        let queued = abi::with(|gpu| {
            let stream = abi::stream(gpu, stream)?;
            crate::nvtx::queued(ready.what);
            enqueue(gpu, stream, ready);
            Ok(())
        });
        queued.or_else(|code| refused(CALL, EXECUTION_FAILED, &format!("the driver says {code:?}")))
    };
    done(run())
}

fn enqueue(gpu: &mut Gpu, stream: usize, BoundPlan { name, uses, work, .. }: BoundPlan) {
    gpu.enqueue(stream, name, &uses, work);
}
