//! Log heads of a gang's pods, in which the ranks report the links between them.
//!
//! Each pod is read a few times, at growing intervals, until its ranks have reported or are no
//! longer expected to. Observations are kept in the index until the verdict is in the status.

use super::Context;
use super::logs;
use super::reader::{Reader, Reads, Source};
use kube::api::LogParams;
use std::time::{Duration, Instant};
use switchyard_ledger::job::{JobId, attempt_of};
use switchyard_plan::cluster::transport::{self, LogObservation};
use switchyard_plan::cluster::view::Phase;
use switchyard_plan::job::processes_per_node;

/// Pause after the first read of a pod; it doubles each time.
const FIRST_PAUSE: Duration = Duration::from_secs(2);
/// Upper bound on the pause, reached by pods whose logs are unavailable.
const LONGEST_PAUSE: Duration = Duration::from_secs(3600);
/// Number of reads of a pod whose ranks report nothing. The last one is four minutes after the
/// first.
const MOST_READS: u32 = 8;
/// Upper bound on the bytes read. 8 ranks with `NCCL_DEBUG=INFO` write less than half of this
/// before their first collective.
const BYTES: i64 = 512 << 10;

/// Reads the link reports of the ranks of new gangs.
pub(super) struct Openings;

/// The ranks of a pod.
pub(super) struct Ranks {
    attempt: u32,
    node_rank: u32,
    processes: u32,
}

impl Reader for Openings {
    type Of = Ranks;
    type Text = String;

    const LOST: &str = "logs cannot be read: links between ranks are not compared";

    async fn read(&self, context: &Context, source: &Source<Ranks>) -> Result<String, kube::Error> {
        logs::read(context, source, LogParams { limit_bytes: Some(BYTES), ..LogParams::default() }).await
    }

    /// Pods of current attempts whose ranks may still report links.
    fn sources(&self, context: &Context) -> Vec<Source<Ranks>> {
        let index = context.index();
        let mut found = Vec::new();
        for (key, job) in &index.jobs {
            let processes = processes_per_node(job);
            if !transport::wants_logs(job, processes) {
                continue;
            }
            let (id, attempt) = (JobId::of(&job.metadata), attempt_of(job));
            let Some(family) = index.job_states.get(&id) else { continue };
            let done = |rank: u32| {
                family.log_observations.get(&attempt).and_then(|of| of.get(&rank)).is_some_and(|seen| seen.is_complete)
            };
            let pods = family.pods.values().filter(|pod| pod.attempt == attempt && pod.phase == Phase::Running);
            found.extend(pods.filter(|pod| !pod.deleting && !done(pod.node_rank)).map(|pod| Source {
                job: id.clone(),
                key: key.clone(),
                uid: pod.uid.clone(),
                pod: pod.name.clone(),
                of: Ranks { attempt, node_rank: pod.node_rank, processes },
            }));
        }
        found
    }

    fn take(&self, context: &Context, source: &Source<Ranks>, log: Option<String>, before: Option<Reads>) -> Duration {
        // An unavailable log does not mean that the ranks report nothing.
        if let Some(log) = log {
            let is_last = before.is_some_and(|before| before.count + 1 >= MOST_READS) || log.len() as i64 >= BYTES;
            let mut seen = LogObservation::of(&log, source.of.processes);
            seen.is_complete |= is_last;
            keep(context, source, seen);
        }
        before.map_or(FIRST_PAUSE, |before| (before.pause * 2).min(LONGEST_PAUSE))
    }
}

/// Stores the observation of a pod, and reconciles its job if it is new.
fn keep(context: &Context, source: &Source<Ranks>, seen: LogObservation) {
    let mut index = context.index();
    let Some(family) = index.job_states.get_mut(&source.job) else { return };
    let Ranks { attempt, node_rank, .. } = source.of;
    family.log_observations.retain(|other, _| *other == attempt);
    let of_attempt = family.log_observations.entry(attempt).or_default();
    if of_attempt.get(&node_rank) != Some(&seen) {
        of_attempt.insert(node_rank, seen);
        context.queue.add(source.key.clone(), Instant::now());
    }
}
