//! The input of a check, and queries that several checks share.

use super::super::gang::{Gang, Member};
use super::super::profile::Carrier;
use super::super::rules::is_for;
use k8s_openapi::api::core::v1::{Container, VolumeMount};
use switchyard_crds::gpu_topology::{GPUTopologyStatus, Gpu, Nic};
use switchyard_crds::{DecisionOutcome, FabricDecision, FabricMode, Transport};

/// A gang and the decisions about it.
pub(super) struct CheckInput<'a> {
    pub gang: &'a Gang<'a>,
    pub decisions: &'a [FabricDecision],
}

impl<'a> CheckInput<'a> {
    /// The training container.
    pub fn trainer(&self) -> Option<&'a Container> {
        self.gang.trainer()
    }

    /// The mount at a path.
    pub fn mount(&self, path: &str) -> Option<&'a VolumeMount> {
        let mounts = self.trainer()?.volume_mounts.as_ref()?;
        mounts.iter().find(|mount| mount.mount_path.trim_end_matches('/') == path)
    }

    /// The trainer's limit for a resource, as written.
    pub fn limit(&self, name: &str) -> Option<&'a str> {
        let limits = self.trainer()?.resources.as_ref()?.limits.as_ref()?;
        limits.get(name).map(|quantity| quantity.0.as_str())
    }

    /// The value of a variable on a node, and whether it is the user's own. `Err` if it comes from
    /// elsewhere, such as a Secret.
    pub fn value(&self, name: &str, rank: u32) -> Result<Option<(&'a str, bool)>, String> {
        match self.gang.own.get(name) {
            Some(Some(value)) => Ok(Some((value, true))),
            Some(None) => Err(format!("the value of {name} is not in the manifest")),
            None => {
                let is_set =
                    |d: &&FabricDecision| d.name == name && d.outcome == DecisionOutcome::Set && is_for(d, rank);
                let decision = self.decisions.iter().find(is_set);
                Ok(decision.and_then(|decision| Some((decision.value.as_deref()?, false))))
            }
        }
    }

    /// Skips the check unless NCCL carries data between nodes over something other than TCP.
    pub fn across(&self) -> Result<(), String> {
        if !self.gang.has_several_nodes() {
            return Err("one node: no data leaves it".into());
        }
        if self.gang.gpus == 0 {
            return Err("no GPUs: NCCL is not used".into());
        }
        if self.gang.mode == FabricMode::Disabled {
            return Err("TCP on purpose (fabric.mode Disabled)".into());
        }
        Ok(())
    }

    /// Skips the check unless NCCL's own RDMA transport can carry data between the nodes.
    pub fn verbs(&self) -> Result<(), String> {
        self.across()?;
        match self.gang.carrier() {
            Some(Carrier::Plugin) => {
                Err("a network plugin carries the data between nodes, not NCCL's own RDMA transport".into())
            }
            Some(Carrier::Socket) => Err("no node has an RDMA port that is up".into()),
            Some(Carrier::InfiniBand | Carrier::RoCE) | None => Ok(()),
        }
    }

    /// Skips the check unless the pods use RDMA devices, with any transport.
    pub fn uses_rdma(&self) -> Result<(), String> {
        self.across()?;
        let is_used = matches!(self.gang.transport(), Some(Transport::RDMA))
            || self.gang.carrier() == Some(Carrier::Plugin) && self.gang.is_granted();
        if is_used { Ok(()) } else { Err("the pods use no RDMA device".into()) }
    }
}

/// The gang's GPUs on a node, or all GPUs of the node if the selection is unknown.
pub(super) fn gpus<'a>(member: &Member<'_>, facts: &'a GPUTopologyStatus) -> Vec<&'a Gpu> {
    facts.gpus.iter().enumerate().filter(|(position, _)| is_of_gang(member, *position)).map(|(_, gpu)| gpu).collect()
}

/// Whether the GPU at this position of the report can belong to the gang.
pub(super) fn is_of_gang(member: &Member<'_>, position: usize) -> bool {
    member.gpus.is_empty() || member.gpus.contains(&position)
}

/// RDMA ports of a node, without virtual functions.
pub(super) fn ports(facts: &GPUTopologyStatus) -> impl Iterator<Item = &Nic> {
    facts.nics.iter().filter(|nic| nic.rdma_device.is_some() && nic.virtual_function_of.is_none())
}

/// Whether the port carries data.
pub(super) fn is_active(nic: &Nic) -> bool {
    nic.state.as_deref() == Some("Active")
}

/// The usual name of a port: `mlx5_2`, `mlx5_2 port 2`.
pub(super) fn port_name(nic: &Nic) -> String {
    let name = nic.rdma_device.as_deref().unwrap_or(&nic.name);
    match nic.port {
        Some(port) if port > 1 => format!("{name} port {port}"),
        _ => name.to_string(),
    }
}

/// Whether a hypervisor hides the PCIe switches: there are several GPUs, and each is directly below
/// a root.
pub(super) fn is_flat(facts: &GPUTopologyStatus) -> bool {
    let mut paths = facts.gpus.iter().map(|gpu| &gpu.pcie_path).filter(|path| !path.is_empty()).peekable();
    facts.gpus.len() > 1 && paths.peek().is_some() && paths.all(|path| path.len() <= 2)
}
