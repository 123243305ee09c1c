//! All-reduce around a ring of TCP connections: reduce-scatter, then all-gather, as two byte streams.
//!
//! Member `p` of `m` sends segment `p - t` and receives segment `p - t - 1` (modulo `m`) in step `t` of `2(m - 1)`.
//! What is received in step `t` is what is sent in step `t + 1`, so bytes may leave as soon as they are reduced; there
//! are no rounds and no barriers. In the first `m - 1` steps received numbers are added to this member's, afterwards
//! they replace them: each segment is summed along the ring in a fixed order and its final bits travel unchanged, so
//! all members end with identical bits.
//!
//! An in-place all-gather is safe: the final value of a byte contains this member's addend, which therefore has left
//! this member's buffer before.

use super::{
    engine::{Broken, Turn},
    error::Cause,
    frame::{HEADER, Header, Kind},
    kernels,
    local::{Operation, desync, share},
    shm::{bytes, bytes_mut},
    socket::{timespec, try_recv, try_send},
    wait::{NAP, SpinPolicy, Waiter},
};
use rustix::event::{PollFd, PollFlags, Timespec};
use std::{io, ops::Range, os::fd::OwnedFd, sync::Arc};

/// Floats received at most before they are reduced: 256 KiB stay in the cache.
const CHUNK: usize = 64 << 10;
/// Bytes worth a system call while more are on their way.
const WORTH_SENDING: usize = 64 << 10;

pub(super) struct Ring {
    /// To the next member.
    tx: Arc<OwnedFd>,
    /// From the previous member.
    rx: Arc<OwnedFd>,
    /// Global ranks in ring order.
    ranks: Vec<u32>,
    position: usize,
    attempt: u32,
    scratch: Box<[f32]>,
    waiter: Waiter,
}

/// The place of one of the two streams.
#[derive(Default)]
struct Place {
    header: usize,
    step: usize,
    /// Bytes of this step's segment that are through (sent; or received and reduced).
    offset: usize,
}

impl Ring {
    pub fn new(
        (tx, rx): (Arc<OwnedFd>, Arc<OwnedFd>),
        ranks: Vec<u32>,
        position: usize,
        attempt: u32,
        policy: SpinPolicy,
    ) -> Ring {
        let scratch = vec![0.0; CHUNK].into_boxed_slice();
        Ring { tx, rx, ranks, position, attempt, scratch, waiter: Waiter::new(policy) }
    }

    fn left(&self) -> u32 {
        self.ranks[(self.position + self.ranks.len() - 1) % self.ranks.len()]
    }

    fn right(&self) -> u32 {
        self.ranks[(self.position + 1) % self.ranks.len()]
    }

    /// Bytes of the segment sent in step `t` by the member at `position`.
    fn segment(&self, len: usize, position: usize, t: usize) -> Range<usize> {
        let m = self.ranks.len();
        let part = share(len, m, (position + 2 * m - t) % m);
        part.start * 4..part.end * 4
    }

    pub fn all_reduce(&mut self, op: Operation, data: &mut [f32], turn: &Turn<'_>) -> Result<(), Broken> {
        let m = self.ranks.len();
        let steps = 2 * (m - 1);
        let header = Header {
            kind: Kind::Operation,
            attempt: self.attempt,
            tag: op.bucket,
            sequence: op.sequence,
            length: op.len as u64 * 4,
        };
        let mine = header.encode();
        let mut theirs = [0; HEADER];
        let (mut sent, mut got) = (Place::default(), Place::default());
        let mut filled = 0;
        loop {
            let out = self.send(&mut sent, &got, &mine, data, steps)?;
            let inn = if got.header < HEADER {
                self.receive_header(&mut got, &mut theirs, op)?
            } else {
                self.receive(&mut got, &mut filled, data, steps)?
            };
            if sent.step == steps && got.step == steps && sent.header == HEADER && got.header == HEADER {
                return Ok(());
            }
            if out == Flow::Moved || inn == Flow::Moved {
                // Every segment arrives twice, but the bucket once: a figure for people.
                turn.shared.progress.reached((got.step * op.len * 4 / steps) as u64);
                continue;
            }
            self.pause(out == Flow::Blocked, got.header < HEADER || got.step < steps, turn)?;
        }
    }

    /// Sends what may leave: in step 0 my own segment, later what step `t - 1` has brought.
    fn send(
        &self,
        sent: &mut Place,
        got: &Place,
        header: &[u8; HEADER],
        data: &[f32],
        steps: usize,
    ) -> Result<Flow, Broken> {
        while sent.header < HEADER {
            match try_send(&*self.tx, &header[sent.header..]).map_err(|e| self.lost(self.right(), &e))? {
                0 => return Ok(Flow::Blocked),
                n => sent.header += n,
            }
        }
        loop {
            if sent.step == steps {
                return Ok(Flow::Idle);
            }
            let segment = self.segment(data.len(), self.position, sent.step);
            if sent.offset == segment.len() {
                sent.step += 1;
                sent.offset = 0;
                continue;
            }
            let available = match sent.step.checked_sub(1) {
                None => segment.len(),
                Some(previous) if previous < got.step => segment.len(),
                Some(previous) if previous == got.step => got.offset,
                Some(_) => 0,
            };
            let ready = available - sent.offset;
            if ready == 0 || (ready < WORTH_SENDING && available < segment.len()) {
                return Ok(Flow::Idle);
            }
            let from = segment.start + sent.offset;
            let part = &bytes(data)[from..from + ready.min(CHUNK * 4)];
            return match try_send(&*self.tx, part).map_err(|e| self.lost(self.right(), &e))? {
                0 => Ok(Flow::Blocked),
                n => {
                    sent.offset += n;
                    Ok(Flow::Moved)
                }
            };
        }
    }

    fn receive_header(&self, got: &mut Place, raw: &mut [u8; HEADER], op: Operation) -> Result<Flow, Broken> {
        match self.read(&mut raw[got.header..])? {
            0 => return Ok(Flow::Idle),
            n => got.header += n,
        }
        if got.header < HEADER {
            return Ok(Flow::Moved);
        }
        let header = Header::decode(raw)
            .map_err(|error| Broken::Because(Cause::failed(self.left(), format!("sent no operation: {error}"))))?;
        if (header.kind, header.attempt) != (Kind::Operation, self.attempt) {
            let text = format!("sent {:?} of attempt {} where an operation was due", header.kind, header.attempt);
            return Err(Broken::Because(Cause::failed(self.left(), text)));
        }
        if (header.sequence, header.tag, header.length) != (op.sequence, op.bucket, op.len as u64 * 4) {
            let theirs = (self.left(), header.tag.into(), header.length / 4);
            let mine = (self.ranks[self.position], op.bucket.into(), op.len as u64);
            return Err(Broken::Because(desync(theirs, mine, op.sequence)));
        }
        Ok(Flow::Moved)
    }

    fn receive(&mut self, got: &mut Place, filled: &mut usize, data: &mut [f32], steps: usize) -> Result<Flow, Broken> {
        let m = self.ranks.len();
        loop {
            if got.step == steps {
                return Ok(Flow::Idle);
            }
            // What I receive is what my left neighbour sends.
            let segment = self.segment(data.len(), self.position + m - 1, got.step);
            if got.offset == segment.len() {
                got.step += 1;
                got.offset = 0;
                continue;
            }
            let missing = segment.len() - got.offset;
            let at = segment.start + got.offset;
            if got.step >= m - 1 {
                let part = &mut bytes_mut(data)[at..at + missing.min(CHUNK * 4)];
                return match self.read(part)? {
                    0 => Ok(Flow::Idle),
                    n => {
                        got.offset += n;
                        Ok(Flow::Moved)
                    }
                };
            }
            let mut scratch = std::mem::take(&mut self.scratch);
            let read = self.read(&mut bytes_mut(&mut scratch)[*filled..missing.min(CHUNK * 4)]);
            let flow = match read {
                Ok(0) => Ok(Flow::Idle),
                Ok(n) => {
                    *filled += n;
                    let whole = *filled / 4;
                    kernels::add(&mut data[at / 4..at / 4 + whole], &scratch[..whole]);
                    bytes_mut(&mut scratch).copy_within(whole * 4..*filled, 0);
                    *filled -= whole * 4;
                    got.offset += whole * 4;
                    Ok(Flow::Moved)
                }
                Err(broken) => Err(broken),
            };
            self.scratch = scratch;
            return flow;
        }
    }

    /// Bytes read; 0 if there are none now.
    fn read(&self, buffer: &mut [u8]) -> Result<usize, Broken> {
        match try_recv(&*self.rx, buffer) {
            Ok(None) => Ok(0),
            Ok(Some(0)) => Err(self.lost(self.left(), &io::ErrorKind::UnexpectedEof.into())),
            Ok(Some(n)) => Ok(n),
            Err(error) => Err(self.lost(self.left(), &error)),
        }
    }

    fn lost(&self, peer: u32, error: &io::Error) -> Broken {
        Broken::Lane(Cause::failed(
            peer,
            format!("data connection to rank {} lost: {error}", self.ranks[self.position]),
        ))
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

#[derive(PartialEq, Eq)]
enum Flow {
    Moved,
    /// Nothing to do in this direction until the other one moves, or nothing has arrived.
    Idle,
    /// The socket is full.
    Blocked,
}
