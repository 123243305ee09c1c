//! Plans, their texts, and their execution.

use super::attributes::Attributes;
use super::descriptors::made;
use super::graphs::{Configuration, Engine, Made, meets};
use super::{
    Answer, BAD_PARAM, DUPLICATED_ENTRIES, EXECUTION_FAILED, MISALIGNED_POINTER, NOT_SUPPORTED, cudnnGetVersion, done,
    handle, refused, unsupported,
};
use crate::abi::{self, Pointer};
use crate::fault;
use crate::gpu::Gpu;
use crate::gpu::convolution::{Convolution, Shape};
use crate::gpu::work::Work;
use std::sync::atomic::{AtomicU64, Ordering};

/// What texts of plans begin with.
const MAGIC: &str = "reference cuDNN plan";

/// What addresses of workspaces are multiples of.
const WORKSPACE_ALIGNMENT: u64 = 16;

#[derive(Debug)]
pub(super) struct Plan {
    configuration: Configuration,
    /// It was made with a handle, and so for a device that is there.
    is_here: bool,
}

/// Addresses of tensors by their numbers, and of the workspace.
#[derive(Debug)]
pub(super) struct Pack {
    addresses: Vec<(i64, u64)>,
    workspace: u64,
}

impl Plan {
    /// From the configuration of an engine, or from a text that a plan of this version gave.
    ///
    /// # Errors
    /// There is neither, a device is missing, or the text is of another version.
    pub(super) fn new(call: &str, of: &Attributes) -> Answer<Plan> {
        let is_here = of.has(400);
        if of.has(405) {
            let text = String::from_utf8_lossy(of.bytes(405)).into_owned();
            return match (is_here, parsed(&text)) {
                (true, Some(Configuration { shape, .. }))
                    if fault::requested().is_ok_and(|faults| meets(faults.cudnn_untaken, &shape)) =>
                {
                    unsupported("the fault that was asked for")
                }
                (true, Some(configuration)) => Ok(Plan { configuration, is_here }),
                (false, _) => refused(call, BAD_PARAM, "a plan from a text needs a handle"),
                (true, None) => refused(call, NOT_SUPPORTED, "a text that is no plan of this version"),
            };
        }
        match of.part(401) {
            Some(Made::Configuration(configuration)) if is_here || of.has(407) => {
                Ok(Plan { configuration: configuration.clone(), is_here })
            }
            _ => refused(call, BAD_PARAM, "a plan without a configuration, or without a device"),
        }
    }

    pub(super) fn workspace_bytes(&self) -> u64 {
        self.configuration.engine.workspace_bytes()
    }

    pub(super) fn text(&self) -> String {
        let numbers: Vec<String> = self.configuration.shape.words().iter().map(i64::to_string).collect();
        let engine = self.configuration.engine.0;
        format!("{MAGIC} {} {engine} {}", version(), numbers.join(" "))
    }
}

fn version() -> usize {
    // SAFETY: it takes nothing.
    unsafe { cudnnGetVersion() }
}

fn parsed(text: &str) -> Option<Configuration> {
    let numbers: Option<Vec<i64>> =
        text.strip_prefix(MAGIC)?.split_whitespace().map(|word| word.parse().ok()).collect();
    let numbers = numbers?;
    let (head, words) = numbers.split_at_checked(2)?;
    (head[0] == version() as i64).then_some(())?;
    Some(Configuration { shape: Shape::from_words(words)?, engine: Engine(head[1]) })
}

impl Pack {
    pub(super) fn new(call: &str, of: &Attributes) -> Answer<Pack> {
        let (ids, addresses) = (of.longs(1000), of.longs(1001));
        if ids.len() != addresses.len() {
            return refused(call, BAD_PARAM, &format!("{} numbers and {} addresses", ids.len(), addresses.len()));
        }
        if ids.iter().enumerate().any(|(at, id)| ids[..at].contains(id)) {
            return refused(call, DUPLICATED_ENTRIES, &format!("numbers {ids:?}"));
        }
        let addresses = ids.into_iter().zip(addresses.into_iter().map(|address| address as u64)).collect();
        Ok(Pack { addresses, workspace: of.long(1003) as u64 })
    }

    fn address(&self, id: i64) -> Option<u64> {
        self.addresses.iter().find(|(known, _)| *known == id).map(|(_, address)| *address)
    }
}

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
        let convolution = bound(CALL, plan, pack)?;
        let queued = abi::with(|gpu| {
            let stream = abi::stream(gpu, stream)?;
            enqueue(gpu, stream, convolution);
            Ok(())
        });
        queued.or_else(|code| refused(CALL, EXECUTION_FAILED, &format!("the driver says {code:?}")))
    };
    done(run())
}

/// A plan with its memory.
fn bound(call: &str, plan: &Plan, pack: &Pack) -> Answer<Convolution> {
    let Plan { configuration: Configuration { shape, engine }, is_here } = plan;
    if !is_here {
        return refused(call, BAD_PARAM, "a plan for a device that need not be there");
    }
    let mut addresses = [0; 3];
    for (tensor, to) in [&shape.images, &shape.filters, &shape.results].into_iter().zip(&mut addresses) {
        let Some(address) = pack.address(tensor.id) else {
            return refused(call, BAD_PARAM, &format!("no address for tensor {}", tensor.id));
        };
        if !address.is_multiple_of(tensor.alignment) {
            let text = format!("tensor {} at {address:#x}, expected a multiple of {}", tensor.id, tensor.alignment);
            return refused(call, MISALIGNED_POINTER, &text);
        }
        *to = address;
    }
    let bytes = engine.workspace_bytes();
    if bytes > 0 && !pack.workspace.is_multiple_of(WORKSPACE_ALIGNMENT) {
        return refused(call, MISALIGNED_POINTER, &format!("a workspace at {:#x}", pack.workspace));
    }
    Ok(Convolution {
        shape: shape.clone(),
        addresses,
        is_rounded: engine.is_rounded(),
        is_unordered: engine.is_unordered(),
        workspace: pack.workspace..pack.workspace + bytes,
    })
}

fn enqueue(gpu: &mut Gpu, stream: usize, convolution: Convolution) {
    let uses = convolution.uses();
    gpu.put(stream, convolution.name(), &uses, Work::Convolution(Box::new(convolution)));
}
