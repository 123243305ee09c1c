//! From where the volumes of gangs can be used that have no place yet, and whether the claims that their pods name exist. Only they are read, from
//! time to time: watches of all volumes and claims of a cluster would cost more, and need more rights.

use super::Context;
use super::reader::{Reader, Reads, Source};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimTemplate};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::Api;
use std::sync::Arc;
use std::time::{Duration, Instant};
use switchyard_ledger::job::{JobId, attempt_of};
use switchyard_plan::eligible::{DeviceSource, Reach};
use switchyard_plan::volumes;

/// Pause between two reads of one gang.
const PERIOD: Duration = Duration::from_secs(10);
/// The same while a claim has no volume that it could use anywhere: one may be given to it at any moment.
const SOON: Duration = Duration::from_secs(2);

/// Reads the volumes of gangs that wait.
pub(super) struct Volumes;

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
            read_volume(context, namespace, name, &mut found).await?;
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

async fn read_volume(context: &Context, namespace: &str, name: &str, found: &mut Found) -> Result<(), kube::Error> {
    let claims = Api::<PersistentVolumeClaim>::namespaced(context.client.clone(), namespace);
    let all = Api::<PersistentVolume>::all(context.client.clone());
    let classes = Api::<StorageClass>::all(context.client.clone());
    let Some(claim) = claims.get_opt(name).await? else {
        found.absent.push(volumes::absent_claim(name));
        return Ok(());
    };
    let (mut class, mut known) = (None, Vec::new());
    if let Some(volume) = volumes::bound(&claim) {
        known.extend(all.get_opt(volume).await?);
    } else if let Some(name) = volumes::class(&claim) {
        class = classes.get_opt(name).await?;
        if class.as_ref().is_some_and(volumes::is_chosen) {
            known = all.list(&Default::default()).await?.items;
        }
    }
    found.reach.extend(volumes::reach(&claim, class.as_ref(), &known));
    Ok(())
}
