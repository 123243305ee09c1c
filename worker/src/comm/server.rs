//! Rank 0's control thread: sockets and time for [`super::hub`].

use super::{
    error::{Cause, CommError},
    frame::{FrameReader, LIMIT_UNAUTHENTICATED, MAX_GATHER},
    hub::{Event, Hub, Output},
    socket::{accept, is_file_limit, nonce, timespec, try_recv, try_send, tune_tcp},
    state::{GRACE_PERIOD, Request, Shared},
};
use rustix::{
    event::{PollFd, PollFlags},
    io::Errno,
    net::Shutdown,
};
use std::{
    collections::{BTreeMap, VecDeque},
    io,
    net::{SocketAddr, TcpListener},
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

/// Largest frame a member may send to rank 0.
const LIMIT_TO_HUB: u64 = (MAX_GATHER + (64 << 10)) as u64;
/// Connections accepted per poll, so that accepting does not starve the others.
const ACCEPTS_PER_POLL: usize = 16;

struct Conn {
    fd: OwnedFd,
    reader: FrameReader,
    out: VecDeque<u8>,
    /// Set when the connection is closing: flush, shut down, then wait for the peer until this time
    /// at most.
    closing: Option<Instant>,
    shut: bool,
}

impl Conn {
    /// Writes as much as possible. On error the caller drops the connection.
    fn flush(&mut self) -> io::Result<()> {
        while !self.out.is_empty() {
            let n = try_send(&self.fd, self.out.as_slices().0)?;
            if n == 0 {
                return Ok(());
            }
            self.out.drain(..n);
        }
        if self.closing.is_some() && !self.shut {
            // Not `close`: unread bytes from the peer would make the kernel send a reset, which can
            // overtake the final message.
            self.shut = true;
            rustix::net::shutdown(&self.fd, Shutdown::Write)?;
        }
        Ok(())
    }
}

pub(super) struct Server {
    shared: Arc<Shared>,
    listener: OwnedFd,
    hub: Hub,
    tick: Duration,
    conns: BTreeMap<u64, Conn>,
    next: u64,
    /// The hub has failed or ended.
    over: bool,
    /// The outcome has been sent to all peers.
    delivered: bool,
    stop: Option<Instant>,
}

impl Server {
    pub fn new(shared: Arc<Shared>, listener: OwnedFd, hub: Hub, tick: Duration) -> Server {
        let conns = BTreeMap::new();
        Server { shared, listener, hub, tick, conns, next: 0, over: false, delivered: false, stop: None }
    }

    /// Runs until the group is dropped.
    pub fn run(mut self) {
        loop {
            let ready = self.wait();
            self.requests();
            for conn in ready.conns {
                self.read(conn);
            }
            if ready.listener {
                self.accept();
            }
            self.event(Event::Tick);
            self.flush();
            if let Some(stop) = self.stop
                && (Instant::now() >= stop || self.conns.values().all(|conn| conn.closing.is_none()))
            {
                return;
            }
        }
    }

    fn wait(&self) -> Ready {
        let wake_fd = self.shared.wake_fd().expect("invariant: a group with a server has a wake_fd");
        let ids: Vec<u64> = self.conns.keys().copied().collect();
        let mut fds = vec![PollFd::new(wake_fd, PollFlags::IN), PollFd::new(&self.listener, PollFlags::IN)];
        fds.extend(self.conns.values().map(|conn| {
            let flags = if conn.out.is_empty() { PollFlags::IN } else { PollFlags::IN | PollFlags::OUT };
            PollFd::new(&conn.fd, flags)
        }));
        let limit = if self.stop.is_some() { Duration::from_millis(10) } else { self.tick };
        match rustix::event::poll(&mut fds, Some(&timespec(limit))) {
            Ok(_) | Err(Errno::INTR) => {}
            // Out of kernel memory: try again shortly.
            Err(_) => std::thread::sleep(Duration::from_millis(10)),
        }
        let conns = ids.into_iter().zip(&fds[2..]).filter(|(_, fd)| !fd.revents().is_empty()).map(|(id, _)| id);
        Ready { listener: !fds[1].revents().is_empty(), conns: conns.collect() }
    }

    fn requests(&mut self) {
        for request in self.shared.take_requests() {
            match request {
                Request::Value(ballot) => self.event(Event::Value(ballot)),
                Request::Abort(cause) => self.event(Event::Abort(cause)),
                Request::Leave => self.event(Event::Leave),
                Request::Stop => self.stop = Some(Instant::now() + GRACE_PERIOD),
            }
        }
    }

    fn read(&mut self, id: u64) {
        let mut buffer = [0; 16 << 10];
        // Bounds the frames per poll, so that one peer cannot monopolise the thread.
        for _ in 0..256 {
            let Some(conn) = self.conns.get_mut(&id) else { return };
            if conn.closing.is_some() {
                match try_recv(&conn.fd, &mut buffer) {
                    Ok(None) => return,
                    Ok(Some(n)) if n > 0 => continue,
                    _ => return self.lost(id),
                }
            }
            let wanted = conn.reader.wanted().min(buffer.len());
            let frame = match try_recv(&conn.fd, &mut buffer[..wanted]) {
                Ok(None) => return,
                Ok(Some(n)) if n > 0 => conn.reader.push(&buffer[..n]),
                _ => return self.lost(id),
            };
            match frame {
                Ok(None) => {}
                Ok(Some((header, payload))) => self.event(Event::Frame(id, header, &payload)),
                Err(_) => return self.lost(id),
            }
        }
    }

    fn lost(&mut self, id: u64) {
        self.conns.remove(&id);
        self.event(Event::Closed(id));
    }

    fn accept(&mut self) {
        for _ in 0..ACCEPTS_PER_POLL {
            let fd = match accept(self.listener.as_fd()) {
                Ok(fd) => fd,
                // The connection stays in the queue: without a failure this thread would spin until
                // its rank counts as missing.
                Err(error) if is_file_limit(&error) => {
                    let text = format!("cannot accept the connection of a rank: {error}");
                    return self.event(Event::Abort(Cause::failed(0, text)));
                }
                Err(_) => return,
            };
            let _ = tune_tcp(&fd);
            let Ok(nonce) = nonce() else { return };
            let id = self.next;
            self.next += 1;
            let reader = FrameReader::new(LIMIT_UNAUTHENTICATED);
            self.conns.insert(id, Conn { fd, reader, out: VecDeque::new(), closing: None, shut: false });
            self.event(Event::Opened(id, nonce));
        }
    }

    fn event(&mut self, event: Event<'_>) {
        for output in self.hub.step(event, Instant::now()) {
            match output {
                Output::Send(id, bytes) => {
                    if let Some(conn) = self.conns.get_mut(&id) {
                        conn.out.extend(bytes);
                        // Errors show up as end of stream on the next read.
                        let _ = conn.flush();
                    }
                }
                Output::Close(id) => {
                    if let Some(conn) = self.conns.get_mut(&id) {
                        conn.closing = Some(Instant::now() + GRACE_PERIOD);
                        let _ = conn.flush();
                    }
                }
                Output::Drop(id) => {
                    self.conns.remove(&id);
                }
                Output::Trust(id) => {
                    if let Some(conn) = self.conns.get_mut(&id) {
                        conn.reader.set_limit(LIMIT_TO_HUB);
                    }
                }
                Output::Formed(roster) => {
                    self.shared.set_clock_offset(0);
                    self.shared.set_formed(roster);
                }
                Output::Missing(ranks) => self.shared.set_missing(ranks),
                Output::Agreed(result) => self.shared.set_agreed(result),
                Output::Stuck(stuck) => self.shared.set_stuck(stuck),
                Output::Gpu(gpu) => self.shared.set_gpu_trouble(gpu),
                Output::Failed(cause) => {
                    self.shared.fail(cause);
                    self.over = true;
                }
                Output::Left => {
                    self.shared.set_left();
                    self.over = true;
                }
                Output::Refused(id, why) => {
                    let peer = self.conns.get(&id).and_then(|conn| rustix::net::getpeername(&conn.fd).ok().flatten());
                    let peer = peer.and_then(|peer| SocketAddr::try_from(peer).ok());
                    self.shared.note_refusal(match peer {
                        Some(peer) => format!("{peer}: {why}"),
                        None => why,
                    });
                }
            }
        }
    }

    fn flush(&mut self) {
        let now = Instant::now();
        let mut lost = Vec::new();
        for (id, conn) in &mut self.conns {
            if conn.flush().is_err() || conn.closing.is_some_and(|until| now >= until) {
                lost.push(*id);
            }
        }
        for id in lost {
            self.lost(id);
        }
        if self.over && !self.delivered && self.conns.values().all(|conn| conn.out.is_empty() || conn.closing.is_none())
        {
            self.delivered = true;
            self.shared.set_delivered();
        }
    }
}

struct Ready {
    listener: bool,
    conns: Vec<u64>,
}

/// How long to retry if the port is in use: another program will not release it, but the previous
/// attempt's process may need this long to end.
const PORT_IN_USE_TIMEOUT: Duration = Duration::from_secs(10);

/// Rank 0's listener: standard input if it already listens on that address, otherwise a new socket.
/// A pod's name may be unknown or stale for a while after the pod has started, so it is resolved
/// again until the deadline.
pub(super) fn listen(rendezvous: &str, deadline: Instant) -> Result<(OwnedFd, SocketAddr), CommError> {
    let start = Instant::now();
    let mut pause = Duration::from_millis(50);
    loop {
        let last = match listen_once(rendezvous) {
            Ok(listener) => return Ok(listener),
            Err(error) => error,
        };
        let taken = last.kind() == io::ErrorKind::AddrInUse && start.elapsed() >= PORT_IN_USE_TIMEOUT;
        if taken || Instant::now() + pause >= deadline {
            let seconds = start.elapsed().as_secs_f64();
            let what = format!("listen on the rendezvous address {rendezvous} (tried for {seconds:.0} s)");
            return Err(CommError::system(what, last));
        }
        std::thread::sleep(pause);
        pause = (pause * 3 / 2).min(Duration::from_secs(1));
    }
}

fn listen_once(rendezvous: &str) -> io::Result<(OwnedFd, SocketAddr)> {
    let addresses = super::client::resolve(rendezvous)?;
    if let Some(inherited) = inherited(&addresses) {
        return Ok(inherited);
    }
    let listener = TcpListener::bind(addresses.as_slice())?;
    // With a blocking listener, a connection that vanishes between `poll` and `accept` would block
    // the thread.
    listener.set_nonblocking(true)?;
    let address = listener.local_addr()?;
    Ok((listener.into(), address))
}

fn inherited(addresses: &[SocketAddr]) -> Option<(OwnedFd, SocketAddr)> {
    let stdin = rustix::stdio::stdin();
    if !rustix::net::sockopt::socket_acceptconn(stdin).unwrap_or(false) {
        return None;
    }
    let address = SocketAddr::try_from(rustix::net::getsockname(stdin).ok()?).ok()?;
    if !addresses.contains(&address) {
        return None;
    }
    let fd = rustix::io::fcntl_dupfd_cloexec(stdin, 3).ok()?;
    let listener = TcpListener::from(fd);
    listener.set_nonblocking(true).ok()?;
    Some((listener.into(), address))
}
