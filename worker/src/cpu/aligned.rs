//! Zeroed f32 memory on cache-line borders.
#![allow(unsafe_code)]

use std::ops::{Deref, DerefMut};

/// One cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; LANES]);

const LANES: usize = 16;

/// A fixed number of f32, zeroed, starting on a 64-byte border. It never grows.
pub struct AlignedBuffer {
    lines: Vec<Line>,
    len: usize,
}

impl AlignedBuffer {
    /// `len` zeros.
    pub fn zeroed(len: usize) -> AlignedBuffer {
        AlignedBuffer { lines: vec![Line([0.0; LANES]); len.div_ceil(LANES)], len }
    }
}

impl Deref for AlignedBuffer {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        // SAFETY: `lines` owns at least `len` initialised f32 without gaps (`Line` is repr(C), 64 bytes of 16 f32).
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast::<f32>(), self.len) }
    }
}

impl DerefMut for AlignedBuffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        // SAFETY: as in `deref`; the borrow of `self` is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast::<f32>(), self.len) }
    }
}
