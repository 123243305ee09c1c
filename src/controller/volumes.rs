//! From where the volumes of gangs can be used that have no place yet, and whether the claims that their pods name exist. Only they are read, from
//! time to time: watches of all volumes and claims of a cluster would cost more, and need more rights.

use super::Context;
use super::reader::{Reader, Reads, Source};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimTemplate};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::ListParams;
use kube::{Api, Client};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use switchyard_ledger::job::{JobId, attempt_of};
use switchyard_plan::eligible::{DeviceSource, Reach};
use switchyard_plan::volumes;
use tokio::sync::Mutex;
use tracing::warn;

/// Pause between two reads of one gang.
const PERIOD: Duration = Duration::from_secs(10);
/// The same while a claim has no volume that it could use anywhere: one may be given to it at any moment.
const SOON: Duration = Duration::from_secs(2);

/// Volumes in a page of the list of all of them.
const PAGE: u32 = 500;
/// Pages that are read. Of a cluster with more volumes, the scheduler alone knows which one a claim can get.
const MOST_PAGES: usize = 40;

/// Reads the volumes of gangs that wait.
#[derive(Default)]
pub(super) struct Volumes {
    /// The volumes of each class that claims choose from, as they were listed last: one list serves all gangs.
    of_class: Mutex<BTreeMap<String, Listed>>,
}

/// The volumes of a class.
struct Listed {
    at: Instant,
    /// `None`: there are too many volumes to list.
    volumes: Option<Arc<Vec<PersistentVolume>>>,
}

impl Volumes {
    /// The volumes of a class; `None`: there are too many volumes to list.
    async fn of_class(&self, client: &Client, class: &str) -> Result<Option<Arc<Vec<PersistentVolume>>>, kube::Error> {
        // Held while the list is read, so that gangs of one moment share it.
        let mut all = self.of_class.lock().await;
        all.retain(|_, listed| listed.at.elapsed() < SOON);
        if let Some(listed) = all.get(class) {
            return Ok(listed.volumes.clone());
        }
        let volumes = list(client, class).await?.map(Arc::new);
        if volumes.is_none() {
            let most = PAGE as usize * MOST_PAGES;
            warn!(class, "more than {most} PersistentVolumes: where its claims can be used is left to the scheduler");
        }
        all.insert(class.to_string(), Listed { at: Instant::now(), volumes: volumes.clone() });
        Ok(volumes)
    }
}

/// Lists all volumes page by page, and keeps those of a class.
async fn list(client: &Client, class: &str) -> Result<Option<Vec<PersistentVolume>>, kube::Error> {
    let api = Api::<PersistentVolume>::all(client.clone());
    let (mut params, mut found) = (ListParams::default().limit(PAGE), Vec::new());
    let is_of_class = |volume: &PersistentVolume| {
        volume.spec.as_ref().is_some_and(|spec| spec.storage_class_name.as_deref() == Some(class))
    };
    for _ in 0..MOST_PAGES {
        let page = api.list(&params).await?;
        found.extend(page.items.into_iter().filter(is_of_class));
        params.continue_token = page.metadata.continue_.filter(|token| !token.is_empty());
        if params.continue_token.is_none() {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

/// What the pods of a gang name.
pub(super) struct Named {
    /// PersistentVolumeClaims.
    claims: Vec<String>,
    devices: Vec<DeviceSource>,
}

/// What was found of it.
#[derive(Default, Clone)]
pub(super) struct Found {
    reach: Vec<Reach>,
    absent: Vec<String>,
}

impl Reader for Volumes {
    type Of = Named;
    type Text = Found;

    const LOST: &str = "claims and volumes cannot be read: where they can be used is left to the scheduler";

    fn sources(&self, context: &Context) -> Vec<Source<Named>> {
        let index = context.index();
        let of_job = index.jobs.iter().filter_map(|(key, job)| {
            let (id, attempt) = (JobId::of(&job.metadata), attempt_of(job));
            let mut pods = index.families.get(&id)?.pods.values().filter(|pod| pod.attempt == attempt);
            // All pods of a gang are made of one template.
            let (pod, rules) = pods.find_map(|pod| Some((pod, pod.rules.as_ref()?)))?;
            let (uid, name) = (pod.uid.clone(), pod.name.clone());
            let of = Named { claims: rules.claims.clone(), devices: rules.devices.clone() };
            let source = Source { job: id, key: key.clone(), uid, pod: name, of };
            Some(source).filter(|Source { of, .. }| !(of.claims.is_empty() && of.devices.is_empty()))
        });
        of_job.collect()
    }

    async fn read(&self, context: &Context, source: &Source<Named>) -> Result<Found, kube::Error> {
        let namespace = source.key.namespace.as_str();
        let mut found = Found::default();
        for name in &source.of.claims {
            self.read_volume(&context.client, namespace, name, &mut found).await?;
        }
        for device in &source.of.devices {
            let (kind, name, exists) = match device {
                DeviceSource::Claim(name) => {
                    let api = Api::<ResourceClaim>::namespaced(context.client.clone(), namespace);
                    ("ResourceClaim", name, api.get_metadata_opt(name).await?.is_some())
                }
                DeviceSource::Template(name) => {
                    let api = Api::<ResourceClaimTemplate>::namespaced(context.client.clone(), namespace);
                    ("ResourceClaimTemplate", name, api.get_metadata_opt(name).await?.is_some())
                }
            };
            found.absent.extend((!exists).then(|| volumes::absent_device(kind, name)));
        }
        Ok(found)
    }

    fn take(&self, context: &Context, source: &Source<Named>, found: Option<Found>, _: Option<Reads>) -> Duration {
        let mut index = context.index();
        let Some(family) = index.families.get_mut(&source.job) else { return PERIOD };
        let is_nowhere = |reach: &Reach| reach.nodes.node_selector_terms.is_empty();
        let pause = if found.iter().flat_map(|found| &found.reach).any(is_nowhere) { SOON } else { PERIOD };
        let mut is_news = false;
        for rules in family.pods.values_mut().filter_map(|pod| pod.rules.as_mut()) {
            // What cannot be read is as it was, or left to the scheduler.
            let before = || Found { reach: rules.reach.clone().unwrap_or_default(), absent: rules.absent.clone() };
            let next = found.clone().unwrap_or_else(before);
            let is_same = (&rules.claims, &rules.devices) == (&source.of.claims, &source.of.devices);
            if is_same && (rules.reach.as_ref() != Some(&next.reach) || rules.absent != next.absent) {
                let rules = Arc::make_mut(rules);
                (rules.reach, rules.absent) = (Some(next.reach), next.absent);
                is_news = true;
            }
        }
        if is_news {
            context.queue.add(source.key.clone(), Instant::now());
        }
        pause
    }
}

impl Volumes {
    async fn read_volume(
        &self,
        client: &Client,
        namespace: &str,
        name: &str,
        found: &mut Found,
    ) -> Result<(), kube::Error> {
        let claims = Api::<PersistentVolumeClaim>::namespaced(client.clone(), namespace);
        let classes = Api::<StorageClass>::all(client.clone());
        let Some(claim) = claims.get_opt(name).await? else {
            found.absent.push(volumes::absent_claim(name));
            return Ok(());
        };
        let (mut class, mut known) = (None, Arc::default());
        if let Some(volume) = volumes::bound(&claim) {
            let all = Api::<PersistentVolume>::all(client.clone());
            known = Arc::new(all.get_opt(volume).await?.into_iter().collect());
        } else if let Some(name) = volumes::class(&claim) {
            class = classes.get_opt(name).await?;
            if class.as_ref().is_some_and(volumes::is_chosen) {
                let Some(listed) = self.of_class(client, name).await? else { return Ok(()) };
                known = listed;
            }
        }
        found.reach.extend(volumes::reach(&claim, class.as_ref(), &known));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use http::{Request, Response};
    use kube::client::Body;
    use serde_json::{Value, json};
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// A server that has `pages` pages of two volumes, of which one is of the class `local`. It counts its answers.
    fn client(pages: usize, answers: &Arc<AtomicUsize>) -> Client {
        let answers = Arc::clone(answers);
        let service = tower::service_fn(move |request: Request<Body>| {
            let answers = Arc::clone(&answers);
            async move {
                answers.fetch_add(1, Ordering::Relaxed);
                let query = request.uri().query().unwrap_or_default().to_string();
                let field = |name: &str| {
                    query.split('&').find_map(|part| part.strip_prefix(&format!("{name}="))).map(String::from)
                };
                assert_eq!(field("limit"), Some(PAGE.to_string()), "{query}");
                let page: usize = field("continue").map_or(0, |token| token.parse().unwrap());
                let next = if page + 1 < pages { (page + 1).to_string() } else { String::new() };
                let volume = |class: &str| json!({"metadata": {"name": format!("{class}-{page}")}, "spec": {"storageClassName": class}});
                let list: Value = json!({"apiVersion": "v1", "kind": "PersistentVolumeList", "metadata": {"continue": next},
                    "items": [volume("local"), volume("other")]});
                Ok::<_, std::io::Error>(Response::new(Body::from(serde_json::to_vec(&list).unwrap())))
            }
        });
        Client::new(service, "default")
    }

    /// All volumes of a cluster came in one answer, up to ten times a second.
    #[tokio::test]
    async fn volumes_are_listed_page_by_page_once_for_all_gangs_and_not_without_end() {
        for (pages, found) in [(1, Some(1)), (MOST_PAGES, Some(MOST_PAGES)), (MOST_PAGES + 1, None)] {
            let answers = Arc::default();
            let (client, volumes) = (client(pages, &answers), Volumes::default());
            let count = async || volumes.of_class(&client, "local").await.unwrap().map(|volumes| volumes.len());
            let (first, second) = tokio::join!(count(), count());
            assert_eq!((first, second, answers.load(Ordering::Relaxed)), (found, found, pages.min(MOST_PAGES)));
        }
    }
}
