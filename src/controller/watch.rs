//! Watches that feed the index and the queue. All tasks share one watch per kind.

use super::queue::Look;
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
const TOGETHER: Duration = Duration::from_millis(20);
/// The same for released resources.
const ROOM_TOGETHER: Duration = Duration::from_millis(100);

/// Page size when listing jobs. A job can have 1.5 MB, and a whole page is in memory at once.
const JOBS_AT_ONCE: u32 = 32;

/// First backoff after a watch failed; it doubles each time.
const FIRST_PAUSE: Duration = Duration::from_millis(400);
/// Upper bound on the backoff.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

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
const OF_JOBS: [&str; 6] =
    ["TrainJob", "PlacementSlice", "Service", "ConfigMap", "PodDisruptionBudget", "NetworkPolicy"];

/// The names of all watches, one per kind, or per kind and namespace.
pub(super) fn names(settings: &Settings) -> Vec<String> {
    let of_kind = |kind: &'static str| {
        let scopes = if OF_JOBS.contains(&kind) { scopes(settings) } else { vec![None] };
        scopes.into_iter().map(move |namespace| name(kind, namespace))
    };
    KINDS.into_iter().flat_map(of_kind).collect()
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
pub(super) struct Rules<K> {
    pub kind: &'static str,
    /// How to schedule the jobs to which an object of this kind belongs.
    pub look: Look,
    pub apply: Apply<K>,
    pub delete: fn(&mut Index, &ObjectMeta) -> Effect,
}

/// Watches everything until the tasks are dropped with the runtime.
pub(super) fn start(context: &Context) {
    let everything = watcher::Config::default();
    let ours = watcher::Config::default().labels(labels::JOB_UID);
    let jobs = || Rules::<DeserializeGuard<TrainJob>> {
        kind: "TrainJob",
        // Most changes of a queued job are status writes of this controller.
        look: Look::IfWorthIt,
        apply: Box::new(|index, job| match job.0 {
            Ok(job) => match too_large(&job) {
                Some(fault) => index.apply_unreadable(&job.metadata, fault.to_string()),
                None => index.show_job(job),
            },
            Err(invalid) => index.apply_unreadable(&invalid.metadata, invalid.error),
        }),
        delete: Index::hide_job,
    };
    let placements = || Rules::<DeserializeGuard<PlacementSlice>> {
        kind: Kind::PlacementSlice.name(),
        look: Look::InAnyCase,
        // An invalid slice is treated as missing.
        apply: Box::new(|index, slice| slice.0.map_or_else(|_| Effect::default(), |slice| index.show_slice(slice))),
        delete: Index::hide_slice,
    };
    let pods = Rules::<Pod> {
        kind: "Pod",
        look: Look::InAnyCase,
        apply: Box::new(|index, pod| index.apply_pod(&pod)),
        delete: Index::delete_pod,
    };
    let nodes = Rules::<Node> {
        kind: "Node",
        look: Look::InAnyCase,
        apply: Box::new(|index, node| index.apply_node(&node)),
        delete: Index::delete_node,
    };
    let reports = Rules::<DeserializeGuard<GPUTopology>> {
        kind: "GPUTopology",
        look: Look::InAnyCase,
        apply: Box::new(|index, report| match &report.0 {
            Ok(report) => index.apply_report(&report.metadata, Ok(report)),
            Err(invalid) => index.apply_report(&invalid.metadata, Err(invalid.error.clone())),
        }),
        delete: Index::delete_report,
    };
    let driver = context.settings.defaults.gpu_driver.clone();
    let slices = Rules::<ResourceSlice> {
        kind: "ResourceSlice",
        look: Look::InAnyCase,
        apply: Box::new(move |index, slice| index.apply_slice(&slice, &driver)),
        delete: Index::delete_slice,
    };
    let claims = Rules::<ResourceClaim> {
        kind: Kind::ResourceClaim.name(),
        look: Look::InAnyCase,
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
        spawn_in(context, jobs(), namespace, everything.clone().page_size(JOBS_AT_ONCE));
        spawn_in(context, placements(), namespace, ours.clone());
    }
    macro_rules! object {
        ($type:ident) => {
            let rules = || Rules::<$type> {
                kind: Kind::$type.name(),
                look: Look::InAnyCase,
                apply: Box::new(|index, object| {
                    let content = observed_content(&serde_json::to_value(&object).unwrap_or_default());
                    index.apply_object(Kind::$type, &object.metadata, content)
                }),
                delete: |index, metadata| index.delete_object(Kind::$type, metadata),
            };
            for namespace in scopes(&context.settings) {
                spawn_in(context, rules(), namespace, ours.clone());
            }
        };
    }
    object!(Service);
    object!(ConfigMap);
    object!(PodDisruptionBudget);
    object!(NetworkPolicy);
}

/// Watches a kind in a namespace; in all namespaces if `None`.
pub(super) fn spawn_in<K>(context: &Context, rules: Rules<K>, namespace: Option<&str>, config: watcher::Config)
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
    K: DeserializeOwned + Clone + Debug + Send + 'static,
{
    let client = context.client.clone();
    let api =
        namespace.map_or_else(|| Api::all(client.clone()), |namespace| Api::namespaced(client.clone(), namespace));
    let watch = name(rules.kind, namespace);
    run(context, rules, watch, api, config);
}

/// Watches a kind in the whole cluster.
fn spawn<K>(context: &Context, rules: Rules<K>, config: watcher::Config)
where
    K: Resource<DynamicType = ()> + DeserializeOwned + Clone + Debug + Send + 'static,
{
    let watch = rules.kind.to_string();
    run(context, rules, watch, Api::all(context.client.clone()), config);
}

/// Watches the objects of an API.
pub(super) fn run<K>(context: &Context, rules: Rules<K>, watch: String, api: Api<K>, config: watcher::Config)
where
    K: Resource + DeserializeOwned + Clone + Debug + Send + 'static,
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
                    // The watcher emits `Init` before it sends a request, so this is no response of
                    // the server.
                    if !matches!(event, watcher::Event::Init) {
                        pause = FIRST_PAUSE;
                        if let Some(was) = failing.take() {
                            info!(kind = watch, was, "the watch works again");
                        }
                    }
                    let is_listed = matches!(event, watcher::Event::InitDone);
                    context.on_event(&rules, event, &mut known);
                    if is_listed {
                        debug!(kind = watch, objects = known.by_name.len(), "listed");
                        context.health.listed(&watch);
                    }
                }
                Ok(None) => break,
                Err(error) => {
                    let text = error.to_string();
                    context.metrics.watch_failed(rules.kind);
                    context.health.watch_failed(&watch, &text);
                    // Log an error once, not at every try.
                    if failing.as_ref() != Some(&text) {
                        warn!(kind = watch, error = text, "the watch failed; it is tried again with back-off");
                        failing = Some(text);
                    }
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
            }
        }
    });
}

/// Name → UID of every object seen, so that a relist can detect deletions. Kept minimal because
/// most entries are pods that do not belong to jobs.
#[derive(Default)]
struct Known {
    by_name: HashMap<Name, Box<str>>,
    /// Objects in the list that is being read.
    listed: HashMap<Name, Box<str>>,
}

/// Namespace (empty for cluster-scoped objects) and name.
type Name = (Box<str>, Box<str>);

fn name_of(metadata: &ObjectMeta) -> (Name, Box<str>) {
    let text = |text: &Option<String>| text.as_deref().unwrap_or_default().into();
    ((text(&metadata.namespace), text(&metadata.name)), text(&metadata.uid))
}

/// The metadata needed to delete an object from the index.
fn metadata_of((namespace, name): Name, uid: Box<str>) -> ObjectMeta {
    let some = |text: Box<str>| Some(text.into_string()).filter(|text| !text.is_empty());
    ObjectMeta { namespace: some(namespace), name: some(name), uid: some(uid), ..ObjectMeta::default() }
}

impl Known {
    /// Records an object of a list. Returns the object it replaces if that was deleted and created
    /// again unseen.
    fn list(&mut self, metadata: &ObjectMeta) -> Option<ObjectMeta> {
        let (name, uid) = name_of(metadata);
        let before = self.by_name.get(&name).filter(|before| **before != uid);
        let before = before.map(|before| metadata_of(name.clone(), before.clone()));
        self.listed.insert(name, uid);
        before
    }

    /// Completes a list. Returns the known objects that it did not contain.
    fn end_list(&mut self) -> Vec<ObjectMeta> {
        let before = std::mem::replace(&mut self.by_name, std::mem::take(&mut self.listed));
        let gone = before.into_iter().filter(|(name, _)| !self.by_name.contains_key(name));
        gone.map(|(name, uid)| metadata_of(name, uid)).collect()
    }
}

impl Context {
    fn on_event<K: Resource>(&self, rules: &Rules<K>, event: watcher::Event<K>, known: &mut Known) {
        let now = Instant::now();
        match event {
            watcher::Event::Init => known.listed.clear(),
            watcher::Event::InitApply(object) => {
                if let Some(before) = known.list(object.meta()) {
                    self.take_in(now, rules.look, |index| (rules.delete)(index, &before));
                }
                self.take_in(now, rules.look, |index| (rules.apply)(index, object));
            }
            watcher::Event::InitDone => {
                for metadata in known.end_list() {
                    self.take_in(now, rules.look, |index| (rules.delete)(index, &metadata));
                }
            }
            watcher::Event::Apply(object) => {
                let (name, uid) = name_of(object.meta());
                known.by_name.insert(name, uid);
                self.take_in(now, rules.look, |index| (rules.apply)(index, object));
            }
            watcher::Event::Delete(object) => {
                known.by_name.remove(&name_of(object.meta()).0);
                self.take_in(now, rules.look, |index| (rules.delete)(index, object.meta()));
            }
        }
    }

    /// Whether a job is in a watched namespace.
    pub(super) fn watches(&self, key: &Key) -> bool {
        let only = &self.settings.watch_namespaces;
        only.is_empty() || only.contains(&key.namespace)
    }

    /// Changes the index, and schedules the affected jobs.
    pub(super) fn take_in(&self, now: Instant, look: Look, change: impl FnOnce(&mut Index) -> Effect) {
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
        for key in effect.jobs.into_iter().filter(|key| self.watches(key)) {
            self.queue.look(key, now + TOGETHER, look);
        }
        if let Some(key) = effect.quota {
            self.queue.succeeded(&key);
            self.queue.add(key, now + ROOM_TOGETHER);
        }
        for key in woken {
            self.queue.look(key, now + ROOM_TOGETHER, Look::IfWorthIt);
        }
        // The remaining jobs are still blocked, but their reason may have changed.
        let later = now + waiting_period(waiting.len()).unsigned_abs();
        waiting.into_iter().for_each(|key| self.queue.add(key, later));
    }
}

#[cfg(test)]
mod tests {
    use super::{Known, ObjectMeta};

    /// Regression test: a pod outside any job was deleted and created again under its name while
    /// the watch was disconnected, and its resources stayed taken forever.
    #[test]
    fn what_a_new_list_does_not_show_is_gone_and_so_is_what_stands_under_its_name_with_another_uid() {
        let object = |name: &str, uid: &str| ObjectMeta {
            namespace: Some("n".into()),
            name: Some(name.into()),
            uid: Some(uid.into()),
            ..ObjectMeta::default()
        };
        let mut known = Known::default();
        for first in [object("a", "1"), object("b", "2"), object("c", "3")] {
            assert_eq!(known.list(&first), None);
        }
        assert_eq!(known.end_list(), []);
        assert_eq!(known.list(&object("a", "1")), None);
        assert_eq!(known.list(&object("b", "4")), Some(object("b", "2")));
        assert_eq!(known.end_list(), [object("c", "3")]);
        assert_eq!(known.list(&object("b", "4")), None);
    }
}
