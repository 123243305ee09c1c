//! Matrix products versus an f64 reference: every kernel that this CPU has, every format.

use crate::numbers::{bits, cpus, noise};
use crate::tensor::{FORMATS, Tensor, tolerance};
use proptest::prelude::*;
use switchyard_worker::cpu::{Epilogue, Format, Gemm, HalfKernel, Isa, Matrix};

/// A kernel with everything that may affect the bits of its results.
type Named = (Isa, HalfKernel, Gemm);

fn gemms() -> Vec<Named> {
    let mut gemms = Vec::new();
    for half in HalfKernel::ALL.into_iter().filter(|half| half.available()) {
        for mut cpu in cpus() {
            if half == HalfKernel::F32 || cpu.isa == Isa::Avx512 {
                cpu.half = half;
                gemms.push((cpu.isa, half, Gemm::new(cpu)));
            }
        }
    }
    gemms
}

thread_local! {
    static GEMMS: std::cell::RefCell<Vec<Named>> = std::cell::RefCell::new(gemms());
}

/// A product with all its variable properties.
#[derive(Debug, Clone, Copy)]
struct Case {
    m: usize,
    n: usize,
    k: usize,
    transposed: (bool, bool),
    /// Elements between the end of a row and the next row.
    gap: usize,
    epilogue: usize,
    /// Formats of A, B, C and the addend.
    formats: [Format; 4],
}

/// A matrix in memory, and its stride.
fn stored(format: Format, rows: usize, columns: usize, transposed: bool, gap: usize, salt: usize) -> (Tensor, usize) {
    let (r, c) = if transposed { (columns, rows) } else { (rows, columns) };
    (Tensor::of(format, &noise(r * (c + gap), salt)), c + gap)
}

fn matrix(data: &Tensor, rows: usize, columns: usize, transposed: bool, stride: usize) -> Matrix<'_> {
    if transposed {
        Matrix::strided(data.values(), columns, rows, stride).t()
    } else {
        Matrix::strided(data.values(), rows, columns, stride)
    }
}

fn check_product(gemms: &mut [Named], case: Case) {
    let Case { m, n, k, transposed: (ta, tb), gap, epilogue, formats } = case;
    let (a, a_stride) = stored(formats[0], m, k, ta, gap, 1);
    let (b, b_stride) = stored(formats[1], k, n, tb, gap, 2);
    let (before, bias) = (Tensor::of(formats[2], &noise(m * n, 3)), noise(n, 4));
    let addend = Tensor::of(formats[3], &noise(m * n, 5));
    let at = |x: &[f32], t: bool, s: usize, i: usize, j: usize| f64::from(if t { x[j * s + i] } else { x[i * s + j] });
    let (x, y, old, added) = (a.numbers(), b.numbers(), before.numbers(), addend.numbers());
    let mut want = vec![0.0f64; m * n];
    for i in 0..m {
        for j in 0..n {
            let (bias, added) = (f64::from(bias[j]), f64::from(added[i * n + j]));
            let start = [0.0, f64::from(old[i * n + j]), bias, added, bias + added][epilogue];
            want[i * n + j] =
                start + (0..k).map(|p| at(&x, ta, a_stride, i, p) * at(&y, tb, b_stride, p, j)).sum::<f64>();
        }
    }
    let mut first: Option<(Isa, HalfKernel, Vec<u32>)> = None;
    for (isa, half, gemm) in gemms {
        let mut c = before.clone();
        let how = match epilogue {
            0 => Epilogue::Overwrite,
            1 => Epilogue::Accumulate,
            2 => Epilogue::Bias(&bias),
            3 => Epilogue::Matrix(addend.values()),
            _ => Epilogue::BiasAndMatrix(&bias, addend.values()),
        };
        gemm.multiply(matrix(&a, m, k, ta, a_stride), matrix(&b, k, n, tb, b_stride), c.values_mut(), how);
        let c = c.numbers();
        for (index, (&got, &want)) in c.iter().zip(&want).enumerate() {
            let limit = tolerance(formats[2], k, want);
            assert!(
                (f64::from(got) - want).abs() < limit,
                "{isa:?} {half:?} {case:?} at {index}: {got}, expected {want}"
            );
        }
        match &first {
            Some((i, h, want)) if (i, h) == (isa, half) => {
                assert_eq!(want, &bits(&c), "threads change the bits: {isa:?} {half:?} {case:?}");
            }
            _ => first = Some((*isa, *half, bits(&c))),
        }
    }
}

fn format() -> impl Strategy<Value = Format> {
    proptest::sample::select(FORMATS.to_vec())
}

/// All bf16 in a third of the cases, because the bf16 kernels accept nothing else.
fn formats() -> impl Strategy<Value = [Format; 4]> {
    prop_oneof![
        (format(), format(), format(), format()).prop_map(|(a, b, c, d)| [a, b, c, d]),
        Just([Format::F32; 4]),
        (format(), format()).prop_map(|(c, d)| [Format::Bf16, Format::Bf16, c, d]),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn products_of_odd_shapes(
        (m, n, k) in (1usize..70, 1usize..70, 0usize..70),
        transposed: (bool, bool),
        gap in 0usize..3,
        epilogue in 0usize..5,
        formats in formats(),
    ) {
        let case = Case { m, n, k, transposed, gap, epilogue, formats };
        GEMMS.with_borrow_mut(|gemms| check_product(gemms, case));
    }
}

#[test]
fn products_of_larger_shapes() {
    let (f32s, bf16s) = ([Format::F32; 4], [Format::Bf16; 4]);
    let mixed = [Format::F16, Format::Bf16, Format::F16, Format::F32];
    let mut gemms = gemms();
    // Across the boundaries of every blocking level: packed depth, packed rows and columns, staged
    // rows.
    let shapes = [(257, 300, 129), (100, 70, 1100), (500, 1100, 70), (1, 2100, 300), (700, 1, 300), (1100, 40, 600)];
    for (at, (m, n, k)) in shapes.into_iter().enumerate() {
        for (which, transposed) in [(false, false), (true, false), (false, true), (true, true)].into_iter().enumerate()
        {
            let formats = [f32s, bf16s, mixed][(at + which) % 3];
            check_product(&mut gemms, Case { m, n, k, transposed, gap: 0, epilogue: (at + 2 * which) % 5, formats });
        }
    }
}

#[test]
fn a_nan_stays_in_its_row() {
    let (m, n, k) = (37, 41, 300);
    for format in FORMATS {
        for (poison, row, depth) in [(f32::NAN, 36, 299), (f32::INFINITY, 12, 0), (f32::NEG_INFINITY, 0, 150)] {
            let mut a = noise(m * k, 1);
            a[row * k + depth] = poison;
            let (a, b) = (Tensor::of(format, &a), Tensor::of(format, &noise(k * n, 2)));
            for (isa, half, gemm) in &mut gemms() {
                let mut c = Tensor::of(format, &vec![f32::NAN; m * n]);
                let (x, y) = (Matrix::new(a.values(), m, k), Matrix::new(b.values(), k, n));
                gemm.multiply(x, y, c.values_mut(), Epilogue::Overwrite);
                for (i, x) in c.numbers().iter().enumerate() {
                    let expected = if i / n != row {
                        x.is_finite()
                    } else if poison.is_nan() {
                        x.is_nan()
                    } else {
                        x.is_infinite()
                    };
                    assert!(expected, "{format:?} {isa:?} {half:?}: {x} in row {} from {poison} in {row}", i / n);
                }
            }
        }
    }
}

#[test]
fn subnormals_count() {
    let (m, n, k) = (13, 33, 5);
    for (format, small) in [(Format::F32, 3e-40), (Format::Bf16, 3e-40), (Format::F16, 3e-6)] {
        let (a, b) = (Tensor::of(format, &vec![small; m * k]), Tensor::of(format, &vec![1024.0; k * n]));
        let want = f64::from(a.numbers()[0]) * 1024.0 * k as f64;
        for (isa, half, gemm) in &mut gemms() {
            let mut c = vec![f32::NAN; m * n];
            gemm.multiply(Matrix::new(a.values(), m, k), Matrix::new(b.values(), k, n), &mut c, Epilogue::Overwrite);
            // The bf16 instructions flush subnormals to zero.
            let flushed = *half != HalfKernel::F32 && format == Format::Bf16;
            let right = |x: f32| (f64::from(x) - want).abs() < 1e-6 * want || flushed && x == 0.0;
            assert!(c.iter().all(|&x| right(x)), "{format:?} {isa:?} {half:?}: {} instead of {want}", c[0]);
        }
    }
}
