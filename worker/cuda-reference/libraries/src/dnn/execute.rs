//! The execution of plans.

use super::descriptors::made;
use super::graphs::Made;
use super::plans::{Ready, bound};
use super::{BAD_PARAM, EXECUTION_FAILED, done, handle, refused};
use crate::abi::{self, Pointer};
use crate::fault;
use crate::gpu::Gpu;
use std::sync::atomic::{AtomicU64, Ordering};

/// Executions so far.
static EXECUTED: AtomicU64 = AtomicU64::new(0);

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnBackendExecute(raw: Pointer, plan: Pointer, pack: Pointer) -> i32 {
    const CALL: &str = "cudnnBackendExecute";
    // SAFETY: as the header says.
    let run = || unsafe {
        let stream = handle(CALL, raw)?.stream;
        let (plan, pack) = (made(CALL, plan)?, made(CALL, pack)?);
        let (Made::Plan(plan), Made::Pack(pack)) = (&*plan, &*pack) else {
            return refused(CALL, BAD_PARAM, "no plan, or no addresses");
        };
        let number = 1 + EXECUTED.fetch_add(1, Ordering::Relaxed);
        if fault::requested().is_ok_and(|faults| faults.cudnn_fails == Some(number)) {
            return refused(CALL, EXECUTION_FAILED, "the fault that was asked for");
        }
        let ready = bound(CALL, plan, pack)?;
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

fn enqueue(gpu: &mut Gpu, stream: usize, Ready { name, uses, work, .. }: Ready) {
    gpu.put(stream, name, &uses, work);
}
