//! All-reduce around a ring of TCP connections: reduce-scatter, then all-gather, as two byte
//! streams.
//!
//! In step `t` of `2(m - 1)`, member `p` of `m` sends segment `p - t` and receives segment
//! `p - t - 1` (modulo `m`). A member sends in step `t + 1` what it received in step `t`, so bytes
//! can leave as soon as they are reduced; there are no rounds and no barriers. In the first `m - 1`
//! steps, received values are added to this member's own; afterwards they replace them. Each
//! segment is summed along the ring in a fixed order and its final bits travel unchanged, so all
//! members end with identical bits.
//!
//! With several buckets in one operation, each step sends their segments one after the other. The
//! summation order of an element therefore depends only on its own bucket, not on what is reduced
//! together with it.
//!
//! An in-place all-gather is safe: the final sum of an element contains this member's addend, which
//! must already have left this member's buffer.
//!
//! With a 2-byte wire format, values are converted chunk by chunk. Sums are computed in f32, but
//! values are rounded for sending: a partial sum once per member it passes, and the final sum once
//! more, including in its own buffer, by the last member that adds to it (the segment's owner). A
//! sum of `m` members is therefore rounded `m` times, each time by at most half a unit in the last
//! place of the format. Rounded values convert back and forth unchanged, so all members hold the
//! owner's bits.

use super::{
    error::Cause,
    frame::{HEADER, Header, Kind},
    local::{Operation, StartedOp, desync, shard},
    op_context::{OpContext, OpError},
    options::Options,
    shm::{bytes, bytes_mut},
    socket::{timespec, try_recv, try_send},
    wait::{MAX_SLEEP, SpinPolicy, Waiter},
    wire::{Combine, Wire},
};
use rustix::event::{PollFd, PollFlags, Timespec};
use std::{io, ops::Range, os::fd::OwnedFd, sync::Arc};

/// Most elements received before they are reduced, or converted at once: 256 KiB stay in the cache.
const CHUNK: usize = 64 << 10;
/// Minimum bytes worth a system call while more are on their way.
const WORTH_SENDING: usize = 64 << 10;

pub(super) struct Ring {
    /// To the next member.
    tx: Arc<OwnedFd>,
    /// From the previous member.
    rx: Arc<OwnedFd>,
    members: RingMembers,
    options: Options,
    /// Wire format and scale of the current operation.
    wire: Wire,
    scale: f32,
    scratch: Box<[f32]>,
    /// Converted elements to be sent; empty for f32.
    staging: Box<[u16]>,
    waiter: Waiter,
}

/// Members of a ring, and this rank's position among them.
pub(super) struct RingMembers {
    /// Global ranks in ring order.
    pub ranks: Vec<u32>,
    pub position: usize,
    pub attempt: u32,
}

/// Progress of one of the two streams.
#[derive(Default)]
struct StreamPosition {
    header: usize,
    /// Completed segments: ordered by step, then by bucket.
    segment: usize,
    /// Completed wire bytes of the current segment (sent, or received and reduced).
    offset: usize,
}

/// Byte range of the current segment that is in the staging buffer.
type Staged = Range<usize>;

impl Ring {
    pub fn new(
        (tx, rx): (Arc<OwnedFd>, Arc<OwnedFd>),
        members: RingMembers,
        options: Options,
        policy: SpinPolicy,
    ) -> Ring {
        let scratch = vec![0.0; CHUNK].into_boxed_slice();
        let staging = vec![0; if options.wire == Wire::F32 { 0 } else { CHUNK }].into_boxed_slice();
        Ring { tx, rx, members, options, wire: Wire::F32, scale: 1.0, scratch, staging, waiter: Waiter::new(policy) }
    }

    fn left(&self) -> u32 {
        let RingMembers { ranks, position, .. } = &self.members;
        ranks[(position + ranks.len() - 1) % ranks.len()]
    }

    fn right(&self) -> u32 {
        let RingMembers { ranks, position, .. } = &self.members;
        ranks[(position + 1) % ranks.len()]
    }

    fn me(&self) -> u32 {
        self.members.ranks[self.members.position]
    }

    /// Elements of a segment that the member at `position` sends. `buckets`: all buckets of the
    /// operation.
    fn segment(&self, buckets: &[(usize, usize)], position: usize, segment: usize) -> Range<usize> {
        let m = self.members.ranks.len();
        let (t, (start, len)) = (segment / buckets.len(), buckets[segment % buckets.len()]);
        let part = shard(len, m, (position + 2 * m - t) % m);
        let start = start - buckets[0].0;
        start + part.start..start + part.end
    }

    /// Returns the bytes sent.
    pub fn all_reduce(
        &mut self,
        op: Operation,
        buckets: &[(usize, usize)],
        data: &mut [f32],
        ctx: &OpContext<'_>,
    ) -> Result<u64, OpError> {
        (self.wire, self.scale) = match (self.options.wire_of(op.bucket), ctx.wire_scale) {
            (Wire::F16, Some(scale)) => (Wire::F16, scale),
            (Wire::F16, None) => (Wire::F32, 1.0),
            (other, _) => (other, 1.0),
        };
        let m = self.members.ranks.len();
        let segments = 2 * (m - 1) * buckets.len();
        let header = Header {
            kind: Kind::Operation,
            attempt: self.members.attempt,
            tag: op.bucket,
            sequence: op.sequence,
            length: op.len as u64 * 4,
        };
        let mine = header.encode();
        let mut theirs = [0; HEADER];
        let (mut sent, mut got) = (StreamPosition::default(), StreamPosition::default());
        let (mut filled, mut staged, mut bytes_sent) = (0, 0..0, 0);
        loop {
            let send_flow = self.send(&mut sent, &mut staged, &got, &mine, (buckets, &*data))?;
            if let Flow::Moved(n) = send_flow {
                bytes_sent += n as u64;
            }
            let recv_flow = if got.header < HEADER {
                self.receive_header(&mut got, &mut theirs, op)?
            } else {
                self.receive(&mut got, &mut filled, (buckets, &mut *data))?
            };
            if sent.segment == segments && got.segment == segments && sent.header == HEADER && got.header == HEADER {
                return Ok(bytes_sent + HEADER as u64);
            }
            if matches!(send_flow, Flow::Moved(_)) || matches!(recv_flow, Flow::Moved(_)) {
                // Every segment arrives twice, but the bucket once. This figure is only displayed.
                ctx.progress.reached((got.segment * op.len * 4 / segments) as u64);
                continue;
            }
            self.pause(send_flow == Flow::Blocked, got.header < HEADER || got.segment < segments, ctx)?;
        }
    }

    /// Sends what is ready: in step 0 this member's own segments, later what arrived in step
    /// `t - 1`.
    fn send(
        &mut self,
        sent: &mut StreamPosition,
        staged: &mut Staged,
        got: &StreamPosition,
        header: &[u8; HEADER],
        (buckets, data): (&[(usize, usize)], &[f32]),
    ) -> Result<Flow, OpError> {
        let (segments, size) = (2 * (self.members.ranks.len() - 1) * buckets.len(), self.wire.size());
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
            let segment = self.segment(buckets, self.members.position, sent.segment);
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
                    // Only whole elements are ever available and staged.
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

    fn receive_header(&self, got: &mut StreamPosition, raw: &mut [u8; HEADER], op: Operation) -> Result<Flow, OpError> {
        match self.read(&mut raw[got.header..])? {
            0 => return Ok(Flow::Idle),
            n if got.header + n < HEADER => {
                got.header += n;
                return Ok(Flow::Moved(n));
            }
            n => got.header += n,
        }
        let header = Header::decode(raw).map_err(|error| {
            OpError::Known(Cause::failed(self.left(), format!("sent something other than an operation: {error}")))
        })?;
        if (header.kind, header.attempt) != (Kind::Operation, self.members.attempt) {
            let text = format!("sent {:?} of attempt {} where an operation was due", header.kind, header.attempt);
            return Err(OpError::Known(Cause::failed(self.left(), text)));
        }
        if (header.sequence, header.tag, header.length) != (op.sequence, op.bucket, op.len as u64 * 4) {
            let theirs = StartedOp { rank: self.left(), bucket: header.tag.into(), len: header.length / 4 };
            let mine = StartedOp { rank: self.me(), bucket: op.bucket.into(), len: op.len as u64 };
            return Err(OpError::Known(desync(theirs, mine, op.sequence)));
        }
        Ok(Flow::Moved(HEADER))
    }

    fn receive(
        &mut self,
        got: &mut StreamPosition,
        filled: &mut usize,
        (buckets, data): (&[(usize, usize)], &mut [f32]),
    ) -> Result<Flow, OpError> {
        let (m, size) = (self.members.ranks.len(), self.wire.size());
        loop {
            if got.segment == 2 * (m - 1) * buckets.len() {
                return Ok(Flow::Idle);
            }
            // This member receives what its left neighbour sends.
            let segment = self.segment(buckets, self.members.position + m - 1, got.segment);
            let missing = segment.len() * size - got.offset;
            if missing == 0 {
                *got = StreamPosition { header: HEADER, segment: got.segment + 1, offset: 0 };
                continue;
            }
            let want = missing.min(CHUNK * size);
            let combine = match (got.segment / buckets.len() + 1).cmp(&(m - 1)) {
                std::cmp::Ordering::Less => Combine::Add,
                std::cmp::Ordering::Equal => Combine::AddRounded,
                std::cmp::Ordering::Greater => Combine::Replace,
            };
            if self.wire == Wire::F32 && combine == Combine::Replace {
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
                    self.wire.combine(&arrived[..whole * size], &mut data[first..first + whole], combine, self.scale);
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
    fn read(&self, buffer: &mut [u8]) -> Result<usize, OpError> {
        match try_recv(&*self.rx, buffer) {
            Ok(None) => Ok(0),
            Ok(Some(0)) => Err(self.lost(self.left(), &io::ErrorKind::UnexpectedEof.into())),
            Ok(Some(n)) => Ok(n),
            Err(error) => Err(self.lost(self.left(), &error)),
        }
    }

    fn lost(&self, peer: u32, error: &io::Error) -> OpError {
        OpError::LaneLost(Cause::failed(peer, format!("data connection to rank {} lost: {error}", self.me())))
    }

    fn pause(&mut self, blocked: bool, receiving: bool, ctx: &OpContext<'_>) -> Result<(), OpError> {
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
        if self.waiter.spin(ctx.in_foreground(), || poll(&now)) {
            return Ok(());
        }
        while !poll(&timespec(MAX_SLEEP)) {
            if ctx.shared.failed() {
                return Err(OpError::GroupFailed);
            }
        }
        Ok(())
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Flow {
    /// Bytes moved.
    Moved(usize),
    /// Nothing to send until more arrives, or nothing has arrived.
    Idle,
    /// The socket is full.
    Blocked,
}
