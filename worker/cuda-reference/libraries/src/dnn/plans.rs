//! Plans and their memory.

use super::engines::{Computation, Configuration};
use super::{BAD_PARAM, CallResult, DUPLICATED_ENTRIES, MISALIGNED_POINTER, refused};
use crate::gpu::convolution::Convolution;
use crate::gpu::dataflow::Bound;
use crate::gpu::tensor::Place;
use crate::gpu::work::Work;
use std::ops::Range;

/// Alignment of workspaces.
const WORKSPACE_ALIGNMENT: u64 = 16;

#[derive(Debug)]
pub(super) struct Plan {
    configuration: Configuration,
    /// Created with a handle, and therefore for a device that is present.
    is_here: bool,
}

/// Addresses of tensors by ID, and of the workspace (a variant pack).
#[derive(Debug)]
pub(super) struct Pack {
    addresses: Vec<(i64, u64)>,
    workspace: u64,
}

impl Plan {
    pub(super) fn new(configuration: &Configuration, is_here: bool) -> Plan {
        Plan { configuration: configuration.clone(), is_here }
    }

    pub(super) fn workspace_bytes(&self) -> u64 {
        self.configuration.engine.workspace_bytes()
    }
}

impl Pack {
    pub(super) fn new(call: &str, ids: &[i64], addresses: &[i64], workspace: i64) -> CallResult<Pack> {
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

/// A plan bound to memory: its name, all memory that it uses, and the work.
pub(super) struct BoundPlan {
    /// Name for the NVTX recorder.
    pub(super) what: &'static str,
    pub(super) name: String,
    pub(super) uses: Vec<Range<u64>>,
    pub(super) work: Work,
}

/// Binds a plan to memory.
///
/// # Safety
/// Addresses of host scalars must point to live values.
pub(super) unsafe fn bind(call: &str, plan: &Plan, pack: &Pack) -> CallResult<BoundPlan> {
    let Plan { configuration: Configuration { computation, engine }, is_here } = plan;
    if !is_here {
        return refused(call, BAD_PARAM, "a plan for a device that need not be there");
    }
    let mut addresses = Vec::new();
    for tensor in computation.tensors() {
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
    match computation {
        Computation::Convolution(shape) => {
            let convolution = Convolution {
                shape: (**shape).clone(),
                addresses: [addresses[0].1, addresses[1].1, addresses[2].1],
                is_rounded: engine.is_rounded(),
                is_unordered: engine.is_unordered(),
                workspace,
            };
            let (name, uses) = (convolution.name(), convolution.uses());
            Ok(BoundPlan { what: "a convolution", name, uses, work: Work::Convolution(Box::new(convolution)) })
        }
        Computation::Dataflow(flow) => {
            let mut numbers = Vec::new();
            for tensor in flow.tensors(Place::Host).concat() {
                let address = pack.address(tensor.id).unwrap_or(0);
                if address == 0 {
                    return refused(call, BAD_PARAM, &format!("no number of the host for tensor {}", tensor.id));
                }
                let pointer: *const f32 = std::ptr::with_exposed_provenance(address as usize);
                // SAFETY: upheld by the caller. Like the real library, this reads at launch, not
                // when the work runs.
                numbers.push((tensor.id, unsafe { pointer.read_unaligned() }));
            }
            let bound = Bound { flow: flow.clone(), addresses, numbers, workspace };
            let (name, uses) = (bound.name(), bound.uses());
            Ok(BoundPlan { what: "a graph of operations", name, uses, work: Work::Dataflow(Box::new(bound)) })
        }
    }
}
