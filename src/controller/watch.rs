//! Watches that feed the index and the queue. All tasks share one watch per kind.

use super::queue::Pass;
use super::{Context, Settings};
use futures::TryStreamExt;
use k8s_openapi::NamespaceResourceScope;
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
use switchyard_crds::{PlacementSlice, TrainJob, labels};
use switchyard_ledger::index::{Effect, Index};
use switchyard_ledger::job::Key;
use switchyard_plan::cluster::waiting_period;
use switchyard_plan::job::too_large;
use switchyard_plan::objects::{Kind, observed_content};
use tracing::{debug, info, warn};

/// Changes within this time are handled together, so that a thousand starting pods do not cause a
/// thousand reconciles.
const DEBOUNCE: Duration = Duration::from_millis(20);
/// The same for released resources.
const RELEASE_DEBOUNCE: Duration = Duration::from_millis(100);

/// Page size when listing jobs. A job can have 1.5 MB, and a whole page is in memory at once.
const JOB_PAGE_SIZE: u32 = 32;

/// First backoff after a watch failed; it doubles each time.
const INITIAL_BACKOFF: Duration = Duration::from_millis(400);
/// Upper bound on the backoff.
const MAX_BACKOFF: Duration = Duration::from_secs(10);

/// Watched kinds.
pub(super) const KINDS: [&str; 11] = [
    "TrainJob",
    "PlacementSlice",
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

/// Kinds that are watched only in the namespaces of jobs.
const JOB_SCOPED: [&str; 6] =
    ["TrainJob", "PlacementSlice", "Service", "ConfigMap", "PodDisruptionBudget", "NetworkPolicy"];

/// The names of all watches, one per kind, or per kind and namespace.
pub(super) fn names(settings: &Settings) -> Vec<String> {
    let watches_of = |kind: &'static str| {
        let scopes = if JOB_SCOPED.contains(&kind) { scopes(settings) } else { vec![None] };
        scopes.into_iter().map(move |namespace| name(kind, namespace))
    };
    KINDS.into_iter().flat_map(watches_of).collect()
}

fn name(kind: &str, namespace: Option<&str>) -> String {
    namespace.map_or_else(|| kind.to_string(), |namespace| format!("{kind} in namespace {namespace}"))
}

/// The watched namespaces; a single `None` for all.
pub(super) fn scopes(settings: &Settings) -> Vec<Option<&str>> {
    let named: Vec<Option<&str>> = settings.watch_namespaces.iter().map(|namespace| Some(namespace.as_str())).collect();
    if named.is_empty() { vec![None] } else { named }
}

/// Applies an object to the index.
pub(super) type Apply<K> = Box<dyn Fn(&mut Index, K) -> Effect + Send>;

/// How objects of a kind change the index.
pub(super) struct Handler<K> {
    pub kind: &'static str,
    /// How to schedule the jobs to which an object of this kind belongs.
    pub pass: Pass,
    pub apply: Apply<K>,
    pub delete: fn(&mut Index, &ObjectMeta) -> Effect,
}

/// Watches everything until the tasks are dropped with the runtime.
pub(super) fn start(context: &Context) {
    let everything = watcher::Config::default();
    let labelled = watcher::Config::default().labels(labels::JOB_UID);
    let jobs = || Handler::<DeserializeGuard<TrainJob>> {
        kind: "TrainJob",
        // Most changes of a queued job are status writes of this controller.
        pass: Pass::Optional,
        apply: Box::new(|index, job| match job.0 {
            Ok(job) => match too_large(&job) {
                Some(fault) => index.apply_unreadable(&job.metadata, fault.to_string()),
                None => index.show_job(job),
            },
            Err(invalid) => index.apply_unreadable(&invalid.metadata, invalid.error),
        }),
        delete: Index::hide_job,
    };
    let placements = || Handler::<DeserializeGuard<PlacementSlice>> {
        kind: Kind::PlacementSlice.name(),
        pass: Pass::Required,
        // An invalid slice is treated as missing.
        apply: Box::new(|index, slice| slice.0.map_or_else(|_| Effect::default(), |slice| index.show_slice(slice))),
        delete: Index::hide_slice,
    };
    let pods = Handler::<Pod> {
        kind: "Pod",
        pass: Pass::Required,
        apply: Box::new(|index, pod| index.apply_pod(&pod)),
        delete: Index::delete_pod,
    };
    let nodes = Handler::<Node> {
        kind: "Node",
        pass: Pass::Required,
        apply: Box::new(|index, node| index.apply_node(&node)),
        delete: Index::delete_node,
    };
    let reports = Handler::<DeserializeGuard<GPUTopology>> {
        kind: "GPUTopology",
        pass: Pass::Required,
        apply: Box::new(|index, report| match &report.0 {
            Ok(report) => index.apply_report(&report.metadata, Ok(report)),
            Err(invalid) => index.apply_report(&invalid.metadata, Err(invalid.error.clone())),
        }),
        delete: Index::delete_report,
    };
    let driver = context.settings.defaults.gpu_driver.clone();
    let slices = Handler::<ResourceSlice> {
        kind: "ResourceSlice",
        pass: Pass::Required,
        apply: Box::new(move |index, slice| index.apply_slice(&slice, &driver)),
        delete: Index::delete_slice,
    };
    let claims = Handler::<ResourceClaim> {
        kind: Kind::ResourceClaim.name(),
        pass: Pass::Required,
        apply: Box::new(|index, claim| {
            let content = observed_content(&serde_json::to_value(&claim).unwrap_or_default());
            index.apply_claim(&claim, content)
        }),
        delete: Index::delete_claim,
    };
    // Pods of all namespaces, because they all take resources on the nodes.
    spawn(context, pods, everything.clone());
    spawn(context, nodes, everything.clone());
    spawn(context, reports, everything.clone());
    spawn(context, slices, everything.clone());
    spawn(context, claims, everything.clone());
    for namespace in scopes(&context.settings) {
        spawn_in(context, jobs(), namespace, everything.clone().page_size(JOB_PAGE_SIZE));
        spawn_in(context, placements(), namespace, labelled.clone());
    }
    macro_rules! object {
        ($type:ident) => {
            let handler = || Handler::<$type> {
                kind: Kind::$type.name(),
                pass: Pass::Required,
                apply: Box::new(|index, object| {
                    let content = observed_content(&serde_json::to_value(&object).unwrap_or_default());
                    index.apply_object(Kind::$type, &object.metadata, content)
                }),
                delete: |index, metadata| index.delete_object(Kind::$type, metadata),
            };
            for namespace in scopes(&context.settings) {
                spawn_in(context, handler(), namespace, labelled.clone());
            }
        };
    }
    object!(Service);
    object!(ConfigMap);
    object!(PodDisruptionBudget);
    object!(NetworkPolicy);
}

/// Watches a kind in a namespace; in all namespaces if `None`.
pub(super) fn spawn_in<K>(context: &Context, handler: Handler<K>, namespace: Option<&str>, config: watcher::Config)
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
    K: DeserializeOwned + Clone + Debug + Send + 'static,
{
    let client = context.client.clone();
    let api =
        namespace.map_or_else(|| Api::all(client.clone()), |namespace| Api::namespaced(client.clone(), namespace));
    let watch = name(handler.kind, namespace);
    run(context, handler, watch, api, config);
}

/// Watches a kind in the whole cluster.
fn spawn<K>(context: &Context, handler: Handler<K>, config: watcher::Config)
where
    K: Resource<DynamicType = ()> + DeserializeOwned + Clone + Debug + Send + 'static,
{
    let watch = handler.kind.to_string();
    run(context, handler, watch, Api::all(context.client.clone()), config);
}

/// Watches the objects of an API.
pub(super) fn run<K>(context: &Context, handler: Handler<K>, watch: String, api: Api<K>, config: watcher::Config)
where
    K: Resource + DeserializeOwned + Clone + Debug + Send + 'static,
{
    let context = context.clone();
    tokio::spawn(async move {
        let mut events = Box::pin(watcher(api, config));
        let mut pause = INITIAL_BACKOFF;
        let mut known = KnownObjects::default();
        let mut last_error: Option<String> = None;
        loop {
            match events.try_next().await {
                Ok(Some(event)) => {
                    // The watcher emits `Init` before it sends a request, so this is no response of
                    // the server.
                    if !matches!(event, watcher::Event::Init) {
                        pause = INITIAL_BACKOFF;
                        if let Some(was) = last_error.take() {
                            info!(kind = watch, was, "the watch recovered");
                        }
                    }
                    let is_listed = matches!(event, watcher::Event::InitDone);
                    context.on_event(&handler, event, &mut known);
                    if is_listed {
                        debug!(kind = watch, objects = known.by_name.len(), "listed");
                        context.health.listed(&watch);
                    }
                }
                Ok(None) => break,
                Err(error) => {
                    let text = error.to_string();
                    context.metrics.watch_failed(handler.kind);
                    context.health.watch_failed(&watch, &text);
                    // Log an error once, not at every try.
                    if last_error.as_ref() != Some(&text) {
                        warn!(kind = watch, error = text, "the watch failed; retrying with backoff");
                        last_error = Some(text);
                    }
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(MAX_BACKOFF);
                }
            }
        }
    });
}

/// Name → UID of every object seen, so that a relist can detect deletions. Kept minimal because
/// most entries are pods that do not belong to jobs.
#[derive(Default)]
struct KnownObjects {
    by_name: HashMap<Name, Box<str>>,
    /// Objects in the list that is being read.
    listed: HashMap<Name, Box<str>>,
}

/// Namespace (empty for cluster-scoped objects) and name.
type Name = (Box<str>, Box<str>);

fn identity_of(metadata: &ObjectMeta) -> (Name, Box<str>) {
    let text = |text: &Option<String>| text.as_deref().unwrap_or_default().into();
    ((text(&metadata.namespace), text(&metadata.name)), text(&metadata.uid))
}

/// The metadata needed to delete an object from the index.
fn metadata_of((namespace, name): Name, uid: Box<str>) -> ObjectMeta {
    let some = |text: Box<str>| Some(text.into_string()).filter(|text| !text.is_empty());
    ObjectMeta { namespace: some(namespace), name: some(name), uid: some(uid), ..ObjectMeta::default() }
}

impl KnownObjects {
    /// Records an object of a list. Returns the object it replaces if that was deleted and created
    /// again unseen.
    fn record_listed(&mut self, metadata: &ObjectMeta) -> Option<ObjectMeta> {
        let (name, uid) = identity_of(metadata);
        let before = self.by_name.get(&name).filter(|before| **before != uid);
        let before = before.map(|before| metadata_of(name.clone(), before.clone()));
        self.listed.insert(name, uid);
        before
    }

    /// Completes a list. Returns the known objects that it did not contain.
    fn finish_list(&mut self) -> Vec<ObjectMeta> {
        let before = std::mem::replace(&mut self.by_name, std::mem::take(&mut self.listed));
        let gone = before.into_iter().filter(|(name, _)| !self.by_name.contains_key(name));
        gone.map(|(name, uid)| metadata_of(name, uid)).collect()
    }
}

impl Context {
    fn on_event<K: Resource>(&self, handler: &Handler<K>, event: watcher::Event<K>, known: &mut KnownObjects) {
        let now = Instant::now();
        match event {
            watcher::Event::Init => known.listed.clear(),
            watcher::Event::InitApply(object) => {
                if let Some(before) = known.record_listed(object.meta()) {
                    self.apply_change(now, handler.pass, |index| (handler.delete)(index, &before));
                }
                self.apply_change(now, handler.pass, |index| (handler.apply)(index, object));
            }
            watcher::Event::InitDone => {
                for metadata in known.finish_list() {
                    self.apply_change(now, handler.pass, |index| (handler.delete)(index, &metadata));
                }
            }
            watcher::Event::Apply(object) => {
                let (name, uid) = identity_of(object.meta());
                known.by_name.insert(name, uid);
                self.apply_change(now, handler.pass, |index| (handler.apply)(index, object));
            }
            watcher::Event::Delete(object) => {
                known.by_name.remove(&identity_of(object.meta()).0);
                self.apply_change(now, handler.pass, |index| (handler.delete)(index, object.meta()));
            }
        }
    }

    /// Whether a job is in a watched namespace.
    pub(super) fn is_watched(&self, key: &Key) -> bool {
        let only = &self.settings.watch_namespaces;
        only.is_empty() || only.contains(&key.namespace)
    }

    /// Changes the index, and schedules the affected jobs.
    pub(super) fn apply_change(&self, now: Instant, pass: Pass, change: impl FnOnce(&mut Index) -> Effect) {
        let (effect, woken, waiting) = {
            let mut index = self.index();
            let effect = change(&mut index);
            let woken = index.wake(&effect.room);
            let woken = index.in_order(woken);
            let waiting: Vec<Key> =
                if effect.room.is_empty() { Vec::new() } else { index.queue.keys().cloned().collect() };
            (effect, woken, waiting)
        };
        // Pods are watched in all namespaces because of the resources they take, but their jobs may
        // belong to another controller.
        for key in effect.jobs.into_iter().filter(|key| self.is_watched(key)) {
            self.queue.schedule(key, now + DEBOUNCE, pass);
        }
        if let Some(key) = effect.quota {
            self.queue.succeeded(&key);
            self.queue.add(key, now + RELEASE_DEBOUNCE);
        }
        for key in woken {
            self.queue.schedule(key, now + RELEASE_DEBOUNCE, Pass::Optional);
        }
        // The remaining jobs are still blocked, but their reason may have changed.
        let later = now + waiting_period(waiting.len()).unsigned_abs();
        waiting.into_iter().for_each(|key| self.queue.add(key, later));
    }
}

#[cfg(test)]
mod tests {
    use super::{KnownObjects, ObjectMeta};

    /// Regression test: a pod outside any job was deleted and created again under its name while
    /// the watch was disconnected, and its resources stayed taken forever.
    #[test]
    fn a_relist_detects_deleted_objects_and_replaced_uids() {
        let object = |name: &str, uid: &str| ObjectMeta {
            namespace: Some("n".into()),
            name: Some(name.into()),
            uid: Some(uid.into()),
            ..ObjectMeta::default()
        };
        let mut known = KnownObjects::default();
        for first in [object("a", "1"), object("b", "2"), object("c", "3")] {
            assert_eq!(known.record_listed(&first), None);
        }
        assert_eq!(known.finish_list(), []);
        assert_eq!(known.record_listed(&object("a", "1")), None);
        assert_eq!(known.record_listed(&object("b", "4")), Some(object("b", "2")));
        assert_eq!(known.finish_list(), [object("c", "3")]);
        assert_eq!(known.record_listed(&object("b", "4")), None);
    }
}
