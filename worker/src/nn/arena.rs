//! Network memory: one allocation, divided by a plan.
#![allow(unsafe_code)]

use crate::cpu::{AlignedBuffer, Format, Values, ValuesMut, bf16, f16};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Region {
    /// First byte; aligned as the plan requires.
    pub offset: usize,
    /// Number of elements.
    pub len: usize,
    pub format: Format,
}

impl Region {
    pub const EMPTY: Region = Region { offset: 0, len: 0, format: Format::F32 };

    pub fn bytes(&self) -> usize {
        self.len * self.format.size()
    }

    fn overlaps(&self, other: &Region) -> bool {
        self.len > 0
            && other.len > 0
            && self.offset < other.offset + other.bytes()
            && other.offset < self.offset + self.bytes()
    }
}

/// Whether the regions in `written` are disjoint from all other regions of both lists, and all end
/// within `bytes`, as [`Arena::write`] requires.
pub(super) fn disjoint(bytes: usize, read: &[Region], written: &[Region]) -> bool {
    let inside = |region: &Region| region.len == 0 || region.offset + region.bytes() <= bytes;
    read.iter().chain(written).all(inside)
        && written.iter().enumerate().all(|(i, region)| {
            !read.iter().any(|other| region.overlaps(other)) && !written[..i].iter().any(|other| region.overlaps(other))
        })
}

pub(super) struct Arena {
    /// Owns the memory at `base`, which is accessed only through `base`.
    _memory: AlignedBuffer,
    base: *mut u8,
    bytes: usize,
}

// SAFETY: the arena owns the memory, and hands out slices only through `unsafe` functions.
unsafe impl Send for Arena {}

impl Arena {
    /// Alignment of all regions in bytes: a cache line.
    pub const ALIGNMENT: usize = 64;

    /// `None` if the machine does not have enough memory.
    pub fn new(bytes: usize) -> Option<Arena> {
        let mut memory = AlignedBuffer::try_zeroed(bytes.div_ceil(4)).ok()?;
        let base = memory.as_mut_ptr().cast::<u8>();
        Some(Arena { _memory: memory, base, bytes })
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    fn start(&self, region: &Region) -> *mut u8 {
        debug_assert!(region.len == 0 || region.offset + region.bytes() <= self.bytes, "region in the arena");
        self.base.wrapping_add(region.offset)
    }

    /// # Safety
    /// The region is inside the arena, and nothing writes to it while the slice is alive.
    pub unsafe fn read<'a>(&self, region: &Region) -> Values<'a> {
        let (start, len) = (self.start(region), region.len);
        // SAFETY: regions are aligned to cache lines and hold `len` elements; all bit patterns are
        // valid values; the rest is promised by the caller.
        unsafe {
            match region.format {
                Format::F32 => Values::F32(std::slice::from_raw_parts(start.cast::<f32>(), len)),
                Format::Bf16 => Values::Bf16(std::slice::from_raw_parts(start.cast::<bf16>(), len)),
                Format::F16 => Values::F16(std::slice::from_raw_parts(start.cast::<f16>(), len)),
            }
        }
    }

    /// # Safety
    /// The region is inside the arena, and nothing else reads or writes it while the slice is
    /// alive.
    pub unsafe fn write<'a>(&self, region: &Region) -> ValuesMut<'a> {
        let (start, len) = (self.start(region), region.len);
        // SAFETY: as in `read`.
        unsafe {
            match region.format {
                Format::F32 => ValuesMut::F32(std::slice::from_raw_parts_mut(start.cast::<f32>(), len)),
                Format::Bf16 => ValuesMut::Bf16(std::slice::from_raw_parts_mut(start.cast::<bf16>(), len)),
                Format::F16 => ValuesMut::F16(std::slice::from_raw_parts_mut(start.cast::<f16>(), len)),
            }
        }
    }

    /// # Safety
    /// As [`Arena::write`]; the region holds f32.
    pub unsafe fn floats<'a>(&self, region: &Region) -> &'a mut [f32] {
        // SAFETY: as promised by the caller.
        match unsafe { self.write(region) } {
            ValuesMut::F32(floats) => floats,
            _ => &mut [],
        }
    }
}
