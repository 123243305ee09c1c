//! A parameter server in a process of its own.
//!
//! ```text
//! ranks    Plan (equal from all) -> Shard, then as in the process of a rank
//! ```
//!
//! The server reads neither data nor model: the ranks send the layout of the weights and the
//! server's buckets. The update rule and its settings come from the configuration, which ranks and
//! servers share.

use super::shard::{Shard, ShardPlan};
use crate::comm::{
    Aborter, CommError, Group, GroupConfig, Handler, Message, MessageKind, ParameterServer, accept_ranks,
};
use crate::cpu::{Cpu, HalfKernel, Isa, Pool};
use crate::nn::Layout;
use crate::train::TrainError;
use crate::train::fault::Fault;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use switchyard_worker_contract::config::{EngineConfig, Optimizer};

/// Most words of a plan.
const MOST_PLAN: u64 = 16 << 20;

#[derive(Serialize, Deserialize)]
struct Plan<S, L> {
    shard: S,
    layout: L,
}

/// The first message to a dedicated server: JSON, padded to whole words.
pub(super) fn plan_message(shard: &ShardPlan, layout: &Layout) -> Message {
    let mut json = serde_json::to_vec(&Plan { shard, layout }).expect("invariant: a plan is plain data");
    json.resize(json.len().next_multiple_of(size_of::<u32>()), b' ');
    let words = json.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
    Message { words: Arc::new(words), ..Message::new(MessageKind::Plan, 0, 0, [0; 3]) }
}

/// A shard that begins with the plan of the ranks.
pub(super) struct Dedicated {
    pub optimizer: Optimizer,
    pub cpu: Cpu,
    /// Strikes before this server receives gradients of the step.
    pub fault: Option<(Fault, u32, u32)>,
    /// The plan as received, which all ranks must send.
    pub started: Option<(Arc<Vec<u32>>, Shard)>,
}

impl Dedicated {
    fn plan(&mut self, words: Arc<Vec<u32>>) -> Result<(), String> {
        if let Some((first, _)) = &self.started {
            let same = *first == words;
            return if same { Ok(()) } else { Err("another plan than the first rank's".to_owned()) };
        }
        let json: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let plan: Plan<ShardPlan, Layout> =
            serde_json::from_slice(&json).map_err(|error| format!("its plan: {error}"))?;
        let shard = Shard::new(plan.shard, &plan.layout, &self.optimizer, self.cpu.clone());
        self.started = Some((words, shard));
        Ok(())
    }
}

impl Handler for Dedicated {
    fn most_words(&self) -> u64 {
        self.started.as_ref().map_or(MOST_PLAN, |(plan, shard)| shard.most_words().max(plan.len() as u64))
    }

    fn handle(&mut self, rank: u32, message: Message) -> Result<Vec<(u32, Message)>, String> {
        if message.kind == MessageKind::Plan {
            return self.plan(message.words).map(|()| Vec::new());
        }
        let Some((_, shard)) = &mut self.started else { return Err(format!("{:?} before a plan", message.kind)) };
        if message.kind == MessageKind::Push
            && let Some((fault, member, attempt)) = &self.fault
            && fault.due(message.step, *member, *attempt)
        {
            fault.strike();
        }
        shard.handle(rank, message)
    }
}

/// Serves the ranks of a group until they have left. `kernel`: see
/// [`switchyard_worker_contract::env::KERNEL`]; `on_joined` receives the handle with which a
/// signal handler can end the group.
///
/// # Errors
/// The group cannot form, or fails.
pub fn serve(
    config: &EngineConfig,
    group: &GroupConfig,
    (kernel, fault): (Option<&str>, Option<Fault>),
    on_joined: impl FnOnce(Aborter),
) -> Result<(), TrainError> {
    let group = &GroupConfig { servers: config.dedicated_servers(), ..group.clone() };
    let Some(server) = group.server else {
        return Err(CommError::Group { got: "a rank".to_owned(), expected: "a parameter server".to_owned() }.into());
    };
    let cpu = Cpu { pool: Arc::new(Pool::new(1)), isa: Isa::detect(kernel)?, half: HalfKernel::F32 };
    let joined = Group::join(group)?;
    on_joined(joined.aborter());
    let links = accept_ranks(&joined, server)?;
    let fault = fault.map(|fault| (fault, group.rank(), group.attempt));
    let _serving = ParameterServer::start_all(&links, |_| {
        Box::new(Dedicated { optimizer: config.optimizer, cpu: cpu.clone(), fault, started: None })
    })?;
    Ok(joined.stay()?)
}
