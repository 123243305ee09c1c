//! Reads the logs and events of pods at a bounded rate. With many jobs, each is read less often.

use super::Context;
use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};
use switchyard_ledger::job::{JobId, Key};
use tokio::sync::watch::Receiver;
use tracing::{debug, warn};

/// Reads per second over all jobs, for each kind of reader.
const READS_PER_SECOND: usize = 10;
/// Timeout of one read.
const DEADLINE: Duration = Duration::from_secs(5);

/// A pod to read, and the data that its reader needs.
pub(super) struct Source<T> {
    pub job: JobId,
    pub key: Key,
    /// UID of the pod.
    pub uid: String,
    pub pod: String,
    pub target: T,
}

/// Number of reads of a pod, and the time of the next one.
#[derive(Clone, Copy)]
pub(super) struct ReadState {
    pub count: u32,
    /// Pause after the last read.
    pub pause: Duration,
    next: Instant,
}

/// A kind of reads.
pub(super) trait Reader {
    type Target;
    type Output;

    /// The log message when the controller lacks the permission: what is unreadable, and what does
    /// not work without it.
    const FORBIDDEN_MESSAGE: &str;

    /// Whether it is read before other due pods.
    fn is_urgent(_target: &Self::Target) -> bool {
        false
    }

    /// The pods to read.
    fn sources(&self, context: &Context) -> Vec<Source<Self::Target>>;

    async fn read(&self, context: &Context, source: &Source<Self::Target>) -> Result<Self::Output, kube::Error>;

    /// Takes the result of a read; `None` if it failed. `before` has the earlier reads of this pod.
    /// Returns the pause until the next read.
    fn handle(
        &self,
        context: &Context,
        source: &Source<Self::Target>,
        output: Option<Self::Output>,
        before: Option<ReadState>,
    ) -> Duration;
}

/// Reads pods until `stop` becomes true.
pub(super) async fn run<R: Reader>(context: Context, reader: R, mut stop: Receiver<bool>) {
    let mut reads: HashMap<String, ReadState> = HashMap::new();
    let mut is_forbidden = false;
    loop {
        if tokio::time::timeout(Duration::from_secs(1), stop.wait_for(|stop| *stop)).await.is_ok() {
            return;
        }
        if !context.is_leader() {
            reads.clear();
            continue;
        }
        let sources = reader.sources(&context);
        let now = Instant::now();
        let uids: HashSet<&str> = sources.iter().map(|source| source.uid.as_str()).collect();
        reads.retain(|uid, _| uids.contains(uid.as_str()));
        let next = |source: &Source<R::Target>| reads.get(&source.uid).map_or(now, |reads| reads.next);
        let mut due: Vec<&Source<R::Target>> = sources.iter().filter(|source| next(source) <= now).collect();
        due.sort_by_key(|source| (!R::is_urgent(&source.target), next(source)));
        due.truncate(READS_PER_SECOND);
        let outputs = due.iter().map(|source| tokio::time::timeout(DEADLINE, reader.read(&context, source)));
        for (source, output) in due.iter().zip(futures::future::join_all(outputs).await) {
            let output = match output {
                Ok(Ok(output)) => {
                    is_forbidden = false;
                    Some(output)
                }
                Ok(Err(kube::Error::Api(status))) if status.code == 403 => {
                    // Log it once, because all pods have the same error.
                    if !std::mem::replace(&mut is_forbidden, true) {
                        warn!(pod = source.pod, error = status.message, "{}", R::FORBIDDEN_MESSAGE);
                    }
                    None
                }
                Ok(Err(error)) => {
                    debug!(pod = source.pod, %error, "read failed");
                    None
                }
                Err(_) => None,
            };
            let before = reads.get(&source.uid).copied();
            let pause = reader.handle(&context, source, output, before);
            let count = before.map_or(0, |before| before.count) + 1;
            reads.insert(source.uid.clone(), ReadState { count, pause, next: Instant::now() + pause });
        }
    }
}
