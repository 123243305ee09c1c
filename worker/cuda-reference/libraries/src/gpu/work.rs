//! Work in streams, and its execution.

use crate::gpu::collective::Collective;
use crate::gpu::convolution::Convolution;
use crate::gpu::dataflow::Bound;
use crate::gpu::product::Product;
use crate::host::HostRange;
use std::ops::Range;
use std::sync::Arc;
use switchyard_cuda_reference::{Module, RawLaunch};

/// A kernel launch.
#[derive(Clone)]
pub(crate) struct Launch {
    pub(crate) module: Arc<Module>,
    pub(crate) kernel: String,
    pub(crate) blocks: u32,
    pub(crate) threads: u32,
    pub(crate) shared_bytes: u32,
    pub(crate) arguments: Vec<Vec<u8>>,
    /// From 1.
    pub(crate) number: u64,
}

impl Launch {
    pub(crate) fn name(&self) -> String {
        format!("launch {} (`{}`)", self.number, self.kernel)
    }

    pub(crate) fn raw(&self, seed: u64) -> RawLaunch<'_> {
        RawLaunch {
            kernel: &self.kernel,
            blocks: self.blocks,
            threads: self.threads,
            shared_bytes: self.shared_bytes,
            arguments: &self.arguments,
            seed,
        }
    }
}

/// Source of an upload.
#[derive(Clone)]
pub(crate) enum Source {
    /// Staged by the driver during the call.
    Staged(Vec<u8>),
    Pinned(HostRange),
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
        to: HostRange,
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
    /// Sends this rank's data for an all-reduce.
    Send(Collective),
    /// Receives the sum over all ranks.
    Receive(Collective),
}

impl Work {
    /// Whether everything that it needs from other devices has arrived.
    pub(crate) fn may_run(&self) -> bool {
        match self {
            Work::Receive(collective) => collective.has_sum(),
            _ => true,
        }
    }

    /// Host memory that it uses.
    pub(crate) fn host(&mut self) -> Option<&mut HostRange> {
        match self {
            Work::Upload { from: Source::Pinned(queued), .. } | Work::Download { to: queued, .. } => Some(queued),
            _ => None,
        }
    }
}
