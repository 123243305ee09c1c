//! The data paths of a formed group: ring lanes and the shared segment, each connection with its own handshake.

use super::{
    auth::{Claims, Doorkeeper, Gate, HANDSHAKE_TIME, Key, Purpose, Refusal},
    client::dial,
    error::CommError,
    frame::{HEADER, Header, Kind},
    roster::Roster,
    shm::Segment,
    socket::{Denied, collect_peers, introduce, nonce, poll_one, send_all, tune_tcp},
    state::Shared,
};
use rustix::{
    event::PollFlags,
    io::Errno,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
        SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    },
};
use std::{
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    net::{IpAddr, SocketAddr, TcpListener},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

/// Who this rank is in every handshake.
#[derive(Clone)]
pub(super) struct Identity {
    pub key: Key,
    pub rank: u32,
    pub world: u32,
    pub attempt: u32,
}

impl Identity {
    pub fn claims(&self, purpose: Purpose, to: u32) -> Claims {
        Claims { purpose, from: self.rank, to, world: self.world, attempt: self.attempt }
    }

    pub fn gate(&self, purpose: Purpose) -> Gate {
        let (me, world, attempt) = (self.rank, self.world, self.attempt);
        Gate::new(self.key.clone(), Doorkeeper { purpose, me, world, attempt })
    }
}

/// Lanes to the right and from the left neighbour.
pub(super) type Lanes = (Arc<OwnedFd>, Arc<OwnedFd>);

/// Listener for the ring lane on the address over which rank 0 is reached.
pub(super) fn ring_listener(ip: IpAddr) -> Result<(TcpListener, SocketAddr), CommError> {
    let make = || {
        let listener = TcpListener::bind((ip, 0))?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        Ok((listener, address))
    };
    make().map_err(|error: std::io::Error| CommError::system(format!("listen on {ip}"), error))
}

/// Connects to the right neighbour while accepting the left one.
pub(super) fn connect_ring(
    identity: &Identity,
    ring: &[u32],
    listener: &TcpListener,
    address: SocketAddr,
    deadline: Instant,
    shared: &Shared,
) -> Result<Lanes, CommError> {
    let position = ring.iter().position(|rank| *rank == identity.rank).unwrap_or(0);
    let left = ring[(position + ring.len() - 1) % ring.len()];
    let right = ring[(position + 1) % ring.len()];
    std::thread::scope(|scope| {
        let accepting = scope.spawn(|| {
            let gate = identity.gate(Purpose::Ring);
            let mut peers = collect_peers(listener.as_fd(), gate, &[left], deadline, shared, &|_| true)?;
            peers.remove(&left).ok_or_else(|| CommError::protocol(format!("rank {left}"), "no lane"))
        });
        let outgoing = reach(identity, Purpose::Ring, right, deadline, shared, || {
            dial(address, Duration::from_secs(5)).map(OwnedFd::from)
        });
        let incoming = match accepting.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        let (outgoing, incoming) = (outgoing?, incoming?);
        tune_tcp(&incoming).map_err(|e| CommError::system("set up a data connection", e))?;
        Ok((Arc::new(outgoing), Arc::new(incoming)))
    })
}

/// Connects and introduces itself until the deadline. The listener exists before its address is known, so a second try
/// is needed only if the handshake was displaced by strangers.
fn reach(
    identity: &Identity,
    purpose: Purpose,
    to: u32,
    deadline: Instant,
    shared: &Shared,
    connect: impl Fn() -> std::io::Result<OwnedFd>,
) -> Result<OwnedFd, CommError> {
    loop {
        shared.check()?;
        let error = match connect() {
            Ok(fd) => {
                match introduce(
                    fd.as_fd(),
                    &identity.key,
                    identity.claims(purpose, to),
                    Instant::now() + HANDSHAKE_TIME,
                ) {
                    Ok(()) => return Ok(fd),
                    Err(Denied::Io(error)) => error,
                    Err(Denied::Refused(refusal)) => {
                        let reason = match refusal {
                            Refusal::StaleAcceptor => "an older attempt answered".to_owned(),
                            Refusal::Because(reason) => reason,
                        };
                        return Err(CommError::Refused { by: format!("rank {to}"), reason });
                    }
                }
            }
            Err(error) => error,
        };
        if Instant::now() >= deadline {
            return Err(CommError::system(format!("connect to rank {to} ({purpose:?})"), error));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Listener in the abstract namespace with a name nobody can guess; nothing of it stays in any file system.
pub(super) fn unix_listener() -> Result<(OwnedFd, String), CommError> {
    let name: String = nonce()?.iter().map(|byte| format!("{byte:02x}")).collect();
    let name = format!("switchyard-{name}");
    let make = || -> Result<OwnedFd, Errno> {
        let fd = unix_socket()?;
        rustix::net::bind(&fd, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
        rustix::net::listen(&fd, 1024)?;
        Ok(fd)
    };
    let fd = make().map_err(|e| CommError::system("listen on an abstract unix socket", e))?;
    Ok((fd, name))
}

fn unix_socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}

/// The other side is a process of the same user.
fn same_user(fd: BorrowedFd<'_>) -> bool {
    rustix::net::sockopt::socket_peercred(fd).is_ok_and(|cred| cred.uid == rustix::process::getuid())
}

/// Makes (leader) or receives (others) the segment of this host, and maps it.
pub(super) fn share_memory(
    identity: &Identity,
    (local, roster): (&[u32], &Roster),
    listener: BorrowedFd<'_>,
    arena_bytes: usize,
    deadline: Instant,
    shared: &Shared,
) -> Result<Segment, CommError> {
    let leader = local[0];
    let me = local.iter().position(|rank| *rank == identity.rank).unwrap_or(0);
    let file = if identity.rank == leader {
        let file = Segment::create_file(local.len(), arena_bytes)?;
        let gate = identity.gate(Purpose::SharedMemory);
        let peers = collect_peers(listener, gate, &local[1..], deadline, shared, &same_user)?;
        for (rank, fd) in &peers {
            send_file(fd.as_fd(), file.as_fd(), identity.attempt)
                .map_err(|e| CommError::system(format!("pass the shared memory to rank {rank}"), e))?;
        }
        file
    } else {
        let name = roster.members[leader as usize].unix.as_deref().unwrap_or_default();
        let fd = reach(identity, Purpose::SharedMemory, leader, deadline, shared, || {
            let fd = unix_socket()?;
            rustix::net::connect(&fd, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
            if !same_user(fd.as_fd()) {
                return Err(std::io::Error::other("the local leader runs as another user"));
            }
            Ok(fd)
        })?;
        receive_file(fd.as_fd(), deadline)
            .map_err(|e| CommError::system(format!("receive the shared memory from rank {leader}"), e))?
    };
    Segment::open(&file, local.len(), me, arena_bytes)
}

fn send_file(socket: BorrowedFd<'_>, file: BorrowedFd<'_>, attempt: u32) -> std::io::Result<()> {
    let header = Header::control(Kind::Descriptor, attempt, 0, &[]).encode();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let files = [file];
    if !ancillary.push(SendAncillaryMessage::ScmRights(&files)) {
        return Err(Errno::NOBUFS.into());
    }
    // The socket buffer holds no more than a verdict, so a full frame fits.
    let sent = rustix::net::sendmsg(socket, &[IoSlice::new(&header)], &mut ancillary, SendFlags::NOSIGNAL)?;
    send_all(socket, &header[sent..], Instant::now() + HANDSHAKE_TIME)
}

fn receive_file(socket: BorrowedFd<'_>, deadline: Instant) -> std::io::Result<OwnedFd> {
    let mut raw = [0; HEADER];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Errno::TIMEDOUT.into());
        }
        poll_one(socket, PollFlags::IN, left)?;
        match rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut raw)], &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Ok(message) if message.bytes == HEADER => break,
            Ok(message) if message.bytes == 0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            Ok(_) => return Err(std::io::Error::other("a part of a frame")),
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    match Header::decode(&raw) {
        Ok(Header { kind: Kind::Descriptor, .. }) => {}
        other => return Err(std::io::Error::other(format!("{other:?} where the shared memory was due"))),
    }
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(files) = message
            && let Some(file) = files.into_iter().next()
        {
            return Ok(file);
        }
    }
    Err(std::io::Error::other("a frame without the shared memory"))
}
