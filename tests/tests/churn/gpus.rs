//! Churn with GPUs: several machine types, gangs of every size and priority, and changing agent
//! reports. In addition to the invariants of all jobs, checks every placement by brute force and
//! recomputes it.

use super::script::{Event, script};
use super::{CALLS, Churn, violations_of};
use anyhow::{Context, Result, ensure};
use futures::TryStreamExt;
use k8s_openapi::api::scheduling::v1::PriorityClass;
use kube::Api;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Duration;
use switchyard_core::placement::gpus::Level;
use switchyard_crds::gpu_topology::{Fabric, FabricState, GPUTopology, GpuHealth};
use switchyard_plan::cluster::levels::Levels;
use switchyard_tests::chaos::{self, report, size};
use switchyard_tests::gpus::{GpuNodes, Machine, RESOURCE, gpu_job};
use switchyard_tests::history::{Recorder, Replayed, double_gpus, mispredicted, replay};
use switchyard_tests::{ControllerOptions, Jobs, Random, merge, mutants_program, start_controller};

const NODES: usize = 64;
/// Nodes per rack and per block.
const RACK: usize = 4;
const BLOCK: usize = 16;
/// The controller's topology levels with their bandwidth shares. NVLink between nodes never counts,
/// because no pod claims the required channel.
const LEVELS: [(&str, &str, Level); 4] = [
    ("nvidia.com/gpu.clique", "nvidia.com/gpu.clique:NVLink", Level { share: 1000, nvlink: false }),
    ("bench/rack", "bench/rack", Level { share: 1000, nvlink: false }),
    ("bench/block", "bench/block:2", Level { share: 500, nvlink: false }),
    ("cluster", "cluster:4", Level { share: 250, nvlink: false }),
];
const PRIORITIES: [i32; 3] = [0, 100, 1000];

/// Machine type by node number. Most are alike, as in a real cluster.
fn machine(number: usize) -> Machine {
    Machine::of(match number / RACK {
        0..6 => "f04-h200",
        6 | 7 => "f03b-hgx-h100",
        8 | 9 => "f06-gb200",
        10 => "f01-dgx-1v",
        11 => "f10-b200",
        12 => "f08-a30",
        13 => "f09-pcie-8",
        _ => "f02-dgx-a100",
    })
}

pub(super) struct Machines {
    nodes: GpuNodes,
    /// Reports of healthy machines by node.
    reports: BTreeMap<String, GPUTopology>,
}

impl Machines {
    async fn start(churn: &Churn) -> Result<Machines> {
        let nodes = GpuNodes::start(churn.plane.client().await?).await?;
        let mut reports = BTreeMap::new();
        for (number, node) in churn.nodes.iter().enumerate() {
            let machine = machine(number);
            let mut report = machine.report(node);
            if machine.fixture == "f06-gb200" {
                report.status.as_mut().context("a status")?.fabric = Some(Fabric {
                    state: FabricState::Completed,
                    result: Some("Success".into()),
                    cluster_uuid: Some("7b9f63a1-3d3b-4f61-9f5c-0d9a2f9b6c11".into()),
                    clique_id: Some((number / RACK) as u32),
                    health: None,
                });
            }
            reports.insert(node.clone(), report);
        }
        let machines = Machines { nodes, reports };
        let calls = futures::stream::iter(machines.reports.iter().map(Ok));
        calls
            .try_for_each_concurrent(CALLS, |(node, report)| {
                let machines = &machines;
                async move {
                    machines.nodes.report(report).await?;
                    machines.nodes.offer(report).await?;
                    machines.label(node).await
                }
            })
            .await?;
        Ok(machines)
    }

    /// Labels a node with its rack and block, and with its clique as GPU Feature Discovery would.
    pub(super) async fn label(&self, node: &str) -> Result<()> {
        let number = self.reports.keys().position(|name| name == node).context("not a node of this test")?;
        let fabric = self.reports[node].status.as_ref().and_then(|status| status.fabric.as_ref());
        let clique = fabric.map(|fabric| {
            format!("{}.{}", fabric.cluster_uuid.as_deref().unwrap_or_default(), fabric.clique_id.unwrap_or_default())
        });
        let (rack, block) = (format!("r{}", number / RACK), format!("b{}", number / BLOCK));
        let mut labels = vec![("bench/rack", rack.as_str()), ("bench/block", block.as_str())];
        labels.extend(clique.as_deref().map(|clique| ("nvidia.com/gpu.clique", clique)));
        self.nodes.label(node, &labels).await
    }

    /// Writes the agent's report for a node with this ailment.
    pub(super) async fn report(&self, node: &str, ailment: usize) -> Result<()> {
        let mut report = self.reports[node].clone();
        let status = report.status.as_mut().context("a status")?;
        match ailment {
            // The driver requests a reset of this GPU.
            1 => status.gpus[1].health = Some(GpuHealth { recovery_action: "GPUReset".into() }),
            // A port without a link.
            2 => status.nics.iter_mut().take(1).for_each(|nic| nic.state = Some("Down".into())),
            // An impossible topology.
            3 => status.links[0].b = "GPU-of-nobody".into(),
            _ => {}
        }
        self.nodes.report(&report).await
    }
}

/// The churn events of this seed with GPU jobs, interleaved with report changes.
fn gpu_script(seed: u64, events: usize) -> Vec<(Duration, Event)> {
    let random = Random::new(!seed);
    let mut played = Vec::new();
    let mut sick = Vec::new();
    for (wait, event) in script(seed, events, NODES) {
        played.push(match event {
            Event::Create(job) => (wait, Event::Create(Box::new(with_gpus(*job, &random)))),
            other => (wait, other),
        });
        if random.below(8) == 0 {
            let node = random.below(NODES);
            sick.push(node);
            played.push((Duration::ZERO, Event::Report(node, 1 + random.below(3))));
        }
        if sick.len() > 6 {
            played.push((Duration::ZERO, Event::Report(sick.remove(0), 0)));
        }
    }
    // Finally all nodes are healthy, so that every job could run in an empty cluster.
    played.extend(sick.into_iter().map(|node| (Duration::ZERO, Event::Report(node, 0))));
    played
}

fn with_gpus(mut job: Value, random: &Random) -> Value {
    let gpus = *random.pick(&[1, 2, 2, 4, 4, 8, 8]);
    let priority = random.below(PRIORITIES.len());
    let domain = match random.below(6) {
        0 => json!([{"key": "bench/rack", "mode": "Required"}]),
        1 => json!([{"key": "bench/block", "mode": "Required"}]),
        2 => json!([{"key": "bench/rack", "mode": "Preferred"}]),
        _ => json!([]),
    };
    let spec = &mut job["spec"];
    let strict = random.below(8) == 0;
    let preempts = random.below(2) == 0;
    merge(
        spec,
        json!({
            "trainer": {"numProcPerNode": gpus, "resourcesPerNode": {"limits": {"cpu": "100m", RESOURCE: gpus}}},
            "topologyPolicy": {
                "mode": if strict { "Required" } else { "Preferred" }, "domains": domain,
                "nodeTopology": {"minLink": if strict { "NVLink" } else { "System" }},
                "preemption": if preempts { "LowerPriority" } else { "Never" },
            },
            "template": {"spec": {"priorityClassName": class(PRIORITIES[priority])}},
        }),
    );
    job
}

fn class(priority: i32) -> String {
    format!("churn-{priority}")
}

/// Nodes of these machine types, and priority classes.
pub(super) async fn start(nodes: usize) -> Result<Churn> {
    let mut churn = Churn::start(nodes).await?;
    for value in PRIORITIES {
        let object: PriorityClass =
            serde_json::from_value(json!({"metadata": {"name": class(value)}, "value": value}))?;
        Api::all(churn.plane.client().await?).create(&Default::default(), &object).await?;
    }
    churn.machines = Some(Machines::start(&churn).await?);
    Ok(churn)
}

fn options() -> ControllerOptions {
    let arguments = LEVELS.iter().flat_map(|(_, argument, _)| ["--domain".to_string(), (*argument).to_string()]);
    ControllerOptions { arguments: arguments.collect(), ..ControllerOptions::default() }
}

/// G9: exact GPUs under churn. Each placement equals the plan computed from a state that the
/// controller could have seen, and has the bandwidth that it predicts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gangs_of_exact_gpus_break_no_invariant() -> Result<()> {
    let churn = start(NODES).await?;
    let mut controller = start_controller(&churn.plane, "controller", &options())?;
    let first = chaos::seed().unwrap_or(20261122);
    let (seeds, events) = (if chaos::seed().is_some() { 1 } else { size(1, 3) }, size(150, 1500));
    let quiet = Duration::from_secs(size(5, 60) as u64);
    let levels: Vec<_> = LEVELS.iter().map(|(_, argument, _)| argument.parse()).collect::<Result<_, _>>()?;
    let levels = Levels::new(levels)?;
    let shares = LEVELS.map(|(key, _, level)| (key, level));
    let mut runs = Vec::new();
    for seed in first..first + seeds as u64 {
        let (mut run, history) =
            churn.play(seed, gpu_script(seed, events), quiet).await.with_context(|| format!("seed {seed}"))?;
        let (checked, wrong) = mispredicted(&history, &shares);
        churn.ensure_clean(seed, &history, &wrong.iter().map(ToString::to_string).collect::<Vec<_>>())?;
        let Replayed { decisions, exact, around, behind, unexplained } = replay(&history, levels.clone());
        run["places"] = json!({
            "decided": decisions, "judgedByBruteForce": checked, "plannedAgain": exact, "fromAWorldAround": around,
            "behindAnother": behind, "unexplained": unexplained,
        });
        println!("{run}");
        // The cache may lag by more changes than the replay tries, and by a different number for
        // each kind.
        ensure!(
            unexplained.len() * 5 <= decisions,
            "seed {seed}: {} of {decisions}: {unexplained:#?}",
            unexplained.len()
        );
        ensure!((exact + around) * 5 >= decisions && checked * 2 > decisions, "seed {seed}: {run}");
        // Negative control: without the bandwidth shares of the domains, the predictions must be
        // wrong.
        let open = shares.map(|(key, level)| (key, Level { share: 1000, ..level }));
        ensure!(!mispredicted(&history, &open).1.is_empty(), "seed {seed}: no gang is spread over blocks");
        runs.push(run);
        controller.ensure_running()?;
    }
    report("g9-gpus", &json!({"nodes": NODES, "seeds": seeds, "runs": runs, "violations": 0}))
}

/// A controller that forgets its reservations gives the same GPUs to several gangs, and the oracle
/// must detect it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn double_gpu_assignments_are_detected() -> Result<()> {
    let churn = start(4).await?;
    let bug = ("SWITCHYARD_MUTANT", "forgets-promises".to_string());
    let options =
        ControllerOptions { program: Some(mutants_program().to_path_buf()), environment: vec![bug], ..options() };
    let jobs = Jobs::new(churn.plane.client().await?, &churn.plane.namespace("twice").await?);
    let recorder = Recorder::start(churn.plane.client().await?).await?;
    for number in 0..4 {
        jobs.create(gpu_job(&format!("j{number}"), 1, 8, "run")).await?;
    }
    let _controller = start_controller(&churn.plane, "mutant", &options)?;
    for number in 0..4 {
        let is_placed = |job: &_| switchyard_tests::condition_of(job, "Placed").is_some_and(|c| c.status == "True");
        jobs.wait(&format!("j{number}"), "placed", is_placed).await?;
    }
    let history = recorder.history().await?;
    let found = double_gpus(&history);
    ensure!(found.iter().any(|violation| violation.text.contains("is assigned to several pods")), "{found:?}");
    ensure!(
        violations_of(&history).iter().any(|line| line.starts_with("double_gpus")),
        "the GPU oracle belongs to the full set"
    );
    Ok(())
}
