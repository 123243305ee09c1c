//! Channels from this rank to every other rank: shared memory within a host, TCP between hosts.

use super::{
    channel::{Channel, Peer},
    config::Force,
    error::{Cause, CommError},
    fifo::{Mailbox, arena_bytes},
    group::Group,
    join::Peers,
    plan::{Algorithm, Layout},
    setup::{connect_streams, data_listener, share_memory, unix_listener},
    state::Shared,
    wait::SpinPolicy,
};
use serde::{Deserialize, Serialize};
use std::{
    net::SocketAddr,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};
use switchyard_worker_contract::config::Transport;

/// Most ranks that are all connected to each other.
const MOST_RANKS: u32 = 512;

/// A rank's listeners and options, exchanged with all ranks.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Endpoint {
    data: Option<SocketAddr>,
    /// Abstract name of the shared-memory listener.
    unix: Option<String>,
    force: String,
    algorithm: String,
}

pub(super) struct Mesh {
    pub peers: Vec<Peer>,
    pub mailbox: Option<Mailbox>,
    pub layout: Layout,
    pub transport: Transport,
    pub policy: SpinPolicy,
    pub attempt: u32,
}

impl Mesh {
    /// Connects the ranks of a group. Collective: all ranks must call it, with the same algorithm.
    pub fn connect(group: &mut Group, algorithm: Option<Algorithm>) -> Result<Mesh, CommError> {
        let policy = SpinPolicy { own_cpu: false, spare_cpu: false };
        let Some(peers) = group.peers() else {
            let layout = Layout { rank: 0, hosts: vec![0] };
            let transport = Transport::None;
            return Ok(Mesh { peers: Vec::new(), mailbox: None, layout, transport, policy, attempt: 0 });
        };
        if group.world() > MOST_RANKS {
            let got = format!("{} ranks that are all connected to each other", group.world());
            return Err(CommError::Group { got, expected: format!("at most {MOST_RANKS}") });
        }
        let (force, address) = (peers.transport, peers.address.ip());
        let listener = (force != Force::Shm).then(|| data_listener(address)).transpose()?;
        let unix = (force != Force::Tcp).then(unix_listener).transpose()?;
        let own = Endpoint {
            data: listener.as_ref().map(|(_, address)| *address),
            unix: unix.as_ref().map(|(_, name)| name.clone()),
            force: force.word().to_owned(),
            algorithm: algorithm.map_or("auto", Algorithm::name).to_owned(),
        };
        let own = serde_json::to_vec(&own).expect("invariant: an endpoint is plain data");
        let endpoints: Result<Vec<Endpoint>, _> =
            group.all_gather("the collectives", &own)?.iter().map(|bytes| serde_json::from_slice(bytes)).collect();
        let endpoints = endpoints.map_err(|error| CommError::protocol("another rank", error))?;
        let shared = Arc::clone(group.shared());
        let asked = |endpoint: &Endpoint| format!("{} over {}", endpoint.algorithm, endpoint.force);
        if let Some(rank) = endpoints.iter().position(|endpoint| asked(endpoint) != asked(&endpoints[0])) {
            let text = format!("asks for {}, rank 0 for {}", asked(&endpoints[rank]), asked(&endpoints[0]));
            shared.abort(Cause::failed(rank as u32, text));
            return Err(shared.root_cause());
        }
        let listeners = (listener.map(|(listener, _)| listener), unix.map(|(fd, _)| fd));
        open(&peers, &endpoints, listeners, &shared)
    }
}

fn open(
    peers: &Peers,
    endpoints: &[Endpoint],
    (listener, unix): (Option<std::net::TcpListener>, Option<OwnedFd>),
    shared: &Arc<Shared>,
) -> Result<Mesh, CommError> {
    let Peers { identity, roster, zero, transport, connect_timeout, .. } = peers;
    let deadline = Instant::now() + (*connect_timeout).max(Duration::from_secs(10));
    let paths = roster.paths(identity.rank, 1, *transport)?;
    let mut all: Vec<Peer> = (0..identity.world).map(|rank| Peer { rank, outgoing: None, incoming: None }).collect();
    let mut mailbox = None;
    if paths.local.len() > 1 {
        let unix = unix.as_ref().ok_or_else(|| CommError::protocol("this rank", "no unix listener"))?;
        let leader = endpoints[paths.local[0] as usize].unix.as_deref().unwrap_or_default();
        let size = (1, arena_bytes(paths.local.len()));
        let segment = share_memory(identity, (&paths.local, leader), unix.as_fd(), size, deadline, shared)?;
        let me = paths.local.iter().position(|rank| *rank == identity.rank).unwrap_or(0);
        let own = Mailbox::new(Arc::new(segment), me);
        for (local, rank) in paths.local.iter().enumerate().filter(|(local, _)| *local != me) {
            let peer = &mut all[*rank as usize];
            peer.outgoing = Some(Channel::Memory(own.to(local)));
            peer.incoming = Some(Channel::Memory(own.from(local)));
        }
        let waking = own.clone();
        shared.on_failure(Box::new(move || waking.wake()));
        mailbox = Some(own);
    }
    // Starting after this rank spreads the connections over all listeners.
    let remote = (1..identity.world).map(|t| (identity.rank + t) % identity.world);
    let remote: Vec<u32> = remote.filter(|rank| !paths.local.contains(rank)).collect();
    if !remote.is_empty() {
        let listener = listener.as_ref().ok_or_else(|| CommError::protocol("this rank", "no listener"))?;
        let addresses = endpoints.iter().map(|endpoint| endpoint.data).collect::<Vec<_>>();
        let targets = data_addresses(&remote, &addresses, *zero)?;
        let sockets = connect_streams(identity, (&targets, &remote), 1, listener, deadline, shared)?;
        for (rank, outgoing, incoming) in sockets.into_iter().flatten() {
            for socket in [&outgoing, &incoming].into_iter().flatten() {
                shut_down_on_failure(socket, shared);
            }
            let peer = &mut all[rank as usize];
            (peer.outgoing, peer.incoming) = (outgoing.map(Channel::Tcp), incoming.map(Channel::Tcp));
        }
    }
    Ok(Mesh {
        peers: all,
        mailbox,
        layout: roster.layout(identity.rank),
        transport: paths.transport,
        policy: SpinPolicy { own_cpu: paths.own_cpu, spare_cpu: paths.spare_cpu },
        attempt: identity.attempt,
    })
}

/// The data addresses of these ranks. Rank 0 may listen on all addresses; then the one under which
/// this rank reached it counts.
pub(super) fn data_addresses(
    ranks: &[u32],
    addresses: &[Option<SocketAddr>],
    zero: std::net::IpAddr,
) -> Result<Vec<(u32, SocketAddr)>, CommError> {
    let address = |rank: &u32| {
        let address = addresses.get(*rank as usize).copied().flatten();
        let mut address = address.ok_or_else(|| CommError::protocol(format!("rank {rank}"), "no address for data"))?;
        if address.ip().is_unspecified() {
            address.set_ip(zero);
        }
        Ok((*rank, address))
    };
    ranks.iter().map(address).collect()
}

/// The failure of the group ends all waits for this socket.
pub(super) fn shut_down_on_failure(socket: &Arc<OwnedFd>, shared: &Shared) {
    let socket = Arc::clone(socket);
    shared.on_failure(Box::new(move || {
        let _ = rustix::net::shutdown(&*socket, rustix::net::Shutdown::Both);
    }));
}
