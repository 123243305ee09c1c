//! Connects every rank with every server.

use super::super::{
    error::CommError,
    group::Group,
    links,
    mesh::{data_addresses, shut_down_on_failure},
    setup::{connect_streams, data_listener},
    state::Shared,
};
use std::{
    net::SocketAddr,
    os::{fd::OwnedFd, unix::net::UnixStream},
    sync::Arc,
    time::{Duration, Instant},
};
use switchyard_worker_contract::event::Link;

/// Least time to connect.
const LEAST_TIME: Duration = Duration::from_secs(10);

/// Sockets of a rank, and of the servers in its process.
pub struct ParameterLinks {
    /// By server: the member in whose process it runs, and the connection.
    pub(super) servers: Vec<(u32, Arc<OwnedFd>)>,
    /// Servers in this process, and for each its connections by rank.
    pub(super) hosted: Vec<(usize, Vec<Arc<OwnedFd>>)>,
    pub(super) shared: Arc<Shared>,
    /// Connections to servers in other processes.
    pub links: Vec<Link>,
}

/// Connects the ranks of a group with all servers. `hosts`: the rank in whose process each server
/// runs. Collective; `hosts` must be equal on all ranks.
///
/// # Errors
/// A connection failed.
pub fn connect_parameters(group: &mut Group, hosts: &[u32]) -> Result<ParameterLinks, CommError> {
    let shared = Arc::clone(group.shared());
    try_connect(group, hosts).map_err(|error| shared.setup_failed(error))
}

/// Connects a rank with the parameter servers in processes of their own.
///
/// # Errors
/// A connection failed.
pub fn connect_servers(group: &Group) -> Result<ParameterLinks, CommError> {
    let shared = Arc::clone(group.shared());
    try_connect_servers(group).map_err(|error| shared.setup_failed(error))
}

fn try_connect_servers(group: &Group) -> Result<ParameterLinks, CommError> {
    let shared = Arc::clone(group.shared());
    let peers = group.members().ok_or_else(|| CommError::protocol("this rank", "no parameter servers"))?;
    // Ranks and servers have one numbering.
    let mut addresses = vec![None; peers.identity.world as usize];
    addresses.extend(peers.servers.iter().copied());
    let servers: Vec<u32> = (peers.identity.world..peers.identity.members).collect();
    let targets = data_addresses(&servers, &addresses, peers.zero)?;
    let (listener, _) = data_listener(peers.address.ip())?;
    let deadline = Instant::now() + peers.connect_timeout.max(LEAST_TIME);
    let connected = connect_streams(&peers.identity, (&targets, &[]), 1, &listener, deadline, &shared)?;
    let mut servers = Vec::new();
    for (server, outgoing, _) in connected.into_iter().flatten() {
        let lost = || CommError::protocol(format!("parameter server {}", server - group.world()), "no connection");
        servers.push((server, outgoing.ok_or_else(lost)?));
    }
    servers.iter().for_each(|(_, socket)| shut_down_on_failure(socket, &shared));
    let links = servers.iter().filter_map(|(server, socket)| links::tcp(*server, socket)).collect();
    Ok(ParameterLinks { servers, hosted: Vec::new(), shared, links })
}

/// Accepts all ranks of a group, in the process of parameter server `server`.
///
/// # Errors
/// The group failed.
pub fn accept_ranks(group: &Group, server: u32) -> Result<ParameterLinks, CommError> {
    let shared = Arc::clone(group.shared());
    let accept = || {
        let peers = group.members().ok_or_else(|| CommError::protocol("this parameter server", "no ranks"))?;
        let listener = peers.listener.as_ref();
        let listener = listener.ok_or_else(|| CommError::protocol("this parameter server", "no listener"))?;
        let ranks: Vec<u32> = (0..group.world()).collect();
        // Ranks read data and checkpoints first; their heartbeats show that they are there.
        let deadline = Instant::now() + Duration::from_secs(u32::MAX.into());
        let accepted = connect_streams(&peers.identity, (&[], &ranks), 1, listener, deadline, &shared)?;
        let mut accepted: Vec<_> =
            accepted.into_iter().flatten().filter_map(|(rank, _, it)| Some((rank, it?))).collect();
        accepted.sort_by_key(|(rank, _)| *rank);
        accepted.iter().for_each(|(_, socket)| shut_down_on_failure(socket, &shared));
        let hosted = vec![(server as usize, accepted.into_iter().map(|(_, socket)| socket).collect())];
        Ok(ParameterLinks { servers: Vec::new(), hosted, shared: Arc::clone(&shared), links: Vec::new() })
    };
    accept().map_err(|error| shared.setup_failed(error))
}

fn try_connect(group: &mut Group, hosts: &[u32]) -> Result<ParameterLinks, CommError> {
    let (me, world) = (group.rank(), group.world());
    let shared = Arc::clone(group.shared());
    // The servers of a process are numbered: the number is the lane of their connections.
    let lane = |server: usize| hosts[..server].iter().filter(|host| **host == hosts[server]).count();
    let lanes = (0..hosts.len()).map(|server| lane(server) + 1).max().unwrap_or(1);
    let mut remote = Vec::new();
    if let Some(peers) = group.peers() {
        let mut ranks = hosts.to_vec();
        ranks.sort_unstable();
        ranks.dedup();
        let is_host = ranks.contains(&me);
        let (listener, address) = data_listener(peers.address.ip())?;
        let own = serde_json::to_vec(&address).expect("invariant: an address is plain data");
        let addresses: Result<Vec<SocketAddr>, _> = group
            .all_gather("the parameter servers", &own)?
            .iter()
            .map(|bytes| serde_json::from_slice(bytes))
            .collect();
        let addresses = addresses.map_err(|error| CommError::protocol("another rank", error))?;
        let addresses: Vec<_> = addresses.into_iter().map(Some).collect();
        ranks.retain(|rank| *rank != me);
        let targets = data_addresses(&ranks, &addresses, peers.zero)?;
        let sources: Vec<u32> = if is_host { (0..world).filter(|rank| *rank != me).collect() } else { Vec::new() };
        let deadline = Instant::now() + peers.connect_timeout.max(LEAST_TIME);
        remote = connect_streams(&peers.identity, (&targets, &sources), lanes as u32, &listener, deadline, &shared)?;
        for (_, outgoing, incoming) in remote.iter().flatten() {
            [outgoing, incoming].into_iter().flatten().for_each(|socket| shut_down_on_failure(socket, &shared));
        }
    }
    let lost = |rank: u32| CommError::protocol(format!("rank {rank}"), "no connection for parameters");
    let of = |rank: u32, lane: usize| remote.get(lane)?.iter().find(|(other, ..)| *other == rank);
    let (mut servers, mut hosted, mut own_links) = (Vec::new(), Vec::new(), Vec::new());
    for (server, &host) in hosts.iter().enumerate() {
        let lane = lane(server);
        if host != me {
            let socket = of(host, lane).and_then(|(_, outgoing, _)| outgoing.clone()).ok_or_else(|| lost(host))?;
            own_links.extend(links::tcp(host, &socket));
            servers.push((host, socket));
            continue;
        }
        let (near, far) = UnixStream::pair().map_err(|e| CommError::system("open a socket pair", e))?;
        servers.push((host, Arc::new(OwnedFd::from(near))));
        let mut far = Some(Arc::new(OwnedFd::from(far)));
        let sockets = (0..world).map(|rank| {
            let socket =
                if rank == me { far.take() } else { of(rank, lane).and_then(|(_, _, incoming)| incoming.clone()) };
            socket.ok_or_else(|| lost(rank))
        });
        hosted.push((server, sockets.collect::<Result<Vec<_>, _>>()?));
    }
    group.agree("the end of the set-up of parameter servers", &[])?;
    Ok(ParameterLinks { servers, hosted, shared, links: own_links })
}
