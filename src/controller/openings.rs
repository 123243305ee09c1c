//! The beginnings of the logs of a gang's pods: what the ranks say of the links between them.
//!
//! Each pod is read a few times, less and less often, until its ranks have spoken or are not expected to any more; the number of reads is
//! bounded over all jobs. What was read is kept in the index until the verdict is in the status.

use super::Context;
use super::progress::log;
use kube::api::LogParams;
use std::collections::HashMap;
use std::time::{Duration, Instant};
use switchyard_ledger::index::{Key, attempt_of};
use switchyard_plan::cluster::transport::{self, Seen};
use switchyard_plan::cluster::view::Phase;
use switchyard_plan::job::processes_per_node;
use tokio::sync::watch::Receiver;
use tracing::warn;

/// Pause after the first read of a pod; each further one is twice the one before.
const FIRST_PAUSE: Duration = Duration::from_secs(2);
/// Reads of a pod whose ranks say nothing: the last one is four minutes after the first.
const MOST_READS: u32 = 8;
/// Reads per second over all jobs.
const READS_PER_SECOND: usize = 10;
/// Bytes read at most: 8 ranks with `NCCL_DEBUG=INFO` say less than half of that before their first collective.
const BYTES: i64 = 512 << 10;

/// When a pod is read next, and how often it was.
struct Next {
    at: Instant,
    reads: u32,
}

/// A pod to read.
struct Source {
    job: String,
    uid: String,
    key: Key,
    pod: String,
    attempt: u32,
    node_rank: u32,
    /// Ranks in it.
    processes: u32,
}

/// Reads until `stop`.
pub(super) async fn run(context: Context, mut stop: Receiver<bool>) {
    let mut next: HashMap<String, Next> = HashMap::new();
    let mut is_told = false;
    loop {
        if tokio::time::timeout(Duration::from_secs(1), stop.wait_for(|stop| *stop)).await.is_ok() {
            return;
        }
        if !context.leads() {
            continue;
        }
        let sources = sources(&context);
        let now = Instant::now();
        next.retain(|uid, _| sources.iter().any(|source| source.uid == *uid));
        let at = |source: &Source| next.get(&source.uid).map_or(now, |next| next.at);
        let mut due: Vec<&Source> = sources.iter().filter(|source| at(source) <= now).collect();
        due.sort_by_key(|source| at(source));
        due.truncate(READS_PER_SECOND);
        let params = || LogParams { limit_bytes: Some(BYTES), ..LogParams::default() };
        let logs = due.iter().map(|source| log(&context, &source.key.namespace, &source.pod, params()));
        let logs = futures::future::join_all(logs).await;
        for (source, log) in due.into_iter().zip(logs) {
            let log = log.unwrap_or_else(|error| {
                // The same for every pod: told once.
                if !std::mem::replace(&mut is_told, true) {
                    warn!(pod = source.pod, error, "logs cannot be read: links between ranks are not compared");
                }
                None
            });
            let reads = next.get(&source.uid).map_or(0, |next| next.reads) + 1;
            next.insert(
                source.uid.clone(),
                Next { at: Instant::now() + FIRST_PAUSE * (1 << reads.min(16)) / 2, reads },
            );
            let is_last = reads >= MOST_READS || log.as_ref().is_some_and(|log| log.len() as i64 >= BYTES);
            // A log that cannot be read says nothing, and not that it is silent.
            if let Some(log) = log {
                let mut seen = Seen::of(&log, source.processes);
                seen.is_complete |= is_last;
                keep(&context, source, seen);
            }
        }
    }
}

/// Pods of the current attempts whose ranks may say what nobody has compared yet.
fn sources(context: &Context) -> Vec<Source> {
    let index = context.index();
    let mut found = Vec::new();
    for (key, job) in &index.jobs {
        let per_node = processes_per_node(job);
        if !transport::wants_logs(job, per_node) {
            continue;
        }
        let (uid, attempt) = (job.metadata.uid.clone().unwrap_or_default(), attempt_of(job));
        let Some(family) = index.families.get(&uid) else { continue };
        let done =
            |rank: u32| family.seen.get(&attempt).and_then(|of| of.get(&rank)).is_some_and(|seen| seen.is_complete);
        let pods = family.pods.values().filter(|pod| pod.attempt == attempt && pod.phase == Phase::Running);
        found.extend(pods.filter(|pod| !pod.deleting && !done(pod.node_rank)).map(|pod| Source {
            job: uid.clone(),
            uid: pod.uid.clone(),
            key: key.clone(),
            pod: pod.name.clone(),
            attempt,
            node_rank: pod.node_rank,
            processes: per_node,
        }));
    }
    found
}

/// Keeps what a pod said, and has its job looked at if that is news.
fn keep(context: &Context, source: &Source, seen: Seen) {
    let mut index = context.index();
    let Some(family) = index.families.get_mut(&source.job) else { return };
    family.seen.retain(|attempt, _| *attempt == source.attempt);
    let of_attempt = family.seen.entry(source.attempt).or_default();
    if of_attempt.get(&source.node_rank) != Some(&seen) {
        of_attempt.insert(source.node_rank, seen);
        context.queue.add(source.key.clone(), Instant::now());
    }
}
