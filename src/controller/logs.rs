//! Reads the logs of pods at a bounded rate, whatever the number of jobs: with many, each is read less often.

use super::Context;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::LogParams;
use std::collections::HashMap;
use std::time::{Duration, Instant};
use switchyard_crds::names::TRAINER;
use switchyard_ledger::job::{JobId, Key};
use tokio::sync::watch::Receiver;
use tracing::{debug, warn};

/// Reads per second over all jobs, for each kind of reader.
const READS_PER_SECOND: usize = 10;
/// Time for one read.
const DEADLINE: Duration = Duration::from_secs(5);

/// A pod to read, and what the reader wants to know about it.
pub(super) struct Source<T> {
    pub job: JobId,
    pub key: Key,
    /// UID of the pod.
    pub uid: String,
    pub pod: String,
    pub of: T,
}

/// The reads of one pod so far.
#[derive(Clone, Copy)]
pub(super) struct Reads {
    pub count: u32,
    /// Pause after the last one.
    pub pause: Duration,
    next: Instant,
}

/// What a reader does with logs.
pub(super) trait Reader {
    type Of;

    /// What does not work while the controller may not read logs.
    const LOST: &str;

    /// The part of a log that is read.
    fn params(&self) -> LogParams;

    /// The pods to read.
    fn sources(&self, context: &Context) -> Vec<Source<Self::Of>>;

    /// Takes what was read; `None`: the log cannot be read now. `before`: the reads of this pod before this one. Returns the pause until the
    /// next read.
    fn take(&self, context: &Context, source: &Source<Self::Of>, log: Option<&str>, before: Option<Reads>) -> Duration;
}

/// Reads until `stop`.
pub(super) async fn run<R: Reader>(context: Context, reader: R, mut stop: Receiver<bool>) {
    let mut reads: HashMap<String, Reads> = HashMap::new();
    let mut is_forbidden = false;
    loop {
        if tokio::time::timeout(Duration::from_secs(1), stop.wait_for(|stop| *stop)).await.is_ok() {
            return;
        }
        if !context.leads() {
            continue;
        }
        let sources = reader.sources(&context);
        let now = Instant::now();
        reads.retain(|uid, _| sources.iter().any(|source| source.uid == *uid));
        let next = |source: &Source<R::Of>| reads.get(&source.uid).map_or(now, |reads| reads.next);
        let mut due: Vec<&Source<R::Of>> = sources.iter().filter(|source| next(source) <= now).collect();
        due.sort_by_key(|source| next(source));
        due.truncate(READS_PER_SECOND);
        let logs = due.iter().map(|source| read(&context, &source.key.namespace, &source.pod, reader.params()));
        for (source, log) in due.iter().zip(futures::future::join_all(logs).await) {
            let log = log.unwrap_or_else(|error| {
                // The same for every pod: logged once.
                if !std::mem::replace(&mut is_forbidden, true) {
                    warn!(pod = source.pod, error, "logs cannot be read: {}", R::LOST);
                }
                None
            });
            is_forbidden &= log.is_none();
            let before = reads.get(&source.uid).copied();
            let pause = reader.take(&context, source, log.as_deref(), before);
            let count = before.map_or(0, |before| before.count) + 1;
            reads.insert(source.uid.clone(), Reads { count, pause, next: Instant::now() + pause });
        }
    }
}

/// A part of the log of a pod's trainer; `None`: it cannot be read now.
///
/// # Errors
/// The controller lacks the right to read logs.
async fn read(context: &Context, namespace: &str, pod: &str, params: LogParams) -> Result<Option<String>, String> {
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
