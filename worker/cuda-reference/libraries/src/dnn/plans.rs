//! Plans, their texts, and the memory that they are given.

use super::engines::{Configuration, Engine, meets};
use super::{
    Answer, BAD_PARAM, DUPLICATED_ENTRIES, MISALIGNED_POINTER, NOT_SUPPORTED, cudnnGetVersion, refused, unsupported,
};
use crate::fault;
use crate::gpu::convolution::{Convolution, Shape};

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
            (true, Some(Configuration { shape, .. }))
                if fault::requested().is_ok_and(|faults| meets(faults.cudnn_untaken, &shape)) =>
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

/// A plan with its memory.
pub(super) fn bound(call: &str, plan: &Plan, pack: &Pack) -> Answer<Convolution> {
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
