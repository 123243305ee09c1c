//! Sockets with deadlines: blocking helpers over `poll`, the connector's handshake, and accepting
//! authenticated peers.

use super::{
    auth::{Claims, Connector, ConnectorStep, Gate, GateStep, Key, Nonce, Peer, Refusal},
    error::CommError,
    frame::{FrameReader, Header, LIMIT_UNAUTHENTICATED},
    state::Shared,
};
use rustix::{
    event::{PollFd, PollFlags, Timespec},
    io::Errno,
    net::{RecvFlags, SendFlags},
};
use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

pub(super) fn timespec(duration: Duration) -> Timespec {
    Timespec { tv_sec: duration.as_secs() as i64, tv_nsec: i64::from(duration.subsec_nanos()) }
}

/// Returns 32 bytes from the kernel's random number generator.
pub(super) fn nonce() -> Result<Nonce, CommError> {
    let mut nonce = [0; 32];
    getrandom::fill(&mut nonce).map_err(|e| CommError::system("get random bytes", io::Error::other(e.to_string())))?;
    Ok(nonce)
}

/// `Ok(None)`: nothing to read now; `Ok(Some(0))`: end of stream.
pub(super) fn try_recv(fd: impl AsFd, buffer: &mut [u8]) -> io::Result<Option<usize>> {
    loop {
        match rustix::net::recv(fd.as_fd(), &mut *buffer, RecvFlags::DONTWAIT) {
            Ok((n, _)) => return Ok(Some(n)),
            Err(Errno::AGAIN) => return Ok(None),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Returns the bytes written; 0 if the socket is full.
pub(super) fn try_send(fd: impl AsFd, bytes: &[u8]) -> io::Result<usize> {
    loop {
        match rustix::net::send(fd.as_fd(), bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(n) => return Ok(n),
            Err(Errno::AGAIN) => return Ok(0),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Waits until the socket is ready or the time is up; returns `Ok` in both cases.
pub(super) fn poll_one(fd: BorrowedFd<'_>, flags: PollFlags, limit: Duration) -> io::Result<()> {
    let mut fds = [PollFd::from_borrowed_fd(fd, flags)];
    match rustix::event::poll(&mut fds, Some(&timespec(limit))) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

fn remaining(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

pub(super) fn send_all(fd: BorrowedFd<'_>, mut bytes: &[u8], deadline: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        match try_send(fd, bytes)? {
            0 => poll_one(fd, PollFlags::OUT, remaining(deadline)?)?,
            n => bytes = &bytes[n..],
        }
    }
    Ok(())
}

/// Reads one frame. Fails at the end of the stream, at the deadline, or on bytes that are not a
/// frame.
pub(super) fn recv_frame(
    fd: BorrowedFd<'_>,
    reader: &mut FrameReader,
    deadline: Instant,
) -> io::Result<(Header, Vec<u8>)> {
    let mut buffer = [0; 4096];
    loop {
        let wanted = reader.wanted().min(buffer.len());
        match try_recv(fd, &mut buffer[..wanted])? {
            None => poll_one(fd, PollFlags::IN, remaining(deadline)?)?,
            Some(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Some(n) => match reader.push(&buffer[..n]) {
                Ok(Some(frame)) => return Ok(frame),
                Ok(None) => {}
                Err(error) => return Err(io::Error::other(error.to_string())),
            },
        }
    }
}

pub(super) enum HandshakeError {
    /// Worth a retry.
    Io(io::Error),
    Refused(Refusal),
}

/// Runs the connector's side of the handshake on a new connection.
pub(super) fn authenticate(
    fd: BorrowedFd<'_>,
    key: &Key,
    claims: Claims,
    deadline: Instant,
) -> Result<(), HandshakeError> {
    let nonce = nonce().map_err(|e| HandshakeError::Io(io::Error::other(e.to_string())))?;
    let (mut connector, mut bytes) = Connector::new(key.clone(), claims, nonce);
    let mut reader = FrameReader::new(LIMIT_UNAUTHENTICATED);
    loop {
        send_all(fd, &bytes, deadline).map_err(HandshakeError::Io)?;
        let (header, payload) = recv_frame(fd, &mut reader, deadline).map_err(HandshakeError::Io)?;
        match connector.frame(header, &payload) {
            ConnectorStep::Send(next) => bytes = next,
            ConnectorStep::Admitted => return Ok(()),
            ConnectorStep::Refused(refusal) => return Err(HandshakeError::Refused(refusal)),
        }
    }
}

/// Accepts connections until all of `wanted` are authenticated. Connections that fail the handshake
/// are dropped. `vet` checks a socket before its first byte is read (peer credentials).
pub(super) fn collect_peers(
    listener: BorrowedFd<'_>,
    mut gate: Gate,
    wanted: &[Peer],
    deadline: Instant,
    shared: &Shared,
    vet: &dyn Fn(BorrowedFd<'_>) -> bool,
) -> Result<BTreeMap<Peer, OwnedFd>, CommError> {
    let mut arrived: BTreeMap<Peer, OwnedFd> = BTreeMap::new();
    let mut open: BTreeMap<u64, (OwnedFd, FrameReader)> = BTreeMap::new();
    let mut next = 0u64;
    let mut buffer = [0; 512];
    while arrived.len() < wanted.len() {
        shared.check()?;
        let now = Instant::now();
        if now >= deadline {
            let mut missing: Vec<u32> =
                wanted.iter().filter(|peer| !arrived.contains_key(peer)).map(|peer| peer.rank).collect();
            missing.dedup();
            return Err(shared.missing(missing));
        }
        for conn in gate.expired(now) {
            open.remove(&conn);
        }
        let ids: Vec<u64> = open.keys().copied().collect();
        let mut fds = vec![PollFd::from_borrowed_fd(listener, PollFlags::IN)];
        fds.extend(open.values().map(|(fd, _)| PollFd::new(fd, PollFlags::IN)));
        match rustix::event::poll(&mut fds, Some(&timespec(Duration::from_millis(100)))) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(CommError::system("wait for connections", errno)),
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        drop(fds);
        for (i, conn) in ids.into_iter().enumerate() {
            if !ready[i + 1] {
                continue;
            }
            let Some((fd, reader)) = open.get_mut(&conn) else { continue };
            let size = reader.wanted().min(buffer.len());
            let frame = match try_recv(&*fd, &mut buffer[..size]) {
                Ok(None) => continue,
                Ok(Some(n)) if n > 0 => reader.push(&buffer[..n]),
                _ => {
                    gate.closed(conn);
                    open.remove(&conn);
                    continue;
                }
            };
            let step = match frame {
                Ok(None) => continue,
                Ok(Some((header, payload))) => {
                    gate.frame(conn, header, &payload, &|peer| arrived.contains_key(&peer) || !wanted.contains(&peer))
                }
                Err(error) => {
                    gate.closed(conn);
                    GateStep::Drop(error.to_string())
                }
            };
            match step {
                // A handshake message always fits into an empty socket buffer; otherwise the peer
                // is not one of ours.
                GateStep::Send(bytes) if matches!(try_send(&*fd, &bytes), Ok(n) if n == bytes.len()) => {}
                GateStep::Admit(bytes, peer) => {
                    let sent = try_send(&*fd, &bytes);
                    if let (Ok(_), Some((fd, _))) = (sent, open.remove(&conn)) {
                        arrived.insert(peer, fd);
                    }
                }
                GateStep::Refuse(bytes, _) => {
                    let _ = try_send(&*fd, &bytes);
                    open.remove(&conn);
                }
                GateStep::Send(_) | GateStep::Drop(_) => {
                    gate.closed(conn);
                    open.remove(&conn);
                }
            }
        }
        if ready[0] {
            match accept(listener) {
                Ok(fd) if vet(fd.as_fd()) => {
                    if let Some(displaced) = gate.opened(next, nonce()?, now) {
                        open.remove(&displaced);
                    }
                    open.insert(next, (fd, FrameReader::new(LIMIT_UNAUTHENTICATED)));
                    next += 1;
                }
                Err(error) if is_file_limit(&error) => {
                    return Err(CommError::system("accept the connection of a rank", error));
                }
                _ => {}
            }
        }
    }
    Ok(arrived)
}

/// Whether this process or the machine has too many open files. Such a connection stays in the
/// queue, so waiting for it would spin.
pub(super) fn is_file_limit(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE))
}

pub(super) fn accept(listener: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let flags = rustix::net::SocketFlags::CLOEXEC | rustix::net::SocketFlags::NONBLOCK;
    Ok(rustix::net::accept_with(listener, flags)?)
}

/// Sets the options of every TCP connection of the group. `TCP_USER_TIMEOUT` is deliberately not
/// set: it would also end the lane to a rank that computes for a long time without reading.
/// Heartbeats on the control connection decide instead.
pub(super) fn tune_tcp(fd: impl AsFd) -> io::Result<()> {
    use rustix::net::sockopt;
    let fd = fd.as_fd();
    sockopt::set_tcp_nodelay(fd, true)?;
    sockopt::set_socket_keepalive(fd, true)?;
    sockopt::set_tcp_keepidle(fd, Duration::from_secs(5))?;
    sockopt::set_tcp_keepintvl(fd, Duration::from_secs(5))?;
    Ok(())
}
