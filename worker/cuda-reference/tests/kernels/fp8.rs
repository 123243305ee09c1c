use super::{Counts, Device, assert_minimal_traffic, compile, line, matrix, number, numbers, rows, run, values};
use half::{bf16, f16};
use switchyard_cuda::kernels::fp8::{Fp8, Quantization};
use switchyard_cuda::kernels::{Element, Rows};
use switchyard_cuda_reference::fp8::{self, E4M3};

const BLOCKS: u32 = 3;

fn largest(to: Fp8) -> f32 {
    match to {
        Fp8::E4m3 => 448.0,
        Fp8::E5m2 => 57344.0,
    }
}

/// The largest power of two that keeps all values within `largest`, found by trial.
fn factor(numbers: &[f64], largest: f32) -> f64 {
    let most = numbers.iter().fold(0.0f64, |most, number| most.max(number.abs()));
    (-126..=126).rev().map(|power| 2f64.powi(power)).find(|factor| most * factor <= f64::from(largest)).unwrap()
}

/// FP8 values, the inverse of their scale, and the costs of both kernels.
fn quantized<T: super::Number>(
    rows: Rows,
    x: &[T],
    to: Fp8,
    is_flipped: bool,
    seed: u64,
) -> (Vec<u8>, f32, [Counts; 2]) {
    let count = x.len() as u32 / rows.pitch;
    let quantization = Quantization::new(rows, count, to).unwrap();
    let module = compile(&quantization.program());
    let mut device = Device::default();
    let (x_at, y_at) = (device.upload("x", x), device.allocate("y", quantization.bytes()));
    let partial = device.allocate("partial", quantization.partial_bytes(BLOCKS));
    let inverse = device.allocate("inverse", 4);
    let maxima = quantization.maxima(BLOCKS, x_at, partial).unwrap();
    let quantize = match is_flipped {
        false => quantization.quantize(BLOCKS, x_at, partial, y_at, inverse),
        true => quantization.transposed(BLOCKS, x_at, partial, y_at, inverse),
    };
    let counts = [maxima, quantize.unwrap()].map(|call| run(&mut device, &module, &call, seed));
    (device.download(y_at), device.download::<f32>(inverse)[0], counts)
}

fn check<T: super::Number>((width, pitch, count): (u32, u32, usize), to: Fp8, scale: f32) {
    let rows = Rows { pitch, ..rows::<T>(width) };
    let x = matrix::<T>(rows, count, |at| number(7, at) * scale);
    let numbers = values::<T>(rows, &x);
    let format = fp8::Fp8::from(to);
    let factor = factor(&numbers.concat(), largest(to));
    let wanted: Vec<Vec<u8>> =
        numbers.iter().map(|row| row.iter().map(|x| format.encoded((x * factor) as f32)).collect()).collect();
    let flipped = (0..width as usize).flat_map(|column| wanted.iter().map(move |row| row[column])).collect();
    for (is_flipped, wanted) in [(false, wanted.concat()), (true, flipped)] {
        for seed in 0..super::SEEDS {
            let (got, inverse, _) = quantized(rows, &x, to, is_flipped, seed);
            assert_eq!((f64::from(inverse), got == wanted), (1.0 / factor, true), "{width} x {count}, {to:?}");
        }
    }
}

#[test]
fn values_are_quantized_with_the_largest_scale_that_does_not_clip() {
    check::<bf16>((16, 16, 16), Fp8::E4m3, 1.0);
    check::<bf16>((112, 120, 48), Fp8::E4m3, 3e-5);
    check::<bf16>((112, 112, 144), Fp8::E5m2, 1e-7);
    check::<f16>((48, 48, 80), Fp8::E5m2, 6e4);
    check::<bf16>((32, 32, 16), Fp8::E4m3, 0.0);
    check::<bf16>((32, 32, 16), Fp8::E5m2, 1e-38);
}

#[test]
fn non_finite_values_stay_non_finite() {
    let rows = rows::<bf16>(16);
    let mut x: Vec<bf16> = numbers(1, 256, 1.0).into_iter().map(bf16::from_f32).collect();
    x[37] = bf16::NAN;
    let (got, inverse, _) = quantized(rows, &x, Fp8::E4m3, false, 0);
    assert!(inverse.is_finite() && E4M3.decoded(got[37]).is_nan());
    assert_eq!(got.iter().filter(|bits| E4M3.decoded(**bits).is_nan()).count(), 1);
    x[37] = bf16::NEG_INFINITY;
    let (_, inverse, _) = quantized(rows, &x, Fp8::E4m3, true, 0);
    assert!(inverse.is_infinite(), "{inverse}");
}

#[test]
fn both_passes_move_everything_once() {
    let (rows, count) = (rows::<bf16>(768), 128);
    let x: Vec<bf16> = numbers(3, 768 * count, 1.0).into_iter().map(bf16::from_f32).collect();
    let mut table = String::new();
    for (is_flipped, name) in [(false, "quantize"), (true, "quantize_transposed")] {
        let (.., [maxima, quantize]) = quantized(rows, &x, Fp8::E4m3, is_flipped, 0);
        assert_minimal_traffic("maxima", &maxima, &[("x", [2 * x.len(), 0])]);
        assert_minimal_traffic(name, &quantize, &[("x", [2 * x.len(), 0]), ("y", [0, x.len()])]);
        if !is_flipped {
            table += &line("maxima, bf16 128 x 768", &maxima);
        }
        table += &line(&format!("{name}, bf16 128 x 768"), &quantize);
    }
    insta::assert_snapshot!("fp8", table);
}

#[test]
fn unsupported_shapes_are_refused() {
    let rows = |element, width: u32| Rows { element, width, pitch: width.next_multiple_of(16) };
    for (of, count) in [
        (rows(Element::F32, 16), 16),
        (rows(Element::Bf16, 24), 16),
        (rows(Element::Bf16, 16), 0),
        (rows(Element::Bf16, 16), 8),
    ] {
        let text = Quantization::new(of, count, Fp8::E4m3).unwrap_err().to_string();
        assert!(text.starts_with("quantize: ") && text.contains("expected multiples of 16, 16 bits"), "{text}");
    }
    let quantization = Quantization::new(rows(Element::Bf16, 16), 16, Fp8::E4m3).unwrap();
    let mut device = Device::default();
    let [small, large] = [255, 512].map(|bytes| device.allocate("memory", bytes));
    let text = quantization.quantize(1, large, large, small, large).unwrap_err().to_string();
    assert_eq!(text, "quantize: y of 255 bytes, expected at least 256");
    let text = quantization.maxima(1, small, large).unwrap_err().to_string();
    assert_eq!(text, "maxima: x of 255 bytes, expected at least 512");
}
