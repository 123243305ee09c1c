//! The CPU engine: its arrays are in host memory, and a step is complete when the call returns.
//!
//! ```text
//! reader -> forward -> backward ──> buckets (all-reduces start as they are complete: fusion)
//!                           └─ wait -> norm -> clip -> optimizer
//! ```
//!
//! With sharding, a rank gets and updates only its part of each bucket. The other weights arrive
//! during the next forward pass.
//!
//! With parameter servers, a rank pushes its gradients and gets the updated weights.
//!
//! With pipelines, it does so for one stage of the network.
//!
//! With local steps, no gradients are reduced; `outer` averages the changes of the weights instead.

mod asynchronous;
mod exchanges;
mod kernel;
mod outer;
mod pipeline;
mod plan;
mod servers;
mod shards;
mod sink;
mod state;
mod step;

pub(super) use plan::CpuPlan;

use super::TrainError;
use super::engine::{AddSpan, Array, Counters, Engine, Measure, Moment, Reductions, StepInput, StepOutcome};
use super::exchange::{Exchange, Servers};
use super::training::Training;
use crate::comm::Group;
use crate::cpu::{Cpu, HalfKernel};
use crate::data::{Batch, Making, Prefetcher};
use crate::nn::{Layout, LossSums, Network};
use crate::profile::Row;
use crate::recorder::Recorder;
use pipeline::Pipeline;
use serde_json::json;
use shards::Gathers;
use sink::GradientSlots;
use state::State;
use std::ops::Range;
use std::sync::Arc;
use switchyard_worker_contract::config::EngineConfig;
use switchyard_worker_contract::layers::LayerTime;

/// The CPU engine of a rank.
pub(super) struct CpuEngine {
    config: EngineConfig,
    world: u32,
    network: Network,
    cpu: Cpu,
    state: State,
    exchange: Exchange,
    slots: GradientSlots,
    pipeline: Option<Box<Pipeline>>,
    /// This rank's share of the mean batch statistics, summed over the micro-batches of a step.
    statistics: Vec<f32>,
    /// This rank's share of the mean loss of the last step.
    loss: f32,
    /// Sums of squared gradients of the parts of each rank.
    squares: Vec<f64>,
    gathers: Gathers,
    /// See [`sink::BucketSink`].
    discarded: Vec<f32>,
    /// Reader timings of the last step's micro-batches.
    makings: Vec<Making>,
    half_kernel: Option<HalfKernel>,
    recorder: Arc<Recorder>,
}

impl CpuEngine {
    /// Sets the initial weights, and agrees with the group on kernels and reductions. `saved`:
    /// kernel of the checkpoint from which the run resumes.
    ///
    /// # Errors
    /// The group failed, or no kernel is allowed on all ranks.
    pub fn connect(
        training: &Training,
        plan: CpuPlan,
        group: &mut Group,
        saved: Option<HalfKernel>,
        recorder: &Arc<Recorder>,
    ) -> Result<CpuEngine, TrainError> {
        let place = training.config.place(group.rank(), training.world);
        let mut plan = kernel::agree(training, plan, group, saved)?;
        if training.config.pipeline.is_some() {
            plan = plan.with_stage(training, place.stage as usize)?;
        }
        let half_kernel = plan.half_kernel(training);
        let CpuPlan { mut network, cpu, stages, .. } = plan;
        recorder.track_layers(&network);
        let (whole, members): (_, Vec<u32>) = (training, place.stage_ranks().collect());
        let of_stage = stages.is_some().then(|| pipeline::of_stage(training, place, network.layout()));
        let training = of_stage.as_ref().unwrap_or(training);
        let mut exchange = Exchange::connect(training, network.batch_statistics().len(), &members, group)?;
        let pipeline = stages.map(|stages| {
            let connected = Pipeline::connect(whole, stages, place, (&mut network, &exchange), group);
            connected.map(Box::new)
        });
        let pipeline = pipeline.transpose()?;
        let mut ownership = match &pipeline {
            Some(pipeline) => pipeline.ownership(whole, &exchange),
            None => exchange.ownership(),
        };
        if training.config.parameter_server.is_some_and(|servers| servers.has_state()) {
            ownership.own.clear();
        }
        let state = State::new(&training.config, &network, &cpu, &ownership);
        if let Some(settings) = training.config.parameter_server {
            let settings = (training, settings);
            let mut servers = Servers::connect(settings, network.layout(), (&exchange, &cpu), group)?;
            servers.start(&state.weights, 0)?;
            exchange.servers = Some(servers);
        }
        Ok(CpuEngine {
            config: training.config.clone(),
            world: training.world,
            state,
            exchange,
            slots: GradientSlots::new(network.layout(), &training.buckets),
            pipeline,
            statistics: vec![0.0; network.batch_statistics().len()],
            loss: 0.0,
            squares: vec![0.0; training.world as usize],
            gathers: Gathers::with_capacity(training.buckets.len()),
            discarded: Vec::new(),
            makings: Vec::with_capacity(training.config.batch_merge as usize),
            network,
            cpu,
            half_kernel,
            recorder: Arc::clone(recorder),
        })
    }
}

impl Engine for CpuEngine {
    fn step(&mut self, reader: &mut Prefetcher, input: &StepInput) -> Result<Option<StepOutcome>, TrainError> {
        self.run(reader, input).map(Some)
    }

    fn drain(&mut self) -> Result<Option<StepOutcome>, TrainError> {
        Ok(None)
    }

    fn await_weights(&mut self) -> Result<(), TrainError> {
        self.receive_weights()?;
        Ok(())
    }

    fn complete_weights(&mut self) -> Result<(), TrainError> {
        Ok(self.complete_parts()?)
    }

    fn evaluate(&mut self, batch: &Batch) -> Result<Option<LossSums>, TrainError> {
        self.check_arrived()?;
        if self.pipeline.is_some() {
            return self.evaluate_stage(batch);
        }
        Ok(Some(self.network.evaluate(self.state.weights(), batch)))
    }

    fn layout(&self) -> &Layout {
        self.pipeline.as_ref().map_or_else(|| self.network.layout(), |pipeline| &pipeline.stages.layout)
    }

    fn has_all_weights(&self) -> bool {
        self.pipeline.is_none()
    }

    fn statistics(&self) -> Vec<(String, usize)> {
        if let Some(pipeline) = &self.pipeline {
            return pipeline.stages.statistics.clone();
        }
        self.network.statistics().map(|(name, len)| (name.to_owned(), len)).collect()
    }

    fn moments(&self) -> Vec<Moment> {
        self.state.moments().collect()
    }

    fn read(&self, array: Array, from: usize, into: &mut [f32]) -> Result<(), TrainError> {
        self.check_complete()?;
        if let Some(pipeline) = &self.pipeline {
            pipeline.read(&self.state, array, from, into);
            return Ok(());
        }
        match (&self.exchange.servers, array) {
            (Some(servers), Array::Moments(index)) if self.state.geo.is_none() => {
                servers.get(index, from, into, false)?
            }
            _ => self.state.read(array, from, into),
        }
        Ok(())
    }

    fn collect(&mut self, wanted: &[(Array, usize, Range<usize>)], into: &mut [f32]) -> Result<(), TrainError> {
        if self.pipeline.is_some() {
            return self.collect_stages(wanted, into);
        }
        self.collect_parts(wanted, into)
    }

    fn write(&mut self, array: Array, from: usize, numbers: &[f32]) -> Result<(), TrainError> {
        if let Some(pipeline) = &self.pipeline {
            pipeline.write(&mut self.state, array, from, numbers);
            return Ok(());
        }
        match (&self.exchange.servers, array) {
            (Some(servers), Array::Moments(index)) if self.state.geo.is_none() => servers.put(index, from, numbers),
            _ => self.state.write(array, from, numbers),
        }
        Ok(())
    }

    fn counters(&self) -> Counters {
        self.state.counters(self.half_kernel)
    }

    fn resume(&mut self, counters: &Counters) -> Result<Option<String>, TrainError> {
        let changed = self.state.resume(counters, self.config.precision)?;
        self.state.begin(&self.cpu);
        if let Some(servers) = &mut self.exchange.servers {
            servers.start(&self.state.weights, counters.optimizer_steps)?;
        }
        Ok(changed)
    }

    fn kernel(&self) -> String {
        kernel::name(&self.cpu, self.half_kernel)
    }

    fn reductions(&self) -> Reductions {
        self.exchange.reductions()
    }

    fn reduce(&mut self, what: Measure) -> Result<(), TrainError> {
        self.exchange.reduce(what)
    }

    fn record(&mut self, on: bool) {
        self.network.record(on);
        self.cpu.pool.record(on);
    }

    fn layer_times(&self) -> Vec<LayerTime> {
        let mut layers: Vec<LayerTime> = (0..self.network.layers())
            .map(|node| {
                let (name, kind) = self.network.name(node);
                let parameters = self.network.finished_parameters(node) as u64;
                LayerTime { name: name.to_owned(), kind: kind.to_owned(), parameters, ..LayerTime::default() }
            })
            .collect();
        for operation in self.network.operations() {
            let seconds = operation.end.duration_since(operation.start).as_secs_f64();
            let layer = &mut layers[operation.node as usize];
            *if operation.backward { &mut layer.backward_seconds } else { &mut layer.forward_seconds } += seconds;
        }
        layers
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
        self.exchange.trace(add);
    }
}
