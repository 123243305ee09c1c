//! Figures of running jobs, from the log of the pod of node 0.
//!
//! The worker prints one line that says where the training stands; the kubelet keeps the log, and the API server returns the end of
//! it. So the pod needs no permission, no port and no hole in its NetworkPolicy, and it works wherever `kubectl logs` does.
//! The price is `get` on `pods/log` for the controller. At the end no log is needed: the termination message has the figures.

use super::Context;
use super::logs;
use super::reader::{Reader, Reads, Source};
use jiff::Timestamp;
use kube::api::LogParams;
use std::time::{Duration, Instant};
use switchyard_crds::Framework;
use switchyard_ledger::job::{JobId, attempt_of};
use switchyard_plan::cluster::view::Phase;
use switchyard_worker_contract::event::Summary;

/// Pause between two reads of one job.
const PERIOD: Duration = Duration::from_secs(10);
/// Longest pause for a pod whose log cannot be read, or says nothing.
const LONGEST: Duration = Duration::from_secs(300);
/// Bytes read at most.
const BYTES: i64 = 16 << 10;

/// Reads the last figures of every running job of our framework.
pub(super) struct Progress;

impl Reader for Progress {
    /// The attempt that writes the log.
    type Of = u32;
    type Text = String;

    const LOST: &str = "logs cannot be read: running jobs have no figures";

    async fn read(&self, context: &Context, source: &Source<u32>) -> Result<String, kube::Error> {
        let tail = Some(Summary::TAIL_LINES as i64);
        logs::read(context, source, LogParams { tail_lines: tail, limit_bytes: Some(BYTES), ..LogParams::default() })
            .await
    }

    fn sources(&self, context: &Context) -> Vec<Source<u32>> {
        let index = context.index();
        let mut found = Vec::new();
        for (key, job) in &index.jobs {
            let id = JobId::of(&job.metadata);
            let attempt = attempt_of(job);
            let Some(family) = index.families.get(&id).filter(|_| job.spec.trainer.framework == Framework::Switchyard)
            else {
                continue;
            };
            let first = family.pods.values().find(|pod| pod.attempt == attempt && pod.node_rank == 0);
            if let Some(pod) = first.filter(|pod| pod.phase == Phase::Running && !pod.deleting) {
                let (uid, pod) = (pod.uid.clone(), pod.name.clone());
                found.push(Source { job: id, key: key.clone(), uid, pod, of: attempt });
            }
        }
        found
    }

    fn take(&self, context: &Context, source: &Source<u32>, log: Option<String>, before: Option<Reads>) -> Duration {
        let Some(summary) = log.as_deref().and_then(Summary::last_in) else {
            return (before.map_or(PERIOD, |before| before.pause) * 2).min(LONGEST);
        };
        let mut index = context.index();
        if let Some(family) = index.families.get_mut(&source.job)
            && family.summary != Some((source.of, summary))
        {
            if family.summary.as_ref().is_none_or(|(_, before)| before.step != summary.step) {
                family.progress = Some(Timestamp::now());
            }
            family.summary = Some((source.of, summary));
            context.queue.add(source.key.clone(), Instant::now());
        }
        PERIOD
    }
}
