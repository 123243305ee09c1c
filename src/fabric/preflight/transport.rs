//! Transport between nodes: RDMA devices of the pods, uniform ports, and stable links.

use super::super::gang::{Gang, is_rdma_resource};
use super::super::profile::{Carrier, LinkLayer, link_layer, training_ports};
use super::fault::{Fault, Outcome, differences, each, list};
use super::input::{CheckInput, is_active, port_name, ports};
use crate::variables::nccl::List;
use jiff::{SignedDuration, Timestamp};
use std::collections::{BTreeMap, BTreeSet};
use switchyard_core::units::{counted, speed};
use switchyard_crds::gpu_topology::{FileState, GPUTopologyStatus, Nic};
use switchyard_crds::names::GPU_RESOURCE;
use switchyard_crds::{PreflightSeverity, Transport};

/// Only events within this time before the placement count.
const RECENT: SignedDuration = SignedDuration::from_hours(1);

/// Check 1: RDMA is available, and the pods get it.
pub(super) fn granted(input: &CheckInput<'_>) -> Outcome {
    input.across()?;
    let gang = input.gang;
    if gang.transport() == Some(Transport::NVLink) {
        return Err("NVLink carries the data between the nodes".into());
    }
    if gang.carrier() == Some(Carrier::Plugin) {
        return plugin(gang);
    }
    let layers: BTreeSet<&str> = gang.members.iter().filter_map(|member| link_layer(member.facts?).map(word)).collect();
    if gang.members.iter().all(|member| member.facts.is_none_or(|facts| ports(facts).next().is_none())) {
        return Err("no node that reports has an RDMA device".into());
    }
    let effect = "NCCL falls back to TCP without an error";
    let of_nodes = each(gang, |_, _, facts| {
        let all = ports(facts).count();
        if training_ports(facts).next().is_some() {
            return Ok(Vec::new());
        }
        let what = if all > 0 {
            format!("none of {} is Active", counted(all as u64, "RDMA port"))
        } else {
            "no RDMA device".into()
        };
        Ok(vec![
            Fault::block(what)
                .effect(effect)
                .evidence("state of nics[] in the GPUTopology")
                .fix("mend the cables, drivers or switch ports there, or keep the job off the node; fabric.mode Disabled if TCP is wanted"),
        ])
    });
    // A node without a report must not hide faults of the job.
    let (mut found, unknown) = match of_nodes {
        Ok(found) => (found, None),
        Err(why) => (Vec::new(), Some(why)),
    };
    if layers.iter().filter(|layer| **layer != word(LinkLayer::None)).count() > 1 {
        let differ =
            differences(gang, |_, facts| link_layer(facts).map(|layer| word(layer).to_string())).unwrap_or_default();
        let fault = Fault::block(format!("the nodes have different fabrics: {differ}"))
            .effect("InfiniBand and RoCE do not reach each other: NCCL falls back to TCP, or fails")
            .evidence("linkLayer of nics[] in the GPUTopology")
            .fix("restrict the job to nodes of one kind, by a nodeSelector or a topology domain");
        found.push(fault.of_job());
    } else if !gang.is_granted() && found.len() < gang.members.len() {
        found.push(not_granted(gang).effect(effect).of_job());
    }
    match unknown {
        Some(why) if found.is_empty() => Err(why),
        _ => Ok(found),
    }
}

fn word(layer: LinkLayer) -> &'static str {
    match layer {
        LinkLayer::InfiniBand => "InfiniBand",
        LinkLayer::Ethernet => "RoCE",
        LinkLayer::None => "no RDMA",
    }
}

fn plugin(gang: &Gang<'_>) -> Outcome {
    let rules = gang.profile.iter().flat_map(|profile| &profile.resources);
    let Some(rule) = rules.into_iter().find(|rule| is_rdma_resource(rule.name.trim_end_matches('*'))) else {
        return Err("the network plugin takes no device of the pod".into());
    };
    if gang.is_granted() {
        return Ok(Vec::new());
    }
    let fault = Fault::block(format!("the network plugin needs {}, and the pods ask for none", rule.name))
        .effect("the plugin finds no device, and NCCL falls back to TCP without an error")
        .evidence(format!("limits of the trainer: {}", limits(gang)))
        .fix(format!("add {} to trainer.resourcesPerNode.limits", rule.name));
    Ok(vec![fault.of_job()])
}

fn not_granted(gang: &Gang<'_>) -> Fault {
    let known = gang.members.iter().find_map(|member| training_ports(member.facts?).next().map(|nic| (member, nic)));
    let (count, rate) = known.map_or((0, None), |(member, nic)| {
        (member.facts.map_or(0, |facts| training_ports(facts).count()), nic.rate_megabits_per_second)
    });
    let of = rate.map(|rate| format!(" of {}", speed(rate))).unwrap_or_default();
    let offered: BTreeSet<&str> = gang
        .members
        .iter()
        .flat_map(|member| member.allocatable.names())
        .filter(|name| is_rdma_resource(name))
        .collect();
    let fix = match offered.first() {
        Some(name) => format!("add {name}: \"1\" to trainer.resourcesPerNode.limits"),
        None => "install an RDMA device plugin on the nodes and name its resource in trainer.resourcesPerNode.limits, \
                 or say fabric.mode Disabled if TCP is wanted"
            .into(),
    };
    Fault::block(format!("nodes have {}{of}, but the pods ask for none", counted(count as u64, "RDMA port")))
        .evidence(format!("limits of the trainer: {}; nics[] in the GPUTopology", limits(gang)))
        .fix(fix)
}

fn limits(gang: &Gang<'_>) -> String {
    let limits = gang.trainer().and_then(|trainer| trainer.resources.as_ref()?.limits.as_ref());
    let names: Vec<&str> = limits.into_iter().flatten().map(|(name, _)| name.as_str()).collect();
    let devices: Vec<&str> = names.into_iter().filter(|name| name.contains('/') && *name != GPU_RESOURCE).collect();
    if devices.is_empty() { "no device but GPUs".into() } else { devices.join(", ") }
}

/// Check 4: ports of one gang have one MTU and one rate, and no growing error counters.
pub(super) fn uniform(input: &CheckInput<'_>) -> Outcome {
    input.verbs()?;
    let gang = input.gang;
    let of_ports = |facts: &GPUTopologyStatus, value: &dyn Fn(&Nic) -> Option<String>| {
        let values: BTreeSet<String> = training_ports(facts).filter_map(value).collect();
        (!values.is_empty()).then(|| values.into_iter().collect::<Vec<_>>().join(" and "))
    };
    let mut found = Vec::new();
    let mtu = |nic: &Nic| nic.mtu_bytes.map(|mtu| mtu.to_string());
    if let Some(differ) = differences(gang, |_, facts| of_ports(facts, &mtu)) {
        let fault = Fault::warn(format!("MTU of the RDMA ports: {differ}"))
            .effect("packets that are too long are dropped: \"got completion with error 12\"")
            .evidence(
                "mtuBytes of nics[] in the GPUTopology, which is the interface's; the port's active MTU is not read",
            )
            .fix("set one MTU on the ports and on the switches between them");
        found.push(fault.of_job());
    }
    // A port that came up slower than the others is not a training port, so this compares all ports
    // that are up.
    let rates = |facts: &GPUTopologyStatus| {
        let mut counts: BTreeMap<u64, u32> = BTreeMap::new();
        let layer = training_ports(facts).next()?.link_layer.clone();
        let up = ports(facts).filter(|nic| is_active(nic) && nic.link_layer == layer);
        up.filter_map(|nic| nic.rate_megabits_per_second).for_each(|rate| *counts.entry(rate).or_default() += 1);
        let parts = counts.iter().rev().map(|(rate, count)| format!("{count} x {} Gbit/s", rate / 1000));
        (!counts.is_empty()).then(|| parts.collect::<Vec<_>>().join(" and "))
    };
    if let Some(differ) = differences(gang, |_, facts| rates(facts)) {
        let fault = Fault::warn(format!("RDMA ports that are up: {differ}"))
            .effect("the slowest node sets the pace of every collective")
            .evidence("rateMegabitsPerSecond of nics[] in the GPUTopology")
            .fix("mend the port that is down or came up slower: cable, transceiver, switch port");
        found.push(fault.of_job());
    }
    let errors = each(gang, |_, _, facts| {
        if training_ports(facts).all(|nic| nic.mtu_bytes.is_none()) {
            return Err("mtuBytes of nics[] is not reported".into());
        }
        if training_ports(facts).all(|nic| nic.port_watch.is_none()) {
            return Err("portWatch of nics[] is not reported; MTU and rates agree".into());
        }
        let grow = |nic: &&Nic| {
            let last = nic.port_watch.as_ref().and_then(|watch| watch.last_error.as_ref());
            last.is_some_and(|at| is_recent(at.0, gang.now))
        };
        let fault = |nic: &Nic| {
            let counters = nic.port_watch.as_ref().map(|watch| watch.errors.join(", ")).unwrap_or_default();
            Fault::warn(format!("errors of {} grow: {counters}", port_name(nic)))
                .effect("packets are sent again, and the queue pair may give up: \"error 12\"")
                .evidence("portWatch of nics[] in the GPUTopology, within the last hour")
                .fix("check cable and transceiver of that port, and the counters of its switch port")
        };
        Ok(training_ports(facts).filter(grow).map(fault).collect())
    });
    match errors {
        Ok(errors) => found.extend(errors),
        Err(why) if found.is_empty() => return Err(why),
        Err(_) => {}
    }
    Ok(found)
}

fn is_recent(at: Timestamp, now: Timestamp) -> bool {
    now.duration_since(at) <= RECENT
}

/// Check 5: the list of RDMA devices matches ports that can carry data.
pub(super) fn adapters(input: &CheckInput<'_>) -> Outcome {
    input.verbs()?;
    each(input.gang, |rank, _, facts| {
        let value = input.value("NCCL_IB_HCA", rank)?;
        let mut faults = Vec::new();
        let taken: Vec<&Nic> = match value {
            Some((value, _)) => {
                let list = List::parse(value);
                ports(facts)
                    .filter(|nic| list.matches(nic.rdma_device.as_deref().unwrap_or_default(), nic.port))
                    .collect()
            }
            None => training_ports(facts).collect(),
        };
        if let Some((value, _)) = value {
            faults.extend(expansion(value, &taken, facts));
        }
        // An agent that finds no device reports none. A report from elsewhere does not know.
        let is_without = |nic: &&&Nic| match &nic.char_device {
            Some(device) => device.state == FileState::Missing,
            None => facts.agent_version.is_some(),
        };
        let without: Vec<String> = taken.iter().filter(is_without).map(|nic| port_name(nic)).collect();
        if !without.is_empty() {
            faults.push(
                Fault::block(format!("no character device for {}", list(without.iter().map(String::as_str))))
                    .effect("programs cannot open the device")
                    .evidence("charDevice of nics[] in the GPUTopology: Missing, or none")
                    .fix("load ib_uverbs there (modprobe ib_uverbs), and restart the RDMA device plugin"),
            );
        }
        if faults.is_empty() && taken.iter().any(|nic| nic.char_device.is_none()) {
            return Err("charDevice of nics[] is not reported".into());
        }
        Ok(faults)
    })
}

/// The fault of the ports that a list matches, if any.
fn expansion(value: &str, taken: &[&Nic], facts: &GPUTopologyStatus) -> Option<Fault> {
    let setting = format!("NCCL_IB_HCA={value}");
    let names =
        |nics: &[&Nic]| list(nics.iter().map(|nic| port_name(nic)).collect::<Vec<_>>().iter().map(String::as_str));
    let all: Vec<&Nic> = ports(facts).collect();
    let exact: Vec<&Nic> = training_ports(facts).collect();
    let fix =
        format!("delete NCCL_IB_HCA, and the list is made for each node; here it would be ={}", exact_list(&exact));
    let down: Vec<&Nic> = taken.iter().filter(|nic| !is_active(nic)).copied().collect();
    let layers: BTreeSet<&str> =
        taken.iter().filter(|nic| is_active(nic)).filter_map(|nic| nic.link_layer.as_deref()).collect();
    let evidence = if taken.is_empty() {
        format!("rdmaDevice of nics[] in the GPUTopology: {}", if all.is_empty() { "none".into() } else { names(&all) })
    } else {
        format!("{setting} means {} (state and linkLayer of nics[] in the GPUTopology)", names(taken))
    };
    let fault = if taken.is_empty() {
        Fault::block(format!("{setting} matches no RDMA device")).effect("NCCL falls back to TCP without an error")
    } else if down.len() == taken.len() {
        Fault::block(format!("{setting} means only ports that are not Active"))
            .effect("NCCL falls back to TCP without an error")
    } else if layers.len() > 1 {
        Fault::block(format!("{setting} means InfiniBand and Ethernet ports together"))
            .effect("ranks cannot connect over ports of different kinds")
    } else if !down.is_empty() {
        Fault::warn(format!("{setting} means {} too, which is not Active", names(&down)))
            .effect("NCCL leaves the port out, and the node has less bandwidth than the list says")
    } else {
        return None;
    };
    Some(fault.evidence(evidence).fix(fix))
}

fn exact_list(nics: &[&Nic]) -> String {
    let name = |nic: &&Nic| format!("{}:{}", nic.rdma_device.as_deref().unwrap_or_default(), nic.port.unwrap_or(1));
    nics.iter().map(name).collect::<Vec<_>>().join(",")
}

/// Check 24: links that are up now and went down recently.
pub(super) fn flaps(input: &CheckInput<'_>) -> Outcome {
    input.verbs()?;
    let now = input.gang.now;
    each(input.gang, |_, _, facts| {
        let watched: Vec<&Nic> = training_ports(facts).filter(|nic| nic.port_watch.is_some()).collect();
        if watched.is_empty() {
            return Err("portWatch of nics[] is not reported".into());
        }
        let last = |nic: &Nic| nic.port_watch.as_ref()?.last_link_down.as_ref().map(|at| at.0);
        let flapped = watched.into_iter().filter(|nic| last(nic).is_some_and(|at| is_recent(at, now)));
        let names: Vec<String> = flapped.map(port_name).collect();
        if names.is_empty() {
            return Ok(Vec::new());
        }
        Ok(vec![
            Fault::of(
                PreflightSeverity::Warn,
                format!("{} went down within the last hour and came up again", list(names.iter().map(String::as_str))),
            )
            .effect("a link that fails again ends the job, or stops it for seconds")
            .evidence("portWatch.lastLinkDown of nics[] in the GPUTopology (counter link_downed)")
            .fix("check cable and transceiver of the port before a long job"),
        ])
    })
}
