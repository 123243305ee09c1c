use super::{Device, Module, Number, assert_close, assert_minimal_traffic, compile, line, number, run};
use half::{bf16, f16};
use switchyard_cuda::kernels::Element;
use switchyard_cuda::kernels::attention::{Attention, Backward, Shape};
use switchyard_cuda_reference::Counts;

/// Shared memory per block on an H200.
const SHARED_BYTES: u32 = 232_448;

fn shape<T: Number>([batch, context]: [u32; 2], [heads, head_size]: [u32; 2], causal: bool) -> Shape {
    Shape { element: T::ELEMENT, batch, context, heads, head_size, causal }
}

fn what<T: Number>(shape: Shape) -> String {
    let Shape { batch, context, heads, head_size, causal, .. } = shape;
    format!("{} {batch} x {context}, {heads} heads of {head_size}{}", T::NAME, if causal { ", causal" } else { "" })
}

/// Queries, keys and values up to `largest`, and the output gradient.
fn inputs<T: Number>(shape: Shape, largest: f32) -> (Vec<T>, Vec<T>) {
    let len = (shape.batch * shape.context * shape.heads * shape.head_size) as usize;
    let qkv = (0..3 * len).map(|index| T::of(largest * number(1, index))).collect();
    (qkv, (0..len).map(|index| T::of(number(2, index))).collect())
}

struct Exact {
    out: Vec<f64>,
    /// Log-sum-exp of the scores.
    saved: Vec<f64>,
    d_qkv: Vec<f64>,
}

/// Computed by definition. `given` is the output that backward reads.
fn exact(shape: Shape, (qkv, d_out): (&[f64], &[f64]), given: &[f64]) -> Exact {
    let [batch, context, heads, size] =
        [shape.batch, shape.context, shape.heads, shape.head_size].map(|size| size as usize);
    let hidden = heads * size;
    let [out, d_qkv] = [d_out.len(), qkv.len()].map(|len| vec![0.0; len]);
    let mut exact = Exact { out, saved: vec![0.0; batch * heads * context], d_qkv };
    let scale = 1.0 / (size as f64).sqrt();
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let add = |to: &mut [f64], factor: f64, row: &[f64]| to.iter_mut().zip(row).for_each(|(to, x)| *to += factor * x);
    for (sequence, head) in (0..batch).flat_map(|sequence| (0..heads).map(move |head| (sequence, head))) {
        let at = |part: usize, token: usize| (sequence * context + token) * 3 * hidden + part * hidden + head * size;
        let row = |part: usize, token: usize| &qkv[at(part, token)..at(part, token) + size];
        for query in 0..context {
            let to = (sequence * context + query) * hidden + head * size;
            let seen = if shape.causal { query + 1 } else { context };
            let scores: Vec<f64> = (0..seen).map(|key| scale * dot(row(0, query), row(1, key))).collect();
            let largest = scores.iter().copied().fold(f64::MIN, f64::max);
            let sum: f64 = scores.iter().map(|score| (score - largest).exp()).sum();
            exact.saved[(sequence * heads + head) * context + query] = largest + sum.ln();
            let dy = &d_out[to..to + size];
            let mean = dot(&given[to..to + size], dy);
            for (key, score) in scores.into_iter().enumerate() {
                let weight = (score - largest).exp() / sum;
                let d_score = weight * (dot(dy, row(2, key)) - mean) * scale;
                add(&mut exact.out[to..to + size], weight, row(2, key));
                add(&mut exact.d_qkv[at(0, query)..], d_score, row(1, key));
                add(&mut exact.d_qkv[at(1, key)..], d_score, row(0, query));
                add(&mut exact.d_qkv[at(2, key)..], weight, dy);
            }
        }
    }
    exact
}

/// Results and costs of a run: forward, gradients of queries, and of keys and values.
struct Output {
    out: Vec<f64>,
    saved: Vec<f64>,
    d_qkv: Vec<f64>,
    counts: [Counts; 3],
}

fn run_case<T: Number>(module: &Module, shape: Shape, (qkv, d_out): (&[T], &[T]), most: u32, seed: u64) -> Output {
    let attention = Attention::new(shape).unwrap();
    let mut device = Device::default();
    let (out, d_qkv) = (device.allocate("out", size_of_val(d_out)), device.allocate("d_qkv", size_of_val(qkv)));
    let [saved, means] = ["saved", "means"].map(|name| device.allocate(name, attention.saved_bytes()));
    let (qkv, d_out) = (device.upload("qkv", qkv), device.upload("d_out", d_out));
    let forward = attention.forward(most, SHARED_BYTES, qkv, out, saved).unwrap();
    let on = Backward { qkv, out, saved, d_out, means, d_qkv };
    let [queries, keys] = attention.backward(most, SHARED_BYTES, on).unwrap();
    let counts = [forward, queries, keys].map(|call| run(&mut device, module, &call, seed));
    let wide = |span| device.download::<T>(span).into_iter().map(T::get).collect::<Vec<f64>>();
    let saved = device.download::<f32>(saved).into_iter().map(f64::from).collect();
    Output { out: wide(out), saved, d_qkv: wide(d_qkv), counts }
}

/// Allows one rounding of the result, and an f32 error relative to the largest one.
fn assert_near<T: Number>(what: &str, got: &[f64], wanted: &[f64]) {
    let largest = wanted.iter().fold(1.0, |most: f64, value| most.max(value.abs()));
    assert_close(what, got, wanted, 1.01 * T::ROUNDING, 4e-6 * largest + T::NEAR_ZERO);
}

fn check<T: Number>(shape: Shape, largest: f32) {
    let module = compile(&Attention::new(shape).unwrap().program());
    let (qkv, d_out) = inputs::<T>(shape, largest);
    let wide = |numbers: &[T]| numbers.iter().map(|number| number.get()).collect::<Vec<f64>>();
    let first = run_case(&module, shape, (&qkv, &d_out), 3, 0);
    let wanted = exact(shape, (&wide(&qkv), &wide(&d_out)), &first.out);
    let what = what::<T>(shape);
    assert_near::<T>(&format!("{what}: out"), &first.out, &wanted.out);
    assert_close(&format!("{what}: saved"), &first.saved, &wanted.saved, 1e-6, 4e-6);
    assert_near::<T>(&format!("{what}: d_qkv"), &first.d_qkv, &wanted.d_qkv);
    // Neither the order of blocks and warps nor their number may change any bit.
    for (most, seed) in [(3, 1), (1, 2)] {
        let got = run_case(&module, shape, (&qkv, &d_out), most, seed);
        assert_eq!((&got.out, &got.saved, &got.d_qkv), (&first.out, &first.saved, &first.d_qkv), "{what}");
    }
}

#[test]
fn short_and_odd_sequences_are_exact() {
    check::<f32>(shape::<f32>([2, 1], [2, 8], true), 1.0);
    check::<f32>(shape::<f32>([2, 11], [3, 8], true), 2.0);
    check::<bf16>(shape::<bf16>([2, 11], [3, 8], false), 2.0);
    check::<f16>(shape::<f16>([1, 32], [2, 40], true), 2.0);
    check::<f32>(shape::<f32>([2, 33], [1, 4], false), 2.0);
}

#[test]
fn real_head_sizes_are_exact() {
    for causal in [false, true] {
        check::<f32>(shape::<f32>([1, 38], [2, 64], causal), 2.0);
        check::<bf16>(shape::<bf16>([1, 38], [2, 64], causal), 2.0);
        check::<f16>(shape::<f16>([1, 45], [1, 80], causal), 2.0);
        check::<f32>(shape::<f32>([1, 33], [1, 128], causal), 2.0);
    }
}

#[test]
fn sequences_of_several_tiles_are_exact() {
    for causal in [false, true] {
        // More tiles of 32 tokens than blocks, the last one odd.
        check::<bf16>(shape::<bf16>([1, 107], [1, 64], causal), 1.0);
        check::<f16>(shape::<f16>([2, 66], [1, 24], causal), 2.0);
        check::<bf16>(shape::<bf16>([1, 97], [1, 128], causal), 1.0);
    }
    check::<f16>(shape::<f16>([1, 128], [1, 32], true), 2.0);
}

#[test]
fn large_scores_neither_overflow_nor_lose_digits() {
    // Scores up to 2,000 before the exponential.
    check::<bf16>(shape::<bf16>([1, 40], [2, 64], true), 30.0);
    check::<f16>(shape::<f16>([1, 40], [2, 64], false), 30.0);
}

#[test]
fn every_tile_is_moved_once_by_each_block() {
    let mut table = String::new();
    for causal in [false, true] {
        for (context, head_size) in [(96, 64), (64, 128)] {
            table += &costs::<f32>(shape::<f32>([1, context], [2, head_size], causal));
            table += &costs::<bf16>(shape::<bf16>([1, context], [2, head_size], causal));
        }
    }
    insta::assert_snapshot!("attention", table);
}

fn costs<T: Number>(shape: Shape) -> String {
    let module = compile(&Attention::new(shape).unwrap().program());
    let (qkv, d_out) = inputs::<T>(shape, 1.0);
    let got = run_case(&module, shape, (&qkv, &d_out), 4, 0);
    let all = size_of_val(d_out.as_slice());
    // Tiles of 32 rows that the blocks see of the other side.
    let tiles = (shape.context / 32) as usize;
    let seen = if shape.causal { tiles * (tiles + 1) / 2 } else { tiles * tiles };
    let moved = all / tiles * seen;
    let floors: [&[(&str, [usize; 2])]; 3] = [
        &[("qkv", [all + 2 * moved, 0]), ("out", [0, all])],
        &[("qkv", [all + 2 * moved, 0]), ("out", [all, 0]), ("d_out", [all, 0]), ("d_qkv", [0, all])],
        &[("qkv", [2 * all + moved, 0]), ("d_out", [moved, 0]), ("d_qkv", [0, 2 * all])],
    ];
    let names = ["forward", "queries", "keys"];
    let lines = got.counts.iter().zip(floors).zip(names).map(|((counts, floors), name)| {
        let what = format!("attention {name}, {}", what::<T>(shape));
        assert_minimal_traffic(&what, counts, floors);
        line(&what, counts)
    });
    lines.collect()
}

#[test]
fn unsupported_shapes_are_refused() {
    let refused = |head_size: u32, heads: u32| {
        let shape = Shape { element: Element::Bf16, batch: 2, context: 9, heads, head_size, causal: true };
        Attention::new(shape).unwrap_err().to_string()
    };
    let text = "attention: 2 x 9 tokens, 3 heads of 12, expected heads of a multiple of 8, at most 128, and fewer than 2^32 numbers";
    assert_eq!(refused(12, 3), text);
    assert!(refused(136, 1).starts_with("attention: 2 x 9 tokens, 1 heads of 136,"));
    assert!(refused(64, 1 << 24).contains("fewer than 2^32"));
    let shape = shape::<f32>([1, 2], [1, 64], false);
    let attention = Attention::new(shape).unwrap();
    let mut device = Device::default();
    let (small, large) = (device.allocate("small", 7), device.allocate("large", 4096));
    let text = attention.forward(1, SHARED_BYTES, large, large, small).unwrap_err().to_string();
    assert_eq!(text, "attention: saved of 7 bytes, expected at least 8");
    let on = Backward { qkv: large, out: large, saved: large, d_out: large, means: large, d_qkv: large };
    let text = attention.backward(1, 40_000, on).unwrap_err().to_string();
    assert_eq!(text, "attention_keys: 40000 bytes of shared memory, expected at least 43008");
}
