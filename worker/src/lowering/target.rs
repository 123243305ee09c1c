//! Lowering inputs: the target device, and a layer's form.

use super::cudnn::CudnnKinds;
use crate::nn::Form;
use switchyard_cuda::cublaslt::Arithmetic;

/// The GPU to lower for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// Maximum blocks per launch: a small multiple of the multiprocessors.
    pub blocks: u32,
    /// Maximum shared memory per block.
    pub shared_bytes: u32,
    /// Operations that its cuDNN supports.
    pub cudnn: CudnnKinds,
    /// Whether cuBLASLt epilogues add biases and compute activations, where supported.
    pub epilogues: bool,
    /// Whether bf16 GEMMs are computed in FP8, where their sizes allow it.
    pub fp8: bool,
    /// How f32 operands are multiplied.
    pub arithmetic: Arithmetic,
}

impl Target {
    /// The same device with these cuDNN operations.
    pub fn with(self, cudnn: CudnnKinds) -> Target {
        Target { cudnn, ..self }
    }
}

/// A layer's form, and its offsets in shared memories.
pub(super) struct Computed {
    pub form: Form,
    /// Number of losses before it.
    pub loss: usize,
    /// Rows of these losses.
    pub row: usize,
    /// Number of constants before it.
    pub constant: usize,
}
