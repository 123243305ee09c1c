//! Zeroed f32 memory on cache-line boundaries.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, handle_alloc_error};
use std::ops::{Deref, DerefMut};

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; LANES]);

const LANES: usize = 16;
/// Bytes of a huge page on x86-64 and, usually, on ARM.
#[cfg(target_os = "linux")]
const HUGE_PAGE: usize = 2 << 20;

/// A fixed number of f32, zeroed, starting on a 64-byte boundary. It never grows.
pub struct AlignedBuffer {
    lines: Vec<Line>,
    len: usize,
}

impl AlignedBuffer {
    /// `len` zeros. The system allocates a page when it is first written to, on the NUMA node of the thread that
    /// writes.
    pub fn zeroed(len: usize) -> AlignedBuffer {
        AlignedBuffer::try_zeroed(len).unwrap_or_else(|layout| handle_alloc_error(layout))
    }

    /// `len` zeros.
    ///
    /// # Errors
    /// There is not enough memory; the error is the layout that was asked for.
    pub fn try_zeroed(len: usize) -> Result<AlignedBuffer, Layout> {
        let count = len.div_ceil(LANES);
        if count == 0 {
            return Ok(AlignedBuffer { lines: Vec::new(), len });
        }
        let layout = Layout::array::<Line>(count).map_err(|_| Layout::new::<Line>())?;
        // SAFETY: the layout is not empty.
        let lines = unsafe { alloc_zeroed(layout) }.cast::<Line>();
        if lines.is_null() {
            return Err(layout);
        }
        // SAFETY: the global allocator returned `lines` for exactly this layout, and zero bytes are valid f32.
        let lines = unsafe { Vec::from_raw_parts(lines, count, count) };
        let mut buffer = AlignedBuffer { lines, len };
        buffer.prefer_huge_pages();
        Ok(buffer)
    }

    /// Asks for pages of 2 MiB: kernels that walk down columns touch a page at each step, and the processor remembers
    /// the addresses of only a few thousand pages. A hint; a system that declines uses pages of 4 KiB.
    fn prefer_huge_pages(&mut self) {
        #[cfg(target_os = "linux")]
        if self.len * size_of::<f32>() >= 2 * HUGE_PAGE {
            let start = self.lines.as_mut_ptr().cast::<u8>();
            let skip = start.align_offset(HUGE_PAGE);
            let bytes = (self.lines.len() * size_of::<Line>()).saturating_sub(skip) / HUGE_PAGE * HUGE_PAGE;
            // SAFETY: the range lies in the buffer, and the advice changes no contents.
            let _ = unsafe {
                let inner = start.wrapping_add(skip).cast();
                rustix::mm::madvise(inner, bytes, rustix::mm::Advice::LinuxHugepage)
            };
        }
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
