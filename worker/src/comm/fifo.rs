//! Byte streams between the ranks of one host, in shared memory: one ring buffer per pair and
//! direction.
//!
//! A rank's arena in the segment holds its doorbell and the streams that it receives. The sender
//! writes bytes, then advances `written`; the receiver copies them out, then advances `read`. Both
//! ring the other's doorbell, a futex word, so that a rank can sleep on all its streams at once.
#![allow(unsafe_code)]

use super::{
    shm::{Segment, wake},
    socket::timespec,
    wait::MAX_SLEEP,
};
use rustix::thread::futex::{self, Flags};
use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

/// Distance between words with different writers: two cache lines.
const LINE: usize = 128;
/// Memory for the streams of one host.
const HOST_BYTES: usize = 64 << 20;
const LARGEST: usize = 256 << 10;
const SMALLEST: usize = 16 << 10;

/// Bytes that a stream holds, for this many ranks on the host; a power of two.
fn capacity(ranks: usize) -> usize {
    let each = HOST_BYTES / (ranks * ranks).max(1);
    each.clamp(SMALLEST, LARGEST).next_power_of_two().min(LARGEST)
}

/// Bytes of a rank's arena: its doorbell with the number of sleepers, then a stream per sender.
pub(super) fn arena_bytes(ranks: usize) -> usize {
    2 * LINE + ranks * (2 * LINE + capacity(ranks))
}

/// The streams of one rank with the others of its host.
#[derive(Clone)]
pub(super) struct Mailbox {
    segment: Arc<Segment>,
    me: usize,
}

impl Mailbox {
    pub fn new(segment: Arc<Segment>, me: usize) -> Mailbox {
        Mailbox { segment, me }
    }

    /// The stream from this rank to local rank `to`.
    pub fn to(&self, to: usize) -> Stream {
        Stream { segment: Arc::clone(&self.segment), from: self.me, to }
    }

    /// The stream from local rank `from` to this rank.
    pub fn from(&self, from: usize) -> Stream {
        Stream { segment: Arc::clone(&self.segment), from, to: self.me }
    }

    /// Sleeps until a stream of this rank may have changed, unless `ready` already holds. Returns
    /// after [`MAX_SLEEP`] at the latest.
    pub fn sleep(&self, mut ready: impl FnMut() -> bool) {
        let (bell, sleepers) = (word(&self.segment, self.me, 0), word(&self.segment, self.me, LINE));
        sleepers.fetch_add(1, Ordering::SeqCst);
        let value = bell.load(Ordering::SeqCst);
        if !ready() {
            // No matter what ended the wait, the caller checks its streams again.
            let _ = futex::wait(bell, Flags::empty(), value, Some(&timespec(MAX_SLEEP)));
        }
        sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    /// Wakes this rank's own sleeper.
    pub fn wake(&self) {
        ring(&self.segment, self.me);
    }
}

fn ring(segment: &Segment, rank: usize) {
    let (bell, sleepers) = (word(segment, rank, 0), word(segment, rank, LINE));
    // Sequentially consistent on both sides: either the sleeper sees the new value, or this thread
    // sees the sleeper.
    bell.fetch_add(1, Ordering::SeqCst);
    if sleepers.load(Ordering::SeqCst) > 0 {
        wake(bell);
    }
}

fn word(segment: &Segment, rank: usize, offset: usize) -> &AtomicU32 {
    assert!(offset.is_multiple_of(4) && offset + 4 <= arena_bytes(segment.ranks()));
    // SAFETY: within the rank's arena and aligned, by the assertion; these words are only ever
    // accessed as atomics. The segment outlives the reference.
    unsafe { AtomicU32::from_ptr(segment.arena(rank).cast::<u8>().add(offset).cast()) }
}

/// One direction between two ranks. Counters wrap; the capacity divides their range.
pub(super) struct Stream {
    segment: Arc<Segment>,
    from: usize,
    to: usize,
}

impl Stream {
    fn offset(&self) -> usize {
        2 * LINE + self.from * (2 * LINE + capacity(self.segment.ranks()))
    }

    fn written(&self) -> &AtomicU32 {
        word(&self.segment, self.to, self.offset())
    }

    fn read(&self) -> &AtomicU32 {
        word(&self.segment, self.to, self.offset() + LINE)
    }

    fn data(&self) -> *mut u8 {
        // SAFETY: the stream's bytes follow its counters within the arena.
        unsafe { self.segment.arena(self.to).cast::<u8>().add(self.offset() + 2 * LINE) }
    }

    /// Bytes that can be received now.
    pub fn filled(&self) -> usize {
        self.written().load(Ordering::Acquire).wrapping_sub(self.read().load(Ordering::Relaxed)) as usize
    }

    /// Bytes that can be sent now.
    pub fn free(&self) -> usize {
        let used = self.written().load(Ordering::Relaxed).wrapping_sub(self.read().load(Ordering::Acquire));
        capacity(self.segment.ranks()).saturating_sub(used as usize)
    }

    /// Returns the bytes written; 0 if the stream is full. Only the sender calls it.
    pub fn try_write(&self, bytes: &[u8]) -> usize {
        let (size, at) = (capacity(self.segment.ranks()), self.written().load(Ordering::Relaxed));
        let count = bytes.len().min(self.free());
        let start = at as usize % size;
        let first = count.min(size - start);
        // SAFETY: the free part of the ring belongs to the sender until it advances `written`; both
        // pieces are within the ring.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.data().add(start), first);
            std::ptr::copy_nonoverlapping(bytes.as_ptr().add(first), self.data(), count - first);
        }
        if count > 0 {
            self.written().store(at.wrapping_add(count as u32), Ordering::Release);
            ring(&self.segment, self.to);
        }
        count
    }

    /// Returns the bytes read; 0 if there are none. Only the receiver calls it.
    pub fn try_read(&self, buffer: &mut [u8]) -> usize {
        let (size, at) = (capacity(self.segment.ranks()), self.read().load(Ordering::Relaxed));
        // A sender of another group cannot write here; a counter out of range would be a bug.
        let count = buffer.len().min(self.filled()).min(size);
        let start = at as usize % size;
        let first = count.min(size - start);
        // SAFETY: the filled part of the ring belongs to the receiver until it advances `read`;
        // both pieces are within the ring.
        unsafe {
            std::ptr::copy_nonoverlapping(self.data().add(start), buffer.as_mut_ptr(), first);
            std::ptr::copy_nonoverlapping(self.data(), buffer.as_mut_ptr().add(first), count - first);
        }
        if count > 0 {
            self.read().store(at.wrapping_add(count as u32), Ordering::Release);
            ring(&self.segment, self.from);
        }
        count
    }
}

#[cfg(test)]
mod tests {
    use super::super::shm::SegmentShape;
    use super::*;

    fn mailboxes(ranks: usize) -> Vec<Mailbox> {
        let shape = SegmentShape { ranks, lanes: 1, arena: arena_bytes(ranks) };
        let file = Segment::create_file(shape).unwrap();
        let open = |me| Mailbox::new(Arc::new(Segment::open(&file, shape, me).unwrap()), me);
        (0..ranks).map(open).collect()
    }

    #[test]
    fn streams_keep_their_bytes_in_order_across_the_end_of_the_ring() {
        let all = mailboxes(2);
        let (sender, receiver) = (all[0].to(1), all[1].from(0));
        let size = capacity(2);
        let bytes: Vec<u8> = (0..5 * size + 123).map(|i| (i * 7 % 251) as u8).collect();
        let (mut sent, mut got) = (0, Vec::new());
        let mut piece = vec![0; 100_003];
        while got.len() < bytes.len() {
            sent += sender.try_write(&bytes[sent..]);
            let n = receiver.try_read(&mut piece);
            got.extend_from_slice(&piece[..n]);
        }
        assert!(got == bytes);
        assert_eq!((sender.free(), receiver.filled()), (size, 0));
    }

    #[test]
    fn streams_of_one_host_do_not_overlap() {
        for ranks in [2, 3, 9] {
            let all = mailboxes(ranks);
            let pairs = || (0..ranks).flat_map(|from| (0..ranks).map(move |to| (from, to)));
            for (from, to) in pairs() {
                let tag = [(from * ranks + to) as u8; 300];
                assert_eq!(all[from].to(to).try_write(&tag), 300);
            }
            for (from, to) in pairs() {
                let mut got = [0; 400];
                assert_eq!(all[to].from(from).try_read(&mut got), 300);
                assert!(got[..300].iter().all(|byte| *byte == (from * ranks + to) as u8));
            }
        }
    }

    #[test]
    fn a_bell_before_the_sleep_is_not_lost() {
        let all = mailboxes(2);
        let receiver = all[1].from(0);
        std::thread::scope(|scope| {
            scope.spawn(|| all[0].to(1).try_write(&[1]));
            while receiver.filled() == 0 {
                all[1].sleep(|| receiver.filled() > 0);
            }
        });
    }
}
