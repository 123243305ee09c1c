//! Copy, matrix product and kernel launch rates: writes the device file for `switchyard plan
//! --device`.

use super::products::{WORKSPACE_BYTES, fastest};
use super::{Probe, streams};
use crate::numbers::{pattern, short};
use crate::outcome::Outcome;
use crate::record::Record;
use crate::version;
use half::{bf16, f16};
use serde_json::{Value, json};
use switchyard_cuda::cublaslt::{Arithmetic, CublasLt, Format, Matrix, Product};
use switchyard_cuda::driver::{Buffer, Context, Stream};
use switchyard_cuda::find::CUBLASLT;
use switchyard_cuda::kernels::fp8::{self, Fp8};
use switchyard_worker_contract::prediction::{Gpu, Rates};

/// Bytes of a copy, larger than any cache; rows and columns of a product, enough for every
/// multiprocessor; launches of a graph.
const SIZES: (usize, usize, usize) = (1 << 30, 8192, 100);
const REHEARSED: (usize, usize, usize) = (1 << 12, 32, 4);
const ALGORITHMS: usize = 4;
const ROUNDS: usize = 10;

pub(super) fn run(probe: &Probe) -> Result<Value, Outcome> {
    Ok(json!({"deviceFile": measured(probe)?}))
}

/// The rates of the device: from the results of an earlier part, or measured.
pub(super) fn known(probe: &Probe) -> Result<Gpu, Outcome> {
    let (_, device) = probe.require_device()?;
    let record = Record::open(probe.out.as_deref(), probe.rehearse).ok();
    let result = record.as_ref().and_then(|record| record.get("rates"));
    let known = match result.map(|result| &result.outcome) {
        Some(Outcome::Ok { figures }) => Gpu::parse(&figures["deviceFile"].to_string(), "results of `rates`").ok(),
        _ => None,
    };
    known.filter(|gpu| gpu.name == device.name).map_or_else(|| measured(probe), Ok)
}

/// Measures the rates of the device.
fn measured(probe: &Probe) -> Result<Gpu, Outcome> {
    let (context, device) = probe.start()?;
    let (bytes, size, launches) = if probe.rehearse { REHEARSED } else { SIZES };
    let stream = context.stream()?;
    let [_, launch] = streams::kernels(probe, &stream, launches)?;
    let cublaslt = CublasLt::start(&probe.places.open(&CUBLASLT)?.library)?;
    let rate = |format| product(&context, &stream, &cublaslt, format, size);
    let has_fp8 = device.capability >= fp8::SINCE;
    let products = Rates {
        f32: rate(Format::F32)?,
        bf16: rate(Format::Bf16)?,
        f16: rate(Format::F16)?,
        fp8: has_fp8.then(|| rate(Format::Fp8(Fp8::E4m3))).transpose()?,
    };
    Ok(Gpu {
        name: device.name,
        source: format!("measured by gpu-probe {}", version::OWN),
        multiprocessors: u32::try_from(device.multiprocessors).unwrap_or(1),
        shared_bytes_per_block: device.shared_bytes,
        memory_bytes: device.memory_bytes as u64,
        bytes_per_second: copy(&context, &stream, bytes)?,
        // Exact f32 products do not use tensor cores.
        flops_per_second: products.f32,
        products,
        launch_seconds: Some(short(launch)),
    })
}

/// Bytes per second, reads and writes counted.
fn copy(context: &Context, stream: &Stream, bytes: usize) -> Result<f64, Outcome> {
    let [from, to] = [context.zeros(bytes)?, context.allocate(bytes)?];
    let seconds = context.time(stream, ROUNDS, || stream.copy(from.span(), to.span()))?;
    Ok(short(2.0 * bytes as f64 / seconds))
}

/// FLOP/s of a square product of nonzero values, with the fastest of several algorithms.
fn product(
    context: &Context,
    stream: &Stream,
    cublaslt: &CublasLt,
    format: Format,
    size: usize,
) -> Result<f64, Outcome> {
    let of_result = if let Format::Fp8(_) = format { Format::Bf16 } else { format };
    let sides = [(1, format), (2, format), (3, of_result)];
    let [left, right, result] = sides.map(|(seed, format)| upload(context, format, seed, size * size));
    let (left, right, result, workspace) = (left?, right?, result?, context.allocate(WORKSPACE_BYTES)?);
    let matrix = |buffer: &Buffer, format, is_transposed| Matrix {
        memory: buffer.span(),
        format,
        rows: size,
        columns: size,
        pitch: size,
        is_transposed,
    };
    let planned = cublaslt.plan(
        Product {
            left: matrix(&left, format, false),
            right: matrix(&right, format, true),
            result: matrix(&result, of_result, false),
            addend: None,
            epilogue: None,
            arithmetic: Arithmetic::Ieee,
            scales: None,
        },
        WORKSPACE_BYTES,
        ALGORITHMS,
    )?;
    let (_, seconds) = fastest(&planned, workspace.span(), stream)?;
    Ok(short(2.0 * (size as f64).powi(3) / seconds))
}

fn upload(context: &Context, format: Format, seed: u32, len: usize) -> Result<Buffer, Outcome> {
    let values = (0..len).map(|index| pattern(seed, index));
    Ok(match format {
        // Arbitrary bits, except those of NaN and of large values.
        Format::Fp8(_) => {
            context.upload(&values.map(|value| value.to_bits().to_le_bytes()[2] & 0xb7).collect::<Vec<_>>())?
        }
        Format::F32 => context.upload(&values.collect::<Vec<_>>())?,
        Format::Bf16 => context.upload(&values.map(bf16::from_f32).collect::<Vec<_>>())?,
        Format::F16 => context.upload(&values.map(f16::from_f32).collect::<Vec<_>>())?,
    })
}
