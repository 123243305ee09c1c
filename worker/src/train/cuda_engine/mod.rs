//! The GPU engine: the host queues device commands, and waits for the outcome of a step.
//!
//! ```text
//! CudaPlan: GPU, libraries, cuDNN plans, lowering::Computation ─> Memories: buffers
//!          ─> Dispatcher: kernels, algorithms ─> StepSegments: CUDA graphs
//! reader -> Feed: pinned memory, copies ─> stream: forward, backward ─────────> update ─> outcome
//!                                                     └─ several ranks: ──────────┘
//!                                                        Collectives, or Staging -> reducer
//! ```
//!
//! A single compute stream runs all operations in queueing order. Other streams copy batches and
//! batch norm statistics and, with several ranks, all-reduce gradients with NCCL or copy them to
//! the host and back.

mod algorithms;
mod cache;
mod collectives;
mod commands;
mod cudnn;
mod feed;
mod health;
mod machine;
mod memories;
mod nccl_offer;
mod nccl_watch;
mod norms;
mod plan;
mod predict;
mod programs;
mod segment;
mod staging;
mod step;
mod step_segments;
mod timer;
mod users;

pub(super) use plan::CudaPlan;
pub use predict::predict;
pub use users::{GpuUsage, gpu_usage};

use super::TrainError;
use super::engine::{AddSpan, Array, Counters, Engine, Held, Measure, Moment, Reductions, StepInput, StepOutcome};
use super::exchange::Exchange;
use super::scales::Scales;
use super::training::Training;
use crate::amp::LossScaler;
use crate::comm::Group;
use crate::cpu::ops::Targets;
use crate::data::{Batch, Making, Prefetcher};
use crate::lowering::{Computation, Memory, Share, Update};
use crate::model::initialise;
use crate::nn::{Layout, LossSums};
use crate::optimizer::Steps;
use crate::profile::Row;
use crate::recorder::Recorder;
use algorithms::Algorithms;
use cache::Cache;
use collectives::Collectives;
use commands::{Dispatcher, refused_epilogue};
use feed::Feed;
use health::Health;
use machine::Machine;
use memories::Memories;
use norms::Norms;
use serde_json::json;
use staging::Staging;
use std::sync::Arc;
use std::time::Instant;
use step::PendingStep;
use step_segments::StepSegments;
use switchyard_cuda::driver::{Counts, Pinned, Stream};
use switchyard_cuda::kernels::gradients::Scaler;
use switchyard_cuda::kernels::optimizer::Numbers;
use switchyard_cuda::nvtx;
use switchyard_worker_contract::config::{EngineConfig, Matmul, Transport};
use switchyard_worker_contract::event::{GpuCalls, GpuPaths};
use switchyard_worker_contract::kernels::KernelTimes;
use timer::OpTimer;

/// Workspace of matrix products: NVIDIA's recommendation for its newer devices.
const WORKSPACE: usize = 32 << 20;

/// Micro-batches in flight: while the device computes one, the host prepares the next.
const SLOTS: usize = 2;

/// Pinned memory for the values exchanged by host and device in a step.
struct Messages {
    candidates: Pinned<Numbers>,
    scaler: Pinned<Scaler>,
    loss: Pinned<f32>,
}

/// Device activity as observed by the host.
struct DeviceSpan {
    name: &'static str,
    start: Instant,
    end: Instant,
}

/// The GPU engine of a rank.
pub(super) struct CudaEngine {
    config: EngineConfig,
    world: u32,
    kernel: String,
    paths: GpuPaths,
    computation: Computation,
    /// With NCCL. Dropped before the memory that it uses.
    collectives: Option<Collectives>,
    memories: Memories,
    dispatcher: Dispatcher,
    segments: StepSegments,
    feed: Feed,
    messages: [Messages; SLOTS],
    pending: Option<PendingStep>,
    stream: Stream,
    /// Micro-batches before the current step; determines the slot, because slots alternate.
    micro_batches_done: usize,
    /// With several ranks.
    exchange: Option<(Exchange, Staging)>,
    norms: Norms,
    scales: Scales,
    steps: Steps,
    /// Loss in nats, and correct predictions, per row of an evaluation.
    rows: [Vec<f32>; 2],
    /// Reader timings of the last step's micro-batches.
    makings: Vec<Making>,
    /// Device activity of the last step.
    spans: Vec<DeviceSpan>,
    timer: OpTimer,
    /// Driver calls in the last step.
    calls: Counts,
    recorder: Arc<Recorder>,
    /// Dropped last, so it observes every failure.
    health: Health,
}

impl CudaEngine {
    /// Allocates all memory, compiles the kernels, and sets the initial weights.
    ///
    /// # Errors
    /// The group failed, memory is insufficient, or a library fails.
    pub fn connect(
        training: &Training,
        plan: CudaPlan,
        (group, local_rank): (&mut Group, u32),
        recorder: &Arc<Recorder>,
    ) -> Result<CudaEngine, TrainError> {
        if let Err(error) = nvtx::attach(|name| std::env::var_os(name))
            && local_rank == 0
        {
            eprintln!("note: profilers see no ranges: {error}");
        }
        if group.rank() == 0 {
            plan.cudnn_plans.log();
            plan.log_fp8();
        }
        let health = Health::start((group.rank(), &plan.machine.context.device().bus), local_rank == 0, recorder);
        let handle = health.handle().clone();
        handle.explain(CudaEngine::on(plan, training, group, (recorder, health)))
    }

    fn on(
        plan: CudaPlan,
        training: &Training,
        group: &mut Group,
        (recorder, health): (&Arc<Recorder>, Health),
    ) -> Result<CudaEngine, TrainError> {
        let (kernel, need) = (plan.kernel(), plan.memory(training));
        let CudaPlan { mut computation, cudnn_plans, machine, .. } = plan;
        let Machine { context, nvrtc, cublaslt, .. } = machine;
        context.make_current()?;
        let memories = Memories::new(&context, (&computation, WORKSPACE), training, &need)?;
        let mut paths = GpuPaths { epilogues: true, ..cudnn_plans.paths() };
        let mut algorithms = Algorithms::start(&context, &cublaslt, &Cache::from_env())?;
        let mut works = computation.works(|span| memories.place(&computation, 0, span))?;
        if let Some(reason) = refused_epilogue(&mut algorithms, &works) {
            let text = format!("what follows products is computed by kernels of ours: {reason}");
            if group.rank() == 0 {
                eprintln!("note: {text}");
            }
            paths.epilogues = false;
            paths.fallbacks.push(text);
            computation = computation.without_epilogues();
            works = computation.works(|span| memories.place(&computation, 0, span))?;
        }
        let libraries = (&nvrtc, algorithms, cudnn_plans);
        let mut dispatcher = Dispatcher::new(&context, libraries, &works, &training.config, recorder)?;
        let norms = Norms::new(&context, computation.plan())?;
        let statistics = norms.running.len();
        let collectives = match training.world {
            1 => None,
            _ => Collectives::connect(training, (&context, &nvrtc), &memories, group, (recorder, health.handle()))?,
        };
        let messages = || -> Result<Messages, switchyard_cuda::Error> {
            Ok(Messages { candidates: context.pinned(2)?, scaler: context.pinned(1)?, loss: context.pinned(1)? })
        };
        let exchange = match (training.world, &collectives) {
            (1, _) => None,
            (_, Some(_)) => Some(Exchange::without_gradients(training, statistics, group)?),
            (_, None) => Some(Exchange::connect(training, statistics, &[], group)?),
        };
        let staging = |exchange: Exchange| {
            let longest = exchange.ranges.iter().map(|bucket| bucket.range.len()).max().unwrap_or(1);
            Ok::<_, TrainError>((exchange, Staging::new(&context, &computation, training, longest)?))
        };
        let exchange = exchange.map(staging).transpose()?;
        let rows = computation.plan().losses().iter().map(|loss| loss.rows).sum();
        let staging = exchange.as_ref().map(|(_, staging)| staging);
        let merge = training.config.batch_merge;
        let segments = StepSegments::new((&context, &mut dispatcher), (&computation, &memories), merge, staging)?;
        dispatcher.save_cache();
        let mut engine = CudaEngine {
            config: training.config.clone(),
            world: training.world,
            kernel,
            paths,
            feed: Feed::new(&context, computation.inputs())?,
            messages: [messages()?, messages()?],
            pending: None,
            stream: context.stream()?,
            micro_batches_done: 0,
            exchange,
            norms,
            scales: Scales::new(&training.config),
            steps: Steps::new(&training.config.optimizer.rule),
            rows: [vec![0.0; rows], vec![0.0; rows]],
            makings: Vec::with_capacity(merge as usize),
            spans: Vec::with_capacity(2 * merge as usize + 4),
            timer: OpTimer::new(&context.device().name, training.config.gpu.matmul == Matmul::Tf32),
            calls: Counts::default(),
            recorder: Arc::clone(recorder),
            health,
            computation,
            collectives,
            memories,
            dispatcher,
            segments,
        };
        let mut weights = vec![0.0; engine.layout().len];
        initialise(engine.layout(), training.config.seed, &mut weights);
        engine.write(Array::Weights, 0, &weights)?;
        engine.round()?;
        Ok(engine)
    }

    /// Refreshes the 16-bit copies of the weights.
    fn round(&mut self) -> Result<(), TrainError> {
        if let Some(round) = &self.segments.round {
            self.dispatcher.queue(round, &self.memories, &self.stream)?;
        }
        Ok(())
    }

    fn run_evaluation(&mut self, batch: &Batch) -> Result<LossSums, TrainError> {
        let whole = Share { part: 1.0, loss_scale: 1.0 };
        self.norms.upload(&self.memories)?;
        let computed = (&self.segments.marks(0).backward, &self.stream);
        self.feed.send(0, (batch, whole), &self.memories, computed, None)?;
        self.segments.evaluation.queue(&self.dispatcher, &self.memories, &self.stream)?;
        let [losses, correct] = &mut self.rows;
        self.memories.buffer(Memory::Losses).read(0, losses)?;
        self.memories.buffer(Memory::Correct).read(0, correct)?;
        let (mut sums, mut from) = (LossSums::default(), 0);
        for loss in self.computation.plan().losses() {
            let rows = from..from + loss.rows;
            from = rows.end;
            let counted = Targets { classes: loss.options.target.of(batch), smoothing: 0.0 }.counted();
            let nats: f64 = losses[rows.clone()].iter().copied().map(f64::from).sum();
            sums.loss += nats / counted.max(1) as f64;
            if loss.options.count {
                sums.correct += correct[rows].iter().filter(|right| **right > 0.0).count() as u64;
                sums.predicted += counted as u64;
            }
        }
        Ok(sums)
    }

    /// The device memory of an array; `None` if it is on the host.
    fn memory(&self, array: Array) -> Option<Memory> {
        match array {
            Array::Weights => Some(Memory::Weights),
            Array::Moments(index) => Some(Memory::Moments(index)),
            Array::Statistics => None,
        }
    }
}

impl Engine for CudaEngine {
    fn step(&mut self, reader: &mut Prefetcher, input: &StepInput) -> Result<Option<StepOutcome>, TrainError> {
        let outcome = self.run_step(reader, input);
        self.health.handle().explain(outcome)
    }

    fn drain(&mut self) -> Result<Option<StepOutcome>, TrainError> {
        let outcome = self.settle();
        self.health.handle().explain(outcome)
    }

    fn evaluate(&mut self, batch: &Batch) -> Result<Option<LossSums>, TrainError> {
        let sums = self.run_evaluation(batch);
        self.health.handle().explain(sums).map(Some)
    }

    fn layout(&self) -> &Layout {
        self.computation.layout()
    }

    fn statistics(&self) -> Vec<(String, usize)> {
        self.norms.names.clone()
    }

    fn moments(&self) -> Vec<Moment> {
        self.computation.update().moments().iter().map(|name| Moment { name, held: Held::ByAll }).collect()
    }

    fn read(&self, array: Array, from: usize, into: &mut [f32]) -> Result<(), TrainError> {
        match self.memory(array) {
            Some(memory) => Ok(self.memories.buffer(memory).read(4 * from, into)?),
            None => {
                into.copy_from_slice(&self.norms.running[from..][..into.len()]);
                Ok(())
            }
        }
    }

    fn write(&mut self, array: Array, from: usize, numbers: &[f32]) -> Result<(), TrainError> {
        match self.memory(array) {
            Some(memory) => Ok(self.memories.buffer(memory).write(4 * from, numbers)?),
            None => {
                self.norms.running[from..][..numbers.len()].copy_from_slice(numbers);
                Ok(())
            }
        }
    }

    fn counters(&self) -> Counters {
        Counters { optimizer_steps: self.steps.done(), ..self.scales.counters() }
    }

    fn resume(&mut self, counters: &Counters) -> Result<Option<String>, TrainError> {
        self.steps = self.steps.restored(counters.optimizer_steps);
        let changed = self.scales.resume(counters, self.config.precision)?;
        if let Some(state) = self.scales.loss.as_ref().map(LossScaler::state) {
            self.memories.buffer(Memory::Scaler).write(0, &[Update::scaler(&state)])?;
        }
        self.round()?;
        Ok(changed)
    }

    fn kernel(&self) -> String {
        self.kernel.clone()
    }

    fn gpu_paths(&self) -> Option<GpuPaths> {
        Some(self.paths.clone())
    }

    fn calls(&self) -> Option<GpuCalls> {
        let Counts { launches, waits } = self.calls;
        Some(GpuCalls { works: self.segments.operations() as u64, launches, waits })
    }

    fn reductions(&self) -> Reductions {
        match (&self.collectives, &self.exchange) {
            (Some(collectives), _) => collectives.reductions(),
            (None, Some((exchange, _))) => exchange.reductions(),
            (None, None) => {
                let (transport, links, algorithms) = (Transport::None, Vec::new(), Vec::new());
                Reductions { transport, links, probed: None, bytes: Vec::new(), algorithms }
            }
        }
    }

    fn reduce(&mut self, what: Measure) -> Result<(), TrainError> {
        let reduced = match (&mut self.collectives, &mut self.exchange) {
            (Some(collectives), _) => collectives.reduce(what, &self.memories),
            (None, Some((exchange, _))) => exchange.reduce(what),
            (None, None) => Ok(()),
        };
        self.health.handle().explain(reduced)
    }

    /// Forward and backward of each micro-batch are always recorded. This turns the timing of
    /// single operations on or off.
    fn record(&mut self, on: bool) {
        self.timer.set_enabled(on);
    }

    fn kernel_times(&self) -> Option<&KernelTimes> {
        self.timer.totals()
    }

    fn trace(&mut self, add: &mut AddSpan<'_>) {
        for DeviceSpan { name, start, end } in &self.spans {
            add(Row::Compute, name, *start, *end, json!({}));
        }
        for making in &self.makings {
            add(Row::Reader(making.thread), "micro-batch", making.start, making.end, json!({}));
        }
        if let Some((exchange, _)) = &self.exchange {
            exchange.trace(add);
        }
    }
}
