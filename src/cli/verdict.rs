//! Formats placements: where a job would go or runs and why, what limits it, and what would help.

use crate::fabric;
use crate::live::figures_age;
use crate::snapshot::name_of;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use switchyard_core::rates::gigabytes;
use switchyard_core::units::{duration, plural};
use switchyard_crds::conditions::Stage;
use switchyard_crds::{PlacedNode, PlacementStatus, TrainJob, conditions};
use switchyard_fabric::lint;
use switchyard_ledger::offline::{Cluster, PlacementVerdict};
use switchyard_plan::cluster::{Excluded, NoPlacement, preempted};
use switchyard_plan::job::gpus;
use switchyard_plan::resources::{bytes_per_second, gigabytes_per_second};
use switchyard_plan::validate;

/// Most nodes named per reason.
const NAMED: usize = 4;
/// Most nodes of a placement listed without `--verbose`.
const LISTED: usize = 16;

/// Where a job would be placed, formatted for people.
pub(super) fn table(job: &TrainJob, verdict: &PlacementVerdict, cluster: &Cluster, verbose: bool) -> String {
    let mut text = String::new();
    match &verdict.placement {
        Ok(placed) => {
            text.push_str(&format!("placeable: {}{}\n", name_of(job), bandwidths(&placed.status)));
            placement(&mut text, &placed.status, job, cluster, verbose);
            let overtaking = verdict.ahead.as_ref().and_then(|ahead| ahead.describe_overtaking(&placed.status));
            overtaking.into_iter().for_each(|why| row(&mut text, "now", &why));
            match &verdict.fabric {
                Some(Ok(found)) => row(&mut text, "fabric", &fabric::headline(&found.status)),
                Some(Err(why)) => row(&mut text, "fabric", &format!("the job would wait: {why}")),
                None => {}
            }
            left_out(&mut text, &placed.excluded);
        }
        Err(why) => refusal(&mut text, job, why, (verdict, cluster)),
    }
    text
}

fn row(text: &mut String, word: &str, line: &str) {
    text.push_str(&format!("  {word:<9} {line}\n"));
}

/// Host access requested by the job that admission policies can refuse, one sentence each.
pub(super) fn host_access(job: &TrainJob) -> Vec<String> {
    let document = serde_json::to_value(job).unwrap_or_default();
    let linted = lint::lint(&document, lint::Options::default());
    let findings =
        linted.into_iter().flat_map(|linted| linted.findings).filter(|finding| finding.rule == "host-access");
    findings
        .map(|found| {
            format!("{}: got {}: refused unless admissionPolicy.allow names the namespace", found.field, found.got)
        })
        .collect()
}

/// Files that end with the job's pods or are missing in them, one sentence each.
pub(super) fn unkept_files(job: &TrainJob) -> Vec<String> {
    let valid = switchyard_plan::validate(job).ok();
    let found = valid.map(|valid| switchyard_plan::objects::unkept_files(job, &valid)).unwrap_or_default();
    found.iter().map(ToString::to_string).collect()
}

/// Sentences formatted for people, the first of them after a word.
pub(super) fn rows(word: &str, sentences: &[String]) -> String {
    let mut text = String::new();
    for (number, line) in sentences.iter().enumerate() {
        row(&mut text, if number == 0 { word } else { "" }, line);
    }
    text
}

/// `, predicted busbw 96 GB/s, best possible 192`.
fn bandwidths(status: &PlacementStatus) -> String {
    let rate = |quantity: &Option<_>| quantity.as_ref().and_then(gigabytes_per_second);
    match (rate(&status.predicted_bus_bandwidth), rate(&status.best_possible)) {
        (Some(predicted), Some(best)) => format!(", predicted busbw {predicted} GB/s, best possible {best}"),
        (Some(predicted), None) => format!(", predicted busbw {predicted} GB/s"),
        _ => String::new(),
    }
}

fn placement(text: &mut String, status: &PlacementStatus, job: &TrainJob, cluster: &Cluster, verbose: bool) {
    // The status has one sentence; print one part per line.
    for (number, part) in status.reason.split("; ").enumerate() {
        row(text, if number == 0 { "why" } else { "" }, part);
    }
    let per_node = status.nodes.get(1).map_or(1, |second| second.first_rank.max(1));
    let shown = if verbose { status.nodes.len() } else { status.nodes.len().min(LISTED) };
    let gpus = gpus(job) as i32;
    let valid = (!job.spec.roles.is_empty()).then(|| validate(job).ok()).flatten();
    let role_of = |node_rank: usize| valid.as_ref()?.role_of(u32::try_from(node_rank).ok()?);
    let width = job.spec.roles.iter().map(|role| role.name.len() + 1).max().unwrap_or(0);
    for (number, node) in status.nodes[..shown].iter().enumerate() {
        let role = role_of(number);
        let count = match role {
            Some(role) => role.valid.request.processes_per_node as i32,
            None if status.nodes.len() > 1 => per_node,
            None => gpus.max(1),
        };
        let name = role.map_or("", |role| &role.name);
        let line = format!("{name:<width$}{:<11} {}", ranks(node.first_rank, count), devices(node, cluster));
        row(text, if number == 0 { "ranks" } else { "" }, &line);
    }
    if shown < status.nodes.len() {
        row(text, "", &format!("and {} more nodes (--verbose)", status.nodes.len() - shown));
    }
}

fn ranks(first: i32, count: i32) -> String {
    if count > 1 { format!("{first}-{}", first + count - 1) } else { first.to_string() }
}

/// `gpu-01  GPU 0,1,2,3  mlx5_0,mlx5_1  NUMA 0`.
fn devices(node: &PlacedNode, cluster: &Cluster) -> String {
    let mut line = node.node_name.clone();
    let machine = cluster.nodes().get(&node.node_name).and_then(|view| view.described());
    if !node.gpus.is_empty() {
        let index = |uuid: &String| {
            let gpu = machine.and_then(|machine| machine.gpus.iter().find(|gpu| gpu.uuid == *uuid));
            gpu.map_or_else(|| uuid.clone(), |gpu| gpu.index.to_string())
        };
        line.push_str(&format!("  GPU {}", node.gpus.iter().map(index).collect::<Vec<_>>().join(",")));
    }
    if !node.shape.nics.is_empty() {
        line.push_str(&format!("  {}", node.shape.nics.join(",")));
    }
    if !node.shape.numa_nodes.is_empty() {
        let numa: Vec<String> = node.shape.numa_nodes.iter().map(ToString::to_string).collect();
        line.push_str(&format!("  NUMA {}", numa.join(",")));
    }
    line
}

/// Excluded nodes by reason, the most frequent reason first.
fn left_out(text: &mut String, excluded: &[(String, Excluded)]) {
    let mut reasons: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for (name, why) in excluded {
        reasons.entry(why.to_string()).or_default().push(name);
    }
    let mut reasons: Vec<(String, Vec<&str>)> = reasons.into_iter().collect();
    reasons.sort_by_key(|(_, names)| std::cmp::Reverse(names.len()));
    for (number, (why, names)) in reasons.iter().enumerate() {
        let more = if names.len() > NAMED { format!(" and {} more", names.len() - NAMED) } else { String::new() };
        let named = names[..names.len().min(NAMED)].join(", ");
        row(text, if number == 0 { "left out" } else { "" }, &format!("{named}{more}: {why}"));
    }
}

fn refusal(text: &mut String, job: &TrainJob, why: &NoPlacement, (verdict, cluster): (&PlacementVerdict, &Cluster)) {
    let required =
        job.spec.topology_policy.domains.iter().find(|domain| domain.mode == switchyard_crds::DomainMode::Required);
    let within = required.map_or_else(String::new, |domain| format!(" in one {}", domain.key));
    let what = needed(job) + &within;
    text.push_str(&format!("not placeable: {} needs {what}\n", name_of(job)));
    for (number, part) in why.sentence.split("; ").enumerate() {
        row(text, if number == 0 { "binding" } else { "" }, part);
    }
    if let Some(ahead) = &verdict.ahead {
        row(text, "held", &ahead.to_string());
        let forecast = ahead.forecast(job.spec.active_deadline_seconds);
        forecast.into_iter().for_each(|forecast| row(text, "", &forecast));
    }
    verdict.forecast.into_iter().for_each(|forecast| row(text, "queue", &forecast.message(cluster.now())));
    left_out(text, &why.excluded);
    if !verdict.victims.is_empty() {
        row(text, "preempts", &format!("{}: with them stopped it fits", verdict.victims.join(", ")));
    }
    if why.changes.is_empty() {
        let has_said_one = message_of(job, conditions::PLACED).contains("smallest change that fits");
        if !has_said_one {
            row(text, "", "no single change of the manifest would make it fit");
        }
        return;
    }
    let width = why.changes.iter().map(|change| change.field.chars().count()).max().unwrap_or(0).max(30);
    text.push_str(&format!("  {:<width$}  busbw\n", "smallest change that fits", width = width + 4));
    for (letter, change) in ('a'..).zip(&why.changes) {
        let rate = change.bandwidth.map_or_else(|| "-".to_string(), |rate| format!("{} GB/s", gigabytes(rate)));
        text.push_str(&format!("   {letter}  {:<width$}  {rate}\n", change.field));
    }
}

/// `2 nodes x 8 GPUs`; in a job with roles, `chief: 1 pod, worker: 2 pods x 8 GPUs`.
fn needed(job: &TrainJob) -> String {
    let of = |count: u32, what: &str, gpus: u32| {
        let each = if gpus == 0 { String::new() } else { format!(" x {gpus} GPU{}", plural(gpus.into())) };
        format!("{count} {what}{}{each}", plural(count.into()))
    };
    let Some(valid) = validate(job).ok().filter(|valid| !valid.roles.is_empty()) else {
        return of(job.spec.trainer.num_nodes.unsigned_abs(), "node", gpus(job));
    };
    let roles = valid.roles.iter();
    let roles = roles.map(|role| format!("{}: {}", role.name, of(role.pods(), "pod", role.valid.pod.gpus)));
    roles.collect::<Vec<_>>().join(", ")
}

/// Why a job is where it is, formatted for people.
pub(super) fn explanation(job: &TrainJob, now: &PlacementVerdict, cluster: &Cluster, verbose: bool) -> String {
    let mut text = String::new();
    let status = job.status.clone().unwrap_or_default();
    let condition = |kind: &str| status.condition(kind);
    let stage = condition(conditions::SUCCEEDED).map_or("New", |stage| stage.reason.as_str());
    let placed = condition(conditions::PLACED);
    let is_placed = status.is(conditions::PLACED);
    match status.placement.as_ref().filter(|_| is_placed) {
        Some(place) => {
            let since = placed.map(|placed| placed.last_transition_time.0.to_string()).unwrap_or_default();
            text.push_str(&format!("{} is {stage}, placed {since}{}\n", name_of(job), bandwidths(place)));
            if switchyard_plan::cluster::is_over(job) {
                let why = condition(conditions::SUCCEEDED).map_or("", |stage| stage.message.as_str());
                row(&mut text, "ended", why);
                placement(&mut text, place, job, cluster, verbose);
                return text;
            }
            // Conditions that keep pods from starting. Once they run, there is nothing to explain.
            let waits = condition(conditions::SUCCEEDED).filter(|_| stage == Stage::Starting.reason());
            waits.into_iter().for_each(|waits| row(&mut text, "waits", &waits.message));
            placement(&mut text, place, job, cluster, verbose);
            preemptions(job, None, cluster).iter().for_each(|often| row(&mut text, "preempted", often));
            if let Some(found) = status.fabric.as_ref() {
                row(&mut text, "fabric", &format!("{} (--fabric)", fabric::headline(found)));
            }
            if let Some(progressing) = condition(conditions::PROGRESSING) {
                let name = if progressing.status == "True" { "progress" } else { "stuck" };
                let age = figures_age(job, cluster.now()).map(|age| format!(" ({} ago)", duration(age)));
                row(&mut text, name, &(progressing.message.clone() + &age.unwrap_or_default()));
            }
            if let Some(straggler) = condition(conditions::STRAGGLER).filter(|found| found.status == "True") {
                row(&mut text, "slow", &straggler.message);
            }
            if let Some(gpu) = condition(conditions::GPU_TROUBLE).filter(|found| found.status == "True") {
                row(&mut text, "gpu", &gpu.message);
            }
            if let Some(degraded) = condition(conditions::PLACEMENT_DEGRADED).filter(|found| found.status == "True") {
                row(&mut text, "degraded", &degraded.message);
            }
            match &now.placement {
                Ok(other) => {
                    left_out(&mut text, &other.excluded);
                    let rate =
                        |status: &PlacementStatus| status.predicted_bus_bandwidth.as_ref().and_then(bytes_per_second);
                    if let (Some(has), Some(could)) = (rate(place), rate(&other.status))
                        && could > has
                    {
                        let line = format!("{} GB/s on other nodes that are free now", gigabytes((could / 1e6) as u32));
                        row(&mut text, "better", &line);
                    }
                }
                Err(why) => left_out(&mut text, &why.excluded),
            }
        }
        None => {
            let why = condition(conditions::SUCCEEDED).map_or("", |stage| stage.message.as_str());
            text.push_str(&format!("{} is {stage}: {why}\n", name_of(job)));
            if !switchyard_plan::cluster::is_over(job) {
                let now = without_queue(job, now);
                let waits = Some(&now).filter(|now| now.placement.is_err());
                preemptions(job, waits, cluster).iter().for_each(|often| row(&mut text, "preempted", often));
                text.push_str(&table(job, &now, cluster, verbose));
            }
        }
    }
    text
}

/// How often a job was preempted and, if it waits, when it resumes; `None` if never.
fn preemptions(job: &TrainJob, waits: Option<&PlacementVerdict>, cluster: &Cluster) -> Option<String> {
    let often = preempted::history(job, cluster.now())?;
    let ran = job.status.as_ref()?.ran_seconds.filter(|seconds| *seconds > 0);
    let ran = ran.map(|seconds| format!("ran for {} before this attempt", duration(seconds as f64)));
    let resumes = waits.and_then(|now| preempted::resumption(now.ahead.as_ref(), now.forecast.as_ref(), cluster.now()));
    Some([Some(often), ran, resumes].into_iter().flatten().collect::<Vec<_>>().join("; "))
}

fn message_of<'a>(job: &'a TrainJob, kind: &str) -> &'a str {
    let condition = job.status.as_ref().and_then(|status| status.condition(kind));
    condition.map_or("", |condition| condition.message.as_str())
}

/// Omits the queue if the job's status describes it. Only the controller knows the namespaces'
/// shares and which jobs were set back, so a position computed here could contradict its own.
fn without_queue(job: &TrainJob, now: &PlacementVerdict) -> PlacementVerdict {
    let placed = job.status.as_ref().and_then(|status| status.condition(conditions::PLACED));
    if placed.is_none_or(|placed| placed.reason != conditions::NO_ROOM || placed.message.is_empty()) {
        return now.clone();
    }
    PlacementVerdict { ahead: None, forecast: None, ..now.clone() }
}

/// Where a job would be placed, as JSON.
pub(super) fn json(job: &TrainJob, verdict: &PlacementVerdict) -> Value {
    let mut value = json!({"job": name_of(job), "placeable": verdict.placement.is_ok()});
    let excluded = match &verdict.placement {
        Ok(placed) => {
            value["placement"] = json!(placed.status);
            &placed.excluded
        }
        Err(why) => {
            value["binding"] = json!(why.sentence);
            let change = |change: &switchyard_plan::cluster::Change| {
                let mut entry = json!({"field": change.field});
                if let Some(rate) = change.bandwidth {
                    entry["busBandwidthMegabytesPerSecond"] = json!(rate);
                }
                entry
            };
            value["changes"] = why.changes.iter().map(change).collect();
            &why.excluded
        }
    };
    value["excluded"] = excluded.iter().map(|(node, why)| json!({"node": node, "why": why.to_string()})).collect();
    match &verdict.fabric {
        Some(Ok(fabric)) => value["fabric"] = json!(fabric.status),
        Some(Err(why)) => value["fabricNotReady"] = json!(why),
        None => {}
    }
    if let Some(ahead) = &verdict.ahead {
        value["heldFor"] = json!(ahead.to_string());
        ahead.start.into_iter().for_each(|(start, _)| value["heldUntil"] = json!(start));
    }
    if let Some(forecast) = &verdict.forecast {
        value["forecast"] = match &forecast.window {
            Ok(window) => json!({"ahead": forecast.ahead, "earliest": window.earliest, "latest": window.latest}),
            Err(why) => json!({"ahead": forecast.ahead, "unknown": why.to_string()}),
        };
    }
    if !verdict.victims.is_empty() {
        value["preempts"] = json!(verdict.victims);
    }
    value
}

/// Why a job is where it is, as JSON.
pub(super) fn explanation_json(job: &TrainJob, now: &PlacementVerdict) -> Value {
    let status = job.status.clone().unwrap_or_default();
    let mut value = json!({"job": name_of(job), "now": json(job, &without_queue(job, now))});
    value["conditions"] = json!(status.conditions);
    if let Some(placement) = &status.placement {
        value["placement"] = json!(placement);
    }
    value
}

#[cfg(test)]
mod tests;
