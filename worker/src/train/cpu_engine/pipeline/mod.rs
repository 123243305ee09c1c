//! Pipelines: the rank has one stage of the network, and exchanges activations and their gradients
//! with its neighbours.
//!
//! ```text
//! schedule       the order of forward and backward passes and messages; pure
//! micro-batches  input from the stage before -> forward -> output to the stage after; gradients
//!                back; in the last one, the reductions among the ranks of the stage start
//! shared         gradients of a parameter of two stages are added
//! norm           partial sums from the last stage to the first, in the order of the layout
//! metrics        loss of the last stage, norm of the first, flags of all ranks
//! ```
//!
//! Sums have the order that they have without stages, so the weights have the same bits. The
//! exception is a shared parameter: each stage adds the gradients of its micro-batches first.

mod norm;
mod schedule;
mod state;
mod step;

use crate::comm::{Collectives, Group};
use crate::cpu::Format;
use crate::data::Batch;
use crate::nn::{Boundary, Layout, Network, fuse};
use crate::optimizer::Ownership;
use crate::train::TrainError;
use crate::train::exchange::{Buckets, Exchange, NORM};
use crate::train::stages::Stages;
use crate::train::training::{BUCKET, Training};
use norm::Norm;
use schedule::{Action, one_forward_one_backward};
use state::Run;
use std::ops::Range;
use std::sync::Arc;
use switchyard_worker_contract::config::{EngineConfig, PipelinePlace};

/// A rank's place in its pipeline.
pub(super) struct Pipeline {
    pub place: PipelinePlace,
    pub stages: Stages,
    actions: Arc<[Action]>,
    /// Messages between stages.
    links: Collectives,
    /// The metrics of all ranks.
    metrics: Exchange,
    /// Where the weights of this stage are in the whole layout.
    runs: Vec<Run>,
    norm: Norm,
    shared: Vec<SharedGradient>,
    /// The samples of each micro-batch in flight; empty in the middle of a pipeline.
    batches: Vec<Batch>,
    /// An input gradient and an input, and an output and its gradient: two halves each.
    swapped: [Vec<u8>; 2],
}

/// A parameter that another stage has too.
struct SharedGradient {
    bucket: usize,
    range: Range<usize>,
    /// The rank of the other stage.
    with: u32,
    /// The other stage is after this one.
    is_own: bool,
    /// This rank's gradient, then the other's.
    halves: Vec<f32>,
}

/// A rank's training as one of the ranks of its stage, which reduce their gradients.
pub(super) fn of_stage(training: &Training, place: PipelinePlace, layout: &Layout) -> Training {
    let buckets = fuse(layout, BUCKET);
    let config = EngineConfig { pipeline: None, ..training.config.clone() };
    Training { config, buckets, world: place.replicas, ..training.clone() }
}

impl Pipeline {
    /// Connects all ranks. `exchange`: the reductions of this stage.
    ///
    /// # Errors
    /// The group failed.
    pub fn connect(
        training: &Training,
        stages: Stages,
        place: PipelinePlace,
        (network, exchange): (&mut Network, &Exchange),
        group: &mut Group,
    ) -> Result<Pipeline, TrainError> {
        let links = Collectives::connect(group, None)?;
        let metrics = Exchange::without_gradients(training, NORM, group)?;
        let layout = network.layout();
        let runs = state::runs(&stages.layout, layout);
        let stage = place.stage as usize;
        let own = |range: Range<usize>| state::within(&runs, range);
        let shared = stages.shared.iter().filter(|shared| shared.stages.contains(&stage)).filter_map(|shared| {
            let range = layout.parameters.iter().find(|parameter| parameter.name == shared.name)?.range();
            let bucket = exchange.ranges.iter().position(|bucket| bucket.range.contains(&range.start))?;
            let start = exchange.ranges[bucket].range.start;
            let [first, second] = shared.stages;
            Some(SharedGradient {
                bucket,
                range: range.start - start..range.end - start,
                with: place.in_stage(if stage == first { second } else { first } as u32),
                is_own: stage == first,
                halves: vec![0.0; 2 * range.len()],
            })
        });
        let shared = shared.collect();
        let weights = &stages.weights[stage];
        let norm = Norm::new(whole_parts(training, &stages, exchange), weights, &exchange.ranges, own);
        let slots = stages.in_flight(stage, training.config.batch_merge);
        let merge = training.config.batch_merge;
        let swapped = [Boundary::Input, Boundary::Output].map(|boundary| vec![0; 2 * network.boundary(boundary).len()]);
        Ok(Pipeline {
            actions: one_forward_one_backward(place.stage, place.stages, merge).into(),
            links,
            metrics,
            norm,
            shared,
            batches: vec![Batch::default(); slots],
            swapped,
            runs,
            place,
            stages,
        })
    }

    /// The parts of this stage's layout, cut where a run without stages cuts.
    pub fn ownership(&self, training: &Training, exchange: &Exchange) -> Ownership {
        let parts = whole_parts(training, &self.stages, exchange);
        let last = parts.into_iter().flat_map(|part| state::within(&self.runs, part.range.end - 1..part.range.end));
        let mut cuts: Vec<usize> = last.map(|last| last.end).collect();
        cuts.sort_unstable();
        Ownership { cuts, own: exchange.ranges.iter().map(|bucket| bucket.range.clone()).collect() }
    }

    /// Bytes of messages between stages that a rank holds.
    pub fn message_bytes(stages: &Stages, stage: usize, format: Format) -> u64 {
        let received = |stage: usize| stages.received.get(stage).copied().unwrap_or(0);
        2 * (format.size() * (received(stage) + received(stage + 1))) as u64
    }
}

/// A part of a bucket whose squares a run without stages adds on their own.
struct Part {
    /// In the whole layout.
    range: Range<usize>,
    owner: usize,
}

/// The parts of all buckets, in the order in which a run without stages adds their squares.
fn whole_parts(training: &Training, stages: &Stages, exchange: &Exchange) -> Vec<Part> {
    let statistics = stages.statistics.iter().map(|(_, len)| len).sum();
    let lens = Buckets::new(training, statistics).lens;
    let replicas = training.replicas();
    let parts = training.buckets.iter().zip(lens).flat_map(|(bucket, len)| {
        let part = |owner: u32| -> Part {
            let part = exchange.reducer.shard_of(len, owner);
            let start = bucket.range.start;
            let range = (start + part.start).min(bucket.range.end)..(start + part.end).min(bucket.range.end);
            Part { range, owner: owner as usize }
        };
        (0..replicas).map(part).collect::<Vec<_>>()
    });
    parts.filter(|part| !part.range.is_empty()).collect()
}

fn missing() -> TrainError {
    TrainError::Usage("internal error: no pipeline".into())
}
