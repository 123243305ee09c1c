//! Sharded optimizer state: each rank updates its parts of the weights and sends them to the
//! others.
//!
//! ```text
//! bucket    reduce-scatter -> own part -> update -> into the bucket -> all-gather -> weights
//! ```
//!
//! What layers read in 16 bits is gathered in 16 bits. Its f32 values on other ranks are then old,
//! until `complete_weights` gathers them too: before a checkpoint, a digest or an export.
//!
//! Gathers run while the next buckets are updated and during the next forward pass, in whose order
//! they start. A layer waits for its own weights only.

use super::CpuEngine;
use super::sink::GradientSlots;
use super::state::State;
use crate::comm::CommError;
use crate::cpu::Cpu;
use crate::nn::{Network, WeightSource, Weights};
use crate::train::TrainError;
use crate::train::engine::{Array, Held};
use crate::train::exchange::Exchange;
use std::collections::VecDeque;
use std::ops::Range;
use std::time::{Duration, Instant};

/// Runs whose updated weights have not arrived yet, in the order in which forward needs them.
pub(super) struct Gathers {
    runs: VecDeque<usize>,
    /// Number of them that are in flight.
    started: usize,
    /// Weights have arrived in 16 bits since the f32 ones were complete.
    arrived_in_half: bool,
}

impl Gathers {
    /// `runs`: the most that can be added.
    pub fn with_capacity(runs: usize) -> Gathers {
        Gathers { runs: VecDeque::with_capacity(runs), started: 0, arrived_in_half: false }
    }

    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Adds a run whose own parts are updated.
    fn push(&mut self, run: usize, exchange: &mut Exchange, state: &State) {
        self.runs.push_back(run);
        self.start(exchange, state);
    }

    /// Starts gathers up to the first one whose memory is in use.
    fn start(&mut self, exchange: &mut Exchange, state: &State) {
        let own = exchange.owners().start;
        while let Some(&number) = self.runs.get(self.started) {
            let mut in_flight = self.runs.range(..self.started);
            if let Some(parts) = &exchange.parts
                && in_flight.any(|other| parts.share_place([*other, number]))
            {
                return;
            }
            let run = exchange.buckets.runs[number].clone();
            for bucket in run.clone() {
                let (part, start) = (exchange.part(bucket, own), exchange.ranges[bucket].range.start);
                let packing = &exchange.packings[bucket];
                let packed = packing.place(part.start)..packing.place(part.end);
                state.pack(packing, (start, part), &mut exchange.reducer.bucket_mut(bucket)[packed]);
            }
            exchange.reducer.gather_packed(run, number);
            self.started += 1;
        }
    }
}

/// Receives updated weights, for a forward pass only as far as it needs them.
pub(super) struct Arrivals<'a> {
    gathers: &'a mut Gathers,
    exchange: &'a mut Exchange,
    state: &'a mut State,
    slots: &'a GradientSlots,
    cpu: &'a Cpu,
    /// The first failed gather.
    failed: Option<CommError>,
    waited: Duration,
}

impl Arrivals<'_> {
    /// Receives the rest. Returns the time spent waiting.
    pub fn receive_all(mut self) -> Result<Duration, CommError> {
        self.receive_while(|gathers| !gathers.is_empty());
        self.failed.map_or(Ok(self.waited), Err)
    }

    fn receive_while(&mut self, condition: impl Fn(&Gathers) -> bool) {
        while self.failed.is_none() && condition(self.gathers) {
            self.failed = self.receive_next().err();
        }
    }

    fn receive_next(&mut self) -> Result<(), CommError> {
        let Some(number) = self.gathers.runs.pop_front() else { return Ok(()) };
        self.gathers.started -= 1;
        for bucket in self.exchange.buckets.runs[number].clone() {
            let at = Instant::now();
            self.exchange.reducer.wait(bucket)?;
            self.waited += at.elapsed();
            let range = self.exchange.ranges[bucket].range.clone();
            let packing = &self.exchange.packings[bucket];
            self.state.unpack(packing, range, self.exchange.reducer.bucket(bucket), self.cpu);
            self.gathers.arrived_in_half |= packing.has_halves();
        }
        self.exchange.gathered = true;
        self.gathers.start(self.exchange, self.state);
        Ok(())
    }
}

impl WeightSource for Arrivals<'_> {
    fn weights(&mut self, ordinals: &[usize]) -> Weights<'_> {
        for &ordinal in ordinals {
            let run = self.exchange.buckets.run_of(self.slots.bucket(ordinal));
            self.receive_while(|gathers| gathers.runs.contains(&run));
        }
        self.state.weights()
    }
}

impl CpuEngine {
    /// After the update of a run: gathers its weights, with sharding.
    pub(super) fn send_weights(&mut self, run: usize) {
        if self.exchange.shards.is_some() {
            self.gathers.push(run, &mut self.exchange, &self.state);
        }
    }

    /// Waits for all weights that other ranks have updated. Returns the time spent waiting.
    pub(super) fn receive_weights(&mut self) -> Result<Duration, CommError> {
        let (_, weights) = self.network_and_weights();
        weights.receive_all()
    }

    /// The network, and the weights for its next forward pass.
    pub(super) fn network_and_weights(&mut self) -> (&mut Network, Arrivals<'_>) {
        let CpuEngine { network, gathers, exchange, state, slots, cpu, .. } = self;
        (network, Arrivals { gathers, exchange, state, slots, cpu, failed: None, waited: Duration::ZERO })
    }

    /// Whether the weights that layers read are those after the last step.
    pub(super) fn check_arrived(&self) -> Result<(), TrainError> {
        if self.gathers.is_empty() {
            return Ok(());
        }
        Err(TrainError::Usage("internal error: other ranks still send weights".into()))
    }

    /// Whether the f32 weights are those after the last step.
    pub(super) fn check_complete(&self) -> Result<(), TrainError> {
        self.check_arrived()?;
        if !self.gathers.arrived_in_half {
            return Ok(());
        }
        Err(TrainError::Usage("internal error: weights of other ranks have arrived in 16 bits only".into()))
    }

    /// See [`super::Engine::complete_weights`].
    pub(super) fn complete_parts(&mut self) -> Result<(), CommError> {
        self.receive_weights()?;
        if !self.gathers.arrived_in_half {
            return Ok(());
        }
        for bucket in 0..self.exchange.ranges.len() {
            self.gather(Array::Weights, bucket)?;
            let range = self.exchange.ranges[bucket].range.clone();
            let weights = &self.exchange.reducer.bucket(bucket)[..range.len()];
            self.state.weights[range].copy_from_slice(weights);
        }
        self.gathers.arrived_in_half = false;
        Ok(())
    }

    /// See [`super::Engine::collect`]. Parameter servers send the values; otherwise they travel in
    /// the buckets of the gradients, so that no rank needs memory for a whole array.
    pub(super) fn collect_parts(
        &mut self,
        wanted: &[(Array, usize, Range<usize>)],
        into: &mut [f32],
    ) -> Result<(), TrainError> {
        self.check_complete()?;
        if let Some(servers) = self.exchange.servers.as_ref().filter(|_| self.state.geo.is_none()) {
            for (array, from, place) in wanted {
                let into = &mut into[place.clone()];
                match array {
                    Array::Moments(index) => servers.get(*index, *from, into, true)?,
                    _ => self.state.read(*array, *from, into),
                }
            }
            return self.await_readers();
        }
        for (array, from, place) in wanted {
            self.state.read(*array, *from, &mut into[place.clone()]);
        }
        let parts: Vec<Array> = (0..)
            .zip(self.state.moments())
            .filter(|(_, moment)| moment.held == Held::InParts)
            .map(|(index, _)| Array::Moments(index))
            .collect();
        for array in parts {
            for bucket in 0..self.exchange.ranges.len() {
                let range = self.exchange.ranges[bucket].range.clone();
                let values = self.gather(array, bucket)?;
                for (_, from, place) in wanted.iter().filter(|(other, ..)| *other == array) {
                    let start = range.start.max(*from);
                    let end = range.end.min(from + place.len());
                    if start < end {
                        let to = place.start + start - from..place.start + end - from;
                        into[to].copy_from_slice(&values[start - range.start..end - range.start]);
                    }
                }
            }
        }
        Ok(())
    }

    /// The values of an array in a bucket, each from the rank that updates it.
    fn gather(&mut self, array: Array, bucket: usize) -> Result<&[f32], CommError> {
        let CpuEngine { exchange, state, .. } = self;
        let (part, range) = (exchange.part(bucket, exchange.owners().start), exchange.ranges[bucket].range.clone());
        state.read(array, range.start + part.start, &mut exchange.reducer.bucket_mut(bucket)[part]);
        exchange.reducer.gather_all(bucket..bucket + 1, bucket);
        exchange.reducer.wait(bucket)?;
        Ok(&exchange.reducer.bucket(bucket)[..range.len()])
    }
}
