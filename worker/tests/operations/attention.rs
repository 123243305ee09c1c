//! Attention and its gradient versus an f64 reference: every kernel that this CPU has, every
//! format.

use crate::numbers::{bits, cpus, noise};
use switchyard_worker::cpu::attention::{AttentionForward, AttentionShape, attention, attention_backward};
use switchyard_worker::cpu::{Cpu, Element, bf16, f16};

/// Rows of one head in f64.
type Rows = Vec<Vec<f64>>;

fn plain_attention(q: &Rows, k: &Rows, v: &Rows, d_out: &Rows, causal: bool) -> (Rows, Rows, Rows, Rows) {
    let (t, size) = (q.len(), q[0].len());
    let scale = 1.0 / (size as f64).sqrt();
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let zeros = vec![vec![0.0; size]; t];
    let (mut out, mut dq, mut dk, mut dv) = (zeros.clone(), zeros.clone(), zeros.clone(), zeros);
    for i in 0..t {
        let seen = if causal { i + 1 } else { t };
        let e: Vec<f64> = (0..seen).map(|j| (scale * dot(&q[i], &k[j])).exp()).collect();
        let sum: f64 = e.iter().sum();
        let p: Vec<f64> = e.iter().map(|e| e / sum).collect();
        let dp: Vec<f64> = (0..seen).map(|j| dot(&d_out[i], &v[j])).collect();
        let mean: f64 = dot(&p, &dp);
        for j in 0..seen {
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

/// Output and gradients as the kernels compute them.
fn computed<T: Element>(cpu: &Cpu, shape: &AttentionShape, qkv: &[T], d_out: &[T]) -> (Vec<T>, Vec<T>) {
    let (mut out, mut d_qkv) = (vec![T::of(f32::NAN); d_out.len()], vec![T::of(f32::NAN); qkv.len()]);
    let mut saved = vec![f32::NAN; shape.saved_len()];
    let mut scratch = vec![f32::NAN; cpu.pool.threads() * shape.scratch_len()];
    attention(cpu, shape, qkv, &mut out, &mut saved, &mut scratch);
    let forward = AttentionForward { qkv, out: &out, saved: &saved };
    attention_backward(cpu, shape, forward, d_out, &mut d_qkv, &mut scratch);
    (out, d_qkv)
}

/// The same in f64.
fn plain(shape: &AttentionShape, qkv: &[f64], d_out: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let AttentionShape { batch, context, heads, head_size, causal } = *shape;
    let hidden = shape.hidden();
    let (mut all_out, mut d_qkv) = (vec![0.0; d_out.len()], vec![0.0; qkv.len()]);
    for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
        let place = |t: usize, stride: usize, from: usize| (b * context + t) * stride + from + h * head_size;
        let take = |data: &[f64], stride: usize, from: usize| -> Rows {
            (0..context).map(|t| data[place(t, stride, from)..][..head_size].to_vec()).collect()
        };
        let [q, k, v] = [0, 1, 2].map(|part| take(qkv, 3 * hidden, part * hidden));
        let (out, dq, dk, dv) = plain_attention(&q, &k, &v, &take(d_out, hidden, 0), causal);
        for t in 0..context {
            all_out[place(t, hidden, 0)..][..head_size].copy_from_slice(&out[t]);
            for (part, d) in [&dq, &dk, &dv].into_iter().enumerate() {
                d_qkv[place(t, 3 * hidden, part * hidden)..][..head_size].copy_from_slice(&d[t]);
            }
        }
    }
    (all_out, d_qkv)
}

fn check<T: Element>(unit: f64) {
    for (batch, context, heads, head_size) in [(2, 5, 3, 4), (1, 130, 2, 9), (2, 300, 1, 16), (1, 1, 2, 3)] {
        for causal in [true, false] {
            let shape = AttentionShape { batch, context, heads, head_size, causal };
            let (rows, hidden) = (batch * context, shape.hidden());
            let qkv: Vec<T> = noise(rows * 3 * hidden, 1).iter().map(|x| T::of(x * 2.0)).collect();
            let d_out: Vec<T> = noise(rows * hidden, 2).iter().map(|&x| T::of(x)).collect();
            let wide = |x: &[T]| -> Vec<f64> { x.iter().map(|x| f64::from(x.get())).collect() };
            let (want_out, want_d) = plain(&shape, &wide(&qkv), &wide(&d_out));
            for threads in cpus().chunks(3) {
                let results = [&threads[0], &threads[2]].map(|cpu| computed(cpu, &shape, &qkv, &d_out));
                let [one, three] =
                    results.map(|(out, d)| [out, d].concat().iter().map(|x| x.get()).collect::<Vec<_>>());
                assert_eq!(bits(&one), bits(&three), "threads change the bits");
                for (i, (&got, want)) in one.iter().zip(want_out.iter().chain(&want_d)).enumerate() {
                    // Backward starts from the rounded output, so an error of one ulp there
                    // propagates to everything that follows.
                    let limit = (2e-5 + unit) * (1.0 + want.abs());
                    let isa = threads[0].isa;
                    assert!((f64::from(got) - want).abs() <= limit, "{shape:?} {isa:?} at {i}: {got}, expected {want}");
                }
            }
        }
    }
}

#[test]
fn attention_and_its_gradient_in_f32() {
    check::<f32>(0.0);
}

#[test]
fn attention_and_its_gradient_in_bf16() {
    check::<bf16>(1.0 / 128.0);
}

#[test]
fn attention_and_its_gradient_in_f16() {
    check::<f16>(1.0 / 1024.0);
}
