//! Log heads of a gang's pods, in which the ranks report the links between them.
//!
//! Each pod is read a few times, at growing intervals, until its ranks have reported or are no
//! longer expected to. Observations are kept in the index until the verdict is in the status.

use super::Context;
use super::logs;
use super::reader::{ReadState, Reader, Source};
use kube::api::LogParams;
use std::time::{Duration, Instant};
use switchyard_ledger::job::{attempt_of, key_of};
use switchyard_plan::cluster::transport::{self, LogObservation};
use switchyard_plan::cluster::view::Phase;
use switchyard_plan::job::processes_per_node;

/// Pause after the first read of a pod; it doubles each time.
const INITIAL_PAUSE: Duration = Duration::from_secs(2);
/// Upper bound on the pause, reached by pods whose logs are unavailable.
const MAX_PAUSE: Duration = Duration::from_secs(3600);
/// Number of reads of a pod whose ranks report nothing. The last one is four minutes after the
/// first.
const MAX_READS: u32 = 8;
/// Upper bound on the bytes read. 8 ranks with `NCCL_DEBUG=INFO` write less than half of this
/// before their first collective.
const MAX_BYTES: i64 = 512 << 10;

/// Reads the link reports of the ranks of new gangs.
pub(super) struct LogHeads;

/// The ranks of a pod.
pub(super) struct Ranks {
    attempt: u32,
    node_rank: u32,
    processes: u32,
}

impl Reader for LogHeads {
    type Target = Ranks;
    type Output = String;

    const FORBIDDEN_MESSAGE: &str = "cannot read logs: the links between ranks will not be checked";

    async fn read(&self, context: &Context, source: &Source<Ranks>) -> Result<String, kube::Error> {
        logs::read(context, source, LogParams { limit_bytes: Some(MAX_BYTES), ..LogParams::default() }).await
    }

    /// Pods of current attempts whose ranks may still report links.
    fn sources(&self, context: &Context) -> Vec<Source<Ranks>> {
        let index = context.index();
        let mut sources = Vec::new();
        for (id, job, family) in index.live_jobs() {
            let processes = processes_per_node(job);
            if !transport::wants_logs(job, processes) {
                continue;
            }
            let attempt = attempt_of(job);
            let is_done = |rank: u32| {
                family
                    .log_observations
                    .get(&attempt)
                    .and_then(|pods| pods.get(&rank))
                    .is_some_and(|pod| pod.is_complete)
            };
            let pods = family.pods.values().filter(|pod| pod.attempt == attempt && pod.phase == Phase::Running);
            sources.extend(pods.filter(|pod| !pod.deleting && !is_done(pod.node_rank)).map(|pod| Source {
                job: id.clone(),
                key: key_of(&job.metadata),
                uid: pod.uid.clone(),
                pod: pod.name.clone(),
                target: Ranks { attempt, node_rank: pod.node_rank, processes },
            }));
        }
        sources
    }

    fn handle(
        &self,
        context: &Context,
        source: &Source<Ranks>,
        log: Option<String>,
        before: Option<ReadState>,
    ) -> Duration {
        // An unavailable log does not mean that the ranks report nothing.
        if let Some(log) = log {
            let is_last = before.is_some_and(|before| before.count + 1 >= MAX_READS) || log.len() as i64 >= MAX_BYTES;
            let mut observation = LogObservation::of(&log, source.target.processes);
            observation.is_complete |= is_last;
            store(context, source, observation);
        }
        before.map_or(INITIAL_PAUSE, |before| (before.pause * 2).min(MAX_PAUSE))
    }
}

/// Stores the observation of a pod, and reconciles its job if it is new.
fn store(context: &Context, source: &Source<Ranks>, observation: LogObservation) {
    let mut index = context.index();
    let Some(family) = index.job_states.get_mut(&source.job) else { return };
    let Ranks { attempt, node_rank, .. } = source.target;
    family.log_observations.retain(|other, _| *other == attempt);
    let pods = family.log_observations.entry(attempt).or_default();
    if pods.get(&node_rank) != Some(&observation) {
        pods.insert(node_rank, observation);
        context.queue.add(source.key.clone(), Instant::now());
    }
}
