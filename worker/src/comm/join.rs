//! Joins a group: connects to rank 0, announces this rank, and receives the roster.

use super::{
    auth::{Key, Purpose},
    client::{Client, connect_to_rank_zero},
    clock,
    config::{Force, GroupConfig},
    error::{Cause, CommError},
    host,
    hub::{Hub, JoinTime, RankZero},
    pulse::Pulse,
    roster::{Member, Roster},
    server::{Server, listen},
    setup::{Identity, data_listener},
    state::Shared,
};
use crate::cgroup;
use std::{
    net::{IpAddr, SocketAddr, TcpListener},
    os::fd::OwnedFd,
    sync::Arc,
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// What a member knows about the other ranks.
pub(super) struct Peers {
    pub identity: Identity,
    /// The ranks.
    pub roster: Roster,
    /// Where parameter servers in processes of their own accept the ranks.
    pub servers: Vec<Option<SocketAddr>>,
    /// This process's, if it is a parameter server.
    pub listener: Option<TcpListener>,
    /// Local address of the control connection.
    pub address: SocketAddr,
    /// Address of rank 0 as this rank sees it.
    pub zero: IpAddr,
    pub transport: Force,
    pub connect_timeout: Duration,
}

/// Joins the group; `control` is set as soon as there is a control thread to join. Returns the
/// other ranks, and the offset to rank 0's clock in microseconds.
pub(super) fn join(
    config: &GroupConfig,
    shared: &Arc<Shared>,
    control: &mut Option<JoinHandle<()>>,
) -> Result<(Peers, i64), CommError> {
    let start = Instant::now();
    let deadline = start + config.connect_timeout;
    let join_time = JoinTime { start, deadline };
    let identity = Identity {
        key: Key::derive(&config.key, &config.job, config.attempt),
        rank: config.rank(),
        world: config.world(),
        members: config.members(),
        attempt: config.attempt,
    };
    let rendezvous = Rendezvous::enter(config, &identity, deadline)?;
    let pulse = Pulse::new(config.peer_timeout, Instant::now());
    let (address, zero) = (rendezvous.local, rendezvous.zero);
    let (listener, data) = match config.server {
        Some(_) => data_listener(address.ip()).map(|(listener, address)| (Some(listener), Some(address)))?,
        None => (None, None),
    };
    let member = Member { data, ..local_member(config) };
    *control = Some(rendezvous.start(&identity, member, join_time, pulse, shared)?);
    // Rank 0 enforces the deadline, and its heartbeats prove that it is still alive.
    let mut roster = shared.wait_formed(deadline + config.connect_timeout + Duration::from_secs(5))?;
    let servers = roster.members.split_off(config.world() as usize).into_iter().map(|member| member.data).collect();
    let clock_offset = shared.wait_clock_offset()?;
    let (transport, connect_timeout) = (config.transport, config.connect_timeout);
    Ok((Peers { identity, roster, servers, listener, address, zero, transport, connect_timeout }, clock_offset))
}

fn local_member(config: &GroupConfig) -> Member {
    Member {
        host: host::name(),
        host_id: if config.host_id.is_empty() { host::identity() } else { config.host_id.clone() },
        pid: std::process::id(),
        cpus: host::allowed_cpus(),
        quota: cgroup::cpus().unwrap_or(0),
        node: config.node_rank,
        data: None,
    }
}

pub(super) fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, CommError> {
    std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(body)
        .map_err(|e| CommError::system(format!("start the {name} thread"), e))
}

/// A rank that is connected to rank 0, or is rank 0.
struct Rendezvous {
    /// Control connection, or rank 0's listener.
    fd: OwnedFd,
    local: SocketAddr,
    /// Address of rank 0 as this rank sees it.
    zero: IpAddr,
    is_rank_zero: bool,
}

impl Rendezvous {
    fn enter(config: &GroupConfig, identity: &Identity, deadline: Instant) -> Result<Rendezvous, CommError> {
        if identity.rank == 0 {
            let (fd, local) = listen(&config.rendezvous, deadline)?;
            return Ok(Rendezvous { fd, local, zero: local.ip(), is_rank_zero: true });
        }
        let claims = identity.claims(Purpose::Control, 0, 0);
        let stream = connect_to_rank_zero(&config.rendezvous, &identity.key, &claims, deadline)?;
        let addresses = stream.local_addr().and_then(|local| Ok((local, stream.peer_addr()?)));
        let (local, peer) = addresses.map_err(|e| CommError::system("read a socket's address", e))?;
        Ok(Rendezvous { fd: stream.into(), local, zero: peer.ip(), is_rank_zero: false })
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
        if !self.is_rank_zero {
            let join = serde_json::to_vec(&member).expect("invariant: a member is plain data");
            let client = Client::new(Arc::clone(shared), self.fd, identity.attempt, pulse, &join);
            let guard = FailOnPanic(Arc::clone(shared));
            return spawn("control", move || {
                let _guard = guard;
                client.run();
            });
        }
        let (for_activity, for_vitals) = (Arc::clone(shared), Arc::clone(shared));
        let zero = RankZero {
            member,
            activity: Box::new(move || for_activity.activity()),
            vitals: Box::new(move || for_vitals.vitals()),
            wall: clock::wall_nanos,
        };
        let tick = pulse.tick_interval();
        let sizes = (identity.world, identity.members, identity.attempt);
        let hub = Hub::new(identity.gate(Purpose::Control), sizes, join_time, pulse, zero);
        let server = Server::new(Arc::clone(shared), self.fd, hub, tick);
        let guard = FailOnPanic(Arc::clone(shared));
        spawn("control", move || {
            let _guard = guard;
            server.run();
        })
    }
}

/// A panic in the control thread is a bug, but no thread may wait for it forever. Its sockets
/// close, so peers notice.
struct FailOnPanic(Arc<Shared>);

impl Drop for FailOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail(Cause::failed(self.0.rank, "internal error: the control thread panicked"));
        }
    }
}
