//! The product's own queue and placement: rows become TrainJobs, hosts become nodes with a
//! GPUTopology, and the controller's index handles the events along the path of a reconcile
//! (`controller::reconcile`, `plan::cluster::step`). No client, no clock.

use crate::fabric::{Fabric, Host};
use crate::replay::{Decision, Job, Rule, Start};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta, Time};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use switchyard_crds::gpu_topology::GPUTopology;
use switchyard_crds::{PlacementStatus, RecentRestarts, TrainJob, conditions};
use switchyard_ledger::index::Index;
use switchyard_ledger::job::{JobId, Key, attempt_of, key_of, placement_of};
use switchyard_ledger::queue::{QueueSettings, Standing};
use switchyard_ledger::usage::UsageOverlay;
#[cfg(test)]
use switchyard_plan::cluster::gang::fits;
use switchyard_plan::cluster::levels::{DomainLevel, Levels};
use switchyard_plan::cluster::place_with_fabric::{PlacementFailure, PlacementWithFabric, place_with_fabric};
#[cfg(test)]
use switchyard_plan::cluster::queue_order::Basis;
use switchyard_plan::cluster::queue_policy::attained;
use switchyard_plan::cluster::view::NodeView;
use switchyard_plan::cluster::{PlacementRequest, PlacementRules, WaitReason, allocation};
use switchyard_plan::objects::{Defaults, pod};
use switchyard_plan::{ValidJob, validate};

/// Start time of every trace, because the product's rules work with timestamps rather than seconds.
const BEGIN: Timestamp = Timestamp::constant(1_690_000_000, 0);
const LEAF: &str = "network.topology.nvidia.com/leaf";
const BLOCK: &str = "network.topology.nvidia.com/spine";

/// Why a job was stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stopped {
    HostFailed,
    Preempted,
}

/// The product.
pub struct Product {
    pub(crate) index: Index,
    fabric: Fabric,
    defaults: Defaults,
    levels: Levels,
    hosts: BTreeMap<String, usize>,
    /// By number, which is the queue order within a class.
    jobs: BTreeMap<usize, TrainJob>,
    /// Jobs of the higher class.
    urgent: BTreeSet<usize>,
    /// Jobs to reconcile.
    look: BTreeSet<usize>,
    /// The first forecast of each waiting job.
    forecasts: BTreeMap<usize, Option<[f64; 2]>>,
    /// When waiting jobs must be reconciled even if nothing happens until then.
    rechecks: BTreeMap<usize, Timestamp>,
}

impl Product {
    /// `machine` is an agent's report; every host gets a copy.
    ///
    /// # Errors
    /// The report is invalid, or does not have the fabric's number of GPUs per host.
    pub fn new(fabric: &Fabric, machine: &GPUTopology) -> Result<Product, String> {
        let mut index = Index::default();
        for host in &fabric.hosts {
            index.apply_node(&node(fabric, host, true)?);
            let report = renamed(machine, &host.name)?;
            let gpus = report.status.as_ref().map_or(0, |status| status.gpus.len());
            if gpus != fabric.gpus_per_host as usize {
                return Err(format!("the report has {gpus} GPUs; expected {}", fabric.gpus_per_host));
            }
            index.apply_report(&report.metadata, Ok(&report));
        }
        let [leaf, block] = fabric.oversubscription;
        let levels = [format!("{LEAF}:1"), format!("{BLOCK}:{leaf}"), format!("cluster:{block}")];
        let levels: Result<Vec<DomainLevel>, _> = levels.iter().map(|level| level.parse()).collect();
        let levels = levels.and_then(Levels::new).map_err(|error| error.to_string())?;
        let hosts = fabric.hosts.iter().enumerate().map(|(at, host)| (host.name.clone(), at)).collect();
        Ok(Product {
            index,
            fabric: fabric.clone(),
            defaults: Defaults::default(),
            levels,
            hosts,
            jobs: BTreeMap::new(),
            urgent: BTreeSet::new(),
            look: BTreeSet::new(),
            forecasts: BTreeMap::new(),
            rechecks: BTreeMap::new(),
        })
    }

    /// Changes the settings of the queue.
    #[must_use]
    pub fn with_queue(mut self, change: impl FnOnce(&mut QueueSettings)) -> Product {
        self.index.queue.configure(change);
        self
    }

    /// Creates a job with all its pods, which are gated.
    fn submit(&mut self, job: &Job) -> Result<(), String> {
        let name = name(job.number);
        let mut manifest = json!({
            "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob",
            "metadata": {"name": name, "namespace": namespace(job.team), "uid": name, "creationTimestamp": at(job.submit)},
            "spec": {
                "trainer": {
                    "framework": "Plain", "image": "trace", "numNodes": job.pods,
                    "resourcesPerNode": {"limits": {"nvidia.com/gpu": job.gpus}},
                },
            },
        });
        if let Some(limit) = job.limit {
            manifest["spec"]["activeDeadlineSeconds"] = json!(limit.ceil() as i64);
        }
        if job.is_urgent {
            self.urgent.insert(job.number);
            manifest["spec"]["topologyPolicy"] = json!({"preemption": "LowerPriority"});
        }
        if let Some(period) = job.checkpoint {
            manifest["spec"]["checkpoint"] =
                json!({"path": "/checkpoints", "periodSeconds": period as i64, "onSuspend": "Discard"});
        } else if job.saves {
            // Only our own engine declares that it saves; for the queue, another framework's job is
            // otherwise the same.
            manifest["spec"]["checkpoint"] = json!({"path": "/checkpoints"});
        }
        let mut job_object: TrainJob = serde_json::from_value(manifest).map_err(|error| format!("{name}: {error}"))?;
        let valid = validate(&job_object).map_err(|faults| format!("{name}: {faults:?}"))?;
        let mechanism = allocation::allocation(&job_object, self.index.usage.nodes());
        let status = job_object.status.get_or_insert_default();
        (status.attempt, status.device_allocation) = (Some(1), mechanism);
        self.index.apply_job(job_object.clone());
        self.create_pods(&job_object, &valid);
        self.jobs.insert(job.number, job_object);
        Ok(())
    }

    fn create_pods(&mut self, job: &TrainJob, valid: &ValidJob) {
        let attempt = attempt_of(job);
        for rank in 0..valid.request.nodes {
            let mut made = pod(job, valid, &self.defaults, attempt, rank);
            made.metadata.uid = made.metadata.name.clone();
            if let Some(spec) = &mut made.spec {
                spec.priority = Some(i32::from(
                    number_of(&key_of(&job.metadata)).is_some_and(|number| self.urgent.contains(&number)),
                ));
            }
            self.index.apply_pod(&made);
        }
    }

    /// Deletes the pods of a job. Returns the nodes that gained room.
    fn delete_pods(&mut self, job: &TrainJob) -> BTreeSet<String> {
        let family = self.index.job_states.get(&JobId::of(&job.metadata));
        let pods = family.into_iter().flat_map(|family| family.pods.values().map(|pod| pod.uid.clone()));
        let metadata = |uid: String| ObjectMeta {
            name: Some(uid.clone()),
            namespace: job.metadata.namespace.clone(),
            uid: Some(uid),
            ..Default::default()
        };
        let pods: Vec<ObjectMeta> = pods.map(metadata).collect();
        pods.iter().flat_map(|pod| self.index.delete_pod(pod).room).collect()
    }

    /// Writes the status of a job and shows it to the watch.
    fn write(&mut self, number: usize, job: TrainJob) {
        let effect = self.index.apply_job(job.clone());
        self.jobs.insert(number, job);
        self.wake(&effect.room);
    }

    fn wake(&mut self, room: &BTreeSet<String>) {
        let woken = self.index.wake(room);
        self.look.extend(woken.iter().filter_map(number_of));
    }

    /// Starts the next attempt of a stopped job, as after `plan::cluster::retry`. After a host
    /// failure it keeps its remaining nodes; after a preemption it leaves them.
    fn restart(&mut self, number: usize, why: Stopped, now: Timestamp) {
        let Some(mut object) = self.jobs.get(&number).cloned() else { return };
        let Ok(valid) = validate(&object) else { return };
        let ran = attained(&object, now).as_secs();
        let status = object.status.get_or_insert_default();
        status.ran_seconds = Some(ran);
        status.attempt = status.attempt.map(|attempt| attempt + 1);
        let reason = match why {
            Stopped::HostFailed => conditions::RESTARTING,
            Stopped::Preempted => {
                let hour = RecentRestarts { since: Time(now), infrastructure: 0, preemption: 1 };
                let restarts = status.restarts.get_or_insert_default();
                restarts.recent.push(hour);
                restarts.preemption += 1;
                conditions::PREEMPTED
            }
        };
        status.conditions = vec![condition(conditions::PLACED, "False", reason, now)];
        self.write(number, object.clone());
        let room = self.delete_pods(&object);
        self.create_pods(&object, &valid);
        self.wake(&room);
        self.look.insert(number);
    }

    fn show_node(&mut self, host: usize, ready: bool) {
        let Ok(node) = node(&self.fabric, &self.fabric.hosts[host], ready) else { return };
        let effect = self.index.apply_node(&node);
        self.wake(&effect.room);
    }

    /// Runs `ask` for a waiting job with the same inputs as a reconcile. Also returns the job's
    /// standing in the queue.
    fn with_request<R>(
        &mut self,
        number: usize,
        now: Timestamp,
        ask: impl FnOnce(&PlacementRequest<'_>, &BTreeMap<String, NodeView>) -> R,
    ) -> Result<(R, Standing), String> {
        let object = &self.jobs[&number];
        let valid = validate(object).map_err(|faults| format!("{}: {faults:?}", name(number)))?;
        let rules = PlacementRules { defaults: &self.defaults, levels: &self.levels, now };
        let standing = self.index.standing(object, rules);
        let avoided_nodes = self.index.avoided_nodes(&JobId::of(&object.metadata), now);
        let admitted = self.index.admitted(object, &valid);
        let request =
            PlacementRequest { job: object, valid: &valid, rules, admitted: &admitted, avoided_nodes: &avoided_nodes };
        let without = UsageOverlay::new(&mut self.index.usage, &standing.ignorable);
        Ok((ask(&request, without.nodes()), standing))
    }

    /// Whether a placed job must make way for one of a higher class.
    fn must_yield(&self, job: &TrainJob) -> bool {
        let family = self.index.job_states.get(&JobId::of(&job.metadata));
        placement_of(job).is_some() && family.is_some_and(|family| family.preempted_attempt == Some(attempt_of(job)))
    }

    /// Reconciles one job: places or queues a waiting job, and preempts a running one if required.
    fn reconcile(&mut self, number: usize, now: Timestamp) -> Result<Option<Decision>, String> {
        if self.jobs.get(&number).is_some_and(|job| self.must_yield(job)) {
            self.restart(number, Stopped::Preempted, now);
            return Ok(Some(Decision::Preempt(number)));
        }
        let Some(object) = self.jobs.get(&number).filter(|job| placement_of(job).is_none()).cloned() else {
            return Ok(None);
        };
        let key = key_of(&object.metadata);
        let (found, standing) = self.with_request(number, now, place_with_fabric)?;
        let rules = PlacementRules { defaults: &self.defaults, levels: &self.levels, now };
        let wait = |open| Some(WaitReason::Room { open });
        let (waits, decision) = match found {
            Ok(PlacementWithFabric { placed, .. }) if self.index.should_delay(&key, &placed.status, rules) => {
                (wait(placed.status.nodes.len() as u32), None)
            }
            Ok(PlacementWithFabric { placed, .. }) => {
                let hosts = self.placed(number, object.clone(), placed.status, now)?;
                let forecast = self.forecasts.remove(&number).flatten();
                (None, Some(Decision::Start(Start { job: number, hosts, forecast })))
            }
            Err(PlacementFailure::NoRoom(why)) => (wait(why.open), None),
            Err(PlacementFailure::WrongFabric(found)) => return Err(format!("{key}: {}", found.why)),
        };
        let rules = PlacementRules { defaults: &self.defaults, levels: &self.levels, now };
        let next = self.index.settle(&object, standing, waits, rules);
        self.look.extend(next.jobs.iter().filter_map(number_of));
        match next.recheck {
            Some(at) => self.rechecks.insert(number, at),
            None => self.rechecks.remove(&number),
        };
        if waits.is_some() {
            if !self.forecasts.contains_key(&number) {
                let window = self.index.forecast(&key, now).and_then(|forecast| forecast.window.ok());
                let seconds = |at: Timestamp| at.duration_since(BEGIN).as_secs_f64();
                self.forecasts.insert(number, window.map(|window| [window.earliest, window.latest].map(seconds)));
            }
            self.release_kept_nodes(number, object, now);
        }
        Ok(decision)
    }

    /// The job at the head of the queue, and the latest time at which it can start.
    #[cfg(test)]
    pub(crate) fn forecast(&self) -> Option<(usize, f64)> {
        let held = self.index.queue.reservation()?;
        let (namespace, name) = held.position.name().split_once('/')?;
        let job = number_of(&Key { namespace: namespace.into(), name: name.into() })?;
        let (start, _) = held.start.filter(|(_, basis)| *basis == Basis::Limits)?;
        Some((job, start.duration_since(BEGIN).as_secs_f64()))
    }

    /// The start that was first computed for the head of the queue.
    #[cfg(test)]
    pub(crate) fn first_start_of_head(&self) -> Option<f64> {
        let first = self.index.queue.reservation()?.first_start?;
        Some(first.duration_since(BEGIN).as_secs_f64())
    }

    /// Whether a job runs that comes before the head of the queue, and so may delay it.
    #[cfg(test)]
    pub(crate) fn runs_ahead_of_head(&self) -> bool {
        let Some(held) = self.index.queue.reservation() else { return false };
        let is_ahead = |job: &TrainJob| self.index.queue_position(job) < held.position;
        self.jobs.values().any(|job| placement_of(job).is_some() && is_ahead(job))
    }

    /// Waiting jobs that could start now.
    #[cfg(test)]
    pub(crate) fn startable(&mut self, now: f64) -> Result<Vec<usize>, String> {
        let now = at(now);
        let waiting: Vec<usize> = self.index.queue.keys().filter_map(number_of).collect();
        let mut startable = Vec::new();
        for number in waiting {
            startable.extend(self.with_request(number, now, fits)?.0.then_some(number));
        }
        Ok(startable)
    }

    /// Releases the nodes kept by a restarting gang that found no placement.
    fn release_kept_nodes(&mut self, number: usize, mut object: TrainJob, now: Timestamp) {
        let status = object.status.get_or_insert_default();
        let placed = status.condition(conditions::PLACED);
        if placed.is_some_and(|placed| placed.reason == conditions::RESTARTING) {
            status.conditions = vec![condition(conditions::PLACED, "False", conditions::NO_ROOM, now)];
            self.write(number, object);
        }
    }

    fn placed(
        &mut self,
        number: usize,
        mut object: TrainJob,
        place: PlacementStatus,
        now: Timestamp,
    ) -> Result<Vec<usize>, String> {
        let host = |name: &String| self.hosts.get(name).copied().ok_or_else(|| format!("there is no host {name}"));
        let hosts: Result<Vec<usize>, String> = place.nodes.iter().map(|node| host(&node.node_name)).collect();
        let status = object.status.get_or_insert_default();
        status.placement = Some(place);
        status.placed_time.get_or_insert(Time(now));
        status.conditions = vec![condition(conditions::PLACED, "True", conditions::PLACED, now)];
        self.write(number, object);
        hosts
    }
}

impl Rule for Product {
    fn submitted(&mut self, job: &Job) -> Result<(), String> {
        self.look.insert(job.number);
        self.submit(job)
    }

    fn ended(&mut self, job: usize, now: f64) {
        let Some(mut object) = self.jobs.remove(&job) else { return };
        self.rechecks.remove(&job);
        let status = object.status.get_or_insert_default();
        (status.completion_time, status.conditions) =
            (Some(Time(at(now))), vec![condition(conditions::COMPLETE, "True", conditions::COMPLETE, at(now))]);
        let mut effect = self.index.apply_job(object.clone());
        effect.room.extend(self.delete_pods(&object));
        let deleted = self.index.delete_job(&object.metadata);
        self.look.extend(effect.jobs.union(&deleted.jobs).filter_map(number_of));
        effect.room.extend(deleted.room);
        self.wake(&effect.room);
    }

    fn failed(&mut self, host: usize, jobs: &[usize], now: f64) {
        self.show_node(host, false);
        jobs.iter().for_each(|job| self.restart(*job, Stopped::HostFailed, at(now)));
    }

    fn repaired(&mut self, host: usize, _now: f64) {
        self.show_node(host, true);
    }

    fn decide(&mut self, now: f64) -> Result<Vec<Decision>, String> {
        let now = at(now);
        let mut decisions = Vec::new();
        let due: Vec<usize> = self.rechecks.iter().filter(|(_, at)| **at <= now).map(|(number, _)| *number).collect();
        self.rechecks.retain(|_, at| *at > now);
        self.look.extend(due);
        while !self.look.is_empty() {
            let keys = std::mem::take(&mut self.look)
                .into_iter()
                .filter_map(|number| Some(key_of(&self.jobs.get(&number)?.metadata)));
            let keys = self.index.in_order(keys.collect());
            for key in keys {
                if self.index.needs_planning(&key)
                    && let Some(number) = number_of(&key)
                {
                    decisions.extend(self.reconcile(number, now)?);
                }
            }
        }
        Ok(decisions)
    }

    fn next_decision(&self) -> Option<f64> {
        let next = self.rechecks.values().min()?;
        // Rounding must not bring it forward.
        Some((next.duration_since(BEGIN).as_secs_f64() * 1000.0).ceil() / 1000.0)
    }
}

fn condition(name: &str, status: &str, reason: &str, now: Timestamp) -> Condition {
    Condition {
        type_: name.into(),
        status: status.into(),
        reason: reason.into(),
        message: String::new(),
        last_transition_time: Time(now),
        observed_generation: None,
    }
}

/// Jobs that queue behind long ones could end after the last timestamp.
fn at(seconds: f64) -> Timestamp {
    let since = SignedDuration::try_from_secs_f64(seconds).unwrap_or(SignedDuration::MAX);
    BEGIN.saturating_add(since).unwrap_or(Timestamp::MAX)
}

fn name(number: usize) -> String {
    format!("job-{number:07}")
}

/// The namespace of a team.
pub(super) fn namespace(team: usize) -> String {
    format!("team-{team}")
}

fn number_of(key: &Key) -> Option<usize> {
    key.name.strip_prefix("job-")?.parse().ok()
}

fn node(fabric: &Fabric, Host { name, leaf, block }: &Host, ready: bool) -> Result<Node, String> {
    let labels: Value = json!({LEAF: format!("leaf-{leaf}"), BLOCK: format!("block-{block}")});
    let node = json!({
        "metadata": {"name": name, "labels": labels},
        "status": {
            "allocatable": {"cpu": "192", "memory": "2Ti", "pods": "110", "nvidia.com/gpu": fabric.gpus_per_host.to_string()},
            "conditions": [{"type": "Ready", "status": if ready { "True" } else { "False" }}],
        },
    });
    serde_json::from_value(node).map_err(|error| error.to_string())
}

/// The report of another host with the same hardware but unique GPU UUIDs.
fn renamed(machine: &GPUTopology, host: &str) -> Result<GPUTopology, String> {
    let mut report = machine.clone();
    report.metadata.name = Some(host.into());
    let mut text = serde_json::to_string(&report.status).map_err(|error| error.to_string())?;
    for gpu in machine.status.iter().flat_map(|status| &status.gpus) {
        text = text.replace(&json!(gpu.uuid).to_string(), &json!(format!("GPU-{host}-{}", gpu.index)).to_string());
    }
    report.status = serde_json::from_str(&text).map_err(|error| error.to_string())?;
    Ok(report)
}
