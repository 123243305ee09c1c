//! Matrix products at the shapes of two GPT blocks.

use super::{Probe, gather};
use crate::numbers::{pattern, relative_error, sample_indices, short};
use crate::outcome::Outcome;
use crate::peaks::peak;
use half::{bf16, f16};
use serde_json::{Value, json};
use switchyard_cuda::Error;
use switchyard_cuda::cublaslt::{Arithmetic, CublasLt, Format, Matrix, Planned, Product};
use switchyard_cuda::driver::{Buffer, Context, Span, Stream};
use switchyard_cuda::find::CUBLASLT;

/// NVIDIA's recommendation for Hopper.
pub(super) const WORKSPACE_BYTES: usize = 32 << 20;
const ALGORITHMS: usize = 8;

/// Tokens per micro-batch, and block widths of GPT-2 (124 million parameters) and of a model with
/// about 7 billion.
const SIZES: (usize, [usize; 2]) = (8192, [768, 4096]);
const REHEARSED: (usize, [usize; 2]) = (40, [24, 32]);

/// Output and input features of a block's linear layers: QKV, projection, up, down.
fn layers(width: usize) -> [(usize, usize); 4] {
    [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
}

/// Resources shared by all products of a part.
struct Bench {
    stream: Stream,
    cublaslt: CublasLt,
    workspace: Buffer,
    tokens: usize,
}

pub(super) fn run(probe: &Probe) -> Result<Value, Outcome> {
    let (context, device) = probe.start()?;
    let (tokens, widths) = if probe.rehearse { REHEARSED } else { SIZES };
    let bench = Bench {
        stream: context.stream()?,
        cublaslt: CublasLt::start(&probe.places.open(&CUBLASLT)?.library)?,
        workspace: context.allocate(WORKSPACE_BYTES)?,
        tokens,
    };
    let mut rows = Vec::new();
    let peak = peak(&device.name);
    let precisions = [
        ("Bf16", (Format::Bf16, Arithmetic::Ieee), peak.map(|peak| peak.bf16)),
        ("Tf32", (Format::F32, Arithmetic::Tf32), peak.map(|peak| peak.tf32)),
    ];
    for (name, numbers, peak) in precisions {
        let largest = 4 * widths[1];
        let x = upload(&context, numbers.0, 1, tokens * largest)?;
        let w = upload(&context, numbers.0, 2, widths[1] * largest)?;
        for (n, k) in widths.into_iter().flat_map(layers) {
            let row = json!({"precision": name, "m": tokens, "n": n, "k": k});
            let result = bench.measure(numbers, (n, k), [&x, &w]).map(|(mut figures, tflops)| {
                figures["shareOfPeak"] = peak.map(|peak| short(tflops / peak)).into();
                figures
            });
            rows.push((row, result));
        }
    }
    gather(json!({"device": device.name}), "products", rows)
}

impl Bench {
    /// Measures `y = x w^T`; returns the figures, and the TFLOP/s.
    fn measure(
        &self,
        (format, arithmetic): (Format, Arithmetic),
        (n, k): (usize, usize),
        [x, w]: [&Buffer; 2],
    ) -> Result<(Value, f64), Outcome> {
        let y = self.stream.context().allocate(self.tokens * n * format.bytes())?;
        let sides = [x, w, &y].map(|buffer| (buffer, format));
        let planned = plan(&self.cublaslt, sides, [self.tokens, n, k], arithmetic)?;
        let (algorithm, seconds) = fastest(&planned, self.workspace.span(), &self.stream)?;
        // This result is compared below.
        planned.run(algorithm, self.workspace.span(), &self.stream)?;
        let error = error(&y, format, [self.tokens, n, k])?;
        let tflops = 2.0 * (self.tokens * n * k) as f64 / seconds / 1e12;
        let figures = json!({
            "microseconds": short(seconds * 1e6),
            "TFLOPs": short(tflops),
            "algorithm": format!("{} of {}", algorithm + 1, planned.algorithms()),
            "relativeError": short(error),
        });
        Ok((figures, tflops))
    }
}

/// Plans `y = x w^T` of `m` x `k` and `n` x `k` matrices, with several algorithms.
pub(super) fn plan(
    cublaslt: &CublasLt,
    [x, w, y]: [(&Buffer, Format); 3],
    [m, n, k]: [usize; 3],
    arithmetic: Arithmetic,
) -> Result<Planned, Error> {
    let matrix = |(buffer, format): (&Buffer, Format), rows, columns, is_transposed| Matrix {
        memory: buffer.span(),
        format,
        rows,
        columns,
        pitch: columns,
        is_transposed,
    };
    let product = Product {
        left: matrix(x, m, k, false),
        right: matrix(w, n, k, true),
        result: matrix(y, m, n, false),
        addend: None,
        epilogue: None,
        arithmetic,
        scales: None,
    };
    cublaslt.plan(product, WORKSPACE_BYTES, ALGORITHMS)
}

/// The fastest algorithm and its seconds. Algorithms that the device rejects are skipped.
pub(super) fn fastest(planned: &Planned, workspace: Span, stream: &Stream) -> Result<(usize, f64), Outcome> {
    let mut best: Option<(usize, f64)> = None;
    let mut refused = None;
    for algorithm in 0..planned.algorithms() {
        match stream.context().time(stream, 10, || planned.run(algorithm, workspace, stream)) {
            Ok(seconds) if best.is_none_or(|(_, fastest)| seconds < fastest) => best = Some((algorithm, seconds)),
            Ok(_) => {}
            Err(error) => refused = Some(error),
        }
    }
    best.ok_or_else(|| refused.map_or_else(|| Outcome::failed("product", "no algorithm was tried"), Outcome::from))
}

/// Nonzero values.
pub(super) fn upload(context: &Context, format: Format, seed: u32, len: usize) -> Result<Buffer, Error> {
    let values = (0..len).map(|index| pattern(seed, index));
    match format {
        // Arbitrary bits except NaN and large values.
        Format::Fp8(_) => {
            context.upload(&values.map(|value| value.to_bits().to_le_bytes()[2] & 0xb7).collect::<Vec<_>>())
        }
        Format::F32 => context.upload(&values.collect::<Vec<_>>()),
        Format::Bf16 => context.upload(&values.map(bf16::from_f32).collect::<Vec<_>>()),
        Format::F16 => context.upload(&values.map(f16::from_f32).collect::<Vec<_>>()),
    }
}

/// Relative error of sampled elements.
fn error(y: &Buffer, format: Format, [m, n, k]: [usize; 3]) -> Result<f64, Outcome> {
    let (mut got, mut wanted) = (Vec::new(), Vec::new());
    for place in sample_indices(m * n, 61) {
        got.extend(match format {
            Format::Bf16 => y.download::<bf16>(place..place + 1)?.iter().map(|value| value.to_f32()).collect(),
            _ => y.download::<f32>(place..place + 1)?,
        });
        let (row, column) = (place / n, place % n);
        let sum: f64 = (0..k).map(|i| f64::from(pattern(1, row * k + i)) * f64::from(pattern(2, column * k + i))).sum();
        wanted.push(sum as f32);
    }
    let error = relative_error(&got, &wanted);
    // The result has an 8-bit mantissa; accumulation is in f32, and the factors are exact.
    let limit = 1.0 / 128.0;
    if error > limit {
        return Err(Outcome::failed(
            "cublasLtMatmul",
            format!("relative error {error:e} at {n} x {k}, expected at most {limit}"),
        ));
    }
    Ok(error)
}
