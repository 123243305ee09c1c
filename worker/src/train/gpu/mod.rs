//! The engine on a GPU: the host queues what the device does, and waits for the outcome of a step.
//!
//! ```text
//! GpuPlan: libraries, GPU, answers of cuDNN, gpu::Computation ─> Memories: buffers ─> Workshop: kernels, algorithms ─> Run: Segments, graphs
//! reader -> Feed: pinned memory, copies ─> stream: forward, backward ──────────────────> update ─> outcome
//!                                                     └─ several ranks: Collectives, or ───┘
//!                                                        Staging -> reducer
//! ```
//!
//! One stream computes, so that all works are in the order in which they are queued. Others copy batches and statistics of batch norms and,
//! with several ranks, sum gradients by NCCL, or copy them to the host and back.

mod algorithms;
mod cache;
mod collectives;
mod commands;
mod cudnn;
mod feed;
mod health;
mod machine;
mod memories;
mod norms;
mod offer;
mod plan;
mod predict;
mod programs;
mod run;
mod segment;
mod staging;
mod step;
mod times;
mod users;
mod watch;

pub(super) use plan::GpuPlan;
pub use predict::predict;
pub use users::{Use, in_use};

use super::TrainError;
use super::engine::{AddSpan, Array, Counters, Engine, Given, Measure, Reductions, Told};
use super::exchange::Exchange;
use super::scales::Scales;
use super::training::Training;
use crate::amp::LossScaler;
use crate::comm::Group;
use crate::cpu::ops::Targets;
use crate::data::{Batch, Making, Prefetcher};
use crate::gpu::{Computation, Memory, Share, Update};
use crate::model::initialise;
use crate::nn::{Layout, LossSums};
use crate::optimizer::Steps;
use crate::profile::Row;
use crate::recorder::Recorder;
use algorithms::Algorithms;
use cache::Cache;
use collectives::Collectives;
use commands::{Workshop, refused_epilogue};
use feed::Feed;
use health::Health;
use memories::Memories;
use norms::Norms;
use plan::Planned;
use run::Run;
use serde_json::json;
use staging::Staging;
use std::sync::Arc;
use std::time::Instant;
use step::Begun;
use switchyard_cuda::Library;
use switchyard_cuda::driver::{Context, Counts, Pinned, Stream};
use switchyard_cuda::kernels::gradients::Scaler;
use switchyard_cuda::kernels::optimizer::Numbers;
use switchyard_cuda::nvrtc::Nvrtc;
use switchyard_cuda::nvtx;
use switchyard_worker_contract::config::{EngineConfig, Matmul, Transport};
use switchyard_worker_contract::event::GpuCalls;
use switchyard_worker_contract::kernels::KernelTimes;
use times::Times;

/// Memory that products may use beside their matrices: what NVIDIA advises for its newer devices.
const WORKSPACE: usize = 32 << 20;

/// Micro-batches that may be under way: while a device computes one, the host prepares the next.
const SLOTS: usize = 2;

/// What the host and the device tell each other in a step.
struct Messages {
    candidates: Pinned<Numbers>,
    scaler: Pinned<Scaler>,
    loss: Pinned<f32>,
}

/// What the device did, as the host saw it.
struct Seen {
    name: &'static str,
    start: Instant,
    end: Instant,
}

/// A rank's GPU and what it works on.
pub(super) struct GpuEngine {
    config: EngineConfig,
    world: u32,
    kernel: String,
    computation: Computation,
    /// Where NCCL sums the gradients. It is dropped before the memory that it uses.
    collectives: Option<Collectives>,
    memories: Memories,
    workshop: Workshop,
    run: Run,
    feed: Feed,
    messages: [Messages; SLOTS],
    begun: Option<Begun>,
    stream: Stream,
    /// Micro-batches before the current step: they take the slots in turn.
    turn: usize,
    /// With several ranks.
    exchange: Option<(Exchange, Staging)>,
    norms: Norms,
    scales: Scales,
    steps: Steps,
    /// Nats, and right predictions, of each row in an evaluation.
    rows: [Vec<f32>; 2],
    /// How the reader made the micro-batches of the last step.
    makings: Vec<Making>,
    /// What the device did in the last step.
    seen: Vec<Seen>,
    times: Times,
    /// Calls of the last step.
    calls: Counts,
    recorder: Arc<Recorder>,
    /// It ends last, and has then seen all.
    health: Health,
}

impl GpuEngine {
    /// Takes the GPU of this rank, allocates all memory, compiles the kernels, and sets the initial weights.
    ///
    /// # Errors
    /// The group failed, there is no GPU for this rank or too little memory, or a library refuses.
    pub fn connect(
        training: &Training,
        plan: GpuPlan,
        (group, local_rank): (&mut Group, u32),
        recorder: &Arc<Recorder>,
    ) -> Result<GpuEngine, TrainError> {
        if let Err(error) = nvtx::attach(|name| std::env::var_os(name))
            && local_rank == 0
        {
            eprintln!("note: profilers see no ranges: {error}");
        }
        let (taken, planned) = plan.take(local_rank, training)?;
        if group.rank() == 0 {
            planned.answers.tell();
            planned.tell_fp8(training);
        }
        let health = Health::start((group.rank(), &taken.0.device().bus), local_rank == 0, recorder);
        let sight = health.sight().clone();
        sight.explain(GpuEngine::on(taken, planned, training, group, (recorder, health)))
    }

    /// The engine on a GPU that was taken.
    fn on(
        (context, nvrtc, cublaslt): (Context, Nvrtc, Library),
        Planned { mut computation, answers, kernel, need }: Planned,
        training: &Training,
        group: &mut Group,
        (recorder, health): (&Arc<Recorder>, Health),
    ) -> Result<GpuEngine, TrainError> {
        let memories = Memories::new(&context, (&computation, WORKSPACE), training, &need)?;
        let mut algorithms = Algorithms::start(&context, &cublaslt, &Cache::of_environment())?;
        let mut works = computation.works(|span| memories.place(&computation, 0, span))?;
        if let Some(reason) = refused_epilogue(&mut algorithms, &works, training.config.gpu.matmul) {
            if group.rank() == 0 {
                eprintln!("note: what follows products is computed by kernels of ours: {reason}");
            }
            computation = computation.without_epilogues();
            works = computation.works(|span| memories.place(&computation, 0, span))?;
        }
        let libraries = (&nvrtc, algorithms, answers);
        let mut workshop = Workshop::new(&context, libraries, &works, &training.config, recorder)?;
        let norms = Norms::new(&context, computation.plan())?;
        let statistics = norms.running.len();
        let collectives = match training.world {
            1 => None,
            _ => Collectives::connect(training, (&context, &nvrtc), &memories, group, (recorder, health.sight()))?,
        };
        let messages = || -> Result<Messages, switchyard_cuda::Error> {
            Ok(Messages { candidates: context.pinned(2)?, scaler: context.pinned(1)?, loss: context.pinned(1)? })
        };
        let exchange = match (training.world, &collectives) {
            (1, _) => None,
            (_, Some(_)) => Some(Exchange::without_gradients(training, statistics, group)?),
            (_, None) => Some(Exchange::connect(training, statistics, group)?),
        };
        let staging = |exchange: Exchange| {
            let longest = exchange.ranges.iter().map(|bucket| bucket.range.len()).max().unwrap_or(1);
            Ok::<_, TrainError>((exchange, Staging::new(&context, &computation, training, longest)?))
        };
        let exchange = exchange.map(staging).transpose()?;
        let rows = computation.plan().losses().iter().map(|loss| loss.rows).sum();
        let staging = exchange.as_ref().map(|(_, staging)| staging);
        let merge = training.config.batch_merge;
        let run = Run::new((&context, &mut workshop), (&computation, &memories), merge, staging)?;
        workshop.keep();
        let mut engine = GpuEngine {
            config: training.config.clone(),
            world: training.world,
            kernel,
            feed: Feed::new(&context, computation.inputs())?,
            messages: [messages()?, messages()?],
            begun: None,
            stream: context.stream()?,
            turn: 0,
            exchange,
            norms,
            scales: Scales::new(&training.config),
            steps: Steps::new(&training.config.optimizer.rule),
            rows: [vec![0.0; rows], vec![0.0; rows]],
            makings: Vec::with_capacity(merge as usize),
            seen: Vec::with_capacity(2 * merge as usize + 4),
            times: Times::new(&context.device().name, training.config.gpu.matmul == Matmul::Tf32),
            calls: Counts::default(),
            recorder: Arc::clone(recorder),
            health,
            computation,
            collectives,
            memories,
            workshop,
            run,
        };
        let mut weights = vec![0.0; engine.layout().len];
        initialise(engine.layout(), training.config.seed, &mut weights);
        engine.write(Array::Weights, 0, &weights)?;
        engine.round()?;
        Ok(engine)
    }

    /// Refreshes the copies of the weights in 16 bits.
    fn round(&mut self) -> Result<(), TrainError> {
        if let Some(round) = &self.run.round {
            self.workshop.queue(round, &self.memories, &self.stream)?;
        }
        Ok(())
    }

    fn run_evaluation(&mut self, batch: &Batch) -> Result<LossSums, TrainError> {
        let whole = Share { part: 1.0, loss_scale: 1.0 };
        self.norms.upload(&self.memories)?;
        let before = (&self.run.marks(0).backward, &self.stream);
        self.feed.send(0, (batch, whole), &self.memories, before, None)?;
        self.run.evaluation.queue(&self.workshop, &self.memories, &self.stream)?;
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

    /// Where an array is; `None`: on the host.
    fn memory(&self, array: Array) -> Option<Memory> {
        match array {
            Array::Weights => Some(Memory::Weights),
            Array::Moments(index) => Some(Memory::Moments(index)),
            Array::Statistics => None,
        }
    }
}

impl Engine for GpuEngine {
    fn step(&mut self, reader: &mut Prefetcher, given: &Given) -> Result<Option<Told>, TrainError> {
        let told = self.run_step(reader, given);
        self.health.sight().explain(told)
    }

    fn drain(&mut self) -> Result<Option<Told>, TrainError> {
        let told = self.settle();
        self.health.sight().explain(told)
    }

    fn evaluate(&mut self, batch: &Batch) -> Result<LossSums, TrainError> {
        let sums = self.run_evaluation(batch);
        self.health.sight().explain(sums)
    }

    fn layout(&self) -> &Layout {
        self.computation.layout()
    }

    fn statistics(&self) -> Vec<(String, usize)> {
        self.norms.names.clone()
    }

    fn moments(&self) -> Vec<&'static str> {
        self.computation.update().moments().to_vec()
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

    fn calls(&self) -> Option<GpuCalls> {
        let Counts { launches, waits } = self.calls;
        Some(GpuCalls { works: self.run.works() as u64, launches, waits })
    }

    fn reductions(&self) -> Reductions {
        match (&self.collectives, &self.exchange) {
            (Some(collectives), _) => collectives.reductions(),
            (None, Some((exchange, _))) => exchange.reductions(),
            (None, None) => {
                Reductions { transport: Transport::None, links: Vec::new(), probed: None, bytes: Vec::new() }
            }
        }
    }

    fn reduce(&mut self, what: Measure) -> Result<(), TrainError> {
        let reduced = match (&mut self.collectives, &mut self.exchange) {
            (Some(collectives), _) => collectives.reduce(what, &self.memories),
            (None, Some((exchange, _))) => exchange.reduce(what),
            (None, None) => Ok(()),
        };
        self.health.sight().explain(reduced)
    }

    /// What the device did is known by forward and backward of each micro-batch in every step; its works are timed one by one on request.
    fn record(&mut self, on: bool) {
        self.times.set(on);
    }

    fn kernel_times(&self) -> Option<&KernelTimes> {
        self.times.told()
    }

    fn trace(&mut self, add: &mut AddSpan<'_>) {
        for Seen { name, start, end } in &self.seen {
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
