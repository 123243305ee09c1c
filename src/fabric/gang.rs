//! The chosen gang as the rules see it: the requests of its pods, and the facts about its nodes.

use super::profile::{Carrier, LinkLayer, Profile, link_layer};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container, PodSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use std::collections::BTreeMap;
use switchyard_core::quantity::Resources;
use switchyard_crds::conditions::topology::CONSISTENT;
use switchyard_crds::gpu_topology::{FabricState, GPUTopologyStatus};
use switchyard_crds::{FabricMode, Framework, Transport};
use switchyard_worker_contract::CpuList;

/// A node of the gang.
#[derive(Debug, Clone, Copy)]
pub struct Member<'a> {
    pub name: &'a str,
    /// Report of its agent; `None` if there is no usable report.
    pub facts: Option<&'a GPUTopologyStatus>,
    /// Why the facts are missing or stale; empty if they are neither.
    pub silence: &'a str,
    /// Whether the facts are overdue for an update.
    pub is_old: bool,
    /// Positions of the GPUs in the report, in rank order.
    pub gpus: &'a [usize],
    /// Resources that the node offers.
    pub allocatable: &'a Resources,
}

/// Whether pods claim a channel of a ComputeDomain, without which no GPU can access another node's
/// memory over NVLink. The device class of a claim template is unknown here, so every claim made
/// from a template counts.
pub fn claims_channel(pod: &PodSpec) -> bool {
    pod.resource_claims.iter().flatten().any(|claim| claim.resource_claim_template_name.is_some())
}

/// A gang with its placement.
#[derive(Debug, Clone)]
pub struct Gang<'a> {
    /// Framework that runs in the trainer.
    pub framework: Framework,
    /// Allowed transports between nodes.
    pub mode: FabricMode,
    /// Pod of the first node.
    pub pod: &'a PodSpec,
    /// The trainer's environment as the user set it; the value is `None` unless it is a plain
    /// value.
    pub own: BTreeMap<&'a str, Option<&'a str>>,
    /// GPUs per pod.
    pub gpus: u32,
    /// Processes per pod.
    pub processes: u32,
    /// Nodes by rank.
    pub members: Vec<Member<'a>>,
    /// Built-in pack or administrator's profile; `None` if the nodes match none.
    pub profile: Option<&'a Profile>,
    /// Time of the placement decision.
    pub now: Timestamp,
}

impl<'a> Gang<'a> {
    /// The training container.
    pub fn trainer(&self) -> Option<&'a Container> {
        self.pod.containers.iter().find(|container| container.name == switchyard_crds::names::TRAINER)
    }

    /// Whether pods use the network of their node.
    pub fn uses_host_network(&self) -> bool {
        self.pod.host_network == Some(true)
    }

    /// Whether data leaves a node.
    pub fn has_several_nodes(&self) -> bool {
        self.members.len() > 1
    }

    /// Carrier between the nodes, from the profile if it names one, otherwise from the ports of all
    /// nodes.
    pub fn carrier(&self) -> Option<Carrier> {
        if self.mode == FabricMode::Disabled {
            return Some(Carrier::Socket);
        }
        if let Some(carrier) = self.profile.and_then(|profile| profile.transport) {
            return Some(carrier);
        }
        let mut layers = self.members.iter().map(|member| member.facts.and_then(link_layer));
        let first = layers.next()??;
        let carrier = match first {
            LinkLayer::InfiniBand => Carrier::InfiniBand,
            LinkLayer::Ethernet => Carrier::RoCE,
            LinkLayer::None => Carrier::Socket,
        };
        layers.all(|layer| layer == Some(first)).then_some(carrier)
    }

    /// Whether the pods get RDMA devices: through a resource that the trainer requests, or because
    /// a privileged container sees all devices.
    pub fn is_granted(&self) -> bool {
        let Some(trainer) = self.trainer() else { return false };
        let privileged = trainer.security_context.as_ref().is_some_and(|context| context.privileged == Some(true));
        let limits = trainer.resources.as_ref().and_then(|resources| resources.limits.as_ref());
        privileged || limits.into_iter().flatten().any(|(name, _)| is_rdma_resource(name))
    }

    /// The transport between nodes, as far as known.
    pub fn transport(&self) -> Option<Transport> {
        if !self.has_several_nodes() {
            return None;
        }
        if self.gpus == 0 {
            return Some(Transport::TCP);
        }
        if self.mode != FabricMode::Disabled && self.shares_nvlink() {
            return Some(Transport::NVLink);
        }
        Some(match self.carrier()? {
            Carrier::Plugin => Transport::Plugin,
            Carrier::InfiniBand | Carrier::RoCE if self.is_granted() => Transport::RDMA,
            Carrier::InfiniBand | Carrier::RoCE | Carrier::Socket => Transport::TCP,
        })
    }

    /// Whether NVLink connects every pair of nodes: all are in one clique.
    fn shares_nvlink(&self) -> bool {
        let clique = |member: &Member<'_>| {
            let fabric = member.facts?.fabric.as_ref().filter(|fabric| fabric.state == FabricState::Completed)?;
            Some((fabric.cluster_uuid.clone()?, fabric.clique_id?))
        };
        let mut cliques = self.members.iter().map(clique);
        cliques.next().flatten().is_some_and(|first| cliques.all(|clique| clique.as_ref() == Some(&first)))
    }

    /// Formats nodes by rank: `gpu-01`, or `gpu-01 and 3 more`.
    pub fn names(&self, ranks: &[u32]) -> String {
        let name = |rank: &u32| self.members[*rank as usize].name;
        match ranks {
            [] => "no node".into(),
            [only] => name(only).to_string(),
            [first, rest @ ..] => format!("{} and {} more", name(first), rest.len()),
        }
    }

    /// Formats ranks as a list; `None` if it contains all of them.
    pub fn list(&self, ranks: &[u32]) -> Option<String> {
        (ranks.len() < self.members.len()).then(|| CpuList::new(ranks.iter().copied()).to_string())
    }
}

/// Whether a resource provides RDMA devices: from the shared device plugin, SR-IOV plugins, or EFA.
pub fn is_rdma_resource(name: &str) -> bool {
    name.starts_with("rdma/")
        || name == "vpc.amazonaws.com/efa"
        || name.starts_with("openshift.io/mlnx")
        || name.strip_prefix("nvidia.com/").is_some_and(|rest| {
            ["sriov", "hostdev", "mlnx", "rdma", "resibp", "resrdma"].iter().any(|begin| rest.starts_with(begin))
        })
}

/// Strips a report of machine-specific data (identities, times, users), so that machines of one
/// kind share it. GPUs are named by position.
pub fn facts(status: &GPUTopologyStatus) -> GPUTopologyStatus {
    let mut facts = status.clone();
    facts.observed_time = None;
    facts.host_identity = None;
    facts.in_use.clear();
    // The preflight reports contradictions. Their start time is machine-specific.
    facts.conditions.retain(|condition| condition.type_ == CONSISTENT && condition.status == "False");
    facts.conditions.iter_mut().for_each(|condition| condition.last_transition_time = Time(Timestamp::UNIX_EPOCH));
    let position =
        |uuid: &str| status.gpus.iter().position(|gpu| gpu.uuid == uuid).map(|position| position.to_string());
    for link in &mut facts.links {
        for end in [&mut link.a, &mut link.b] {
            // Keep a name that no GPU has, so that readers of the devices can report it.
            *end = position(end).unwrap_or_else(|| end.clone());
        }
    }
    for (position, gpu) in facts.gpus.iter_mut().enumerate() {
        gpu.uuid = position.to_string();
    }
    for nic in &mut facts.nics {
        nic.node_guid = None;
        nic.port_watch.iter_mut().for_each(|watch| watch.since = None);
    }
    facts
}
