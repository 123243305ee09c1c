//! Sets up a group's data paths: ring lanes and the shared segment. Each connection has its own
//! handshake.

use super::{
    auth::{Claims, Gate, GatePolicy, HANDSHAKE_TIMEOUT, Key, Peer, Purpose, Refusal},
    client::dial,
    error::CommError,
    frame::{HEADER, Header, Kind},
    shm::{Segment, SegmentShape},
    socket::{HandshakeError, authenticate, collect_peers, nonce, poll_one, send_all, tune_tcp},
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
    collections::BTreeMap,
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    net::{IpAddr, SocketAddr, TcpListener},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

/// This rank's identity in every handshake.
#[derive(Clone)]
pub(super) struct Identity {
    pub key: Key,
    pub rank: u32,
    pub world: u32,
    /// Ranks, and parameter servers in processes of their own.
    pub members: u32,
    pub attempt: u32,
}

impl Identity {
    pub fn claims(&self, purpose: Purpose, to: u32, lane: u32) -> Claims {
        Claims { purpose, from: self.rank, to, world: self.members, attempt: self.attempt, lane }
    }

    pub fn gate(&self, purpose: Purpose) -> Gate {
        let (me, world, attempt) = (self.rank, self.members, self.attempt);
        Gate::new(self.key.clone(), GatePolicy { purpose, me, world, attempt })
    }
}

/// Connections with one rank: outgoing and incoming; `None` if only one direction was requested.
pub(super) type Connections = (u32, Option<Arc<OwnedFd>>, Option<Arc<OwnedFd>>);

/// Opens the listener for data on the address over which rank 0 is reached.
pub(super) fn data_listener(ip: IpAddr) -> Result<(TcpListener, SocketAddr), CommError> {
    let make = || {
        let listener = TcpListener::bind((ip, 0))?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        Ok((listener, address))
    };
    make().map_err(|error: std::io::Error| CommError::system(format!("listen on {ip}"), error))
}

/// Connects to the ranks to which this one sends while accepting those from which it receives, once
/// per lane. Returns the connections of each lane.
pub(super) fn connect_streams(
    identity: &Identity,
    (targets, sources): (&[(u32, SocketAddr)], &[u32]),
    lanes: u32,
    listener: &TcpListener,
    deadline: Instant,
    shared: &Shared,
) -> Result<Vec<Vec<Connections>>, CommError> {
    let (outgoing, mut incoming) = std::thread::scope(|scope| {
        let accepting = scope.spawn(|| {
            let gate = identity.gate(Purpose::Data);
            let wanted: Vec<Peer> =
                sources.iter().flat_map(|rank| (0..lanes).map(|lane| Peer { rank: *rank, lane })).collect();
            collect_peers(listener.as_fd(), gate, &wanted, deadline, shared, &|_| true)
        });
        let connect = |(rank, address): (u32, SocketAddr), lane| {
            let peer = Peer { rank, lane };
            let connect = || dial(address, Duration::from_secs(5)).map(OwnedFd::from);
            connect_and_authenticate(identity, Purpose::Data, peer, deadline, shared, connect).map(|fd| (peer, fd))
        };
        let targets = targets.iter().flat_map(|target| (0..lanes).map(move |lane| (*target, lane)));
        let outgoing: Result<BTreeMap<Peer, OwnedFd>, CommError> =
            targets.map(|(target, lane)| connect(target, lane)).collect();
        match accepting.join() {
            Ok(incoming) => Ok((outgoing?, incoming?)),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })?;
    let mut all: Vec<Vec<Connections>> = (0..lanes).map(|_| Vec::new()).collect();
    for socket in incoming.values() {
        tune_tcp(socket).map_err(|e| CommError::system("set up a data connection", e))?;
    }
    for (peer, socket) in outgoing {
        let back = incoming.remove(&peer).map(Arc::new);
        all[peer.lane as usize].push((peer.rank, Some(Arc::new(socket)), back));
    }
    for (peer, socket) in incoming {
        all[peer.lane as usize].push((peer.rank, None, Some(Arc::new(socket))));
    }
    Ok(all)
}

/// Connects and authenticates, with retries until the deadline. The listener exists before its
/// address is announced, so a retry is needed only if other connections displaced the handshake.
fn connect_and_authenticate(
    identity: &Identity,
    purpose: Purpose,
    peer: Peer,
    deadline: Instant,
    shared: &Shared,
    connect: impl Fn() -> std::io::Result<OwnedFd>,
) -> Result<OwnedFd, CommError> {
    loop {
        shared.check()?;
        let error = match connect() {
            Ok(fd) => {
                match authenticate(
                    fd.as_fd(),
                    &identity.key,
                    identity.claims(purpose, peer.rank, peer.lane),
                    Instant::now() + HANDSHAKE_TIMEOUT,
                ) {
                    Ok(()) => return Ok(fd),
                    Err(HandshakeError::Io(error)) => error,
                    Err(HandshakeError::Refused(refusal)) => {
                        let reason = match refusal {
                            Refusal::StaleAcceptor => "an older attempt still runs there".to_owned(),
                            Refusal::Reason(reason) => reason,
                        };
                        return Err(CommError::Refused { by: format!("rank {}", peer.rank), reason });
                    }
                }
            }
            Err(error) => error,
        };
        if Instant::now() >= deadline {
            return Err(CommError::system(format!("connect to rank {} ({purpose:?})", peer.rank), error));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Opens a listener with an unguessable name in the abstract namespace; it leaves nothing in any
/// file system.
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

/// Whether the peer runs as the same user.
fn same_user(fd: BorrowedFd<'_>) -> bool {
    rustix::net::sockopt::socket_peercred(fd).is_ok_and(|cred| cred.uid == rustix::process::getuid())
}

/// Creates (leader) or receives (others) this host's segment, and maps it. `name`: name of the
/// leader's listener; `arena`: bytes per arena.
pub(super) fn share_memory(
    identity: &Identity,
    (local, name): (&[u32], &str),
    listener: BorrowedFd<'_>,
    (lanes, arena): (usize, usize),
    deadline: Instant,
    shared: &Shared,
) -> Result<Segment, CommError> {
    let leader = local[0];
    let shape = SegmentShape { ranks: local.len(), lanes, arena };
    let me = local.iter().position(|rank| *rank == identity.rank).unwrap_or(0);
    let file = if identity.rank == leader {
        let file = Segment::create_file(shape)?;
        let gate = identity.gate(Purpose::SharedMemory);
        let wanted: Vec<Peer> = local[1..].iter().map(|rank| Peer { rank: *rank, lane: 0 }).collect();
        let peers = collect_peers(listener, gate, &wanted, deadline, shared, &same_user)?;
        for (Peer { rank, .. }, fd) in &peers {
            send_file(fd.as_fd(), file.as_fd(), identity.attempt)
                .map_err(|e| CommError::system(format!("pass the shared memory to rank {rank}"), e))?;
        }
        file
    } else {
        let fd = connect_and_authenticate(
            identity,
            Purpose::SharedMemory,
            Peer { rank: leader, lane: 0 },
            deadline,
            shared,
            || {
                let fd = unix_socket()?;
                rustix::net::connect(&fd, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
                if !same_user(fd.as_fd()) {
                    return Err(std::io::Error::other("the local leader runs as another user"));
                }
                Ok(fd)
            },
        )?;
        receive_file(fd.as_fd(), deadline)
            .map_err(|e| CommError::system(format!("receive the shared memory from rank {leader}"), e))?
    };
    Segment::open(&file, shape, me)
}

fn send_file(socket: BorrowedFd<'_>, file: BorrowedFd<'_>, attempt: u32) -> std::io::Result<()> {
    let header = Header::control(Kind::Descriptor, attempt, 0, &[]).encode();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let files = [file];
    if !ancillary.push(SendAncillaryMessage::ScmRights(&files)) {
        return Err(Errno::NOBUFS.into());
    }
    // The socket buffer holds at most a verdict, so a full frame fits.
    let sent = rustix::net::sendmsg(socket, &[IoSlice::new(&header)], &mut ancillary, SendFlags::NOSIGNAL)?;
    send_all(socket, &header[sent..], Instant::now() + HANDSHAKE_TIMEOUT)
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
        other => return Err(std::io::Error::other(format!("{other:?} instead of the shared memory"))),
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
