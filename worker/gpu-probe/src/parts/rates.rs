//! Copy, matrix product and kernel launch rates: writes the device file for `switchyard plan
//! --device`.

use super::products::{WORKSPACE_BYTES, fastest, plan, upload};
use super::{Probe, streams};
use crate::numbers::short;
use crate::outcome::Outcome;
use crate::record::Record;
use crate::version;
use serde_json::{Value, json};
use switchyard_cuda::Error;
use switchyard_cuda::cublaslt::{Arithmetic, CublasLt, Format};
use switchyard_cuda::driver::{Context, Stream};
use switchyard_cuda::find::CUBLASLT;
use switchyard_cuda::kernels::fp8::{self, Fp8};
use switchyard_worker_contract::prediction::{Gpu, Rates};

/// Bytes of a copy, larger than any cache; rows and columns of a product, enough for every
/// multiprocessor; launches of a graph.
const SIZES: (usize, usize, usize) = (1 << 30, 8192, 100);
const REHEARSED: (usize, usize, usize) = (1 << 12, 32, 4);
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

/// FLOP/s of a square product with the fastest of several algorithms.
fn product(
    context: &Context,
    stream: &Stream,
    cublaslt: &CublasLt,
    format: Format,
    size: usize,
) -> Result<f64, Outcome> {
    let of_result = if let Format::Fp8(_) = format { Format::Bf16 } else { format };
    let [left, right, result] = [(1, format), (2, format), (3, of_result)]
        .map(|(seed, format)| Ok::<_, Error>((upload(context, format, seed, size * size)?, format)));
    let (left, right, result) = (left?, right?, result?);
    let sides = [&left, &right, &result].map(|(buffer, format)| (buffer, *format));
    let planned = plan(cublaslt, sides, [size; 3], Arithmetic::Ieee)?;
    let (_, seconds) = fastest(&planned, context.allocate(WORKSPACE_BYTES)?.span(), stream)?;
    Ok(short(2.0 * (size as f64).powi(3) / seconds))
}
