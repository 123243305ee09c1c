//! Encoding and decoding of element formats.

use half::{bf16, f16};
use switchyard_cuda_reference::fp8::Fp8;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Format {
    F32,
    F16,
    Bf16,
    Fp8(Fp8),
}

impl Format {
    pub(crate) fn bytes(self) -> u64 {
        match self {
            Format::F32 => 4,
            Format::F16 | Format::Bf16 => 2,
            Format::Fp8(_) => 1,
        }
    }
}

pub(crate) fn decoded(format: Format, bytes: &[u8]) -> Vec<f32> {
    let halves = || bytes.chunks_exact(2).map(|two| u16::from_le_bytes([two[0], two[1]]));
    match format {
        Format::F32 => {
            bytes.chunks_exact(4).map(|four| f32::from_le_bytes([four[0], four[1], four[2], four[3]])).collect()
        }
        Format::F16 => halves().map(|bits| f16::from_bits(bits).to_f32()).collect(),
        Format::Bf16 => halves().map(|bits| bf16::from_bits(bits).to_f32()).collect(),
        Format::Fp8(format) => bytes.iter().map(|bits| format.decoded(*bits)).collect(),
    }
}

pub(crate) fn encoded(format: Format, numbers: &[f32]) -> Vec<u8> {
    match format {
        Format::F32 => numbers.iter().flat_map(|number| number.to_le_bytes()).collect(),
        Format::F16 => numbers.iter().flat_map(|number| f16::from_f32(*number).to_le_bytes()).collect(),
        Format::Bf16 => numbers.iter().flat_map(|number| bf16::from_f32(*number).to_le_bytes()).collect(),
        Format::Fp8(format) => numbers.iter().map(|number| format.encoded(*number)).collect(),
    }
}
