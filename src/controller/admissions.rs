//! Reasons why Kueue has not admitted gangs, from the events of their Workloads. The controller
//! therefore needs no permission for Workloads, and works without Kueue or with any version of it.

use super::Context;
use super::reader::{Reader, Reads, Source};
use k8s_openapi::api::events::v1::Event;
use kube::Api;
use kube::api::ListParams;
use std::time::{Duration, Instant};
use switchyard_ledger::job::{JobId, attempt_of};
use switchyard_plan::kueue;

/// Pause between two reads of one gang.
const PERIOD: Duration = Duration::from_secs(10);
/// Upper bound on the events read. It is enough, because Kueue counts repetitions in one event.
const MOST: u32 = 100;

/// Reads the events of pending Workloads.
pub(super) struct Admissions;

impl Reader for Admissions {
    /// Name of the Workload.
    type Of = String;
    type Text = Vec<Event>;

    const LOST: &str = "events cannot be read: what jobs wait for in Kueue stands in no status";

    fn sources(&self, context: &Context) -> Vec<Source<String>> {
        let index = context.index();
        let of_job = index.jobs.iter().filter_map(|(key, job)| {
            let (id, attempt) = (JobId::of(&job.metadata), attempt_of(job));
            let mut pods = index.job_states.get(&id)?.pods.values().filter(|pod| pod.attempt == attempt);
            let pod = pods.find(|pod| pod.waits_for_kueue())?;
            let (uid, name, of) = (pod.uid.clone(), pod.name.clone(), pod.group.clone()?);
            Some(Source { job: id, key: key.clone(), uid, pod: name, of })
        });
        of_job.collect()
    }

    async fn read(&self, context: &Context, source: &Source<String>) -> Result<Vec<Event>, kube::Error> {
        let api = Api::<Event>::namespaced(context.client.clone(), &source.key.namespace);
        let of_workload = format!("regarding.kind=Workload,regarding.name={}", source.of);
        Ok(api.list(&ListParams::default().fields(&of_workload).limit(MOST)).await?.items)
    }

    fn take(
        &self,
        context: &Context,
        source: &Source<String>,
        events: Option<Vec<Event>>,
        _: Option<Reads>,
    ) -> Duration {
        let words = events.and_then(|events| kueue::last_message(&events));
        let mut index = context.index();
        if words.is_some()
            && let Some(family) = index.job_states.get_mut(&source.job)
            && let Some(pod) = family.pods.values_mut().find(|pod| pod.uid == source.uid && pod.waits_for_kueue())
            && pod.admission != words
        {
            pod.admission = words;
            context.queue.add(source.key.clone(), Instant::now());
        }
        PERIOD
    }
}
