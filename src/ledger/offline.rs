//! Offline view of a cluster from a list of objects: what the controller would decide, and why. No
//! client, no clock.

mod volumes;

use self::volumes::{Storage, absent};
use crate::index::Index;
use crate::job::{JobId, Key, attempt_of, is_queued, key_of};
use crate::queue::QueueSettings;
use crate::usage::UsageOverlay;
use jiff::Timestamp;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use switchyard_crds::TrainJob;
use switchyard_crds::gpu_topology::GPUTopology;
use switchyard_plan::cluster::NoPlacement;
use switchyard_plan::cluster::allocation;
use switchyard_plan::cluster::fabric::{self, FabricDecisions};
use switchyard_plan::cluster::forecast::Forecast;
use switchyard_plan::cluster::gang::Placed;
use switchyard_plan::cluster::levels::Levels;
use switchyard_plan::cluster::place_with_fabric::{PlacementFailure, PlacementWithFabric, place_with_fabric};
use switchyard_plan::cluster::queue_order::JobAhead;
use switchyard_plan::cluster::view::NodeView;
use switchyard_plan::cluster::{PlacementRequest, PlacementRules};
use switchyard_plan::objects::{Defaults, observed_content, pod};
use switchyard_plan::{Invalid, ValidJob, validate};

/// Kinds that affect placement; others are ignored.
pub const KINDS: [&str; 12] = [
    "Node",
    "Pod",
    "TrainJob",
    "PlacementSlice",
    "GPUTopology",
    "ResourceSlice",
    "ResourceClaim",
    "PriorityClass",
    "PersistentVolumeClaim",
    "PersistentVolume",
    "StorageClass",
    "ResourceClaimTemplate",
];

/// A snapshot of a cluster.
pub struct Cluster {
    index: Index,
    defaults: Defaults,
    levels: Levels,
    /// Priority by priority class.
    classes: BTreeMap<String, i32>,
    default_priority: i32,
    storage: Storage,
    now: Timestamp,
    /// Namespace of jobs whose manifest sets none.
    namespace: String,
}

/// Whether the job's current placement counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PreviousPlacement {
    /// Ignored, as if the job were new.
    Ignored,
    /// Counts, as after a failure: the job keeps the nodes that it can.
    Kept,
}

/// The controller's decision about a job.
#[derive(Debug, Clone, PartialEq)]
pub struct PlacementVerdict {
    /// The placement, or the reason why there is none.
    pub placement: Result<Placed, NoPlacement>,
    /// The job ahead in the queue that holds a reservation.
    pub ahead: Option<JobAhead>,
    /// Estimated start time if the job is queued.
    pub forecast: Option<Forecast>,
    /// Jobs that would be preempted for it.
    pub victims: Vec<String>,
    /// The fabric its processes would use, or the reason why they must not. `None` without a
    /// placement, or if the job needs no fabric.
    pub fabric: Option<Result<FabricDecisions, String>>,
}

impl Cluster {
    /// Builds the view from the objects of one moment, and the settings of the controller's queue.
    ///
    /// # Errors
    /// An object is invalid; the error has its position, kind, name and fault.
    pub fn of(
        items: &[Value],
        defaults: Defaults,
        levels: Levels,
        queue: QueueSettings,
        now: Timestamp,
    ) -> Result<Cluster, String> {
        let (mut index, classes) = (Index::default(), BTreeMap::new());
        // The user has these objects, and so already knows all names.
        index.queue.configure(|settings| *settings = QueueSettings { names_others: true, ..queue });
        let namespace = "default".to_string();
        let storage = Storage::default();
        let mut cluster = Cluster { index, defaults, levels, classes, default_priority: 0, storage, now, namespace };
        let mut nodes = BTreeSet::new();
        for (position, item) in items.iter().enumerate() {
            let name = item.pointer("/metadata/name").and_then(Value::as_str).unwrap_or("-");
            let kind = item.get("kind").and_then(Value::as_str).unwrap_or("-");
            let wrong = |error: String| format!("items[{position}] ({kind} {name}): {error}");
            if kind == "Node" && !nodes.insert(name) {
                return Err(wrong("the snapshot has two nodes of this name".into()));
            }
            cluster.add(kind, item).map_err(|error| wrong(error.to_string()))?;
        }
        let ids: Vec<JobId> = cluster.index.job_states.keys().cloned().collect();
        ids.iter().for_each(|id| cluster.resolve(id));
        cluster.index.show_all();
        cluster.fill_queue();
        Ok(cluster)
    }

    /// Replaces the namespace `default` of jobs whose manifest sets none.
    #[must_use]
    pub fn from_namespace(self, namespace: String) -> Cluster {
        Cluster { namespace, ..self }
    }

    /// Namespace of jobs whose manifest sets none.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Resolves from which nodes the pods of a job can use their volumes.
    fn resolve(&mut self, id: &JobId) {
        let pods = self.index.job_states.get_mut(id).into_iter().flat_map(|state| state.pods.values_mut());
        for rules in pods.filter_map(|pod| pod.rules.as_mut()).filter(|rules| !rules.is_known()) {
            self.storage.resolve(&id.namespace, Arc::make_mut(rules));
        }
    }

    fn add(&mut self, kind: &str, item: &Value) -> Result<(), serde_json::Error> {
        self.storage.add(kind, item)?;
        let index = &mut self.index;
        match kind {
            "Node" => drop(index.apply_node(&read(item)?)),
            "Pod" => drop(index.apply_pod(&read(item)?)),
            "TrainJob" => drop(index.show_job(read(item)?)),
            "PlacementSlice" => drop(index.show_slice(read(item)?)),
            "ResourceSlice" => drop(index.apply_slice(&read(item)?, &self.defaults.gpu_driver)),
            "ResourceClaim" => drop(index.apply_claim(&read(item)?, observed_content(item))),
            // As in the controller, an invalid report affects only its own node.
            "GPUTopology" => match read::<GPUTopology>(item) {
                Ok(report) => drop(index.apply_report(&report.metadata, Ok(&report))),
                Err(error) => {
                    let metadata = serde_json::from_value(item["metadata"].clone())?;
                    index.apply_report(&metadata, Err(error.to_string()));
                }
            },
            "PriorityClass" => {
                let class: k8s_openapi::api::scheduling::v1::PriorityClass = read(item)?;
                if class.global_default == Some(true) {
                    self.default_priority = class.value;
                }
                self.classes.insert(class.metadata.name.unwrap_or_default(), class.value);
            }
            _ => {}
        }
        Ok(())
    }

    /// The first missing object among those that the job's pods reference.
    fn absent(&self, job: &TrainJob) -> Option<&str> {
        let state = self.index.job_states.get(&JobId::of(&job.metadata));
        absent(state.into_iter().flat_map(|state| state.pods.values()))
    }

    /// Queues the waiting jobs.
    fn fill_queue(&mut self) {
        let is_waiting = |job: &TrainJob| is_queued(job) && self.absent(job).is_none();
        let waiting = self.index.jobs.iter().filter(|(_, job)| is_waiting(job));
        let waiting: Vec<Key> = waiting.map(|(key, _)| key.clone()).collect();
        let rules = PlacementRules { defaults: &self.defaults, levels: &self.levels, now: self.now };
        self.index.enqueue_all(waiting, rules);
    }

    /// All nodes by name.
    pub fn nodes(&self) -> &BTreeMap<String, NodeView> {
        self.index.usage.nodes()
    }

    /// All jobs, ordered by namespace and name.
    pub fn jobs(&self) -> Vec<&TrainJob> {
        let mut jobs: Vec<(&Key, &TrainJob)> = self.index.jobs.iter().map(|(key, job)| (key, &**job)).collect();
        jobs.sort_by_key(|(key, _)| *key);
        jobs.into_iter().map(|(_, job)| job).collect()
    }

    /// A job by namespace and name.
    pub fn job(&self, namespace: &str, name: &str) -> Option<&TrainJob> {
        let key = Key { namespace: namespace.into(), name: name.into() };
        self.index.jobs.get(&key).map(|job| &**job)
    }

    /// The time of the snapshot.
    pub fn now(&self) -> Timestamp {
        self.now
    }

    /// The topology levels in use.
    pub fn levels(&self) -> &Levels {
        &self.levels
    }

    /// The controller's decision about a new job, about a job of the cluster if it had to be placed
    /// now, or, with [`PreviousPlacement::Kept`], about a job after a failure.
    ///
    /// # Errors
    /// The job is invalid.
    pub fn explain(&mut self, job: &TrainJob, earlier: PreviousPlacement) -> Result<PlacementVerdict, Vec<Invalid>> {
        let mut job = job.clone();
        let valid = validate(&job)?;
        job.metadata.uid.get_or_insert_with(|| "new".to_string());
        job.metadata.namespace.get_or_insert_with(|| self.namespace.clone());
        let id = JobId::of(&job.metadata);
        let allocation = allocation::allocation(&job, self.index.usage.nodes());
        let attempt = attempt_of(&job).max(1);
        let status = job.status.get_or_insert_default();
        (status.device_allocation, status.attempt) = (allocation, Some(attempt as i32));
        status.fabric = None;
        let before = fabric::pod_resources(&job, &valid, &self.defaults, self.index.usage.nodes());
        job.status.get_or_insert_default().fabric = before;
        let status = job.status.get_or_insert_default();
        if earlier == PreviousPlacement::Ignored {
            status.placement = None;
        }
        let key = key_of(&job.metadata);
        if self.index.jobs.get(&key).is_none_or(|known| known.metadata.uid != job.metadata.uid) {
            self.submit(&job, &valid, attempt);
        }
        if let Some(absent) = self.absent(&job) {
            let placement = Err(NoPlacement::impossible(absent.to_string()));
            return Ok(PlacementVerdict { placement, ahead: None, forecast: None, victims: Vec::new(), fabric: None });
        }
        let avoided_nodes = self.index.avoided_nodes(&id, self.now);
        let rules = PlacementRules { defaults: &self.defaults, levels: &self.levels, now: self.now };
        let standing = self.index.standing(&job, rules);
        // The job's own shares do not block it.
        let own = self.index.takers_of(&id, |_| true);
        let mut overlay = UsageOverlay::new(&mut self.index, &own);
        overlay.remove(&standing.ignorable);
        let admitted = overlay.admitted(&job, &valid);
        let request =
            PlacementRequest { job: &job, valid: &valid, rules, admitted: &admitted, avoided_nodes: &avoided_nodes };
        let (placement, fabric) = match place_with_fabric(&request, overlay.usage.nodes()) {
            Ok(PlacementWithFabric { placed, fabric }) => (Ok(placed), fabric.map(Ok)),
            Err(PlacementFailure::WrongFabric(found)) => (Ok(found.placed), Some(Err(found.why))),
            Err(PlacementFailure::NoRoom(why)) => (Err(why), None),
        };
        let position = overlay.queue_position(&job);
        let preemption = if placement.is_err() { overlay.plan_preemption(&request, &position) } else { None };
        let victims = preemption.map(|preemption| preemption.victims).unwrap_or_default();
        drop(overlay);
        let forecast = self.index.forecast(&key, self.now);
        Ok(PlacementVerdict {
            placement,
            ahead: standing.ahead,
            forecast,
            victims: victims.iter().map(ToString::to_string).collect(),
            fabric,
        })
    }

    /// Adds a job as if its pods had been created, because the priority, and with it the queue
    /// position, comes from the pods.
    fn submit(&mut self, job: &TrainJob, valid: &ValidJob, attempt: u32) {
        self.index.apply_job(job.clone());
        let mut made = pod(job, valid, &self.defaults, attempt, 0);
        made.metadata.uid = Some(format!("{}-pod", job.metadata.uid.as_deref().unwrap_or_default()));
        if let Some(spec) = &mut made.spec {
            let class = spec.priority_class_name.as_ref().and_then(|class| self.classes.get(class)).copied();
            spec.priority.get_or_insert(class.unwrap_or(self.default_priority));
        }
        self.index.apply_pod(&made);
        self.resolve(&JobId::of(&job.metadata));
    }

    /// Places a job: its resources are taken in all later decisions.
    pub fn commit_placement(&mut self, job: &TrainJob, placed: &Placed) {
        let Ok(valid) = validate(job) else { return };
        let rules = PlacementRules { defaults: &self.defaults, levels: &self.levels, now: self.now };
        let takers = (0..).map(|rank: usize| format!("settled/{}/{rank}", key_of(&job.metadata)));
        let admitted = self.index.admitted(job, &valid);
        self.index.hold(
            &PlacementRequest { job, valid: &valid, rules, admitted: &admitted, avoided_nodes: &BTreeMap::new() },
            takers,
            &placed.status.nodes,
        );
    }
}

fn read<T: DeserializeOwned>(item: &Value) -> Result<T, serde_json::Error> {
    T::deserialize(item)
}

#[cfg(test)]
mod tests;
