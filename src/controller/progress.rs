//! Training figures of running jobs, from the log of node 0's pod. While its kubelet does not
//! answer, progress comes from the log of another pod.
//!
//! The worker prints one line with its figures; the kubelet stores the log, and the API server
//! returns its tail. The pod therefore needs no permission, no port and no exception in its
//! NetworkPolicy, and this works wherever `kubectl logs` does. In exchange, the controller needs
//! `get` on `pods/log`. At the end no log is needed, because the termination message has the
//! figures.

use super::Context;
use super::logs;
use super::reader::{ReadState, Reader, Source};
use kube::api::LogParams;
use std::time::{Duration, Instant};
use switchyard_crds::{Framework, TrainJob};
use switchyard_ledger::job::{attempt_of, key_of};
use switchyard_worker_contract::event::{Summary, step_in};

/// Pause between two reads of one job.
const PERIOD: Duration = Duration::from_secs(10);
/// Upper bound on the pause for a pod whose log is unavailable or has no figures.
const MAX_PERIOD: Duration = Duration::from_secs(300);
/// Upper bound on the bytes read.
const MAX_BYTES: i64 = 16 << 10;

/// Whether the logs of a job's pods have training figures. Only our framework prints them.
pub(super) fn reports_progress(job: &TrainJob) -> bool {
    job.spec.trainer.framework == Framework::Switchyard
}

/// Reads the latest figures of every running job of our framework.
pub(super) struct Progress;

/// A log to read.
pub(super) struct Log {
    /// The attempt that writes it.
    attempt: u32,
    /// Whether a node of the gang does not report. The attempt then depends on whether the ranks
    /// make progress.
    is_urgent: bool,
}

impl Reader for Progress {
    type Target = Log;
    type Output = String;

    const FORBIDDEN_MESSAGE: &str = "cannot read logs: running jobs will not report training progress";

    fn is_urgent(target: &Log) -> bool {
        target.is_urgent
    }

    async fn read(&self, context: &Context, source: &Source<Log>) -> Result<String, kube::Error> {
        let tail = Some(Summary::TAIL_LINES as i64);
        logs::read(
            context,
            source,
            LogParams { tail_lines: tail, limit_bytes: Some(MAX_BYTES), ..LogParams::default() },
        )
        .await
    }

    fn sources(&self, context: &Context) -> Vec<Source<Log>> {
        let index = context.index();
        let mut sources = Vec::new();
        let nodes = index.usage.nodes();
        for (id, job, family) in index.live_jobs().filter(|(_, job, _)| reports_progress(job)) {
            let attempt = attempt_of(job);
            let is_silent = |node: &String| nodes.get(node).is_some_and(|node| node.silent_since.is_some());
            let current = || family.pods.values().filter(|pod| pod.attempt == attempt);
            let is_urgent = current().any(|pod| pod.node.as_ref().is_some_and(is_silent));
            sources.extend(family.progress.sources(attempt, current(), nodes).into_iter().map(|pod| Source {
                job: id.clone(),
                key: key_of(&job.metadata),
                uid: pod.uid.clone(),
                pod: pod.name.clone(),
                target: Log { attempt, is_urgent },
            }));
        }
        sources
    }

    fn handle(
        &self,
        context: &Context,
        source: &Source<Log>,
        log: Option<String>,
        before: Option<ReadState>,
    ) -> Duration {
        let mut guard = context.index();
        let index = &mut *guard;
        let status = index.jobs.get(&source.key).and_then(|job| job.status.as_ref());
        let step = log.as_deref().and_then(step_in);
        if let Some(family) = index.job_states.get_mut(&source.job) {
            match &log {
                Some(_) => family.progress.record_step(source.target.attempt, &source.uid, step, status, context.now()),
                None => family.progress.record_unreadable(&source.uid),
            }
            // Only the pod of rank 0 prints a summary.
            let summary = log.as_deref().and_then(Summary::last_in).map(|summary| (source.target.attempt, summary));
            if summary.is_some() && family.summary != summary {
                family.summary = summary;
                context.queue.add(source.key.clone(), Instant::now());
            }
        }
        match step {
            Some(_) => PERIOD,
            None => (before.map_or(PERIOD, |before| before.pause) * 2).min(MAX_PERIOD),
        }
    }
}
