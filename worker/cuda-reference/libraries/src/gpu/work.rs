//! What waits in streams, and what it does when it runs.

use crate::gpu::collective::Collective;
use crate::gpu::convolution::Convolution;
use crate::gpu::dataflow::Bound;
use crate::gpu::product::Product;
use crate::host::Queued;
use std::ops::Range;
use std::sync::Arc;
use switchyard_cuda_reference::{Bare, Module};

/// A launch of a kernel.
#[derive(Clone)]
pub(crate) struct Launch {
    pub(crate) module: Arc<Module>,
    pub(crate) kernel: String,
    pub(crate) blocks: u32,
    pub(crate) threads: u32,
    pub(crate) shared_bytes: u32,
    pub(crate) arguments: Vec<Vec<u8>>,
    /// From 1 on.
    pub(crate) number: u64,
}

impl Launch {
    pub(crate) fn name(&self) -> String {
        format!("launch {} (`{}`)", self.number, self.kernel)
    }

    pub(crate) fn bare(&self, seed: u64) -> Bare<'_> {
        Bare {
            kernel: &self.kernel,
            blocks: self.blocks,
            threads: self.threads,
            shared_bytes: self.shared_bytes,
            arguments: &self.arguments,
            seed,
        }
    }
}

/// Where an upload has its bytes.
#[derive(Clone)]
pub(crate) enum Source {
    /// The driver copied them when it was called.
    Staged(Vec<u8>),
    Pinned(Queued),
}

#[derive(Clone)]
pub(crate) enum Work {
    #[cfg(test)]
    Nothing,
    Launch(Launch),
    Fill {
        to: Range<u64>,
        byte: u8,
    },
    Upload {
        from: Source,
        to: u64,
    },
    Download {
        from: u64,
        to: Queued,
    },
    /// Lines of `bytes` bytes: first address and pitch of both sides.
    Copy {
        from: (u64, u64),
        to: (u64, u64),
        bytes: u64,
        count: u64,
    },
    Product(Box<Product>),
    Convolution(Box<Convolution>),
    Dataflow(Box<Bound>),
    /// This rank's part of an all-reduce.
    Send(Collective),
    /// The sum over all ranks.
    Receive(Collective),
}

impl Work {
    /// Whether it has all that it needs of other devices.
    pub(crate) fn may_run(&self) -> bool {
        match self {
            Work::Receive(collective) => collective.has_sum(),
            _ => true,
        }
    }

    /// Memory of the host that it uses.
    pub(crate) fn host(&mut self) -> Option<&mut Queued> {
        match self {
            Work::Upload { from: Source::Pinned(queued), .. } | Work::Download { to: queued, .. } => Some(queued),
            _ => None,
        }
    }
}
