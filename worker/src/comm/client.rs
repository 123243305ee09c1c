//! Control connection of a rank other than 0: connects to rank 0 with retries, then runs a control
//! thread.

use super::{
    auth::{Claims, Key, Refusal},
    ballot::{decode_values, encode_value},
    clock::{ClockSync, Moment, Next},
    error::{Cause, CommError},
    frame::{self, FrameReader, Header, Kind, LIMIT_AUTHENTICATED},
    hub::CONNECTION_CLOSED,
    pulse::Pulse,
    roster::Roster,
    socket::{HandshakeError, authenticate, timespec, try_recv, try_send, tune_tcp},
    state::{GRACE_PERIOD, Request, Shared},
};
use rustix::{
    event::{PollFd, PollFlags},
    io::Errno,
};
use std::{
    collections::VecDeque,
    io,
    net::{SocketAddr, TcpStream, ToSocketAddrs},
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

/// Resolves `HOST:PORT` to all its addresses.
pub(super) fn resolve(rendezvous: &str) -> io::Result<Vec<SocketAddr>> {
    let addresses: Vec<SocketAddr> = rendezvous.to_socket_addrs()?.collect();
    if addresses.is_empty() {
        return Err(io::Error::new(io::ErrorKind::NotFound, "the name has no address"));
    }
    Ok(addresses)
}

/// Connects to `address`. Rejects a socket connected to itself: the kernel creates one if nothing
/// listens on a port in the ephemeral range.
pub(super) fn dial(address: SocketAddr, limit: Duration) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&address, limit.max(Duration::from_millis(1)))?;
    if stream.local_addr()? == stream.peer_addr()? {
        return Err(io::ErrorKind::ConnectionRefused.into());
    }
    tune_tcp(&stream)?;
    stream.set_nonblocking(true)?;
    Ok(stream)
}

/// Connects to rank 0 and authenticates; retries with backoff until the deadline.
pub(super) fn connect_to_rank_zero(
    rendezvous: &str,
    key: &Key,
    claims: &Claims,
    deadline: Instant,
) -> Result<TcpStream, CommError> {
    let start = Instant::now();
    let mut pause = Duration::from_millis(10);
    let mut last = "none".to_owned();
    loop {
        let addresses = resolve(rendezvous).unwrap_or_else(|error| {
            last = error.to_string();
            Vec::new()
        });
        for address in addresses {
            let left = deadline.saturating_duration_since(Instant::now()).min(Duration::from_secs(5));
            let stream = match dial(address, left) {
                Ok(stream) => stream,
                Err(error) => {
                    last = format!("{address}: {error}");
                    continue;
                }
            };
            match authenticate(stream.as_fd(), key, claims.clone(), Instant::now() + super::auth::HANDSHAKE_TIMEOUT) {
                Ok(()) => return Ok(stream),
                Err(HandshakeError::Io(error)) => last = format!("{address}: {error} during the handshake"),
                // The group of the previous attempt is about to end and will free the address.
                Err(HandshakeError::Refused(Refusal::StaleAcceptor)) => {
                    last = format!("{address}: an older attempt is still running");
                }
                Err(HandshakeError::Refused(Refusal::Reason(reason))) => {
                    return Err(CommError::Refused { by: format!("rank 0 at {address}"), reason });
                }
            }
        }
        if Instant::now() + pause >= deadline {
            return Err(CommError::Unreachable {
                address: rendezvous.to_owned(),
                seconds: start.elapsed().as_secs_f64(),
                last,
            });
        }
        std::thread::sleep(pause);
        pause = (pause * 3 / 2).min(Duration::from_secs(1));
    }
}

/// The control thread of a rank other than 0.
pub(super) struct Client {
    shared: Arc<Shared>,
    fd: OwnedFd,
    attempt: u32,
    pulse: Pulse,
    reader: FrameReader,
    out: VecDeque<u8>,
    last_seen: Instant,
    stop: Option<Instant>,
    open: bool,
    clock: ClockSync,
}

impl Client {
    pub fn new(shared: Arc<Shared>, fd: OwnedFd, attempt: u32, pulse: Pulse, join: &[u8]) -> Client {
        let out = frame::encode(Kind::Join, attempt, 0, join).into();
        let reader = FrameReader::new(LIMIT_AUTHENTICATED);
        Client {
            shared,
            fd,
            attempt,
            pulse,
            reader,
            out,
            last_seen: Instant::now(),
            stop: None,
            open: true,
            clock: ClockSync::default(),
        }
    }

    /// Runs until the group is dropped.
    pub fn run(mut self) {
        loop {
            self.wait();
            self.requests();
            if self.open {
                self.read();
            }
            if self.open {
                self.tick();
            }
            if self.open && self.flush().is_err() {
                // Rank 0's final message may still be unread.
                self.read();
                self.closed();
            }
            if let Some(stop) = self.stop
                && (!self.open || self.out.is_empty() || Instant::now() >= stop)
            {
                return;
            }
        }
    }

    fn wait(&self) {
        let wake_fd = self.shared.wake_fd().expect("invariant: a rank with peers has a wake_fd");
        let mut fds = vec![PollFd::new(wake_fd, PollFlags::IN)];
        if self.open {
            let flags = if self.out.is_empty() { PollFlags::IN } else { PollFlags::IN | PollFlags::OUT };
            fds.push(PollFd::new(&self.fd, flags));
        }
        match rustix::event::poll(&mut fds, Some(&timespec(self.pulse.tick_interval()))) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => std::thread::sleep(Duration::from_millis(10)),
        }
    }

    fn send(&mut self, kind: Kind, sequence: u32, payload: &[u8]) {
        if self.open {
            self.out.extend(frame::encode(kind, self.attempt, sequence, payload));
        }
    }

    fn requests(&mut self) {
        for request in self.shared.take_requests() {
            match request {
                Request::Value(ballot) => {
                    self.send(ballot.exchange.kind(), ballot.sequence, &encode_value(&ballot.subject, &ballot.value));
                }
                Request::Abort(cause) => {
                    let bytes = serde_json::to_vec(&cause).expect("invariant: a cause is plain data");
                    self.send(Kind::Abort, 0, &bytes);
                }
                Request::Leave => self.send(Kind::Leave, 0, &[]),
                Request::Stop => self.stop = Some(Instant::now() + GRACE_PERIOD),
            }
        }
    }

    fn read(&mut self) {
        let mut buffer = [0; 16 << 10];
        loop {
            let wanted = self.reader.wanted().min(buffer.len());
            let frame = match try_recv(&self.fd, &mut buffer[..wanted]) {
                Ok(None) => return,
                Ok(Some(n)) if n > 0 => self.reader.push(&buffer[..n]),
                _ => return self.closed(),
            };
            self.last_seen = Instant::now();
            match frame {
                Ok(None) => {}
                Ok(Some((header, payload))) => self.frame(header, &payload),
                Err(error) => {
                    self.open = false;
                    return self.fail(Cause::failed(0, error.to_string()));
                }
            }
        }
    }

    fn frame(&mut self, header: Header, payload: &[u8]) {
        match header.kind {
            Kind::Roster => match serde_json::from_slice::<Roster>(payload) {
                Ok(roster) if roster.members.len() == self.shared.members as usize => self.formed(roster),
                _ => self.fail(Cause::failed(0, "sent a malformed roster")),
            },
            Kind::Failed => {
                let cause = serde_json::from_slice(payload)
                    .unwrap_or_else(|_| Cause::failed(0, "reported a failure that cannot be read"));
                self.shared.fail(cause);
                self.shared.set_delivered();
                self.hang_up();
            }
            Kind::Clock => self.clock_response(header.sequence, payload),
            Kind::Gathered => match decode_values(payload) {
                Some(values) if values.len() == self.shared.world as usize => self.shared.set_agreed(Ok(values)),
                _ => self.fail(Cause::failed(0, "sent malformed values")),
            },
            Kind::Agreed if payload.is_empty() => self.shared.set_agreed(Ok(Vec::new())),
            Kind::Agreed => self.shared.set_agreed(Err(String::from_utf8_lossy(payload).into_owned())),
            Kind::Goodbye => {
                self.shared.set_left();
                self.hang_up();
            }
            Kind::Heartbeat => {}
            other => self.fail(Cause::failed(0, format!("sent an unexpected {other:?}"))),
        }
    }

    fn formed(&mut self, roster: Roster) {
        let host = |rank: u32| &roster.members[rank as usize].host_id;
        if host(self.shared.rank) == host(0) {
            self.shared.set_clock_offset(0);
        } else {
            self.request_clock();
        }
        self.shared.set_formed(roster);
    }

    fn request_clock(&mut self) {
        let number = self.clock.request(Moment::now());
        self.send(Kind::Clock, number, &[]);
        // The next iteration hits the same error again.
        let _ = self.flush();
    }

    fn clock_response(&mut self, number: u32, payload: &[u8]) {
        let now = Instant::now();
        let theirs = payload.try_into().ok().map(i64::from_le_bytes);
        match theirs.and_then(|theirs| self.clock.response(number, theirs, now)) {
            Some(Next::Request) => self.request_clock(),
            Some(Next::Done(micros)) => self.shared.set_clock_offset(micros),
            None => self.fail(Cause::failed(0, "sent an unrequested time")),
        }
    }

    fn tick(&mut self) {
        let now = Instant::now();
        let beat = self.pulse.tick(now);
        if beat.was_asleep {
            self.last_seen = now;
        }
        // No heartbeats after a failure: one in flight could reset the connection that rank 0
        // closes.
        if beat.send && !self.shared.failed() {
            let vitals = self.shared.vitals().and_then(|vitals| serde_json::to_vec(&vitals).ok());
            self.send(Kind::Heartbeat, 0, &vitals.unwrap_or_default());
        }
        if now.saturating_duration_since(self.last_seen) > self.pulse.timeout() {
            self.open = false;
            self.fail(Cause::failed(0, self.pulse.silence()));
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        while !self.out.is_empty() {
            let n = try_send(&self.fd, self.out.as_slices().0)?;
            if n == 0 {
                break;
            }
            self.out.drain(..n);
        }
        Ok(())
    }

    /// Rank 0 waits for this end of stream before it closes.
    fn hang_up(&mut self) {
        self.open = false;
        let _ = rustix::net::shutdown(&self.fd, rustix::net::Shutdown::Both);
    }

    fn closed(&mut self) {
        if self.open {
            self.open = false;
            self.fail(Cause::failed(0, CONNECTION_CLOSED));
        }
    }

    /// Rank 0 is unreachable, so every rank detects this by itself and reports the same cause.
    fn fail(&mut self, mut cause: Cause) {
        cause.during = self.shared.activity();
        self.shared.fail(cause);
        self.shared.set_delivered();
    }
}
