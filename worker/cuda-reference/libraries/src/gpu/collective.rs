//! An all-reduce in a stream.

use crate::gpu::Gpu;
use crate::ranks::{Call, Communicator};
use crate::shadow::Stamp;
use std::ops::Range;
use std::sync::Arc;
use switchyard_cuda_reference::Touched;

/// Result of an aborted all-reduce.
const GARBAGE: u8 = 0xff;

#[derive(Clone)]
pub(crate) struct Collective {
    pub(crate) communicator: Arc<Communicator>,
    pub(crate) call: Call,
    pub(crate) from: Range<u64>,
    pub(crate) to: Range<u64>,
}

impl Collective {
    /// Sends this rank's data, which must be initialised.
    pub(crate) fn send(&self, gpu: &Gpu, stamp: &Stamp) -> Vec<Touched> {
        self.communicator.send(self.call, &gpu.read_written(&self.from, stamp));
        vec![Touched { range: self.from.clone(), writes: false }]
    }

    pub(crate) fn has_sum(&self) -> bool {
        self.communicator.has_sum()
    }

    pub(crate) fn receive(&self, gpu: &mut Gpu) -> Vec<Touched> {
        let bytes = (self.to.end - self.to.start) as usize;
        let sum = self.communicator.sum().unwrap_or_else(|| vec![GARBAGE; bytes]);
        gpu.write(self.to.start, &sum);
        vec![Touched { range: self.to.clone(), writes: true }]
    }
}
