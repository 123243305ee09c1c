//! Transport between nodes: network, adapters, addresses.

use super::super::gang::Gang;
use super::super::profile::{Carrier, training_ports};
use super::{Outcome, leave, section, set};
use switchyard_core::units::plural;
use switchyard_crds::gpu_topology::{GPUTopologyStatus, GidFamily, GidType};
use switchyard_crds::{FabricMode, Framework};

pub(super) fn net(gang: &Gang<'_>) -> Outcome {
    if gang.mode != FabricMode::Required {
        return leave("NCCL takes a plugin, else InfiniBand or RoCE, else TCP", format!("fabric.mode {:?}", gang.mode));
    }
    let reason = "NCCL fails where it would fall back to TCP without a word";
    match gang.carrier() {
        Some(Carrier::Plugin) => {
            let profile = gang.profile.and_then(|profile| Some((profile.plugin.as_deref()?, profile.name.as_str())));
            let (plugin, profile) = profile.unwrap_or_default();
            set(plugin, reason, format!("fabric.mode Required; profile {profile}"))
        }
        _ => set("IB", reason, "fabric.mode Required; RDMA ports of all nodes are up, in nics[] of the GPUTopology"),
    }
}

pub(super) fn ib_disable(gang: &Gang<'_>) -> Outcome {
    if gang.mode == FabricMode::Disabled {
        return set("1", "the job asks for TCP", "fabric.mode Disabled");
    }
    match gang.carrier() {
        Some(carrier) if carrier.is_verbs() && !gang.is_granted() => set(
            "1",
            "the pods see the adapters of their node but may not open them, and NCCL would stop or warn at each",
            "no resource of the trainer gives an RDMA device",
        ),
        Some(Carrier::Socket) => {
            leave("there is nothing to turn off", "no RDMA port in nics[] of the GPUTopology is up")
        }
        _ => leave("1 is no remedy for a hang: it trades it for TCP", section("NCCL_IB_DISABLE")),
    }
}

/// Facts of a node, or the outcome for a node without facts.
fn known<'a>(gang: &'a Gang<'_>, rank: u32) -> Result<&'a GPUTopologyStatus, Outcome> {
    let unknown = || leave("nothing is known of the node", "no GPUTopology that can be used");
    gang.members[rank as usize].facts.ok_or_else(unknown)
}

pub(super) fn hca(gang: &Gang<'_>, rank: u32) -> Outcome {
    let facts = match known(gang, rank) {
        Ok(facts) => facts,
        Err(outcome) => return outcome,
    };
    if !gang.carrier().is_some_and(Carrier::is_verbs) {
        return leave(
            "data does not go over InfiniBand or RoCE",
            "nics[] of the GPUTopology, fabric.mode and the profile",
        );
    }
    let good: Vec<&str> = training_ports(facts).filter_map(|nic| nic.rdma_device.as_deref()).collect();
    let others = facts.nics.iter().filter(|nic| nic.rdma_device.as_deref().is_some_and(|name| !good.contains(&name)));
    let others: Vec<String> = others
        .map(|nic| {
            let name = nic.rdma_device.as_deref().unwrap_or_default();
            let what = match (&nic.virtual_function_of, nic.state.as_deref(), nic.link_layer.as_deref()) {
                (Some(_), ..) => "a virtual function",
                (None, Some(state), _) if state != "Active" => state,
                (None, _, Some(layer)) if !good.is_empty() => layer,
                _ => "slower",
            };
            format!("{name} ({what})")
        })
        .collect();
    if good.is_empty() || others.is_empty() {
        let count = good.len();
        let evidence =
            format!("nics[] of the GPUTopology: {count} RDMA port{} up and alike, no other", plural(count as u64));
        return leave("every adapter of the node is for training", evidence);
    }
    let port = |name: &&str| {
        let nic = facts.nics.iter().find(|nic| nic.rdma_device.as_deref() == Some(name));
        format!("{name}:{}", nic.and_then(|nic| nic.port).unwrap_or(1))
    };
    let list: Vec<String> = good.iter().map(port).collect();
    set(
        format!("={}", list.join(",")),
        "NCCL would also use adapters that are not for training; `=` since mlx5_1 would match mlx5_10 too",
        format!("nics[] of the GPUTopology: beside them {}", others.join(", ")),
    )
}

/// RoCE v2 addresses of the training ports: the number of ports with at least one of this family,
/// and the highest number on one port.
fn addresses(facts: &GPUTopologyStatus, family: GidFamily) -> (usize, u32) {
    let of_port = |gids: &[switchyard_crds::gpu_topology::GidGroup]| {
        let of = gids.iter().filter(|group| group.kind == GidType::RoCEv2 && group.family == Some(family));
        of.map(|group| group.count).sum::<u32>()
    };
    let counts: Vec<u32> = training_ports(facts).map(|nic| of_port(&nic.gids)).collect();
    (counts.iter().filter(|count| **count > 0).count(), counts.into_iter().max().unwrap_or(0))
}

/// The node's facts, if its ports are RoCE.
fn roce<'a>(gang: &'a Gang<'_>, rank: u32) -> Result<&'a GPUTopologyStatus, Outcome> {
    let facts = known(gang, rank)?;
    if gang.carrier() == Some(Carrier::RoCE) {
        return Ok(facts);
    }
    Err(leave("addresses of ports are for RoCE only", "linkLayer in nics[] of the GPUTopology"))
}

pub(super) fn address_family(gang: &Gang<'_>, rank: u32) -> Outcome {
    let facts = match roce(gang, rank) {
        Ok(facts) => facts,
        Err(outcome) => return outcome,
    };
    let ports = training_ports(facts).count();
    match (addresses(facts, GidFamily::IPv4).0, addresses(facts, GidFamily::IPv6).0) {
        (0, 1..) => set(
            "AF_INET6",
            "NCCL looks for an IPv4 address by default, and there is none",
            format!(
                "nics[].gids of the GPUTopology: {ports} port{} with RoCE v2 addresses of IPv6 only",
                plural(ports as u64)
            ),
        ),
        (0, 0) => leave("no port has an address of RoCE v2", "nics[].gids of the GPUTopology"),
        (v4, _) => leave(
            "NCCL looks for an IPv4 address by default",
            format!("nics[].gids of the GPUTopology: {v4} of {ports} port{} have one", plural(ports as u64)),
        ),
    }
}

pub(super) fn gid_index(gang: &Gang<'_>, rank: u32) -> Outcome {
    let indices = known(gang, rank).map(|facts| {
        let of_port = |nic: &switchyard_crds::gpu_topology::Nic| {
            let group = nic.gids.iter().find(|group| group.kind == GidType::RoCEv2);
            Some(format!("{} {}", nic.rdma_device.as_deref()?, group?.first_index))
        };
        training_ports(facts).filter_map(of_port).collect::<Vec<_>>()
    });
    let evidence = match indices {
        Ok(indices) if !indices.is_empty() => {
            format!("nics[].gids of the GPUTopology: first RoCE v2 index on the node by port: {}", indices.join(", "))
        }
        _ => "NCCL's user guide: since 2.21 it should not be set".to_string(),
    };
    leave(
        "since 2.21 NCCL finds the index by itself, port by port; inside a pod it differs from that of the node",
        evidence,
    )
}

pub(super) fn address_range(gang: &Gang<'_>, rank: u32) -> Outcome {
    let facts = match roce(gang, rank) {
        Ok(facts) => facts,
        Err(outcome) => return outcome,
    };
    let most = addresses(facts, GidFamily::IPv4).1.max(addresses(facts, GidFamily::IPv6).1);
    let evidence = format!(
        "nics[].gids of the GPUTopology: at most {most} RoCE v2 address{} of a family on a port",
        if most == 1 { "" } else { "es" }
    );
    if most > 1 {
        return leave(
            "a port has several addresses, and which one leads to the others only a profile can say",
            evidence,
        );
    }
    leave("there is nothing to choose", evidence)
}

pub(super) fn debug(gang: &Gang<'_>) -> Outcome {
    if gang.framework == Framework::Switchyard {
        let reason = "the engine sets INFO for INIT, NET, P2P and SHM itself, so that its log shows what NCCL chose";
        return leave(reason, section("NCCL_DEBUG"));
    }
    set(
        "WARN",
        "NCCL says why it fails, and nothing else",
        format!("{}; fabric.mode {:?}", section("NCCL_DEBUG"), gang.mode),
    )
}

pub(super) fn switch_queue(gang: &Gang<'_>) -> Outcome {
    let by =
        gang.profile.map_or("no profile fits the nodes".to_string(), |profile| format!("profile {}", profile.name));
    match gang.carrier() {
        Some(Carrier::RoCE) => leave(
            "it has to match the lossless queue that the switches are configured with; an administrator's profile names it",
            format!("{by} does not say it"),
        ),
        _ => leave("it is for the queues of RoCE switches", by),
    }
}

pub(super) fn topology_file(gang: &Gang<'_>, rank: u32) -> Outcome {
    let facts = match known(gang, rank) {
        Ok(facts) => facts,
        Err(outcome) => return outcome,
    };
    // A hypervisor that hides the switches puts every device directly below the root.
    let is_flat = |path: &Vec<String>| path.len() <= 2;
    let paths: Vec<&Vec<String>> =
        facts.gpus.iter().map(|gpu| &gpu.pcie_path).filter(|path| !path.is_empty()).collect();
    let count = paths.len();
    if count > 1 && paths.into_iter().all(is_flat) {
        return leave(
            "the machine looks like a guest whose PCIe tree is hidden: the cloud's file, if there is one, comes with the image",
            format!("gpus[].pciePath of the GPUTopology: {count} GPUs directly below a root"),
        );
    }
    leave(
        "NCCL reads the same tree from sysfs, and a file that is old would win over it",
        "gpus[].pciePath of the GPUTopology",
    )
}
