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

/// The parts of the flat layout that ranks update.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ownership {
    /// Where a part of another rank can begin, in order. Norms are sums of sums between cuts, so
    /// that they have the same bits with and without sharding.
    pub cuts: Vec<usize>,
    /// The parts that this rank updates, in order.
    pub own: Vec<Range<usize>>,
}

impl Ownership {
    /// Of a rank that updates all `len` weights.
    pub fn whole(len: usize) -> Ownership {
        Ownership { cuts: Vec::new(), own: std::iter::once(0..len).collect() }
    }
}

/// A range of the layout within one parameter and one rank's part.
pub(super) struct Piece {
    pub range: Range<usize>,
    pub parameter: usize,
    pub decays: bool,
    /// Start in the state arrays; `None`: another rank updates it.
    state: Option<usize>,
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
    /// At least this rank's own parts of the range.
    pub gradients: GradientSlice<'a>,
}

/// Gradients of consecutive weights.
#[derive(Debug, Clone, Copy)]
pub struct GradientSlice<'a> {
    /// Index of the first one in the layout.
    pub from: usize,
    pub values: &'a [f32],
}

/// Norms of one parameter, from the sums of squares written by a pass.
pub(super) struct Norms {
    pub parameter: usize,
    pub decays: bool,
    pub norms: [f64; 2],
}

/// State arrays of a rank's own parts, and the pieces of the layout.
pub(super) struct OptimizerState {
    /// The rank's own parts, one after the other. Unused arrays are empty.
    pub arrays: [AlignedBuffer; 2],
    /// The rank's own parts, and where each begins in the arrays.
    own: Vec<(Range<usize>, usize)>,
    pieces: Vec<Piece>,
    /// Indices of the pieces that this rank updates.
    mine: Vec<usize>,
    /// Two sums of squares per piece; empty if the rule does not need them.
    squares: Vec<[f64; 2]>,
    len: usize,
}

impl OptimizerState {
    /// `arrays` (at most 2) zeroed arrays; `sums`: whether to allocate sums of squares.
    pub fn new(
        layout: &Layout,
        exclusions: DecayExclusions,
        (arrays, sums): (usize, bool),
        ownership: &Ownership,
    ) -> OptimizerState {
        let mut state = 0;
        let own = ownership.own.iter().map(|range| {
            state += range.len();
            (range.clone(), state - range.len())
        });
        let own: Vec<_> = own.collect();
        let place = |at: usize| {
            let (range, state) = own.get(own.partition_point(|(range, _)| range.end <= at))?;
            range.contains(&at).then(|| state + at - range.start)
        };
        let mut pieces = Vec::new();
        let mut cuts = ownership.cuts.iter().copied().peekable();
        for (ordinal, parameter) in layout.parameters.iter().enumerate() {
            // The gap after a parameter is zero and stays zero.
            let end = layout.parameters.get(ordinal + 1).map_or(layout.len, |next| next.offset);
            let decays = decays(parameter.role, exclusions);
            let mut start = parameter.offset;
            while start < end {
                while cuts.next_if(|cut| *cut <= start).is_some() {}
                let stop = end.min(start + PIECE).min(cuts.peek().copied().unwrap_or(end));
                pieces.push(Piece { range: start..stop, parameter: ordinal, decays, state: place(start) });
                start = stop;
            }
        }
        let array = |i| AlignedBuffer::zeroed(if i < arrays { state } else { 0 });
        let squares = vec![[0.0; 2]; if sums { pieces.len() } else { 0 }];
        let mine = (0..pieces.len()).filter(|piece| pieces[*piece].state.is_some()).collect();
        OptimizerState { arrays: [array(0), array(1)], own, pieces, mine, squares, len: layout.len }
    }

    /// Values of an array in this rank's own parts of `from..from + len`: their offsets in that
    /// range, and where they are in the array.
    fn overlaps(&self, from: usize, len: usize) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
        let first = self.own.partition_point(|(range, _)| range.end <= from);
        self.own[first..].iter().take_while(move |(range, _)| range.start < from + len).map(move |(range, state)| {
            let (start, end) = (range.start.max(from), range.end.min(from + len));
            let at = state + start - range.start;
            (start - from..end - from, at..at + end - start)
        })
    }

    /// Copies this rank's own values of an array from index `from` of the layout on; others become
    /// 0.
    pub fn read(&self, array: usize, from: usize, into: &mut [f32]) {
        into.fill(0.0);
        for (to, at) in self.overlaps(from, into.len()) {
            into[to].copy_from_slice(&self.arrays[array][at]);
        }
    }

    /// Writes this rank's own values of an array from index `from` of the layout on.
    pub fn write(&mut self, array: usize, from: usize, numbers: &[f32]) {
        let places: Vec<_> = self.overlaps(from, numbers.len()).collect();
        for (source, at) in places {
            self.arrays[array][at].copy_from_slice(&numbers[source]);
        }
    }

    /// Most pieces of a layout with this many values, parameters and cuts.
    pub fn most_pieces(len: usize, parameters: usize, cuts: usize) -> usize {
        len / PIECE + parameters + cuts
    }

    /// The sums of squares of all pieces, and whether this rank computes them.
    pub fn sums(&mut self) -> impl Iterator<Item = (bool, &mut [f64; 2])> {
        self.pieces.iter().map(|piece| piece.state.is_some()).zip(&mut self.squares)
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

    /// Calls `task` for each piece of the bucket that this rank updates. Its sums of squares are
    /// stored, and `half` receives the rounded weights.
    pub fn pass(
        &mut self,
        bucket: &mut Bucket<'_>,
        half: Option<HalfWeights<'_>>,
        isa: Isa,
        pool: &Pool,
        task: &(dyn Fn(&Piece, Part<'_>, &mut [f64; 2]) + Sync),
    ) {
        let got = (bucket.weights.len(), half.as_ref().map_or(self.len, HalfWeights::len));
        assert_eq!(got, (self.len, self.len), "lengths of weights and half weights");
        let indices = self.pieces_of(&bucket.range);
        let mine = |at: usize| self.mine.partition_point(|piece| *piece < at);
        let (pieces, mine) = (&self.pieces, &self.mine[mine(indices.start)..mine(indices.end)]);
        let weights = Shared::new(bucket.weights);
        let arrays = self.arrays.each_mut().map(|array| (array.len(), Shared::new(array)));
        let has_sums = !self.squares.is_empty();
        let squares = Shared::new(&mut self.squares);
        let half = half.map(HalfWeights::share);
        let GradientSlice { from, values: gradients } = bucket.gradients;
        pool.run(mine.len(), &|i, _| {
            let at = mine[i];
            let piece = &pieces[at];
            let range = piece.range.clone();
            let place = piece.state.map_or(0..0, |state| state..state + range.len());
            // SAFETY: the pieces are disjoint.
            let weights = unsafe { weights.piece(range.clone()) };
            let state = arrays.each_ref().map(|(len, array)| {
                // SAFETY: as above.
                unsafe { array.piece(if *len == 0 { 0..0 } else { place.clone() }) }
            });
            // SAFETY: each task has its own index.
            let kept = unsafe { squares.piece(if has_sums { at..at + 1 } else { 0..0 }) };
            let gradients = &gradients[range.start - from..range.end - from];
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
