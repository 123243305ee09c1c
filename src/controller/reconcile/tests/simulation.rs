//! A controller with simulated clocks and without an API server. All its writes succeed.

use super::*;
use jiff::ToSpan;
use k8s_openapi::api::core::v1::{Node, Pod, PodStatus};
use std::fmt::Write;
use switchyard_crds::labels;
use switchyard_plan::objects::{Object, observed_content};

/// The controller and the simulated time.
pub(super) struct Simulation {
    pub context: Context,
    pub epoch: Timestamp,
    start: Instant,
    pub elapsed: Duration,
    /// Resource version of the last write.
    version: u64,
    pub writes: usize,
    pub plans: usize,
    /// Whether a scheduler binds pods, which then run at once.
    pub binds: bool,
    /// Pods created by the controller, by name.
    pub pods: BTreeMap<String, Pod>,
}

impl Simulation {
    /// A cluster with this number of empty nodes.
    pub fn new(nodes: usize) -> Simulation {
        let (leader, leadership) = election::channel(boot_time);
        leader.lead_forever();
        let mut simulation = Simulation {
            context: context(leadership),
            epoch: "2026-01-01T00:00:00Z".parse().unwrap(),
            start: Instant::now(),
            elapsed: Duration::ZERO,
            version: 0,
            writes: 0,
            plans: 0,
            binds: false,
            pods: BTreeMap::new(),
        };
        (0..nodes).for_each(|node| simulation.set_node(node, "True"));
        simulation
    }

    pub fn now(&self) -> Timestamp {
        self.epoch + SignedDuration::try_from(self.elapsed).unwrap()
    }

    /// Makes a node ready, not ready, or silent (`Unknown`) from now on. Registers it if it is
    /// missing.
    pub fn set_node(&mut self, number: usize, ready: &str) {
        let name = format!("n{number}");
        let known = self.context.index().usage.nodes().get(&name).and_then(|node| node.registered);
        let node = json!({
            "metadata": {"name": name, "creationTimestamp": known.unwrap_or(self.now())},
            "status": {"allocatable": {"cpu": "8", "pods": "110"},
                "conditions": [{"type": "Ready", "status": ready, "lastTransitionTime": self.now()}]},
        });
        let node: Node = serde_json::from_value(node).unwrap();
        self.apply_change(Pass::Required, |index, _| index.apply_node(&node));
    }

    /// Creates jobs with `nodes` pods of 4 CPUs each, one job per second.
    pub fn apply_jobs(&mut self, numbers: std::ops::Range<usize>, nodes: impl Fn(usize) -> usize) {
        numbers.for_each(|number| self.apply_job(number, nodes(number), "4"));
    }

    pub fn apply_job(&mut self, number: usize, nodes: usize, cpu: &str) {
        let job = json!({
            "apiVersion": labels::API_VERSION, "kind": "TrainJob",
            "metadata": {"name": format!("j{number}"), "namespace": "t", "uid": format!("u{number}"),
                "creationTimestamp": self.epoch + (number as i64).seconds()},
            "spec": {"trainer": {"framework": "Plain", "image": "i", "numNodes": nodes,
                "resourcesPerNode": {"limits": {"cpu": cpu}}}},
        });
        let mut job: TrainJob = serde_json::from_value(job).unwrap();
        self.apply_change(Pass::Optional, |index, version| {
            job.metadata.resource_version = Some(version);
            index.apply_job(job)
        });
    }

    pub fn instant(&self) -> Instant {
        self.start + self.elapsed
    }

    /// Delivers a watch event.
    pub fn apply_change(
        &mut self,
        pass: Pass,
        change: impl FnOnce(&mut Index, String) -> switchyard_ledger::index::Effect,
    ) {
        self.version += 1;
        let version = self.version.to_string();
        self.context.apply_change(self.instant(), pass, |index| change(index, version));
    }

    /// A pod of another workload with this CPU request on a node.
    pub fn add_foreign_pod(&mut self, node: usize, cpu: &str) -> Pod {
        let pod = json!({
            "metadata": {"name": format!("other-{node}"), "namespace": "o", "uid": format!("other-{node}-{}", self.version)},
            "spec": {"nodeName": format!("n{node}"), "restartPolicy": "Never", "containers": [{"name": "c", "resources": {"requests": {"cpu": cpu}}}]},
            "status": {"phase": "Running"},
        });
        let pod: Pod = serde_json::from_value(pod).unwrap();
        self.apply_change(Pass::Required, |index, _| index.apply_pod(&pod));
        pod
    }

    /// Runs everything that is due until `end`.
    pub fn run_until(&mut self, end: Duration) {
        loop {
            let next = self.context.queue.with(|schedule| schedule.next_due());
            let Some(next) = next.filter(|next| *next <= self.start + end) else { break };
            self.elapsed = next.saturating_duration_since(self.start).max(self.elapsed);
            let now = self.instant();
            let Some((key, pass)) = self.context.queue.with(|schedule| schedule.pop(now)) else { break };
            let is_worthwhile = pass == Pass::Required || self.context.index().needs_planning(&key);
            if is_worthwhile && !self.context.defer_if_futile(&key, now) {
                self.reconcile(&key);
            }
            self.context.queue.with(|schedule| schedule.done(&key));
        }
        self.elapsed = end;
    }

    fn reconcile(&mut self, key: &Key) {
        self.plans += 1;
        let now = self.now();
        let planned = self.context.plan(key, now, self.instant());
        let Ok(Some(Planned { job, id, plan, .. })) = planned else { panic!("expected a plan; the cache is behind") };
        if let Some(wake) = plan.wake {
            let wait = Duration::try_from(wake.duration_since(now)).unwrap_or_default();
            self.context.queue.add(key.clone(), self.instant() + wait);
        }
        for action in plan.actions {
            let object = match action {
                Action::Create(object) => object,
                Action::Release { pod, .. } if self.binds => {
                    self.bind(&job, &pod);
                    continue;
                }
                Action::Release { .. } => continue,
                Action::Delete { kind: Kind::Pod, name, .. } if self.binds => {
                    let pod = self.pods.remove(&name).unwrap();
                    self.apply_change(Pass::Required, |index, _| index.delete_pod(&pod.metadata));
                    continue;
                }
                action => panic!("{action:?}"),
            };
            match object {
                Object::Pod(mut pod) => {
                    pod.metadata.uid = Some(format!("uid-{}", self.version + 1));
                    self.apply_change(Pass::Required, |index, _| index.apply_pod(&pod));
                    self.pods.insert(pod.metadata.name.clone().unwrap(), *pod);
                }
                object => self.apply_change(Pass::Required, |index, _| {
                    let content = observed_content(&object.content());
                    index.apply_object(object.kind(), object.metadata(), content)
                }),
            }
        }
        if let Some(status) = plan.status {
            self.writes += 1;
            if let Some(family) = self.context.index().job_states.get_mut(&id) {
                family.status_written = Some(now);
                family.writes.record_status(status.attempt.unwrap_or(0).unsigned_abs(), &fingerprint(&status));
            }
            let mut next = (*job).clone();
            next.status = Some(status);
            self.apply_change(Pass::Optional, |index, version| {
                index.record_status_version(key, &version);
                next.metadata.resource_version = Some(version);
                index.apply_job(next)
            });
        }
    }

    /// Binds a released pod to its node and starts it.
    fn bind(&mut self, job: &TrainJob, name: &str) {
        let placement = switchyard_ledger::job::placement_of(job).unwrap();
        let rank: usize = name.rsplit('-').next().unwrap().parse().unwrap();
        let now = self.now();
        let pod = self.pods.get_mut(name).unwrap();
        let spec = pod.spec.as_mut().unwrap();
        (spec.node_name, spec.scheduling_gates) = (Some(placement.nodes[rank].node_name.clone()), None);
        let is = |kind: &str| json!({"type": kind, "status": "True", "lastTransitionTime": now});
        let status = json!({
            "phase": "Running", "startTime": now, "conditions": [is("PodScheduled"), is("Ready")],
            "containerStatuses": [{"name": "trainer", "image": "i", "imageID": "i", "ready": true, "restartCount": 0,
                "state": {"running": {"startedAt": now}}}],
        });
        pod.status = Some(serde_json::from_value::<PodStatus>(status).unwrap());
        let pod = pod.clone();
        self.apply_change(Pass::Required, |index, _| index.apply_pod(&pod));
    }

    /// Size of the index as debug text, in bytes. The text itself is not stored, because it would
    /// count as resident memory.
    pub fn index_size(&self) -> usize {
        let mut bytes = ByteCounter(0);
        write!(bytes, "{:?}", self.context.index()).unwrap();
        bytes.0
    }
}

struct ByteCounter(usize);

impl Write for ByteCounter {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        self.0 += text.len();
        Ok(())
    }
}
