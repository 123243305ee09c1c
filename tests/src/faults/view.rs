//! The objects of a namespace, kept current by watches: waiting for a state costs no calls.

use anyhow::Result;
use futures::StreamExt;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Service};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::runtime::reflector::{ObjectRef, Store, reflector, store};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use std::fmt::Debug;
use std::future::ready;
use std::sync::Arc;
use std::time::Duration;
use switchyard_crds::{TrainJob, labels};
use tokio::sync::Notify;
use tokio::task::JoinSet;

pub(super) struct View {
    namespace: String,
    jobs: Store<TrainJob>,
    pods: Store<Pod>,
    services: Store<Service>,
    config_maps: Store<ConfigMap>,
    budgets: Store<PodDisruptionBudget>,
    policies: Store<NetworkPolicy>,
    changed: Arc<Notify>,
    /// The watches, which end with the view.
    _watches: JoinSet<()>,
}

impl View {
    /// Watches a namespace. Returns once everything is listed.
    pub async fn start(client: &Client, namespace: &str) -> Result<View> {
        let (changed, mut watches) = (Arc::new(Notify::new()), JoinSet::new());
        macro_rules! watch {
            () => {
                watch(Api::namespaced(client.clone(), namespace), &changed, &mut watches)
            };
        }
        let (jobs, pods, services) = (watch!(), watch!(), watch!());
        let (config_maps, budgets, policies) = (watch!(), watch!(), watch!());
        let view = View {
            namespace: namespace.into(),
            jobs,
            pods,
            services,
            config_maps,
            budgets,
            policies,
            changed,
            _watches: watches,
        };
        view.jobs.wait_until_ready().await?;
        view.pods.wait_until_ready().await?;
        view.services.wait_until_ready().await?;
        view.config_maps.wait_until_ready().await?;
        view.budgets.wait_until_ready().await?;
        view.policies.wait_until_ready().await?;
        Ok(view)
    }

    /// Waits for a change, for at most `timeout`.
    pub async fn changed(&self, timeout: Duration) {
        let _ = tokio::time::timeout(timeout, self.changed.notified()).await;
    }

    pub fn job(&self, name: &str) -> Option<Arc<TrainJob>> {
        self.jobs.get(&ObjectRef::new(name).within(&self.namespace))
    }

    /// Pods of a job.
    pub fn pods(&self, job: &str) -> Vec<Arc<Pod>> {
        of_job(&self.pods, job)
    }

    /// Kind and name of a job's other objects that are not being deleted, sorted.
    pub fn other_objects(&self, job: &str) -> Vec<String> {
        let mut names = names_of(&self.services, job);
        names.extend(names_of(&self.config_maps, job));
        names.extend(names_of(&self.budgets, job));
        names.extend(names_of(&self.policies, job));
        names.sort();
        names
    }
}

fn watch<K>(api: Api<K>, changed: &Arc<Notify>, watches: &mut JoinSet<()>) -> Store<K>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    K: DeserializeOwned + Clone + Debug + Send + Sync + 'static,
{
    let (reader, writer) = store();
    let changed = Arc::clone(changed);
    // After an error, the watcher resumes.
    let events = reflector(writer, watcher(api, watcher::Config::default()).default_backoff());
    watches.spawn(events.for_each(move |_| {
        changed.notify_waiters();
        ready(())
    }));
    reader
}

fn of_job<K>(store: &Store<K>, job: &str) -> Vec<Arc<K>>
where
    K: Resource<DynamicType = ()> + Clone + 'static,
{
    let is_of_job = |object: &Arc<K>| object.labels().get(labels::JOB_NAME).is_some_and(|name| name == job);
    store.state().into_iter().filter(is_of_job).collect()
}

fn names_of<K>(store: &Store<K>, job: &str) -> Vec<String>
where
    K: Resource<DynamicType = ()> + Clone + 'static,
{
    let kept = of_job(store, job).into_iter().filter(|object| object.meta().deletion_timestamp.is_none());
    kept.map(|object| format!("{} {}", K::kind(&()), object.name_any())).collect()
}
