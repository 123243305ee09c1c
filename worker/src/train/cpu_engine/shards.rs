//! Sharded optimizer state: each rank updates its parts of the weights and sends them to the
//! others.
//!
//! ```text
//! bucket    reduce-scatter -> own part -> update -> into the bucket -> all-gather -> weights
//! ```
//!
//! The gathers of a bucket run while the next ones are updated.

use super::CpuEngine;
use crate::train::TrainError;
use crate::train::engine::{Array, Held};
use crate::train::report::StepReport;
use std::ops::Range;
use std::time::Instant;

impl CpuEngine {
    /// After the update of a bucket: if it completes a run, starts to gather the run's weights.
    pub(super) fn send_weights(&mut self, bucket: usize, report: &mut StepReport) -> Result<(), TrainError> {
        let exchange = &self.exchange;
        let Some((number, run)) = exchange.buckets.run_ending_with(bucket).filter(|_| exchange.shards.is_some()) else {
            return Ok(());
        };
        // Runs that share memory come one after the other.
        while let Some(&oldest) = self.gathers.front()
            && let Some(parts) = &self.exchange.parts
            && self.gathers.iter().any(|other| parts.share_place([*other, number]))
        {
            self.gathers.pop_front();
            self.receive_run(oldest, report)?;
        }
        let exchange = &mut self.exchange;
        let own = exchange.owners().start;
        for bucket in run.clone() {
            let (part, start) = (exchange.part(bucket, own), exchange.ranges[bucket].range.start);
            let weights = &self.state.weights[start + part.start..start + part.end];
            exchange.reducer.bucket_mut(bucket)[part].copy_from_slice(weights);
        }
        exchange.reducer.gather_all(run, number);
        self.gathers.push_back(number);
        Ok(())
    }

    fn receive_run(&mut self, number: usize, report: &mut StepReport) -> Result<(), TrainError> {
        for bucket in self.exchange.buckets.runs[number].clone() {
            let at = Instant::now();
            self.exchange.reducer.wait(bucket)?;
            report.communication_wait += at.elapsed();
            let range = self.exchange.ranges[bucket].range.clone();
            let weights = &self.exchange.reducer.bucket(bucket)[..range.len()];
            self.state.receive(range, weights, &self.cpu);
        }
        Ok(())
    }

    /// Waits for the weights that the other ranks have updated.
    pub(super) fn receive_weights(&mut self, report: &mut StepReport) -> Result<(), TrainError> {
        while let Some(number) = self.gathers.pop_front() {
            self.receive_run(number, report)?;
        }
        Ok(())
    }

    /// See [`super::Engine::collect`]. Parameter servers send the values; otherwise they travel in
    /// the buckets of the gradients, so that no rank needs memory for a whole array.
    pub(super) fn collect_parts(
        &mut self,
        wanted: &[(Array, usize, Range<usize>)],
        into: &mut [f32],
    ) -> Result<(), TrainError> {
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
        let exchange = &mut self.exchange;
        for array in parts {
            for bucket in 0..exchange.ranges.len() {
                let (part, range) =
                    (exchange.part(bucket, exchange.owners().start), exchange.ranges[bucket].range.clone());
                self.state.read(array, range.start + part.start, &mut exchange.reducer.bucket_mut(bucket)[part]);
                exchange.reducer.gather_all(bucket..bucket + 1, bucket);
                exchange.reducer.wait(bucket)?;
                let values = exchange.reducer.bucket(bucket);
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
}
