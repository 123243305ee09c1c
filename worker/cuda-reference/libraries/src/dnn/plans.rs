//! Plans, their texts, and the memory that they are given.

use super::engines::{Configuration, Engine, Whole, meets};
use super::{
    Answer, BAD_PARAM, DUPLICATED_ENTRIES, MISALIGNED_POINTER, NOT_SUPPORTED, cudnnGetVersion, refused, unsupported,
};
use crate::fault;
use crate::gpu::convolution::Convolution;
use crate::gpu::dataflow::Bound;
use crate::gpu::tensor::Place;
use crate::gpu::work::Work;
use std::ops::Range;

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
    pub(super) fn new(configuration: &Configuration, is_here: bool) -> Plan {
        Plan { configuration: configuration.clone(), is_here }
    }

    /// From a text that a plan of this version gave.
    ///
    /// # Errors
    /// There is no handle, or the text is of another version.
    pub(super) fn read(call: &str, is_here: bool, text: &str) -> Answer<Plan> {
        match (is_here, parsed(text)) {
            (false, _) => refused(call, BAD_PARAM, "a plan from a text needs a handle"),
            (true, None) => refused(call, NOT_SUPPORTED, "a text that is no plan of this version"),
            (true, Some(Configuration { whole, .. }))
                if fault::requested().is_ok_and(|faults| meets(faults.cudnn_untaken, &whole)) =>
            {
                unsupported("the fault that was asked for")
            }
            (true, Some(configuration)) => Ok(Plan { configuration, is_here }),
        }
    }

    pub(super) fn workspace_bytes(&self) -> u64 {
        self.configuration.engine.workspace_bytes()
    }

    pub(super) fn text(&self) -> String {
        let numbers: Vec<String> = self.configuration.whole.words().iter().map(i64::to_string).collect();
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
    Some(Configuration { whole: Whole::from_words(words)?, engine: Engine(head[1]) })
}

impl Pack {
    pub(super) fn new(call: &str, ids: &[i64], addresses: &[i64], workspace: i64) -> Answer<Pack> {
        if ids.len() != addresses.len() {
            return refused(call, BAD_PARAM, &format!("{} numbers and {} addresses", ids.len(), addresses.len()));
        }
        if ids.iter().enumerate().any(|(at, id)| ids[..at].contains(id)) {
            return refused(call, DUPLICATED_ENTRIES, &format!("numbers {ids:?}"));
        }
        let addresses = ids.iter().copied().zip(addresses.iter().map(|address| *address as u64)).collect();
        Ok(Pack { addresses, workspace: workspace as u64 })
    }

    fn address(&self, id: i64) -> Option<u64> {
        self.addresses.iter().find(|(known, _)| *known == id).map(|(_, address)| *address)
    }
}

/// What a plan does with its memory: its name, all that it uses, and the work.
pub(super) struct Ready {
    /// For who records calls.
    pub(super) what: &'static str,
    pub(super) name: String,
    pub(super) uses: Vec<Range<u64>>,
    pub(super) work: Work,
}

/// A plan with its memory.
///
/// # Safety
/// Addresses of numbers of the host are those of live numbers.
pub(super) unsafe fn bound(call: &str, plan: &Plan, pack: &Pack) -> Answer<Ready> {
    let Plan { configuration: Configuration { whole, engine }, is_here } = plan;
    if !is_here {
        return refused(call, BAD_PARAM, "a plan for a device that need not be there");
    }
    let mut addresses = Vec::new();
    for tensor in whole.tensors() {
        let Some(address) = pack.address(tensor.id) else {
            return refused(call, BAD_PARAM, &format!("no address for tensor {}", tensor.id));
        };
        if !address.is_multiple_of(tensor.alignment) {
            let text = format!("tensor {} at {address:#x}, expected a multiple of {}", tensor.id, tensor.alignment);
            return refused(call, MISALIGNED_POINTER, &text);
        }
        addresses.push((tensor.id, address));
    }
    let bytes = engine.workspace_bytes();
    if bytes > 0 && !pack.workspace.is_multiple_of(WORKSPACE_ALIGNMENT) {
        return refused(call, MISALIGNED_POINTER, &format!("a workspace at {:#x}", pack.workspace));
    }
    let workspace = pack.workspace..pack.workspace + bytes;
    match whole {
        Whole::Convolution(shape) => {
            let convolution = Convolution {
                shape: (**shape).clone(),
                addresses: [addresses[0].1, addresses[1].1, addresses[2].1],
                is_rounded: engine.is_rounded(),
                is_unordered: engine.is_unordered(),
                workspace,
            };
            let (name, uses) = (convolution.name(), convolution.uses());
            Ok(Ready { what: "a convolution", name, uses, work: Work::Convolution(Box::new(convolution)) })
        }
        Whole::Dataflow(flow) => {
            let mut numbers = Vec::new();
            for tensor in flow.tensors(Place::Host).concat() {
                let address = pack.address(tensor.id).unwrap_or(0);
                if address == 0 {
                    return refused(call, BAD_PARAM, &format!("no number of the host for tensor {}", tensor.id));
                }
                let pointer: *const f32 = std::ptr::with_exposed_provenance(address as usize);
                // SAFETY: as the caller promises. As in the real library it is read now, not when the work runs.
                numbers.push((tensor.id, unsafe { pointer.read_unaligned() }));
            }
            let bound = Bound { flow: flow.clone(), addresses, numbers, workspace };
            let (name, uses) = (bound.name(), bound.uses());
            Ok(Ready { what: "a graph of operations", name, uses, work: Work::Dataflow(Box::new(bound)) })
        }
    }
}
