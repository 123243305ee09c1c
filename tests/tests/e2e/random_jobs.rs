//! Random jobs and faults, determined by a seed.

use crate::e2e::faults::{ENDLESS, checkpointed, processes_of_pod};
use crate::e2e::{Cluster, JOBS, TEAM, example};
use anyhow::Result;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Duration;
use switchyard_tests::Random;
use switchyard_tests::gpus::RESOURCE;
use switchyard_tests::nodes::TOOLS;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Trains,
    TrainsWithCheckpoints,
    HasGPUs,
    HasNoImage,
    HasNoProgram,
}

/// How a job ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// By `ttlSecondsAfterFinished`; not deleted by the test.
    Expires,
    /// Deleted while it starts or runs.
    DeletedEarly,
    /// Deleted with all remaining jobs.
    DeletedLate,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    ProcessKilled,
    PodDeleted,
    PodDeletedByForce,
    JobSuspended,
    ContainerdRestarted,
    KubeletRestarted,
    ControllerKilled,
    PlugPulled,
}

/// Kinds and faults are drawn from decks, so that even a few draws cover many kinds.
const KINDS: [Kind; 8] = [
    Kind::Trains,
    Kind::Trains,
    Kind::TrainsWithCheckpoints,
    Kind::TrainsWithCheckpoints,
    Kind::HasGPUs,
    Kind::HasGPUs,
    Kind::HasNoImage,
    Kind::HasNoProgram,
];
const ENDS: [End; 4] = [End::Expires, End::Expires, End::DeletedEarly, End::DeletedLate];
const FAULTS: [Fault; 8] = [
    Fault::ProcessKilled,
    Fault::PodDeleted,
    Fault::PodDeletedByForce,
    Fault::JobSuspended,
    Fault::ContainerdRestarted,
    Fault::KubeletRestarted,
    Fault::ControllerKilled,
    Fault::PlugPulled,
];

/// A deck of cards that is reshuffled when it is empty.
struct Deck<T: 'static> {
    all: &'static [T],
    left: Vec<T>,
}

impl<T: Copy> Deck<T> {
    fn new(all: &'static [T]) -> Deck<T> {
        Deck { all, left: Vec::new() }
    }

    fn draw(&mut self, random: &Random) -> T {
        if self.left.is_empty() {
            self.left = self.all.to_vec();
        }
        self.left.swap_remove(random.below(self.left.len()))
    }
}

pub(crate) struct RandomJobs {
    random: Random,
    kinds: Deck<Kind>,
    ends: Deck<End>,
    faults: Deck<Fault>,
    /// Jobs that must expire by themselves.
    pub expire: Vec<String>,
    /// Number of jobs and faults of each kind.
    pub counts: BTreeMap<String, u64>,
}

impl RandomJobs {
    pub fn new(seed: u64) -> RandomJobs {
        RandomJobs {
            random: Random::new(seed),
            kinds: Deck::new(&KINDS),
            ends: Deck::new(&ENDS),
            faults: Deck::new(&FAULTS),
            expire: Vec::new(),
            counts: BTreeMap::new(),
        }
    }

    fn count(&mut self, what: impl std::fmt::Debug) {
        *self.counts.entry(format!("{what:?}")).or_default() += 1;
    }

    fn milliseconds(&self, min: u64, max: usize) -> Duration {
        Duration::from_millis(min + self.random.below(max) as u64)
    }

    /// Adds one job and one fault.
    pub fn next(&mut self, cluster: &mut Cluster, number: usize) -> Result<()> {
        let (kind, end, fault) =
            (self.kinds.draw(&self.random), self.ends.draw(&self.random), self.faults.draw(&self.random));
        // A missing image could still appear, so this job would take minutes to finish.
        let end = if kind == Kind::HasNoImage && end == End::Expires { End::DeletedLate } else { end };
        let name = format!("job-{number}");
        let job = self.job(&name, kind, end)?;
        println!("{name} {kind:?} {end:?} {fault:?}: {}", job["spec"]["trainer"]);
        cluster.apply(TEAM, &job)?;
        std::thread::sleep(self.milliseconds(0, 8_000));
        if job["spec"]["suspend"] == true && self.random.below(2) == 0 {
            cluster.suspend(&name, false)?;
        }
        if end == End::DeletedEarly {
            let propagation = *self.random.pick(&["background", "foreground"]);
            cluster
                .sh(&format!("kubectl --namespace {TEAM} delete {JOBS} {name} --cascade={propagation} --wait=false"))?;
        } else if end == End::Expires {
            self.expire.push(name);
        }
        self.count(kind);
        self.count(end);
        if self.inject(cluster, fault)? {
            self.count(fault);
        }
        Ok(())
    }

    fn job(&self, name: &str, kind: Kind, end: End) -> Result<Value> {
        let mut job = match kind {
            Kind::TrainsWithCheckpoints => checkpointed(name)?,
            _ => example("gpt-cluster.yaml")?,
        };
        job["metadata"]["name"] = name.into();
        let spec = &mut job["spec"];
        let is_endless = end != End::Expires && self.random.below(2) == 0;
        let steps = if is_endless { ENDLESS } else { 20 + self.random.below(100) as u64 };
        spec["engine"]["steps"] = steps.into();
        spec["trainer"]["numNodes"] = (1 + self.random.below(2)).into();
        spec["trainer"]["numProcPerNode"] = (1 + self.random.below(2)).into();
        // Small requests, so that endless jobs leave room for the jobs that must finish.
        spec["trainer"]["resourcesPerNode"]["limits"]["cpu"] = "200m".into();
        spec["failurePolicy"] = json!({"maxRestarts": self.random.below(3), "maxInfrastructureRestarts": 3});
        if end == End::Expires {
            spec["ttlSecondsAfterFinished"] = self.random.below(5).into();
        }
        if self.random.below(5) == 0 {
            spec["suspend"] = true.into();
        }
        match kind {
            Kind::Trains | Kind::TrainsWithCheckpoints => {}
            Kind::HasNoImage => spec["trainer"]["image"] = "registry.invalid/nothing:1".into(),
            Kind::HasNoProgram => plain(spec, &["/no/such/program"]),
            Kind::HasGPUs => {
                let seconds = if is_endless { 10_000 } else { self.random.below(10) };
                plain(spec, &["sleep", &seconds.to_string()]);
                spec["trainer"]["resourcesPerNode"]["limits"][RESOURCE] = (1 + self.random.below(4)).into();
            }
        }
        Ok(job)
    }

    /// Applies a fault; returns whether it had a target.
    fn inject(&mut self, cluster: &mut Cluster, fault: Fault) -> Result<bool> {
        // Draw these first, so that the random sequence does not depend on the speed of the
        // cluster.
        let (which, pause) = (self.random.below(usize::MAX), self.milliseconds(500, 10_000));
        let nodes = cluster.nodes.names();
        let node = &nodes[which % nodes.len()];
        let pods = "jsonpath={range .items[?(@.spec.nodeName)]}{.metadata.name} {.metadata.uid} {end}";
        let alive = "--field-selector status.phase!=Succeeded,status.phase!=Failed";
        let output = cluster.sh(&format!("kubectl --namespace {TEAM} get pods {alive} -o '{pods}'"))?;
        let words: Vec<&str> = output.split_whitespace().collect();
        let pods: Vec<&[&str]> = words.chunks_exact(2).collect();
        let pod = nth(&pods, which);
        match (fault, pod) {
            // Some pods have no process yet.
            (Fault::ProcessKilled, Some(_)) => {
                let from = which % pods.len();
                for pod in pods[from..].iter().chain(&pods[..from]) {
                    if kill_last(pod[1])? {
                        return Ok(true);
                    }
                }
                return Ok(false);
            }
            // The pod may already be gone.
            (Fault::PodDeleted, Some(pod)) => {
                cluster
                    .sh(&format!("kubectl --namespace {TEAM} delete pod {} --wait=false --ignore-not-found", pod[0]))?;
            }
            (Fault::PodDeletedByForce, Some(pod)) => {
                let how = "--force --grace-period=0 --ignore-not-found";
                cluster.sh(&format!("kubectl --namespace {TEAM} delete pod {} {how} 2>&1", pod[0]))?;
            }
            (Fault::JobSuspended, _) => {
                let jobs = cluster.sh(&format!("kubectl --namespace {TEAM} get {JOBS} -o name"))?;
                let jobs: Vec<&str> =
                    jobs.lines().filter_map(|line| line.split_once('/')).map(|(_, name)| name).collect();
                return nth(&jobs, which).map_or(Ok(false), |job| cluster.suspend(job, true));
            }
            (Fault::ContainerdRestarted, _) => cluster.nodes.restart_containerd(node)?,
            (Fault::KubeletRestarted, _) => {
                cluster.nodes.kill_kubelet(node)?;
                std::thread::sleep(pause);
                cluster.nodes.start_kubelet(node)?;
            }
            (Fault::ControllerKilled, _) => {
                let output = cluster.sh(
                    "kubectl --namespace switchyard-system get pods -l app.kubernetes.io/component=controller -o name",
                )?;
                let controllers: Vec<&str> = output.lines().collect();
                let Some(controller) = nth(&controllers, which) else { return Ok(false) };
                let how = "--force --grace-period=0 --ignore-not-found";
                cluster.sh(&format!("kubectl --namespace switchyard-system delete {controller} {how} 2>&1"))?;
            }
            (Fault::PlugPulled, _) => {
                cluster.nodes.set_link(node, false)?;
                std::thread::sleep(pause);
                cluster.nodes.set_link(node, true)?;
            }
            (_, None) => return Ok(false),
        }
        Ok(true)
    }
}

/// Element `which` modulo the length; `None` if empty.
fn nth<T>(of: &[T], which: usize) -> Option<&T> {
    of.get(which.checked_rem(of.len())?)
}

/// Makes the job run a foreign program from the image that is on all nodes.
fn plain(spec: &mut Value, command: &[&str]) {
    spec.as_object_mut().map(|spec| spec.remove("engine"));
    spec["trainer"]["framework"] = "Plain".into();
    spec["trainer"]["image"] = TOOLS.into();
    spec["trainer"]["command"] = json!(command);
    spec["template"]["spec"]["securityContext"]["runAsUser"] = 1000.into();
}

/// Kills the pod's youngest process, unless only the sandbox process exists.
fn kill_last(uid: &str) -> Result<bool> {
    let processes = processes_of_pod(uid)?;
    let pids = processes.iter().filter_map(|path| path.file_name()?.to_str()?.parse::<i32>().ok());
    let (mut min, mut max) = (i32::MAX, 0);
    for pid in pids {
        (min, max) = (min.min(pid), max.max(pid));
    }
    let Some(pid) = Pid::from_raw(max).filter(|_| min < max) else { return Ok(false) };
    // It may have ended by itself.
    Ok(kill_process(pid, Signal::KILL).is_ok())
}
