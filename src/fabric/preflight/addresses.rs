//! How processes find each other: interfaces, and addresses of RoCE ports.

use super::super::gang::Gang;
use super::super::profile::{Carrier, training_ports};
use super::fault::{Fault, NodeFault, Outcome, each, list};
use super::input::{CheckInput, port_name};
use crate::variables::nccl::{self, List};
use crate::variables::{is_interface_list, is_virtual_interface};
use std::collections::BTreeSet;
use switchyard_crds::Framework;
use switchyard_crds::gpu_topology::{GPUTopologyStatus, GidFamily, GidType, Nic};

/// Variables that name interfaces.
const INTERFACES: [&str; 5] = [
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "TP_SOCKET_IFNAME",
    "HOROVOD_GLOO_IFACE",
    "OMPI_MCA_btl_tcp_if_include",
];

/// Check 2: on every node, the interface setting matches an interface that reaches the other nodes.
pub(super) fn interface(input: &CheckInput<'_>) -> Outcome {
    let gang = input.gang;
    if !gang.has_several_nodes() {
        return Err("one node: no peer is looked up on a network".into());
    }
    let mut found = Vec::new();
    for name in INTERFACES {
        // A value that reaches no other node is wrong in any network.
        if let Some(Some(value)) = gang.own.get(name) {
            found.extend(unreachable(name, value).map(Fault::of_job));
        }
    }
    if !gang.uses_host_network() {
        if found.is_empty() {
            return Err("pod network: the interfaces of a pod are created with it, and no report has them".into());
        }
        return Ok(found);
    }
    // If no node has the interface, it can be a bond or VLAN, which the agents do not list. If
    // other nodes have it, it is missing here.
    let exists = |name: &str, value: &str| {
        gang.members.iter().filter_map(|member| member.facts).any(|facts| !matches(name, value, facts).is_empty())
    };
    let outcome = each(gang, |rank, _, facts| {
        let mut faults = Vec::new();
        for name in INTERFACES {
            let Some((value, is_own)) = input.value(name, rank)? else { continue };
            // Open MPI also accepts networks.
            if value.contains('/') || unreachable(name, value).is_some() {
                continue;
            }
            let taken = matches(name, value, facts);
            if taken.is_empty() {
                let known: Vec<&str> = interfaces(facts).into_iter().collect();
                let what = format!("{name}={value} matches no interface");
                let is_elsewhere = exists(name, value);
                let fault = if is_elsewhere { Fault::block(what) } else { Fault::warn(what) };
                let way_out = facts.host.as_ref().and_then(|host| host.default_route.as_deref());
                let here =
                    way_out.map(|way_out| format!("; here the default route leaves by {way_out}")).unwrap_or_default();
                let unsure =
                    if is_elsewhere { "" } else { "; bonds and VLANs other than the default route's are not in it" };
                faults.push(
                    fault
                        .effect("ranks of this node find no interface, and the job does not start")
                        .evidence(format!("nics[] and host.defaultRoute of the GPUTopology: {}{unsure}", list(known)))
                        .fix(format!("delete {name}: it is set for each node by its default route{here}")),
                );
            } else if taken.len() > 1 && is_own && name == "NCCL_SOCKET_IFNAME" && !value.contains(',') {
                faults.push(
                    Fault::warn(format!("{name}={value} matches {}", list(taken.iter().copied())))
                        .effect("NCCL takes the first one, which need not lead to the other nodes")
                        .evidence("nics[] of the GPUTopology")
                        .fix(format!("delete {name}, or write the whole name with `=`")),
                );
            }
        }
        Ok(faults)
    });
    match outcome {
        Ok(faults) => found.extend(faults),
        Err(why) if found.is_empty() => return Err(why),
        Err(_) => {}
    }
    Ok(found)
}

/// Reports a value that matches only interfaces without a route to other nodes.
fn unreachable(name: &str, value: &str) -> Option<Fault> {
    let list = if is_exact(name) { List::of_names(value) } else { List::parse(value) };
    let is_unreachable = |name: &str| name == "lo" || is_virtual_interface(name);
    let mut names = list.names().peekable();
    if list.is_excluding || names.peek().is_none() || !names.all(is_unreachable) {
        return None;
    }
    Some(
        Fault::block(format!("{name}={value} leads to no other node"))
            .effect("ranks of other nodes cannot be reached")
            .evidence("the loopback interface, or one of a container engine or of the pod network's own")
            .fix(format!("delete {name}")),
    )
}

fn is_exact(name: &str) -> bool {
    is_interface_list(name) || name.starts_with("OMPI_")
}

/// Interfaces that the agent knows.
fn interfaces(facts: &GPUTopologyStatus) -> BTreeSet<&str> {
    let way_out = facts.host.as_ref().and_then(|host| host.default_route.as_deref());
    facts.nics.iter().map(|nic| nic.name.as_str()).chain(way_out).collect()
}

fn matches<'a>(name: &str, value: &str, facts: &'a GPUTopologyStatus) -> Vec<&'a str> {
    let list = if is_exact(name) { List::of_names(value) } else { List::parse(value) };
    interfaces(facts).into_iter().filter(|interface| list.matches(interface, None)).collect()
}

/// Check 20: without an interface, Gloo binds to the address of the host name, which can be a
/// loopback address.
pub(super) fn gloo(input: &CheckInput<'_>) -> Outcome {
    let gang = input.gang;
    let uses_gloo = matches!(gang.framework, Framework::Torch | Framework::Plain);
    if !gang.has_several_nodes() || !uses_gloo {
        return Err("Gloo is not used between nodes".into());
    }
    if !gang.uses_host_network() {
        return Err("pod network: the name of a pod means its own address".into());
    }
    let mut ranks = Vec::new();
    for rank in 0..gang.members.len() as u32 {
        // A value from a Secret or a field counts as set.
        if let Ok(None) = input.value("GLOO_SOCKET_IFNAME", rank) {
            ranks.push(rank);
        }
    }
    if ranks.is_empty() {
        return Ok(Vec::new());
    }
    let fault = Fault::block("GLOO_SOCKET_IFNAME is not set, and the interface of the default route is not known")
        .effect("Gloo takes the address of the host's name, often 127.0.1.1: connectFullMesh fails")
        .evidence("spec.hostNetwork; no host.defaultRoute in the GPUTopology")
        .fix("run the node agent there, or set GLOO_SOCKET_IFNAME to the interface that leads to the other nodes");
    Ok(vec![NodeFault { nodes: ranks, fault }])
}

/// The IP family that NCCL looks for on a node.
fn family(input: &CheckInput<'_>, rank: u32) -> Result<GidFamily, String> {
    let value = input.value("NCCL_IB_ADDR_FAMILY", rank)?;
    Ok(if value.is_some_and(|(value, _)| value == "AF_INET6") { GidFamily::IPv6 } else { GidFamily::IPv4 })
}

fn is_roce(gang: &Gang<'_>) -> Result<(), String> {
    match gang.carrier() {
        Some(Carrier::RoCE) => Ok(()),
        _ => Err("no RoCE: addresses of other ports are no IP addresses".into()),
    }
}

/// Check 3: each RoCE port has an address that NCCL can use.
pub(super) fn gid(input: &CheckInput<'_>) -> Outcome {
    input.verbs()?;
    is_roce(input.gang)?;
    each(input.gang, |rank, _, facts| {
        let family = family(input, rank)?;
        let pinned = input.value("NCCL_IB_GID_INDEX", rank)?.and_then(|(value, _)| nccl::number(value));
        let mut faults = Vec::new();
        let mut unsure = false;
        // Ports with the same fault share a finding.
        let mut bad: Vec<(String, String, Vec<String>)> = Vec::new();
        for nic in training_ports(facts) {
            let fault = match pinned.filter(|index| *index >= 0) {
                Some(index) => match at(nic, index) {
                    GidEntry::Good => None,
                    GidEntry::Bad(is) => Some((format!("GID index {index} {is}"), right(nic))),
                    GidEntry::Unknown => {
                        unsure = true;
                        None
                    }
                },
                None => has_v1_only(nic, family).then(|| (format!("no RoCE v2 address of {family:?}"), String::new())),
            };
            let Some((what, right)) = fault else { continue };
            match bad.iter_mut().find(|(known, other, _)| (known, other) == (&what, &right)) {
                Some((_, _, names)) => names.push(port_name(nic)),
                None => bad.push((what, right, vec![port_name(nic)])),
            }
        }
        for (what, right, names) in bad {
            let fix = match pinned {
                Some(_) => "delete NCCL_IB_GID_INDEX: NCCL since 2.21 finds the index for each port",
                None => "set RoCE v2 on the port (cma_roce_mode, or the driver's RoCE mode)",
            };
            faults.push(
                Fault::block(format!("{}: {what}{right}", list(names.iter().map(String::as_str))))
                    .effect("ranks of this node cannot connect, or all fall back to TCP")
                    .evidence(match pinned {
                        Some(index) => format!("NCCL_IB_GID_INDEX={index}; gids of nics[] in the GPUTopology"),
                        None => "gids of nics[] in the GPUTopology".into(),
                    })
                    .fix(fix),
            );
        }
        if faults.is_empty() && unsure {
            return Err("ports have several addresses of a kind, of which the report has the first index only".into());
        }
        Ok(faults)
    })
}

/// Content of the GID table at an index.
enum GidEntry {
    Good,
    Bad(&'static str),
    Unknown,
}

fn at(nic: &Nic, index: i64) -> GidEntry {
    match nic.gids.iter().find(|group| i64::from(group.first_index) == index) {
        Some(group) if group.kind == GidType::RoCEv2 => GidEntry::Good,
        Some(_) => GidEntry::Bad("is RoCE v1"),
        // If every kind has one address, all indices are known.
        None if nic.gids.iter().all(|group| group.count == 1) => GidEntry::Bad("is empty"),
        None => GidEntry::Unknown,
    }
}

/// Describes where the usable addresses of a port are.
fn right(nic: &Nic) -> String {
    let good = nic.gids.iter().filter(|group| group.kind == GidType::RoCEv2);
    let parts: Vec<String> = good
        .map(|group| {
            format!(
                "RoCE v2{} is at index {}",
                group.family.map(|f| format!(" {f:?}")).unwrap_or_default(),
                group.first_index
            )
        })
        .collect();
    if parts.is_empty() { String::new() } else { format!("; {}", parts.join(", ")) }
}

fn has_v1_only(nic: &Nic, family: GidFamily) -> bool {
    let of_family = || nic.gids.iter().filter(|group| group.family == Some(family));
    of_family().next().is_some() && of_family().all(|group| group.kind != GidType::RoCEv2)
}

/// Check 6: a RoCE port has no address if its interface has none.
pub(super) fn without_address(input: &CheckInput<'_>) -> Outcome {
    input.verbs()?;
    is_roce(input.gang)?;
    each(input.gang, |rank, _, facts| {
        let family = family(input, rank)?;
        let has = |nic: &&Nic| nic.gids.iter().any(|group| group.family == Some(family));
        let without: Vec<&Nic> = training_ports(facts).filter(|nic| !has(nic)).collect();
        if without.is_empty() {
            return Ok(Vec::new());
        }
        let names: Vec<String> = without.iter().map(|nic| format!("{} ({})", port_name(nic), nic.name)).collect();
        Ok(vec![
            Fault::block(format!("no {family:?} address on {}", list(names.iter().map(String::as_str))))
                .effect("the port has no address that NCCL can use: ranks cannot connect over it")
                .evidence("gids of nics[] in the GPUTopology")
                .fix(format!("give the interface an {family:?} address, or keep the job off the node")),
        ])
    })
}
