//! Tests the 32 x 32 tile kernel on every machine: packing, blocking and edges, with an emulated
//! matrix unit.

use super::amx::Tiles;
use super::kernel::Kernel;
use super::{Epilogue, Gemm, Matrix};
use crate::cpu::{ConvolutionShape, Cpu, Element, HalfKernel, Isa, Pool, bf16};
use std::sync::Arc;

/// One [`Gemm`] with f32 arithmetic, and one with emulated tiles for each instruction set with its
/// own packers.
fn gemms() -> (Gemm, Vec<Gemm>) {
    let gemm = |isa| Gemm::new(Cpu { pool: Arc::new(Pool::new(2)), isa, half: HalfKernel::F32 });
    let emulated = |isa| Gemm { half: Some(Kernel::tiles(isa, Tiles::Emulated)), ..gemm(isa) };
    (gemm(Isa::Portable), Isa::ALL.into_iter().filter(|isa| isa.available()).map(emulated).collect())
}

fn noise(len: usize, salt: usize) -> Vec<bf16> {
    (0..len).map(|i| <bf16 as Element>::of((i * 97 + salt) as f32 % 251.0 / 125.0 - 1.0)).collect()
}

fn close(got: &[f32], want: &[f32], what: &str) {
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!((got - want).abs() < 1e-4 * (1.0 + want.abs()), "{what} at {i}: {got}, expected {want}");
    }
}

#[test]
fn emulated_tiles_multiply() {
    let (mut plain, mut tiled) = gemms();
    for (m, n, k) in [(1, 1, 1), (33, 31, 65), (64, 96, 512), (70, 600, 1030), (300, 20, 33)] {
        let (a, b) = (noise(m * k, 1), noise(k * n, 2));
        for (ta, tb) in [(false, false), (true, false), (false, true), (true, true)] {
            let x = if ta { Matrix::new(&a, k, m).t() } else { Matrix::new(&a, m, k) };
            let y = if tb { Matrix::new(&b, n, k).t() } else { Matrix::new(&b, k, n) };
            let mut want = vec![0.5; m * n];
            plain.multiply(x, y, &mut want, Epilogue::Accumulate);
            for gemm in &mut tiled {
                let mut got = vec![0.5; m * n];
                gemm.multiply(x, y, &mut got, Epilogue::Accumulate);
                close(&got, &want, &format!("{m} x {n} x {k}, transposed {ta} {tb}, {:?}", gemm.cpu.isa));
            }
        }
    }
}

#[test]
fn emulated_tiles_convolve() {
    let (mut plain, mut tiled) = gemms();
    for (channels, outputs, kernel, stride) in [(3, 20, 7, 2), (33, 40, 3, 1), (64, 32, 3, 2), (16, 70, 1, 2)] {
        let (batch, height, width) = (2, 9, 11);
        let shape = ConvolutionShape { batch, height, width, channels, outputs, kernel, stride, padding: kernel / 2 };
        let (x, w) = (noise(shape.input_len(), 1), noise(shape.weights_len(), 2));
        let dy = noise(shape.output_len(), 3);
        let all = |gemm: &mut Gemm| {
            let mut y = vec![f32::NAN; dy.len()];
            gemm.convolution(&shape, &x, &w, &mut y, &mut []);
            let mut dx = vec![f32::NAN; x.len()];
            gemm.convolution_input_gradient(&shape, &dy, &w, &mut dx, false, &mut []);
            let mut dw = vec![f32::NAN; w.len()];
            gemm.convolution_weight_gradient(&shape, &dy, &x, &mut dw, false, &mut []);
            [y, dx, dw].concat()
        };
        let want = all(&mut plain);
        for gemm in &mut tiled {
            close(&all(gemm), &want, &format!("{shape:?} {:?}", gemm.cpu.isa));
        }
    }
}
