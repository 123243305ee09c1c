//! Optimizer state, cut into pieces for the threads.
#![allow(unsafe_code)]

use crate::amp::HalfWeights;
use crate::cpu::pool::Shared;
use crate::cpu::{AlignedBuffer, Isa, Pool};
use crate::nn::{Layout, Role};
use std::ops::Range;
use switchyard_worker_contract::config::DecayExclusions;

/// Floats per task.
const PIECE: usize = 16 * 1024;

/// Whether weight decay applies to a parameter.
pub(crate) fn decays(role: Role, exclusions: DecayExclusions) -> bool {
    match exclusions {
        DecayExclusions::Nothing => true,
        DecayExclusions::Vectors => role != Role::Vector,
        DecayExclusions::VectorsAndEmbeddings => role == Role::Matrix,
    }
}

/// A range of the layout within one parameter.
pub(super) struct Piece {
    pub range: Range<usize>,
    pub parameter: usize,
    pub decays: bool,
}

pub(super) struct Part<'a> {
    pub weights: &'a mut [f32],
    pub gradients: &'a [f32],
    /// One slice per state array; empty if the rule has none.
    pub state: [&'a mut [f32]; 2],
}

pub(super) struct Bucket<'a> {
    pub range: Range<usize>,
    /// The whole layout.
    pub weights: &'a mut [f32],
    /// The range.
    pub gradients: &'a [f32],
}

/// Norms of one parameter, from the sums of squares written by a pass.
pub(super) struct Norms {
    pub parameter: usize,
    pub decays: bool,
    pub norms: [f64; 2],
}

/// State arrays in the flat layout, and the pieces of the layout.
pub(super) struct OptimizerState {
    /// Unused arrays are empty.
    pub arrays: [AlignedBuffer; 2],
    pieces: Vec<Piece>,
    /// Two sums of squares per piece; empty if the rule does not need them.
    squares: Vec<[f64; 2]>,
    len: usize,
}

impl OptimizerState {
    /// `arrays` (at most 2) zeroed arrays; `sums`: whether to allocate sums of squares.
    pub fn new(layout: &Layout, exclusions: DecayExclusions, arrays: usize, sums: bool) -> OptimizerState {
        let mut pieces = Vec::new();
        for (ordinal, parameter) in layout.parameters.iter().enumerate() {
            // The gap after a parameter is zero and stays zero.
            let end = layout.parameters.get(ordinal + 1).map_or(layout.len, |next| next.offset);
            let decays = decays(parameter.role, exclusions);
            for start in (parameter.offset..end).step_by(PIECE) {
                pieces.push(Piece { range: start..end.min(start + PIECE), parameter: ordinal, decays });
            }
        }
        let array = |i| AlignedBuffer::zeroed(if i < arrays { layout.len } else { 0 });
        let squares = vec![[0.0; 2]; if sums { pieces.len() } else { 0 }];
        OptimizerState { arrays: [array(0), array(1)], pieces, squares, len: layout.len }
    }

    /// Indices of the pieces of a range of whole parameters.
    fn pieces_of(&self, range: &Range<usize>) -> Range<usize> {
        let index = |at| self.pieces.partition_point(|piece| piece.range.start < at);
        let pieces = index(range.start)..index(range.end);
        let whole = |at: usize| {
            at == 0 || at == self.pieces.len() || self.pieces[at - 1].parameter != self.pieces[at].parameter
        };
        assert!(whole(pieces.start) && whole(pieces.end), "{range:?} is not a range of whole parameters");
        pieces
    }

    /// Calls `task` for each piece of the bucket. Its sums of squares are stored, and `half`
    /// receives the rounded weights.
    pub fn pass(
        &mut self,
        bucket: &mut Bucket<'_>,
        half: Option<HalfWeights<'_>>,
        isa: Isa,
        pool: &Pool,
        task: &(dyn Fn(&Piece, Part<'_>, &mut [f64; 2]) + Sync),
    ) {
        let got = (bucket.weights.len(), bucket.gradients.len(), half.as_ref().map_or(self.len, HalfWeights::len));
        assert_eq!(got, (self.len, bucket.range.len(), self.len), "lengths of weights, gradients and half weights");
        let indices = self.pieces_of(&bucket.range);
        let pieces = &self.pieces[indices.clone()];
        let weights = Shared::new(bucket.weights);
        let arrays = self.arrays.each_mut().map(|array| (array.len(), Shared::new(array)));
        let has_sums = !self.squares.is_empty();
        let squares = Shared::new(&mut self.squares);
        let half = half.map(HalfWeights::share);
        let (gradients, start) = (bucket.gradients, bucket.range.start);
        pool.run(pieces.len(), &|i, _| {
            let piece = &pieces[i];
            let range = piece.range.clone();
            // SAFETY: the pieces are disjoint.
            let weights = unsafe { weights.piece(range.clone()) };
            let state = arrays.each_ref().map(|(len, array)| {
                // SAFETY: as above.
                unsafe { array.piece(if *len == 0 { 0..0 } else { range.clone() }) }
            });
            let at = indices.start + i;
            // SAFETY: each task has its own index.
            let kept = unsafe { squares.piece(if has_sums { at..at + 1 } else { 0..0 }) };
            let gradients = &gradients[range.start - start..range.end - start];
            let mut sums = [0.0; 2];
            task(piece, Part { weights: &mut *weights, gradients, state }, &mut sums);
            kept.fill(sums);
            if let Some(half) = &half {
                // SAFETY: the pieces are disjoint.
                unsafe { half.round(isa, range, weights) };
            }
        });
    }

    /// The norms of each parameter in a range.
    pub fn norms(&self, range: &Range<usize>) -> impl Iterator<Item = Norms> {
        let indices = self.pieces_of(range);
        let mut squares = self.squares[indices.clone()].iter();
        self.pieces[indices].chunk_by(|a, b| a.parameter == b.parameter).map(move |pieces| {
            let sums = squares.by_ref().take(pieces.len()).fold([0.0; 2], |[a, b], [x, y]| [a + x, b + y]);
            Norms { parameter: pieces[0].parameter, decays: pieces[0].decays, norms: sums.map(f64::sqrt) }
        })
    }
}
