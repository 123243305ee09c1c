//! A cluster with one job. It carries out plans as the API server, the scheduler and the kubelets
//! would.

use crate::cluster::avoidance;
use crate::cluster::blocker::WriteError;
use crate::cluster::levels::Levels;
use crate::cluster::view::{Deletion, Ended, NodeView, ObjectView, Phase, PodView};
use crate::cluster::{Action, JobSnapshot, PlacementRules, Reconciliation, Silence, plan};
use crate::eligible::NodeFacts;
use crate::objects::{Defaults, Kind, Object, placement_slices};
use crate::{resources, status};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use switchyard_core::quantity::Resources;
use switchyard_crds::{TrainJob, conditions, validate as schema};
use switchyard_fabric::LogObservation;
use switchyard_worker_contract::event::Summary;

pub(super) fn at(second: i64) -> Timestamp {
    Timestamp::from_second(1_000_000 + second).unwrap()
}

fn amounts(cpu: &str) -> Resources {
    let quantities = [("cpu", cpu), ("pods", "9")].map(|(name, amount)| (name.to_string(), Quantity(amount.into())));
    resources::of_quantities(&quantities.into())
}

/// A cluster with one job.
#[derive(Clone)]
pub struct World {
    pub job: TrainJob,
    pub pods: Vec<PodView>,
    /// Pods that have lost their labels.
    pub unlabelled: Vec<PodView>,
    pub objects: BTreeMap<(Kind, String), ObjectView>,
    pub nodes: BTreeMap<String, NodeView>,
    pub missing: BTreeMap<String, Timestamp>,
    pub log_observations: BTreeMap<u32, LogObservation>,
    pub now: i64,
    pub restricted: bool,
    pub provisioning_class: Option<&'static str>,
    pub mass_outage: Option<String>,
    pub progress: Option<Timestamp>,
    pub progress_unread: bool,
    pub write_error: Option<WriteError>,
    pub summary: Option<Summary>,
    /// When the status was last written.
    pub written: Option<Timestamp>,
    /// Number of queued jobs.
    pub queue_length: usize,
    pub scheduler_is_known: bool,
    pub longest_schedule_timeout: SignedDuration,
    pub quota_recipient: Option<&'static str>,
    /// Grace period of deleted pods in seconds, `None` if they end at once.
    pub ends_after: Option<i64>,
}

impl World {
    pub fn new(nodes: u32, spec: Value) -> World {
        let mut document = json!({
            "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "metadata": {"name": "a"},
            "spec": {"trainer": {
                "framework": "Plain", "image": "i", "numNodes": nodes, "resourcesPerNode": {"limits": {"cpu": "2"}},
            }},
        });
        for (key, value) in spec.as_object().unwrap() {
            document["spec"][key] = value.clone();
        }
        let mut job = schema::train_job(&document).unwrap();
        (job.metadata.uid, job.metadata.namespace) = (Some("0123456789".into()), Some("ns".into()));
        job.metadata.generation = Some(1);
        let (objects, nodes_of, log_observations) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let mut world = World {
            job,
            pods: Vec::new(),
            unlabelled: Vec::new(),
            objects,
            nodes: nodes_of,
            missing: BTreeMap::new(),
            log_observations,
            now: 0,
            restricted: false,
            provisioning_class: None,
            mass_outage: None,
            progress: None,
            progress_unread: false,
            write_error: None,
            summary: None,
            written: None,
            queue_length: 1,
            scheduler_is_known: false,
            longest_schedule_timeout: SignedDuration::from_mins(10),
            quota_recipient: None,
            ends_after: None,
        };
        for number in 0..nodes {
            world.node(&format!("n{number}"), "4");
        }
        world
    }

    pub fn node(&mut self, name: &str, cpu: &str) {
        let facts = NodeFacts { name: name.into(), ready: true, ..NodeFacts::default() };
        let (free, allocatable) = (amounts(cpu), amounts(cpu));
        self.nodes.insert(name.into(), NodeView { facts, free, allocatable, ..NodeView::default() });
    }

    pub fn plan(&self) -> Reconciliation {
        let mut pods: Vec<&PodView> = self.pods.iter().collect();
        pods.sort_by_key(|pod| (pod.attempt, pod.node_rank));
        let unlabelled = self.unlabelled.iter().map(|pod| (pod.name.clone(), pod.uid.clone())).collect();
        let defaults = Defaults { worker_image: "worker:1".into(), ..Defaults::default() };
        let levels = Levels::default();
        let status = self.job.status.clone().unwrap_or_default();
        let avoided_nodes = avoidance::avoided(&status, &self.nodes, at(self.now));
        let snapshot = JobSnapshot {
            job: &self.job,
            pods: &pods,
            unlabelled: &unlabelled,
            objects: &self.objects,
            nodes: &self.nodes,
            missing: &self.missing,
            rules: PlacementRules { defaults: &defaults, levels: &levels, now: at(self.now) },
            actual: &BTreeMap::new(),
            forecast: None,
            cooldown_until: None,
            ahead: None,
            queue_length: self.queue_length,
            preempted_by: None,
            write_error: self.write_error.as_ref(),
            summary: self.summary.as_ref(),
            log_observations: &self.log_observations,
            status_written: self.written,
            avoided_nodes: &avoided_nodes,
            quota_recipient: self.quota_recipient,
            avoidance_ends: avoidance::next(&status, at(self.now)),
            restricted: self.restricted,
            provisioning_class: self.provisioning_class,
            silence: Silence {
                grace: SignedDuration::from_secs(60),
                mass_outage: self.mass_outage.as_deref(),
                outage_ended: None,
                progress: self.progress,
                progress_unread: self.progress_unread,
            },
            scheduler_is_known: self.scheduler_is_known,
            longest_schedule_timeout: self.longest_schedule_timeout,
        };
        plan(&snapshot)
    }

    /// Plans and carries out the plan as the API server, the scheduler and the kubelets would.
    pub fn step(&mut self) -> Reconciliation {
        let done = self.plan();
        for action in &done.actions {
            match action {
                Action::Create(Object::Pod(pod)) => self.pods.push(PodView::of(pod)),
                Action::Repair(Object::Pod(pod)) => {
                    let is_same_pod = |other: &mut PodView| Some(&other.name) == pod.metadata.name.as_ref();
                    self.pods.extend(self.unlabelled.extract_if(.., is_same_pod));
                }
                Action::Create(object) | Action::Repair(object) => self.make(object),
                Action::Release { pod, patch, .. } => {
                    let terms =
                        "/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms";
                    let node = patch.pointer(&format!("{terms}/0/matchFields/0/values/0")).unwrap().as_str().unwrap();
                    let pod = self.pods.iter_mut().find(|other| other.name == *pod).unwrap();
                    (pod.gated, pod.node, pod.phase, pod.ready) = (false, Some(node.into()), Phase::Running, true);
                }
                Action::Delete { kind: Kind::Pod, name, .. } => {
                    let pod = self.pods.iter_mut().find(|pod| pod.name == *name && pod.node.is_some());
                    match (pod.filter(|pod| !pod.is_over()), self.ends_after) {
                        (Some(pod), Some(seconds)) => {
                            let (requested, due) = (at(self.now), at(self.now + seconds));
                            (pod.deleting, pod.deletion) = (true, Some(Deletion { requested, due }));
                        }
                        _ => self.pods.retain(|pod| pod.name != *name),
                    }
                }
                Action::Delete { kind, name, .. } => drop(self.objects.remove(&(*kind, name.clone()))),
            }
        }
        if let Some(status) = &done.status {
            let slices = status.placement.iter().flat_map(|placement| placement_slices(&self.job, placement));
            let slices: Vec<Object> = slices.map(|slice| Object::PlacementSlice(Box::new(slice))).collect();
            slices.iter().for_each(|slice| self.make(slice));
            self.job.status = Some(status.clone());
        }
        done
    }

    fn make(&mut self, object: &Object) {
        let content = object.content();
        let view = ObjectView { uid: object.name().into(), owned: true, deleting: false, content };
        self.objects.insert((object.kind(), object.name().into()), view);
    }

    pub fn run(&mut self) {
        for _ in 0..20 {
            let done = self.step();
            if done.actions.is_empty() && done.status.is_none() {
                return;
            }
        }
        panic!("does not come to rest: {:?}", self.job.status);
    }

    pub fn stage(&self) -> &str {
        self.job.status.as_ref().and_then(|status| status::reason_of(status, conditions::SUCCEEDED)).unwrap_or("-")
    }

    pub fn message(&self) -> String {
        let status = self.job.status.as_ref().unwrap();
        status.condition(conditions::SUCCEEDED).unwrap().message.clone()
    }

    pub fn attempt(&self) -> i32 {
        self.job.status.as_ref().unwrap().attempt.unwrap()
    }

    pub fn exit(&mut self, name: &str, code: i32, message: &str) {
        let now = at(self.now);
        let pod = self.pods.iter_mut().find(|pod| pod.name == name).unwrap();
        pod.phase = if code == 0 { Phase::Succeeded } else { Phase::Failed };
        (pod.ready, pod.ended) =
            (false, Some(Ended { code, reason: "Error".into(), message: message.into(), at: Some(now) }));
    }
}
