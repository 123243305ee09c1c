//! Figures of running jobs, from the log of the pod of node 0.
//!
//! The worker prints one line that says where the training stands; the kubelet keeps the log, and the API server hands the end of
//! it out. So the pod needs no permission, no port and no hole in its NetworkPolicy, and it works wherever `kubectl logs` does.
//! The price is `get` on `pods/log` for the controller. The number of reads is bounded over all jobs, whatever their number: with
//! many jobs each is read less often. At the end no log is needed, since the termination message has the figures.

use super::Context;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::LogParams;
use std::collections::HashMap;
use std::time::{Duration, Instant};
use switchyard_crds::Framework;
use switchyard_ledger::index::Key;
use switchyard_worker_contract::event::Summary;
use tokio::sync::watch::Receiver;
use tracing::{debug, warn};

use switchyard_crds::names::TRAINER;
use switchyard_plan::cluster::view::Phase;

/// Pause between two reads of one job.
const PERIOD: Duration = Duration::from_secs(10);
/// Longest pause for a pod whose log cannot be read, or says nothing.
const LONGEST: Duration = Duration::from_secs(300);
/// Reads per second over all jobs.
const READS_PER_SECOND: usize = 10;
/// Bytes read at most.
const BYTES: i64 = 16 << 10;
/// Time for one read.
const DEADLINE: Duration = Duration::from_secs(5);

/// When a pod is read next, and the pause after that.
struct Next {
    at: Instant,
    pause: Duration,
}

/// A pod to read: UID of its job, its own, its names.
struct Source {
    job: String,
    uid: String,
    key: Key,
    pod: String,
}

/// Reads until `stop`.
pub(super) async fn run(context: Context, mut stop: Receiver<bool>) {
    let mut next: HashMap<String, Next> = HashMap::new();
    let mut is_forbidden = false;
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
        let mut due: Vec<(Instant, &Source)> = sources
            .iter()
            .map(|source| (next.get(&source.uid).map_or(now, |next| next.at), source))
            .filter(|(at, _)| *at <= now)
            .collect();
        due.sort_by_key(|(at, _)| *at);
        due.truncate(READS_PER_SECOND);
        let due: Vec<&Source> = due.into_iter().map(|(_, source)| source).collect();
        let summaries = futures::future::join_all(due.iter().map(|source| read(&context, source))).await;
        for (source, summary) in due.into_iter().zip(summaries) {
            let summary = summary.unwrap_or_else(|error| {
                // The same for every pod: told once.
                if !std::mem::replace(&mut is_forbidden, true) {
                    warn!(pod = source.pod, error, "logs cannot be read: running jobs have no figures");
                }
                None
            });
            is_forbidden &= summary.is_none();
            let pause = next.get(&source.uid).map_or(PERIOD, |next| next.pause);
            let pause = if summary.is_some() { PERIOD } else { (pause * 2).min(LONGEST) };
            next.insert(source.uid.clone(), Next { at: Instant::now() + pause, pause });
            if let Some(summary) = summary {
                let mut index = context.index();
                if let Some(family) = index.families.get_mut(&source.job)
                    && family.summary != Some(summary)
                {
                    family.summary = Some(summary);
                    context.queue.add(source.key.clone(), Instant::now());
                }
            }
        }
    }
}

/// Running pods of node 0 of the current attempts.
fn sources(context: &Context) -> Vec<Source> {
    let index = context.index();
    let mut found = Vec::new();
    for (key, job) in &index.jobs {
        let uid = job.metadata.uid.clone().unwrap_or_default();
        let attempt = job.status.as_ref().and_then(|status| status.attempt).unwrap_or(0).unsigned_abs();
        let Some(family) = index.families.get(&uid).filter(|_| job.spec.trainer.framework == Framework::Switchyard)
        else {
            continue;
        };
        let first = family.pods.values().find(|pod| pod.attempt == attempt && pod.node_rank == 0);
        if let Some(pod) = first.filter(|pod| pod.phase == Phase::Running && !pod.deleting) {
            found.push(Source { job: uid, uid: pod.uid.clone(), key: key.clone(), pod: pod.name.clone() });
        }
    }
    found
}

/// The last figures in a log; `None`: there are none, or it cannot be read now.
///
/// # Errors
/// The controller lacks the right to read logs.
async fn read(context: &Context, source: &Source) -> Result<Option<Summary>, String> {
    let params =
        LogParams { tail_lines: Some(Summary::TAIL_LINES as i64), limit_bytes: Some(BYTES), ..LogParams::default() };
    let log = log(context, &source.key.namespace, &source.pod, params).await?;
    Ok(log.as_deref().and_then(Summary::last_in))
}

/// A part of the log of a pod's trainer; `None`: it cannot be read now.
///
/// # Errors
/// The controller lacks the right to read logs.
pub(super) async fn log(
    context: &Context,
    namespace: &str,
    pod: &str,
    params: LogParams,
) -> Result<Option<String>, String> {
    let api = Api::<Pod>::namespaced(context.client.clone(), namespace);
    let params = LogParams { container: Some(TRAINER.into()), ..params };
    match tokio::time::timeout(DEADLINE, api.logs(pod, &params)).await {
        Ok(Ok(log)) => Ok(Some(log)),
        Ok(Err(kube::Error::Api(status))) if status.code == 403 => Err(status.message),
        Ok(Err(error)) => {
            debug!(pod, %error, "the log cannot be read");
            Ok(None)
        }
        Err(_) => Ok(None),
    }
}
