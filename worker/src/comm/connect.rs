//! Connects a group's data paths: each rank opens its listeners, announces their addresses and its
//! bucket plan, and connects to its peers.

use super::{
    config::Force,
    engine::Engine,
    error::{Cause, CommError},
    group::Group,
    join::Peers,
    links,
    local::LocalGroup,
    options::Options,
    probe::{ConnectionRate, probe},
    ring::{Ring, RingMembers},
    setup::{connect_ring, ring_listener, share_memory, unix_listener},
    shm::{Mapping, Memory},
    state::Shared,
    wait::SpinPolicy,
};
use serde::{Deserialize, Serialize};
use std::{
    net::{IpAddr, SocketAddr, TcpListener},
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};
use switchyard_worker_contract::{config::Transport, event::Link};

/// Bucket layout and options; must be equal on all ranks.
pub(super) struct BucketPlan<'a> {
    pub bucket_lens: &'a [usize],
    /// Size of all buckets with their alignment, in floats.
    pub arena: usize,
    pub options: Options,
}

impl BucketPlan<'_> {
    /// Lanes with at least one bucket, and at least one lane; further lanes would be idle.
    pub fn lanes(&self) -> u32 {
        self.options.lanes.min(self.bucket_lens.len().max(1) as u32)
    }
}

/// A rank's listeners and bucket plan, exchanged with all ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Endpoint {
    /// Listener for the ring.
    ring: Option<SocketAddr>,
    /// Abstract name of the shared-memory listener.
    unix: Option<String>,
    /// Requested transport.
    force: String,
    buckets: u32,
    floats: u64,
    /// Digest of the bucket lengths.
    plan: u64,
    /// Requested lanes.
    lanes: u32,
    /// Name of the wire format.
    wire: String,
}

/// Opened before their addresses are announced, so that every connection finds them.
struct Listeners {
    ring: Option<TcpListener>,
    unix: Option<OwnedFd>,
}

impl Endpoint {
    /// Opens this rank's listeners at an address that its peers can reach.
    fn open(plan: &BucketPlan<'_>, transport: Force, address: IpAddr) -> Result<(Endpoint, Listeners), CommError> {
        let ring = (transport != Force::Shm).then(|| ring_listener(address)).transpose()?;
        let unix = (transport != Force::Tcp).then(unix_listener).transpose()?;
        let lens: Vec<u8> = plan.bucket_lens.iter().flat_map(|len| (*len as u64).to_le_bytes()).collect();
        let endpoint = Endpoint {
            ring: ring.as_ref().map(|(_, address)| *address),
            unix: unix.as_ref().map(|(_, name)| name.clone()),
            force: transport.word().to_owned(),
            buckets: plan.bucket_lens.len() as u32,
            floats: plan.bucket_lens.iter().map(|len| *len as u64).sum(),
            plan: xxhash_rust::xxh3::xxh3_64_with_seed(&lens, plan.options.exact_from.into()),
            lanes: plan.options.lanes,
            wire: plan.options.wire.word().to_owned(),
        };
        Ok((endpoint, Listeners { ring: ring.map(|(listener, _)| listener), unix: unix.map(|(fd, _)| fd) }))
    }

    /// Describes the first difference from rank 0's plan, if any.
    fn conflict(&self, zero: &Endpoint) -> Option<String> {
        if self.force != zero.force {
            return Some(format!("asks for transport {}, rank 0 for {}", self.force, zero.force));
        }
        if (self.lanes, &self.wire) != (zero.lanes, &zero.wire) {
            return Some(format!(
                "asks for {} lanes of communication with {} on the wire, rank 0 for {} with {}",
                self.lanes, self.wire, zero.lanes, zero.wire
            ));
        }
        if (self.buckets, self.floats, self.plan) != (zero.buckets, zero.floats, zero.plan) {
            return Some(format!(
                "has {} gradient buckets of {} numbers in all (plan {:016x}), rank 0 has {} of {} (plan {:016x})",
                self.buckets, self.floats, self.plan, zero.buckets, zero.floats, zero.plan
            ));
        }
        None
    }
}

/// Components of a reducer.
pub(super) struct Parts {
    pub memory: Arc<Memory>,
    /// One per lane.
    pub engines: Vec<Engine>,
    pub transport: Transport,
    pub links: Vec<Link>,
    pub probed: Option<ConnectionRate>,
}

/// Connects the ranks of a group. Collective: all ranks must call it, with the same plan.
///
/// # Errors
/// The plans differ, the transport is not possible, or a connection failed. The caller must report
/// the error to the group.
pub(super) fn connect(group: &mut Group, plan: &BucketPlan<'_>) -> Result<Parts, CommError> {
    let Some(peers) = group.peers() else {
        let memory = Arc::new(Memory::Private(Mapping::anonymous(plan.arena * 4)?));
        let engines = (0..plan.lanes()).map(|_| Engine { local: None, ring: None }).collect();
        return Ok(Parts { memory, engines, transport: Transport::None, links: Vec::new(), probed: None });
    };
    let (endpoint, listeners) = Endpoint::open(plan, peers.transport, peers.address.ip())?;
    let own = serde_json::to_vec(&endpoint).expect("invariant: an endpoint is plain data");
    let endpoints: Result<Vec<Endpoint>, _> =
        group.all_gather("the reductions", &own)?.iter().map(|bytes| serde_json::from_slice(bytes)).collect();
    let endpoints = endpoints.map_err(|error| CommError::protocol("another rank", error))?;
    let conflict = |(rank, endpoint): (u32, &Endpoint)| Some((rank, endpoint.conflict(&endpoints[0])?));
    let shared = Arc::clone(group.shared());
    if let Some((rank, conflict)) = (0..).zip(&endpoints).find_map(conflict) {
        shared.abort(Cause::failed(rank, conflict));
        return Err(shared.root_cause());
    }
    connect_paths(&peers, &endpoints, &listeners, plan, &shared)
}

fn connect_paths(
    peers: &Peers,
    endpoints: &[Endpoint],
    listeners: &Listeners,
    plan: &BucketPlan<'_>,
    shared: &Arc<Shared>,
) -> Result<Parts, CommError> {
    let Peers { identity, roster, zero, transport, connect_timeout, .. } = peers;
    let deadline = Instant::now() + (*connect_timeout).max(Duration::from_secs(10));
    let paths = roster.paths(identity.rank, plan.lanes(), *transport)?;
    let policy = SpinPolicy { own_cpu: paths.own_cpu, spare_cpu: paths.spare_cpu };
    let lanes = plan.lanes();
    let mut engines: Vec<Engine> = (0..lanes).map(|_| Engine { local: None, ring: None }).collect();
    let mut links: Vec<Link> = links::shared_memory(&paths.local, identity.rank).into_iter().collect();
    let memory = if paths.local.len() > 1 {
        let unix = listeners.unix.as_ref().ok_or_else(|| CommError::protocol("this rank", "no unix listener"))?;
        let leader = endpoints[paths.local[0] as usize].unix.as_deref().unwrap_or_default();
        let members = (paths.local.as_slice(), leader);
        let size = (lanes as usize, plan.arena * 4);
        let segment = Arc::new(share_memory(identity, members, unix.as_fd(), size, deadline, shared)?);
        let poisoning = Arc::clone(&segment);
        shared.on_failure(Box::new(move || poisoning.set_poison()));
        let me = paths.local.iter().position(|rank| *rank == identity.rank).unwrap_or(0);
        let single_host = paths.transport == Transport::Shm;
        for (lane, engine) in engines.iter_mut().enumerate() {
            let slot = (me, lane);
            engine.local = Some(LocalGroup::new(Arc::clone(&segment), paths.local.clone(), slot, single_host, policy));
        }
        Memory::Shared(segment, me)
    } else {
        Memory::Private(Mapping::anonymous(plan.arena * 4)?)
    };
    let mut probed = None;
    if let Some(ranks) = &paths.ring {
        let position = ranks.iter().position(|rank| *rank == identity.rank).unwrap_or(0);
        let right = ranks[(position + 1) % ranks.len()];
        let listener = listeners.ring.as_ref().ok_or_else(|| CommError::protocol("this rank", "no listener"))?;
        let mut address = endpoints[right as usize]
            .ring
            .ok_or_else(|| CommError::protocol(format!("rank {right}"), "no address for data"))?;
        if address.ip().is_unspecified() {
            // Rank 0 listens on all addresses; use the one under which this rank reached it.
            address.set_ip(*zero);
        }
        let pairs = connect_ring(identity, (ranks, lanes), listener, address, deadline, shared)?;
        if let Some(pair) = pairs.first().filter(|_| plan.options.probe) {
            let left = ranks[(position + ranks.len() - 1) % ranks.len()];
            probed = Some(probe(pair, left, shared)?);
        }
        links.extend(pairs.first().and_then(|(outgoing, _)| links::tcp(right, outgoing)));
        for (engine, pair) in engines.iter_mut().zip(pairs) {
            for connection in [&pair.0, &pair.1] {
                let connection = Arc::clone(connection);
                shared.on_failure(Box::new(move || {
                    let _ = rustix::net::shutdown(&*connection, rustix::net::Shutdown::Both);
                }));
            }
            let members = RingMembers { ranks: ranks.clone(), position, attempt: identity.attempt };
            engine.ring = Some(Ring::new(pair, members, plan.options, policy));
        }
    }
    Ok(Parts { memory: Arc::new(memory), engines, transport: paths.transport, links, probed })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_from_rank_zero_are_named() {
        let endpoint = |floats, lanes, force: &str| Endpoint {
            ring: None,
            unix: None,
            force: force.to_owned(),
            buckets: 1,
            floats,
            plan: floats,
            lanes,
            wire: "f32".to_owned(),
        };
        let zero = endpoint(8, 1, "auto");
        assert_eq!(endpoint(8, 1, "auto").conflict(&zero), None);
        for (other, text) in [
            (endpoint(9, 1, "auto"), "1 gradient buckets of 9 numbers"),
            (endpoint(8, 2, "auto"), "asks for 2 lanes"),
            (endpoint(8, 1, "tcp"), "asks for transport tcp, rank 0 for auto"),
        ] {
            let conflict = other.conflict(&zero);
            assert!(conflict.as_ref().is_some_and(|conflict| conflict.contains(text)), "{conflict:?}");
        }
    }
}
