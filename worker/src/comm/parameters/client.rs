//! A rank's end of its connections to all servers.

use super::super::{
    error::{Cause, CommError},
    join::spawn,
    state::Shared,
    timing::Timing,
    wait::MAX_SLEEP,
};
use super::connect::ParameterLinks;
use super::link::{self, Link};
use super::message::{Message, MessageKind};
use std::{
    collections::VecDeque,
    os::fd::OwnedFd,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::JoinHandle,
    time::Instant,
};
use switchyard_worker_contract::recorder::Operation;

/// Most replies to a message.
const MOST_REPLIES: usize = 2;

/// The replies that a slot awaits.
#[derive(Default)]
struct Slot {
    /// Server that replies; `None`: no reply is due.
    due: Option<usize>,
    /// Sums, and weights that another rank has requested since.
    replies: VecDeque<Message>,
    /// Times of the last exchange.
    times: Option<(Instant, Instant)>,
    bytes: u64,
    server: usize,
}

#[derive(Default)]
struct State {
    outbox: Vec<(usize, Message)>,
    /// One per bucket, then one per server.
    slots: Vec<Slot>,
    /// Servers that have closed their connection.
    closed: Vec<bool>,
    stop: bool,
}

struct Mailbox {
    state: Mutex<State>,
    arrived: Condvar,
    wake: Arc<OwnedFd>,
}

impl Mailbox {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sends to parameter servers and receives their replies, on a thread of its own.
///
/// Each bucket has a slot for one reply that is due, and so has each server.
pub struct ParameterClient {
    mailbox: Arc<Mailbox>,
    shared: Arc<Shared>,
    /// Member that hosts each server.
    hosts: Vec<u32>,
    buckets: usize,
    thread: Option<JoinHandle<()>>,
}

impl ParameterClient {
    /// Starts the thread. `most`: most words of a reply.
    ///
    /// # Errors
    /// The system has no more threads or files.
    pub fn start(links: &ParameterLinks, buckets: usize, most: u64) -> Result<ParameterClient, CommError> {
        let shared = Arc::clone(&links.shared);
        let wake = link::wake_fd().map_err(|e| CommError::system("create an eventfd", e))?;
        let servers = links.servers.len();
        let slots = (0..buckets + servers).map(|_| Slot::default()).collect();
        let state = State { slots, closed: vec![false; servers], ..State::default() };
        let mailbox = Arc::new(Mailbox { state: Mutex::new(state), arrived: Condvar::new(), wake });
        let waking = Arc::downgrade(&mailbox);
        shared.on_failure(Box::new(move || {
            if let Some(mailbox) = waking.upgrade() {
                link::wake(&mailbox.wake);
                mailbox.arrived.notify_all();
            }
        }));
        let hosts = links.servers.iter().map(|(host, _)| *host).collect();
        let sockets = links.servers.iter().map(|(_, socket)| Link::new(Arc::clone(socket))).collect();
        let (own, state) = (Arc::clone(&mailbox), Arc::clone(&shared));
        let thread = spawn("parameters", move || run(sockets, most, &own, &state))?;
        Ok(ParameterClient { mailbox, shared, hosts, buckets, thread: Some(thread) })
    }

    /// Sends a message that has no reply.
    pub fn send(&self, server: usize, message: Message) {
        self.mailbox.state().outbox.push((server, message));
        link::wake(&self.mailbox.wake);
    }

    /// Sends a message whose reply goes to the slot of its bucket, or of the server with
    /// [`MessageKind::Start`].
    pub fn request(&self, server: usize, message: Message) {
        let slot = self.slot(server, message.kind, message.bucket);
        let mut state = self.mailbox.state();
        state.slots[slot] = Slot {
            due: Some(server),
            replies: VecDeque::new(),
            times: Some((Instant::now(), Instant::now())),
            bytes: 4 * message.words.len() as u64,
            server,
        };
        state.outbox.push((server, message));
        drop(state);
        link::wake(&self.mailbox.wake);
    }

    /// Expects a further reply to the message last sent for a bucket.
    pub fn expect(&self, bucket: u32) {
        let slot = &mut self.mailbox.state().slots[bucket as usize];
        slot.due = Some(slot.server);
    }

    fn slot(&self, server: usize, kind: MessageKind, bucket: u32) -> usize {
        if matches!(kind, MessageKind::Start | MessageKind::Started) { self.buckets + server } else { bucket as usize }
    }

    /// Whether the reply for a bucket has not arrived yet. Does not block.
    pub fn is_waiting(&self, bucket: u32) -> bool {
        let slot = &self.mailbox.state().slots[bucket as usize];
        slot.due.is_some() && slot.replies.is_empty()
    }

    /// Waits for the reply for a bucket.
    ///
    /// # Errors
    /// The group failed.
    pub fn wait(&self, bucket: u32) -> Result<Message, CommError> {
        self.wait_slot(bucket as usize)
    }

    /// Waits until a server has started.
    ///
    /// # Errors
    /// The group failed.
    pub fn wait_started(&self, server: usize) -> Result<(), CommError> {
        self.wait_slot(self.buckets + server).map(drop)
    }

    /// Waits until the reply for a bucket can be taken without waiting.
    ///
    /// # Errors
    /// The group failed.
    pub fn arrive(&self, bucket: u32) -> Result<(), CommError> {
        self.await_reply(bucket as usize).map(drop)
    }

    fn wait_slot(&self, slot: usize) -> Result<Message, CommError> {
        loop {
            let mut state = self.await_reply(slot)?;
            if let Some(reply) = state.slots[slot].replies.pop_front() {
                state.slots[slot].due = None;
                return Ok(reply);
            }
        }
    }

    fn await_reply(&self, slot: usize) -> Result<MutexGuard<'_, State>, CommError> {
        let state = self.mailbox.state();
        if !state.slots[slot].replies.is_empty() {
            return Ok(state);
        }
        drop(state);
        self.shared.record_wait(Operation::Reduce, slot as u32, || {
            let mut state = self.mailbox.state();
            loop {
                if !state.slots[slot].replies.is_empty() {
                    return Ok(state);
                }
                if self.shared.failed() {
                    return Err(self.shared.root_cause());
                }
                if let Some(server) = state.slots[slot].due.filter(|server| state.closed[*server]) {
                    drop(state);
                    let text = format!("parameter server {server} has closed its connection");
                    self.shared.suspect(Cause::failed(self.hosts[server], text));
                    state = self.mailbox.state();
                    continue;
                }
                let waited = self.mailbox.arrived.wait_timeout(state, MAX_SLEEP);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
        })
    }

    /// Times of a bucket's last exchange, from the push to the last reply.
    pub fn timing(&self, bucket: u32) -> Option<Timing> {
        let slot = &self.mailbox.state().slots[bucket as usize];
        let (started, ended) = slot.times?;
        let lane = slot.server as u32;
        Some(Timing { started, began: started, ended, bytes: slot.bytes, sent: slot.bytes, lane })
    }
}

impl Drop for ParameterClient {
    fn drop(&mut self) {
        let mut state = self.mailbox.state();
        let is_waiting = state.slots.iter().any(|slot| slot.due.is_some());
        state.stop = true;
        drop(state);
        if is_waiting && !self.shared.failed() {
            // In the middle of an exchange: other ranks would wait for this one.
            self.shared.give_up();
        }
        link::wake(&self.mailbox.wake);
        if let Some(thread) = self.thread.take() {
            // That thread has already reported a panic.
            let _ = thread.join();
        }
    }
}

/// Main loop of the thread.
fn run(mut links: Vec<Link>, most: u64, mailbox: &Mailbox, shared: &Shared) {
    loop {
        let mut state = mailbox.state();
        if state.stop || shared.failed() {
            return;
        }
        for (server, message) in std::mem::take(&mut state.outbox) {
            links[server].queue(message);
        }
        drop(state);
        for (server, link) in links.iter_mut().enumerate() {
            let outcome = link.write().and_then(|()| {
                while let Some(message) = link.read(most)? {
                    mailbox.accept(server, message).map_err(std::io::Error::other)?;
                }
                Ok(())
            });
            if let Err(error) = outcome {
                eprintln!("warning: the connection to parameter server {server} failed: {error}");
                link.closed = true;
            }
        }
        let mut state = mailbox.state();
        let mut any = false;
        for (known, link) in state.closed.iter_mut().zip(&links) {
            any |= link.closed != *known;
            *known = link.closed;
        }
        let more = !state.outbox.is_empty();
        drop(state);
        if any {
            mailbox.arrived.notify_all();
        }
        if !more && link::wait(&links, &mailbox.wake).is_err() {
            return;
        }
    }
}

impl Mailbox {
    /// Stores a reply.
    fn accept(&self, server: usize, message: Message) -> Result<(), String> {
        let mut state = self.state();
        let buckets = state.slots.len() - state.closed.len();
        let slot = match message.kind {
            MessageKind::Started => buckets + server,
            _ => message.bucket as usize,
        };
        let Some(slot) = state.slots.get_mut(slot).filter(|slot| slot.replies.len() < MOST_REPLIES) else {
            return Err(format!("{:?} of bucket {} that nothing waits for", message.kind, message.bucket));
        };
        if let Some((_, ended)) = &mut slot.times {
            *ended = Instant::now();
        }
        slot.replies.push_back(message);
        drop(state);
        self.arrived.notify_all();
        Ok(())
    }
}
