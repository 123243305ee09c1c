//! The plan for one machine: every process of an attempt with its CPUs, environment and reasons.
//! `switchyard run` starts them. A run on several machines has one on each. Pods of other
//! frameworks have a plan of their own, without placement: `pods`.
//!
//! ```text
//! TrainJob ─> validate ─> ValidJob ────┐
//! GPUTopology reports ─> core's model ─┴─> placement ─> processes ─> LocalPlan
//! an attempt has ended ─> next: restart, or the end of the run
//! progress of the run ─> status
//! ```

mod devices;
mod hosts;
mod lifecycle;
mod pods;
mod processes;
#[cfg(test)]
mod tests;

pub use devices::{Devices, PlannedGpu, VISIBLE};
pub use hosts::Hosts;
pub use lifecycle::{AttemptEnd, Next, Observed, Planned, Progress, RunEnd, next, status};
pub use pods::{PlannedPod, PodPlan, PodSnapshot, PodState, Verdict, count_pods, plan_pods};
pub use processes::{Device, LocalPlan, PlannedNode, ProcessSpec};

pub use crate::job::Address;
use crate::job::{Invalid, ValidJob, dedicated_servers, processes_per_node};
use crate::validate;
use switchyard_core::placement::{self, Reason};
use switchyard_crds::TrainJob;
use switchyard_crds::gpu_topology::GPUTopology;
use switchyard_topology::cluster::{self as machines, BuildError};
use switchyard_worker_contract::config::EngineConfig;

/// All inputs of a plan.
#[derive(Debug, Clone)]
pub struct LocalSnapshot<'a> {
    /// The job, valid according to its schema and rules.
    pub job: &'a TrainJob,
    /// Usable nodes, in order of preference.
    pub nodes: &'a [GPUTopology],
    /// Attempt number, from 1.
    pub attempt: u32,
    /// Address on which rank 0 listens.
    pub rendezvous: &'a str,
    /// Directory of the run, which contains configuration, key and logs.
    pub run_dir: &'a str,
    pub devices: Devices<'a>,
    /// The machines of a run on several. Then `nodes` is this machine.
    pub hosts: Option<&'a Hosts>,
}

/// Why there is no plan.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Refusal {
    /// The job is invalid.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
    Invalid(Vec<Invalid>),
    /// A node's report is invalid.
    #[error(transparent)]
    Topology(#[from] BuildError),
    /// No placement satisfies the job.
    #[error("not placeable: {job}: {reason}{}; smallest change that fits: {}", on(node), reason.remedy())]
    NotPlaceable {
        /// Name of the job.
        job: String,
        /// Name of the node that is too small, if it is a single one.
        node: Option<String>,
        reason: Reason,
    },
}

fn on(node: &Option<String>) -> String {
    node.as_ref().map_or_else(String::new, |node| format!(" on {node}"))
}

/// Plans one attempt of a job.
///
/// # Errors
/// All faults of the job, an invalid report, or the reason why no placement exists.
pub fn plan(snapshot: &LocalSnapshot<'_>) -> Result<LocalPlan, Refusal> {
    let job = validate(snapshot.job).map_err(Refusal::Invalid)?;
    let engine = local_engine(snapshot.job, &job).map_err(|fault| Refusal::Invalid(vec![fault]))?;
    let refuse = |fault| Refusal::Invalid(vec![fault]);
    // The part of the job on this machine.
    let request = match snapshot.hosts {
        Some(hosts) => hosts.share(&job.request).map_err(refuse)?,
        None => job.request,
    };
    if snapshot.hosts.is_some() && engine.dedicated_servers() > 0 {
        return Err(refuse(dedicated_servers("Ranks with --hosts: dedicated servers run on one machine yet")));
    }
    let gpus = devices::choose(snapshot.devices, snapshot.nodes, (&job, &request, engine)).map_err(refuse)?;
    let named = machines::build(snapshot.nodes)?;
    let assignment = placement::solve(&named.cluster, &request).map_err(|reason| Refusal::NotPlaceable {
        job: job.name.clone(),
        node: reason.node().and_then(|node| named.names.get(node.0 as usize).cloned()),
        reason,
    })?;
    Ok(processes::processes(&job, engine, &named, &assignment, (snapshot, gpus)))
}

/// The engine of a job, independent of placement.
#[derive(Debug, Clone, PartialEq)]
pub struct Engine {
    /// Configuration of each rank except the number of threads, which placement decides.
    pub config: EngineConfig,
    /// World size.
    pub world: u32,
    /// The user's environment, in manifest order.
    pub env: Vec<(String, String)>,
}

/// The engine of a job that can run without a cluster.
///
/// # Errors
/// All faults of the job.
pub fn engine(job: &TrainJob) -> Result<Engine, Refusal> {
    let valid = validate(job).map_err(Refusal::Invalid)?;
    let config = local_engine(job, &valid).map_err(|fault| Refusal::Invalid(vec![fault]))?.clone();
    let world = valid.request.nodes.saturating_mul(processes_per_node(job));
    Ok(Engine { config, world, env: valid.env })
}

/// The engine's configuration, for a job that can run without a cluster.
fn local_engine<'a>(job: &TrainJob, valid: &'a ValidJob) -> Result<&'a EngineConfig, Invalid> {
    refuse_suspended(job)?;
    valid.engine.as_ref().ok_or_else(|| Invalid {
        field: "spec.trainer.framework".into(),
        got: format!("{:?}", job.spec.trainer.framework),
        expected: "Switchyard, whose engine this is about".into(),
    })
}

fn refuse_suspended(job: &TrainJob) -> Result<(), Invalid> {
    let fault = || Invalid {
        field: "spec.suspend".into(),
        got: "true".into(),
        expected: "false: `switchyard run` starts the job now".into(),
    };
    if job.spec.suspend { Err(fault()) } else { Ok(()) }
}
