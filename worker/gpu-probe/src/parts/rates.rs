//! How fast the device copies, multiplies and starts kernels: the device file of `switchyard plan --device`.

use super::products::{WORKSPACE_BYTES, fastest};
use super::{Probe, streams};
use crate::numbers::{pattern, short};
use crate::outcome::Outcome;
use crate::version;
use half::{bf16, f16};
use serde_json::{Value, json};
use switchyard_cuda::cublaslt::{Arithmetic, CublasLt, Matrix, Product};
use switchyard_cuda::driver::{Buffer, Context, Stream};
use switchyard_cuda::find::CUBLASLT;
use switchyard_cuda::kernels::Element;
use switchyard_worker_contract::prediction::{Gpu, Rates};

/// Bytes of a copy, more than any cache; rows and columns of a product, enough for every multiprocessor; launches of a graph.
const SIZES: (usize, usize, usize) = (1 << 30, 8192, 100);
const REHEARSED: (usize, usize, usize) = (1 << 12, 32, 4);
const ALGORITHMS: usize = 4;
const ROUNDS: usize = 10;

pub(super) fn run(probe: &Probe) -> Result<Value, Outcome> {
    let (context, device) = probe.start()?;
    let (bytes, size, launches) = if probe.rehearse { REHEARSED } else { SIZES };
    let stream = context.stream()?;
    let [_, launch] = streams::kernels(probe, &stream, launches)?;
    let cublaslt = CublasLt::start(&probe.places.open(&CUBLASLT)?.library)?;
    let rate = |element| product(&context, &stream, &cublaslt, element, size);
    let products = Rates { f32: rate(Element::F32)?, bf16: rate(Element::Bf16)?, f16: rate(Element::F16)? };
    let gpu = Gpu {
        name: device.name,
        source: format!("measured by gpu-probe {}", version::OWN),
        multiprocessors: u32::try_from(device.multiprocessors).unwrap_or(1),
        shared_bytes_per_block: device.shared_bytes,
        memory_bytes: device.memory_bytes as u64,
        bytes_per_second: copy(&context, &stream, bytes)?,
        // Exact products of 32-bit numbers use no tensor cores.
        flops_per_second: products.f32,
        products,
        launch_seconds: Some(short(launch)),
    };
    Ok(json!({"deviceFile": gpu}))
}

/// Bytes per second, read and written.
fn copy(context: &Context, stream: &Stream, bytes: usize) -> Result<f64, Outcome> {
    let [from, to] = [context.zeros(bytes)?, context.allocate(bytes)?];
    let seconds = context.time(stream, ROUNDS, || stream.copy(from.span(), to.span()))?;
    Ok(short(2.0 * bytes as f64 / seconds))
}

/// Operations per second of a square product of numbers that are not zero, by the fastest of some algorithms.
fn product(
    context: &Context,
    stream: &Stream,
    cublaslt: &CublasLt,
    element: Element,
    size: usize,
) -> Result<f64, Outcome> {
    let [left, right, result] = [1, 2, 3].map(|seed| upload(context, element, seed, size * size));
    let (left, right, result, workspace) = (left?, right?, result?, context.allocate(WORKSPACE_BYTES)?);
    let matrix = |buffer: &Buffer, is_transposed| Matrix {
        span: buffer.span(),
        element,
        rows: size,
        columns: size,
        pitch: size,
        is_transposed,
    };
    let planned = cublaslt.plan(
        Product {
            left: matrix(&left, false),
            right: matrix(&right, true),
            result: matrix(&result, false),
            adds: false,
            arithmetic: Arithmetic::Ieee,
        },
        WORKSPACE_BYTES,
        ALGORITHMS,
    )?;
    let (_, seconds) = fastest(&planned, workspace.span(), stream)?;
    Ok(short(2.0 * (size as f64).powi(3) / seconds))
}

fn upload(context: &Context, element: Element, seed: u32, len: usize) -> Result<Buffer, Outcome> {
    let values = (0..len).map(|index| pattern(seed, index));
    Ok(match element {
        Element::F32 => context.upload(&values.collect::<Vec<_>>())?,
        Element::Bf16 => context.upload(&values.map(bf16::from_f32).collect::<Vec<_>>())?,
        Element::F16 => context.upload(&values.map(f16::from_f32).collect::<Vec<_>>())?,
    })
}
