//! All-reduce over a single rank: NCCL starts, runs its kernel, and leaves the values unchanged.

use super::Probe;
use crate::numbers::{pattern, short};
use crate::outcome::Outcome;
use serde_json::{Value, json};
use std::time::Instant;
use switchyard_cuda::find::NCCL;
use switchyard_cuda::kernels::Element;
use switchyard_cuda::nccl::Nccl;

const ELEMENTS: usize = 1 << 24;
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
    let seconds = context.time(&stream, 5, || communicator.all_reduce(numbers.span(), Element::F32, &stream))?;
    if numbers.download::<f32>(0..count)? != values {
        return Err(Outcome::failed("ncclAllReduce", "the sum over one rank differs from its input"));
    }
    Ok(json!({
        "device": device.name,
        "ranks": 1,
        "bytes": numbers.bytes(),
        "communicatorMilliseconds": short(milliseconds),
        "microseconds": short(seconds * 1e6),
    }))
}
