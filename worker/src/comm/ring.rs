//! All-reduce around a ring of TCP connections: reduce-scatter, then all-gather, as two byte streams.
//!
//! Member `p` of `m` sends segment `p - t` and receives segment `p - t - 1` (modulo `m`) in step `t` of `2(m - 1)`.
//! What a member receives in step `t` it sends in step `t + 1`, so bytes may leave as soon as they are reduced; there
//! are no rounds and no barriers. In the first `m - 1` steps received numbers are added to this member's own,
//! afterwards they replace them: each segment is summed along the ring in a fixed order and its final bits travel
//! unchanged, so all members end with identical bits.
//!
//! With several buckets in one operation each step sends the segments of all of them, one after the other. So the order
//! in which a number is summed follows from its own bucket, and not from what is reduced together with it.
//!
//! An in-place all-gather is safe: the final value of a number contains this member's addend, which therefore left this
//! member's buffer earlier.
//!
//! With a wire format of 2 bytes, numbers are converted chunk by chunk. Sums are computed in f32, but numbers are
//! rounded to travel: a partial sum once for each member that it passes, and the final sum once more, in its own buffer
//! too, by the last member that adds to it (the owner of the segment). So a sum of `m` members is rounded `m` times,
//! each time by at most half a unit in the last place of the format. Rounded numbers convert back and forth unchanged,
//! so all members hold the owner's bits.

use super::{
    error::Cause,
    frame::{HEADER, Header, Kind},
    local::{Operation, Started, desync, share},
    options::Options,
    shm::{bytes, bytes_mut},
    socket::{timespec, try_recv, try_send},
    turn::{Broken, Turn},
    wait::{NAP, SpinPolicy, Waiter},
    wire::{Absorb, Wire},
};
use rustix::event::{PollFd, PollFlags, Timespec};
use std::{io, ops::Range, os::fd::OwnedFd, sync::Arc};

/// Most numbers received before they are reduced, and converted at once: 256 KiB stay in the cache.
const CHUNK: usize = 64 << 10;
/// Fewest bytes worth a system call while more are on their way.
const WORTH_SENDING: usize = 64 << 10;

pub(super) struct Ring {
    /// To the next member.
    tx: Arc<OwnedFd>,
    /// From the previous member.
    rx: Arc<OwnedFd>,
    circle: Circle,
    options: Options,
    /// Format of the current operation, and the factor of its numbers on the wire.
    wire: Wire,
    scale: f32,
    scratch: Box<[f32]>,
    /// Converted numbers on their way out; empty if nothing is converted.
    staging: Box<[u16]>,
    waiter: Waiter,
}

/// The members of a ring, and this rank's position among them.
pub(super) struct Circle {
    /// Global ranks in ring order.
    pub ranks: Vec<u32>,
    pub position: usize,
    pub attempt: u32,
}

/// The position of one of the two streams.
#[derive(Default)]
struct StreamPosition {
    header: usize,
    /// Segments that are done: step by step, and within a step bucket by bucket.
    segment: usize,
    /// Bytes on the wire of this segment that are done (sent; or received and reduced).
    offset: usize,
}

/// The bytes of the current segment that are in the staging area.
type Staged = Range<usize>;

impl Ring {
    pub fn new((tx, rx): (Arc<OwnedFd>, Arc<OwnedFd>), circle: Circle, options: Options, policy: SpinPolicy) -> Ring {
        let scratch = vec![0.0; CHUNK].into_boxed_slice();
        let staging = vec![0; if options.wire == Wire::F32 { 0 } else { CHUNK }].into_boxed_slice();
        Ring { tx, rx, circle, options, wire: Wire::F32, scale: 1.0, scratch, staging, waiter: Waiter::new(policy) }
    }

    fn left(&self) -> u32 {
        let Circle { ranks, position, .. } = &self.circle;
        ranks[(position + ranks.len() - 1) % ranks.len()]
    }

    fn right(&self) -> u32 {
        let Circle { ranks, position, .. } = &self.circle;
        ranks[(position + 1) % ranks.len()]
    }

    fn me(&self) -> u32 {
        self.circle.ranks[self.circle.position]
    }

    /// Numbers of a segment that the member at `position` sends. `buckets`: all of the operation.
    fn segment(&self, buckets: &[(usize, usize)], position: usize, segment: usize) -> Range<usize> {
        let m = self.circle.ranks.len();
        let (t, (start, len)) = (segment / buckets.len(), buckets[segment % buckets.len()]);
        let part = share(len, m, (position + 2 * m - t) % m);
        let start = start - buckets[0].0;
        start + part.start..start + part.end
    }

    /// Returns the bytes sent.
    pub fn all_reduce(
        &mut self,
        op: Operation,
        buckets: &[(usize, usize)],
        data: &mut [f32],
        turn: &Turn<'_>,
    ) -> Result<u64, Broken> {
        (self.wire, self.scale) = match (self.options.wire_of(op.bucket), turn.wire_scale) {
            (Wire::F16, Some(scale)) => (Wire::F16, scale),
            (Wire::F16, None) => (Wire::F32, 1.0),
            (other, _) => (other, 1.0),
        };
        let m = self.circle.ranks.len();
        let segments = 2 * (m - 1) * buckets.len();
        let header = Header {
            kind: Kind::Operation,
            attempt: self.circle.attempt,
            tag: op.bucket,
            sequence: op.sequence,
            length: op.len as u64 * 4,
        };
        let mine = header.encode();
        let mut theirs = [0; HEADER];
        let (mut sent, mut got) = (StreamPosition::default(), StreamPosition::default());
        let (mut filled, mut staged, mut bytes_sent) = (0, 0..0, 0);
        loop {
            let out = self.send(&mut sent, &mut staged, &got, &mine, (buckets, &*data))?;
            if let Flow::Moved(n) = out {
                bytes_sent += n as u64;
            }
            let inn = if got.header < HEADER {
                self.receive_header(&mut got, &mut theirs, op)?
            } else {
                self.receive(&mut got, &mut filled, (buckets, &mut *data))?
            };
            if sent.segment == segments && got.segment == segments && sent.header == HEADER && got.header == HEADER {
                return Ok(bytes_sent + HEADER as u64);
            }
            if matches!(out, Flow::Moved(_)) || matches!(inn, Flow::Moved(_)) {
                // Every segment arrives twice, but the bucket once. This figure is for people.
                turn.progress.reached((got.segment * op.len * 4 / segments) as u64);
                continue;
            }
            self.pause(out == Flow::Blocked, got.header < HEADER || got.segment < segments, turn)?;
        }
    }

    /// Sends what may leave: in step 0 this member's own segments, later what arrived in step `t - 1`.
    fn send(
        &mut self,
        sent: &mut StreamPosition,
        staged: &mut Staged,
        got: &StreamPosition,
        header: &[u8; HEADER],
        (buckets, data): (&[(usize, usize)], &[f32]),
    ) -> Result<Flow, Broken> {
        let (segments, size) = (2 * (self.circle.ranks.len() - 1) * buckets.len(), self.wire.size());
        while sent.header < HEADER {
            match try_send(&*self.tx, &header[sent.header..]).map_err(|e| self.lost(self.right(), &e))? {
                0 => return Ok(Flow::Blocked),
                n => sent.header += n,
            }
        }
        loop {
            if sent.segment == segments {
                return Ok(Flow::Idle);
            }
            let segment = self.segment(buckets, self.circle.position, sent.segment);
            let end = segment.len() * size;
            if sent.offset == end {
                *sent = StreamPosition { header: HEADER, segment: sent.segment + 1, offset: 0 };
                *staged = 0..0;
                continue;
            }
            let available = match sent.segment.checked_sub(buckets.len()) {
                None => end,
                Some(previous) if previous < got.segment => end,
                Some(previous) if previous == got.segment => got.offset,
                Some(_) => 0,
            };
            let ready = available - sent.offset;
            if ready == 0 || (ready < WORTH_SENDING && available < end) {
                return Ok(Flow::Idle);
            }
            let part = if self.wire == Wire::F32 {
                &bytes(&data[segment])[sent.offset..][..ready.min(CHUNK * size)]
            } else {
                if sent.offset == staged.end {
                    // Only whole numbers are ever available, and staged.
                    let first = segment.start + sent.offset / size;
                    let numbers = (ready / size).min(CHUNK);
                    self.wire.encode(&data[first..first + numbers], &mut self.staging[..numbers], self.scale);
                    *staged = sent.offset..sent.offset + numbers * size;
                }
                &bytemuck::cast_slice(&self.staging)[sent.offset - staged.start..staged.len()]
            };
            return match try_send(&*self.tx, part).map_err(|e| self.lost(self.right(), &e))? {
                0 => Ok(Flow::Blocked),
                n => {
                    sent.offset += n;
                    Ok(Flow::Moved(n))
                }
            };
        }
    }

    fn receive_header(&self, got: &mut StreamPosition, raw: &mut [u8; HEADER], op: Operation) -> Result<Flow, Broken> {
        match self.read(&mut raw[got.header..])? {
            0 => return Ok(Flow::Idle),
            n if got.header + n < HEADER => {
                got.header += n;
                return Ok(Flow::Moved(n));
            }
            n => got.header += n,
        }
        let header = Header::decode(raw).map_err(|error| {
            Broken::Because(Cause::failed(self.left(), format!("sent something other than an operation: {error}")))
        })?;
        if (header.kind, header.attempt) != (Kind::Operation, self.circle.attempt) {
            let text = format!("sent {:?} of attempt {} where an operation was due", header.kind, header.attempt);
            return Err(Broken::Because(Cause::failed(self.left(), text)));
        }
        if (header.sequence, header.tag, header.length) != (op.sequence, op.bucket, op.len as u64 * 4) {
            let theirs = Started { rank: self.left(), bucket: header.tag.into(), len: header.length / 4 };
            let mine = Started { rank: self.me(), bucket: op.bucket.into(), len: op.len as u64 };
            return Err(Broken::Because(desync(theirs, mine, op.sequence)));
        }
        Ok(Flow::Moved(HEADER))
    }

    fn receive(
        &mut self,
        got: &mut StreamPosition,
        filled: &mut usize,
        (buckets, data): (&[(usize, usize)], &mut [f32]),
    ) -> Result<Flow, Broken> {
        let (m, size) = (self.circle.ranks.len(), self.wire.size());
        loop {
            if got.segment == 2 * (m - 1) * buckets.len() {
                return Ok(Flow::Idle);
            }
            // This member receives what its left neighbour sends.
            let segment = self.segment(buckets, self.circle.position + m - 1, got.segment);
            let missing = segment.len() * size - got.offset;
            if missing == 0 {
                *got = StreamPosition { header: HEADER, segment: got.segment + 1, offset: 0 };
                continue;
            }
            let want = missing.min(CHUNK * size);
            let how = match (got.segment / buckets.len() + 1).cmp(&(m - 1)) {
                std::cmp::Ordering::Less => Absorb::Add,
                std::cmp::Ordering::Equal => Absorb::AddRounded,
                std::cmp::Ordering::Greater => Absorb::Replace,
            };
            if self.wire == Wire::F32 && how == Absorb::Replace {
                let part = &mut bytes_mut(&mut data[segment])[got.offset..][..want];
                return match self.read(part)? {
                    0 => Ok(Flow::Idle),
                    n => {
                        got.offset += n;
                        Ok(Flow::Moved(n))
                    }
                };
            }
            let mut scratch = std::mem::take(&mut self.scratch);
            let flow = match self.read(&mut bytes_mut(&mut scratch)[*filled..want]) {
                Ok(0) => Ok(Flow::Idle),
                Ok(n) => {
                    *filled += n;
                    let (first, whole) = (segment.start + got.offset / size, *filled / size);
                    let arrived = bytes_mut(&mut scratch);
                    self.wire.absorb(&arrived[..whole * size], &mut data[first..first + whole], how, self.scale);
                    arrived.copy_within(whole * size..*filled, 0);
                    *filled -= whole * size;
                    got.offset += whole * size;
                    Ok(Flow::Moved(n))
                }
                Err(broken) => Err(broken),
            };
            self.scratch = scratch;
            return flow;
        }
    }

    /// Returns the bytes read; 0 if none are available now.
    fn read(&self, buffer: &mut [u8]) -> Result<usize, Broken> {
        match try_recv(&*self.rx, buffer) {
            Ok(None) => Ok(0),
            Ok(Some(0)) => Err(self.lost(self.left(), &io::ErrorKind::UnexpectedEof.into())),
            Ok(Some(n)) => Ok(n),
            Err(error) => Err(self.lost(self.left(), &error)),
        }
    }

    fn lost(&self, peer: u32, error: &io::Error) -> Broken {
        Broken::Lane(Cause::failed(peer, format!("data connection to rank {} lost: {error}", self.me())))
    }

    fn pause(&mut self, blocked: bool, receiving: bool, turn: &Turn<'_>) -> Result<(), Broken> {
        let (tx, rx) = (Arc::clone(&self.tx), Arc::clone(&self.rx));
        let mut fds = Vec::new();
        let mut both = [PollFd::new(&*rx, PollFlags::IN), PollFd::new(&*tx, PollFlags::OUT)];
        let fds: &mut [PollFd<'_>] = match (receiving, blocked) {
            (true, true) => &mut both,
            (true, false) => &mut both[..1],
            (false, true) => &mut both[1..],
            (false, false) => &mut fds,
        };
        let mut poll = |limit: &Timespec| rustix::event::poll(fds, Some(limit)).unwrap_or(0) > 0;
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        if self.waiter.linger(turn.in_front(), || poll(&now)) {
            return Ok(());
        }
        while !poll(&timespec(NAP)) {
            if turn.shared.failed() {
                return Err(Broken::Elsewhere);
            }
        }
        Ok(())
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Flow {
    /// This many bytes were moved.
    Moved(usize),
    /// Nothing to do in this direction until the other one moves, or nothing has arrived.
    Idle,
    /// The socket is full.
    Blocked,
}
