//! The engine on CPUs: its numbers are in the memory of the process, and a step is over when it returns.
//!
//! ```text
//! reader -> forward -> backward ──> buckets (all-reduces start as they are complete: fusion)
//!                           └─ wait -> norm -> clip -> optimizer
//! ```

mod buckets;
mod fusion;
mod kernel;
mod sink;
mod state;
mod step;

pub(super) use buckets::CHECK;
pub(super) use kernel::name;

use super::TrainError;
use super::blueprint::{Blueprint, Training};
use super::engine::{AddSpan, Array, Counters, Engine, Given, Measure, Reductions, Told};
use crate::comm::{Group, Reducer, Timing};
use crate::cpu::{Cpu, HalfKernel};
use crate::data::{Batch, Making, Prefetcher};
use crate::nn::{Bucket, Layout, LossSums, Network};
use crate::profile::Row;
use crate::recorder::Recorder;
use buckets::Buckets;
use serde_json::json;
use sink::Places;
use state::State;
use std::sync::Arc;
use switchyard_worker_contract::config::EngineConfig;

/// A rank's CPUs and what they work on.
pub(super) struct CpuEngine {
    config: EngineConfig,
    world: u32,
    network: Network,
    cpu: Cpu,
    state: State,
    reducer: Reducer,
    buckets: Buckets,
    /// The gradients of each bucket.
    ranges: Vec<Bucket>,
    places: Places,
    /// This rank's part of the mean of the batch statistics, summed over the micro-batches of a step.
    statistics: Vec<f32>,
    /// How the reader made the micro-batches of the last step.
    makings: Vec<Making>,
    half_kernel: Option<HalfKernel>,
    recorder: Arc<Recorder>,
}

impl CpuEngine {
    /// Sets the initial weights, and decides with the group how it computes and reduces. `saved`: the kernel of the
    /// checkpoint from which the run resumes.
    ///
    /// # Errors
    /// The group failed, or no kernel is allowed on all ranks.
    pub fn connect(
        blueprint: Blueprint,
        group: &mut Group,
        saved: Option<HalfKernel>,
        recorder: &Arc<Recorder>,
    ) -> Result<(Training, CpuEngine), TrainError> {
        let blueprint = kernel::agree(blueprint, group, saved)?;
        let half_kernel = blueprint.half_kernel();
        let Blueprint { training, network, cpu, .. } = blueprint;
        let buckets = Buckets::new(&training, &network);
        let reducer = Reducer::connect(group, &buckets.lens, &buckets.options)?;
        recorder.follow(&network);
        let mut engine = CpuEngine {
            config: training.config.clone(),
            world: training.world,
            state: State::new(&training.config, &network, &cpu),
            places: Places::new(network.layout(), &training.buckets),
            statistics: vec![0.0; network.batch_statistics().len()],
            makings: Vec::with_capacity(training.config.batch_merge as usize),
            ranges: training.buckets.clone(),
            network,
            cpu,
            reducer,
            buckets,
            half_kernel,
            recorder: Arc::clone(recorder),
        };
        engine.fuse(group)?;
        Ok((training, engine))
    }
}

impl Engine for CpuEngine {
    fn step(&mut self, reader: &mut Prefetcher, given: &Given) -> Result<Option<Told>, TrainError> {
        self.run(reader, given).map(Some)
    }

    fn drain(&mut self) -> Result<Option<Told>, TrainError> {
        Ok(None)
    }

    fn evaluate(&mut self, batch: &Batch) -> Result<LossSums, TrainError> {
        Ok(self.network.evaluate(self.state.weights(), batch))
    }

    fn layout(&self) -> &Layout {
        self.network.layout()
    }

    fn statistics(&self) -> Vec<(String, usize)> {
        self.network.statistics().map(|(name, len)| (name.to_owned(), len)).collect()
    }

    fn moments(&self) -> Vec<&'static str> {
        self.state.optimizer.state().map(|(name, _)| name).collect()
    }

    fn read(&self, array: Array, from: usize, into: &mut [f32]) -> Result<(), TrainError> {
        into.copy_from_slice(&self.state.array(array)[from..][..into.len()]);
        Ok(())
    }

    fn write(&mut self, array: Array, from: usize, numbers: &[f32]) -> Result<(), TrainError> {
        self.state.array_mut(array)[from..][..numbers.len()].copy_from_slice(numbers);
        Ok(())
    }

    fn counters(&self) -> Counters {
        self.state.counters(self.half_kernel)
    }

    fn resume(&mut self, counters: &Counters) -> Result<Option<String>, TrainError> {
        let changed = self.state.resume(counters, self.config.precision)?;
        self.state.round(&self.cpu);
        Ok(changed)
    }

    fn kernel(&self) -> String {
        kernel::name(&self.cpu, self.half_kernel)
    }

    fn reductions(&self) -> Reductions {
        let bytes = |bucket: usize| 4 * self.ranges[bucket].range.len() as u64;
        let runs = self.buckets.runs.iter().filter(|_| self.world > 1);
        Reductions {
            transport: self.reducer.transport(),
            links: self.reducer.links().to_vec(),
            probed: self.reducer.probed(),
            bytes: runs.map(|run| run.clone().map(bytes).sum()).collect(),
        }
    }

    fn reduce(&mut self, what: Measure) -> Result<(), TrainError> {
        match (what, self.buckets.check) {
            (Measure::Gradients, _) => {
                for (number, run) in self.buckets.runs.iter().enumerate() {
                    self.reducer.start_all(run.clone(), number);
                }
                Ok((0..self.buckets.gradients).try_for_each(|bucket| self.reducer.wait(bucket))?)
            }
            (Measure::Check, Some(bucket)) => Ok(self.reducer.all_reduce(bucket)?),
            (Measure::Check, None) => Ok(()),
        }
    }

    fn record(&mut self, on: bool) {
        self.network.record(on);
        self.cpu.pool.record(on);
    }

    fn trace(&mut self, add: &mut AddSpan<'_>) {
        for operation in self.network.operations() {
            let (name, kind) = self.network.name(operation.node as usize);
            let direction = if operation.backward { "backward" } else { "forward" };
            let arguments = json!({"kind": kind, "direction": direction});
            add(Row::Compute, &format!("{name} {direction}"), operation.start, operation.end, arguments);
        }
        for span in self.cpu.pool.record(true) {
            add(Row::Thread(span.thread as u32), "tasks", span.start, span.end, json!({}));
        }
        for making in &self.makings {
            add(Row::Reader(making.thread), "micro-batch", making.start, making.end, json!({}));
        }
        for bucket in 0..self.buckets.gradients {
            let Some(Timing { started, began, ended, bytes, sent, lane }) = self.reducer.timing(bucket) else {
                continue;
            };
            let queued = began.saturating_duration_since(started).as_secs_f64() * 1e3;
            let arguments = json!({"bytes": bytes, "sentBytes": sent, "queuedMilliseconds": queued});
            add(Row::Communicator(lane), &format!("all-reduce {bucket}"), began, ended, arguments);
        }
    }
}
