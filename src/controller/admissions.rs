//! Reasons why Kueue has not admitted gangs, from the events of their Workloads. The controller
//! therefore needs no permission for Workloads, and works without Kueue or with any version of it.

use super::Context;
use super::reader::{ReadState, Reader, Source};
use k8s_openapi::api::events::v1::Event;
use kube::Api;
use kube::api::ListParams;
use std::time::{Duration, Instant};
use switchyard_ledger::job::{attempt_of, key_of};
use switchyard_plan::kueue;

/// Pause between two reads of one gang.
const PERIOD: Duration = Duration::from_secs(10);
/// Upper bound on the events read. It is enough, because Kueue counts repetitions in one event.
const MAX_EVENTS: u32 = 100;

/// Reads the events of pending Workloads.
pub(super) struct Admissions;

impl Reader for Admissions {
    /// Name of the Workload.
    type Target = String;
    type Output = Vec<Event>;

    const FORBIDDEN_MESSAGE: &str = "cannot read events: job statuses will not say why Kueue has not admitted a job";

    fn sources(&self, context: &Context) -> Vec<Source<String>> {
        let index = context.index();
        let sources = index.live_jobs().filter_map(|(id, job, family)| {
            let attempt = attempt_of(job);
            let mut pods = family.pods.values().filter(|pod| pod.attempt == attempt);
            let pod = pods.find(|pod| pod.waits_for_kueue())?;
            let (uid, name, target) = (pod.uid.clone(), pod.name.clone(), pod.group.clone()?);
            Some(Source { job: id.clone(), key: key_of(&job.metadata), uid, pod: name, target })
        });
        sources.collect()
    }

    async fn read(&self, context: &Context, source: &Source<String>) -> Result<Vec<Event>, kube::Error> {
        let api = Api::<Event>::namespaced(context.client.clone(), &source.key.namespace);
        let selector = format!("regarding.kind=Workload,regarding.name={}", source.target);
        Ok(api.list(&ListParams::default().fields(&selector).limit(MAX_EVENTS)).await?.items)
    }

    fn handle(
        &self,
        context: &Context,
        source: &Source<String>,
        events: Option<Vec<Event>>,
        _: Option<ReadState>,
    ) -> Duration {
        let message = events.and_then(|events| kueue::last_message(&events));
        let mut index = context.index();
        if message.is_some()
            && let Some(family) = index.job_states.get_mut(&source.job)
            && let Some(pod) = family.pods.values_mut().find(|pod| pod.uid == source.uid && pod.waits_for_kueue())
            && pod.admission != message
        {
            pod.admission = message;
            context.queue.add(source.key.clone(), Instant::now());
        }
        PERIOD
    }
}
