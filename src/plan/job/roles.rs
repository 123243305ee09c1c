//! Roles of a job. Each role is planned like a job of its own; the gang is all of their pods.
//!
//! Pods of a role have consecutive node ranks. Roles that join the rendezvous come first, so that
//! node 0 is the first rank of the group that trains together. Other roles follow in the order of
//! the manifest.

use super::pod::gpus_of;
use super::{Invalid, ValidJob, count, read_alike, size};
use switchyard_core::placement::Request;
use switchyard_crds::{self as api, Framework, MAX_NODES, OnRoleFailure, Rendezvous, TrainJob, Trainer};

/// Role that runs `mpirun` and computes nothing (frameworks MPI and Horovod).
pub(crate) const LAUNCHER: &str = "launcher";

/// One role of a job.
#[derive(Debug, Clone, PartialEq)]
pub struct Role {
    pub name: String,
    /// Node rank of its first pod.
    pub first_node: u32,
    /// Lowest global rank.
    pub first_rank: u32,
    /// Its pods join the framework's rendezvous.
    pub in_rendezvous: bool,
    /// Index of the role that it exchanges data with.
    pub near: Option<usize>,
    /// The job continues when one of its pods fails.
    pub ignores_failures: bool,
    /// The job is complete once the pods of all awaited roles have succeeded.
    pub is_awaited: bool,
    /// The job that this role would be without the others. Its status is the job's, restricted to
    /// the pods of this role.
    pub job: TrainJob,
    /// The same job, validated.
    pub valid: ValidJob,
}

impl Role {
    /// Number of pods.
    pub fn pods(&self) -> u32 {
        self.valid.request.nodes
    }

    /// Node ranks of its pods.
    pub fn node_ranks(&self) -> std::ops::Range<u32> {
        self.first_node..self.first_node + self.pods()
    }
}

impl ValidJob {
    /// Role of a pod, `None` in a job without roles.
    pub fn role_of(&self, node_rank: u32) -> Option<&Role> {
        self.roles.iter().find(|role| role.node_ranks().contains(&node_rank))
    }

    /// The job that a pod is planned by: its role's, or the whole job.
    pub(crate) fn of_pod(&self, node_rank: u32) -> &ValidJob {
        self.role_of(node_rank).map_or(self, |role| &role.valid)
    }

    /// Whether the job waits for the success of the pod of this rank.
    pub fn awaits(&self, node_rank: u32) -> bool {
        self.role_of(node_rank).is_none_or(|role| role.is_awaited)
    }

    /// Whether the job continues when the pod of this rank fails.
    pub fn ignores_failure(&self, node_rank: u32) -> bool {
        self.role_of(node_rank).is_some_and(|role| role.ignores_failures)
    }

    /// Lowest global rank of a pod.
    pub fn first_rank(&self, node_rank: u32) -> u32 {
        match self.role_of(node_rank) {
            Some(role) => role.first_rank + (node_rank - role.first_node) * role.valid.request.processes_per_node,
            None => node_rank.saturating_mul(self.request.processes_per_node),
        }
    }

    /// The role that needs most of a node: the most GPUs for each pod, then the most pods. `None`
    /// in a job without roles.
    pub fn lead(&self) -> Option<&Role> {
        lead(&self.roles)
    }

    /// Number of different nodes that the pods of [`ValidJob::pod`] need at least. Pods outside the
    /// rendezvous can share a node.
    pub fn min_nodes(&self) -> u32 {
        self.lead().map_or(self.request.nodes, |role| if role.in_rendezvous { role.pods() } else { 1 })
    }

    /// The role whose ranks exchange data by NCCL, Gloo or MPI: of those that join the rendezvous,
    /// the one with GPUs, else the largest.
    pub fn collective(&self) -> Option<&Role> {
        collective(&self.roles)
    }
}

fn lead(roles: &[Role]) -> Option<&Role> {
    roles.iter().rev().max_by_key(|role| (role.valid.pod.gpus, role.pods()))
}

fn collective(roles: &[Role]) -> Option<&Role> {
    let joining = roles.iter().rev().filter(|role| role.in_rendezvous);
    joining.max_by_key(|role| (role.valid.pod.gpus > 0, role.pods()))
}

/// Pods of a job, of all roles.
pub fn pods(job: &TrainJob) -> i32 {
    if job.spec.roles.is_empty() {
        return job.spec.trainer.num_nodes;
    }
    job.spec.roles.iter().fold(0, |sum, role| sum.saturating_add(role.replicas))
}

/// GPUs of all pods of a job, of all roles.
pub fn total_gpus(job: &TrainJob) -> u64 {
    let of = |pods: i32, gpus: u32| u64::from(pods.unsigned_abs()) * u64::from(gpus);
    if job.spec.roles.is_empty() {
        return of(job.spec.trainer.num_nodes, super::gpus(job));
    }
    let in_template = super::gpus(job);
    let of_role =
        |role: &api::Role| role.resources_per_node.as_ref().and_then(|own| gpus_of(&own.limits)).unwrap_or(in_template);
    job.spec.roles.iter().map(|role| of(role.replicas, of_role(role))).sum()
}

/// Whether the pods of the role at this position join the rendezvous.
fn joins(job: &TrainJob, position: usize) -> bool {
    let uses_mpirun = uses_mpirun(job);
    job.spec
        .roles
        .get(position)
        .and_then(|role| role.rendezvous)
        .map_or(position == 0 || uses_mpirun, |own| own == Rendezvous::Join)
}

/// Positions of the roles in rank order.
fn rank_order(job: &TrainJob) -> Vec<usize> {
    let mut order: Vec<usize> = (0..job.spec.roles.len()).collect();
    // `mpirun` runs on node 0.
    let launches =
        |position: usize| uses_mpirun(job) && job.spec.roles.get(position).is_some_and(|role| role.name == LAUNCHER);
    order.sort_by_key(|position| (!joins(job, *position), !launches(*position)));
    order
}

fn uses_mpirun(job: &TrainJob) -> bool {
    matches!(job.spec.trainer.framework, Framework::MPI | Framework::Horovod)
}

/// Name and node ranks of every role, in rank order.
pub(crate) fn role_ranks(job: &TrainJob) -> Vec<(String, std::ops::Range<u32>)> {
    let mut first = 0_u32;
    let roles = rank_order(job).into_iter().filter_map(|position| job.spec.roles.get(position));
    let ranks = roles.map(|role| {
        let ranks = first..first.saturating_add(count(role.replicas));
        first = ranks.end;
        (role.name.clone(), ranks)
    });
    ranks.collect()
}

/// For every role in rank order: its name, and the job that it would be without the others. Without
/// a status. A limit of the role replaces the template's.
pub(crate) fn alone(job: &TrainJob) -> Vec<(&str, TrainJob)> {
    let spec = &job.spec;
    let of_role = |role: &api::Role| {
        let mut alone = TrainJob { metadata: job.metadata.clone(), spec: spec.clone(), status: None };
        alone.spec.success_policy = None;
        alone.spec.roles.clear();
        let shared = spec.trainer.env.iter().filter(|entry| role.env.iter().all(|own| own.name != entry.name));
        alone.spec.trainer = Trainer {
            num_nodes: role.replicas,
            num_proc_per_node: role.num_proc_per_node,
            framework: spec.trainer.framework,
            image: role.image.clone().or_else(|| spec.trainer.image.clone()),
            command: role.command.clone(),
            args: role.args.clone(),
            cpu_threads: None,
            resources_per_node: role.resources_per_node.clone(),
            env: shared.chain(&role.env).cloned().collect(),
        };
        set_role_template(&mut alone, role);
        alone
    };
    let roles = rank_order(job).into_iter().filter_map(|position| spec.roles.get(position));
    roles.map(|role| (role.name.as_str(), of_role(role))).collect()
}

/// Adds the role's requirements of a node to the template.
fn set_role_template(alone: &mut TrainJob, role: &api::Role) {
    if role.node_selector.is_empty() && role.tolerations.is_empty() && alone.spec.template.is_none() {
        return;
    }
    let spec = alone.spec.template.get_or_insert_default().spec.get_or_insert_default();
    if !role.node_selector.is_empty() {
        let selector = spec.node_selector.get_or_insert_default();
        selector.extend(role.node_selector.iter().map(|(key, value)| (key.clone(), value.clone())));
    }
    if !role.tolerations.is_empty() {
        spec.tolerations.get_or_insert_default().extend(role.tolerations.iter().cloned());
    }
    let resources = super::trainer_mut(spec).and_then(|trainer| trainer.resources.as_mut());
    if let (Some(resources), Some(own)) = (resources, &role.resources_per_node) {
        for name in own.limits.keys() {
            for amounts in [&mut resources.limits, &mut resources.requests].into_iter().flatten() {
                amounts.remove(name);
            }
        }
    }
}

/// A field of a role's own job as a field of the whole job.
pub(crate) fn field_of(role: &str, field: &str) -> String {
    let at = |rest: &str| format!("spec.roles[{role}].{rest}");
    match field.strip_prefix("spec.trainer.") {
        Some("numNodes") => at("replicas"),
        Some("image") => field.to_string(),
        Some(rest) => at(rest),
        None => field.to_string(),
    }
}

/// The fault of a role's own job, as a fault of the whole job.
pub(crate) fn fault_of(role: &str, fault: Invalid) -> Invalid {
    Invalid { field: field_of(role, &fault.field), ..fault }
}

/// Reads a job with roles that satisfies its schema and rules.
///
/// # Errors
/// All faults of the job and its roles.
pub(super) fn read(job: &TrainJob) -> Result<ValidJob, Vec<Invalid>> {
    let mut faults = Vec::new();
    let mut roles: Vec<Role> = Vec::new();
    let (mut first_node, mut first_rank) = (0_u32, 0_u32);
    let names: Vec<String> = alone(job).iter().map(|(name, _)| (*name).to_string()).collect();
    for ((name, alone), position) in alone(job).into_iter().zip(rank_order(job)) {
        let Some(role) = job.spec.roles.get(position) else { continue };
        let drives_all = matches!(alone.spec.trainer.framework, Framework::JAX | Framework::TensorFlow);
        if let Some(got) = role.num_proc_per_node.filter(|got| drives_all && *got != 1) {
            faults.push(Invalid {
                field: field_of(name, "spec.trainer.numProcPerNode"),
                got: got.to_string(),
                expected: "nothing: a process of JAX or TensorFlow drives all GPUs of its pod".into(),
            });
        }
        match read_alike(&alone) {
            Ok(valid) => {
                let ranks = valid.request.nodes.saturating_mul(valid.request.processes_per_node);
                let role = Role {
                    name: name.to_string(),
                    first_node,
                    first_rank,
                    in_rendezvous: joins(job, position),
                    near: role.near.as_ref().and_then(|near| names.iter().position(|other| other == near)),
                    ignores_failures: role.on_failure == OnRoleFailure::Ignore,
                    is_awaited: job.spec.success_policy.as_ref().is_none_or(|policy| policy.role == role.name),
                    job: alone,
                    valid,
                };
                first_node = first_node.saturating_add(role.pods());
                first_rank = first_rank.saturating_add(ranks);
                roles.push(role);
            }
            Err(found) => faults.extend(found.into_iter().map(|fault| fault_of(name, fault))),
        }
    }
    faults.extend(size::too_large(job));
    faults.extend(shared_faults(job, &roles));
    let Some(lead) = lead(&roles).filter(|_| faults.is_empty()).map(|lead| lead.valid.clone()) else {
        return Err(faults);
    };
    let request = Request { nodes: count(pods(job)), ..lead.request };
    let mut valid = ValidJob { request, ..lead };
    let collective = collective(&roles).map(|role| role.first_node);
    for role in &mut roles {
        restrict_status(job, role, collective);
    }
    valid.roles = roles;
    Ok(valid)
}

/// Faults of the roles together.
fn shared_faults(job: &TrainJob, roles: &[Role]) -> Vec<Invalid> {
    let mut faults = Vec::new();
    let all = pods(job);
    if all > MAX_NODES {
        let expected = format!("at most {MAX_NODES} pods in all roles");
        faults.push(Invalid { field: "spec.roles".into(), got: format!("{all} replicas"), expected });
    }
    let mut computing = roles.iter().filter(|role| role.in_rendezvous && role.valid.pod.gpus > 0);
    if let (Some(first), Some(second)) = (computing.next(), computing.next()) {
        faults.push(Invalid {
            field: format!("spec.roles[{}].rendezvous", second.name),
            got: format!("Join for two roles with GPUs, {} and {}", first.name, second.name),
            expected: "one of them: the ranks of a ring have pods of one kind, so give them one role".into(),
        });
    }
    if let Some(launcher) = roles.iter().find(|role| role.name == LAUNCHER && role.pods() > 1 && uses_mpirun(job)) {
        faults.push(Invalid {
            field: format!("spec.roles[{LAUNCHER}].replicas"),
            got: launcher.pods().to_string(),
            expected: "1: one mpirun starts all ranks".into(),
        });
    }
    if let Some(servers) = roles.iter().find(|role| role.name == "ps" && role.in_rendezvous) {
        faults.push(Invalid {
            field: format!("spec.roles[{}].rendezvous", servers.name),
            got: "Join for parameter servers, by the field or because the role is first".into(),
            expected: "None: list the role that trains first".into(),
        });
    }
    if job.spec.fabric.on_fallback == api::FallbackAction::Fail {
        faults.push(Invalid {
            field: "spec.fabric.onFallback".into(),
            got: "Fail in a job with roles".into(),
            expected: "Report: the transport in use is not compared with the forecast for a job with roles".into(),
        });
    }
    faults
}

/// Gives a role the part of the job's status that concerns its pods.
fn restrict_status(job: &TrainJob, role: &mut Role, collective: Option<u32>) {
    role.job.status.clone_from(&job.status);
    let Some(status) = &mut role.job.status else { return };
    if role.valid.pod.gpus == 0 {
        status.device_allocation = None;
    }
    if collective != Some(role.first_node) {
        status.fabric = None;
    }
    if let Some(placement) = &mut status.placement {
        let own = role.first_node as usize..(role.first_node + role.valid.request.nodes) as usize;
        placement.nodes = placement.nodes.get(own).map(<[_]>::to_vec).unwrap_or_default();
        placement.slices = None;
    }
}
