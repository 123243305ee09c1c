//! Records every change of TrainJobs, pods, nodes, device claims, device offers and reports.

use super::{Change, ChangeKind, ClaimFact, Fact, History, JobFact, NodeFact, OfferFact, PodFact};
use crate::TIMEOUT;
use anyhow::{Context, Result, bail};
use futures::TryStreamExt;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kube::api::{ListParams, WatchEvent, WatchParams};
use kube::{Api, Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use switchyard_crds::TrainJob;
use switchyard_crds::gpu_topology::GPUTopology;
use tokio::task::JoinHandle;

/// HTTP status: the API server has compacted the requested resource version.
const GONE: u16 = 410;

/// A recording in progress; it stops on drop.
pub struct Recorder {
    client: Client,
    record: Arc<Mutex<Record>>,
    watches: Vec<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Record {
    changes: Vec<Change>,
    /// Resource versions of existing objects, by UID.
    versions: BTreeMap<String, String>,
    /// Number of watches that ended and were resumed.
    resumed: u64,
    /// Reason for a gap in the recording.
    gap: Option<String>,
}

impl Record {
    fn add<K: Resource<DynamicType = ()>>(&mut self, what: ChangeKind, object: &K, fact: fn(&K) -> Fact) {
        let version = object.resource_version().unwrap_or_default();
        let uid = object.uid().unwrap_or_default();
        let Ok(revision) = version.parse() else {
            self.gap = Some(format!("{}: got the resource version `{version}`; expected a number", object.name_any()));
            return;
        };
        match what {
            ChangeKind::Deleted => drop(self.versions.remove(&uid)),
            ChangeKind::Added | ChangeKind::Modified => drop(self.versions.insert(uid.clone(), version)),
        }
        let name = object.namespace().map_or_else(|| object.name_any(), |own| format!("{own}/{}", object.name_any()));
        self.changes.push(Change { revision, what, name, uid, fact: fact(object) });
    }
}

impl Recorder {
    /// Starts with the existing objects, at the revisions of their last changes.
    ///
    /// # Errors
    /// The API server does not respond.
    pub async fn start(client: Client) -> Result<Recorder> {
        let record = Arc::default();
        let watches = vec![
            follow(Api::<Node>::all(client.clone()), |node| Fact::Node(NodeFact::of(node)), &record).await?,
            follow(Api::<TrainJob>::all(client.clone()), |job| Fact::Job(Box::new(JobFact::of(job))), &record).await?,
            follow(Api::<Pod>::all(client.clone()), |pod| Fact::Pod(Box::new(PodFact::of(pod))), &record).await?,
            follow(Api::<ResourceClaim>::all(client.clone()), |claim| Fact::Claim(ClaimFact::of(claim)), &record)
                .await?,
            follow(Api::<ResourceSlice>::all(client.clone()), |slice| Fact::Offer(OfferFact::of(slice)), &record)
                .await?,
            follow(Api::<GPUTopology>::all(client.clone()), |report| Fact::Report(report.clone().into()), &record)
                .await?,
        ];
        Ok(Recorder { client, record, watches })
    }

    fn record(&self) -> MutexGuard<'_, Record> {
        lock(&self.record)
    }

    /// Number of changes so far.
    pub fn changes(&self) -> usize {
        self.record().changes.len()
    }

    /// Number of broken watches that were resumed.
    pub fn resumed(&self) -> u64 {
        self.record().resumed
    }

    /// Waits until the history has caught up with the API server, then returns it.
    ///
    /// # Errors
    /// The history does not catch up in time, or has a gap.
    pub async fn history(&self) -> Result<History> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let mut existing = versions(&Api::<Node>::all(self.client.clone())).await?;
            existing.extend(versions(&Api::<TrainJob>::all(self.client.clone())).await?);
            existing.extend(versions(&Api::<Pod>::all(self.client.clone())).await?);
            existing.extend(versions(&Api::<ResourceClaim>::all(self.client.clone())).await?);
            existing.extend(versions(&Api::<ResourceSlice>::all(self.client.clone())).await?);
            existing.extend(versions(&Api::<GPUTopology>::all(self.client.clone())).await?);
            {
                let record = self.record();
                if let Some(gap) = &record.gap {
                    bail!("the recording has a gap: {gap}");
                }
                if record.versions == existing {
                    return History::new(record.changes.clone());
                }
                if Instant::now() > deadline {
                    let wrong = existing.iter().find(|(uid, version)| record.versions.get(*uid) != Some(version));
                    bail!("the recording differs from the cluster after {} s: {wrong:?}", TIMEOUT.as_secs());
                }
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.watches.iter().for_each(JoinHandle::abort);
    }
}

fn lock(record: &Mutex<Record>) -> MutexGuard<'_, Record> {
    record.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn versions<K>(api: &Api<K>) -> Result<BTreeMap<String, String>>
where
    K: Resource<DynamicType = ()> + DeserializeOwned + Clone + Debug,
{
    let list = api.list_metadata(&ListParams::default()).await?;
    Ok(list.iter().filter_map(|object| Some((object.uid()?, object.resource_version()?))).collect())
}

/// Lists a kind, then watches it from that revision.
async fn follow<K>(api: Api<K>, fact: fn(&K) -> Fact, record: &Arc<Mutex<Record>>) -> Result<JoinHandle<()>>
where
    K: Resource<DynamicType = ()> + DeserializeOwned + Clone + Debug + Send + 'static,
{
    let list = api.list(&ListParams::default()).await?;
    let mut version = list.metadata.resource_version.clone().context("a list without a resource version")?;
    list.items.iter().for_each(|object| lock(record).add(ChangeKind::Added, object, fact));
    let record = record.clone();
    Ok(tokio::spawn(async move {
        loop {
            match watch(&api, &mut version, fact, &record).await {
                Err(kube::Error::Api(status)) if status.code == GONE => {
                    lock(&record).gap = Some(format!("{} after version {version}: {status}", K::kind(&())));
                    return;
                }
                Ok(()) => {}
                // The API server may be down temporarily.
                Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
            }
            lock(&record).resumed += 1;
        }
    }))
}

/// Runs one watch until it ends. `version` is the last resource version seen.
async fn watch<K>(api: &Api<K>, version: &mut String, fact: fn(&K) -> Fact, record: &Mutex<Record>) -> kube::Result<()>
where
    K: Resource<DynamicType = ()> + DeserializeOwned + Clone + Debug,
{
    let mut events = std::pin::pin!(api.watch(&WatchParams::default(), version).await?);
    while let Some(event) = events.try_next().await? {
        let (what, object) = match event {
            WatchEvent::Added(object) => (ChangeKind::Added, object),
            WatchEvent::Modified(object) => (ChangeKind::Modified, object),
            WatchEvent::Deleted(object) => (ChangeKind::Deleted, object),
            WatchEvent::Bookmark(bookmark) => {
                *version = bookmark.metadata.resource_version;
                continue;
            }
            WatchEvent::Error(status) => return Err(kube::Error::Api(status)),
        };
        *version = object.resource_version().unwrap_or_default();
        lock(record).add(what, &object, fact);
    }
    Ok(())
}
