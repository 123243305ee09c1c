//! The static plan of a GPT: where each activation lies in the arena.

use super::ModelError;
use crate::cpu::attention::AttentionShape;
use crate::cpu::ops::partials_len;
use std::ops::Range;

/// Floats that places are a multiple of.
const ALIGNMENT: usize = 16;

/// A tensor's place in the arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    start: usize,
    len: usize,
}

impl Place {
    fn range(self) -> Range<usize> {
        self.start..self.start + self.len
    }
}

/// The tensors at these places.
pub(super) fn at<const N: usize>(arena: &mut [f32], places: [Place; N]) -> [&mut [f32]; N] {
    arena.get_disjoint_mut(places.map(Place::range)).expect("invariant: places of a plan do not overlap")
}

/// What a block keeps from forward to backward. `rows` are tokens of the micro-batch, C the hidden size.
#[derive(Debug, Clone, Copy)]
pub(super) struct BlockPlaces {
    /// [rows, C] the residual stream that enters
    pub input: Place,
    pub norm1_saved: Place,
    /// [rows, C]
    pub norm1: Place,
    /// [rows, 3 C]
    pub qkv: Place,
    pub attention_saved: Place,
    /// [rows, C] before the projection
    pub attention: Place,
    /// [rows, C] the residual stream between attention and MLP
    pub middle: Place,
    pub norm2_saved: Place,
    /// [rows, C]
    pub norm2: Place,
    /// [rows, 4 C] before GELU
    pub wide: Place,
    /// [rows, 4 C] after GELU
    pub active: Place,
    /// [rows, C] the residual stream that leaves
    pub output: Place,
}

/// All places.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    pub embedded: Place,
    pub blocks: Vec<BlockPlaces>,
    pub norm_saved: Place,
    /// [rows, C]
    pub norm: Place,
    /// [rows, V]
    pub logits: Place,
    pub inverses: Place,
    pub losses: Place,
    /// [rows, C] gradient of the residual stream
    pub d_stream: Place,
    /// [rows, C]
    pub d_narrow: Place,
    /// [rows, 4 C], and [rows, 3 C] at other times
    pub d_wide: Place,
    /// [rows, 3 C] the same memory as `d_wide`
    pub d_qkv: Place,
    /// Sums of gradients over rows
    pub partials: Place,
    /// Attention's memory for each thread
    pub scratch: Place,
    /// Floats in all
    pub len: usize,
}

/// Hands out places one after another.
struct Planner {
    next: usize,
}

impl Planner {
    fn place(&mut self, len: usize) -> Result<Place, ModelError> {
        let place = Place { start: self.next, len };
        let end = self.next.checked_add(len).and_then(|end| end.checked_next_multiple_of(ALIGNMENT));
        self.next = end.filter(|&end| end <= isize::MAX as usize / 8).ok_or(ModelError::TooLarge)?;
        Ok(place)
    }
}

impl Plan {
    pub fn new(shape: &AttentionShape, layers: usize, vocabulary: usize, threads: usize) -> Result<Plan, ModelError> {
        let rows = shape.batch.checked_mul(shape.context).ok_or(ModelError::TooLarge)?;
        let area = |width: usize| rows.checked_mul(width).ok_or(ModelError::TooLarge);
        let narrow = area(shape.hidden())?;
        let wide = narrow.checked_mul(4).ok_or(ModelError::TooLarge)?;
        let pairs = area(shape.heads)?.checked_mul(2).ok_or(ModelError::TooLarge)?;
        let p = &mut Planner { next: 0 };
        let embedded = p.place(narrow)?;
        let mut blocks: Vec<BlockPlaces> = Vec::new();
        for _ in 0..layers {
            blocks.push(BlockPlaces {
                input: blocks.last().map_or(embedded, |block| block.output),
                norm1_saved: p.place(2 * rows)?,
                norm1: p.place(narrow)?,
                qkv: p.place(3 * narrow)?,
                attention_saved: p.place(pairs)?,
                attention: p.place(narrow)?,
                middle: p.place(narrow)?,
                norm2_saved: p.place(2 * rows)?,
                norm2: p.place(narrow)?,
                wide: p.place(wide)?,
                active: p.place(wide)?,
                output: p.place(narrow)?,
            });
        }
        let d_wide = p.place(wide)?;
        let scratch = shape.scratch_len().checked_mul(threads).ok_or(ModelError::TooLarge)?;
        Ok(Plan {
            embedded,
            blocks,
            norm_saved: p.place(2 * rows)?,
            norm: p.place(narrow)?,
            logits: p.place(area(vocabulary)?)?,
            inverses: p.place(rows)?,
            losses: p.place(rows)?,
            d_stream: p.place(narrow)?,
            d_narrow: p.place(narrow)?,
            d_wide,
            d_qkv: Place { len: 3 * narrow, ..d_wide },
            partials: p.place(partials_len(rows, 4 * shape.hidden()))?,
            scratch: p.place(scratch)?,
            len: p.next,
        })
    }

    /// The residual stream after the last block.
    pub fn last(&self) -> Place {
        self.blocks.last().map_or(self.embedded, |block| block.output)
    }
}
