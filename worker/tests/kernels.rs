//! Kernels against plain double-precision code, on every instruction set this CPU has.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use std::sync::Arc;
use switchyard_worker::cpu::attention::{AttentionForward, AttentionShape, attention, attention_backward};
use switchyard_worker::cpu::{Cpu, Epilogue, Gemm, Isa, Matrix, Pool, ops};

fn cpus() -> Vec<Cpu> {
    let mut cpus = Vec::new();
    for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
        for threads in [1, 3] {
            cpus.push(Cpu { pool: Arc::new(Pool::new(threads)), isa });
        }
    }
    cpus
}

fn noise(len: usize, salt: usize) -> Vec<f32> {
    let mut state = salt as u64 * 7_919 + 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// A product with everything that may vary about it.
#[derive(Debug, Clone, Copy)]
struct Case {
    m: usize,
    n: usize,
    k: usize,
    transposed: (bool, bool),
    /// Floats between the end of a row and the next.
    gap: usize,
    epilogue: usize,
}

fn stored(rows: usize, columns: usize, transposed: bool, gap: usize, salt: usize) -> (Vec<f32>, usize) {
    let (r, c) = if transposed { (columns, rows) } else { (rows, columns) };
    (noise(r * (c + gap), salt), c + gap)
}

fn matrix(data: &[f32], rows: usize, columns: usize, transposed: bool, stride: usize) -> Matrix<'_> {
    if transposed {
        Matrix::strided(data, columns, rows, stride).t()
    } else {
        Matrix::strided(data, rows, columns, stride)
    }
}

fn check_product(gemms: &mut [(Isa, Gemm)], case: Case) {
    let Case { m, n, k, transposed: (ta, tb), gap, epilogue } = case;
    let (a, a_stride) = stored(m, k, ta, gap, 1);
    let (b, b_stride) = stored(k, n, tb, gap, 2);
    let (before, bias, addend) = (noise(m * n, 3), noise(n, 4), noise(m * n, 5));
    let at = |x: &[f32], t: bool, s: usize, i: usize, j: usize| f64::from(if t { x[j * s + i] } else { x[i * s + j] });
    let mut want = vec![0.0f64; m * n];
    for i in 0..m {
        for j in 0..n {
            let mut sum = match epilogue {
                0 => 0.0,
                1 => f64::from(before[i * n + j]),
                2 => f64::from(bias[j]),
                _ => f64::from(bias[j]) + f64::from(addend[i * n + j]),
            };
            for p in 0..k {
                sum += at(&a, ta, a_stride, i, p) * at(&b, tb, b_stride, p, j);
            }
            want[i * n + j] = sum;
        }
    }
    let mut first: Option<(Isa, Vec<u32>)> = None;
    for (isa, gemm) in gemms {
        let mut c = before.clone();
        let how = match epilogue {
            0 => Epilogue::Overwrite,
            1 => Epilogue::Accumulate,
            2 => Epilogue::Bias(&bias),
            _ => Epilogue::BiasAndMatrix(&bias, &addend),
        };
        gemm.multiply(matrix(&a, m, k, ta, a_stride), matrix(&b, k, n, tb, b_stride), &mut c, how);
        let tolerance = 2e-6 * (k as f64).sqrt().max(1.0);
        for (index, (&got, &want)) in c.iter().zip(&want).enumerate() {
            assert!((f64::from(got) - want).abs() < tolerance, "{isa:?} {case:?} at {index}: {got}, expected {want}");
        }
        match &first {
            Some((same, want)) if same == isa => {
                assert_eq!(want, &bits(&c), "threads change the bits: {isa:?} {case:?}")
            }
            _ => first = Some((*isa, bits(&c))),
        }
    }
}

fn gemms() -> Vec<(Isa, Gemm)> {
    cpus().into_iter().map(|cpu| (cpu.isa, Gemm::new(cpu))).collect()
}

thread_local! {
    static GEMMS: std::cell::RefCell<Vec<(Isa, Gemm)>> = std::cell::RefCell::new(gemms());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn products_of_odd_shapes(
        (m, n, k) in (1usize..70, 1usize..70, 1usize..70),
        transposed: (bool, bool),
        gap in 0usize..3,
        epilogue in 0usize..4,
    ) {
        let case = Case { m, n, k, transposed, gap, epilogue };
        GEMMS.with_borrow_mut(|gemms| check_product(gemms, case));
    }
}

#[test]
fn products_of_larger_shapes() {
    let mut gemms = gemms();
    // Across the borders of every blocking: KC, the packed depth, MC and the packed width.
    for (m, n, k) in [(257, 300, 129), (100, 70, 1100), (500, 1100, 70), (1, 2100, 300), (700, 1, 300), (64, 96, 0)] {
        for transposed in [(false, false), (true, false), (false, true), (true, true)] {
            check_product(&mut gemms, Case { m, n, k, transposed, gap: 0, epilogue: (m + k) % 4 });
        }
    }
}

/// Runs `f` on every CPU variant and checks that all give the same bits: row kernels do not depend on the instruction set.
fn same_bits(f: impl Fn(&Cpu) -> Vec<f32>) -> Vec<f32> {
    let results: Vec<Vec<f32>> = cpus().iter().map(&f).collect();
    for (result, cpu) in results.iter().zip(cpus()) {
        assert_eq!(bits(result), bits(&results[0]), "{:?} with {} threads", cpu.isa, cpu.pool.threads());
    }
    results.into_iter().next().unwrap()
}

fn close(got: &[f32], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len());
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        assert!((f64::from(got) - want).abs() <= tolerance * (1.0 + want.abs()), "at {i}: {got}, expected {want}");
    }
}

#[test]
fn softmax_rows_sum_to_one() {
    for (rows, width) in [(1, 1), (70, 33), (33, 300)] {
        let x: Vec<f32> = noise(rows * width, 1).iter().map(|x| x * 8.0).collect();
        let got = same_bits(|cpu| {
            let mut y = x.clone();
            ops::softmax_rows(cpu, &mut y, width);
            y
        });
        let mut want = Vec::new();
        for row in x.chunks(width) {
            let sum: f64 = row.iter().map(|&x| f64::from(x).exp()).sum();
            want.extend(row.iter().map(|&x| f64::from(x).exp() / sum));
        }
        close(&got, &want, 1e-6);
    }
}

#[test]
fn gelu_and_its_gradient() {
    let (rows, width) = (70, 129);
    let x: Vec<f32> = noise(rows * width, 1).iter().map(|x| x * 6.0).collect();
    let value = |x: f64| 0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh());
    let got = same_bits(|cpu| {
        let mut y = vec![0.0; x.len()];
        ops::gelu(cpu, &x, &mut y);
        y
    });
    close(&got, &x.iter().map(|&x| value(f64::from(x))).collect::<Vec<_>>(), 1e-6);
    let dy = noise(x.len(), 2);
    let got = same_bits(|cpu| {
        let mut dx = dy.clone();
        let mut bias = vec![0.5; width];
        ops::gelu_backward(cpu, &x, &mut dx, &mut vec![7.0; ops::partials_len(rows, width)], &mut bias, true);
        dx.extend(bias);
        dx
    });
    let slope = |x: f64| (value(x + 1e-5) - value(x - 1e-5)) / 2e-5;
    let mut want: Vec<f64> = x.iter().zip(&dy).map(|(&x, &dy)| f64::from(dy) * slope(f64::from(x))).collect();
    for j in 0..width {
        want.push(0.5 + (0..rows).map(|r| want[r * width + j]).sum::<f64>());
    }
    close(&got[..x.len()], &want[..x.len()], 2e-6);
    close(&got[x.len()..], &want[x.len()..], 1e-5);
}

#[test]
fn column_sums_of_many_rows() {
    for (rows, width) in [(1, 1), (33, 7), (1000, 100)] {
        let x = noise(rows * width, 1);
        let got = same_bits(|cpu| {
            let mut sums = vec![f32::NAN; width];
            ops::column_sums(cpu, &x, &mut vec![7.0; ops::partials_len(rows, width)], &mut sums, false);
            sums
        });
        let want: Vec<f64> = (0..width).map(|j| (0..rows).map(|r| f64::from(x[r * width + j])).sum()).collect();
        close(&got, &want, 1e-5);
    }
}

#[test]
fn embeddings_gather_and_scatter() {
    let (width, vocabulary, context, rows) = (70, 5, 20, 40);
    let inputs: Vec<u16> = (0..rows).map(|r| (r * r % vocabulary) as u16).collect();
    let (tokens, positions) = (noise(vocabulary * width, 1), noise(context * width, 2));
    let dx = noise(rows * width, 3);
    let got = same_bits(|cpu| {
        let mut x = vec![0.0; rows * width];
        ops::embed(cpu, &inputs, &tokens, &positions, width, &mut x);
        let mut d_tokens = vec![0.0; vocabulary * width];
        ops::embed_backward(cpu, &inputs, &dx, width, &mut d_tokens);
        let mut d_positions = vec![9.0; context * width];
        ops::position_backward(cpu, &dx, width, &mut d_positions, false);
        x.extend(d_tokens);
        x.extend(d_positions);
        x
    });
    let mut want = vec![0.0f64; (rows + vocabulary + context) * width];
    for r in 0..rows {
        let token = usize::from(inputs[r]);
        for i in 0..width {
            want[r * width + i] = f64::from(tokens[token * width + i]) + f64::from(positions[r % context * width + i]);
            want[(rows + token) * width + i] += f64::from(dx[r * width + i]);
            want[(rows + vocabulary + r % context) * width + i] += f64::from(dx[r * width + i]);
        }
    }
    close(&got, &want, 1e-5);
}

/// Attention of one head in double precision: (output, gradients of q, k, v).
type Rows = Vec<Vec<f64>>;

fn plain_attention(q: &Rows, k: &Rows, v: &Rows, d_out: &Rows) -> (Rows, Rows, Rows, Rows) {
    let (t, size) = (q.len(), q[0].len());
    let scale = 1.0 / (size as f64).sqrt();
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let zeros = vec![vec![0.0; size]; t];
    let (mut out, mut dq, mut dk, mut dv) = (zeros.clone(), zeros.clone(), zeros.clone(), zeros);
    for i in 0..t {
        let e: Vec<f64> = (0..=i).map(|j| (scale * dot(&q[i], &k[j])).exp()).collect();
        let sum: f64 = e.iter().sum();
        let p: Vec<f64> = e.iter().map(|e| e / sum).collect();
        let dp: Vec<f64> = (0..=i).map(|j| dot(&d_out[i], &v[j])).collect();
        let mean: f64 = dot(&p, &dp);
        for j in 0..=i {
            let ds = p[j] * (dp[j] - mean) * scale;
            for x in 0..size {
                out[i][x] += p[j] * v[j][x];
                dv[j][x] += p[j] * d_out[i][x];
                dq[i][x] += ds * k[j][x];
                dk[j][x] += ds * q[i][x];
            }
        }
    }
    (out, dq, dk, dv)
}

#[test]
fn attention_and_its_gradient() {
    for (batch, context, heads, head_size) in [(2, 5, 3, 4), (1, 130, 2, 9), (2, 300, 1, 16)] {
        let shape = AttentionShape { batch, context, heads, head_size };
        let (rows, hidden) = (batch * context, shape.hidden());
        let qkv: Vec<f32> = noise(rows * 3 * hidden, 1).iter().map(|x| x * 2.0).collect();
        let d_out = noise(rows * hidden, 2);
        let run = |cpu: &Cpu| {
            let mut out = vec![f32::NAN; rows * hidden];
            let mut saved = vec![f32::NAN; shape.saved_len()];
            let mut d_qkv = vec![f32::NAN; rows * 3 * hidden];
            let mut scratch = vec![f32::NAN; cpu.pool.threads() * shape.scratch_len()];
            attention(cpu, &shape, &qkv, &mut out, &mut saved, &mut scratch);
            let forward = AttentionForward { qkv: &qkv, out: &out, saved: &saved };
            attention_backward(cpu, &shape, forward, &d_out, &mut d_qkv, &mut scratch);
            out.extend(d_qkv);
            out
        };
        let mut want = vec![0.0f64; rows * 4 * hidden];
        for b in 0..batch {
            for h in 0..heads {
                let take = |data: &[f32], stride: usize, from: usize| -> Rows {
                    let row = |t| &data[(b * context + t) * stride + from + h * head_size..][..head_size];
                    (0..context).map(|t| row(t).iter().map(|&x| f64::from(x)).collect()).collect()
                };
                let (q, k, v) =
                    (take(&qkv, 3 * hidden, 0), take(&qkv, 3 * hidden, hidden), take(&qkv, 3 * hidden, 2 * hidden));
                let (out, dq, dk, dv) = plain_attention(&q, &k, &v, &take(&d_out, hidden, 0));
                for t in 0..context {
                    let row = b * context + t;
                    want[row * hidden + h * head_size..][..head_size].copy_from_slice(&out[t]);
                    for (part, d) in [dq.clone(), dk.clone(), dv.clone()].iter().enumerate() {
                        let start = rows * hidden + row * 3 * hidden + part * hidden + h * head_size;
                        want[start..][..head_size].copy_from_slice(&d[t]);
                    }
                }
            }
        }
        for pair in cpus().chunks(2) {
            let (one, three) = (run(&pair[0]), run(&pair[1]));
            assert_eq!(bits(&one), bits(&three), "threads change the bits");
            close(&one, &want, 2e-5);
        }
    }
}
