//! The primitives that the engine's kernels rely on: copies to and from pinned memory concurrent
//! with other work, events between streams, graphs.

use super::Probe;
use crate::numbers::{pattern, short};
use crate::outcome::Outcome;
use serde_json::{Value, json};
use switchyard_cuda::driver::{Buffer, Context, Stream};
use switchyard_cuda::kernels::Element;
use switchyard_cuda::kernels::elementwise::Elementwise;

/// Elements of a copy, and launches of a graph.
const SIZES: (usize, usize) = (1 << 24, 100);
const REHEARSED: (usize, usize) = (1 << 12, 4);
/// Elements of a launch, few enough that its time is pure launch overhead.
const COUNT: usize = 1024;
/// Launches of the graph whose event another stream awaits.
const ROUNDS: usize = 5;
const KERNELS: Elementwise = Elementwise { from: Element::F32, to: Element::F32 };

pub(super) fn run(probe: &Probe) -> Result<Value, Outcome> {
    let (context, device) = probe.start()?;
    let (count, launches) = if probe.rehearse { REHEARSED } else { SIZES };
    let stream = context.stream()?;
    let mut figures = copies(&context, &stream, count)?;
    let [eager, graph] = kernels(probe, &stream, launches)?;
    figures["waitsInGraph"] = event_in_graph(probe, &stream, count, launches)?.into();
    figures["device"] = device.name.into();
    figures["launchMicroseconds"] = short(eager * 1e6).into();
    figures["launchInGraphMicroseconds"] = short(graph * 1e6).into();
    Ok(figures)
}

/// Uploads on one stream and downloads on another, ordered by an event.
fn copies(context: &Context, stream: &Stream, count: usize) -> Result<Value, Outcome> {
    let (back, arrived) = (context.stream()?, context.event()?);
    let bytes = count * size_of::<f32>();
    let [x, y] = [context.allocate(bytes)?, context.allocate(bytes)?];
    let (mut from, mut to) = (context.pinned::<f32>(count)?, context.pinned::<f32>(count)?);
    from.values_mut()?.iter_mut().enumerate().for_each(|(index, value)| *value = pattern(1, index));
    stream.upload(&from, 0..count, x.span())?;
    stream.copy(x.span(), y.span())?;
    stream.record(&arrived)?;
    back.wait(&arrived)?;
    back.download(y.span(), &mut to, 0..count)?;
    if to.values()? != from.values()? {
        return Err(Outcome::failed("cuMemcpyDtoHAsync", "downloaded values differ from the uploaded ones"));
    }
    let up = context.time(stream, 5, || stream.upload(&from, 0..count, x.span()))?;
    let down = context.time(stream, 5, || stream.download(y.span(), &mut to, 0..count))?;
    let rate = |seconds: f64| short(bytes as f64 / seconds / 1e9);
    Ok(json!({"bytes": bytes, "uploadGBs": rate(up), "downloadGBs": rate(down)}))
}

/// A graph records an event between its kernels. Another stream waits for the event and copies what
/// the kernels before it have written. NCCL starts in this way while the backward pass runs.
///
/// # Errors
/// The copy did not wait.
fn event_in_graph(probe: &Probe, stream: &Stream, count: usize, launches: usize) -> Result<usize, Outcome> {
    let context = stream.context();
    let loaded = context.load(KERNELS.program(), &probe.nvrtc()?)?;
    let one = context.upload(&vec![1.0f32; count])?;
    let [sum, other] = [context.zeros(4 * count)?, context.zeros(4 * count)?];
    let (seen, back, event) = (context.allocate(4 * count)?, context.stream()?, context.event()?);
    let blocks = u32::try_from(context.device().multiprocessors).unwrap_or(1);
    let length = u32::try_from(count).unwrap_or(u32::MAX);
    let add = |to: &Buffer| {
        let call = KERNELS.convert(blocks, length, one.span(), 1.0, to.span(), true)?;
        loaded.launch(&call, stream)
    };
    add(&sum)?;
    let graph = stream.capture(|| {
        (0..launches).try_for_each(|_| add(&sum))?;
        stream.record(&event)?;
        (0..launches).try_for_each(|_| add(&other))
    })?;
    for round in 1..=ROUNDS {
        graph.launch(stream)?;
        back.wait(&event)?;
        back.copy(sum.span(), seen.span())?;
        back.synchronize()?;
        let (got, expected) = (seen.download::<f32>(0..count)?, (round * launches + 1) as f32);
        if let Some(wrong) = got.iter().find(|got| **got != expected) {
            let text =
                format!("got {wrong} in launch {round} of a graph, expected {expected}: the stream did not wait");
            return Err(Outcome::failed("cuEventRecordWithFlags", text));
        }
        stream.synchronize()?;
    }
    Ok(ROUNDS)
}

/// Seconds per launch: eager, and in a graph of `launches`.
pub(super) fn kernels(probe: &Probe, stream: &Stream, launches: usize) -> Result<[f64; 2], Outcome> {
    let context = stream.context();
    let loaded = context.load(KERNELS.program(), &probe.nvrtc()?)?;
    let [one, sum] = [context.upload(&[1.0f32; COUNT])?, context.upload(&[0.0f32; COUNT])?];
    let call = KERNELS.convert(1, COUNT as u32, one.span(), 1.0, sum.span(), true)?;
    let add = || loaded.launch(&call, stream);
    add()?;
    let graph = stream.capture(|| (0..launches).try_for_each(|_| add()))?;
    graph.launch(stream)?;
    let (got, wanted) = (sum.download::<f32>(0..COUNT)?, (launches + 1) as f32);
    if got.iter().any(|got| *got != wanted) {
        return Err(Outcome::failed("cuGraphLaunch", format!("a sum of {}, expected {wanted}", got[0])));
    }
    let eager = context.time(stream, launches, add)?;
    let captured = context.time(stream, 1, || graph.launch(stream))?;
    Ok([eager, captured / launches as f64])
}
