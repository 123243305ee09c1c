//! Attempts with a fake worker that prints the events of several ranks from one process.

use super::*;
use std::os::unix::fs::PermissionsExt;
use switchyard_crds::TrainJob;
use switchyard_crds::gpu_topology::{Cpus, GPUTopology, GPUTopologySpec, GPUTopologyStatus, NumaNode};
use switchyard_plan::local::{self, Devices, LocalPlan, LocalSnapshot};
use switchyard_worker_contract::config::Transport;
use switchyard_worker_contract::event::{Failure, Item, Progress};

/// One process with two ranks.
fn planned() -> LocalPlan {
    let document = serde_json::json!({
        "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "metadata": {"name": "one"},
        "spec": {"trainer": {"numProcPerNode": 2}, "topologyPolicy": {"mode": "Ignored"}, "engine": {
            "executionMode": "SingleProcess",
            "model": {"type": "MLP", "mlp": {"hiddenSizes": [8]}}, "data": {"format": "Synthetic"}, "steps": 10,
        }},
    });
    let job: TrainJob = switchyard_crds::validate::train_job(&document).unwrap_or_else(|faults| panic!("{faults:?}"));
    let mut machine = GPUTopology::new("machine", GPUTopologySpec {});
    let numa = NumaNode { id: 0, cpus: Some("0".into()), ..NumaNode::default() };
    let cpus = Cpus { usable: Some("0".into()), siblings: vec!["0".into()], ..Cpus::default() };
    machine.status =
        Some(GPUTopologyStatus { cpus: Some(cpus), numa_nodes: vec![numa], ..GPUTopologyStatus::default() });
    let nodes = [machine];
    local::plan(&LocalSnapshot {
        job: &job,
        nodes: &nodes,
        attempt: 1,
        rendezvous: "127.0.0.1:1",
        run_dir: "runs/x",
        devices: Devices::default(),
        hosts: None,
    })
    .unwrap()
}

fn ready(rank: u32) -> Event {
    Event::Ready(Ready {
        rank,
        pid: 1,
        host: String::new(),
        cpus: "0".into(),
        threads: 1,
        kernel: "portable".into(),
        address: String::new(),
        transport: Transport::Shm,
        links: Vec::new(),
        bucket_bytes: Vec::new(),
        algorithms: Vec::new(),
        all_reduce_ms: 0.0,
        resumed_step: Some(4),
        gpu: None,
    })
}

fn progress(rank: u32) -> Event {
    Event::Progress(Progress {
        rank,
        step: 10,
        total_steps: 10,
        interval_steps: 10,
        loss: 1.5,
        learning_rate: 0.1,
        gradient_norm: 1.0,
        items_per_second: 100.0,
        item: Item::Samples,
        step_ms: 1.0,
        max_step_ms: 1.0,
        forward_ms: 0.3,
        backward_ms: 0.4,
        communication_wait_ms: 0.1,
        pipeline_wait_ms: None,
        input_wait_ms: 0.1,
        reader_threads: Some(1),
        optimizer_ms: 0.1,
        loss_scale: None,
        skipped_steps: Some(2),
        slowest: None,
    })
}

fn finished(rank: u32) -> Event {
    Event::Finished(Finished {
        rank,
        step: 10,
        first_loss: Some(2.0),
        last_loss: Some(1.5),
        validation_loss: Some(1.0),
        accuracy: Some(0.5),
        weights_digest: "same".into(),
        step_ms_p50: 1.0,
        step_ms_p99: 1.0,
        gpu_calls: None,
        model_file: None,
    })
}

fn failed(rank: u32) -> Event {
    let (cause, during) = ("the disk is full".to_string(), String::new());
    Event::Failed(Failure { rank, origin_rank: 1, cause, during, exit_code: 5 })
}

/// Records how many ranks were ready, and the accuracy.
#[derive(Default)]
struct Recorded {
    ready: Vec<usize>,
    accuracy: Option<f64>,
}

impl Observer for Recorded {
    fn observe(&mut self, update: Update<'_>) -> Result<(), RunDirError> {
        match update {
            Update::Ready { ranks, .. } => self.ready.push(ranks.len()),
            Update::Evaluation { accuracy, .. } => self.accuracy = accuracy,
            _ => {}
        }
        Ok(())
    }
}

/// The outcome of an attempt whose only process prints these events and exits with this code.
fn attempt(name: &str, events: &[Event], code: i32) -> (AttemptResult, Recorded) {
    let folder = std::env::temp_dir().join(format!("switchyard-attempt-{name}-{}", std::process::id()));
    let run_dir = RunDir::choose("one", Some(&folder));
    run_dir.create().unwrap();
    let lines: Vec<String> = events.iter().map(|event| serde_json::to_string(event).unwrap()).collect();
    let path = folder.join("worker");
    std::fs::write(&path, format!("#!/bin/sh\ncat <<'END'\n{}\nEND\nexit {code}\n", lines.join("\n"))).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700)).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut recorded = Recorded::default();
    let ended = tokio::task::LocalSet::new().block_on(&runtime, async {
        let mut signals = Signals::listen().unwrap();
        run(&planned(), &Worker { path }, Some(listener), &run_dir, &mut signals, &mut recorded).await.unwrap()
    });
    std::fs::remove_dir_all(folder).unwrap();
    (ended, recorded)
}

#[test]
fn events_of_several_ranks_come_from_one_process() {
    let evaluation = Event::Evaluation { step: 10, loss: 1.0, accuracy: Some(0.5) };
    let events = [ready(1), ready(0), progress(0), progress(1), evaluation, finished(0), finished(1)];
    let (ended, recorded) = attempt("good", &events, 0);
    assert_eq!((ended.end, ended.resumed_step), (AttemptEnd::Done, 4));
    assert_eq!(ended.finished.unwrap().rank, 0);
    let figures = ended.interval.expect("both ranks have reported").figures;
    assert_eq!((figures.step, figures.item, figures.skipped_steps), (10, Item::Samples, Some(2)));
    assert_eq!((recorded.ready, recorded.accuracy), (vec![2], Some(0.5)));
}

#[test]
fn a_process_that_exits_cleanly_does_not_complete_its_ranks() {
    let (ended, _) = attempt("half", &[ready(0), ready(1), finished(0)], 0);
    assert!(matches!(ended.end, AttemptEnd::Failed(_)), "{ended:?}");
}

#[test]
fn the_rank_that_reports_the_failure_of_its_process_is_the_cause() {
    let (ended, _) = attempt("bad", &[ready(0), ready(1), failed(0), failed(1)], 5);
    let cause = ended.cause.unwrap();
    assert_eq!((ended.end, cause.rank, cause.others), (AttemptEnd::Failed(Some(5)), 1, vec![0]));
    assert!(cause.cause.starts_with("the disk is full (exit code 5"), "{}", cause.cause);
}
