//! The plan for a job of another framework on one machine: each pod is a process with the command
//! and the variables of its trainer container. Images, volumes and other containers are left out.

#[cfg(test)]
mod tests;

use super::devices::{self, VISIBLE};
use super::{Planned, Refusal, refuse_suspended};
use crate::job::{Address, GangPod, Invalid, Network, ValidJob, field_of};
use crate::{frameworks, objects, validate};
use k8s_openapi::api::core::v1::{Container, EnvVar};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use switchyard_core::units::counted;
use switchyard_crds::gpu_topology::GPUTopology;
use switchyard_crds::names::GPU_RESOURCE;
use switchyard_crds::{NodeCounts, PlacedNode, PlacementStatus, RoleCounts, TrainJob};
use switchyard_worker_contract::env::DEFAULT_GRACE_SECONDS;

/// All inputs of a plan for the pods of another framework.
#[derive(Debug, Clone, Copy)]
pub struct PodSnapshot<'a> {
    /// The job, valid according to its schema and rules.
    pub job: &'a TrainJob,
    pub machine: &'a GPUTopology,
    /// Attempt number, from 1.
    pub attempt: u32,
    /// A loopback address with a free port for each pod, by node rank.
    pub addresses: &'a [Address],
    /// Value of `CUDA_VISIBLE_DEVICES` in the environment of the command.
    pub visible: Option<&'a str>,
}

/// All pods of one attempt of a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PodPlan {
    /// Name of the job.
    pub job: String,
    /// Attempt number, from 1.
    pub attempt: u32,
    /// What runs where, in one sentence.
    pub reason: String,
    /// What differs from the job's pods in a cluster.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
    /// Name of this machine.
    pub node_name: String,
    /// By node rank.
    pub pods: Vec<PlannedPod>,
    /// Maximum number of restarts of all pods.
    pub max_restarts: u32,
    /// Seconds between SIGTERM and SIGKILL.
    pub grace_seconds: u32,
}

/// A pod as a process of this machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PlannedPod {
    /// `ps-0`, or `node-0` in a job without roles.
    pub name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<String>,
    /// Field of the job that has its command.
    #[serde(skip)]
    pub field: String,
    pub first_rank: u32,
    /// Image of the pod in a cluster.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    pub argv: Vec<String>,
    pub env: BTreeMap<String, String>,
    /// The job is complete once all awaited pods have succeeded.
    pub is_awaited: bool,
    /// The job continues when it fails.
    pub ignores_failure: bool,
}

/// Number of processes that a job of another framework has on one machine, one for each pod.
///
/// # Errors
/// All faults of the job.
pub fn count_pods(job: &TrainJob) -> Result<u32, Refusal> {
    Ok(validate(job).map_err(Refusal::Invalid)?.request.nodes)
}

/// Plans the pods of one attempt.
///
/// # Errors
/// All faults of the job, including what needs a container runtime or more GPUs than the machine
/// has.
pub fn plan_pods(snapshot: &PodSnapshot<'_>) -> Result<PodPlan, Refusal> {
    let valid = validate(snapshot.job).map_err(Refusal::Invalid)?;
    let one = |fault: Invalid| Refusal::Invalid(vec![fault]);
    refuse_suspended(snapshot.job).map_err(one)?;
    if frameworks::uses_mpirun(snapshot.job) {
        return Err(one(Invalid {
            field: "spec.trainer.framework".into(),
            got: format!("{:?}", snapshot.job.spec.trainer.framework),
            expected: "another framework: on one machine, mpirun starts all processes without Switchyard".into(),
        }));
    }
    let gpus = gpus(snapshot, &valid).map_err(one)?;
    let mut faults = Vec::new();
    let mut warnings = BTreeSet::new();
    let mut pods = Vec::new();
    for (node_rank, gpus) in (0..valid.request.nodes).zip(gpus) {
        let pod = GangPod::new(snapshot.job, &valid, snapshot.attempt, node_rank);
        let pod = pod.on(Network::Loopback(snapshot.addresses));
        match planned(&pod, gpus, &mut warnings) {
            Ok(planned) => pods.push(planned),
            Err(fault) if faults.contains(&fault) => {}
            Err(fault) => faults.push(fault),
        }
    }
    if !faults.is_empty() {
        return Err(Refusal::Invalid(faults));
    }
    let images: BTreeSet<&str> = pods.iter().filter_map(|pod| pod.image.as_deref()).collect();
    let images = images.into_iter().collect::<Vec<_>>().join(", ");
    let on_host = format!("commands run with the programs and files of this machine, not in {images}");
    let grace = valid.pod.spec.termination_grace_period_seconds.and_then(|seconds| u32::try_from(seconds).ok());
    Ok(PodPlan {
        reason: format!("{} as processes of this machine, not pinned", counted(pods.len() as u64, "pod")),
        warnings: std::iter::once(on_host).chain(warnings).collect(),
        node_name: snapshot.machine.metadata.name.clone().unwrap_or_default(),
        attempt: snapshot.attempt,
        pods,
        max_restarts: valid.max_restarts,
        grace_seconds: grace.unwrap_or(DEFAULT_GRACE_SECONDS),
        job: valid.name,
    })
}

/// Value of `CUDA_VISIBLE_DEVICES` of each pod. `None`: the variable stays as it is.
fn gpus(snapshot: &PodSnapshot<'_>, valid: &ValidJob) -> Result<Vec<Option<String>>, Invalid> {
    let requested: Vec<u32> = (0..valid.request.nodes).map(|rank| valid.of_pod(rank).pod.gpus).collect();
    if requested.iter().all(|gpus| *gpus == 0) {
        return Ok(vec![None; requested.len()]);
    }
    let (machine, usable) = devices::usable(snapshot.visible, snapshot.machine)?;
    let sets = devices::disjoint_sets(&machine, usable, &requested).map_err(|(pod, free)| {
        let limit = format!("spec.trainer.resourcesPerNode.limits.{GPU_RESOURCE}");
        let role = valid.role_of(pod as u32);
        Invalid {
            field: role.map_or(limit.clone(), |role| field_of(&role.name, &limit)),
            got: requested[pod].to_string(),
            expected: format!(
                "at most {free}, the whole and healthy GPUs of this machine that the pods before this one leave"
            ),
        }
    })?;
    Ok(sets.into_iter().map(|uuids| Some(uuids.join(","))).collect())
}

fn planned(pod: &GangPod<'_>, gpus: Option<String>, warnings: &mut BTreeSet<String>) -> Result<PlannedPod, Invalid> {
    let role = pod.role();
    let field = |rest: &str| match role {
        Some(role) => field_of(&role.name, &format!("spec.trainer.{rest}")),
        None => format!("spec.trainer.{rest}"),
    };
    let container = objects::trainer_container(*pod);
    if container.command.as_ref().is_none_or(Vec::is_empty) {
        return Err(Invalid {
            field: field("command"),
            got: "nothing".into(),
            expected: "a command: the image's own needs a container runtime, which `switchyard run` does not use"
                .into(),
        });
    }
    let name = match role {
        Some(role) => format!("{}-{}", role.name, pod.node_rank - role.first_node),
        None => format!("node-{}", pod.node_rank),
    };
    let mut env = BTreeMap::new();
    if let Some(gpus) = gpus {
        env.insert(VISIBLE.to_owned(), gpus);
    }
    for entry in container.env.iter().flatten() {
        match value_of(entry, pod, &env) {
            Some(value) => {
                env.insert(entry.name.clone(), value);
            }
            None => {
                warnings.insert(format!(
                    "{} has its value from the cluster: here from the environment of this command",
                    entry.name
                ));
            }
        }
    }
    warnings.extend(left_out(pod, &container));
    let words = container.command.iter().chain(&container.args).flatten();
    Ok(PlannedPod {
        name,
        role: role.map(|role| role.name.clone()),
        field: field("command"),
        first_rank: pod.valid.first_rank(pod.node_rank),
        image: container.image.clone(),
        argv: words.map(|word| expand(word, &env)).collect(),
        env,
        is_awaited: pod.valid.awaits(pod.node_rank),
        ignores_failure: pod.valid.ignores_failure(pod.node_rank),
    })
}

/// What a pod has in a cluster only.
fn left_out(pod: &GangPod<'_>, container: &Container) -> Vec<String> {
    let spec = &pod.requested().spec;
    let has_mounts = container.volume_mounts.as_ref().is_some_and(|mounts| !mounts.is_empty());
    let has_others = spec.containers.len() > 1 || spec.init_containers.as_ref().is_some_and(|all| !all.is_empty());
    let has_sources = container.env_from.as_ref().is_some_and(|sources| !sources.is_empty());
    let parts = [
        (has_mounts, "volumes of spec.template are not mounted"),
        (has_others, "other containers of spec.template do not run"),
        (has_sources, "envFrom of spec.template is not read"),
    ];
    parts.into_iter().filter(|(is_there, _)| *is_there).map(|(_, text)| text.to_owned()).collect()
}

/// The value of a variable, as a kubelet computes it. `None` if only a cluster has it.
fn value_of(entry: &EnvVar, pod: &GangPod<'_>, before: &BTreeMap<String, String>) -> Option<String> {
    let Some(source) = &entry.value_from else {
        return Some(expand(entry.value.as_deref().unwrap_or_default(), before));
    };
    match source.field_ref.as_ref()?.field_path.as_str() {
        "status.podIP" => Some(pod.host(pod.node_rank)),
        "metadata.name" => Some(pod.name()),
        "metadata.namespace" => pod.job.metadata.namespace.clone(),
        _ => None,
    }
}

/// Expands references such as `$(NAME)` like a kubelet: `$$` is a dollar, and unknown names stay.
fn expand(text: &str, known: &BTreeMap<String, String>) -> String {
    let mut expanded = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('$') {
        expanded.push_str(before);
        let reference = after.strip_prefix('(').and_then(|inner| inner.split_once(')'));
        rest = match (after.strip_prefix('$'), reference) {
            (Some(after), _) => {
                expanded.push('$');
                after
            }
            (None, Some((name, after))) => {
                let unknown = format!("$({name})");
                expanded.push_str(known.get(name).unwrap_or(&unknown));
                after
            }
            (None, None) => {
                expanded.push('$');
                after
            }
        };
    }
    expanded + rest
}

/// State of a pod's process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PodState {
    Running,
    Succeeded,
    Failed,
    /// It was ended on purpose.
    Stopped,
}

/// What an attempt needs next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Its pods run.
    Continue,
    /// The job is complete.
    Complete,
    /// This pod has failed. The job may be about to complete, so the failure counts only after
    /// [`crate::restart::ROOT_CAUSE_GRACE`].
    FailsSoon(usize),
    /// This pod ends the attempt.
    Failed(usize),
}

impl PodPlan {
    /// Judges an attempt by the states of its pods. `failed` lists those that have failed, in the
    /// order of their ends.
    pub fn judge(&self, states: &[PodState], failed: &[usize]) -> Verdict {
        let awaited = self.pods.iter().zip(states).filter(|(pod, _)| pod.is_awaited);
        if awaited.clone().all(|(_, state)| *state == PodState::Succeeded) {
            return Verdict::Complete;
        }
        let Some(first) = failed.iter().find(|index| !self.pods[**index].ignores_failure) else {
            return Verdict::Continue;
        };
        let others_run = states.contains(&PodState::Running);
        if self.pods[*first].is_awaited || !others_run { Verdict::Failed(*first) } else { Verdict::FailsSoon(*first) }
    }

    /// Counts pods by state: of the job, and of each role.
    pub fn counts(&self, states: &[PodState]) -> (NodeCounts, Vec<RoleCounts>) {
        let count = |role: Option<&str>| {
            let own = self.pods.iter().zip(states).filter(|(pod, _)| role.is_none() || pod.role.as_deref() == role);
            let of = |state: PodState| own.clone().filter(|(_, own)| **own == state).count() as i32;
            let running = of(PodState::Running);
            NodeCounts {
                desired: own.clone().count() as i32,
                ready: running,
                active: running,
                succeeded: of(PodState::Succeeded),
                failed: of(PodState::Failed),
            }
        };
        let mut roles: Vec<&str> = self.pods.iter().filter_map(|pod| pod.role.as_deref()).collect();
        roles.dedup();
        let of_role = |name: &str| RoleCounts { name: name.to_owned(), counts: count(Some(name)) };
        (count(None), roles.into_iter().map(of_role).collect())
    }
}

impl Planned for PodPlan {
    fn attempt(&self) -> u32 {
        self.attempt
    }

    fn placement(&self) -> PlacementStatus {
        let node = |pod: &PlannedPod| PlacedNode {
            first_rank: pod.first_rank as i32,
            node_name: self.node_name.clone(),
            ..PlacedNode::default()
        };
        PlacementStatus {
            reason: self.reason.clone(),
            nodes: self.pods.iter().map(node).collect(),
            ..PlacementStatus::default()
        }
    }
}
