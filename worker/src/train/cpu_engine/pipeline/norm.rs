//! The norm of all gradients: each stage continues the sums of the stage after it.
//!
//! Without stages, the squares of each rank's part of each bucket are added in 16 lanes, then the
//! parts of a rank. A part can begin in one stage and end in the stage before it, so the lanes
//! travel too.

use super::Part;
use crate::comm::Reducer;
use crate::nn::Bucket;
use crate::optimizer::{LANES, add_squares};
use std::ops::Range;

/// The parts of a stage.
pub(super) struct Norm {
    parts: Vec<OwnPart>,
    /// A sum per rank of a run without stages, then the lanes of the part in progress.
    sums: Vec<f64>,
}

struct OwnPart {
    owner: usize,
    /// Buckets and ranges in them.
    pieces: Vec<(usize, Range<usize>)>,
    /// No later part continues it.
    ends: bool,
}

impl Norm {
    /// `parts`: of the whole layout; `stage`: this stage's part of it; `own`: its ranges in the
    /// stage's layout; `buckets`: of that layout.
    pub fn new(
        parts: Vec<Part>,
        stage: &Range<usize>,
        buckets: &[Bucket],
        own: impl Fn(Range<usize>) -> Vec<Range<usize>>,
    ) -> Norm {
        let owners = parts.iter().map(|part| part.owner + 1).max().unwrap_or(0);
        let cut = |range: Range<usize>| {
            buckets.iter().enumerate().filter_map(move |(index, bucket)| {
                let (start, end) = (range.start.max(bucket.range.start), range.end.min(bucket.range.end));
                (start < end).then(|| (index, start - bucket.range.start..end - bucket.range.start))
            })
        };
        let parts = parts.into_iter().filter_map(|Part { range, owner }| {
            let inside = range.start.max(stage.start)..range.end.min(stage.end);
            (!inside.is_empty()).then(|| OwnPart {
                owner,
                pieces: own(inside).into_iter().flat_map(cut).collect(),
                ends: range.end <= stage.end,
            })
        });
        Norm { parts: parts.collect(), sums: vec![0.0; owners + LANES] }
    }

    /// The sums so far, as bytes.
    pub fn bytes(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.sums)
    }

    /// Starts with the last stage.
    pub fn clear(&mut self) {
        self.sums.fill(0.0);
    }

    /// Adds the squares of this stage's gradients; returns the sum of squares so far.
    pub fn add(&mut self, reducer: &Reducer) -> f64 {
        let owners = self.sums.len() - LANES;
        let (sums, lanes) = self.sums.split_at_mut(owners);
        let lanes: &mut [f64; LANES] = lanes.try_into().expect("invariant: the lanes are last");
        for part in &self.parts {
            for (bucket, range) in &part.pieces {
                add_squares(&reducer.bucket(*bucket)[range.clone()], lanes);
            }
            if part.ends {
                sums[part.owner] += lanes.iter().sum::<f64>();
                lanes.fill(0.0);
            }
        }
        sums.iter().sum()
    }
}
