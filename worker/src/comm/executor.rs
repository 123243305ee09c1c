//! Runs plans: moves the chunks of one operation over the channels of a rank, all streams at once,
//! on the caller's thread.
//!
//! Every stream begins with a header that identifies the operation. A rank also exchanges headers
//! with its neighbours in rank order, even if the plan moves no data between them: two ranks that
//! start different operations are then always found, whatever the plans.
//!
//! A step of several buckets moves their parts one after the other. The order in which an element
//! is summed therefore depends only on its own bucket, not on what is reduced together with it.

mod parts;
mod streams;

use super::{
    channel::{Channel, Peer},
    error::Cause,
    fifo::Mailbox,
    frame::Header,
    op_context::{OpContext, OpError},
    plan::{Action, Program},
    socket::timespec,
    wait::{MAX_SLEEP, SpinPolicy, Waiter},
};
pub(super) use parts::{Division, Format, Parts};
use rustix::event::{PollFd, PollFlags, Timespec};
use std::{io, time::Duration};
use streams::{Cursor, Flow};

/// Most bytes received before they are combined, or converted at once; they stay in the cache.
const CHUNK: usize = 256 << 10;
/// Longest sleep on sockets while shared memory may change too.
const MIXED_SLEEP: Duration = Duration::from_micros(200);
/// File descriptors that fit on the stack.
const FEW: usize = 8;

/// A program, with its steps grouped by stream.
pub(super) struct Prepared {
    program: Program,
    sends: Vec<Lane>,
    receives: Vec<Lane>,
}

/// The steps of one stream, in order.
struct Lane {
    peer: usize,
    steps: Vec<usize>,
}

impl Prepared {
    /// `neighbours`: the peers to which this rank sends a header at least, and from which it
    /// receives one.
    pub fn new(program: Program, neighbours: Option<(usize, usize)>) -> Prepared {
        let (mut sends, mut receives): (Vec<Lane>, Vec<Lane>) = (Vec::new(), Vec::new());
        let lane = |lanes: &mut Vec<Lane>, peer: usize| match lanes.iter().position(|lane| lane.peer == peer) {
            Some(found) => found,
            None => {
                lanes.push(Lane { peer, steps: Vec::new() });
                lanes.len() - 1
            }
        };
        for (number, step) in program.steps.iter().enumerate() {
            let lanes = if step.action == Action::Send { &mut sends } else { &mut receives };
            let found = lane(lanes, step.peer);
            lanes[found].steps.push(number);
        }
        if let Some((to, from)) = neighbours {
            lane(&mut sends, to);
            lane(&mut receives, from);
        }
        Prepared { program, sends, receives }
    }

    pub fn chunks(&self) -> usize {
        self.program.chunks
    }

    /// Peers to which this rank sends, and from which it receives.
    pub fn peers(&self) -> (impl Iterator<Item = usize>, impl Iterator<Item = usize>) {
        (self.sends.iter().map(|lane| lane.peer), self.receives.iter().map(|lane| lane.peer))
    }
}

/// An operation of a plan.
pub(super) struct Task<'a> {
    pub header: Header,
    /// The failure of a peer that started something else.
    pub mismatch: &'a dyn Fn(u32, &Header) -> Cause,
    pub parts: Parts<'a>,
    pub format: Format,
}

/// A rank's channels and buffers.
pub(super) struct Executor {
    peers: Vec<Peer>,
    /// This rank's shared memory, if a channel uses it.
    mailbox: Option<Mailbox>,
    me: u32,
    /// Received values before they are combined.
    scratch: Box<[u64]>,
    /// Converted values to be sent.
    staging: Box<[u16]>,
    staged: streams::Staged,
    waiter: Waiter,
    sends: Vec<Cursor>,
    receives: Vec<Cursor>,
    /// Wire bytes completed of each step and bucket.
    done: Vec<usize>,
}

impl Executor {
    /// `peers` are in the order in which plans number them; `converts`: formats differ on the wire.
    pub fn new(
        peers: Vec<Peer>,
        mailbox: Option<Mailbox>,
        me: u32,
        (policy, converts): (SpinPolicy, bool),
    ) -> Executor {
        Executor {
            peers,
            mailbox,
            me,
            scratch: vec![0; CHUNK / 8].into_boxed_slice(),
            staging: vec![0; if converts { CHUNK / 4 } else { 0 }].into_boxed_slice(),
            staged: streams::Staged::default(),
            waiter: Waiter::new(policy),
            sends: Vec::new(),
            receives: Vec::new(),
            done: Vec::new(),
        }
    }

    /// Runs a task on `data`; returns the bytes sent over TCP.
    pub fn run(
        &mut self,
        prepared: &Prepared,
        task: &Task<'_>,
        data: &mut [u8],
        ctx: &OpContext<'_>,
    ) -> Result<u64, OpError> {
        let buckets = task.parts.buckets.len();
        self.done.clear();
        self.done.resize(prepared.program.steps.len() * buckets, 0);
        for (cursors, lanes) in [(&mut self.sends, &prepared.sends), (&mut self.receives, &prepared.receives)] {
            cursors.clear();
            cursors.resize_with(lanes.len(), Cursor::default);
        }
        self.staged = streams::Staged::default();
        let header = task.header.encode();
        let (mut sent, mut arrived) = (0, 0);
        loop {
            let mut moved = false;
            let mut finished = true;
            for (number, lane) in prepared.sends.iter().enumerate() {
                if self.sends[number].flow == Flow::Finished {
                    continue;
                }
                let bytes = self.send(number, lane, &header, (prepared, task), data)?;
                if bytes > 0 {
                    moved = true;
                    let over_tcp = matches!(self.peers[lane.peer].outgoing, Some(Channel::Tcp(_)));
                    sent += if over_tcp { bytes as u64 } else { 0 };
                }
                finished &= self.sends[number].flow == Flow::Finished;
            }
            for (number, lane) in prepared.receives.iter().enumerate() {
                if self.receives[number].flow == Flow::Finished {
                    continue;
                }
                let bytes = self.receive(number, lane, (prepared, task), data)?;
                arrived += bytes;
                moved |= bytes > 0;
                finished &= self.receives[number].flow == Flow::Finished;
            }
            if finished {
                return Ok(sent);
            }
            if moved {
                // Plans move the buffer about twice. This figure is only displayed.
                ctx.progress.reached((arrived / 2).min(data.len()) as u64);
            } else {
                self.pause(prepared, ctx)?;
            }
        }
    }

    fn lost(&self, peer: usize, error: &io::Error) -> OpError {
        let text = format!("data connection to rank {} lost: {error}", self.me);
        OpError::LaneLost(Cause::failed(self.peers[peer].rank, text))
    }

    /// Waits until a channel with something left to do is ready.
    fn pause(&mut self, prepared: &Prepared, ctx: &OpContext<'_>) -> Result<(), OpError> {
        let Executor { peers, sends, receives, mailbox, waiter, .. } = self;
        let outgoing = sends.iter().zip(&prepared.sends).filter(|(cursor, _)| cursor.flow == Flow::Blocked);
        let outgoing = outgoing.filter_map(|(_, lane)| peers[lane.peer].outgoing.as_ref());
        let incoming = receives.iter().zip(&prepared.receives).filter(|(cursor, _)| cursor.flow == Flow::Blocked);
        let incoming = incoming.filter_map(|(_, lane)| peers[lane.peer].incoming.as_ref());
        let channels =
            || outgoing.clone().map(|c| (c, PollFlags::OUT)).chain(incoming.clone().map(|c| (c, PollFlags::IN)));
        let memory_ready = || {
            channels().any(|(channel, flags)| match channel {
                Channel::Memory(stream) if flags == PollFlags::OUT => stream.free() > 0,
                Channel::Memory(stream) => stream.filled() > 0,
                Channel::Tcp(_) => false,
            })
        };
        let sockets = || channels().filter_map(|(channel, flags)| Some(PollFd::new(channel.socket()?, flags)));
        let (mut few, mut many): (_, Vec<PollFd<'_>>);
        let fds: &mut [PollFd<'_>] = match sockets().next() {
            None => &mut [],
            Some(first) => {
                let count = sockets().count();
                if count <= FEW {
                    few = std::array::from_fn::<_, FEW, _>(|_| first.clone());
                    few.iter_mut().zip(sockets()).for_each(|(slot, fd)| *slot = fd);
                    &mut few[..count]
                } else {
                    many = sockets().collect();
                    &mut many
                }
            }
        };
        let has_memory = channels().any(|(channel, _)| matches!(channel, Channel::Memory(_)));
        let has_sockets = !fds.is_empty();
        let mut poll = |limit: &Timespec| has_sockets && rustix::event::poll(fds, Some(limit)).unwrap_or(0) > 0;
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        if waiter.spin(ctx.in_foreground(), || memory_ready() || poll(&now)) {
            return Ok(());
        }
        loop {
            if ctx.shared.failed() {
                return Err(OpError::GroupFailed);
            }
            let ready = match mailbox {
                Some(mailbox) if has_memory && !has_sockets => {
                    mailbox.sleep(memory_ready);
                    memory_ready()
                }
                _ => poll(&timespec(if has_memory { MIXED_SLEEP } else { MAX_SLEEP })) || memory_ready(),
            };
            if ready {
                return Ok(());
            }
        }
    }
}
