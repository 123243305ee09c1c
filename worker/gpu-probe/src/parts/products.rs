//! Matrix products at the shapes of two GPT blocks.

use super::{Probe, gather};
use crate::numbers::{pattern, places, relative_error, short};
use crate::outcome::Outcome;
use crate::peaks::peak;
use half::bf16;
use serde_json::{Value, json};
use switchyard_cuda::Error;
use switchyard_cuda::cublaslt::{CublasLt, Precision, Product};
use switchyard_cuda::driver::{Buffer, Context};
use switchyard_cuda::find::CUBLASLT;

/// Tokens of a micro-batch.
const TOKENS: usize = 8192;
/// Widths of the blocks: GPT-2 of 124 million parameters, and a model of about 7 billion.
const WIDTHS: [usize; 2] = [768, 4096];
/// NVIDIA recommends 32 MiB for Hopper.
const WORKSPACE_BYTES: usize = 32 << 20;
const ALGORITHMS: usize = 8;

/// Output and input features of the linear layers of a block: query, key and value; projection; up; down.
fn layers(width: usize) -> [(usize, usize); 4] {
    [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
}

pub(super) fn run(probe: &Probe) -> Result<Value, Outcome> {
    let (context, device) = probe.start()?;
    let library = probe.places.open(&CUBLASLT)?.library;
    let mut cublaslt = CublasLt::new(&library)?;
    cublaslt.start()?;
    let workspace = context.zeros(WORKSPACE_BYTES)?;
    let mut rows = Vec::new();
    for precision in [Precision::Bf16, Precision::Tf32] {
        let largest = 4 * WIDTHS[1];
        let x = upload(&context, precision, 1, TOKENS * largest)?;
        let w = upload(&context, precision, 2, WIDTHS[1] * largest)?;
        let peak = peak(&device.name, precision);
        for (n, k) in WIDTHS.into_iter().flat_map(layers) {
            let row = json!({"precision": format!("{precision:?}"), "m": TOKENS, "n": n, "k": k});
            let measured = measure(&context, &cublaslt, precision, (n, k), [&x, &w, &workspace]);
            let result = measured.map(|(mut figures, tflops)| {
                figures["shareOfPeak"] = peak.map(|peak| short(tflops / peak)).into();
                figures
            });
            rows.push((row, result));
        }
    }
    gather(json!({"device": device.name}), "products", rows)
}

/// Measures one product; returns the figures, and the TFLOP/s.
fn measure(
    context: &Context,
    cublaslt: &CublasLt,
    precision: Precision,
    (n, k): (usize, usize),
    [x, w, workspace]: [&Buffer<'_>; 3],
) -> Result<(Value, f64), Outcome> {
    let y = context.zeros(TOKENS * n * precision.bytes())?;
    let product = cublaslt.product(precision, [TOKENS, n, k], WORKSPACE_BYTES, ALGORITHMS)?;
    let (algorithm, seconds) = fastest(context, &product, [x, w, &y, workspace])?;
    let error = error(&y, precision, n, k)?;
    let tflops = 2.0 * (TOKENS * n * k) as f64 / seconds / 1e12;
    let figures = json!({
        "microseconds": short(seconds * 1e6),
        "TFLOPs": short(tflops),
        "algorithm": format!("{} of {}", algorithm + 1, product.algorithms()),
        "relativeError": short(error),
    });
    Ok((figures, tflops))
}

fn upload<'a>(context: &'a Context, precision: Precision, seed: u32, len: usize) -> Result<Buffer<'a>, Error> {
    let values = (0..len).map(|index| pattern(seed, index));
    match precision {
        Precision::Bf16 => context.upload(&values.map(bf16::from_f32).collect::<Vec<_>>()),
        Precision::Tf32 => context.upload(&values.collect::<Vec<_>>()),
    }
}

/// The fastest algorithm, which runs last, and its seconds. Algorithms that the device refuses are skipped.
fn fastest(context: &Context, product: &Product<'_>, buffers: [&Buffer<'_>; 4]) -> Result<(usize, f64), Outcome> {
    let mut best: Option<(usize, f64)> = None;
    let mut refused = None;
    for algorithm in 0..product.algorithms() {
        match context.time(10, || product.run(algorithm, buffers)) {
            Ok(seconds) if best.is_none_or(|(_, fastest)| seconds < fastest) => best = Some((algorithm, seconds)),
            Ok(_) => {}
            Err(error) => refused = Some(error),
        }
    }
    let Some(best) = best else {
        return Err(refused.map_or_else(|| Outcome::failed("product", "no algorithm was tried"), Outcome::from));
    };
    product.run(best.0, buffers)?;
    Ok(best)
}

/// Relative error of elements spread over the result.
fn error(y: &Buffer<'_>, precision: Precision, n: usize, k: usize) -> Result<f64, Outcome> {
    let (mut got, mut wanted) = (Vec::new(), Vec::new());
    for place in places(TOKENS * n, 61) {
        got.extend(match precision {
            Precision::Bf16 => y.download::<bf16>(place..place + 1)?.iter().map(|value| value.to_f32()).collect(),
            Precision::Tf32 => y.download::<f32>(place..place + 1)?,
        });
        let (row, column) = (place / n, place % n);
        let sum: f64 = (0..k).map(|i| f64::from(pattern(1, row * k + i)) * f64::from(pattern(2, column * k + i))).sum();
        wanted.push(sum as f32);
    }
    let error = relative_error(&got, &wanted);
    // Eight bits of mantissa in the result; sums are in f32, and the factors are exact.
    let limit = 1.0 / 128.0;
    if error > limit {
        return Err(Outcome::failed(
            "cublasLtMatmul",
            format!("relative error {error:e} at {n} x {k}, expected at most {limit}"),
        ));
    }
    Ok(error)
}
