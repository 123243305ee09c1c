//! Formats a run for people: header, rank table, progress, failure, summary. Pure functions build
//! the text, and `run.rs` prints it.

mod header;
mod progress;
#[cfg(test)]
mod tests;

pub(super) use header::{header, millions, precision_words};
pub(super) use progress::{bar_message, plain_line, summary};

use crate::text::columns;
use switchyard_core::units::{binary, counted, grouped};
use switchyard_local::{RootCause, Survivor};
use switchyard_plan::local::{LocalPlan, PlannedPod};
use switchyard_worker_contract::config::{Device, SyncPolicy};
use switchyard_worker_contract::event::{Inspection, Ready};
use switchyard_worker_contract::exit::Exit;
use switchyard_worker_contract::nccl;

/// The distributed environment: rank, process, cores, devices, address, transport.
pub(super) fn rank_table(plan: &LocalPlan, ranks: &[Ready]) -> String {
    let words = ["RANK", "PID", "CPUS", "NUMA", "DEVICE", "THREADS", "ADDRESS", "TRANSPORT"];
    let mut rows = vec![words.map(String::from).to_vec()];
    let device = match plan.engine.device {
        Device::Cpu => "cpu",
        Device::Cuda => "gpu",
    };
    let of_ranks = plan.processes().flat_map(|process| std::iter::repeat_n(process, process.ranks as usize));
    for (process, ready) in of_ranks.zip(ranks) {
        let numa: Vec<String> = process.numa_nodes.iter().map(ToString::to_string).collect();
        rows.push(vec![
            ready.rank.to_string(),
            ready.pid.to_string(),
            ready.cpus.clone(),
            if numa.is_empty() { "-".into() } else { numa.join(",") },
            format!("{device} ({})", ready.kernel),
            ready.threads.to_string(),
            ready.address.clone(),
            ready.transport.word().to_string(),
        ]);
    }
    columns(&rows).lines().map(|line| format!("  {line}")).collect::<Vec<_>>().join("\n")
}

/// How many gradient tensors were fused into how many all-reduces, their cost, and the share that
/// no overlap can hide.
pub(super) fn fusion(plan: &LocalPlan, inspection: &Inspection, ranks: &[Ready]) -> String {
    let tensors = counted(u64::from(inspection.gradient_tensors), "gradient tensor");
    let Some((first, last)) = ranks.first().and_then(|first| Some((first, first.bucket_bytes.last()?))) else {
        let ranks = if plan.engine.pipeline.is_some() { "one rank per stage" } else { "one rank" };
        return format!("  fusion   {tensors}; {ranks}: nothing is reduced");
    };
    let servers = plan.engine.parameter_server;
    let exchange = if servers.is_some() { "bucket" } else { "all-reduce" };
    let all = counted(first.bucket_bytes.len() as u64, exchange);
    let total: u64 = first.bucket_bytes.iter().sum();
    let largest = first.bucket_bytes.iter().max().copied().unwrap_or_default();
    let sizes = match first.bucket_bytes.len() {
        1 => format!("of {}", binary(total)),
        _ => format!("of {} in all, the largest {}", binary(total), binary(largest)),
    };
    let overlap = plan.engine.overlap;
    let limit = overlap.bucket_size_mib.map_or_else(String::new, |mib| format!(" (limit {mib} MiB)"));
    let after = || ("after backward".to_owned(), String::new());
    let clips = plan.engine.optimizer.gradient_clip_norm.is_some();
    let (when, left) = match (plan.engine.exchange_policy(), plan.engine.compression) {
        (SyncPolicy::Local(local), _) => (format!("every {} steps", local.every_steps), String::new()),
        (SyncPolicy::EveryStep, Some(_)) => after(),
        (SyncPolicy::EveryStep, None) => match (overlap.enabled, overlap.sync_all_reduce) {
            _ if clips && plan.engine.is_asynchronous() => after(),
            (false, _) => after(),
            (true, true) => ("during backward, which waits for each".to_owned(), String::new()),
            (true, false) => ("during backward".to_owned(), format!("; {} left when it ends", binary(*last))),
        },
    };
    let over = match servers {
        Some(servers) => format!("to {servers}"),
        None => format!("over {}, ~{:.2} ms/step", path(first), first.all_reduce_ms),
    };
    format!("  fusion   {tensors} -> {all} {sizes}{limit}\n           {over}, started {when}{left}")
}

/// How a rank's gradients travel: `nccl (8 x P2P/CUMEM/read)`, `tcp (3 x ring)`.
fn path(ready: &Ready) -> String {
    let details = nccl::summary(&ready.links).or_else(|| ready.algorithm_counts());
    let details = details.map_or_else(String::new, |details| format!(" ({details})"));
    format!("{}{details}", ready.transport.word())
}

/// The step from which training resumes, if it does.
pub(super) fn resumed(plan: &LocalPlan, ranks: &[Ready]) -> Option<String> {
    let step = ranks.first()?.resumed_step?;
    let place = plan.engine.checkpoint.as_ref().map_or_else(String::new, |checkpoint| format!(", {}", checkpoint.path));
    Some(format!("  resumed  from step {}{place}", grouped(step)))
}

/// A failure: the root cause first, then its consequences.
pub(super) fn failure(cause: &RootCause, attempt: u32) -> String {
    let other = if cause.server.is_none() { "other " } else { "" };
    let others = match cause.others.len() {
        0 => String::new(),
        1 => format!("; the {other}rank stopped because of it"),
        count => format!("; the {count} {other}ranks stopped because of it"),
    };
    let name = cause.name();
    let what = match cause.code.and_then(Exit::from_code) {
        Some(Exit::Data) => format!("error[SY0301]: {name} cannot continue with the training data{others}"),
        Some(Exit::CheckpointRefused) => format!("error[SY0601]: {name} refused the checkpoint{others}"),
        _ => format!("error[SY0503]: {name} failed first{others}"),
    };
    format!("{what}\n  where    {name}, {}, attempt {attempt}\n{}", cause.place(), evidence(cause))
}

/// The failure of a pod of another framework.
pub(super) fn pod_failure(pod: &PlannedPod, cause: &RootCause, attempt: u32) -> String {
    let name = &pod.name;
    format!("error[SY0503]: pod {name} failed\n  where    {}, attempt {attempt}\n{}", cause.place(), evidence(cause))
}

/// What is known of a failure.
fn evidence(cause: &RootCause) -> String {
    let mut lines = vec![format!("  cause    {}", cause.cause)];
    if !cause.during.is_empty() {
        lines.push(format!("  during   {}", cause.during));
    }
    if cause.pid.is_some() {
        lines.push(format!("  log      {}", cause.log.path));
        if cause.log.tail.is_empty() {
            lines.push("           (empty)".into());
        }
    }
    lines.extend(cause.log.tail.iter().map(|line| format!("           | {line}")));
    lines.join("\n")
}

/// Processes that SIGKILL did not end, and the failure for which they were killed.
pub(super) fn survivors(cause: Option<&RootCause>, processes: &[Survivor], seconds: u64) -> String {
    let cause = cause.map(|it| format!("warning: {} ({}): {}", it.name(), it.place(), it.cause));
    let survivors = processes
        .iter()
        .map(|Survivor { name, pid, state, .. }| format!("warning: SIGKILL has not ended {name} (pid {pid}): {state}"));
    let last = format!("the run ends without it in {seconds} s, or on Ctrl-C");
    cause.into_iter().chain(survivors).chain([last]).collect::<Vec<_>>().join("\n")
}

/// Two yardsticks for a language model's loss, the unigram and bigram entropy, if known.
fn entropies(inspection: &Inspection) -> Option<(f64, f64)> {
    Some((inspection.unigram_nats?, inspection.bigram_nats?))
}
