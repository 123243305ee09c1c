//! Zeroed f32 memory on cache-line boundaries.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, handle_alloc_error};
use std::ops::{Deref, DerefMut};

/// f32 values per cache line.
const LANES: usize = 16;
/// Huge page size in bytes on x86-64 and, usually, on ARM.
#[cfg(target_os = "linux")]
const HUGE_PAGE: usize = 2 << 20;

/// A fixed number of f32, zeroed, starting on a 64-byte boundary. It never grows.
pub struct AlignedBuffer {
    /// Holds the buffer and the padding before its first boundary.
    memory: Vec<f32>,
    start: usize,
    len: usize,
}

impl AlignedBuffer {
    /// Allocates `len` zeros. The kernel maps each page on first write, on the NUMA node of the
    /// writing thread.
    pub fn zeroed(len: usize) -> AlignedBuffer {
        AlignedBuffer::try_zeroed(len).unwrap_or_else(|layout| handle_alloc_error(layout))
    }

    /// Allocates `len` zeros.
    ///
    /// # Errors
    /// Out of memory; the error is the requested layout.
    pub fn try_zeroed(len: usize) -> Result<AlignedBuffer, Layout> {
        if len == 0 {
            return Ok(AlignedBuffer { memory: Vec::new(), start: 0, len });
        }
        // Align by hand: for alignments above `malloc`'s own, the allocator writes all the zeros
        // itself, and a plan that is rejected for its size would already have touched the memory.
        let whole = len.saturating_add(LANES - 1);
        let layout = Layout::array::<f32>(whole).map_err(|_| Layout::new::<f32>())?;
        // SAFETY: the layout is not empty.
        let memory = unsafe { alloc_zeroed(layout) }.cast::<f32>();
        if memory.is_null() {
            return Err(layout);
        }
        // SAFETY: the global allocator returned `memory` for exactly this layout, and zero bytes
        // are valid f32.
        let memory = unsafe { Vec::from_raw_parts(memory, whole, whole) };
        let start = memory.as_ptr().align_offset(LANES * size_of::<f32>());
        let mut buffer = AlignedBuffer { memory, start, len };
        buffer.prefer_huge_pages();
        Ok(buffer)
    }

    /// Requests 2 MiB pages, because kernels that walk down columns touch a new page at each step
    /// and the TLB holds only a few thousand entries. Only a hint: the system can keep 4 KiB pages.
    fn prefer_huge_pages(&mut self) {
        #[cfg(target_os = "linux")]
        if self.len * size_of::<f32>() >= 2 * HUGE_PAGE {
            let start = self.as_mut_ptr().cast::<u8>();
            let skip = start.align_offset(HUGE_PAGE);
            let bytes = (self.len * size_of::<f32>()).saturating_sub(skip) / HUGE_PAGE * HUGE_PAGE;
            // SAFETY: the range is inside the buffer, and the advice changes no contents.
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
        &self.memory[self.start..][..self.len]
    }
}

impl DerefMut for AlignedBuffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.memory[self.start..][..self.len]
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn starts_on_a_cache_line() {
        for len in [0, 1, 15, 16, 17, 1000, 1 << 20] {
            let buffer = AlignedBuffer::zeroed(len);
            assert_eq!(buffer.len(), len);
            assert!(len == 0 || buffer.as_ptr().addr().is_multiple_of(64), "{len} at {:p}", buffer.as_ptr());
            assert!(buffer.iter().all(|number| *number == 0.0));
        }
    }

    /// A plan can be rejected for its size after its buffers were allocated, so they must stay
    /// untouched.
    #[test]
    fn pages_are_mapped_on_first_write() {
        let mut buffer = AlignedBuffer::zeroed(128 << 20);
        assert!(resident(&buffer) < 64 << 20, "{} bytes", resident(&buffer));
        buffer.fill(1.0);
        assert!(resident(&buffer) >= 508 << 20, "{} bytes", resident(&buffer));
    }

    /// Resident bytes of the mapping that contains the middle of a buffer.
    fn resident(buffer: &AlignedBuffer) -> usize {
        let middle = buffer[buffer.len() / 2..].as_ptr().addr();
        let maps = fs::read_to_string("/proc/self/smaps").unwrap_or_default();
        let holds = |line: &str| {
            let (from, to) = line.split(' ').next()?.split_once('-')?;
            let address = |text| usize::from_str_radix(text, 16).ok();
            Some((address(from)?..address(to)?).contains(&middle))
        };
        let mut own = maps.lines().skip_while(|line| holds(line) != Some(true));
        let rss = own.find_map(|line| line.strip_prefix("Rss:"));
        let kib = rss.and_then(|text| text.trim().strip_suffix(" kB")?.parse::<usize>().ok());
        kib.map_or(0, |kib| kib << 10)
    }
}
