//! Convolutions and their gradients versus an f64 reference: every kernel that this CPU has, every
//! format.

use crate::numbers::{bits, cpus, noise};
use crate::tensor::{FORMATS, Tensor, tolerance};
use proptest::prelude::*;
use switchyard_worker::cpu::{ConvolutionShape, Format, Gemm, HalfKernel, Isa};

/// Calls `f` with the indices into input, weights and output of each product in the convolution.
fn each_product(shape: &ConvolutionShape, mut f: impl FnMut(usize, usize, usize)) {
    let ConvolutionShape { batch, height, width, channels, outputs, kernel, stride, padding } = *shape;
    for image in 0..batch {
        for (oy, ox) in pairs(shape.output_height(), shape.output_width()) {
            for (ky, kx) in pairs(kernel, kernel) {
                let (y, x) = (oy * stride + ky, ox * stride + kx);
                if y < padding || x < padding || y - padding >= height || x - padding >= width {
                    continue;
                }
                let input = ((image * height + y - padding) * width + x - padding) * channels;
                let output = ((image * shape.output_height() + oy) * shape.output_width() + ox) * outputs;
                for (o, c) in pairs(outputs, channels) {
                    f(input + c, ((o * kernel + ky) * kernel + kx) * channels + c, output + o);
                }
            }
        }
    }
}

fn pairs(a: usize, b: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..a).flat_map(move |i| (0..b).map(move |j| (i, j)))
}

fn check(got: &[f32], want: &[f64], format: Format, k: usize, what: &str) {
    assert_eq!(got.len(), want.len());
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        let limit = tolerance(format, k, want);
        assert!((f64::from(got) - want).abs() < limit, "{what} at {i}: {got}, expected {want}");
    }
}

fn check_convolution(shape: &ConvolutionShape, format: Format) {
    let x = Tensor::of(format, &noise(shape.input_len(), 1));
    let w = Tensor::of(format, &noise(shape.weights_len(), 2));
    let dy = Tensor::of(format, &noise(shape.output_len(), 3));
    let old_dx = Tensor::of(format, &noise(shape.input_len(), 4));
    let old_dw = noise(shape.weights_len(), 5);
    let (xs, ws, dys) = (x.numbers(), w.numbers(), dy.numbers());
    let mut want_y = vec![0.0f64; dys.len()];
    let (mut want_dx, mut want_dw) = (vec![0.0f64; xs.len()], vec![0.0f64; ws.len()]);
    each_product(shape, |i, j, o| {
        want_y[o] += f64::from(xs[i]) * f64::from(ws[j]);
        want_dx[i] += f64::from(dys[o]) * f64::from(ws[j]);
        want_dw[j] += f64::from(dys[o]) * f64::from(xs[i]);
    });
    let sum = |a: &[f64], b: &[f32]| -> Vec<f64> { a.iter().zip(b).map(|(a, &b)| a + f64::from(b)).collect() };
    let (more_dx, more_dw) = (sum(&want_dx, &old_dx.numbers()), sum(&want_dw, &old_dw));
    let taps = shape.kernel * shape.kernel;
    let pixels = shape.batch * shape.output_height() * shape.output_width();
    let mut first: Option<(Isa, HalfKernel, Vec<u32>)> = None;
    for half in HalfKernel::ALL.into_iter().filter(|half| half.available()) {
        for mut cpu in cpus() {
            if half != HalfKernel::F32 && (cpu.isa != Isa::Avx512 || format != Format::Bf16) {
                continue;
            }
            cpu.half = half;
            let isa = cpu.isa;
            let what = format!("{shape:?} {format:?} {isa:?} {half:?}");
            let mut scratch = vec![f32::NAN; shape.scratch_len(&cpu).max(shape.backward_scratch_len(&cpu))];
            let mut gemm = Gemm::new(cpu);
            let mut y = Tensor::of(format, &vec![f32::NAN; want_y.len()]);
            gemm.convolution(shape, x.values(), w.values(), y.values_mut(), &mut scratch);
            check(&y.numbers(), &want_y, format, taps * shape.channels, &format!("y of {what}"));
            let mut dx = Tensor::of(format, &vec![f32::NAN; want_dx.len()]);
            gemm.convolution_input_gradient(shape, dy.values(), w.values(), dx.values_mut(), false, &mut scratch);
            check(&dx.numbers(), &want_dx, format, taps * shape.outputs, &format!("dx of {what}"));
            let mut again = old_dx.clone();
            gemm.convolution_input_gradient(shape, dy.values(), w.values(), again.values_mut(), true, &mut scratch);
            check(&again.numbers(), &more_dx, format, taps * shape.outputs, &format!("more dx of {what}"));
            let mut dw = vec![f32::NAN; want_dw.len()];
            gemm.convolution_weight_gradient(shape, dy.values(), x.values(), &mut dw, false, &mut scratch);
            check(&dw, &want_dw, Format::F32, pixels, &format!("dw of {what}"));
            let mut again = old_dw.clone();
            gemm.convolution_weight_gradient(shape, dy.values(), x.values(), &mut again, true, &mut scratch);
            check(&again, &more_dw, Format::F32, pixels, &format!("more dw of {what}"));
            let all = bits(&[y.numbers(), dx.numbers(), dw].concat());
            match &first {
                Some((i, h, want)) if (*i, *h) == (isa, half) => {
                    assert_eq!(want, &all, "threads change the bits: {what}");
                }
                _ => first = Some((isa, half, all)),
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn convolutions_of_odd_shapes(
        (batch, height, width) in (1usize..3, 1usize..9, 1usize..9),
        (channels, outputs) in (1usize..20, 1usize..20),
        kernel in 1usize..6,
        stride in 1usize..4,
        padding in 0usize..4,
        format in proptest::sample::select(FORMATS.to_vec()),
    ) {
        let shape = ConvolutionShape { batch, height, width, channels, outputs, kernel, stride, padding };
        check_convolution(&shape, format);
    }
}

#[test]
fn convolutions_of_residual_networks() {
    // Stem, 3x3 with whole channel vectors, with stride, shortcut with stride, bottleneck; odd
    // sizes.
    let shapes = [
        (1, 21, 18, 3, 16, 7, 2, 3),
        (2, 9, 8, 3, 33, 3, 1, 1),
        (2, 8, 7, 64, 48, 3, 1, 1),
        (3, 9, 7, 32, 64, 3, 2, 1),
        (2, 8, 9, 48, 32, 1, 2, 0),
        (2, 5, 7, 64, 32, 1, 1, 0),
        (9, 12, 11, 16, 35, 3, 1, 1),
        // Winograd: several blocks of tiles and of depth, edges, incomplete panels, other paddings.
        (3, 17, 12, 16, 48, 3, 1, 1),
        (2, 33, 26, 32, 16, 3, 1, 1),
        (5, 10, 9, 80, 112, 3, 1, 0),
        (4, 9, 7, 48, 16, 3, 1, 2),
    ];
    for (batch, height, width, channels, outputs, kernel, stride, padding) in shapes {
        let shape = ConvolutionShape { batch, height, width, channels, outputs, kernel, stride, padding };
        for format in FORMATS {
            check_convolution(&shape, format);
        }
    }
}

/// A convolution is linear in the input and in the weights, which determines the gradients in every
/// direction: `<dy, conv(u, w)> = <dx, u>` and `<dy, conv(x, v)> = <dw, v>`.
#[test]
fn gradients_agree_with_directional_derivatives() {
    let strided = ConvolutionShape {
        batch: 2,
        height: 17,
        width: 15,
        channels: 24,
        outputs: 40,
        kernel: 3,
        stride: 2,
        padding: 1,
    };
    let filtered = ConvolutionShape { channels: 32, outputs: 48, stride: 1, ..strided };
    [strided, filtered].iter().for_each(check_directions);
}

fn check_directions(shape: &ConvolutionShape) {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>();
    let (x, w, dy) = (noise(shape.input_len(), 1), noise(shape.weights_len(), 2), noise(shape.output_len(), 3));
    let (u, v) = (noise(shape.input_len(), 4), noise(shape.weights_len(), 5));
    for cpu in cpus() {
        let mut scratch = vec![f32::NAN; shape.scratch_len(&cpu).max(shape.backward_scratch_len(&cpu))];
        let mut gemm = Gemm::new(cpu);
        let (mut dx, mut dw) = (vec![f32::NAN; x.len()], vec![f32::NAN; w.len()]);
        gemm.convolution_input_gradient(shape, &dy, &w, &mut dx, false, &mut scratch);
        gemm.convolution_weight_gradient(shape, &dy, &x, &mut dw, false, &mut scratch);
        let mut y = vec![f32::NAN; dy.len()];
        for (input, weights, slope) in [(&u, &w, dot(&dx, &u)), (&x, &v, dot(&dw, &v))] {
            gemm.convolution(shape, input, weights, &mut y, &mut scratch);
            let want = dot(&dy, &y);
            assert!((slope - want).abs() < 1e-5 * dot(&y, &y).sqrt() * dot(&dy, &dy).sqrt(), "{slope} and {want}");
        }
    }
}
