//! Reads a manifest into a [`ValidJob`], the common input of local and cluster plans.
//!
//! ```text
//! TrainJob ─> read ─┬─> request    placement request: nodes, processes, threads, policies
//!                   ├─> engine     the worker's configuration (framework Switchyard)
//!                   ├─> pod        the template with its trainer: each pod's requirements of a node
//!                   └─> or every fault that the schema and its CEL rules cannot detect
//! ```
//!
//! [`GangPod`] is one pod of an attempt of this job. [`crate::validate`] adds the faults of objects
//! and frameworks.

mod engine;
mod environment;
mod gang_pod;
mod pod;
mod roles;
mod size;
#[cfg(test)]
pub(crate) mod tests;

pub(crate) use engine::{Traffic, communicators, dedicated_servers};
pub use environment::EnvEntry;
pub(crate) use environment::identity;
pub use gang_pod::{Address, GangPod, Network};
pub use pod::{RequestedPod, gpus};
pub(crate) use pod::{set_devices, trainer, trainer_mut};
pub(crate) use roles::{LAUNCHER, alone, fault_of, field_of, role_ranks};
pub use roles::{Role, pods, total_gpus};
pub use size::too_large;

use switchyard_core::placement::{Mode, NumaBinding, Request};
use switchyard_core::quantity::parse_quantity;
use switchyard_crds::{self as api, TrainJob};
use switchyard_worker_contract::config::{BandwidthCheck, EngineConfig};

/// A job that can be planned. Every number is in the unit it is used in.
#[derive(Debug, Clone, PartialEq)]
pub struct ValidJob {
    /// Name of the job.
    pub name: String,
    /// Placement request. In a job with roles: a node for each pod of every role, with the
    /// processes of the role that needs most.
    pub request: Request,
    /// Engine configuration except the number of threads, which placement decides. Only with
    /// framework Switchyard.
    pub engine: Option<EngineConfig>,
    /// The user's environment, in manifest order.
    pub env: Vec<(String, String)>,
    /// Each pod's requirements of its node; in a job with roles, of the role that needs most.
    pub pod: RequestedPod,
    /// Memory limit of a node, in bytes.
    pub memory_limit: Option<u64>,
    /// Maximum number of restarts after application failures.
    pub max_restarts: u32,
    /// The roles in rank order. Empty if all pods are alike.
    pub roles: Vec<Role>,
}

/// Highest attempt number. With more digits a pod name could exceed the 63 characters of a host
/// name. Backoff keeps a job from reaching it within a year.
pub const LAST_ATTEMPT: u32 = 99_999;

impl ValidJob {
    /// Name of a node's pod and of its claim, also used for the same node in a local run.
    pub fn pod_name(&self, attempt: u32, node_rank: u32) -> String {
        format!("{}-{attempt}-{node_rank}", self.name)
    }
}

/// A rejected value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: got {got}; expected {expected}")]
pub struct Invalid {
    /// Path of the field.
    pub field: String,
    pub got: String,
    pub expected: String,
}

/// Reads a job that satisfies its schema and rules.
///
/// # Errors
/// All faults of the job itself.
pub(crate) fn read(job: &TrainJob) -> Result<ValidJob, Vec<Invalid>> {
    if job.spec.roles.is_empty() { read_alike(job) } else { roles::read(job) }
}

/// Reads a job without roles, whose pods are alike.
fn read_alike(job: &TrainJob) -> Result<ValidJob, Vec<Invalid>> {
    let mut faults = Vec::new();
    let spec = &job.spec;
    // The schema has the same bounds, but a job that was stored without them must not request a
    // million pods.
    for (field, got, most) in [
        ("numNodes", spec.trainer.num_nodes, api::MAX_NODES),
        ("numProcPerNode", spec.trainer.num_proc_per_node.unwrap_or(1), api::MAX_PROC_PER_NODE),
    ] {
        if !(1..=most).contains(&got) {
            let (field, expected) = (format!("spec.trainer.{field}"), format!("1 to {most}"));
            faults.push(Invalid { field, got: got.to_string(), expected });
        }
    }
    let limits = spec.trainer.resources_per_node.as_ref().map(|resources| &resources.limits);
    let mut quantity = |name: &str, expected: &str| {
        let text = &limits?.get(name)?.0;
        let value = parse_quantity(text).filter(|value| *value > 0.0);
        if value.is_none() {
            faults.push(Invalid {
                field: format!("spec.trainer.resourcesPerNode.limits.{name}"),
                got: format!("`{text}`"),
                expected: expected.to_string(),
            });
        }
        value
    };
    let cpu = quantity("cpu", "a number of cores greater than 0, such as 2 or 500m");
    let memory = quantity("memory", "a number of bytes greater than 0, such as 4Gi");
    for (index, entry) in spec.trainer.env.iter().enumerate().filter(|(_, entry)| entry.value.contains('\0')) {
        faults.push(Invalid {
            field: format!("spec.trainer.env[{index}].value"),
            got: format!("text with a NUL character for {}", entry.name),
            expected: "text without NUL, which a process environment cannot contain".to_string(),
        });
    }
    let processes_per_node = processes_per_node(job);
    let engine = spec.engine.as_ref();
    let engine = engine.and_then(|engine| {
        let size = (count(spec.trainer.num_nodes), processes_per_node, gpus(job));
        engine::config(engine, spec.checkpoint.as_ref(), size, &mut faults)
    });
    let check = bandwidth_check(job, processes_per_node, &mut faults);
    let watchdog = engine::watchdog(&spec.failure_policy);
    let engine = engine.map(|engine| EngineConfig { bandwidth_check: check, watchdog, ..engine });
    faults.extend(fabric_faults(job));
    faults.extend(too_many_ranks(job, processes_per_node));
    faults.extend(too_large(job));
    if !faults.is_empty() {
        return Err(faults);
    }
    let request = Request {
        nodes: count(spec.trainer.num_nodes),
        processes_per_node,
        threads: spec.trainer.cpu_threads.map(count),
        // A fraction of a core still needs one core to be placed on.
        core_limit: cpu.map(|cores| cores.max(1.0) as u32),
        mode: match spec.topology_policy.mode {
            api::TopologyMode::Required => Mode::Required,
            api::TopologyMode::Preferred => Mode::Preferred,
            api::TopologyMode::Ignored => Mode::Ignored,
        },
        numa_binding: match spec.topology_policy.node_topology.numa_binding {
            api::NumaBinding::Required => NumaBinding::Required,
            api::NumaBinding::Preferred => NumaBinding::Preferred,
            api::NumaBinding::None => NumaBinding::None,
        },
    };
    Ok(ValidJob {
        name: job.metadata.name.clone().unwrap_or_default(),
        request,
        engine,
        env: spec.trainer.env.iter().map(|entry| (entry.name.clone(), entry.value.clone())).collect(),
        pod: RequestedPod::of(job),
        memory_limit: memory.map(|bytes| bytes as u64),
        max_restarts: spec.failure_policy.max_restarts.unsigned_abs(),
        roles: Vec::new(),
    })
}

/// Prefix of the job's UID, enough to distinguish jobs of the same name.
pub(crate) fn short_uid(job: &TrainJob) -> String {
    let uid = job.metadata.uid.as_deref().unwrap_or_default();
    uid.chars().filter(char::is_ascii_alphanumeric).take(8).collect()
}

/// Processes per node: one per GPU unless the job specifies a number.
pub fn processes_per_node(job: &TrainJob) -> u32 {
    job.spec.trainer.num_proc_per_node.map_or(gpus(job).max(1), count)
}

/// The bandwidth check that the job requests.
fn bandwidth_check(job: &TrainJob, per_node: u32, faults: &mut Vec<Invalid>) -> Option<BandwidthCheck> {
    let policy = &job.spec.fabric.preflight;
    let text = &policy.min_bus_bandwidth.as_ref()?.0;
    let mut fault = |got: String, expected: &str| {
        let field = "spec.fabric.preflight.minBusBandwidth".to_string();
        faults.push(Invalid { field, got, expected: expected.to_string() });
    };
    if per_node < 2 && job.spec.trainer.num_nodes < 2 {
        fault(format!("{text} for a job of one process"), "at least two processes: there is nothing to measure");
    }
    let least = parse_quantity(text).filter(|least| least.is_finite() && *least > 0.0);
    if least.is_none() {
        fault(format!("`{text}`"), "bytes per second greater than 0, such as 40G");
    }
    Some(BandwidthCheck { least_bytes_per_second: least?, enforce: policy.mode == api::PreflightMode::Enforce })
}

/// Fault of a fabric setting that the engine cannot satisfy on any fabric.
fn fabric_faults(job: &TrainJob) -> Option<Invalid> {
    let is_own = job.spec.trainer.framework == api::Framework::Switchyard && job.spec.trainer.num_nodes > 1;
    (is_own && gpus(job) == 0 && job.spec.fabric.mode == api::FabricMode::Required).then(|| Invalid {
        field: "spec.fabric.mode".into(),
        got: "Required with framework Switchyard on CPUs of several nodes".into(),
        expected: "Auto, or GPUs: the engine sends data between CPUs of several nodes over TCP only".into(),
    })
}

/// Largest engine group (`MAX_WORLD` in `worker/src/comm/config.rs`), which bounds the size of its
/// roster.
const MAX_RANKS: u32 = 4096;

/// Checks the product: the schema bounds nodes and processes separately, and the processes of a
/// node may be derived from its GPUs.
fn too_many_ranks(job: &TrainJob, per_node: u32) -> Option<Invalid> {
    let nodes = count(job.spec.trainer.num_nodes);
    let ranks = nodes.saturating_mul(per_node);
    let is_own = job.spec.trainer.framework == api::Framework::Switchyard;
    (is_own && ranks > MAX_RANKS).then(|| Invalid {
        field: "spec.trainer.numNodes".into(),
        got: format!("{nodes} with {per_node} processes each, {ranks} ranks in all"),
        expected: format!(
            "at most {} nodes: framework Switchyard has at most {MAX_RANKS} ranks, other frameworks have no limit",
            MAX_RANKS / per_node
        ),
    })
}

/// Converts a count that the schema bounds from below.
fn count(value: i32) -> u32 {
    value.unsigned_abs().max(1)
}
