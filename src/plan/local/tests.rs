//! Golden plans and statuses, reviewed as YAML in `snapshots/`.

use super::{Devices, LocalPlan, LocalSnapshot, Observed, Progress, Refusal, plan, status};
use crate::job::tests::job;
use crate::status::Ending;
use jiff::Timestamp;
use serde_json::json;
use switchyard_crds::conditions::Stage;
use switchyard_crds::gpu_topology::{Cpus, GPUTopology, GPUTopologySpec, GPUTopologyStatus, NumaNode};
use switchyard_crds::{Restarts, TrainJob};
use switchyard_worker_contract::event::{Item, Slowest, Summary};

/// A machine with the given CPUs of each NUMA node and SMT siblings.
fn machine(name: &str, numa: &[&str], siblings: &[&str]) -> GPUTopology {
    let mut report = GPUTopology::new(name, GPUTopologySpec {});
    report.status = Some(GPUTopologyStatus {
        cpus: Some(Cpus {
            usable: Some(numa.join(",")),
            siblings: siblings.iter().map(|list| (*list).into()).collect(),
            ..Cpus::default()
        }),
        numa_nodes: numa
            .iter()
            .enumerate()
            .map(|(id, cpus)| NumaNode { id: id as u32, cpus: Some((*cpus).into()), ..NumaNode::default() })
            .collect(),
        ..GPUTopologyStatus::default()
    });
    report
}

fn planned(job: &TrainJob, nodes: &[GPUTopology], attempt: u32) -> Result<LocalPlan, Refusal> {
    plan(&LocalSnapshot {
        job,
        nodes,
        attempt,
        rendezvous: "127.0.0.1:29400",
        run_dir: "runs/x",
        devices: Devices::default(),
        hosts: None,
    })
}

fn two_cores() -> Vec<GPUTopology> {
    vec![machine("laptop", &["0-1"], &["0", "1"])]
}

fn two_sockets() -> Vec<GPUTopology> {
    vec![machine("server", &["0-3,8-11", "4-7,12-15"], &["0,8", "1,9", "2,10", "3,11", "4,12", "5,13", "6,14", "7,15"])]
}

/// Compares with the committed YAML. After an intended change: `INSTA_UPDATE=always cargo test -p
/// switchyard-plan --lib`, then review the diff of `src/plan/local/snapshots` as user-visible
/// output.
fn snapshot(value: impl serde::Serialize, name: &str) {
    let mut settings = insta::Settings::clone_current();
    settings.set_omit_expression(true);
    settings.set_prepend_module_to_snapshot(false);
    settings.bind(|| insta::assert_yaml_snapshot!(name, value));
}

macro_rules! golden {
    ($name:ident, $job:expr, $nodes:expr) => {
        #[test]
        fn $name() {
            snapshot(planned(&$job, &$nodes, 1).unwrap(), stringify!($name));
        }
    };
}

golden!(
    two_processes_on_two_cores,
    job("gpt-source", json!({"trainer": {"numProcPerNode": 2}, "failurePolicy": {"maxRestarts": 1}})),
    two_cores()
);
golden!(one_process_with_every_default, job("one", json!({})), two_cores());
golden!(four_processes_on_two_sockets_with_smt, job("smt", json!({"trainer": {"numProcPerNode": 4}})), two_sockets());
golden!(
    three_processes_leave_cores_rather_than_span_numa_nodes,
    job("three", json!({"trainer": {"numProcPerNode": 3}})),
    two_sockets()
);
golden!(
    oversubscribed_processes_share_cores_with_a_warning,
    job("crowd", json!({"trainer": {"numProcPerNode": 3, "cpuThreads": 2}})),
    two_cores()
);
golden!(
    two_nodes_folded_onto_one_machine,
    job("folded", json!({"trainer": {"numNodes": 2, "numProcPerNode": 2}})),
    two_sockets()
);
golden!(
    ignored_topology_is_not_pinned,
    job("free", json!({"trainer": {"numProcPerNode": 2}, "topologyPolicy": {"mode": "Ignored"}})),
    two_sockets()
);
golden!(
    one_wide_process_spans_numa_nodes_with_a_warning,
    job("wide", json!({"trainer": {"cpuThreads": 6}})),
    two_sockets()
);
golden!(
    limits_and_user_environment,
    job(
        "limited",
        json!({"trainer": {
            "resourcesPerNode": {"limits": {"cpu": "1500m", "memory": "2Gi"}},
            "env": [{"name": "SWITCHYARD_TRANSPORT", "value": "tcp"}, {"name": "MY_FLAG", "value": "a b"}],
        }})
    ),
    two_sockets()
);
golden!(
    every_engine_option,
    job(
        "options",
        json!({"engine": {
            "model": {"gpt": {"head": "Untied"}},
            "data": {"exclude": ["target/**"], "validationFraction": "0.05"},
            "steps": null, "epochs": 3, "seed": 7, "batchSizePerProcess": 4, "batchMerge": 2,
            "optimizer": {"learningRate": "6e-4", "weightDecay": "0", "gradientClipNorm": "0"},
            "schedule": {"type": "Constant", "warmupSteps": 5},
            "overlap": {"mode": "Disabled", "bucketSizeMiB": 4},
            "evaluation": {"everySteps": 0, "batches": 3},
            "fetchEverySteps": 1,
        }})
    ),
    two_cores()
);

#[test]
fn the_attempt_names_processes_and_keys() {
    let job = job("again", json!({}));
    let second = planned(&job, &two_cores(), 2).unwrap();
    assert_eq!(second.nodes[0].name, "again-2-0");
    let env: Vec<&str> = second.processes().next().unwrap().env.iter().map(|entry| entry.value.as_str()).collect();
    assert!(env.contains(&"2") && env.contains(&"runs/x/attempt-2.key"), "{env:?}");
}

#[test]
fn a_refusal_names_the_smallest_change() {
    let required = json!({"trainer": {"numProcPerNode": 4, "cpuThreads": 2}, "topologyPolicy": {"mode": "Required"}});
    let refusal = planned(&job("gang", required), &two_cores(), 1).unwrap_err().to_string();
    assert_eq!(
        refusal,
        "not placeable: gang: needs 4 processes x 2 threads = 8 cores on one node, 2 can be used on laptop; smallest change that fits: \
         trainer.numProcPerNode: 2, or topologyPolicy.mode: Preferred to share cores"
    );
}

#[test]
fn impossible_quantities_are_named() {
    let limits = json!({"trainer": {"resourcesPerNode": {"limits": {"cpu": "0", "memory": "-1Gi"}}}});
    let refusal = planned(&job("zero", limits), &two_cores(), 1).unwrap_err().to_string();
    assert!(refusal.contains("spec.trainer.resourcesPerNode.limits.cpu: got `0`"), "{refusal}");
    assert!(refusal.contains("limits.memory: got `-1Gi`"), "{refusal}");
}

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(1_795_000_000 + second).unwrap()
}

/// The whole life cycle of a job with one restart.
#[test]
fn status_over_a_life_with_one_restart() {
    let mut job = job("life", json!({"trainer": {"numProcPerNode": 2}}));
    job.metadata.generation = Some(1);
    let plan = planned(&job, &two_cores(), 1).unwrap();
    let figures = Summary {
        step: 240,
        total_steps: 600,
        loss: 2.18412,
        validation_loss: Some(2.31),
        accuracy: Some(0.97333),
        items_per_second: 20_900.4,
        item: Item::Images,
        loss_scale: Some(1024.0),
        skipped_steps: Some(3),
        slowest: Some(Slowest { rank: 1, node_rank: 0, over_percent: 15.06, steps: 100 }),
        stuck: None,
        gpu: None,
        remaining_seconds: Some(34.2),
        communication_percent: 3.17,
        input_percent: 0.4,
    };
    let second = planned(&job, &two_cores(), 2).unwrap();
    let stage = |stage, message: &str| Progress::Stage(stage, message.into());
    let moments = [
        (stage(Stage::Starting, "2 processes start"), &plan, 0, None, 1),
        (stage(Stage::Running, "training"), &plan, 0, Some((figures, at(20))), 20),
        (stage(Stage::Restarting, "rank 1 was killed by signal 9"), &plan, 0, Some((figures, at(20))), 21),
        (stage(Stage::Running, "training"), &second, 1, Some((Summary { step: 300, ..figures }, at(20))), 50),
        (
            Progress::Ended(Ending::complete("600 steps done".into())),
            &second,
            1,
            Some((Summary { step: 600, remaining_seconds: Some(0.0), ..figures }, at(20))),
            90,
        ),
    ];
    let mut history = Vec::new();
    for (progress, plan, restarts, figures, second) in moments {
        let restarts = &Restarts { application: restarts, total: restarts, ..Restarts::default() };
        let next = status(&job, Observed { progress, plan, pods: None, restarts, start: at(1), figures }, at(second));
        history.push(next.clone());
        job.status = Some(next);
    }
    snapshot(history, "status_over_a_life_with_one_restart");
}
