//! Shared and private memory mappings, and the segment shared by the ranks of one host.
//!
//! A segment is one sealed memfd: first the flags and small slots of each lane and rank, then one
//! arena per local rank with all its buckets.
//!
//! Access rules:
//! * Flags, signatures and the poison word are atomics. Each has one writer, except poison, which
//!   any rank can set to 1.
//! * A rank's arena belongs to that rank, except for buckets whose reduction is in flight. For
//!   those, the protocol in [`super::local`] assigns every part of every arena to exactly one rank
//!   at a time. Ownership passes with a release store to a flag and an acquire load that sees it.
//! * References into an arena do not outlive this hand-over. Other ranks' parts are accessed only
//!   through raw pointers.
#![allow(unsafe_code)]

use super::error::CommError;
use rustix::{
    fs::{FallocateFlags, MemfdFlags, SealFlags},
    io::Errno,
    mm::{Advice, MapFlags, ProtFlags},
};
use std::{
    ffi::c_void,
    os::fd::{AsFd, OwnedFd},
    ptr::NonNull,
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
};

/// Distance between flags: two cache lines, because adjacent lines are prefetched in pairs.
const LINE: usize = 128;
const PAGE: usize = 4096;
/// Largest bucket that goes through the slots, in floats.
pub(super) const SLOT_FLOATS: usize = 256;

/// A memory mapping, unmapped on drop.
pub(super) struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is plain memory; every access to its contents is unsafe code with its own
// justification.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Private zeroed memory.
    pub fn anonymous(len: usize) -> Result<Mapping, CommError> {
        let len = len.max(PAGE);
        // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
        let base = unsafe {
            let prot = ProtFlags::READ | ProtFlags::WRITE;
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, prot, MapFlags::PRIVATE)
        };
        Mapping::finish(base, len)
    }

    fn shared(fd: impl AsFd, len: usize) -> Result<Mapping, CommError> {
        // SAFETY: as above. The file is sealed against shrinking, so no access within `len` can
        // fault.
        let base = unsafe {
            let prot = ProtFlags::READ | ProtFlags::WRITE;
            rustix::mm::mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, fd, 0)
        };
        Mapping::finish(base, len)
    }

    fn finish(base: Result<*mut c_void, Errno>, len: usize) -> Result<Mapping, CommError> {
        let system =
            |errno| CommError::system(format!("map {} MiB for gradient buckets", len.div_ceil(1 << 20)), errno);
        let base = base.map_err(system)?;
        let base = NonNull::new(base.cast::<u8>()).ok_or_else(|| system(Errno::NOMEM))?;
        // SAFETY: the range was just mapped, and the advice does not change its contents. Huge
        // pages are optional.
        let _ = unsafe { rustix::mm::madvise(base.as_ptr().cast(), len, Advice::LinuxHugepage) };
        Ok(Mapping { base, len })
    }

    /// Floats from byte `offset` on.
    pub fn floats(&self, offset: usize) -> *mut f32 {
        assert!(offset <= self.len && offset.is_multiple_of(align_of::<f32>()));
        // SAFETY: within the mapping by the assertion.
        unsafe { self.base.as_ptr().add(offset).cast() }
    }

    fn word(&self, offset: usize) -> &AtomicU32 {
        assert!(offset + 4 <= self.len && offset.is_multiple_of(4));
        // SAFETY: in range and aligned by the assertion; flag words are only ever accessed as
        // atomics.
        unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    fn long(&self, offset: usize) -> &AtomicU64 {
        assert!(offset + 8 <= self.len && offset.is_multiple_of(8));
        // SAFETY: as above.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping, and every user holds it through an `Arc` or a
        // borrow.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// Progress of a rank through an operation. A flag holds the operation's number once the rank has
/// ...
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Flag {
    /// ... entered it; its bucket is ready to be read.
    Entered = 0,
    /// ... reduced its slice; it no longer reads the slices of other arenas in this operation.
    Reduced = 1,
    /// ... (leader) written the result of all hosts to its arena.
    Result = 2,
    /// ... copied the result out of the leader's arena.
    Copied = 3,
}

const FLAGS: usize = 4;
/// Per lane and rank: value and sleeper count of each flag, signatures of two operations, two
/// slots.
const PER_RANK: usize = (2 * FLAGS + 1) * LINE + 2 * SLOT_FLOATS * 4;

/// Dimensions of a segment.
#[derive(Debug, Clone, Copy)]
pub(super) struct SegmentShape {
    pub ranks: usize,
    pub lanes: usize,
    /// Arena bytes per rank.
    pub arena: usize,
}

impl SegmentShape {
    fn control(self) -> usize {
        (LINE + self.lanes * self.ranks * PER_RANK).next_multiple_of(PAGE)
    }

    /// File size in bytes.
    fn size(self) -> Option<usize> {
        self.arena.checked_next_multiple_of(PAGE)?.checked_mul(self.ranks)?.checked_add(self.control())
    }
}

/// Memory shared by the ranks of one host.
pub(super) struct Segment {
    mapping: Mapping,
    shape: SegmentShape,
}

impl Segment {
    /// Creates the sealed file for a segment.
    pub fn create_file(shape: SegmentShape) -> Result<OwnedFd, CommError> {
        let size = shape
            .size()
            .ok_or_else(|| CommError::system("share gradient buckets", std::io::Error::from(Errno::OVERFLOW)))?;
        let make = || -> Result<OwnedFd, Errno> {
            let fd = rustix::fs::memfd_create("switchyard-buckets", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
            rustix::fs::ftruncate(&fd, size as u64)?;
            rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
            Ok(fd)
        };
        let fd = make().map_err(|errno| CommError::system("create shared memory for gradient buckets", errno))?;
        allocate(&fd, 0, shape.control())?;
        Ok(fd)
    }

    /// Maps the file and allocates the memory of arena `me` (on this rank's NUMA node), so that
    /// running out of memory is an error here instead of a signal later.
    pub fn open(fd: &OwnedFd, shape: SegmentShape, me: usize) -> Result<Segment, CommError> {
        let size = shape.size().unwrap_or(0);
        let stat = rustix::fs::fstat(fd).map_err(|e| CommError::system("inspect the shared memory", e))?;
        let seals = rustix::fs::fcntl_get_seals(fd).map_err(|e| CommError::system("inspect the shared memory", e))?;
        if stat.st_size as u64 != size as u64 || !seals.contains(SealFlags::SHRINK | SealFlags::GROW) {
            return Err(CommError::protocol(
                "the local leader",
                format_args!("shared memory of {} bytes with {seals:?}, expected {size} bytes, sealed", stat.st_size),
            ));
        }
        let shape = SegmentShape { arena: shape.arena.next_multiple_of(PAGE), ..shape };
        let segment = Segment { mapping: Mapping::shared(fd, size)?, shape };
        allocate(fd, segment.arena_offset(me), shape.arena)?;
        Ok(segment)
    }

    pub fn ranks(&self) -> usize {
        self.shape.ranks
    }

    fn arena_offset(&self, rank: usize) -> usize {
        assert!(rank < self.shape.ranks);
        self.shape.control() + rank * self.shape.arena
    }

    /// Start of a rank's arena.
    pub fn arena(&self, rank: usize) -> *mut f32 {
        self.mapping.floats(self.arena_offset(rank))
    }

    fn rank_offset(&self, lane: usize, rank: usize) -> usize {
        assert!(lane < self.shape.lanes && rank < self.shape.ranks);
        LINE + (lane * self.shape.ranks + rank) * PER_RANK
    }

    pub fn poison(&self) -> &AtomicU32 {
        self.mapping.word(0)
    }

    /// A flag and its sleeper count.
    pub fn flag(&self, flag: Flag, lane: usize, rank: usize) -> (&AtomicU32, &AtomicU32) {
        let at = self.rank_offset(lane, rank) + 2 * LINE * flag as usize;
        (self.mapping.word(at), self.mapping.word(at + LINE))
    }

    /// Bucket and length that a rank announced for an operation. Two operations of a lane can be in
    /// flight at once, because a rank can be one ahead.
    pub fn signature(&self, lane: usize, rank: usize, sequence: u32) -> (&AtomicU64, &AtomicU64) {
        let at = self.rank_offset(lane, rank) + 2 * LINE * FLAGS + 16 * (sequence as usize & 1);
        (self.mapping.long(at), self.mapping.long(at + 8))
    }

    /// A rank's slot for small buckets.
    pub fn slot(&self, lane: usize, rank: usize, sequence: u32) -> *mut f32 {
        let at = self.rank_offset(lane, rank) + (2 * FLAGS + 1) * LINE + 4 * SLOT_FLOATS * (sequence as usize & 1);
        self.mapping.floats(at)
    }

    /// Marks the group as failed and wakes every sleeper on this host.
    pub fn set_poison(&self) {
        self.poison().store(1, Ordering::SeqCst);
        for (lane, rank) in (0..self.shape.lanes).flat_map(|lane| (0..self.shape.ranks).map(move |rank| (lane, rank))) {
            for flag in [Flag::Entered, Flag::Reduced, Flag::Result, Flag::Copied] {
                wake(self.flag(flag, lane, rank).0);
            }
        }
    }
}

fn allocate(fd: &OwnedFd, offset: usize, len: usize) -> Result<(), CommError> {
    if len == 0 {
        return Ok(());
    }
    loop {
        match rustix::fs::fallocate(fd, FallocateFlags::empty(), offset as u64, len as u64) {
            Ok(()) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(errno) => {
                let what = format!("get {:.1} MiB of shared memory for gradient buckets", len as f64 / 1_048_576.0);
                return Err(CommError::system(what, errno));
            }
        }
    }
}

/// Wakes all sleepers on a shared word.
pub(super) fn wake(word: &AtomicU32) {
    // No PRIVATE flag: the sleepers are in other processes.
    let _ = rustix::thread::futex::wake(word, rustix::thread::futex::Flags::empty(), i32::MAX as u32);
}

/// This rank's arena, private or part of a segment.
pub(super) enum Memory {
    Private(Mapping),
    Shared(std::sync::Arc<Segment>, usize),
}

impl Memory {
    pub fn base(&self) -> *mut f32 {
        match self {
            Memory::Private(mapping) => mapping.floats(0),
            Memory::Shared(segment, me) => segment.arena(*me),
        }
    }

    /// # Safety
    /// The range is within the arena, and no one writes to it while the reference lives.
    pub unsafe fn slice(&self, start: usize, len: usize) -> &[f32] {
        // SAFETY: as promised by the caller.
        unsafe { std::slice::from_raw_parts(self.base().add(start), len) }
    }

    /// # Safety
    /// The range is within the arena, and nothing else accesses it while the reference lives.
    #[allow(clippy::mut_from_ref, reason = "the memory is interior to a mapping; exclusivity is the caller's promise")]
    pub unsafe fn slice_mut(&self, start: usize, len: usize) -> &mut [f32] {
        // SAFETY: as promised by the caller.
        unsafe { std::slice::from_raw_parts_mut(self.base().add(start), len) }
    }
}

/// Floats as mutable bytes.
pub(super) fn bytes_mut(floats: &mut [f32]) -> &mut [u8] {
    // SAFETY: every pattern of four bytes is a valid float.
    unsafe { std::slice::from_raw_parts_mut(floats.as_mut_ptr().cast(), size_of_val(floats)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_segment_do_not_overlap_and_are_aligned() {
        let shape = SegmentShape { ranks: 3, lanes: 2, arena: 5000 };
        let fd = Segment::create_file(shape).unwrap();
        let segments: Vec<Segment> = (0..3).map(|me| Segment::open(&fd, shape, me).unwrap()).collect();
        let segment = &segments[0];
        let mut ranges: Vec<(usize, usize)> = vec![(std::ptr::from_ref(segment.poison()) as usize, 4)];
        for (lane, rank) in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)] {
            for flag in [Flag::Entered, Flag::Reduced, Flag::Result, Flag::Copied] {
                let (word, sleepers) = segment.flag(flag, lane, rank);
                ranges.push((std::ptr::from_ref(word) as usize, 4));
                ranges.push((std::ptr::from_ref(sleepers) as usize, 4));
            }
            for sequence in 0..2 {
                let (bucket, len) = segment.signature(lane, rank, sequence);
                ranges.push((std::ptr::from_ref(bucket) as usize, 8));
                ranges.push((std::ptr::from_ref(len) as usize, 8));
                ranges.push((segment.slot(lane, rank, sequence) as usize, 4 * SLOT_FLOATS));
            }
        }
        for rank in 0..3 {
            assert_eq!(segment.arena(rank) as usize % 64, 0);
            ranges.push((segment.arena(rank) as usize, 5000));
        }
        ranges.sort_unstable();
        assert!(ranges.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0));
        // All three see the same memory.
        segments[1].flag(Flag::Result, 1, 2).0.store(7, Ordering::SeqCst);
        assert_eq!(segments[2].flag(Flag::Result, 1, 2).0.load(Ordering::SeqCst), 7);
    }

    #[test]
    fn an_unsealed_or_short_file_is_refused() {
        let shape = SegmentShape { ranks: 2, lanes: 1, arena: 4096 };
        let fd = Segment::create_file(shape).unwrap();
        assert!(Segment::open(&fd, SegmentShape { arena: 8192, ..shape }, 0).is_err());
        let plain = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&plain, shape.size().unwrap() as u64).unwrap();
        assert!(Segment::open(&plain, shape, 0).is_err());
    }
}
