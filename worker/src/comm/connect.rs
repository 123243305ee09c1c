//! Connects a group's data paths: each rank opens its listeners, announces their addresses and its
//! bucket plan, and connects to its peers.

use super::{
    channel::{Channel, Peer},
    config::Force,
    engine::Engine,
    error::{Cause, CommError},
    executor::Executor,
    group::Group,
    join::Peers,
    links,
    local::LocalGroup,
    mesh::{data_addresses, shut_down_on_failure},
    operation::Shards,
    options::Options,
    packing::Packing,
    plan::{Algorithm, CostModel, Layout, Path},
    probe::{ConnectionRate, probe},
    remote::{Choices, Remote},
    roster::Paths,
    setup::{connect_streams, data_listener, share_memory, unix_listener},
    shm::{Mapping, Memory},
    wait::SpinPolicy,
    wire::Wire,
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
    /// Packed forms of the first buckets.
    pub packings: &'a [Packing],
    pub options: Options,
    /// The ranks that reduce together, ascending; empty: all.
    pub members: &'a [u32],
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
    /// Listener for data.
    data: Option<SocketAddr>,
    /// Abstract name of the shared-memory listener.
    unix: Option<String>,
    /// Requested transport.
    force: String,
    buckets: u32,
    floats: u64,
    /// Digest of the bucket lengths, the arena and the packed lengths.
    plan: u64,
    /// Requested lanes.
    lanes: u32,
    /// Name of the wire format.
    wire: String,
    /// Requested algorithm.
    algorithm: String,
}

/// Opened before their addresses are announced, so that every connection finds them.
struct Listeners {
    data: Option<TcpListener>,
    unix: Option<OwnedFd>,
}

impl Endpoint {
    /// Opens this rank's listeners at an address that its peers can reach.
    fn open(plan: &BucketPlan<'_>, transport: Force, address: IpAddr) -> Result<(Endpoint, Listeners), CommError> {
        let data = (transport != Force::Shm).then(|| data_listener(address)).transpose()?;
        let unix = (transport != Force::Tcp).then(unix_listener).transpose()?;
        let packed = plan.packings.iter().map(|packing| packing.place(usize::MAX));
        let lens = plan.bucket_lens.iter().copied().chain([plan.arena]).chain(packed);
        let lens: Vec<u8> = lens.flat_map(|len| (len as u64).to_le_bytes()).collect();
        let endpoint = Endpoint {
            data: data.as_ref().map(|(_, address)| *address),
            unix: unix.as_ref().map(|(_, name)| name.clone()),
            force: transport.word().to_owned(),
            buckets: plan.bucket_lens.len() as u32,
            floats: plan.bucket_lens.iter().map(|len| *len as u64).sum(),
            plan: xxhash_rust::xxh3::xxh3_64_with_seed(&lens, plan.options.exact_from.into()),
            lanes: plan.options.lanes,
            wire: plan.options.wire.word().to_owned(),
            algorithm: plan.options.algorithm.map_or("auto", Algorithm::name).to_owned(),
        };
        Ok((endpoint, Listeners { data: data.map(|(listener, _)| listener), unix: unix.map(|(fd, _)| fd) }))
    }

    /// Describes the first difference from the plan of the first rank, if any.
    fn conflict(&self, (rank, zero): (u32, &Endpoint)) -> Option<String> {
        if self.force != zero.force {
            return Some(format!("asks for transport {}, rank {rank} for {}", self.force, zero.force));
        }
        if self.algorithm != zero.algorithm {
            return Some(format!("asks for algorithm {}, rank {rank} for {}", self.algorithm, zero.algorithm));
        }
        if (self.lanes, &self.wire) != (zero.lanes, &zero.wire) {
            return Some(format!(
                "asks for {} lanes of communication with {} on the wire, rank {rank} for {} with {}",
                self.lanes, self.wire, zero.lanes, zero.wire
            ));
        }
        if (self.buckets, self.floats, self.plan) != (zero.buckets, zero.floats, zero.plan) {
            return Some(format!(
                "has {} gradient buckets of {} numbers in all (plan {:016x}), rank {rank} has {} of {} (plan {:016x})",
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
    /// Algorithm of each bucket between hosts; empty if there are none.
    pub algorithms: Arc<[Algorithm]>,
    pub shards: Arc<Shards>,
}

/// Connects the ranks of a group. Collective: all ranks must call it, those that reduce together
/// with the same plan.
///
/// # Errors
/// The plans differ, the transport is not possible, or a connection failed. The caller must report
/// the error to the group.
pub(super) fn connect(group: &mut Group, plan: &BucketPlan<'_>) -> Result<Parts, CommError> {
    let Some(peers) = group.peers() else {
        let memory = Arc::new(Memory::Private(Mapping::anonymous(plan.arena * 4)?));
        let engines = (0..plan.lanes()).map(|_| Engine { local: None, remote: None }).collect();
        let transport = Transport::None;
        let shards = Shards::new(&Layout { rank: 0, hosts: vec![0] });
        let shards = Arc::new(shards.with_packings(plan.bucket_lens, plan.packings));
        let links = Vec::new();
        return Ok(Parts { memory, engines, transport, links, probed: None, algorithms: Arc::default(), shards });
    };
    let (endpoint, listeners) = Endpoint::open(plan, peers.transport, peers.address.ip())?;
    let own = serde_json::to_vec(&endpoint).expect("invariant: an endpoint is plain data");
    let endpoints: Result<Vec<Endpoint>, _> =
        group.all_gather("the reductions", &own)?.iter().map(|bytes| serde_json::from_slice(bytes)).collect();
    let endpoints = endpoints.map_err(|error| CommError::protocol("another rank", error))?;
    let all: Vec<u32> = (0..peers.identity.world).collect();
    let plan = &BucketPlan { members: if plan.members.is_empty() { &all } else { plan.members }, ..*plan };
    let first = (plan.members[0], &endpoints[plan.members[0] as usize]);
    let conflict = |rank: &u32| Some((*rank, endpoints[*rank as usize].conflict(first)?));
    let shared = Arc::clone(group.shared());
    if let Some((rank, conflict)) = plan.members.iter().find_map(conflict) {
        shared.abort(Cause::failed(rank, conflict));
        return Err(shared.root_cause());
    }
    connect_paths(group, &peers, (&endpoints, &listeners), plan)
}

fn connect_paths(
    group: &mut Group,
    peers: &Peers,
    (endpoints, listeners): (&[Endpoint], &Listeners),
    plan: &BucketPlan<'_>,
) -> Result<Parts, CommError> {
    let shared = &Arc::clone(group.shared());
    let Peers { identity, roster, transport, connect_timeout, .. } = peers;
    let deadline = Instant::now() + (*connect_timeout).max(Duration::from_secs(10));
    let paths = roster.paths_among(plan.members, identity.rank, plan.lanes(), *transport)?;
    let shards = Shards::new(&match transport {
        Force::Tcp => Layout { rank: 0, hosts: (0..plan.members.len()).collect() },
        _ => roster.among(plan.members).layout(0),
    });
    let shards = Arc::new(shards.with_packings(plan.bucket_lens, plan.packings));
    let policy = SpinPolicy { own_cpu: paths.own_cpu, spare_cpu: paths.spare_cpu };
    let lanes = plan.lanes();
    let mut engines: Vec<Engine> = (0..lanes).map(|_| Engine { local: None, remote: None }).collect();
    let mut links: Vec<Link> = links::shared_memory(&paths.local, identity.rank).into_iter().collect();
    let memory = if paths.local.len() > 1 {
        let unix = listeners.unix.as_ref().ok_or_else(|| CommError::protocol("this rank", "no unix listener"))?;
        let leader = endpoints[paths.local[0] as usize].unix.as_deref().unwrap_or_default();
        let members = (paths.local.as_slice(), leader);
        let size = (lanes as usize, plan.arena * 4);
        let segment = Arc::new(share_memory(identity, members, unix.as_fd(), size, deadline, shared)?);
        // The group can outlive the reducer, whose memory must not stay mapped.
        let poisoning = Arc::downgrade(&segment);
        shared.on_failure(Box::new(move || {
            if let Some(segment) = poisoning.upgrade() {
                segment.set_poison();
            }
        }));
        let me = paths.local.iter().position(|rank| *rank == identity.rank).unwrap_or(0);
        let single_host = paths.transport == Transport::Shm;
        for (lane, engine) in engines.iter_mut().enumerate() {
            let slot = (me, lane);
            let sharing = (single_host, Arc::clone(&shards));
            engine.local = Some(LocalGroup::new(Arc::clone(&segment), paths.local.clone(), slot, sharing, policy));
        }
        Memory::Shared(segment, me)
    } else {
        Memory::Private(Mapping::anonymous(plan.arena * 4)?)
    };
    let hosts = connect_hosts(group, peers, (endpoints, listeners), plan, (&paths, &shards, policy), deadline)?;
    let Hosts { remotes, right, probed, algorithms } = hosts;
    links.extend(right);
    for (engine, remote) in engines.iter_mut().zip(remotes) {
        engine.remote = Some(remote);
    }
    let (memory, transport) = (Arc::new(memory), paths.transport);
    Ok(Parts { memory, engines, transport, links, probed, algorithms, shards })
}

/// Connections to other hosts.
#[derive(Default)]
struct Hosts {
    /// One per lane; none if this rank does not lead its host.
    remotes: Vec<Remote>,
    right: Option<Link>,
    probed: Option<ConnectionRate>,
    algorithms: Arc<[Algorithm]>,
}

/// Connects the leaders of all hosts: with a probe first the neighbours, then the ranks that the
/// chosen plans need.
fn connect_hosts(
    group: &mut Group,
    Peers { identity, zero, .. }: &Peers,
    (endpoints, listeners): (&[Endpoint], &Listeners),
    plan: &BucketPlan<'_>,
    (paths, shards, policy): (&Paths, &Arc<Shards>, SpinPolicy),
    deadline: Instant,
) -> Result<Hosts, CommError> {
    let shared = &Arc::clone(group.shared());
    let probes = plan.options.probe && paths.transport != Transport::Shm;
    let Some(ranks) = &paths.ring else {
        if probes {
            slowest(group, None)?;
        }
        return Ok(Hosts::default());
    };
    let listener = listeners.data.as_ref().ok_or_else(|| CommError::protocol("this rank", "no listener"))?;
    let addresses: Vec<_> = endpoints.iter().map(|endpoint| endpoint.data).collect();
    let peer = |rank: &u32| Peer { rank: *rank, outgoing: None, incoming: None };
    let mut lanes: Vec<Vec<Peer>> = (0..plan.lanes()).map(|_| ranks.iter().map(peer).collect()).collect();
    let connect = |lanes: &mut [Vec<Peer>], targets: &[usize], sources: &[usize]| {
        let of = |positions: &[usize]| positions.iter().map(|position| ranks[*position]).collect::<Vec<u32>>();
        let targets = data_addresses(&of(targets), &addresses, *zero)?;
        let sockets = connect_streams(identity, (&targets, &of(sources)), plan.lanes(), listener, deadline, shared)?;
        for (lane, connections) in lanes.iter_mut().zip(sockets) {
            for (rank, outgoing, incoming) in connections {
                let Some(peer) = lane.iter_mut().find(|peer| peer.rank == rank) else { continue };
                for (channel, socket) in [(&mut peer.outgoing, outgoing), (&mut peer.incoming, incoming)] {
                    let Some(socket) = socket else { continue };
                    shut_down_on_failure(&socket, shared);
                    *channel = Some(Channel::Tcp(socket));
                }
            }
        }
        Ok::<(), CommError>(())
    };
    let (n, p) = (ranks.len(), ranks.iter().position(|rank| *rank == identity.rank).unwrap_or(0));
    // Even if TCP is forced within a host, so that sums do not depend on where the ranks are.
    let layout = Layout { rank: p, hosts: (0..n).collect() };
    let (left, right) = ((p + n - 1) % n, (p + 1) % n);
    let mut probed = None;
    let mut remote = Path::NETWORK;
    if probes {
        connect(&mut lanes, &[right], &[left])?;
        let sockets = |lane: &Vec<Peer>| {
            let outgoing = lane[right].outgoing.as_ref().and_then(Channel::socket).cloned();
            outgoing.zip(lane[left].incoming.as_ref().and_then(Channel::socket).cloned())
        };
        let pair = lanes.first().and_then(sockets);
        let rate = pair.map(|pair| probe(&pair, ranks[left], shared)).transpose()?;
        remote = remote.with_rate(slowest(group, rate)?);
        probed = rate;
    }
    let model = CostModel { local: Path::LOOPBACK, remote };
    let choices = Choices::new(layout, model, (plan.bucket_lens, &plan.options))?;
    let (mut targets, mut sources) = choices.peers((left, right));
    targets.retain(|peer| lanes.first().is_none_or(|lane| lane[*peer].outgoing.is_none()));
    sources.retain(|peer| lanes.first().is_none_or(|lane| lane[*peer].incoming.is_none()));
    connect(&mut lanes, &targets, &sources)?;
    let link = lanes.first().and_then(|lane| lane[right].outgoing.as_ref()?.socket());
    let link = link.and_then(|socket| links::tcp(ranks[right], socket));
    let converts = plan.options.wire != Wire::F32;
    let remotes = lanes.into_iter().map(|peers| {
        let executor = Executor::new(peers, None, identity.rank, (policy, converts));
        Remote::new(executor, (&choices, shards), plan.options, (identity.rank, identity.attempt))
    });
    Ok(Hosts { remotes: remotes.collect(), right: link, probed, algorithms: Arc::clone(choices.by_bucket()) })
}

/// The lowest rate of all ranks in bytes per second; NaN if no rank has measured.
fn slowest(group: &mut Group, own: Option<ConnectionRate>) -> Result<f64, CommError> {
    let own = own.map_or(f64::NAN, |own| own.rate);
    let all = group.all_gather("the rate between hosts", &own.to_le_bytes())?;
    let rates = all.iter().filter_map(|bytes| bytes.as_slice().try_into().ok().map(f64::from_le_bytes));
    // `min` ignores NaN.
    Ok(rates.fold(f64::NAN, f64::min))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_from_rank_zero_are_named() {
        let endpoint = |floats, lanes, force: &str| Endpoint {
            data: None,
            unix: None,
            force: force.to_owned(),
            buckets: 1,
            floats,
            plan: floats,
            lanes,
            wire: "f32".to_owned(),
            algorithm: "auto".to_owned(),
        };
        let zero = endpoint(8, 1, "auto");
        assert_eq!(endpoint(8, 1, "auto").conflict((0, &zero)), None);
        for (other, text) in [
            (endpoint(9, 1, "auto"), "1 gradient buckets of 9 numbers"),
            (endpoint(8, 2, "auto"), "asks for 2 lanes"),
            (endpoint(8, 1, "tcp"), "asks for transport tcp, rank 0 for auto"),
        ] {
            let conflict = other.conflict((0, &zero));
            assert!(conflict.as_ref().is_some_and(|conflict| conflict.contains(text)), "{conflict:?}");
        }
    }
}
