//! For gangs without a placement: from which nodes their volumes can be used, and whether the
//! claims of their pods exist. The controller polls only these objects, because watching all
//! volumes and claims of a cluster would cost more and require more permissions.

use super::Context;
use super::reader::{ReadState, Reader, Source};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimTemplate};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::ListParams;
use kube::{Api, Client};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use switchyard_ledger::job::{attempt_of, key_of};
use switchyard_plan::eligible::{DeviceSource, Reach};
use switchyard_plan::volumes;
use tokio::sync::Mutex;
use tracing::warn;

/// Pause between two reads of one gang.
const PERIOD: Duration = Duration::from_secs(10);
/// Pause while a claim has no volume that is usable anywhere, because one may be bound to it at any
/// moment.
const UNBOUND_PERIOD: Duration = Duration::from_secs(2);

/// Page size when listing all volumes.
const PAGE_SIZE: u32 = 500;
/// Number of pages that are read. In a cluster with more volumes, only the scheduler knows which
/// one a claim can get.
const MAX_PAGES: usize = 40;

/// Reads the volumes of waiting gangs.
#[derive(Default)]
pub(super) struct Volumes {
    /// Cached lists of the volumes of each class that claims choose from. One list serves all
    /// gangs.
    by_class: Mutex<BTreeMap<String, CachedList>>,
}

/// The volumes of a class.
struct CachedList {
    at: Instant,
    /// `None` if there are too many volumes to list.
    volumes: Option<Arc<Vec<PersistentVolume>>>,
}

impl Volumes {
    /// The volumes of a class; `None` if there are too many volumes to list.
    async fn in_class(&self, client: &Client, class: &str) -> Result<Option<Arc<Vec<PersistentVolume>>>, kube::Error> {
        // Hold the lock while listing, so that concurrent gangs share one list.
        let mut all = self.by_class.lock().await;
        all.retain(|_, listed| listed.at.elapsed() < UNBOUND_PERIOD);
        if let Some(listed) = all.get(class) {
            return Ok(listed.volumes.clone());
        }
        let volumes = list(client, class).await?.map(Arc::new);
        if volumes.is_none() {
            let limit = PAGE_SIZE as usize * MAX_PAGES;
            warn!(
                class,
                "more than {limit} PersistentVolumes: placements will not take the node affinity of this class's volumes into account"
            );
        }
        all.insert(class.to_string(), CachedList { at: Instant::now(), volumes: volumes.clone() });
        Ok(volumes)
    }
}

/// Lists all volumes page by page, and returns those of a class.
async fn list(client: &Client, class: &str) -> Result<Option<Vec<PersistentVolume>>, kube::Error> {
    let api = Api::<PersistentVolume>::all(client.clone());
    let (mut params, mut found) = (ListParams::default().limit(PAGE_SIZE), Vec::new());
    let has_class = |volume: &PersistentVolume| {
        volume.spec.as_ref().is_some_and(|spec| spec.storage_class_name.as_deref() == Some(class))
    };
    for _ in 0..MAX_PAGES {
        let page = api.list(&params).await?;
        found.extend(page.items.into_iter().filter(has_class));
        params.continue_token = page.metadata.continue_.filter(|token| !token.is_empty());
        if params.continue_token.is_none() {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

/// The claims and device sources that the pods of a gang reference.
pub(super) struct References {
    /// PersistentVolumeClaims.
    claims: Vec<String>,
    devices: Vec<DeviceSource>,
}

/// Reach of the claims, and messages about missing objects.
#[derive(Default, Clone)]
pub(super) struct Lookup {
    reach: Vec<Reach>,
    absent: Vec<String>,
}

impl Reader for Volumes {
    type Target = References;
    type Output = Lookup;

    const FORBIDDEN_MESSAGE: &str =
        "cannot read claims and volumes: placements will not take their node affinity into account";

    fn sources(&self, context: &Context) -> Vec<Source<References>> {
        let index = context.index();
        let sources = index.live_jobs().filter_map(|(id, job, family)| {
            let attempt = attempt_of(job);
            let mut pods = family.pods.values().filter(|pod| pod.attempt == attempt);
            // All pods of a gang come from one template.
            let (pod, rules) = pods.find_map(|pod| Some((pod, pod.rules.as_ref()?)))?;
            let (uid, name) = (pod.uid.clone(), pod.name.clone());
            let target = References { claims: rules.claims.clone(), devices: rules.devices.clone() };
            let source = Source { job: id.clone(), key: key_of(&job.metadata), uid, pod: name, target };
            Some(source).filter(|Source { target, .. }| !(target.claims.is_empty() && target.devices.is_empty()))
        });
        sources.collect()
    }

    async fn read(&self, context: &Context, source: &Source<References>) -> Result<Lookup, kube::Error> {
        let namespace = source.key.namespace.as_str();
        let mut found = Lookup::default();
        for name in &source.target.claims {
            self.read_volume(&context.client, namespace, name, &mut found).await?;
        }
        for device in &source.target.devices {
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

    fn handle(
        &self,
        context: &Context,
        source: &Source<References>,
        found: Option<Lookup>,
        _: Option<ReadState>,
    ) -> Duration {
        let mut index = context.index();
        let Some(family) = index.job_states.get_mut(&source.job) else { return PERIOD };
        let is_unusable = |reach: &Reach| reach.nodes.node_selector_terms.is_empty();
        let pause = if found.iter().flat_map(|found| &found.reach).any(is_unusable) { UNBOUND_PERIOD } else { PERIOD };
        let mut is_changed = false;
        for rules in family.pods.values_mut().filter_map(|pod| pod.rules.as_mut()) {
            // If the read failed, keep the previous result, or leave it to the scheduler.
            let before = || Lookup { reach: rules.reach.clone().unwrap_or_default(), absent: rules.absent.clone() };
            let next = found.clone().unwrap_or_else(before);
            let is_same = (&rules.claims, &rules.devices) == (&source.target.claims, &source.target.devices);
            if is_same && (rules.reach.as_ref() != Some(&next.reach) || rules.absent != next.absent) {
                let rules = Arc::make_mut(rules);
                (rules.reach, rules.absent) = (Some(next.reach), next.absent);
                is_changed = true;
            }
        }
        if is_changed {
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
        found: &mut Lookup,
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
            if class.as_ref().is_some_and(volumes::selects_existing_volume) {
                let Some(listed) = self.in_class(client, name).await? else { return Ok(()) };
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

    /// A server with `pages` pages of two volumes each, one of which has the class `local`. It
    /// counts its responses.
    fn client(pages: usize, responses: &Arc<AtomicUsize>) -> Client {
        let responses = Arc::clone(responses);
        let service = tower::service_fn(move |request: Request<Body>| {
            let responses = Arc::clone(&responses);
            async move {
                responses.fetch_add(1, Ordering::Relaxed);
                let query = request.uri().query().unwrap_or_default().to_string();
                let field = |name: &str| {
                    query.split('&').find_map(|part| part.strip_prefix(&format!("{name}="))).map(String::from)
                };
                assert_eq!(field("limit"), Some(PAGE_SIZE.to_string()), "{query}");
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

    /// Regression test: all volumes of a cluster were listed in one response, up to ten times a
    /// second.
    #[tokio::test]
    async fn volumes_are_listed_in_pages_once_for_all_gangs_and_up_to_a_limit() {
        for (pages, found) in [(1, Some(1)), (MAX_PAGES, Some(MAX_PAGES)), (MAX_PAGES + 1, None)] {
            let responses = Arc::default();
            let (client, volumes) = (client(pages, &responses), Volumes::default());
            let count = async || volumes.in_class(&client, "local").await.unwrap().map(|volumes| volumes.len());
            let (first, second) = tokio::join!(count(), count());
            assert_eq!((first, second, responses.load(Ordering::Relaxed)), (found, found, pages.min(MAX_PAGES)));
        }
    }
}
