//! `switchyard whatif`: compares placements before and after a change, both from one snapshot. The
//! change is applied to the objects, so everything that follows is decided as in a cluster with
//! that change.

use crate::args::{Cli, WhatifArgs};
use crate::failure::Failure;
use crate::output::emit;
use crate::snapshot::{self, SnapshotFile, in_namespace, name_of};
use crate::{manifest, verdict};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::PathBuf;
use switchyard_crds::{DomainMode, TopologyDomain, TrainJob, conditions};
use switchyard_ledger::offline::{Cluster, PlacementVerdict, PreviousPlacement};
use switchyard_plan::resources::gigabytes_per_second;
use switchyard_worker_contract::exit::Exit;

/// Shows what a change would do.
pub(super) fn whatif(cli: &Cli, args: &WhatifArgs) -> Result<Exit, Failure> {
    let results = compare(args)?;
    let value = json!({"results": results.iter().map(Compared::json).collect::<Vec<_>>()});
    emit(cli.output, "WhatIf", &value, || match results.as_slice() {
        [] => "no job waits, and the change moves none".to_string(),
        results => results.iter().map(|result| result.table(cli.verbose)).collect(),
    });
    Ok(if results.iter().all(|result| result.after.placement.is_ok()) { Exit::Done } else { Exit::NotPlaceable })
}

/// A job before and after the change.
struct Compared {
    job: TrainJob,
    before: PlacementVerdict,
    after: PlacementVerdict,
    /// The cluster after the change.
    cluster: std::rc::Rc<Cluster>,
}

impl Compared {
    fn json(&self) -> Value {
        json!({
            "job": name_of(&self.job),
            "before": verdict::json(&self.job, &self.before),
            "after": verdict::json(&self.job, &self.after),
        })
    }

    fn table(&self, verbose: bool) -> String {
        let rate = |verdict: &PlacementVerdict| match &verdict.placement {
            Ok(placed) => {
                let rate = placed.status.predicted_bus_bandwidth.as_ref().and_then(gigabytes_per_second);
                rate.map_or("placeable".to_string(), |rate| format!("{rate} GB/s"))
            }
            Err(_) => "not placeable".to_string(),
        };
        let moved = match (&self.before.placement, &self.after.placement) {
            (Ok(before), Ok(after)) => {
                let nodes = before.status.nodes.iter().zip(&after.status.nodes);
                match nodes.filter(|(a, b)| (&a.node_name, &a.gpus) != (&b.node_name, &b.gpus)).count() {
                    0 => ", nothing moves".to_string(),
                    moved => format!(", {moved} of {} pods move", after.status.nodes.len()),
                }
            }
            _ => String::new(),
        };
        let head = format!("{}: {} -> {}{moved}\n", name_of(&self.job), rate(&self.before), rate(&self.after));
        head + &verdict::table(&self.job, &self.after, &self.cluster, verbose)
    }
}

fn compare(args: &WhatifArgs) -> Result<Vec<Compared>, Failure> {
    let read = |paths: &[PathBuf]| -> Result<Vec<TrainJob>, Failure> {
        paths.iter().map(|path| manifest::read(path)).collect()
    };
    let (files, added) = (read(&args.files)?, read(&args.add)?);
    let before = snapshot::read(&args.source)?;
    let mut after = before.clone();
    for node in &args.drain {
        drain(&mut after, node)?;
    }
    for device in &args.lose_link {
        take_down(&mut after, device)?;
    }
    let mut old = snapshot::open(&before)?;
    let mut new = snapshot::cluster(&after)?;
    for job in added {
        let job = in_namespace(job, &new);
        let found = decide(&mut new, &job, PreviousPlacement::Ignored)?;
        let placed = found
            .placement
            .map_err(|why| Failure::new(format!("--add {}: {why}", name_of(&job)), Exit::NotPlaceable))?;
        new.commit_placement(&job, &placed);
    }
    let touched: BTreeSet<&str> = args
        .drain
        .iter()
        .map(String::as_str)
        .chain(args.lose_link.iter().filter_map(|d| Some(d.split_once('/')?.0)))
        .collect();
    let is_concerned =
        |job: &&TrainJob| !switchyard_plan::cluster::is_over(job) && (waits(job) || is_on(job, &touched));
    let own = old.jobs().into_iter().filter(is_concerned).cloned();
    let jobs: Vec<TrainJob> =
        if files.is_empty() { own.collect() } else { files.into_iter().map(|job| in_namespace(job, &old)).collect() };
    let mut results = Vec::new();
    for job in jobs {
        let asked = match &args.require {
            Some(key) => require(&job, key),
            None => job.clone(),
        };
        let earlier = if is_on(&job, &touched) { PreviousPlacement::Kept } else { PreviousPlacement::Ignored };
        results.push((decide(&mut old, &job, earlier)?, decide(&mut new, &asked, earlier)?, asked));
    }
    let new = std::rc::Rc::new(new);
    let compared = |(before, after, job)| Compared { job, before, after, cluster: new.clone() };
    Ok(results.into_iter().map(compared).collect())
}

fn decide(cluster: &mut Cluster, job: &TrainJob, earlier: PreviousPlacement) -> Result<PlacementVerdict, Failure> {
    cluster.explain(job, earlier).map_err(|faults| {
        let faults: Vec<String> = faults.iter().map(ToString::to_string).collect();
        Failure::usage(format!("{}: {}", name_of(job), faults.join("; ")))
    })
}

/// Whether the job waits for a placement.
fn waits(job: &TrainJob) -> bool {
    let placed = job.status.as_ref().and_then(|status| status.condition(conditions::PLACED));
    !job.spec.suspend && placed.is_none_or(|placed| placed.reason == conditions::NO_ROOM)
}

/// Whether the job is on one of these nodes.
fn is_on(job: &TrainJob, nodes: &BTreeSet<&str>) -> bool {
    let placed = job.status.as_ref().filter(|status| status.is(conditions::PLACED));
    let placement = placed.and_then(|status| status.placement.as_ref());
    placement.is_some_and(|place| place.nodes.iter().any(|node| nodes.contains(node.node_name.as_str())))
}

/// The job with a requirement for one domain of a level.
fn require(job: &TrainJob, key: &str) -> TrainJob {
    let mut job = job.clone();
    let domains = &mut job.spec.topology_policy.domains;
    match domains.iter_mut().find(|domain| domain.key == key) {
        Some(domain) => domain.mode = DomainMode::Required,
        None => domains.push(TopologyDomain { key: key.into(), mode: DomainMode::Required }),
    }
    job
}

fn find<'a>(file: &'a mut SnapshotFile, kind: &str, name: &str) -> Result<&'a mut Value, Failure> {
    let is = |item: &&mut Value| item["kind"] == kind && item["metadata"]["name"] == name;
    file.items.iter_mut().find(is).ok_or_else(|| Failure::usage(format!("there is no {kind} `{name}` in this cluster")))
}

/// Cordons a node and removes its pods.
fn drain(file: &mut SnapshotFile, name: &str) -> Result<(), Failure> {
    find(file, "Node", name)?["spec"]["unschedulable"] = true.into();
    file.items.retain(|item| item["kind"] != "Pod" || item["spec"]["nodeName"] != name);
    Ok(())
}

/// Takes down a GPU's NVLinks, the NVLinks between two GPUs, or a NIC.
fn take_down(file: &mut SnapshotFile, device: &str) -> Result<(), Failure> {
    let wrong = |message: String| Failure::usage(format!("--lose-link: {message}"));
    let expected = "expected NODE/GPU, NODE/GPU-GPU or NODE/NIC, such as gpu-07/5 or gpu-07/mlx5_0";
    let malformed = || wrong(format!("got `{device}`; {expected}"));
    let (node, what) = device.split_once('/').ok_or_else(malformed)?;
    let status = &mut find(file, "GPUTopology", node)?["status"];
    let indices: Option<Vec<u64>> = what.split('-').map(|index| index.parse().ok()).collect();
    let Some(indices) = indices else {
        let is = |nic: &&mut Value| nic["name"] == what || nic["rdmaDevice"] == what;
        let nic = status["nics"].as_array_mut().into_iter().flatten().find(is);
        nic.ok_or_else(|| wrong(format!("there is no NIC `{what}` on {node}")))?["state"] = "Down".into();
        return Ok(());
    };
    let uuid = |index: &u64| {
        let gpus = status["gpus"].as_array().into_iter().flatten();
        let found = gpus.filter(|gpu| gpu["index"] == *index).find_map(|gpu| gpu["uuid"].as_str());
        found.map(str::to_string).ok_or_else(|| wrong(format!("there is no GPU {index} on {node}")))
    };
    let uuids: Vec<String> = indices.iter().map(uuid).collect::<Result<_, _>>()?;
    if uuids.is_empty() || uuids.len() > 2 {
        return Err(malformed());
    }
    let has = |link: &Value, uuid: &String| link["a"] == **uuid || link["b"] == **uuid;
    if let Some(links) = status["links"].as_array_mut() {
        links.retain(|link| link["kind"] != "NVLink" || !uuids.iter().all(|uuid| has(link, uuid)));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
