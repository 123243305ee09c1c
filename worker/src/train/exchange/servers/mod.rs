//! Parameter servers: gradients go to servers, which update the weights and send them back.
//!
//! ```text
//! bucket    push to its server -> sum in rank order -> update -> weights to all ranks
//! ```
//!
//! Each bucket belongs to one server: a thread in a rank's process or a process of its own
//! (`dedicated`). Backward pushes each bucket once it is complete. Synchronous servers add
//! gradients in rank order, as ranks on one host do in shared memory, and so reach the same bits.
//!
//! Asynchronous servers apply each rank's push at once; with geo updates a push is the change that
//! the rank's own optimizer has made to its weights in several steps.

mod dedicated;
mod shard;
#[cfg(test)]
mod tests;

pub use dedicated::serve;
pub(in crate::train) use shard::Push;

use super::Exchange;
use crate::comm::{
    CommError, Group, Message, MessageKind, ParameterClient, ParameterServer, connect_parameters, connect_servers,
};
use crate::cpu::{Cpu, Pool};
use crate::nn::{Bucket, Layout};
use crate::optimizer::Optimizer;
use crate::train::TrainError;
use crate::train::training::Training;
use shard::{Shard, ShardPlan, read_squares};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use switchyard_worker_contract::config::{
    HalfType, LossScaling, ParameterServers, Precision, ServerPlacement, Updates,
};
use switchyard_worker_contract::event::Link;

/// The server of each bucket: the longest bucket first, each to the server with the least.
pub(in crate::train) fn assign(buckets: &[Bucket], servers: u32) -> Vec<usize> {
    let mut loads = vec![0; servers.max(1) as usize];
    let mut order: Vec<usize> = (0..buckets.len()).collect();
    order.sort_by_key(|bucket| Reverse(buckets[*bucket].range.len()));
    let mut owners = vec![0; buckets.len()];
    for bucket in order {
        let least = (0..loads.len()).min_by_key(|server| loads[*server]).unwrap_or(0);
        loads[least] += buckets[bucket].range.len();
        owners[bucket] = least;
    }
    owners
}

/// Weights on the servers of the most loaded rank.
pub(in crate::train) fn most_hosted(training: &Training, servers: ParameterServers) -> u64 {
    if servers.placement == ServerPlacement::Dedicated {
        return 0;
    }
    most_loaded(training, servers, |server| servers.host(server, training.world))
}

/// Weights on the most loaded of the processes in which the servers run.
fn most_loaded(training: &Training, servers: ParameterServers, process: impl Fn(u32) -> u32) -> u64 {
    let mut loads = BTreeMap::new();
    for (bucket, owner) in training.buckets.iter().zip(assign(&training.buckets, servers.servers)) {
        *loads.entry(process(owner as u32)).or_insert(0) += bucket.range.len() as u64;
    }
    loads.into_values().max().unwrap_or(0)
}

/// Memory of a server with this many weights, in bytes: weights and state, the gradients of all
/// ranks, their sum, and the reply.
pub(in crate::train) fn server_bytes(training: &Training, servers: ParameterServers, weights: u64) -> u64 {
    let held = if servers.has_state() { weights } else { 0 };
    let moments = Optimizer::memory_bytes(held as usize, &training.config.optimizer.rule) as u64;
    moments + 4 * weights * (2 + u64::from(training.world))
}

/// Memory of the largest dedicated server, in bytes; `None` if servers run with the ranks.
pub(in crate::train) fn dedicated_bytes(training: &Training) -> Option<u64> {
    let servers = training.config.parameter_server.filter(|servers| servers.dedicated() > 0)?;
    Some(server_bytes(training, servers, most_loaded(training, servers, |server| server)))
}

/// Checks the settings of parameter servers against the model.
///
/// # Errors
/// There are fewer buckets than servers, or steps that only some ranks would skip.
pub(in crate::train) fn check(training: &Training) -> Result<(), TrainError> {
    let Some(ParameterServers { servers, updates, .. }) = training.config.parameter_server else { return Ok(()) };
    let is_scaled = |precision| match precision {
        Precision::Amp(amp) => {
            amp.compute_type == HalfType::Fp16 || amp.loss_scaling != LossScaling::Static { scale: 1.0 }
        }
        Precision::Fp32 => false,
    };
    if updates != Updates::Synchronous && is_scaled(training.config.precision) {
        return Err(TrainError::Usage(
            "spec.engine.precision: got a loss scale; expected FP32, or BF16 without one, because with asynchronous \
             parameter servers ranks cannot skip a step together"
                .into(),
        ));
    }
    let most = training.buckets.len();
    if servers as usize <= most {
        return Ok(());
    }
    Err(TrainError::Usage(format!(
        "spec.engine.communication.parameterServer.servers: got {servers}; expected at most {most}, because the \
         parameters form {most} buckets of about 1 MiB, and each bucket is on one server"
    )))
}

/// A rank's connections to all servers, and the servers in its process.
pub(in crate::train) struct Servers {
    // Dropped first: its thread talks to the servers.
    client: ParameterClient,
    _hosted: Vec<ParameterServer>,
    /// Server of each bucket.
    owners: Vec<usize>,
    /// Servers in this process, or those that get weights and state from it.
    own: Vec<usize>,
    ranges: Vec<Range<usize>>,
    /// Number of the weights among a server's arrays.
    weights: u64,
    servers: usize,
    is_first: bool,
    pub updates: Updates,
    /// Steps, or exchanges with geo updates, begun since the start.
    step: u64,
    /// Staleness that the pushes of this step allow.
    staleness: u32,
    /// The step after which all ranks meet; 0: none is announced.
    meeting: u64,
    pub links: Vec<Link>,
}

impl Servers {
    /// Connects to all servers, and starts those of this process. Collective.
    ///
    /// # Errors
    /// The group failed.
    pub fn connect(
        (training, settings): (&Training, ParameterServers),
        layout: &Layout,
        (exchange, cpu): (&Exchange, &Cpu),
        group: &mut Group,
    ) -> Result<Servers, TrainError> {
        let world = training.world;
        let owners = assign(&training.buckets, settings.servers);
        let hosts: Vec<u32> = (0..settings.servers).map(|server| settings.host(server, world)).collect();
        let is_dedicated = settings.placement == ServerPlacement::Dedicated;
        let links = if is_dedicated { connect_servers(group)? } else { connect_parameters(group, &hosts)? };
        let most = (layout.len + 4 * world as usize) as u64;
        let cuts = exchange.ownership().cuts;
        let plan = |server: usize| {
            let buckets = (0..).zip(&training.buckets).zip(&owners).filter(|(_, owner)| **owner == server);
            let buckets = buckets.map(|((number, bucket), _)| {
                let parts = (0..world).map(|rank| exchange.part(number as usize, rank)).collect();
                (number, bucket.clone(), parts)
            });
            ShardPlan { world, updates: settings.updates, buckets: buckets.collect(), cuts: cuts.clone() }
        };
        let client = ParameterClient::start(&links, training.buckets.len(), most)?;
        let hosted = ParameterServer::start_all(&links, |server| {
            let cpu = Cpu { pool: Arc::new(Pool::new(1)), ..cpu.clone() };
            Box::new(Shard::new(plan(server), layout, &training.config.optimizer, cpu))
        })?;
        for server in (0..hosts.len()).filter(|_| is_dedicated) {
            client.send(server, dedicated::plan_message(&plan(server), layout));
        }
        let own = (0..hosts.len()).filter(|server| hosts[*server] == group.rank()).collect();
        if group.rank() == 0 {
            eprintln!("note: {settings}");
            for (server, host) in hosts.iter().enumerate() {
                let bytes = training.buckets.iter().zip(&owners).filter(|(_, owner)| **owner == server);
                let bytes: usize = bytes.map(|(bucket, _)| 4 * bucket.range.len()).sum();
                let mib = bytes as f64 / f64::from(1 << 20);
                let place = if is_dedicated { String::new() } else { format!("is with rank {host} and ") };
                eprintln!("note: parameter server {server} {place}has {mib:.1} MiB of weights");
            }
        }
        Ok(Servers {
            client,
            _hosted: hosted,
            owners,
            own,
            ranges: training.buckets.iter().map(|bucket| bucket.range.clone()).collect(),
            weights: crate::optimizer::arrays(&training.config.optimizer.rule).len() as u64,
            servers: hosts.len(),
            is_first: group.rank() == 0,
            updates: settings.updates,
            step: 0,
            staleness: 0,
            meeting: 0,
            links: links.links.clone(),
        })
    }

    /// Sends the weights, after the state, to this rank's servers, and waits until they have
    /// them.
    ///
    /// # Errors
    /// The group failed.
    pub fn start(&mut self, weights: &[f32], optimizer_steps: u64) -> Result<(), CommError> {
        (self.step, self.meeting) = (0, 0);
        self.put(self.weights as usize, 0, weights);
        for server in &self.own {
            self.client.request(*server, Message::new(MessageKind::Start, 0, 0, [optimizer_steps, 0, 0]));
        }
        self.own.iter().try_for_each(|server| self.client.wait_started(*server))
    }

    /// Parts of `from..from + len` by bucket: the bucket, and the range of the layout.
    fn overlaps(&self, from: usize, len: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
        let part = move |(bucket, range): (usize, &Range<usize>)| {
            let part = range.start.max(from)..range.end.min(from + len);
            (!part.is_empty()).then_some((bucket, part))
        };
        self.ranges.iter().enumerate().filter_map(part)
    }

    /// Writes values of an array to this rank's servers, except others' values.
    pub fn put(&self, array: usize, from: usize, values: &[f32]) {
        for (bucket, range) in self.overlaps(from, values.len()) {
            if self.own.contains(&self.owners[bucket]) {
                let numbers = [array as u64, range.start as u64, 0];
                let message = Message::new(MessageKind::Put, bucket as u32, 0, numbers);
                let values = &values[range.start - from..range.end - from];
                self.client.send(self.owners[bucket], message.with(values));
            }
        }
    }

    /// Reads values of an array from all servers, or from this rank's only; others become 0.
    ///
    /// # Errors
    /// The group failed.
    pub fn get(&self, array: usize, from: usize, into: &mut [f32], all: bool) -> Result<(), CommError> {
        into.fill(0.0);
        let is_wanted = |bucket: usize| all || self.own.contains(&self.owners[bucket]);
        let parts: Vec<_> = self.overlaps(from, into.len()).filter(|(bucket, _)| is_wanted(*bucket)).collect();
        for (bucket, range) in &parts {
            let numbers = [array as u64, range.start as u64, range.len() as u64];
            self.client.request(self.owners[*bucket], Message::new(MessageKind::Get, *bucket as u32, 0, numbers));
        }
        for (bucket, range) in parts {
            let reply = self.client.wait(bucket as u32)?;
            let into = &mut into[range.start - from..range.end - from];
            if reply.words.len() == into.len() {
                into.copy_from_slice(reply.values());
            }
        }
        Ok(())
    }

    /// Whether servers do not wait for all ranks.
    pub fn is_asynchronous(&self) -> bool {
        self.updates != Updates::Synchronous
    }

    /// Begins a step. `meet`: all ranks wait for each other after it. Returns whether they do,
    /// because of that or of an announcement.
    pub fn begin_step(&mut self, meet: bool) -> bool {
        self.step += 1;
        let meets = meet || self.meeting == self.step;
        self.staleness = if meets { 0 } else { self.updates.max_staleness() };
        meets
    }

    /// Staleness that the pushes of this step allow.
    pub fn staleness(&self) -> u32 {
        self.staleness
    }

    /// Sends the gradients of a bucket.
    pub fn push(&self, bucket: usize, gradients: &[f32], push: Push) {
        // One server is enough to announce a meeting.
        let push = Push { meet: push.meet && self.owners[bucket] == 0, ..push };
        let message = Message::new(MessageKind::Push, bucket as u32, self.step, push.numbers()).with(gradients);
        self.client.request(self.owners[bucket], message);
    }

    /// Waits until the reply to a push is there.
    ///
    /// # Errors
    /// The group failed.
    pub fn arrive(&self, bucket: usize) -> Result<(), CommError> {
        self.client.arrive(bucket as u32)
    }

    /// Waits for the reply to a push: adds the sums of squares of each rank's part, and returns the
    /// reply.
    ///
    /// # Errors
    /// The group failed.
    pub fn wait(&self, bucket: usize, squares: &mut [f64]) -> Result<Reply, CommError> {
        let message = self.client.wait(bucket as u32)?;
        let weights = read_squares(&message, squares).len();
        Ok(Reply { first: message.words.len() - weights, message })
    }

    /// Waits for the weights of a bucket that an asynchronous server sends. Returns them and their
    /// staleness: pushes of the slowest rank that they lack.
    ///
    /// # Errors
    /// The group failed, or the weights are older than the push allowed.
    pub fn wait_asynchronous(&mut self, bucket: usize) -> Result<(Reply, u64), TrainError> {
        let reply = self.wait(bucket, &mut [])?;
        let [_, slowest, meeting] = reply.message.numbers;
        let staleness = self.step.saturating_sub(slowest);
        if reply.message.step != self.step || staleness > u64::from(self.staleness) {
            return Err(TrainError::Usage(format!(
                "internal error: parameter server {} sent weights of step {} that lack {staleness} steps; expected \
                 step {} and at most {}",
                self.owners[bucket], reply.message.step, self.step, self.staleness
            )));
        }
        self.meeting = self.meeting.max(meeting);
        Ok((reply, staleness))
    }

    /// Waits for the weights of a bucket after [`Servers::apply`] of rank 0.
    ///
    /// # Errors
    /// The group failed.
    pub fn wait_applied(&self, bucket: usize) -> Result<Reply, CommError> {
        self.wait(bucket, &mut [])
    }

    /// Has all servers apply the gradients of a step. Every rank calls it; rank 0's word counts,
    /// because all ranks know the same norms.
    pub fn apply(&self, learning_rate: f64, scale: f32) {
        (0..self.owners.len()).for_each(|bucket| self.client.expect(bucket as u32));
        let numbers = Push { learning_rate, scale, direct: false, staleness: 0, meet: false }.numbers();
        self.decide(Message::new(MessageKind::Apply, 0, self.step, numbers));
    }

    /// Has all servers drop the gradients of a step; see [`Servers::apply`].
    pub fn skip(&self) {
        self.decide(Message::new(MessageKind::Skip, 0, self.step, [0; 3]));
    }

    fn decide(&self, message: Message) {
        for server in (0..self.servers).filter(|_| self.is_first) {
            self.client.send(server, message.clone());
        }
    }

    /// Whether a bucket's reply has not arrived yet.
    pub fn is_waiting(&self, bucket: usize) -> bool {
        self.client.is_waiting(bucket as u32)
    }

    /// See [`ParameterClient::timing`].
    pub fn timing(&self, bucket: usize) -> Option<crate::comm::Timing> {
        self.client.timing(bucket as u32)
    }
}

/// A server's reply for a bucket.
pub(in crate::train) struct Reply {
    message: Message,
    first: usize,
}

impl Reply {
    /// Weights of the bucket; empty if they follow later.
    pub fn weights(&self) -> &[f32] {
        &self.message.values()[self.first..]
    }
}
