//! The exchange between ranks in a step, independent of the device: gradients in buckets, and the
//! metrics of a step.

mod buckets;
mod fusion;
mod gradients;
mod servers;
mod shards;
mod top_k;

pub(super) use buckets::{Buckets, CHECK, check_bytes, top_k_bytes};
pub(super) use fusion::{default_runs, short_runs};
pub(super) use gradients::GradientParts;
pub use servers::serve;
pub(super) use servers::{Push, Servers, check as check_servers, dedicated_bytes, most_hosted, server_bytes};
pub(super) use shards::{ELEMENTS as NORM, decode, encode};
pub(super) use top_k::TopKExchange;

use shards::Shards;

use super::TrainError;
use super::engine::{AddSpan, Measure, Reductions};
use super::training::Training;
use crate::comm::{BucketRun, Group, Packing, Reducer, Timing};
use crate::nn::Bucket;
use crate::profile::Row;
use serde_json::json;
use std::ops::Range;
use std::time::{Duration, Instant};
use switchyard_worker_contract::config::{Compression, Transport};

/// The buckets and their reducer.
pub(super) struct Exchange {
    pub reducer: Reducer,
    pub buckets: Buckets,
    /// The gradients of each bucket.
    pub ranges: Vec<Bucket>,
    /// Sends only the largest gradients, if the job says so.
    pub top_k: Option<TopKExchange>,
    /// With sharding.
    pub shards: Option<Shards>,
    /// With sharding, the form in which weights travel, by bucket.
    pub packings: Vec<Packing>,
    /// With divided gradients.
    pub parts: Option<GradientParts>,
    /// With parameter servers, which then get the gradients.
    pub servers: Option<Servers>,
    /// Buckets that carried gradients or weights in the last step.
    pub reduced: Range<usize>,
    /// Updated weights arrived in the last step.
    pub gathered: bool,
    world: u32,
}

impl Exchange {
    /// Connects the ranks, and decides which buckets are reduced together. `statistics`: number of
    /// batch statistics values; `members`: see [`Reducer::connect_among`].
    ///
    /// # Errors
    /// The group failed.
    pub fn connect(
        training: &Training,
        statistics: usize,
        members: &[u32],
        group: &mut Group,
    ) -> Result<Exchange, TrainError> {
        let buckets = Buckets::new(training, statistics);
        let packings = training.packings.clone();
        let reducer = if packings.is_empty() {
            Reducer::connect_among(group, members, &buckets.lens, &buckets.options)?
        } else {
            let count = buckets.lens.len();
            let together = || vec![BucketRun { buckets: 0..count, place: 0 }];
            let runs = training.places.as_ref().map_or_else(together, |places| places.runs_of(count));
            Reducer::connect_in_places(group, &buckets.lens, (&runs, &packings), &buckets.options)?
        };
        let ranks = (group.rank(), training.world);
        let top_k =
            training.config.compression.zip(buckets.entries).map(|(Compression::TopK(settings), bucket)| {
                TopKExchange::new(settings, &training.buckets, bucket, ranks)
            });
        let reduced = buckets.entries.map_or(0..buckets.gradients, |bucket| bucket..bucket + 1);
        let (ranges, world) = (training.buckets.clone(), training.world);
        let shards = buckets.shards.map(|buckets| Shards::new(group.rank(), buckets));
        let mut exchange = Exchange {
            reducer,
            buckets,
            ranges,
            top_k,
            shards,
            packings,
            parts: None,
            servers: None,
            reduced,
            gathered: false,
            world,
        };
        if let Some(places) = &training.places {
            exchange.buckets.runs = places.runs.clone();
            let own = (0..exchange.ranges.len()).map(|bucket| exchange.part(bucket, group.rank()));
            exchange.parts = Some(GradientParts::new(places.clone(), own.collect()));
        } else if exchange.top_k.is_none() && training.config.parameter_server.is_none() {
            exchange.fuse(training.config.overlap, group)?;
        }
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
        let (ranges, world) = (Vec::new(), training.world);
        Ok(Exchange {
            reducer,
            buckets,
            ranges,
            top_k: None,
            shards: None,
            packings: Vec::new(),
            parts: None,
            servers: None,
            reduced: 0..0,
            gathered: false,
            world,
        })
    }

    /// See [`super::engine::Engine::reductions`].
    pub fn reductions(&self) -> Reductions {
        // Of the buckets of a run, which are about equally long, the first one's algorithm stands
        // for all.
        let (bytes, first): (Vec<u64>, Vec<usize>) = match self.buckets.entries {
            _ if self.world == 1 => (Vec::new(), Vec::new()),
            Some(entries) => (vec![4 * self.buckets.lens[entries] as u64], vec![entries]),
            None => {
                let bytes = |bucket: usize| 4 * self.ranges[bucket].range.len() as u64;
                self.buckets.runs.iter().map(|run| (run.clone().map(bytes).sum::<u64>(), run.start)).unzip()
            }
        };
        let algorithm = |bucket| Some(self.reducer.algorithm(bucket)?.to_string());
        if let Some(servers) = self.servers.as_ref().filter(|_| self.world > 1) {
            let (links, probed) = (servers.links.clone(), self.reducer.probed());
            return Reductions { transport: Transport::Tcp, links, probed, algorithms: Vec::new(), bytes };
        }
        Reductions {
            transport: self.reducer.transport(),
            links: self.reducer.links().to_vec(),
            probed: self.reducer.probed(),
            algorithms: first.into_iter().filter_map(algorithm).collect(),
            bytes,
        }
    }

    /// See [`super::engine::Engine::reduce`].
    pub fn reduce(&mut self, what: Measure) -> Result<(), TrainError> {
        match (what, self.buckets.check) {
            (Measure::Gradients, _) => {
                if self.servers.is_some() {
                    return Ok(());
                }
                if let Some(bucket) = self.buckets.entries {
                    return Ok(self.reducer.all_reduce(bucket)?);
                }
                for (number, run) in self.buckets.runs.iter().enumerate() {
                    if let Some(parts) = &self.parts {
                        for earlier in (0..number).filter(|earlier| parts.share_place([*earlier, number])) {
                            self.buckets.runs[earlier].clone().try_for_each(|bucket| self.reducer.wait(bucket))?;
                        }
                    }
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
        let is_running = |bucket: usize| match &self.servers {
            Some(servers) => servers.is_waiting(bucket),
            None => self.reducer.is_running(bucket),
        };
        let left = (0..self.buckets.gradients).filter(|bucket| is_running(*bucket));
        left.map(|bucket| 4 * self.ranges[bucket].range.len() as u64).sum()
    }

    /// Times of a bucket's last reduction.
    fn timing(&self, bucket: usize) -> Option<Timing> {
        match &self.servers {
            Some(servers) => servers.timing(bucket),
            None => self.reducer.timing(bucket),
        }
    }

    /// Time during which at least one of the step's reductions was running.
    pub fn reduction_time(&self) -> Duration {
        // Gathers run before the first reduction of a step or after the last one.
        let gathers = self.gathers().map(|bucket| self.reducer.gather_timing(bucket));
        union(gathers) + union(self.reduced.clone().map(|bucket| self.timing(bucket)))
    }

    /// Buckets whose weights arrived in the last step, in order.
    fn gathers(&self) -> impl Iterator<Item = usize> {
        let gathered = if self.gathered { self.reduced.clone() } else { 0..0 };
        gathered.rev()
    }

    /// Adds the reductions of the last step.
    pub fn trace(&self, add: &mut AddSpan<'_>) {
        let mut span = |name: &str, bucket: usize, timing: Option<Timing>| {
            let Some(Timing { started, began, ended, bytes, sent, lane }) = timing else { return };
            let queued = began.saturating_duration_since(started).as_secs_f64() * 1e3;
            let arguments = json!({"bytes": bytes, "sentBytes": sent, "queuedMilliseconds": queued});
            add(Row::Communicator(lane), &format!("{name} {bucket}"), began, ended, arguments);
        };
        let name = match (&self.shards, &self.servers) {
            (Some(_), _) => "reduce-scatter",
            (None, Some(_)) => "push and pull",
            (None, None) => "all-reduce",
        };
        self.reduced.clone().for_each(|bucket| span(name, bucket, self.timing(bucket)));
        self.gathers().for_each(|bucket| span("all-gather", bucket, self.reducer.gather_timing(bucket)));
    }
}

/// Time covered by at least one of these operations, which start almost in order.
fn union(timings: impl Iterator<Item = Option<Timing>>) -> Duration {
    let mut total = Duration::ZERO;
    let mut reached: Option<Instant> = None;
    for timing in timings.flatten() {
        // One that started before its predecessor ended adds only the time after that.
        let from = reached.map_or(timing.began, |reached| reached.max(timing.began));
        total += timing.ended.saturating_duration_since(from);
        reached = Some(reached.map_or(timing.ended, |reached| reached.max(timing.ended)));
    }
    total
}
