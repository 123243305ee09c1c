//! What launches are for: the device, and what a layer computes.

use super::cudnn::CudnnKinds;
use crate::nn::Form;

/// The GPU that launches are for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// Blocks of a launch, at most: a small multiple of the multiprocessors.
    pub blocks: u32,
    /// Shared memory of a block, at most.
    pub shared_bytes: u32,
    /// What its cuDNN computes.
    pub cudnn: CudnnKinds,
    /// cuBLASLt adds biases to products and computes activations before it writes them, where it has that.
    pub epilogues: bool,
    /// Products of numbers in bf16 are computed in 8 bits where their sides allow it.
    pub fp8: bool,
}

impl Target {
    /// The same device whose cuDNN computes this.
    pub fn with(self, cudnn: CudnnKinds) -> Target {
        Target { cudnn, ..self }
    }
}

/// What a layer computes.
pub(super) struct Computed {
    pub form: Form,
    /// Losses before it.
    pub loss: usize,
    /// Rows of these losses.
    pub row: usize,
    /// Constants before it.
    pub constant: usize,
}
