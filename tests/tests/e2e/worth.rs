//! The value of placement: the same jobs on the nodes chosen by Switchyard, by kube-scheduler, and
//! at random, with slow links between racks. `cargo xtask bench worth` repeats it and keeps the
//! result.
//!
//! The assignment of nodes to racks, and the labels that describe it, change from run to run. A job
//! with `mode: Ignored` takes the nodes in name order regardless of racks, which amounts to a
//! random placement and rank order. For kube-scheduler's choice, pods of the same size are first
//! bound without Switchyard. The racks are then assigned so that the nodes in name order are in the
//! racks that kube-scheduler chose.

use crate::e2e::times::{machine, rounded, spread};
use crate::e2e::{Cluster, JOBS, TEAM, predicted, stage};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use switchyard_scenes::{Scene, Stage};
use switchyard_tests::nodes::TOOLS;
use switchyard_tests::{Daemon, Random, agent_program, chaos};

/// The node label that names the rack.
const RACK: &str = "example.com/rack";
/// Link speeds within and between racks, bit/s.
const INSIDE: u64 = 1_000_000_000;
const BETWEEN: u64 = 250_000_000;
/// Node counts of the concurrent jobs. Each node takes one pod.
const SCENARIOS: [(&str, &[usize]); 3] =
    [("one job of 2 nodes", &[2]), ("one job of 4 nodes", &[4]), ("two jobs of 2 nodes each", &[2, 2])];
/// Reported figures per job. The first is discarded.
const LINES: usize = 3;
/// A pod's share of a two-core node. Two pods do not fit.
const CPU: &str = "1500m";

/// Nodes in racks, with agents that report the NIC speeds.
struct TestBed {
    // In drop order, because agents read the stages' files and talk to the cluster.
    _agents: Vec<Daemon>,
    _stages: Vec<Stage>,
    cluster: Cluster,
}

/// Result of a job.
#[derive(Debug)]
struct Run {
    nodes: Vec<String>,
    steps_per_second: f64,
    /// Bus bandwidth, MB/s: the controller's prediction, and the ranks' measurement before the
    /// first step.
    predicted: Option<f64>,
    measured: f64,
}

impl TestBed {
    fn start() -> Result<TestBed> {
        let cluster = Cluster::start(4)?;
        let levels = format!("--set controller.domains='{{{RACK},cluster:{}}}'", INSIDE / BETWEEN);
        cluster.install_with(&format!("--set nodeAgent.enabled=false {levels}"))?;
        cluster.sh(&format!("kubectl create namespace {TEAM}"))?;
        let (mut agents, mut stages) = (Vec::new(), Vec::new());
        for node in cluster.nodes.names() {
            let mut scene = Scene::shipped("no-gpu")?;
            scene.nics.iter_mut().for_each(|nic| nic.gbps = (INSIDE / 1_000_000_000) as u32);
            let stage = Stage::new(scene)?;
            agents.push(agent(&cluster, &node, &stage)?);
            stages.push(stage);
        }
        let known = "kubectl get gputopologies.training.switchyard.dev -o name";
        cluster.until("all agents report", || Ok(cluster.sh(known)?.lines().count() == cluster.nodes.names().len()))?;
        Ok(TestBed { _agents: agents, _stages: stages, cluster })
    }

    /// Sets the links: the nodes in the first rack, by position. The others are in the second.
    fn arrange_racks(&self, first: [usize; 2]) -> Result<()> {
        let names = self.cluster.nodes.names();
        let rack = |wanted: bool| (0..).zip(&names).filter(move |(node, _)| first.contains(node) == wanted);
        let racks = [true, false].map(|is_first| rack(is_first).map(|(_, name)| name.clone()).collect::<Vec<_>>());
        self.cluster.nodes.set_racks(&racks, INSIDE, BETWEEN)?;
        for (number, nodes) in (1..).zip(&racks) {
            self.cluster.sh(&format!("kubectl label --overwrite node {} {RACK}=r{number}", nodes.join(" ")))?;
        }
        // The controller watches nodes and jobs separately, so the job's event could arrive before
        // the nodes' events.
        std::thread::sleep(std::time::Duration::from_secs(1));
        Ok(())
    }

    /// Runs jobs of these sizes concurrently.
    fn run(&self, sizes: &[usize], mode: &str) -> Result<Vec<Run>> {
        let names: Vec<String> = (1..=sizes.len()).map(|job| format!("job-{job}")).collect();
        for (name, nodes) in names.iter().zip(sizes) {
            self.cluster.apply(TEAM, &job(name, *nodes, mode))?;
            self.cluster.wait_job(TEAM, name, "placed", |job| job["status"]["placement"].is_object())?;
        }
        let mut runs = Vec::new();
        for name in &names {
            let job = self.cluster.wait_job(TEAM, name, "done", |job| ["Complete", "Failed"].contains(&stage(job)))?;
            ensure!(stage(&job) == "Complete", "{name}: {:#}", job["status"]);
            runs.push(self.figures(name, &job)?);
        }
        self.cluster.sh(&format!("kubectl --namespace {TEAM} delete {JOBS} --all"))?;
        self.cluster.no_pods()?;
        Ok(runs)
    }

    fn figures(&self, name: &str, job: &Value) -> Result<Run> {
        let nodes = job["status"]["placement"]["nodes"].as_array().into_iter().flatten();
        let nodes = nodes.filter_map(|node| node["nodeName"].as_str().map(str::to_owned)).collect();
        let log = self.cluster.sh(&format!("kubectl --namespace {TEAM} logs {name}-1-0"))?;
        let events: Vec<Value> = log.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        let of_kind = |kind: &'static str| {
            events.iter().filter(move |event| event["event"] == kind && event["rank"].as_u64().unwrap_or(0) == 0)
        };
        let measured =
            of_kind("measured").find_map(|event| event["busBandwidth"].as_f64()).context("no measurement")?;
        let counted = of_kind("progress").skip(1).filter_map(|event| event["stepMs"].as_f64());
        let times: Vec<f64> = counted.collect();
        ensure!(times.len() == LINES - 1, "{name}: {} lines of figures", times.len());
        Ok(Run {
            nodes,
            steps_per_second: 1000.0 * times.len() as f64 / times.iter().sum::<f64>(),
            predicted: predicted(job)?.map(|megabytes| megabytes as f64),
            measured: measured / 1e6,
        })
    }

    /// kube-scheduler's choice for the pods of these jobs, which it schedules one by one: node
    /// positions by rank, job after job.
    fn scheduled(&self, sizes: &[usize]) -> Result<Vec<usize>> {
        for (number, pods) in (1..).zip(sizes) {
            let container = json!({"name": "pod", "image": TOOLS, "imagePullPolicy": "Never", "command": ["sleep", "1000"],
                "resources": {"limits": {"cpu": CPU}}});
            self.cluster.apply(TEAM, &json!({"apiVersion": "batch/v1", "kind": "Job",
                "metadata": {"name": format!("plain-{number}")}, "spec": {
                    "completionMode": "Indexed", "completions": pods, "parallelism": pods,
                    "template": {"spec": {"restartPolicy": "Never", "terminationGracePeriodSeconds": 0, "containers": [container]}},
                }}))?;
        }
        let list = format!(
            "kubectl --namespace {TEAM} get pods --sort-by=.metadata.name -o jsonpath='{{range .items[*]}}{{.spec.nodeName}} {{end}}'"
        );
        let wanted: usize = sizes.iter().sum();
        let bound = || Ok(self.cluster.sh(&list)?.split_whitespace().count() == wanted);
        self.cluster.until("kube-scheduler has bound its pods", bound)?;
        let names = self.cluster.nodes.names();
        let position = |name: &str| names.iter().position(|node| node == name).context("not a node of the cluster");
        let nodes = self.cluster.sh(&list)?.split_whitespace().map(position).collect::<Result<Vec<_>>>();
        self.cluster.sh(&format!("kubectl --namespace {TEAM} delete jobs.batch --all"))?;
        self.cluster.no_pods()?;
        nodes
    }
}

/// Starts an agent that describes its node as this stage.
fn agent(cluster: &Cluster, node: &str, stage: &Stage) -> Result<Daemon> {
    let plane = &cluster.nodes.plane;
    let path = |path: &str| stage.tree.path(path).display().to_string();
    let arguments = [
        ["--node-name", node],
        ["--kubeconfig", &plane.kubeconfig("admin").display().to_string()],
        ["--sysfs-root", &path("sys")],
        ["--proc-root", &path("proc")],
        ["--dev-root", &path("dev")],
        ["--listen", "127.0.0.1:0"],
    ];
    let arguments: Vec<String> = arguments.concat().into_iter().map(String::from).collect();
    Daemon::start(agent_program(), &arguments, &[], &plane.folder().join(format!("agent-{node}.log")))
}

/// A communication-bound job: 1.3 million parameters and a batch of one sample.
fn job(name: &str, nodes: usize, mode: &str) -> Value {
    let steps_of_a_line = chaos::size(3, 10);
    json!({"apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "metadata": {"name": name}, "spec": {
        "trainer": {"numNodes": nodes, "numProcPerNode": 1, "cpuThreads": 1,
            "resourcesPerNode": {"limits": {"cpu": CPU, "memory": "512Mi"}}},
        "topologyPolicy": {"mode": mode},
        // The lowest possible requirement, because only the measurement matters here.
        "fabric": {"preflight": {"minBusBandwidth": "1M"}},
        "engine": {
            "model": {"type": "MLP", "mlp": {"hiddenSizes": [1024, 1024]}},
            "data": {"format": "Synthetic", "image": {"height": 16, "width": 16, "channels": 1}, "classes": 10, "samples": 20000},
            "batchSizePerProcess": 1, "steps": LINES * steps_of_a_line, "fetchEverySteps": steps_of_a_line, "seed": 1,
            "optimizer": {"type": "SGD", "learningRate": "0.001"},
        },
    }})
}

/// Chooses the nodes of the first rack so that the nodes in name order fall into the same racks as
/// `nodes` would if nodes 0 and 1 formed the first rack.
fn matching_racks(nodes: &[usize]) -> Result<[usize; 2]> {
    let unused = (0..4).filter(|node| !nodes.contains(node));
    let in_first: Vec<usize> =
        (0..4).zip(nodes.iter().copied().chain(unused)).filter(|(_, node)| *node < 2).map(|(name, _)| name).collect();
    in_first.try_into().ok().context("each node once")
}

/// Total steps per second of all jobs.
fn total_rate(runs: &[Run]) -> f64 {
    runs.iter().map(|run| run.steps_per_second).sum()
}

#[test]
fn placement_quality_affects_speed() -> Result<()> {
    let bed = TestBed::start()?;
    let random = Random::new(chaos::seed().unwrap_or(20261122));
    let mut results = Vec::new();
    for (what, sizes) in &SCENARIOS[..chaos::size(1, SCENARIOS.len())] {
        let (mut ours, mut shuffled, mut scheduler) = (Vec::new(), Vec::new(), Vec::new());
        let mut predictions = Vec::new();
        for round in 0..chaos::size(1, 10) {
            // The first two nodes of a random order.
            let mut order = [0, 1, 2, 3];
            (1..4).rev().for_each(|end| order.swap(end, random.below(end + 1)));
            let first = [order[0], order[1]];
            bed.arrange_racks(first)?;
            let runs = bed.run(sizes, "Ignored")?;
            let by_name: Vec<String> = runs.iter().flat_map(|run| run.nodes.clone()).collect();
            ensure!(by_name == bed.cluster.nodes.names()[..by_name.len()], "{by_name:?}: expected them by name");
            shuffled.push(total_rate(&runs));
            if round >= 3 {
                continue;
            }
            let runs = bed.run(sizes, "Preferred")?;
            for run in &runs {
                let names = bed.cluster.nodes.names();
                let is_first = |node: &String| first.iter().any(|first| names[*first] == *node);
                let changes = run.nodes.windows(2).filter(|pair| is_first(&pair[0]) != is_first(&pair[1])).count();
                ensure!(
                    changes == usize::from(run.nodes.len() > 2),
                    "{what}: {:?} with {first:?} in a rack",
                    run.nodes
                );
                let predicted = run.predicted.context("no prediction")?;
                predictions.push(json!({"predictedMBps": predicted, "measuredMBps": rounded(run.measured),
                    "errorPercent": rounded((predicted / run.measured - 1.0) * 100.0)}));
            }
            ours.push(total_rate(&runs));
            bed.arrange_racks(matching_racks(&bed.scheduled(sizes)?)?)?;
            scheduler.push(total_rate(&bed.run(sizes, "Ignored")?));
        }
        let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
        let median = spread(ours.clone())["median"].as_f64().context("a median")?;
        results.push(json!({
            "what": what, "stepsPerSecond": {"ours": spread(ours), "scheduler": spread(scheduler.clone()), "shuffled": spread(shuffled.clone())},
            "timesScheduler": rounded(median / mean(&scheduler)), "timesShuffled": rounded(median / mean(&shuffled)),
            "shuffledRuns": shuffled.len(), "busBandwidth": predictions,
        }));
    }
    let result = json!({
        "results": results, "goals": {"timesShuffled": 1.5, "errorPercent": 15.0},
        "network": {"racks": 2, "nodesOfARack": 2, "insideMbps": INSIDE / 1_000_000, "betweenMbps": BETWEEN / 1_000_000},
        "command": "cargo xtask bench worth", "machine": machine()?,
    });
    chaos::report("worth", &result)
}
