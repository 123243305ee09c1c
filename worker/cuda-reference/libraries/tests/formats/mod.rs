//! Converts values to the engine's formats on the reference GPU, and back.

use crate::device::Gpu;
use half::{bf16, f16};
use switchyard_cuda::driver::Buffer;
use switchyard_cuda::kernels::Element;

pub fn round(element: Element, number: f32) -> f32 {
    match element {
        Element::F32 => number,
        Element::Bf16 => bf16::from_f32(number).to_f32(),
        Element::F16 => f16::from_f32(number).to_f32(),
    }
}

pub fn upload(gpu: &Gpu, element: Element, numbers: &[f32]) -> Buffer {
    match element {
        Element::F32 => gpu.context.upload(numbers),
        Element::Bf16 => gpu.context.upload(&numbers.iter().map(|x| bf16::from_f32(*x)).collect::<Vec<_>>()),
        Element::F16 => gpu.context.upload(&numbers.iter().map(|x| f16::from_f32(*x)).collect::<Vec<_>>()),
    }
    .unwrap()
}

/// The first elements of a buffer.
pub fn download(buffer: &Buffer, element: Element, count: usize) -> Vec<f32> {
    match element {
        Element::F32 => buffer.download(0..count).unwrap(),
        Element::Bf16 => buffer.download::<bf16>(0..count).unwrap().into_iter().map(bf16::to_f32).collect(),
        Element::F16 => buffer.download::<f16>(0..count).unwrap().into_iter().map(f16::to_f32).collect(),
    }
}
