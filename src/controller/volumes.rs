//! From where the volumes of gangs can be used that have no place yet. Only they are read, from time to time: watches of all volumes and claims of a
//! cluster would cost more, and need more rights.

use super::Context;
use super::reader::{Reader, Reads, Source};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::Api;
use std::sync::Arc;
use std::time::{Duration, Instant};
use switchyard_ledger::job::{JobId, attempt_of};
use switchyard_plan::eligible::Reach;
use switchyard_plan::volumes;

/// Pause between two reads of one gang.
const PERIOD: Duration = Duration::from_secs(10);
/// The same while a claim has no volume that it could use anywhere: one may be given to it at any moment.
const SOON: Duration = Duration::from_secs(2);

/// Reads the volumes of gangs that wait.
pub(super) struct Volumes;

impl Reader for Volumes {
    /// Names of PersistentVolumeClaims.
    type Of = Vec<String>;
    type Text = Vec<Reach>;

    const LOST: &str = "volumes cannot be read: where they can be used is left to the scheduler";

    fn sources(&self, context: &Context) -> Vec<Source<Vec<String>>> {
        let index = context.index();
        let of_job = index.jobs.iter().filter_map(|(key, job)| {
            let (id, attempt) = (JobId::of(&job.metadata), attempt_of(job));
            let mut pods = index.families.get(&id)?.pods.values().filter(|pod| pod.attempt == attempt);
            // All pods of a gang are made of one template.
            let (pod, of) = pods.find_map(|pod| Some((pod, &pod.rules.as_ref()?.claims)))?;
            let (uid, name) = (pod.uid.clone(), pod.name.clone());
            let source = Source { job: id, key: key.clone(), uid, pod: name, of: of.clone() };
            Some(source).filter(|source| !source.of.is_empty())
        });
        of_job.collect()
    }

    async fn read(&self, context: &Context, source: &Source<Vec<String>>) -> Result<Vec<Reach>, kube::Error> {
        let claims = Api::<PersistentVolumeClaim>::namespaced(context.client.clone(), &source.key.namespace);
        let all = Api::<PersistentVolume>::all(context.client.clone());
        let classes = Api::<StorageClass>::all(context.client.clone());
        let mut found = Vec::new();
        for name in &source.of {
            // One that does not exist is the scheduler's to tell.
            let Some(claim) = claims.get_opt(name).await? else { continue };
            let (mut class, mut known) = (None, Vec::new());
            if let Some(volume) = volumes::bound(&claim) {
                known.extend(all.get_opt(volume).await?);
            } else if let Some(name) = volumes::class(&claim) {
                class = classes.get_opt(name).await?;
                if class.as_ref().is_some_and(volumes::is_chosen) {
                    known = all.list(&Default::default()).await?.items;
                }
            }
            found.extend(volumes::reach(&claim, class.as_ref(), &known));
        }
        Ok(found)
    }

    fn take(
        &self,
        context: &Context,
        source: &Source<Vec<String>>,
        found: Option<Vec<Reach>>,
        _: Option<Reads>,
    ) -> Duration {
        let mut index = context.index();
        let Some(family) = index.families.get_mut(&source.job) else { return PERIOD };
        let is_nowhere = |reach: &Reach| reach.nodes.node_selector_terms.is_empty();
        let pause = if found.iter().flatten().any(is_nowhere) { SOON } else { PERIOD };
        let mut is_news = false;
        for rules in family.pods.values_mut().filter_map(|pod| pod.rules.as_mut()) {
            // What cannot be read is as it was, or left to the scheduler.
            let next = found.clone().or_else(|| rules.reach.clone()).unwrap_or_default();
            if rules.claims == source.of && rules.reach.as_ref() != Some(&next) {
                Arc::make_mut(rules).reach = Some(next);
                is_news = true;
            }
        }
        if is_news {
            context.queue.add(source.key.clone(), Instant::now());
        }
        pause
    }
}
