//! The exchange between ranks in a step, independent of the device: gradients in buckets, and the
//! metrics of a step.

mod buckets;
mod fusion;

pub(super) use buckets::{Buckets, CHECK, check_bytes};
pub(super) use fusion::default_runs;

use super::TrainError;
use super::engine::{AddSpan, Measure, Reductions};
use super::training::Training;
use crate::comm::{Group, Reducer, Timing};
use crate::nn::Bucket;
use crate::profile::Row;
use serde_json::json;
use std::time::{Duration, Instant};

/// The buckets and their reducer.
pub(super) struct Exchange {
    pub reducer: Reducer,
    pub buckets: Buckets,
    /// The gradients of each bucket.
    pub ranges: Vec<Bucket>,
    world: u32,
}

impl Exchange {
    /// Connects the ranks, and decides which buckets are reduced together. `statistics`: number of
    /// batch statistics values.
    ///
    /// # Errors
    /// The group failed.
    pub fn connect(training: &Training, statistics: usize, group: &mut Group) -> Result<Exchange, TrainError> {
        let buckets = Buckets::new(training, statistics);
        let reducer = Reducer::connect(group, &buckets.lens, &buckets.options)?;
        let mut exchange = Exchange { reducer, buckets, ranges: training.buckets.clone(), world: training.world };
        exchange.fuse(training.config.overlap, group)?;
        Ok(exchange)
    }

    /// Connects the ranks for metrics only: gradients are reduced elsewhere. `statistics`: number
    /// of batch statistics values.
    ///
    /// # Errors
    /// The group failed.
    pub fn without_gradients(
        training: &Training,
        statistics: usize,
        group: &mut Group,
    ) -> Result<Exchange, TrainError> {
        let buckets = Buckets::without_gradients(statistics);
        let reducer = Reducer::connect(group, &buckets.lens, &buckets.options)?;
        Ok(Exchange { reducer, buckets, ranges: Vec::new(), world: training.world })
    }

    /// See [`super::engine::Engine::reductions`].
    pub fn reductions(&self) -> Reductions {
        let bytes = |bucket: usize| 4 * self.ranges[bucket].range.len() as u64;
        let runs = self.buckets.runs.iter().filter(|_| self.world > 1);
        Reductions {
            transport: self.reducer.transport(),
            links: self.reducer.links().to_vec(),
            probed: self.reducer.probed(),
            bytes: runs.clone().map(|run| run.clone().map(bytes).sum()).collect(),
            // The buckets of a run are about equally long. Where their algorithms differ, the
            // first one's stands for the run.
            algorithms: runs.filter_map(|run| Some(self.reducer.algorithm(run.start)?.to_string())).collect(),
        }
    }

    /// See [`super::engine::Engine::reduce`].
    pub fn reduce(&mut self, what: Measure) -> Result<(), TrainError> {
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

    /// Gradient bytes that are not reduced yet.
    pub fn pending_bytes(&self) -> u64 {
        let left = (0..self.buckets.gradients).filter(|&bucket| self.reducer.is_running(bucket));
        left.map(|bucket| 4 * self.ranges[bucket].range.len() as u64).sum()
    }

    /// Time during which at least one of the step's reductions was running.
    pub fn reduction_time(&self) -> Duration {
        let mut total = Duration::ZERO;
        let mut reached: Option<Instant> = None;
        // All-reduces start almost in order. One that started before its predecessor ended adds
        // only the time after that.
        for timing in (0..self.buckets.gradients).filter_map(|bucket| self.reducer.timing(bucket)) {
            let from = reached.map_or(timing.began, |reached| reached.max(timing.began));
            total += timing.ended.saturating_duration_since(from);
            reached = Some(reached.map_or(timing.ended, |reached| reached.max(timing.ended)));
        }
        total
    }

    /// Adds the all-reduces of the last step.
    pub fn trace(&self, add: &mut AddSpan<'_>) {
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
