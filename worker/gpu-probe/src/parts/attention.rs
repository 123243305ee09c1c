//! cuDNN's attention against the CPU, and its speed.

use super::Probe;
use crate::numbers::{pattern, relative_error, short};
use crate::outcome::Outcome;
use half::bf16;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Instant;
use switchyard_cuda::Error;
use switchyard_cuda::attention::Attention;
use switchyard_cuda::cudnn::Cudnn;
use switchyard_cuda::driver::{Buffer, Context};
use switchyard_cuda::kernels::Element;
use switchyard_cuda::kernels::attention::Shape;
use switchyard_cuda::operation::{Limits, Operation, Plan, Planned};

/// Small enough to compute on the CPU.
const CHECKED: Shape = Shape { element: Element::Bf16, batch: 2, context: 128, heads: 2, head_size: 64, causal: true };
/// GPT-2 with 124 million parameters, 8 sequences.
const TIMED: Shape = Shape { batch: 8, context: 1024, heads: 12, ..CHECKED };
/// Shape in a rehearsal.
const SMALL: Shape = Shape { batch: 1, context: 24, head_size: 16, ..CHECKED };

/// The gradient needs 192 MiB at the timed shape.
const LIMITS: Limits = Limits { deterministic: true, workspace_bytes: 256 << 20 };

/// Weights, score gradients and results have 8-bit mantissas.
const LIMIT: f64 = 0.02;

/// Elements of one tensor of shape tokens x heads x head size.
fn elements(shape: &Shape) -> usize {
    shape.batch as usize * shape.context as usize * shape.heads as usize * shape.head_size as usize
}

/// FLOPs of one matrix product of scores, half of which causality saves.
fn product(shape: &Shape) -> f64 {
    elements(shape) as f64 * f64::from(shape.context)
}

/// Device memory of both passes.
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
    fn new(context: &Context, shape: &Shape) -> Result<Tensors, Error> {
        let all = elements(shape);
        let input = |seed, count: usize| {
            let values: Vec<bf16> = (0..count).map(|index| bf16::from_f32(pattern(seed, index))).collect();
            context.upload(&values)
        };
        Ok(Tensors {
            qkv: input(1, 3 * all)?,
            out: context.zeros(2 * all)?,
            saved: context.zeros(4 * all / shape.head_size as usize)?,
            d_out: input(2, all)?,
            d_qkv: context.zeros(6 * all)?,
            scratch: context.zeros(Attention { shape: *shape, backward: true }.scratch_bytes())?,
            workspace: context.allocate(LIMITS.workspace_bytes)?,
        })
    }
}

/// Plans forward and backward.
fn planned(cudnn: &Cudnn, shape: &Shape, on: &Tensors) -> Result<[Planned; 2], Error> {
    let memory = [&on.qkv, &on.out, &on.saved, &on.d_out, &on.d_qkv, &on.scratch].map(Buffer::span);
    let pass = |backward| {
        let plan = Plan::new(cudnn, &Operation::Attention(Attention { shape: *shape, backward }), LIMITS)?;
        let memory = if backward { &memory[..] } else { &memory[..3] };
        Planned::new(&Arc::new(plan), memory, Some(on.workspace.span()))
    };
    Ok([pass(false)?, pass(true)?])
}

/// Errors of results and gradients, and time per pass.
pub(super) fn run(probe: &Probe) -> Result<Value, Outcome> {
    let (context, device) = probe.start()?;
    let cudnn = Cudnn::start(&probe.cudnn()?)?;
    let (checked, timed) = if probe.rehearse { (SMALL, SMALL) } else { (CHECKED, TIMED) };
    let errors = errors(&context, &checked, &cudnn)?;
    let tensors = Tensors::new(&context, &timed)?;
    let start = Instant::now();
    let passes = planned(&cudnn, &timed, &tensors)?;
    let seconds = start.elapsed().as_secs_f64();
    let stream = context.stream()?;
    let Shape { batch, context: tokens, heads, head_size, .. } = timed;
    let mut figures = json!({
        "device": device.name, "batch": batch, "heads": heads, "tokens": tokens, "width": head_size, "causal": true,
        "relativeErrors": errors, "planSeconds": short(seconds),
    });
    // Two matrix products forward; five backward, because it recomputes the scores.
    for ((name, products), pass) in [("forward", 2.0), ("backward", 5.0)].into_iter().zip(&passes) {
        pass.run(&stream)?;
        let seconds = context.time(&stream, 10, || pass.run(&stream))?;
        figures[name] = json!({
            "microseconds": short(seconds * 1e6),
            "TFLOPs": short(products * product(&timed) / seconds / 1e12),
        });
    }
    Ok(figures)
}

/// Relative errors of the result and of the query, key and value gradients.
fn errors(context: &Context, shape: &Shape, cudnn: &Cudnn) -> Result<serde_json::Map<String, Value>, Outcome> {
    let (tensors, reference) = (Tensors::new(context, shape)?, Reference::new(shape));
    let (passes, stream) = (planned(cudnn, shape, &tensors)?, context.stream()?);
    passes.iter().try_for_each(|pass| pass.run(&stream))?;
    stream.synchronize()?;
    let read = |buffer: &Buffer, count| -> Result<Vec<f32>, Error> {
        Ok(buffer.download::<bf16>(0..count)?.iter().map(|value| value.to_f32()).collect())
    };
    let out = read(&tensors.out, elements(shape))?;
    let gradients = read(&tensors.d_qkv, 3 * elements(shape))?;
    let width = shape.heads as usize * shape.head_size as usize;
    let part = |rows: &[f32], part: usize| -> Vec<f32> {
        rows.chunks(3 * width).flat_map(|row| row[part * width..][..width].to_vec()).collect()
    };
    let mut errors = serde_json::Map::new();
    let mut compare = |name: &str, got: &[f32], wanted: &[f32]| {
        let error = relative_error(got, wanted);
        errors.insert(name.to_owned(), short(error).into());
        let text = || format!("relative error {error:e} of {name}, expected at most {LIMIT}");
        // Written so that a NaN fails.
        if error <= LIMIT { Ok(()) } else { Err(Outcome::failed("attention", text())) }
    };
    compare("out", &out, &reference.out)?;
    for (at, name) in ["queries", "keys", "values"].into_iter().enumerate() {
        compare(name, &part(&gradients, at), &part(&reference.d_qkv, at))?;
    }
    Ok(errors)
}

/// Causal attention and its gradients in f32, computed from the definition, in the device's layout.
struct Reference {
    out: Vec<f32>,
    /// Gradients of queries, keys and values, row by row.
    d_qkv: Vec<f32>,
}

impl Reference {
    fn new(shape: &Shape) -> Reference {
        let [batch, heads, tokens, width] =
            [shape.batch, shape.heads, shape.context, shape.head_size].map(|number| number as usize);
        let scale = 1.0 / (width as f32).sqrt();
        let mut reference = Reference { out: vec![0.0; elements(shape)], d_qkv: vec![0.0; 3 * elements(shape)] };
        for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
            let at = |token: usize| ((b * tokens + token) * heads + h) * width;
            let in_rows = |part: usize, token: usize| (((b * tokens + token) * 3 + part) * heads + h) * width;
            let row = |part: usize, token: usize| (0..width).map(move |d| pattern(1, in_rows(part, token) + d));
            let d_row = |token: usize| (0..width).map(move |d| pattern(2, at(token) + d));
            let dot = |a: &mut dyn Iterator<Item = f32>, b: &mut dyn Iterator<Item = f32>| {
                a.zip(b).map(|(a, b)| a * b).sum::<f32>()
            };
            for i in 0..tokens {
                let scores: Vec<f32> = (0..=i).map(|j| scale * dot(&mut row(0, i), &mut row(1, j))).collect();
                let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let powers: Vec<f32> = scores.iter().map(|score| (score - largest).exp()).collect();
                let sum: f32 = powers.iter().sum();
                // dP = dO V^T; dS = P * (dP - rowsum(P * dP)).
                let of_weight: Vec<f32> = (0..=i).map(|j| dot(&mut d_row(i), &mut row(2, j))).collect();
                let mean: f32 = powers.iter().zip(&of_weight).map(|(power, gradient)| power / sum * gradient).sum();
                for j in 0..=i {
                    let weight = powers[j] / sum;
                    let of_score = weight * (of_weight[j] - mean) * scale;
                    for d in 0..width {
                        let part = |part: usize, token: usize| pattern(1, in_rows(part, token) + d);
                        reference.out[at(i) + d] += weight * part(2, j);
                        reference.d_qkv[in_rows(0, i) + d] += of_score * part(1, j);
                        reference.d_qkv[in_rows(1, j) + d] += of_score * part(0, i);
                        reference.d_qkv[in_rows(2, j) + d] += weight * pattern(2, at(i) + d);
                    }
                }
            }
        }
        reference
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `<out, d_out>` is linear in V, so it equals `<dV, V>`; scores are linear in Q and in K, so
    /// `<dQ, Q> = <dK, K>`.
    #[test]
    fn the_gradients_match_the_result() {
        let shape = Shape { batch: 1, context: 5, heads: 2, head_size: 8, ..CHECKED };
        let reference = Reference::new(&shape);
        let output: f32 = reference.out.iter().enumerate().map(|(i, value)| value * pattern(2, i)).sum();
        let width = 2 * 8;
        let inner = |part: usize| -> f32 {
            let rows = reference.d_qkv.iter().enumerate().filter(|(i, _)| i / width % 3 == part);
            rows.map(|(i, gradient)| gradient * pattern(1, i)).sum()
        };
        assert!(output.abs() > 1e-3 && (inner(2) - output).abs() < 1e-5, "{output} and {}", inner(2));
        assert!(inner(0).abs() > 1e-4 && (inner(0) - inner(1)).abs() < 1e-5, "{} and {}", inner(0), inner(1));
    }
}
