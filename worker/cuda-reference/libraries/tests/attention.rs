//! Attention as cuDNN graphs through the engine's calls, compared with `f64`; and misuse that must
//! be caught.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used)]

mod child;
mod device;
mod formats;

use child::misuse_test;
use device::{Gpu, number, places};
use formats::{download, round, upload};
use std::sync::Arc;
use switchyard_cuda::attention::Attention;
use switchyard_cuda::cudnn::Cudnn;
use switchyard_cuda::driver::{Buffer, Span};
use switchyard_cuda::find::CUDNN;
use switchyard_cuda::kernels::Element;
use switchyard_cuda::kernels::attention::Shape;
use switchyard_cuda::operation::{Limits, Operation, Plan, Planned};

const LIMITS: Limits = Limits { deterministic: true, workspace_bytes: 1 << 20 };

/// Sequences, tokens, heads and head size.
const SIZES: [[u32; 4]; 4] = [[2, 7, 3, 8], [1, 16, 2, 16], [3, 1, 1, 24], [1, 33, 2, 8]];

fn shape([batch, context, heads, head_size]: [u32; 4], element: Element, causal: bool) -> Shape {
    Shape { element, batch, context, heads, head_size, causal }
}

fn cudnn() -> Cudnn {
    Cudnn::start(&places().open(&CUDNN).unwrap().library).unwrap()
}

/// Queries, keys and values of one head, as rows.
struct Head {
    parts: [Vec<Vec<f64>>; 3],
}

fn head(shape: &Shape, rows: &[f32], parts: usize, batch: usize, head: usize) -> Vec<Vec<Vec<f64>>> {
    let [context, heads, size] = [shape.context, shape.heads, shape.head_size].map(|number| number as usize);
    let row = |part: usize, token: usize| {
        let start = ((batch * context + token) * parts + part) * heads * size + head * size;
        rows[start..start + size].iter().map(|number| f64::from(*number)).collect()
    };
    (0..parts).map(|part| (0..context).map(|token| row(part, token)).collect()).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// One head by definition.
struct Exact {
    out: Vec<Vec<f64>>,
    saved: Vec<f64>,
    d_parts: [Vec<Vec<f64>>; 3],
}

impl Head {
    fn exact(&self, causal: bool, d_out: &[Vec<f64>]) -> Exact {
        let [queries, keys, values] = &self.parts;
        let (context, size) = (queries.len(), queries[0].len());
        let scale = 1.0 / (size as f64).sqrt();
        let zeros = || vec![vec![0.0; size]; context];
        let mut exact = Exact { out: zeros(), saved: Vec::new(), d_parts: [zeros(), zeros(), zeros()] };
        for i in 0..context {
            let seen = if causal { i + 1 } else { context };
            let scores: Vec<f64> = keys[..seen].iter().map(|key| scale * dot(&queries[i], key)).collect();
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let saved = largest + scores.iter().map(|score| (score - largest).exp()).sum::<f64>().ln();
            let weights: Vec<f64> = scores.iter().map(|score| (score - saved).exp()).collect();
            exact.saved.push(saved);
            let d_weights: Vec<f64> = values[..seen].iter().map(|value| dot(&d_out[i], value)).collect();
            let mean = dot(&weights, &d_weights);
            for j in 0..seen {
                let d_score = scale * weights[j] * (d_weights[j] - mean);
                for d in 0..size {
                    exact.out[i][d] += weights[j] * values[j][d];
                    exact.d_parts[0][i][d] += d_score * keys[j][d];
                    exact.d_parts[1][j][d] += d_score * queries[i][d];
                    exact.d_parts[2][j][d] += weights[j] * d_out[i][d];
                }
            }
        }
        exact
    }
}

/// Memory of both passes.
struct Tensors {
    qkv: Buffer,
    out: Buffer,
    saved: Buffer,
    d_out: Buffer,
    d_qkv: Buffer,
    scratch: Buffer,
    workspace: Buffer,
}

impl Tensors {
    fn new(gpu: &Gpu, shape: &Shape) -> Tensors {
        let backward = Attention { shape: *shape, backward: true };
        let allocate = |bytes: usize| gpu.context.allocate(bytes).unwrap();
        let all = elements(shape);
        let input = |seed, count| {
            let numbers: Vec<f32> = (0..count).map(|at| 2.0 * number(seed, at)).collect();
            upload(gpu, shape.element, &numbers)
        };
        Tensors {
            qkv: input(1, 3 * all),
            out: allocate(2 * all),
            saved: allocate(4 * all / shape.head_size as usize),
            d_out: input(2, all),
            d_qkv: allocate(6 * all),
            scratch: allocate(backward.scratch_bytes()),
            workspace: allocate(256),
        }
    }

    /// The memory of a pass.
    fn spans(&self, backward: bool) -> Vec<Span> {
        let all = [&self.qkv, &self.out, &self.saved, &self.d_out, &self.d_qkv, &self.scratch].map(Buffer::span);
        all[..if backward { 6 } else { 3 }].to_vec()
    }
}

/// Elements of one tensor of shape tokens x heads x head size.
fn elements(shape: &Shape) -> usize {
    (shape.batch * shape.context * shape.heads * shape.head_size) as usize
}

/// Plans a pass.
fn plan(cudnn: &Cudnn, attention: Attention, on: &Tensors) -> Planned {
    let plan = Plan::new(cudnn, &Operation::Attention(attention), LIMITS).unwrap();
    Planned::new(&Arc::new(plan), &on.spans(attention.backward), Some(on.workspace.span())).unwrap()
}

#[test]
fn both_passes_match_the_definition() {
    device::on_a_device("both_passes_match_the_definition", &[], || {
        let (gpu, cudnn) = (Gpu::new(), cudnn());
        for sizes in SIZES {
            for (element, causal) in [(Element::Bf16, true), (Element::F16, false), (Element::F16, true)] {
                let shape = shape(sizes, element, causal);
                let on = Tensors::new(&gpu, &shape);
                for backward in [false, true] {
                    plan(&cudnn, Attention { shape, backward }, &on).run(&gpu.stream).unwrap();
                }
                gpu.stream.synchronize().unwrap();
                compare(&shape, &on);
            }
        }
    });
}

fn compare(shape: &Shape, on: &Tensors) {
    let Shape { element, batch, context, heads, causal, .. } = *shape;
    let all = elements(shape);
    let numbers =
        |seed, count: usize| -> Vec<f32> { (0..count).map(|at| round(element, 2.0 * number(seed, at))).collect() };
    let (qkv, d_out) = (numbers(1, 3 * all), numbers(2, all));
    let (out, d_qkv) = (download(&on.out, element, all), download(&on.d_qkv, element, 3 * all));
    let saved = download(&on.saved, Element::F32, all / shape.head_size as usize);
    // Weights, score gradients and results are rounded.
    let allowed = match element {
        Element::Bf16 => 16.0 / 256.0,
        _ => 16.0 / 2048.0,
    };
    for (sequence, at) in (0..batch as usize).flat_map(|b| (0..heads as usize).map(move |h| (b, h))) {
        let of = |rows: &[f32], parts| head(shape, rows, parts, sequence, at);
        let parts = of(&qkv, 3).try_into().unwrap();
        let exact = Head { parts }.exact(causal, &of(&d_out, 1)[0]);
        let first = (sequence * heads as usize + at) * context as usize;
        for (wanted, got) in exact.saved.iter().zip(&saved[first..]) {
            assert!((wanted - f64::from(*got)).abs() < 1e-5, "{shape:?}: {got} instead of {wanted}");
        }
        let mut tensors = vec![("out", exact.out, of(&out, 1).remove(0))];
        let names = ["queries", "keys", "values"];
        let gradients = exact.d_parts.into_iter().zip(of(&d_qkv, 3));
        tensors.extend(names.into_iter().zip(gradients).map(|(name, (wanted, got))| (name, wanted, got)));
        for (name, wanted, got) in tensors {
            for (wanted, got) in wanted.iter().flatten().zip(got.iter().flatten()) {
                assert!((wanted - got).abs() <= allowed, "{shape:?}, {name}: {got} instead of {wanted}");
            }
        }
    }
}

#[test]
fn unsupported_attention_is_refused() {
    device::on_a_device(
        "unsupported_attention_is_refused",
        &[("SWITCHYARD_REFERENCE_FAULT", "cudnn-refused:13")],
        || {
            let (_gpu, cudnn) = (Gpu::new(), cudnn());
            let good = Attention { shape: shape(SIZES[0], Element::Bf16, true), backward: false };
            let refusal = |attention: Attention, limits| {
                Plan::new(&cudnn, &Operation::Attention(attention), limits).map(drop).unwrap_err().to_string()
            };
            let wide = Attention { shape: shape(SIZES[0], Element::F32, true), ..good };
            assert!(refusal(wide, LIMITS).contains("numbers in 32 bits, expected 16"));
            let small = refusal(good, Limits { workspace_bytes: 255, ..LIMITS });
            assert!(small.contains("no engine that is deterministic and exact enough in so much memory"), "{small}");
            // The fault applies to graphs that begin like the gradient.
            let backward = Attention { backward: true, ..good };
            let fault = refusal(backward, LIMITS);
            assert!(fault.contains("injected fault"), "{fault}");
            assert!(Plan::new(&cudnn, &Operation::Attention(good), LIMITS).is_ok());
        },
    );
}

misuse_test! {
    a_gradient_needs_the_saved_tensors_of_forward: "that nobody has written", |is_right| {
        let (gpu, cudnn) = (Gpu::new(), cudnn());
        let shape = shape(SIZES[0], Element::Bf16, true);
        let on = Tensors::new(&gpu, &shape);
        let passes = [false, true].map(|backward| plan(&cudnn, Attention { shape, backward }, &on));
        for pass in &passes[if is_right { 0 } else { 1 }..] {
            pass.run(&gpu.stream).unwrap();
        }
        gpu.context.synchronize().unwrap();
    }

    a_result_must_not_overwrite_queries: "writes what it reads", |is_right| {
        let (gpu, cudnn) = (Gpu::new(), cudnn());
        let shape = shape(SIZES[0], Element::Bf16, true);
        let on = Tensors::new(&gpu, &shape);
        let attention = Attention { shape, backward: false };
        let plan = Arc::new(Plan::new(&cudnn, &Operation::Attention(attention), LIMITS).unwrap());
        let out = if is_right { on.out.span() } else { on.qkv.span() };
        let memory = [on.qkv.span(), out, on.saved.span()];
        let planned = Planned::new(&plan, &memory, Some(on.workspace.span())).unwrap();
        planned.run(&gpu.stream).unwrap();
        gpu.context.synchronize().unwrap();
    }

    two_passes_in_two_streams_must_be_ordered: "with no order between", |is_right| {
        let (gpu, cudnn) = (Gpu::new(), cudnn());
        let shape = shape(SIZES[0], Element::Bf16, true);
        let on = Tensors::new(&gpu, &shape);
        let other = gpu.context.stream().unwrap();
        let forward = plan(&cudnn, Attention { shape, backward: false }, &on);
        forward.run(&gpu.stream).unwrap();
        gpu.stream.synchronize().unwrap();
        forward.run(&gpu.stream).unwrap();
        let stream = if is_right { &gpu.stream } else { &other };
        plan(&cudnn, Attention { shape, backward: true }, &on).run(stream).unwrap();
        gpu.context.synchronize().unwrap();
    }
}
