//! Gradient all-reduces over all ranks with NCCL, in GPU memory.
//!
//! ```text
//! compute stream   backward .. ready(0) .. ready(1) .. ready(2) .. end           update
//! lane 0                 sum(0) <┘                       └> sum(2)  └> loss ─────┘
//! lane 1                              sum(1) <┘
//! ```
//!
//! Sums run in bucket order, so the order is the same on all ranks. The update needs the loss,
//! which follows the gradients. The host needs flags and statistics only: the ranks reduce those
//! through host memory while the device computes the next step.

use super::health::HealthHandle;
use super::memories::Memories;
use super::nccl_offer::{self, NcclGroup};
use super::nccl_watch::{self, CommunicatorWatch};
use crate::comm::{Cause, CommError, Group};
use crate::lowering::Memory;
use crate::recorder::Recorder;
use crate::train::TrainError;
use crate::train::engine::{Measure, Reductions};
use crate::train::exchange::{CHECK, default_runs};
use crate::train::training::Training;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};
use switchyard_cuda::Error;
use switchyard_cuda::driver::{Buffer, Context, Event, Loaded, Span, Stream};
use switchyard_cuda::kernels::Element;
use switchyard_cuda::kernels::elementwise::Elementwise;
use switchyard_cuda::nccl::{Communicator, Nccl, UniqueId};
use switchyard_cuda::nvrtc::Nvrtc;
use switchyard_worker_contract::config::{Transport, WireType};
use switchyard_worker_contract::recorder::Operation;

/// Interval between polls of a connecting communicator.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// The gradient all-reduces of a step.
pub(super) struct Collectives {
    // Dropped in this order: the watch stops polling before the communicators are destroyed, and
    // those before the memory registered with them.
    watch: CommunicatorWatch,
    lanes: Vec<Lane>,
    sums: Vec<Sum>,
    /// Recorded after the sum of the loss.
    loss_summed: Event,
    wire: Option<Wire>,
    /// Buffer of the bandwidth check, if the job requests it.
    check: Option<(Buffer, Event)>,
    recorder: Arc<Recorder>,
}

struct Lane {
    communicator: Arc<Communicator>,
    stream: Stream,
}

/// One all-reduce.
struct Sum {
    buckets: Range<usize>,
    /// Range of their gradients in the layout.
    numbers: Range<usize>,
    began: Event,
    ended: Event,
}

/// 16-bit gradients on the wire.
struct Wire {
    element: Element,
    buffer: Buffer,
    /// From f32 and back.
    kernels: [(Elementwise, Loaded); 2],
    blocks: u32,
}

impl Collectives {
    /// Connects all ranks. Collective. `None` if they cannot use NCCL; rank 0 logs the reason.
    ///
    /// # Errors
    /// The group or NCCL failed.
    pub fn connect(
        training: &Training,
        (context, nvrtc): (&Context, &Nvrtc),
        memories: &Memories,
        group: &mut Group,
        (recorder, health): (&Arc<Recorder>, &HealthHandle),
    ) -> Result<Option<Collectives>, TrainError> {
        recorder.begin(Operation::Join, 0);
        let agreed = nccl_offer::agree(context, group)?;
        if group.rank() == 0 {
            match &agreed {
                Ok(NcclGroup { version, .. }) => eprintln!("note: gradients are summed by NCCL {version}"),
                Err(reason) => eprintln!("note: gradients are summed through host memory; NCCL: {reason}"),
            }
        }
        let Ok(NcclGroup { nccl, hosts, .. }) = agreed else { return Ok(None) };
        let note = lost_additions(training.config.overlap.wire_type, group.world()).filter(|_| hosts > 1);
        if let Some(note) = note.filter(|_| group.rank() == 0) {
            eprintln!("warning: {note}");
        }
        let sums = sums(training, context)?;
        let count = (training.config.overlap.communicators as usize).min(sums.len());
        let mut lanes = Vec::new();
        for id in ids(&nccl, count, group)? {
            let communicator = Arc::new(nccl.connect(context, &id, (group.rank(), group.world()))?);
            await_ready(&communicator, group)?;
            communicator.register(memories.buffer(Memory::Gradients))?;
            lanes.push(Lane { communicator, stream: context.stream()? });
        }
        let communicators = lanes.iter().map(|lane| Arc::clone(&lane.communicator)).collect();
        let watch = CommunicatorWatch::start(communicators, group.rank(), group.aborter(), health.clone())?;
        let check =
            training.config.bandwidth_check.map(|_| Ok::<_, Error>((context.zeros(4 * CHECK)?, context.event()?)));
        // The measurement before the first step reads the gradients, and every step reads the gaps
        // between parameters.
        context.default_stream().fill(memories.span(Memory::Gradients), 0)?;
        context.synchronize()?;
        Ok(Some(Collectives {
            watch,
            lanes,
            sums,
            loss_summed: context.event()?,
            wire: Wire::new(training, hosts, (context, nvrtc), memories)?,
            check: check.transpose()?,
            recorder: Arc::clone(recorder),
        }))
    }

    /// Queues all sums; later commands on `compute` wait for them. `ready`: for each bucket,
    /// recorded after the operation that completes its gradients; `end`: after the backward pass.
    /// `scale`: the f16 wire scale, if gradients are sent as f16; an inner `None`: they are sent as
    /// f32 this time. `waits`: wait for each sum before the next is queued; returns the time
    /// waited.
    ///
    /// # Errors
    /// The device, NCCL or another rank failed.
    pub fn start<'a>(
        &mut self,
        (ready, end): (impl Fn(usize) -> &'a Event, &'a Event),
        scale: Option<Option<f32>>,
        (memories, compute): (&Memories, &Stream),
        waits: bool,
    ) -> Result<Duration, TrainError> {
        let mut waited = Duration::ZERO;
        for number in 0..self.sums.len() {
            let queued = self.queue(number, ready(self.sums[number].buckets.end - 1), scale, memories);
            self.watch.check(queued)?;
            if waits {
                let at = Instant::now();
                self.await_sum(number)?;
                waited += at.elapsed();
            }
        }
        let queued = self.queue_loss(end, memories).and_then(|()| {
            let mut ends = self.sums.iter().map(|sum| &sum.ended).chain([&self.loss_summed]);
            ends.try_for_each(|ended| compute.wait(ended))
        });
        self.watch.check(queued)?;
        Ok(waited)
    }

    fn queue_loss(&self, end: &Event, memories: &Memories) -> Result<(), Error> {
        let Lane { communicator, stream } = &self.lanes[self.sums.len() % self.lanes.len()];
        stream.wait(end)?;
        communicator.all_reduce(memories.span(Memory::Loss), Element::F32, stream)?;
        stream.record(&self.loss_summed)
    }

    fn queue(
        &self,
        number: usize,
        ready: &Event,
        scale: Option<Option<f32>>,
        memories: &Memories,
    ) -> Result<(), Error> {
        let (sum, Lane { communicator, stream }) = (&self.sums[number], &self.lanes[number % self.lanes.len()]);
        let gradients = memories.floats(Memory::Gradients, &sum.numbers);
        stream.wait(ready)?;
        stream.record(&sum.began)?;
        match (&self.wire, scale.unwrap_or(Some(1.0))) {
            (Some(wire), Some(scale)) => {
                let short = wire.convert(0, &sum.numbers, (gradients, scale), stream)?;
                communicator.all_reduce(short, wire.element, stream)?;
                wire.convert(1, &sum.numbers, (gradients, 1.0 / scale), stream)?;
            }
            _ => communicator.all_reduce(gradients, Element::F32, stream)?,
        }
        stream.record(&sum.ended)
    }

    fn await_sum(&mut self, number: usize) -> Result<(), TrainError> {
        let sum = &self.sums[number];
        self.recorder.begin(Operation::Reduce, sum.buckets.start as u32);
        let ended = sum.ended.synchronize();
        self.watch.check(ended)
    }

    /// Waits for the sums of all gradients; returns their total device time. Concurrent sums in
    /// several lanes are counted separately.
    ///
    /// # Errors
    /// The device, NCCL or another rank failed.
    pub fn wait(&mut self) -> Result<Duration, TrainError> {
        let mut total = 0.0;
        for number in 0..self.sums.len() {
            self.await_sum(number)?;
            let Sum { began, ended, .. } = &self.sums[number];
            total += ended.seconds_since(began)?;
        }
        Ok(Duration::from_secs_f64(total.max(0.0)))
    }

    /// Waits for the sum of the loss, the last of a step.
    ///
    /// # Errors
    /// The device, NCCL or another rank failed.
    pub fn wait_for_loss(&mut self) -> Result<(), TrainError> {
        let bucket = self.sums.last().map_or(0, |sum| sum.buckets.end);
        self.recorder.begin(Operation::Reduce, bucket as u32);
        let ended = self.loss_summed.synchronize();
        self.watch.check(ended)
    }

    /// Gradient bytes whose sums have not finished.
    ///
    /// # Errors
    /// The device, NCCL or another rank failed.
    pub fn pending_bytes(&mut self) -> Result<u64, TrainError> {
        let mut left = 0;
        for Sum { numbers, ended, .. } in &self.sums {
            let is_done = ended.is_done();
            left += if self.watch.check(is_done)? { 0 } else { 4 * numbers.len() as u64 };
        }
        Ok(left)
    }

    /// See [`crate::train::engine::Engine::reduce`].
    pub fn reduce(&mut self, what: Measure, memories: &Memories) -> Result<(), TrainError> {
        match (what, &self.check) {
            (Measure::Gradients, _) => {
                for number in 0..self.sums.len() {
                    // Wait only for the previous sum of the same buckets.
                    let queued = self.queue(number, &self.sums[number].ended, None, memories);
                    self.watch.check(queued)?;
                }
                self.wait().map(drop)
            }
            (Measure::Check, Some((buffer, ended))) => {
                let Lane { communicator, stream } = &self.lanes[0];
                let sum = communicator.all_reduce(buffer.span(), Element::F32, stream);
                let done = sum.and_then(|()| stream.record(ended)).and_then(|()| ended.synchronize());
                self.watch.check(done)
            }
            (Measure::Check, None) => Ok(()),
        }
    }

    /// See [`crate::train::engine::Engine::reductions`].
    pub fn reductions(&self) -> Reductions {
        let bytes = self.sums.iter().map(|sum| 4 * sum.numbers.len() as u64).collect();
        Reductions { transport: Transport::Nccl, links: Vec::new(), probed: None, bytes, algorithms: Vec::new() }
    }
}

/// A warning if a sum over these ranks rounds away much of its last additions. A partial sum of
/// 2^bits equal numbers no longer changes when another one is added (Higham, Accuracy and Stability
/// of Numerical Algorithms, 4.2: the relative error grows with the number of additions).
fn lost_additions(wire_type: WireType, ranks: u32) -> Option<String> {
    let (name, bits) = match wire_type {
        WireType::Fp32 => return None,
        WireType::Bf16 => ("BF16", 8),
        WireType::Fp16 => ("FP16", 11),
    };
    let most = 1 << bits;
    (ranks > most / 4).then(|| {
        format!(
            "engine.overlap.wireType: got {name} with {ranks} ranks; NCCL rounds a sum after each of {} additions, and \
             equal gradients of more than {most} ranks are lost; expected FP32, or at most {} ranks",
            ranks - 1,
            most / 4
        )
    })
}

/// The all-reduces of a step.
fn sums(training: &Training, context: &Context) -> Result<Vec<Sum>, Error> {
    let runs = default_runs(&training.buckets, &training.config.overlap);
    let sum = |buckets: Range<usize>| {
        // Consecutive buckets are contiguous in the layout.
        let (first, last) = (&training.buckets[buckets.start], &training.buckets[buckets.end - 1]);
        let numbers = first.range.start..last.range.end;
        Ok::<_, Error>(Sum { buckets, numbers, began: context.timed_event()?, ended: context.timed_event()? })
    };
    runs.into_iter().map(sum).collect()
}

/// Returns the communicator IDs. Rank 0 creates them and sends them over the group's connections,
/// which only ranks of the job have.
fn ids(nccl: &Nccl, count: usize, group: &mut Group) -> Result<Vec<UniqueId>, TrainError> {
    let mut own = Vec::new();
    if group.rank() == 0 {
        for _ in 0..count {
            own.extend(nccl.unique_id()?.0);
        }
    }
    let gathered = group.all_gather("the communicator IDs", &own)?;
    let (ids, _) = gathered.first().map(Vec::as_slice).unwrap_or_default().as_chunks();
    Ok(ids.iter().copied().map(UniqueId).collect())
}

/// Waits until a communicator is connected to all ranks.
fn await_ready(communicator: &Communicator, group: &Group) -> Result<(), TrainError> {
    let limit = group.connect_timeout();
    let end = Instant::now() + limit;
    loop {
        match communicator.is_ready() {
            Ok(true) => return Ok(()),
            Ok(false) if group.failure().is_none() && Instant::now() < end => std::thread::sleep(POLL_INTERVAL),
            other => {
                let refused = other.err();
                let error = TrainError::Nccl(match &refused {
                    Some(error) => format!("a communicator failed to connect: {error}"),
                    None => format!("a communicator has not formed within {:.0} s", limit.as_secs_f64()),
                });
                // Another rank may be the cause and report it itself.
                nccl_watch::suspect(&group.aborter(), refused.as_ref(), Cause::failed(group.rank(), error.to_string()));
                communicator.abort();
                return Err(group.failure().map_or(error, |cause| CommError::Failed(cause).into()));
            }
        }
    }
}

impl Wire {
    /// `None` if gradients are sent as f32, as they are within a host.
    fn new(
        training: &Training,
        hosts: usize,
        (context, nvrtc): (&Context, &Nvrtc),
        memories: &Memories,
    ) -> Result<Option<Wire>, Error> {
        let element = match training.config.overlap.wire_type {
            WireType::Fp16 if hosts > 1 => Element::F16,
            WireType::Bf16 if hosts > 1 => Element::Bf16,
            _ => return Ok(None),
        };
        let load = |from, to| {
            let kernel = Elementwise { from, to };
            Ok::<_, Error>((kernel, context.load(kernel.program(), nvrtc)?))
        };
        let numbers = memories.buffer(Memory::Gradients).bytes() / Element::F32.bytes();
        Ok(Some(Wire {
            element,
            buffer: context.zeros(numbers * element.bytes())?,
            kernels: [load(Element::F32, element)?, load(element, Element::F32)?],
            blocks: super::machine::target(context.device()).blocks,
        }))
    }

    /// Queues a conversion with a scale factor. `which`: 0 to 16 bits, 1 back. Returns the span of
    /// the 16-bit values.
    fn convert(
        &self,
        which: usize,
        numbers: &Range<usize>,
        (gradients, factor): (Span, f32),
        stream: &Stream,
    ) -> Result<Span, Error> {
        let size = self.element.bytes();
        let short = self.buffer.part(numbers.start * size..numbers.end * size);
        let short = short.expect("invariant: buckets lie within the layout");
        let (kernel, loaded) = &self.kernels[which];
        let (from, to) = if which == 0 { (gradients, short) } else { (short, gradients) };
        let call = kernel.convert(self.blocks, numbers.len() as u32, from, factor, to, false)?;
        loaded.launch(&call, stream)?;
        Ok(short)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    /// The sum of ones over all ranks, rounded after each addition.
    fn sum<T: Copy + std::ops::Add<Output = T>>(one: T, ranks: u32) -> T {
        (1..ranks).fold(one, |sum, _| sum + one)
    }

    #[test]
    fn sixteen_bit_sums_over_many_ranks_are_warned_of() {
        assert_eq!(lost_additions(WireType::Fp32, 4096), None);
        for (wire_type, most) in [(WireType::Bf16, 256), (WireType::Fp16, 2048)] {
            assert_eq!(lost_additions(wire_type, most / 4), None);
            let warning = lost_additions(wire_type, most / 4 + 1).unwrap();
            assert!(warning.contains(&format!("of more than {most} ranks are lost")), "{warning}");
        }
        for (ranks, bf16_sum, f16_sum) in [(256, 256.0, 256.0), (300, 256.0, 300.0), (3000, 256.0, 2048.0)] {
            assert_eq!(sum(bf16::ONE, ranks).to_f32(), bf16_sum, "{ranks} ranks");
            assert_eq!(sum(f16::ONE, ranks).to_f32(), f16_sum, "{ranks} ranks");
        }
    }
}
