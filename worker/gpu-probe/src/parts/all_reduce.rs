//! All-reduce over a single rank: NCCL starts and runs a kernel, which multiplies the values. It
//! launches nothing for a plain sum of one rank.

use super::Probe;
use crate::numbers::{pattern, short};
use crate::outcome::Outcome;
use serde_json::{Value, json};
use std::time::Instant;
use switchyard_cuda::find::NCCL;
use switchyard_cuda::kernels::Element;
use switchyard_cuda::nccl::Nccl;

const ELEMENTS: usize = 1 << 24;
/// Exact for the values here.
const FACTOR: f32 = 2.0;
/// Size in a rehearsal.
const REHEARSED: usize = 1 << 10;

pub(super) fn run(probe: &Probe) -> Result<Value, Outcome> {
    let (context, device) = probe.start()?;
    let nccl = Nccl::new(&probe.places.open(&NCCL)?.library)?;
    let start = Instant::now();
    let communicator = nccl.single_rank(&context)?;
    let milliseconds = start.elapsed().as_secs_f64() * 1e3;
    let count = if probe.rehearse { REHEARSED } else { ELEMENTS };
    let values: Vec<f32> = (0..count).map(|index| pattern(1, index)).collect();
    let (numbers, stream) = (context.upload(&values)?, context.stream()?);
    communicator.all_reduce_scaled(numbers.span(), FACTOR, &stream)?;
    stream.synchronize()?;
    let expected: Vec<f32> = values.iter().map(|value| value * FACTOR).collect();
    if numbers.download::<f32>(0..count)? != expected {
        return Err(Outcome::failed("ncclAllReduce", format!("got other values; expected {FACTOR} times the input")));
    }
    let scaled = context.time(&stream, 5, || communicator.all_reduce_scaled(numbers.span(), 1.0, &stream))?;
    let sum = context.time(&stream, 5, || communicator.all_reduce(numbers.span(), Element::F32, &stream))?;
    Ok(json!({
        "device": device.name,
        "ranks": 1,
        "bytes": numbers.bytes(),
        "communicatorMilliseconds": short(milliseconds),
        "scaledMicroseconds": short(scaled * 1e6),
        "sumMicroseconds": short(sum * 1e6),
    }))
}
