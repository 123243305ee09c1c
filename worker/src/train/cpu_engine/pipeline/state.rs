//! The stage's part of the whole model, for checkpoints and the trained model.

use super::super::CpuEngine;
use super::super::state::State;
use super::Pipeline;
use crate::comm::Reduction;
use crate::nn::Layout;
use crate::train::TrainError;
use crate::train::engine::Array;
use std::ops::Range;

/// Elements of a message.
const CHUNK: usize = 1 << 18;

/// Consecutive elements of the whole layout that are consecutive in the stage's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Run {
    whole: usize,
    own: usize,
    len: usize,
}

/// Where the parameters of a stage are in the whole layout.
pub(super) fn runs(whole: &Layout, own: &Layout) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (ordinal, parameter) in own.parameters.iter().enumerate() {
        let end = own.parameters.get(ordinal + 1).map_or(own.len, |next| next.offset);
        let same = whole.parameters.iter().find(|other| other.name == parameter.name);
        let whole = same.expect("invariant: the whole layout has the parameters of all stages").offset;
        let run = Run { whole, own: parameter.offset, len: end - parameter.offset };
        match runs.last_mut() {
            Some(last) if (last.whole + last.len, last.own + last.len) == (run.whole, run.own) => last.len += run.len,
            _ => runs.push(run),
        }
    }
    runs
}

/// The stage's ranges of a range of the whole layout.
pub(super) fn within(runs: &[Run], range: Range<usize>) -> Vec<Range<usize>> {
    overlaps(runs, range).map(|(own, place)| own..own + place.len()).collect()
}

/// Own start, and place in the range, of each part of a range that the stage has.
fn overlaps(runs: &[Run], range: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> {
    runs.iter().filter_map(move |run| {
        let (start, end) = (range.start.max(run.whole), range.end.min(run.whole + run.len));
        (start < end).then(|| (run.own + start - run.whole, start - range.start..end - range.start))
    })
}

impl Pipeline {
    /// What this stage has of an array.
    fn runs(&self, array: Array) -> Vec<Run> {
        match array {
            Array::Weights | Array::Moments(_) => self.runs.clone(),
            Array::Statistics => {
                let own = &self.stages.own_statistics[self.place.stage as usize];
                vec![Run { whole: own.start, own: 0, len: own.len() }]
            }
        }
    }

    /// See [`crate::train::engine::Engine::read`]. What other stages have reads as 0.
    pub fn read(&self, state: &State, array: Array, from: usize, into: &mut [f32]) {
        into.fill(0.0);
        for (own, place) in overlaps(&self.runs(array), from..from + into.len()) {
            state.read(array, own, &mut into[place]);
        }
    }

    /// See [`crate::train::engine::Engine::write`]. What other stages have is ignored.
    pub fn write(&self, state: &mut State, array: Array, from: usize, numbers: &[f32]) {
        for (own, place) in overlaps(&self.runs(array), from..from + numbers.len()) {
            state.write(array, own, &numbers[place]);
        }
    }

    /// See [`crate::train::engine::Engine::collect`]: the first rank of each stage sends the chunks
    /// that a rank wants to all.
    pub fn collect(
        &mut self,
        state: &State,
        wanted: &[(Array, usize, Range<usize>)],
        into: &mut [f32],
    ) -> Result<(), TrainError> {
        let moments = (0..state.moments().count()).map(Array::Moments);
        let arrays = [Array::Weights, Array::Statistics].into_iter().chain(moments);
        let mut chunks: Vec<(Array, usize, Range<usize>)> = Vec::new();
        for array in arrays {
            let ranges = match array {
                Array::Statistics => &self.stages.own_statistics,
                Array::Weights | Array::Moments(_) => &self.stages.weights,
            };
            for (stage, range) in ranges.iter().enumerate() {
                let chunk = |from: usize| (array, stage, from..range.end.min(from + CHUNK));
                chunks.extend(range.clone().step_by(CHUNK).map(chunk));
            }
        }
        let hits = |chunk: &(Array, usize, Range<usize>)| {
            let (array, _, range) = chunk.clone();
            let overlap = move |(other, from, place): &(Array, usize, Range<usize>)| {
                let (start, end) = (range.start.max(*from), range.end.min(from + place.len()));
                (*other == array && start < end).then(|| {
                    (start - range.start..end - range.start, place.start + start - from..place.start + end - from)
                })
            };
            wanted.iter().filter_map(overlap).collect::<Vec<_>>()
        };
        let mut is_wanted: Vec<u8> = chunks.iter().map(|chunk| u8::from(!hits(chunk).is_empty())).collect();
        self.links.all_reduce(&mut is_wanted, Reduction::Max)?;
        let mut values = vec![0.0; CHUNK];
        for (chunk, _) in chunks.iter().zip(is_wanted).filter(|(_, is_wanted)| *is_wanted > 0) {
            let (array, stage, range) = chunk;
            let values = &mut values[..range.len()];
            self.read(state, *array, range.start, values);
            self.links.broadcast(values, self.place.rank_of(*stage as u32, 0))?;
            for (from, to) in hits(chunk) {
                into[to].copy_from_slice(&values[from]);
            }
        }
        Ok(())
    }
}

impl CpuEngine {
    /// See [`Pipeline::collect`].
    pub(in crate::train::cpu_engine) fn collect_stages(
        &mut self,
        wanted: &[(Array, usize, Range<usize>)],
        into: &mut [f32],
    ) -> Result<(), TrainError> {
        match &mut self.pipeline {
            Some(pipeline) => pipeline.collect(&self.state, wanted, into),
            None => Ok(()),
        }
    }
}
