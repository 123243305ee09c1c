//! From a configuration to a connected rank: find rank 0, introduce this rank, learn about the others, connect to them.

use super::{
    auth::{Key, Purpose},
    client::{Client, reach_rank_zero},
    clock,
    config::{Force, GroupConfig},
    engine::Engine,
    error::{Cause, CommError},
    host,
    hub::{Group, Hub, JoinTime, RankZero},
    links,
    local::LocalGroup,
    options::Options,
    probe::{Probed, probe},
    pulse::Pulse,
    ring::{Circle, Ring},
    roster::{Member, Paths, Roster},
    server::{Server, listen},
    setup::{Identity, connect_ring, ring_listener, share_memory, unix_listener},
    shm::{Mapping, Memory},
    state::Shared,
    wait::SpinPolicy,
};
use crate::cgroup;
use std::{
    net::{IpAddr, SocketAddr, TcpListener},
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    thread::JoinHandle,
    time::{Duration, Instant},
};
use switchyard_worker_contract::{config::Transport, event::Link};

/// What is needed to assemble a communicator.
pub(super) struct Parts {
    pub memory: Arc<Memory>,
    /// One for each lane.
    pub engines: Vec<Engine>,
    pub transport: Transport,
    pub links: Vec<Link>,
    pub probed: Option<Probed>,
    pub local_address: String,
    /// Microseconds to rank 0's clock.
    pub clock_offset: i64,
}

/// What must be equal on all ranks.
pub(super) struct BucketPlan<'a> {
    pub bucket_lens: &'a [usize],
    /// Size of all buckets with their alignment, in floats.
    pub arena: usize,
    pub options: Options,
}

impl BucketPlan<'_> {
    /// Lanes that have a bucket, at least one; the others would idle.
    pub fn lanes(&self) -> u32 {
        self.options.lanes.min(self.bucket_lens.len().max(1) as u32)
    }
}

/// Joins the group; `control` is set as soon as there is a control thread to end.
pub(super) fn join(
    config: &GroupConfig,
    plan: &BucketPlan<'_>,
    shared: &Arc<Shared>,
    control: &mut Option<JoinHandle<()>>,
) -> Result<Parts, CommError> {
    let start = Instant::now();
    let deadline = start + config.connect_timeout;
    let join_time = JoinTime { start, deadline };
    let identity = Identity {
        key: Key::derive(&config.key, &config.job, config.attempt),
        rank: config.rank(),
        world: config.world(),
        attempt: config.attempt,
    };
    let lobby = Lobby::enter(config, &identity, deadline)?;
    let (member, listeners) = introduce_myself(config, plan, lobby.local)?;
    let pulse = Pulse::new(config.peer_timeout, Instant::now());
    let (local, zero) = (lobby.local, lobby.zero);
    *control = Some(lobby.start(&identity, member, join_time, pulse, shared)?);
    let set_up = || -> Result<Parts, CommError> {
        // Rank 0 decides when it is too late, and its heartbeats prove that it is still alive.
        let roster = shared.wait_formed(deadline + config.connect_timeout + Duration::from_secs(5))?;
        let paths = roster.paths(identity.rank, plan.lanes(), config.transport)?;
        let transport = paths.transport;
        let Connected { memory, engines, links, probed } =
            connect_paths(&identity, &roster, paths, listeners, (plan, zero), deadline, shared)?;
        let (local_address, clock_offset) = (local.to_string(), shared.wait_clock_offset()?);
        Ok(Parts { memory, engines, transport, links, probed, local_address, clock_offset })
    };
    set_up().inspect_err(|error| {
        if error.cause().is_none() && !matches!(error, CommError::Missing { .. }) {
            shared.abort(Cause::failed(identity.rank, error_text(error)));
        }
    })
}

pub(super) fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, CommError> {
    std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(body)
        .map_err(|e| CommError::system(format!("start the {name} thread"), e))
}

/// A rank that has found rank 0, or is rank 0.
struct Lobby {
    /// Control connection, or the listener of rank 0.
    fd: OwnedFd,
    local: SocketAddr,
    /// Address of rank 0 as this rank sees it.
    zero: IpAddr,
    leads: bool,
}

impl Lobby {
    fn enter(config: &GroupConfig, identity: &Identity, deadline: Instant) -> Result<Lobby, CommError> {
        if identity.rank == 0 {
            let (fd, local) = listen(&config.rendezvous, deadline)?;
            return Ok(Lobby { fd, local, zero: local.ip(), leads: true });
        }
        let claims = identity.claims(Purpose::Control, 0, 0);
        let stream = reach_rank_zero(&config.rendezvous, &identity.key, &claims, deadline)?;
        let addresses = stream.local_addr().and_then(|local| Ok((local, stream.peer_addr()?)));
        let (local, peer) = addresses.map_err(|e| CommError::system("read a socket's address", e))?;
        Ok(Lobby { fd: stream.into(), local, zero: peer.ip(), leads: false })
    }

    /// Starts the control thread.
    fn start(
        self,
        identity: &Identity,
        member: Member,
        join_time: JoinTime,
        pulse: Pulse,
        shared: &Arc<Shared>,
    ) -> Result<JoinHandle<()>, CommError> {
        if !self.leads {
            let join = serde_json::to_vec(&member).expect("invariant: a member is plain data");
            let client = Client::new(Arc::clone(shared), self.fd, identity.attempt, pulse, &join);
            let guard = FailOnPanic(Arc::clone(shared));
            return spawn("control", move || {
                let _guard = guard;
                client.run();
            });
        }
        let (asked, beating) = (Arc::clone(shared), Arc::clone(shared));
        let zero = RankZero {
            member,
            activity: Box::new(move || asked.activity()),
            vitals: Box::new(move || beating.vitals()),
            wall: clock::wall_nanos,
        };
        let tick = pulse.tick_interval();
        let hub = Hub::new(
            identity.gate(Purpose::Control),
            Group { world: identity.world, attempt: identity.attempt },
            join_time,
            pulse,
            zero,
        );
        let server = Server::new(Arc::clone(shared), self.fd, hub, tick);
        let guard = FailOnPanic(Arc::clone(shared));
        spawn("control", move || {
            let _guard = guard;
            server.run();
        })
    }
}

/// A panic of the control thread is a bug, but no thread may wait for it forever. Its sockets close, so peers notice.
struct FailOnPanic(Arc<Shared>);

impl Drop for FailOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail(Cause::failed(self.0.rank, "internal error: the control thread panicked"));
        }
    }
}

/// Listeners exist before their addresses are announced, so that every connection finds them.
struct Listeners {
    ring: Option<TcpListener>,
    unix: Option<OwnedFd>,
}

fn introduce_myself(
    config: &GroupConfig,
    plan: &BucketPlan<'_>,
    local: SocketAddr,
) -> Result<(Member, Listeners), CommError> {
    let ring = (config.transport != Force::Shm).then(|| ring_listener(local.ip())).transpose()?;
    let unix = (config.transport != Force::Tcp).then(unix_listener).transpose()?;
    let lens: Vec<u8> = plan.bucket_lens.iter().flat_map(|len| (*len as u64).to_le_bytes()).collect();
    let member = Member {
        host: host::name(),
        host_id: if config.host_id.is_empty() { host::identity() } else { config.host_id.clone() },
        pid: std::process::id(),
        ring: ring.as_ref().map(|(_, address)| *address),
        unix: unix.as_ref().map(|(_, name)| name.clone()),
        cpus: host::allowed_cpus(),
        quota: cgroup::cpus().unwrap_or(0),
        node: config.node_rank,
        force: config.transport.word().to_owned(),
        buckets: plan.bucket_lens.len() as u32,
        floats: plan.bucket_lens.iter().map(|len| *len as u64).sum(),
        plan: xxhash_rust::xxh3::xxh3_64_with_seed(&lens, plan.options.exact_from.into()),
        lanes: plan.options.lanes,
        wire: plan.options.wire.word().to_owned(),
    };
    Ok((member, Listeners { ring: ring.map(|(listener, _)| listener), unix: unix.map(|(fd, _)| fd) }))
}

/// The connections to the other ranks.
struct Connected {
    memory: Arc<Memory>,
    engines: Vec<Engine>,
    links: Vec<Link>,
    probed: Option<Probed>,
}

fn connect_paths(
    identity: &Identity,
    roster: &Roster,
    paths: Paths,
    listeners: Listeners,
    (plan, zero): (&BucketPlan<'_>, IpAddr),
    deadline: Instant,
    shared: &Arc<Shared>,
) -> Result<Connected, CommError> {
    // The roster may have come at the last moment.
    let deadline = deadline.max(Instant::now() + Duration::from_secs(10));
    let policy = SpinPolicy { own_cpu: paths.own_cpu, spare_cpu: paths.spare_cpu };
    let lanes = plan.lanes();
    let mut engines: Vec<Engine> = (0..lanes).map(|_| Engine { local: None, ring: None }).collect();
    let mut links: Vec<Link> = links::shared_memory(&paths.local, identity.rank).into_iter().collect();
    let memory = if paths.local.len() > 1 {
        let unix = listeners.unix.as_ref().ok_or_else(|| CommError::protocol("this rank", "no unix listener"))?;
        let members = (paths.local.as_slice(), roster);
        let size = (lanes as usize, plan.arena * 4);
        let segment = Arc::new(share_memory(identity, members, unix.as_fd(), size, deadline, shared)?);
        let poisoning = Arc::clone(&segment);
        shared.on_failure(Box::new(move || poisoning.set_poison()));
        let me = paths.local.iter().position(|rank| *rank == identity.rank).unwrap_or(0);
        let alone = paths.transport == Transport::Shm;
        for (lane, engine) in engines.iter_mut().enumerate() {
            let place = (me, lane);
            engine.local = Some(LocalGroup::new(Arc::clone(&segment), paths.local.clone(), place, alone, policy));
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
        let mut address = roster.members[right as usize]
            .ring
            .ok_or_else(|| CommError::protocol(format!("rank {right}"), "no address for data"))?;
        if address.ip().is_unspecified() {
            // Rank 0 listens on all addresses; the one under which this rank reached it is as good as any.
            address.set_ip(zero);
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
            let circle = Circle { ranks: ranks.clone(), position, attempt: identity.attempt };
            engine.ring = Some(Ring::new(pair, circle, plan.options, policy));
        }
    }
    Ok(Connected { memory: Arc::new(memory), engines, links, probed })
}

/// An error with its sources on one line.
fn error_text(error: &CommError) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}
