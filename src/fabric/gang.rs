//! The chosen gang as the rules see it: what its pods request, and the facts about its nodes.

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
    /// What its agent reports; `None`: nothing usable.
    pub facts: Option<&'a GPUTopologyStatus>,
    /// Why there are no facts, or that they are old; empty: neither.
    pub silence: &'a str,
    /// The facts have not been renewed for too long.
    pub is_old: bool,
    /// Positions of the GPUs in the report, in the order of ranks.
    pub gpus: &'a [usize],
    /// Resources that it offers.
    pub allocatable: &'a Resources,
}

/// Whether pods claim a channel of a ComputeDomain, without which no GPU may use the memory of another node over NVLink. Which device a claim's
/// template is for is not known here: every claim made from a template counts.
pub fn claims_channel(pod: &PodSpec) -> bool {
    pod.resource_claims.iter().flatten().any(|claim| claim.resource_claim_template_name.is_some())
}

/// A gang with its placement.
#[derive(Debug, Clone)]
pub struct Gang<'a> {
    /// What runs in the trainer.
    pub framework: Framework,
    /// What may carry data between nodes.
    pub mode: FabricMode,
    /// The pod of the first node.
    pub pod: &'a PodSpec,
    /// The user's own environment of the trainer: name to value, where it is a plain value.
    pub own: BTreeMap<&'a str, Option<&'a str>>,
    /// GPUs of each pod.
    pub gpus: u32,
    /// Processes of each pod.
    pub processes: u32,
    /// The nodes, by rank.
    pub members: Vec<Member<'a>>,
    /// Data pack or administrator's profile; `None`: the nodes fit none.
    pub profile: Option<&'a Profile>,
    /// When the placement was decided.
    pub now: Timestamp,
}

impl<'a> Gang<'a> {
    /// The container that trains.
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

    /// What carries data between the nodes, from the profile, else from the ports of all nodes.
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

    /// Whether RDMA devices are given to the pods: by a resource that the trainer asks for, or because a privileged container sees all.
    pub fn is_granted(&self) -> bool {
        let Some(trainer) = self.trainer() else { return false };
        let privileged = trainer.security_context.as_ref().is_some_and(|context| context.privileged == Some(true));
        let limits = trainer.resources.as_ref().and_then(|resources| resources.limits.as_ref());
        privileged || limits.into_iter().flatten().any(|(name, _)| is_rdma_resource(name))
    }

    /// The transport that will carry data, as far as known.
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

    /// Whether NVLinks lead from each node to every other: all are of one clique.
    fn shares_nvlink(&self) -> bool {
        let clique = |member: &Member<'_>| {
            let fabric = member.facts?.fabric.as_ref().filter(|fabric| fabric.state == FabricState::Completed)?;
            Some((fabric.cluster_uuid.clone()?, fabric.clique_id?))
        };
        let mut cliques = self.members.iter().map(clique);
        cliques.next().flatten().is_some_and(|first| cliques.all(|clique| clique.as_ref() == Some(&first)))
    }

    /// Nodes in words, from their ranks: `gpu-01`, or `gpu-01 and 3 more`.
    pub fn names(&self, ranks: &[u32]) -> String {
        let name = |rank: &u32| self.members[*rank as usize].name;
        match ranks {
            [] => "no node".into(),
            [only] => name(only).to_string(),
            [first, rest @ ..] => format!("{} and {} more", name(first), rest.len()),
        }
    }

    /// Ranks as a list; `None`: all of them.
    pub fn list(&self, ranks: &[u32]) -> Option<String> {
        (ranks.len() < self.members.len()).then(|| CpuList::new(ranks.iter().copied()).to_string())
    }
}

/// Names of resources that give RDMA devices: of the shared device plugin, of SR-IOV plugins, of EFA.
pub fn is_rdma_resource(name: &str) -> bool {
    name.starts_with("rdma/")
        || name == "vpc.amazonaws.com/efa"
        || name.starts_with("openshift.io/mlnx")
        || name.strip_prefix("nvidia.com/").is_some_and(|rest| {
            ["sriov", "hostdev", "mlnx", "rdma", "resibp", "resrdma"].iter().any(|begin| rest.starts_with(begin))
        })
}

/// A report without what is specific to one machine (identities, times, users), so that machines of one kind share it. GPUs have the names of
/// their positions.
pub fn facts(status: &GPUTopologyStatus) -> GPUTopologyStatus {
    let mut facts = status.clone();
    facts.observed_time = None;
    facts.host_identity = None;
    facts.in_use.clear();
    // The preflight reports contradictions; when they began is specific to the node.
    facts.conditions.retain(|condition| condition.type_ == CONSISTENT && condition.status == "False");
    facts.conditions.iter_mut().for_each(|condition| condition.last_transition_time = Time(Timestamp::UNIX_EPOCH));
    let position =
        |uuid: &str| status.gpus.iter().position(|gpu| gpu.uuid == uuid).map(|position| position.to_string());
    for link in &mut facts.links {
        for end in [&mut link.a, &mut link.b] {
            // A name that no GPU has stays, so that readers of the devices can report it.
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
