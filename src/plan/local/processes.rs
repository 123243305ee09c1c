//! Turns a ValidJob and its assignment into process specs: argv, environment with a reason for each
//! entry, CPUs, devices. Cannot fail.

use super::devices::{Chosen, PlannedGpu, VISIBLE};
use super::hosts::Hosts;
use super::{LocalSnapshot, Planned};
use crate::job::{EnvEntry, GangPod, ValidJob, communicators, identity};
use serde::Serialize;
use std::collections::BTreeSet;
use std::ops::Range;
use switchyard_core::placement::{Assignment, Mode, Place};
use switchyard_crds::{NodeShape, PlacedNode, PlacementStatus};
use switchyard_topology::cluster::NamedCluster;
use switchyard_worker_contract::config::{EngineConfig, Overlap};
use switchyard_worker_contract::{CpuList, env};

/// All processes of one attempt of a job, with reasons.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LocalPlan {
    /// Name of the job.
    pub job: String,
    /// Attempt number, from 1.
    pub attempt: u32,
    /// Reason for this placement, in one sentence.
    pub reason: String,
    /// Compromises, with numbers.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
    /// The machines of a run on several; `nodes` holds only this one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hosts: Option<Hosts>,
    /// The nodes of the job, in rank order.
    pub nodes: Vec<PlannedNode>,
    /// Parameter servers in processes of their own, counted after the ranks.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub servers: Vec<ProcessSpec>,
    /// The configuration that every rank reads.
    pub engine: EngineConfig,
    /// GPUs chosen for the ranks.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<PlannedGpu>,
    /// Memory limit of a node, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_limit_bytes: Option<u64>,
    /// Maximum number of restarts of the whole group.
    pub max_restarts: u32,
    /// Seconds for a save after a stop request, if the template sets
    /// `terminationGracePeriodSeconds`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grace_seconds: Option<u32>,
}

impl LocalPlan {
    /// All ranks' processes on this machine, in rank order.
    pub fn processes(&self) -> impl Iterator<Item = &ProcessSpec> {
        self.nodes.iter().flat_map(|node| &node.processes)
    }

    /// The ranks on this machine.
    pub fn ranks(&self) -> Range<u32> {
        let first = self.nodes.first().map_or(0, |node| node.first_rank);
        first..first + self.processes().map(|process| process.ranks).sum::<u32>()
    }

    /// Number of ranks of the job.
    pub fn world(&self) -> u32 {
        self.ranks().len() as u32 * self.hosts.as_ref().map_or(1, |hosts| hosts.names.len() as u32)
    }
}

impl Planned for LocalPlan {
    fn attempt(&self) -> u32 {
        self.attempt
    }

    fn placement(&self) -> PlacementStatus {
        PlacementStatus {
            reason: self.reason.clone(),
            nodes: self
                .nodes
                .iter()
                .map(|node| {
                    let mut numa_nodes: Vec<i32> = node
                        .processes
                        .iter()
                        .flat_map(|process| process.numa_nodes.iter().map(|id| *id as i32))
                        .collect();
                    numa_nodes.sort_unstable();
                    numa_nodes.dedup();
                    PlacedNode {
                        first_rank: node.first_rank as i32,
                        node_name: node.node_name.clone(),
                        shape: NodeShape {
                            cpus: node.processes.iter().filter_map(|process| process.cpus.clone()).collect(),
                            numa_nodes,
                            ..NodeShape::default()
                        },
                        ..PlacedNode::default()
                    }
                })
                .collect(),
            ..PlacementStatus::default()
        }
    }
}

/// The part of a job on one node, which would be one pod in a cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PlannedNode {
    /// JOB-ATTEMPT-NODERANK, the name of the corresponding pod in a cluster.
    pub name: String,
    /// Name of the node that it runs on.
    pub node_name: String,
    pub first_rank: u32,
    pub processes: Vec<ProcessSpec>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ProcessSpec {
    /// Global rank, the lowest one if there are several.
    pub rank: u32,
    /// Number of ranks in this process, each on its own device.
    pub ranks: u32,
    /// Program and arguments. The program is found next to `switchyard` or on the PATH.
    pub argv: Vec<String>,
    /// Environment, in the order it is set. A later entry with the same name wins.
    pub env: Vec<EnvEntry>,
    /// CPUs that the process is pinned to, as a kernel CPU list. Absent if it is not pinned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpus: Option<String>,
    /// NUMA nodes of those CPUs.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub numa_nodes: Vec<u32>,
    /// Compute threads of all its ranks together.
    pub threads: u32,
    /// Devices that it computes on.
    pub devices: Vec<Device>,
}

/// A compute device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Device {
    /// The cores it is pinned to.
    Cpu,
}

pub(super) fn processes(
    job: &ValidJob,
    engine: &EngineConfig,
    named: &NamedCluster,
    assignment: &Assignment,
    (snapshot, gpus): (&LocalSnapshot<'_>, Chosen),
) -> LocalPlan {
    let (per_node, per_process) = (job.request.processes_per_node, engine.devices_per_process.max(1));
    let first_node = snapshot.hosts.map_or(0, |hosts| hosts.node_rank);
    let nodes = assignment
        .places
        .chunks(per_node as usize)
        .zip(first_node..)
        .map(|(places, node_rank)| PlannedNode {
            name: job.pod_name(snapshot.attempt, node_rank),
            node_name: named.names[places[0].node.0 as usize].clone(),
            first_rank: node_rank * per_node,
            processes: places
                .chunks(per_process as usize)
                .enumerate()
                .map(|(index, places)| process(job, (snapshot, &gpus), node_rank, index as u32 * per_process, places))
                .collect(),
        })
        .collect();
    // Ranks share one configuration file, so they all use the thread count of the narrowest place.
    let threads = assignment.places.iter().map(|place| place.threads).min().unwrap_or(1);
    let nodes_used = assignment.places.iter().map(|place| place.node).collect::<BTreeSet<_>>().len();
    let hosts = snapshot.hosts.map_or(nodes_used, |hosts| hosts.names.len()) as u32;
    let overlap = Overlap {
        communicators: snapshot.job.spec.engine.as_ref().map_or(1, |engine| communicators(engine, hosts)),
        ..engine.overlap
    };
    LocalPlan {
        job: job.name.clone(),
        attempt: snapshot.attempt,
        reason: reason(job, per_process, named, assignment),
        warnings: assignment.warnings.iter().map(ToString::to_string).collect(),
        hosts: snapshot.hosts.cloned(),
        nodes,
        servers: (0..engine.dedicated_servers()).map(|server| server_process(job, snapshot, server)).collect(),
        engine: EngineConfig { cpu_threads: threads * per_process, overlap, ..engine.clone() },
        gpus: gpus.gpus.into_iter().map(|gpu| PlannedGpu { rank: first_node * per_node + gpu.rank, ..gpu }).collect(),
        memory_limit_bytes: job.memory_limit,
        max_restarts: job.max_restarts,
        grace_seconds: job.pod.spec.termination_grace_period_seconds.and_then(|seconds| u32::try_from(seconds).ok()),
    }
}

/// The process of consecutive ranks, whose places are merged.
fn process(
    job: &ValidJob,
    (snapshot, gpus): (&LocalSnapshot<'_>, &Chosen),
    node_rank: u32,
    local_rank: u32,
    places: &[Place],
) -> ProcessSpec {
    let cpus = CpuList::new(places.iter().flat_map(|place| place.cpus.iter().copied()));
    let mut numa_nodes: Vec<u32> = places.iter().flat_map(|place| place.numa_nodes.iter().copied()).collect();
    numa_nodes.sort_unstable();
    numa_nodes.dedup();
    // Places that share cores cannot have more cores than CPUs.
    let cores = places.iter().map(|place| place.cores).sum::<u32>().min(cpus.len() as u32);
    let cpus = (!cpus.is_empty()).then(|| cpus.to_string());
    let mut env = identity(&GangPod::new(snapshot.job, job, snapshot.attempt, node_rank));
    env.push(EnvEntry::new(env::LOCAL_RANK, local_rank, "position of the process on its node"));
    env.extend(group_variables(snapshot));
    let mut set = |name: &str, value: String, reason: String| env.push(EnvEntry::new(name, value, reason));
    if let Some(cpus) = &cpus {
        let numa: Vec<String> = numa_nodes.iter().map(ToString::to_string).collect();
        let reason = format!("{cores} core{} of NUMA node {}", if cores == 1 { "" } else { "s" }, numa.join(", "));
        set(env::CPUS, cpus.clone(), reason);
    }
    let rank = node_rank * job.request.processes_per_node + local_rank;
    // GPUs are counted on this machine.
    let before = snapshot.hosts.map_or(rank, |_| local_rank);
    let own =
        gpus.gpus.iter().skip(before as usize).take(places.len()).map(|gpu| gpu.uuid.as_str()).collect::<Vec<_>>();
    if !own.is_empty() {
        set(VISIBLE, own.join(","), gpus.reason.clone());
    }
    for (name, value) in &job.env {
        set(name, value.clone(), "spec.trainer.env".into());
    }
    ProcessSpec {
        rank,
        ranks: places.len() as u32,
        argv: vec!["switchyard-worker".into(), "train".into()],
        env,
        cpus,
        numa_nodes,
        threads: places.iter().map(|place| place.threads).sum(),
        devices: vec![Device::Cpu; places.len()],
    }
}

/// A parameter server in a process of its own. It runs on any core, because it computes little.
fn server_process(job: &ValidJob, snapshot: &LocalSnapshot<'_>, server: u32) -> ProcessSpec {
    let mut env = identity(&GangPod::new(snapshot.job, job, snapshot.attempt, 0));
    env.retain(|entry| entry.name != env::NODE_RANK);
    env.push(EnvEntry::new(env::SERVER, server, "number of the parameter server"));
    env.extend(group_variables(snapshot));
    env.extend(job.env.iter().map(|(name, value)| EnvEntry::new(name, value, "spec.trainer.env")));
    ProcessSpec {
        rank: job.request.nodes * job.request.processes_per_node + server,
        ranks: 1,
        argv: vec!["switchyard-worker".into(), "serve".into()],
        env,
        cpus: None,
        numa_nodes: Vec::new(),
        threads: 1,
        devices: vec![Device::Cpu],
    }
}

/// Variables that are the same for all processes of an attempt.
fn group_variables(snapshot: &LocalSnapshot<'_>) -> [EnvEntry; 4] {
    let LocalSnapshot { run_dir, attempt, .. } = *snapshot;
    let listens = match snapshot.hosts {
        Some(_) => "rank 0 listens here: the first of --hosts",
        None => "rank 0 listens here and nowhere else",
    };
    let key = format!("{run_dir}/attempt-{attempt}.key");
    [
        EnvEntry::new(env::RENDEZVOUS, snapshot.rendezvous, listens),
        EnvEntry::new(env::CONFIG, format!("{run_dir}/engine.json"), "engine configuration, the same for every rank"),
        EnvEntry::new(env::KEY_FILE, key, "token of this attempt, readable by its owner only"),
        EnvEntry::new(env::RUN_DIR, run_dir, "where the trained model goes"),
    ]
}

/// Reason for this placement, in one sentence.
fn reason(job: &ValidJob, per_process: u32, named: &NamedCluster, assignment: &Assignment) -> String {
    let world = assignment.places.len();
    let processes = match world / per_process as usize {
        1 if world > 1 => format!("{world} ranks in 1 process"),
        count if count < world => format!("{world} ranks in {count} processes"),
        1 => "1 process".to_string(),
        count => format!("{count} processes"),
    };
    if job.request.mode == Mode::Ignored {
        return format!("{processes}, not pinned: topologyPolicy.mode is Ignored");
    }
    let cores: usize = named.cluster.nodes.iter().map(switchyard_core::model::Node::cores).sum();
    let numa: usize = named.cluster.nodes.iter().map(|node| node.numa_nodes.len()).sum();
    let narrowest = assignment.places.iter().map(|place| place.cores).min().unwrap_or(0);
    let widest = assignment.places.iter().map(|place| place.cores).max().unwrap_or(0);
    let width = if narrowest == widest { format!("{widest}") } else { format!("{narrowest} to {widest}") };
    let own = if assignment
        .warnings
        .iter()
        .any(|warning| matches!(warning, switchyard_core::placement::Warning::Oversubscribed { .. }))
    {
        "shared"
    } else {
        "of its own"
    };
    let inside = if assignment.places.iter().all(|place| place.numa_nodes.len() <= 1) {
        "inside one NUMA node"
    } else {
        "across NUMA nodes"
    };
    format!(
        "{processes}, each with {width} core{} {own} {inside}, out of {cores} core{} in {numa} NUMA node{}",
        if width == "1" { "" } else { "s" },
        if cores == 1 { "" } else { "s" },
        if numa == 1 { "" } else { "s" },
    )
}
