//! The one type the engine's step loop sees.
#![allow(unsafe_code)]

use super::{
    auth::{Key, Purpose, job_digest},
    client::{Client, reach_rank_zero},
    config::{Force, GroupConfig},
    engine::{Engine, Queue},
    error::{Cause, CommError},
    host,
    hub::Hub,
    local::LocalGroup,
    pulse::Pulse,
    ring::Ring,
    roster::{Member, Paths, Roster},
    server::{Server, listen},
    setup::{Identity, connect_ring, ring_listener, share_memory, unix_listener},
    shm::{Mapping, Memory},
    state::{Request, Shared},
    wait::SpinPolicy,
};
use std::{
    net::{IpAddr, SocketAddr, TcpListener},
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    thread::JoinHandle,
    time::{Duration, Instant},
};
use switchyard_worker_contract::config::Transport;

/// Most bytes that `agree` compares.
const MAX_AGREE: usize = 4096;
/// Buckets start at multiples of so many floats (128 bytes).
const BUCKET_ALIGN: usize = 32;

/// This rank's membership in its group.
pub struct Communicator {
    // Fields are dropped in this order: first the threads that use the rest.
    threads: Threads,
    queue: Arc<Queue>,
    memory: Arc<Memory>,
    shared: Arc<Shared>,
    buckets: Vec<(usize, usize)>,
    /// Ticket of the reduction in flight, per bucket.
    in_flight: Vec<Option<u32>>,
    transport: Transport,
    local_address: String,
    host: String,
    agreements: u32,
}

/// Lets another thread (signals, panic hook) end the group.
#[derive(Clone)]
pub struct Aborter(Arc<Shared>);

impl Aborter {
    /// As [`Communicator::abort`].
    pub fn abort(&self, cause: Cause) {
        self.0.abort(cause);
    }

    /// As [`Communicator::failure`].
    pub fn failure(&self) -> Option<Cause> {
        self.0.failure()
    }
}

/// Ends the threads of a rank, in order and in bounded time.
struct Threads {
    shared: Arc<Shared>,
    queue: Option<Arc<Queue>>,
    control: Option<JoinHandle<()>>,
    worker: Option<JoinHandle<()>>,
    left: bool,
}

impl Drop for Threads {
    fn drop(&mut self) {
        if !self.left && self.control.is_some() {
            // Returns at once if the group has failed already.
            let word = if std::thread::panicking() { "panicked" } else { "gave up without a word" };
            self.shared.abort(Cause::failed(self.shared.rank, word));
        }
        if let Some(queue) = &self.queue {
            queue.stop();
        }
        if self.control.is_some() {
            self.shared.request(Request::Stop);
        }
        for thread in [self.worker.take(), self.control.take()].into_iter().flatten() {
            // A panic there was reported by its own means.
            let _ = thread.join();
        }
        self.shared.forget_wakers();
    }
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, CommError> {
    std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(body)
        .map_err(|e| CommError::system(format!("start the {name} thread"), e))
}

impl Communicator {
    /// Joins the group: returns when all ranks are connected, or with an error that says what is missing.
    ///
    /// `bucket_lens` are the lengths of the gradient buckets in numbers; they must be equal on all ranks.
    pub fn connect(config: &GroupConfig, bucket_lens: &[usize]) -> Result<Communicator, CommError> {
        config.check()?;
        let (buckets, arena) = place(bucket_lens)?;
        let shared = Arc::new(Shared::new(config.rank(), config.world(), config.connect_timeout)?);
        let mut threads =
            Threads { shared: Arc::clone(&shared), queue: None, control: None, worker: None, left: false };
        if config.world() == 1 {
            let memory = Arc::new(Memory::Private(Mapping::anonymous(arena * 4)?));
            let engine = Engine { local: None, ring: None };
            let parts = Parts { memory, engine, transport: Transport::None, local_address: config.rendezvous.clone() };
            return Communicator::assemble(threads, parts, buckets);
        }
        let result = Communicator::join(config, bucket_lens, arena, &mut threads);
        match result.and_then(|parts| Communicator::finish(threads, parts, buckets)) {
            Ok(communicator) => Ok(communicator),
            // The root cause is worth more than what this rank saw of it.
            Err(error @ (CommError::Failed(_) | CommError::Missing { .. })) => Err(error),
            Err(error) => {
                Err(shared.failure().filter(|c| c.origin_rank != shared.rank).map_or(error, CommError::Failed))
            }
        }
    }

    fn join(
        config: &GroupConfig,
        bucket_lens: &[usize],
        arena: usize,
        threads: &mut Threads,
    ) -> Result<Parts, CommError> {
        let start = Instant::now();
        let deadline = start + config.connect_timeout;
        let shared = Arc::clone(&threads.shared);
        let identity = Identity {
            key: Key::derive(&config.key),
            job: job_digest(&config.job),
            rank: config.rank(),
            world: config.world(),
            attempt: config.attempt,
        };
        let lobby = Lobby::enter(config, &identity, deadline)?;
        let (member, listeners) = introduce_myself(config, bucket_lens, lobby.local)?;
        let pulse = Pulse::new(config.peer_timeout, Instant::now());
        let (local, zero) = (lobby.local, lobby.zero);
        threads.control = Some(lobby.start(&identity, member, (start, deadline), pulse, &shared)?);
        let set_up = || {
            // Rank 0 decides when it is too late, and its heartbeats say that it still lives.
            let roster = shared.wait_formed(deadline + config.connect_timeout + Duration::from_secs(5))?;
            let paths = roster.paths(identity.rank, config.transport)?;
            connect_paths(&identity, &roster, paths, listeners, (arena, zero), deadline, &shared)
        };
        let (memory, engine, transport) = set_up().inspect_err(|error| {
            if error.cause().is_none() && !matches!(error, CommError::Missing { .. }) {
                shared.abort(Cause::failed(identity.rank, error_text(error)));
            }
        })?;
        Ok(Parts { memory, engine, transport, local_address: local.to_string() })
    }

    fn finish(threads: Threads, parts: Parts, buckets: Vec<(usize, usize)>) -> Result<Communicator, CommError> {
        let mut communicator = Communicator::assemble(threads, parts, buckets)?;
        communicator.agree("the end of the set-up", &[])?;
        Ok(communicator)
    }

    fn assemble(mut threads: Threads, parts: Parts, buckets: Vec<(usize, usize)>) -> Result<Communicator, CommError> {
        let Parts { memory, engine, transport, local_address } = parts;
        let shared = Arc::clone(&threads.shared);
        let queue = Arc::new(Queue::new(engine, Arc::clone(&memory), buckets.clone(), Arc::clone(&shared)));
        threads.queue = Some(Arc::clone(&queue));
        let waking = Arc::downgrade(&queue);
        shared.on_failure(Box::new(move || {
            if let Some(queue) = waking.upgrade() {
                queue.wake_caller();
            }
        }));
        if shared.world > 1 {
            let working = Arc::clone(&queue);
            threads.worker = Some(spawn("collectives", move || working.run())?);
        }
        let in_flight = vec![None; buckets.len()];
        let host = host::name();
        Ok(Communicator {
            threads,
            queue,
            memory,
            shared,
            buckets,
            in_flight,
            transport,
            local_address,
            host,
            agreements: 0,
        })
    }

    /// Global rank of this process.
    pub fn rank(&self) -> u32 {
        self.shared.rank
    }

    /// Number of ranks.
    pub fn world(&self) -> u32 {
        self.shared.world
    }

    /// How gradients travel.
    pub fn transport(&self) -> Transport {
        self.transport
    }

    /// Local address of the control connection; on rank 0 the rendezvous address.
    pub fn local_address(&self) -> &str {
        &self.local_address
    }

    /// Name of this host.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Number of buckets.
    pub fn buckets(&self) -> usize {
        self.buckets.len()
    }

    /// A bucket. It starts at a multiple of 64 bytes.
    ///
    /// # Panics
    /// If its reduction is in flight (or was when the group failed), or if there is no such bucket.
    pub fn bucket(&self, bucket: usize) -> &[f32] {
        let (start, len) = self.at_rest(bucket);
        // SAFETY: a bucket at rest belongs to this rank; `start` needs `&mut self` and so ends this borrow.
        unsafe { self.memory.slice(start, len) }
    }

    /// A bucket, to be filled.
    ///
    /// # Panics
    /// As [`Communicator::bucket`].
    pub fn bucket_mut(&mut self, bucket: usize) -> &mut [f32] {
        let (start, len) = self.at_rest(bucket);
        // SAFETY: as in `bucket`, and `&mut self` excludes other references.
        unsafe { self.memory.slice_mut(start, len) }
    }

    fn at_rest(&self, bucket: usize) -> (usize, usize) {
        assert!(self.in_flight[bucket].is_none(), "bucket {bucket} is used while its all_reduce is in flight");
        self.buckets[bucket]
    }

    /// Begins the in-place sum of a bucket over all ranks and returns at once.
    ///
    /// # Panics
    /// If the bucket is in flight already, or if there is no such bucket.
    pub fn start(&mut self, bucket: usize) {
        self.push(bucket, true);
    }

    /// Waits until a started reduction is complete; for a bucket that is not in flight, returns at once.
    /// If the group fails, every rank gets the same root cause, and the bucket stays in flight.
    pub fn wait(&mut self, bucket: usize) -> Result<(), CommError> {
        let Some(ticket) = self.in_flight[bucket] else { return Ok(()) };
        if self.queue.wait(ticket) {
            self.in_flight[bucket] = None;
            return Ok(());
        }
        Err(self.root_cause())
    }

    /// `start` and `wait` in one, on this thread: the shortest way when there is nothing to overlap.
    pub fn all_reduce(&mut self, bucket: usize) -> Result<(), CommError> {
        self.push(bucket, false);
        self.wait(bucket)
    }

    fn push(&mut self, bucket: usize, wake: bool) {
        self.at_rest(bucket);
        self.in_flight[bucket] = Some(self.queue.push(bucket as u32, wake && self.shared.world > 1));
    }

    fn root_cause(&self) -> CommError {
        let cause = self.shared.failure().unwrap_or_else(|| Cause::failed(self.shared.rank, "unknown"));
        CommError::Failed(cause)
    }

    /// Returns `Ok` if every rank passes the same bytes (at most 4096) under the same name; otherwise every rank gets an
    /// error that names the ranks and their values. The group stays usable.
    pub fn agree(&mut self, what: &str, value: &[u8]) -> Result<(), CommError> {
        if value.len() > MAX_AGREE || what.len() > 256 {
            return Err(CommError::Group {
                got: format!("{} bytes to agree on under a name of {} bytes", value.len(), what.len()),
                expected: format!("at most {MAX_AGREE} and 256"),
            });
        }
        self.shared.check()?;
        self.agreements = self.agreements.wrapping_add(1);
        if self.shared.world == 1 {
            return Ok(());
        }
        self.shared.set_doing(&format!("agreement on {what}"));
        let (sequence, what, value) = (self.agreements, what.to_owned(), value.to_owned());
        self.shared.request(Request::Agree { sequence, what, value });
        let result = self.shared.wait_agreed();
        self.shared.set_doing("");
        result
    }

    /// Returns when all ranks have called it.
    pub fn barrier(&mut self) -> Result<(), CommError> {
        self.agree("a barrier", &[])
    }

    /// Ends the group: every rank gets this cause, unless an earlier one is known. Returns when rank 0 has confirmed, at
    /// most half a second later. Empty fields of the cause are filled in.
    pub fn abort(&self, cause: Cause) {
        self.shared.abort(cause);
    }

    /// A handle to do so from another thread.
    pub fn aborter(&self) -> Aborter {
        Aborter(Arc::clone(&self.shared))
    }

    /// The root cause, once the group has failed.
    pub fn failure(&self) -> Option<Cause> {
        self.shared.failure()
    }

    /// What this rank's communication is doing, for people.
    pub fn activity(&self) -> String {
        self.shared.activity()
    }

    /// Connections that rank 0 refused, with the reason; at most 32.
    pub fn refusals(&self) -> Vec<String> {
        self.shared.refusals()
    }

    /// The orderly end: waits for reductions in flight, then for all ranks to leave. Until then the failure of any rank
    /// is an error here; afterwards nothing is.
    pub fn leave(mut self) -> Result<(), CommError> {
        for bucket in 0..self.buckets.len() {
            self.wait(bucket)?;
        }
        self.shared.check()?;
        if self.shared.world > 1 {
            self.shared.set_doing("the end of the job");
            self.shared.request(Request::Leave);
            self.shared.wait_left()?;
        }
        self.threads.left = true;
        Ok(())
    }
}

/// What is needed to assemble a communicator.
struct Parts {
    memory: Arc<Memory>,
    engine: Engine,
    transport: Transport,
    local_address: String,
}

/// Start and length of each bucket, and the size of the arena, in floats.
fn place(lens: &[usize]) -> Result<(Vec<(usize, usize)>, usize), CommError> {
    let mut at = 0usize;
    let mut buckets = Vec::with_capacity(lens.len());
    for len in lens {
        buckets.push((at, *len));
        let next = len.checked_next_multiple_of(BUCKET_ALIGN).and_then(|len| at.checked_add(len));
        at = next.filter(|next| next.checked_mul(8).is_some()).ok_or_else(|| CommError::Group {
            got: format!("a bucket of {len} numbers"),
            expected: "buckets that fit into the address space".to_owned(),
        })?;
    }
    Ok((buckets, at))
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
        let claims = identity.claims(Purpose::Control, 0);
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
        (start, deadline): (Instant, Instant),
        pulse: Pulse,
        shared: &Arc<Shared>,
    ) -> Result<JoinHandle<()>, CommError> {
        if !self.leads {
            let join = serde_json::to_vec(&member).expect("invariant: a member is plain data");
            let client = Client::new(Arc::clone(shared), self.fd, identity.attempt, pulse, &join);
            return spawn("control", move || client.run());
        }
        let asked = Arc::clone(shared);
        let tick = pulse.tick_interval();
        let hub = Hub::new(
            identity.gate(Purpose::Control),
            (identity.world, identity.attempt),
            member,
            (start, deadline),
            pulse,
            Box::new(move || asked.activity()),
        );
        let server = Server::new(Arc::clone(shared), self.fd, hub, tick);
        spawn("control", move || server.run())
    }
}

/// Listeners that exist before their addresses are told, so that whoever connects finds them.
struct Listeners {
    ring: Option<TcpListener>,
    unix: Option<OwnedFd>,
}

fn introduce_myself(
    config: &GroupConfig,
    bucket_lens: &[usize],
    local: SocketAddr,
) -> Result<(Member, Listeners), CommError> {
    let ring = (config.transport != Force::Shm).then(|| ring_listener(local.ip())).transpose()?;
    let unix = (config.transport != Force::Tcp).then(unix_listener).transpose()?;
    let lens: Vec<u8> = bucket_lens.iter().flat_map(|len| (*len as u64).to_le_bytes()).collect();
    let member = Member {
        host: host::name(),
        host_id: if config.host_id.is_empty() { host::identity() } else { config.host_id.clone() },
        pid: std::process::id(),
        ring: ring.as_ref().map(|(_, address)| *address),
        unix: unix.as_ref().map(|(_, name)| name.clone()),
        cpus: host::allowed_cpus(),
        quota: host::cpu_quota(),
        node: config.node_rank,
        force: config.transport.word().to_owned(),
        buckets: bucket_lens.len() as u32,
        floats: bucket_lens.iter().map(|len| *len as u64).sum(),
        plan: xxhash_rust::xxh3::xxh3_64(&lens),
    };
    Ok((member, Listeners { ring: ring.map(|(listener, _)| listener), unix: unix.map(|(fd, _)| fd) }))
}

fn connect_paths(
    identity: &Identity,
    roster: &Roster,
    paths: Paths,
    listeners: Listeners,
    (arena, zero): (usize, IpAddr),
    deadline: Instant,
    shared: &Arc<Shared>,
) -> Result<(Arc<Memory>, Engine, Transport), CommError> {
    // The roster may have come at the last moment.
    let deadline = deadline.max(Instant::now() + Duration::from_secs(10));
    let policy = SpinPolicy { own_cpu: paths.own_cpu, spare_cpu: paths.spare_cpu };
    let (memory, local) = if paths.local.len() > 1 {
        let unix = listeners.unix.as_ref().ok_or_else(|| CommError::protocol("this rank", "no unix listener"))?;
        let members = (paths.local.as_slice(), roster);
        let segment = Arc::new(share_memory(identity, members, unix.as_fd(), arena * 4, deadline, shared)?);
        let poisoning = Arc::clone(&segment);
        shared.on_failure(Box::new(move || poisoning.set_poison()));
        let me = paths.local.iter().position(|rank| *rank == identity.rank).unwrap_or(0);
        let alone = paths.transport == Transport::Shm;
        let group = LocalGroup::new(Arc::clone(&segment), paths.local.clone(), me, alone, policy);
        (Memory::Shared(segment, me), Some(group))
    } else {
        (Memory::Private(Mapping::anonymous(arena * 4)?), None)
    };
    let ring = match &paths.ring {
        None => None,
        Some(ranks) => {
            let position = ranks.iter().position(|rank| *rank == identity.rank).unwrap_or(0);
            let right = ranks[(position + 1) % ranks.len()];
            let listener = listeners.ring.as_ref().ok_or_else(|| CommError::protocol("this rank", "no listener"))?;
            let mut address = roster.members[right as usize]
                .ring
                .ok_or_else(|| CommError::protocol(format!("rank {right}"), "no address for data"))?;
            if address.ip().is_unspecified() {
                // Rank 0 listens everywhere; where this rank has reached it is as good as any.
                address.set_ip(zero);
            }
            let lanes = connect_ring(identity, ranks, listener, address, deadline, shared)?;
            for lane in [&lanes.0, &lanes.1] {
                let lane = Arc::clone(lane);
                shared.on_failure(Box::new(move || {
                    let _ = rustix::net::shutdown(&*lane, rustix::net::Shutdown::Both);
                }));
            }
            Some(Ring::new(lanes, ranks.clone(), position, identity.attempt, policy))
        }
    };
    Ok((Arc::new(memory), Engine { local, ring }, paths.transport))
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
