//! Sums of gradients over all ranks by NCCL, in the memory of their GPUs.
//!
//! ```text
//! compute stream   backward .. ready(0) .. ready(1) .. ready(2)                update
//! lane 0                 sum(0) <┘                       └> sum(2)  ─┐ host waits ─┘
//! lane 1                              sum(1) <┘                     ─┘
//! ```
//!
//! The order of the sums is that of the buckets, so it is the same on all ranks. What is small (loss, flags, statistics) goes by way of the
//! host meanwhile.

use super::health::Sight;
use super::memories::Memories;
use super::offer::{self, Agreed};
use super::watch::{self, Watch};
use crate::comm::{Cause, CommError, Group};
use crate::gpu::Memory;
use crate::recorder::Recorder;
use crate::train::TrainError;
use crate::train::engine::{Measure, Reductions};
use crate::train::exchange::{CHECK, unmeasured};
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

/// Between two looks at a communicator that connects.
const PAUSE: Duration = Duration::from_millis(5);

/// The sums of a step.
pub(super) struct Collectives {
    // Dropped in this order: nobody looks at communicators that are gone, and they are gone before the memory that they know.
    watch: Watch,
    lanes: Vec<Lane>,
    sums: Vec<Sum>,
    wire: Option<Wire>,
    /// Numbers without a meaning, if the job asks for a measurement.
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
    /// Where their gradients are in the layout.
    numbers: Range<usize>,
    began: Event,
    ended: Event,
}

/// Gradients that travel in 16 bits.
struct Wire {
    element: Element,
    buffer: Buffer,
    /// From 32 bits and back.
    kernels: [(Elementwise, Loaded); 2],
    blocks: u32,
}

impl Collectives {
    /// Connects all ranks, which call it together; nothing if they cannot use NCCL, which rank 0 explains in the log.
    ///
    /// # Errors
    /// The group failed, or NCCL did.
    pub fn connect(
        training: &Training,
        (context, nvrtc): (&Context, &Nvrtc),
        memories: &Memories,
        group: &mut Group,
        (recorder, sight): (&Arc<Recorder>, &Sight),
    ) -> Result<Option<Collectives>, TrainError> {
        recorder.begin(Operation::Join, 0);
        let agreed = offer::agree(context, group)?;
        if group.rank() == 0 {
            match &agreed {
                Ok(Agreed { version, .. }) => eprintln!("note: gradients are summed by NCCL {version}"),
                Err(reason) => eprintln!("note: gradients are summed by way of the host; NCCL: {reason}"),
            }
        }
        let Ok(Agreed { nccl, hosts, .. }) = agreed else { return Ok(None) };
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
        let watch = Watch::start(communicators, group.rank(), group.aborter(), sight.clone())?;
        let check =
            training.config.bandwidth_check.map(|_| Ok::<_, Error>((context.zeros(4 * CHECK)?, context.event()?)));
        // What is measured before the first step reads them, and so do gaps between parameters in every step.
        context.default_stream().fill(memories.span(Memory::Gradients), 0)?;
        context.synchronize()?;
        Ok(Some(Collectives {
            watch,
            lanes,
            sums,
            wire: Wire::new(training, hosts, (context, nvrtc), memories)?,
            check: check.transpose()?,
            recorder: Arc::clone(recorder),
        }))
    }

    /// Queues all sums, each behind the work that completes its gradients. `scale`: the factor of numbers in f16, if they travel so;
    /// an inner `None`: they travel in 32 bits this time. `waits`: for each sum before the next is queued; returns how long.
    ///
    /// # Errors
    /// The device, NCCL or another rank failed.
    pub fn start(
        &mut self,
        ready: &[Event],
        scale: Option<Option<f32>>,
        memories: &Memories,
        waits: bool,
    ) -> Result<Duration, TrainError> {
        let mut waited = Duration::ZERO;
        for number in 0..self.sums.len() {
            let queued = self.queue(number, &ready[self.sums[number].buckets.end - 1], scale, memories);
            self.watch.judge(queued)?;
            if waits {
                let at = Instant::now();
                self.await_sum(number)?;
                waited += at.elapsed();
            }
        }
        Ok(waited)
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
        self.watch.judge(ended)
    }

    /// Waits for all sums; returns how long the device took for them. Sums of several lanes at a time count each.
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

    /// Bytes of gradients whose sums have not ended.
    ///
    /// # Errors
    /// The device, NCCL or another rank failed.
    pub fn bytes_left(&mut self) -> Result<u64, TrainError> {
        let mut left = 0;
        for Sum { numbers, ended, .. } in &self.sums {
            let is_done = ended.is_done();
            left += if self.watch.judge(is_done)? { 0 } else { 4 * numbers.len() as u64 };
        }
        Ok(left)
    }

    /// See [`crate::train::engine::Engine::reduce`].
    pub fn reduce(&mut self, what: Measure, memories: &Memories) -> Result<(), TrainError> {
        match (what, &self.check) {
            (Measure::Gradients, _) => {
                for number in 0..self.sums.len() {
                    // Recorded behind the last sum: all there is to wait for.
                    let queued = self.queue(number, &self.sums[number].ended, None, memories);
                    self.watch.judge(queued)?;
                }
                self.wait().map(drop)
            }
            (Measure::Check, Some((buffer, ended))) => {
                let Lane { communicator, stream } = &self.lanes[0];
                let sum = communicator.all_reduce(buffer.span(), Element::F32, stream);
                let done = sum.and_then(|()| stream.record(ended)).and_then(|()| ended.synchronize());
                self.watch.judge(done)
            }
            (Measure::Check, None) => Ok(()),
        }
    }

    /// See [`crate::train::engine::Engine::reductions`].
    pub fn reductions(&self) -> Reductions {
        let bytes = self.sums.iter().map(|sum| 4 * sum.numbers.len() as u64).collect();
        Reductions { transport: Transport::Nccl, links: Vec::new(), probed: None, bytes }
    }
}

/// The all-reduces of a step.
fn sums(training: &Training, context: &Context) -> Result<Vec<Sum>, Error> {
    let runs = unmeasured(&training.buckets, &training.config.overlap);
    let sum = |buckets: Range<usize>| {
        // Buckets in a row are in a row in the layout.
        let (first, last) = (&training.buckets[buckets.start], &training.buckets[buckets.end - 1]);
        let numbers = first.range.start..last.range.end;
        Ok::<_, Error>(Sum { buckets, numbers, began: context.timed_event()?, ended: context.timed_event()? })
    };
    runs.into_iter().map(sum).collect()
}

/// The ids of communicators, which rank 0 makes and tells the others over the connections of the group, where only ranks of the job are.
fn ids(nccl: &Nccl, count: usize, group: &mut Group) -> Result<Vec<UniqueId>, TrainError> {
    let mut own = Vec::new();
    if group.rank() == 0 {
        for _ in 0..count {
            own.extend(nccl.unique_id()?.0);
        }
    }
    let told = group.all_gather("the ids of communicators", &own)?;
    let (ids, _) = told.first().map(Vec::as_slice).unwrap_or_default().as_chunks();
    Ok(ids.iter().copied().map(UniqueId).collect())
}

/// Waits until a communicator is connected to all ranks.
fn await_ready(communicator: &Communicator, group: &Group) -> Result<(), TrainError> {
    let limit = group.connect_timeout();
    let end = Instant::now() + limit;
    loop {
        match communicator.is_ready() {
            Ok(true) => return Ok(()),
            Ok(false) if group.failure().is_none() && Instant::now() < end => std::thread::sleep(PAUSE),
            other => {
                let refused = other.err();
                let error = TrainError::Nccl(match &refused {
                    Some(error) => format!("a communicator does not form: {error}"),
                    None => format!("a communicator has not formed within {:.0} s", limit.as_secs_f64()),
                });
                // Another rank may be the reason, and say so itself.
                watch::suspect(&group.aborter(), refused.as_ref(), Cause::failed(group.rank(), error.to_string()));
                communicator.abort();
                return Err(group.failure().map_or(error, |cause| CommError::Failed(cause).into()));
            }
        }
    }
}

impl Wire {
    /// Nothing if gradients travel in 32 bits, as they do within a host.
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

    /// Queues a conversion, with a factor: 0 to 16 bits, 1 back. Returns where the 16-bit numbers are.
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
