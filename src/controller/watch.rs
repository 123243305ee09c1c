//! The watches: what the API server shows, into the index and the queue. One watch per kind, shared by everything.

use super::Context;
use futures::TryStreamExt;
use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod, Service};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::DeserializeGuard;
use kube::runtime::watcher;
use kube::{Api, Resource};
use serde::de::DeserializeOwned;
use std::collections::HashMap;
use std::fmt::Debug;
use std::time::{Duration, Instant};
use switchyard_crds::gpu_topology::GPUTopology;
use switchyard_crds::{TrainJob, labels};
use switchyard_ledger::index::{Effect, Index};
use switchyard_ledger::job::Key;
use switchyard_plan::objects::{Kind, observed_content};
use tracing::{debug, info, warn};

/// Changes within this time are handled together: a thousand starting pods do not cause a thousand reconciles.
const TOGETHER: Duration = Duration::from_millis(20);
/// The same for room that becomes free.
const ROOM_TOGETHER: Duration = Duration::from_millis(100);

/// First pause after a watch failed; each further one is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(400);
/// Longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// What is watched.
pub(super) const KINDS: [&str; 10] = [
    "TrainJob",
    "Pod",
    "Node",
    "GPUTopology",
    "ResourceSlice",
    "ResourceClaim",
    "Service",
    "ConfigMap",
    "PodDisruptionBudget",
    "NetworkPolicy",
];

/// Takes an object into the index.
type Apply<K> = Box<dyn Fn(&mut Index, K) -> Effect + Send>;

/// What a kind does to the index.
struct Rules<K> {
    kind: &'static str,
    apply: Apply<K>,
    delete: fn(&mut Index, &ObjectMeta) -> Effect,
}

/// Watches everything until the tasks are dropped with the runtime.
pub(super) fn start(context: &Context) {
    let everything = watcher::Config::default();
    let ours = watcher::Config::default().labels(labels::JOB_UID);
    let jobs = Rules::<DeserializeGuard<TrainJob>> {
        kind: "TrainJob",
        apply: Box::new(|index, job| match job.0 {
            Ok(job) => index.apply_job(job),
            Err(invalid) => index.apply_unreadable(&invalid.metadata, invalid.error),
        }),
        delete: Index::delete_job,
    };
    let pods =
        Rules::<Pod> { kind: "Pod", apply: Box::new(|index, pod| index.apply_pod(&pod)), delete: Index::delete_pod };
    let nodes = Rules::<Node> {
        kind: "Node",
        apply: Box::new(|index, node| index.apply_node(&node)),
        delete: Index::delete_node,
    };
    let reports = Rules::<DeserializeGuard<GPUTopology>> {
        kind: "GPUTopology",
        apply: Box::new(|index, report| match &report.0 {
            Ok(report) => index.apply_report(&report.metadata, Ok(report)),
            Err(invalid) => index.apply_report(&invalid.metadata, Err(invalid.error.clone())),
        }),
        delete: Index::delete_report,
    };
    let driver = context.settings.defaults.gpu_driver.clone();
    let slices = Rules::<ResourceSlice> {
        kind: "ResourceSlice",
        apply: Box::new(move |index, slice| index.apply_slice(&slice, &driver)),
        delete: Index::delete_slice,
    };
    let claims = Rules::<ResourceClaim> {
        kind: Kind::ResourceClaim.name(),
        apply: Box::new(|index, claim| {
            let content = observed_content(&serde_json::to_value(&claim).unwrap_or_default());
            index.apply_claim(&claim, content)
        }),
        delete: Index::delete_claim,
    };
    // Pods of other namespaces take room on the nodes, too.
    spawn(context, pods, Api::all(context.client.clone()), everything.clone());
    spawn(context, nodes, Api::all(context.client.clone()), everything.clone());
    spawn(context, reports, Api::all(context.client.clone()), everything.clone());
    spawn(context, slices, Api::all(context.client.clone()), everything.clone());
    spawn(context, claims, Api::all(context.client.clone()), everything.clone());
    spawn(context, jobs, scoped(context), everything);
    macro_rules! object {
        ($type:ident) => {
            let rules = Rules::<$type> {
                kind: Kind::$type.name(),
                apply: Box::new(|index, object| {
                    let content = observed_content(&serde_json::to_value(&object).unwrap_or_default());
                    index.apply_object(Kind::$type, &object.metadata, content)
                }),
                delete: |index, metadata| index.delete_object(Kind::$type, metadata),
            };
            spawn(context, rules, scoped(context), ours.clone());
        };
    }
    object!(Service);
    object!(ConfigMap);
    object!(PodDisruptionBudget);
    object!(NetworkPolicy);
}

fn scoped<K>(context: &Context) -> Api<K>
where
    K: Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>,
{
    match &context.settings.watch_namespace {
        Some(namespace) => Api::namespaced(context.client.clone(), namespace),
        None => Api::all(context.client.clone()),
    }
}

fn spawn<K>(context: &Context, rules: Rules<K>, api: Api<K>, config: watcher::Config)
where
    K: Resource<DynamicType = ()> + DeserializeOwned + Clone + Debug + Send + 'static,
{
    let context = context.clone();
    tokio::spawn(async move {
        let mut events = Box::pin(watcher(api, config));
        let mut pause = FIRST_PAUSE;
        let mut known = Known::default();
        let mut failing: Option<String> = None;
        loop {
            match events.try_next().await {
                Ok(Some(event)) => {
                    // The beginning of a list is no answer of the server yet: the watcher says so before it asks.
                    if !matches!(event, watcher::Event::Init) {
                        pause = FIRST_PAUSE;
                        if let Some(was) = failing.take() {
                            info!(kind = rules.kind, was, "the watch works again");
                        }
                    }
                    context.on_event(&rules, event, &mut known);
                }
                Ok(None) => break,
                Err(error) => {
                    let text = error.to_string();
                    context.metrics.watch_failed(rules.kind);
                    context.health.watch_failed(rules.kind, &text);
                    // The same trouble once, not at every try.
                    if failing.as_ref() != Some(&text) {
                        warn!(kind = rules.kind, error = text, "the watch failed; it is tried again with back-off");
                        failing = Some(text);
                    }
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
            }
        }
    });
}

/// Objects a watch has shown, to notice after a new list which of them are gone.
#[derive(Default)]
struct Known {
    by_name: HashMap<(String, String), ObjectMeta>,
    /// Shown by the list that is being read.
    listed: HashMap<(String, String), ObjectMeta>,
}

/// What is kept of an object's metadata: enough to take it out of the index.
fn name_of(metadata: &ObjectMeta) -> ((String, String), ObjectMeta) {
    let key = (metadata.namespace.clone().unwrap_or_default(), metadata.name.clone().unwrap_or_default());
    let kept = ObjectMeta {
        namespace: metadata.namespace.clone(),
        name: metadata.name.clone(),
        uid: metadata.uid.clone(),
        ..ObjectMeta::default()
    };
    (key, kept)
}

impl Context {
    fn on_event<K: Resource<DynamicType = ()>>(&self, rules: &Rules<K>, event: watcher::Event<K>, known: &mut Known) {
        match event {
            watcher::Event::Init => known.listed.clear(),
            watcher::Event::InitApply(object) => {
                let (key, kept) = name_of(object.meta());
                known.listed.insert(key, kept);
                self.take_in(|index| (rules.apply)(index, object));
            }
            watcher::Event::InitDone => {
                let before = std::mem::replace(&mut known.by_name, std::mem::take(&mut known.listed));
                let gone = before.into_iter().filter(|(key, _)| !known.by_name.contains_key(key));
                for (_, metadata) in gone {
                    self.take_in(|index| (rules.delete)(index, &metadata));
                }
                debug!(kind = rules.kind, objects = known.by_name.len(), "listed");
                self.health.listed(rules.kind);
            }
            watcher::Event::Apply(object) => {
                let (key, kept) = name_of(object.meta());
                known.by_name.insert(key, kept);
                self.take_in(|index| (rules.apply)(index, object));
            }
            watcher::Event::Delete(object) => {
                known.by_name.remove(&name_of(object.meta()).0);
                self.take_in(|index| (rules.delete)(index, object.meta()));
            }
        }
    }

    /// Whether a job is in the namespace that is watched.
    pub(super) fn watches(&self, key: &Key) -> bool {
        self.settings.watch_namespace.as_ref().is_none_or(|namespace| *namespace == key.namespace)
    }

    /// Changes the index, and schedules the jobs that this concerns.
    fn take_in(&self, change: impl FnOnce(&mut Index) -> Effect) {
        let (effect, waiting) = {
            let mut index = self.index();
            let effect = change(&mut index);
            let waiting: Vec<Key> = if effect.room { index.waiting.iter().cloned().collect() } else { Vec::new() };
            (effect, waiting)
        };
        let now = Instant::now();
        // Pods are watched everywhere for the room they take; jobs of other namespaces are not this controller's.
        for key in effect.jobs.into_iter().filter(|key| self.watches(key)) {
            self.queue.add(key, now + TOGETHER);
        }
        for key in waiting {
            self.queue.add(key, now + ROOM_TOGETHER);
        }
    }
}
