//! Kubelet warnings about pods that do not start. Failures to create a volume, a sandbox or a
//! network appear only in events, not in a status.
//!
//! Only events of pods that have not started after some seconds are read. This avoids watching the
//! events of all pods, and costs no requests while pods start normally.

use super::Context;
use super::reader::{ReadState, Reader, Source};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::events::v1::Event;
use kube::Api;
use kube::api::ListParams;
use std::time::{Duration, Instant};
use switchyard_ledger::job::{attempt_of, key_of};
use switchyard_plan::cluster::blocker;

/// Time that a pod normally needs to start.
const USUAL_START: SignedDuration = SignedDuration::from_secs(4);
/// Pause between two reads of one pod. A warning is seen within 15 s.
const PERIOD: Duration = Duration::from_secs(10);
/// Upper bound on the events read. A pod that does not start has only a few.
const MAX_EVENTS: u32 = 100;

/// Reads the events of pods that do not start.
pub(super) struct Warnings;

impl Reader for Warnings {
    type Target = ();
    type Output = Vec<Event>;

    const FORBIDDEN_MESSAGE: &str = "cannot read events: job statuses will not say why a pod does not start";

    fn sources(&self, context: &Context) -> Vec<Source<()>> {
        let now = context.now();
        let index = context.index();
        let mut sources = Vec::new();
        for (id, job, family) in index.live_jobs() {
            let attempt = attempt_of(job);
            let is_late = |started: Timestamp| now.duration_since(started) >= USUAL_START;
            let late = family.pods.values().filter(|pod| pod.attempt == attempt && pod.is_silent());
            let late = late.filter(|pod| pod.started.is_some_and(is_late));
            sources.extend(late.map(|pod| {
                let (uid, pod) = (pod.uid.clone(), pod.name.clone());
                Source { job: id.clone(), key: key_of(&job.metadata), uid, pod, target: () }
            }));
        }
        sources
    }

    async fn read(&self, context: &Context, source: &Source<()>) -> Result<Vec<Event>, kube::Error> {
        let api = Api::<Event>::namespaced(context.client.clone(), &source.key.namespace);
        let selector = ListParams::default().fields(&format!("regarding.uid={}", source.uid)).limit(MAX_EVENTS);
        Ok(api.list(&selector).await?.items)
    }

    fn handle(
        &self,
        context: &Context,
        source: &Source<()>,
        events: Option<Vec<Event>>,
        _: Option<ReadState>,
    ) -> Duration {
        let Some(events) = events else { return PERIOD };
        let (warning, progress) = (blocker::warning(&events), blocker::progress(&events));
        let mut index = context.index();
        if let Some(family) = index.job_states.get_mut(&source.job)
            && let Some(pod) = family.pods.values_mut().find(|pod| pod.uid == source.uid)
        {
            // API servers delete events after an hour, so keep the newer progress.
            let is_older = pod.progress.as_ref().is_some_and(|known| known.at > progress.at);
            let progress = if is_older { pod.progress.clone() } else { Some(progress) };
            if pod.warning != warning || pod.progress != progress {
                (pod.warning, pod.progress) = (warning, progress);
                context.queue.add(source.key.clone(), Instant::now());
            }
        }
        PERIOD
    }
}
