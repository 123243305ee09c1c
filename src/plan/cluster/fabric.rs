//! The fabric of a gang: device requests before its pods exist, and settings once it is placed.

use super::clock::is_stale;
use super::placement_request::{PlacementRequest, PlacementRules};
use super::view::NodeView;
use crate::eligible::{self, NodeRules};
use crate::job::ValidJob;
use crate::objects;
use crate::resources::gigabytes_per_second;
use crate::status::Draft;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::PodSpec;
use std::collections::BTreeMap;
use switchyard_core::quantity::Resources;
use switchyard_core::units::plural;
use switchyard_crds::names::TRAINER;
use switchyard_crds::{
    DecisionOutcome, FabricStatus, Framework, GpuDirect, PlacementStatus, PreflightMode, TrainJob, Transport,
    conditions,
};
use switchyard_fabric::forecast::{self, Direct, Forecast, InterNode, IntraNode};
use switchyard_fabric::profile::{self, Profile, Site};
use switchyard_fabric::{self as fabric, FabricRefusal, FabricRequest, Gang, Member, preflight};

/// Fabric decisions for a placed gang.
#[derive(Debug, Clone, PartialEq)]
pub struct FabricDecisions {
    /// For the status of the job.
    pub status: FabricStatus,
    /// NCCL's predicted behaviour between the ranks, in full.
    pub forecast: Option<Forecast>,
    /// Ranks of the nodes that cause blocking findings: without them no check would block.
    pub blamed: Vec<u32>,
}

/// Resources that the pods of a new attempt need to reach the fabric. `None` if the job does not
/// use one.
pub fn pod_resources(
    job: &TrainJob,
    valid: &ValidJob,
    defaults: &objects::Defaults,
    nodes: &BTreeMap<String, NodeView>,
) -> Option<FabricStatus> {
    let (job, valid, _) = collective(job, valid)?;
    let gpus = valid.pod.gpus;
    if valid.request.nodes < 2 || gpus == 0 && job.spec.trainer.framework == Framework::Switchyard {
        return None;
    }
    if gpus == 0 {
        // Gloo and MPI over TCP need no devices, so the nodes need not be read.
        return Some(FabricStatus::default());
    }
    let rules = NodeRules::of(&valid.pod.spec);
    let can_run = |node: &&NodeView| node.gpus() >= gpus && eligible::can_run(&rules, &node.facts).is_ok();
    let sites: Vec<Site<'_>> = nodes.values().filter(can_run).map(site).collect();
    let profile = defaults.fabric_profile.as_ref().or_else(|| profile::detect(sites.iter().copied()));
    // Exclude devices that an earlier attempt requested.
    let requests = valid.pod.requests(None);
    let request = FabricRequest { mode: job.spec.fabric.mode, nodes: valid.request.nodes, gpus, requests: &requests };
    let resources = fabric::required_resources(request, profile, &sites);
    Some(FabricStatus { profile: profile.map(|profile| profile.name.clone()), resources, ..FabricStatus::default() })
}

/// The job that the pods that exchange data would be alone, and the node rank of the first of them.
/// The whole job if it has no roles.
fn collective<'a>(job: &'a TrainJob, valid: &'a ValidJob) -> Option<(&'a TrainJob, &'a ValidJob, u32)> {
    if valid.roles.is_empty() {
        return Some((job, valid, 0));
    }
    valid.collective().map(|role| (&role.job, &role.valid, role.first_node))
}

fn site(node: &NodeView) -> Site<'_> {
    let facts = node.described().map(|machine| &*machine.facts);
    Site { labels: &node.facts.labels, allocatable: &node.allocatable, facts }
}

/// Makes all fabric decisions for a placed gang. `None` if the job needs none.
///
/// # Errors
/// The job must not start on the fabric of these nodes.
pub fn decide(
    request: &PlacementRequest<'_>,
    nodes: &BTreeMap<String, NodeView>,
    placement: &PlacementStatus,
) -> Result<Option<FabricDecisions>, FabricRefusal> {
    let Some((job, valid, first)) = collective(request.job, request.valid) else { return Ok(None) };
    let ranks = first as usize..(first + valid.request.nodes) as usize;
    let nodes_of = PlacementStatus {
        nodes: placement.nodes.get(ranks).map(<[_]>::to_vec).unwrap_or_default(),
        ..placement.clone()
    };
    let in_gang = |ranks: Vec<u32>| ranks.into_iter().map(|rank| first + rank).collect::<Vec<u32>>();
    match decide_alike(job, valid, request.rules, nodes, &nodes_of) {
        Ok(decided) => Ok(decided.map(|decided| FabricDecisions { blamed: in_gang(decided.blamed), ..decided })),
        Err(refused) => Err(FabricRefusal { ranks: in_gang(refused.ranks), ..refused }),
    }
}

/// The decisions for pods that are alike.
fn decide_alike(
    job: &TrainJob,
    valid: &ValidJob,
    PlacementRules { defaults, now, .. }: PlacementRules<'_>,
    nodes: &BTreeMap<String, NodeView>,
    placement: &PlacementStatus,
) -> Result<Option<FabricDecisions>, FabricRefusal> {
    let gpus = valid.pod.gpus;
    let framework = job.spec.trainer.framework;
    // Without GPUs our own engine uses TCP and shared memory, which need no settings.
    if gpus == 0 && (framework == Framework::Switchyard || valid.request.nodes < 2) {
        return Ok(None);
    }
    let spec = objects::pod(job, valid, defaults, 1, 0).spec.unwrap_or_default();
    let nothing = Resources::default();
    let views: Vec<Option<&NodeView>> = placement.nodes.iter().map(|placed| nodes.get(&placed.node_name)).collect();
    let profile = profile_for(defaults.fabric_profile.as_ref(), &views);
    let positions: Vec<Vec<usize>> = placement
        .nodes
        .iter()
        .zip(&views)
        .map(|(placed, view)| {
            let machine = view.and_then(|view| view.described());
            let position = |uuid: &String| machine?.gpus.iter().position(|gpu| gpu.uuid == *uuid);
            placed.gpus.iter().filter_map(position).collect()
        })
        .collect();
    let members = placement.nodes.iter().zip(&views).zip(&positions).map(|((placed, view), gpus)| {
        let (silence, is_old) = report_problem(*view, now);
        Member {
            name: &placed.node_name,
            facts: view.and_then(|view| view.described()).map(|machine| &*machine.facts),
            silence,
            is_old,
            gpus,
            allocatable: view.map_or(&nothing, |view| &view.allocatable),
        }
    });
    let gang = Gang {
        framework,
        mode: job.spec.fabric.mode,
        own: user_env(job, &spec),
        pod: &spec,
        gpus,
        processes: valid.request.processes_per_node,
        members: members.collect(),
        profile,
        now,
    };
    let decisions = fabric::decide(&gang)?;
    let is_checked = job.spec.fabric.preflight.mode != PreflightMode::None;
    let checked = is_checked.then(|| preflight::run(&gang, &decisions));
    let (preflight, blamed) = checked.map(|checked| (checked.status, checked.blamed)).unzip();
    let previous = job.status.as_ref().and_then(|status| status.fabric.clone()).unwrap_or_default();
    let forecast = forecast_of(&gang);
    let transport = gang.transport().or_else(|| forecast.as_ref().and_then(single_node_transport));
    let summary = summary(transport, forecast.as_ref(), placement);
    let gpu_direct = forecast.as_ref().filter(|_| transport == Some(Transport::RDMA)).and_then(gpu_direct);
    let profile = profile.map(|profile| profile.name.clone());
    let status = FabricStatus {
        transport,
        summary,
        gpu_direct,
        observed: None,
        measured: None,
        profile,
        decisions,
        preflight,
        ..previous
    };
    Ok(Some(FabricDecisions { status, forecast, blamed: blamed.unwrap_or_default() }))
}

/// Predicts NCCL's behaviour between the ranks. `None` if a node has no report, or there are no
/// GPUs.
fn forecast_of(gang: &Gang<'_>) -> Option<Forecast> {
    fn of<'a>(member: &Member<'a>) -> Option<forecast::Member<'a>> {
        let status = member.facts.filter(|_| !member.gpus.is_empty())?;
        Some(forecast::Member { node: member.name, status, gpus: member.gpus })
    }
    let members: Option<Vec<forecast::Member<'_>>> = gang.members.iter().map(of).collect();
    forecast::forecast(&members?, None).ok()
}

/// Whether NICs can access GPU memory directly, `None` if unknown.
fn gpu_direct(forecast: &Forecast) -> Option<GpuDirect> {
    match forecast.summary.between.as_ref()? {
        InterNode::Rdma { direct: Direct::Yes, .. } => Some(GpuDirect::Yes),
        InterNode::Rdma { direct: Direct::NoModule | Direct::TooFar, .. } => Some(GpuDirect::No),
        _ => None,
    }
}

/// Transport inside the job's only node.
fn single_node_transport(forecast: &Forecast) -> Option<Transport> {
    Some(match forecast.summary.within.last()? {
        IntraNode::NvLink | IntraNode::C2c => Transport::NVLink,
        IntraNode::Pcie => Transport::PCIe,
        IntraNode::Host => Transport::SharedMemory,
    })
}

/// Why a node has no usable report, and whether its report is stale.
fn report_problem(view: Option<&NodeView>, now: Timestamp) -> (&str, bool) {
    match view.map(|view| view.machine.as_ref()) {
        None => ("the node is gone", false),
        Some(None) => ("no node agent reports it", false),
        Some(Some(Err(why))) => (why, false),
        Some(Some(Ok(machine))) => match machine.observed.is_some_and(|at| is_stale(at, now)) {
            true => ("its node agent is silent, and its report is more than half an hour old", true),
            false => ("", false),
        },
    }
}

/// Why a job that enforces its preflight must not start, `None` if it may.
pub fn preflight_refusal(job: &TrainJob, decided: Option<&FabricDecisions>) -> Option<FabricRefusal> {
    let decided = decided.filter(|_| job.spec.fabric.preflight.mode == PreflightMode::Enforce)?;
    let why = preflight::blocking(decided.status.preflight.as_ref()?)?;
    Some(FabricRefusal { why, ranks: decided.blamed.clone() })
}

/// The transport and its predicted bandwidth.
fn summary(transport: Option<Transport>, forecast: Option<&Forecast>, placement: &PlacementStatus) -> Option<String> {
    let inside = forecast.filter(|forecast| !forecast.summary.within.is_empty());
    let inside = inside.map(|forecast| {
        let links: Vec<String> = forecast.summary.within.iter().map(ToString::to_string).collect();
        format!("{} inside nodes", links.join(", else "))
    });
    let nics = placement.nodes.first().map_or(0, |node| node.shape.nics.len());
    let between = transport.filter(|_| placement.nodes.len() > 1).map(|transport| {
        let over = match transport {
            Transport::RDMA => match forecast.and_then(|forecast| forecast.summary.between.as_ref()) {
                Some(between @ InterNode::Rdma { .. }) => between.to_string(),
                _ => format!("RDMA over {nics} NIC{} of each node", plural(nics as u64)),
            },
            Transport::Plugin => "the cloud's network plugin".into(),
            other => format!("{other:?}"),
        };
        // There is no prediction for TCP, or for NICs without a report.
        let is_predicted = transport != Transport::TCP && (nics > 0 || transport == Transport::NVLink);
        let rate = placement.predicted_bus_bandwidth.as_ref().filter(|_| is_predicted).and_then(gigabytes_per_second);
        format!("{over} between nodes{}", rate.map(|rate| format!(", {rate} GB/s predicted")).unwrap_or_default())
    });
    let parts: Vec<String> = between.into_iter().chain(inside).collect();
    (!parts.is_empty()).then(|| parts.join("; "))
}

/// The administrator's profile, else the built-in profile that fits these nodes.
fn profile_for<'a>(configured: Option<&'a Profile>, views: &[Option<&NodeView>]) -> Option<&'a Profile> {
    let sites: Option<Vec<Site<'_>>> = views.iter().map(|view| view.map(site)).collect();
    configured.or_else(|| profile::detect(sites?))
}

/// The user's own trainer environment, from the template and `trainer.env`, without the variables
/// that we add.
fn user_env<'a>(job: &'a TrainJob, spec: &'a PodSpec) -> BTreeMap<&'a str, Option<&'a str>> {
    let template = job.spec.template.as_ref().and_then(|template| template.spec.as_ref());
    let trainer = template.and_then(|spec| spec.containers.iter().find(|container| container.name == TRAINER));
    let template_env = trainer.into_iter().flat_map(|trainer| trainer.env.iter().flatten());
    let names = template_env
        .map(|entry| entry.name.as_str())
        .chain(job.spec.trainer.env.iter().map(|entry| entry.name.as_str()));
    let names: Vec<&str> = names.collect();
    let merged = spec.containers.iter().find(|container| container.name == TRAINER);
    let merged = merged.into_iter().flat_map(|trainer| trainer.env.iter().flatten());
    let user_env = merged.filter(|entry| names.contains(&entry.name.as_str()));
    user_env.map(|entry| (entry.name.as_str(), entry.value.as_deref())).collect()
}

/// Writes the findings of blocking checks to the job's status.
pub(super) fn report_findings(draft: &mut Draft<'_>, decided: Option<FabricDecisions>) {
    draft.next.fabric.get_or_insert_default().preflight = decided.and_then(|decided| decided.status.preflight);
}

/// Writes the fabric decisions to the status.
pub(super) fn report(draft: &mut Draft<'_>, decided: Option<FabricDecisions>) {
    let decided = decided.map(|decided| decided.status);
    if let Some(fabric) = &decided {
        let count = |outcome: DecisionOutcome| fabric.decisions.iter().filter(|d| d.outcome == outcome).count();
        let (set, user, left) =
            (count(DecisionOutcome::Set), count(DecisionOutcome::User), count(DecisionOutcome::NotSet));
        let over = fabric.summary.clone().unwrap_or_else(|| "the fabric is unknown".into());
        let mut text = format!("{over}; {set} settings derived, {user} set by the user, {left} left alone");
        if let Some(found) = fabric.preflight.as_ref().and_then(preflight::count) {
            text.push_str(&format!("; preflight: {found}"));
        }
        draft.condition(conditions::FABRIC_READY, "True", "Derived", text);
    }
    draft.next.fabric = decided;
}

/// The network interface to set for this rank's pod if it uses the host network.
pub(super) fn interface<'a>(job: &'a TrainJob, valid: &'a ValidJob, rank: u32) -> Option<&'a str> {
    let (job, valid, first) = collective(job, valid)?;
    let rank = rank.checked_sub(first).filter(|rank| *rank < valid.request.nodes)?;
    let uses_host_network = valid.pod.spec.host_network == Some(true);
    let fabric = job.status.as_ref().and_then(|status| status.fabric.as_ref()).filter(|_| uses_host_network)?;
    fabric::interface(&fabric.decisions, rank)
}

#[cfg(test)]
pub(super) mod tests;
