//! Observed transports over a job's life cycle.

use super::super::fabric::tests::{condition, world};
use super::super::tests::World;
use serde_json::{Value, json};
use switchyard_crds::{MeasuredVerdict, ObservedVerdict, Transport, conditions};
use switchyard_fabric::LogObservation;
use switchyard_worker_contract::event::{Measured, MeasuredLink};

const IB: &str = "n:1:1 [0] NCCL INFO Using network IB\nn:1:1 [0] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [send] via NET/IB/0\n\
                  n:1:1 [0] NCCL INFO Connected all rings\n";
const SOCKET: &str = "n:1:1 [0] NCCL INFO Using network Socket\n\
                      n:1:1 [0] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [send] via NET/Socket/0\n";

/// A gang over InfiniBand whose running pods have printed these logs.
fn running(fabric: Value, logs: [&str; 2]) -> World {
    let mut world = world(json!({"fabric": fabric}), "Active");
    world.run();
    let found = world.job.status.as_ref().unwrap().fabric.as_ref().unwrap();
    assert_eq!((found.transport, &found.observed), (Some(Transport::RDMA), &None));
    world.log_observations = (0..).zip(logs.map(|log| LogObservation::of(log, 1))).collect();
    world.step();
    world
}

fn verdict(world: &World) -> Option<ObservedVerdict> {
    let fabric = world.job.status.as_ref()?.fabric.as_ref()?;
    Some(fabric.observed.as_ref()?.verdict)
}

#[test]
fn a_gang_with_the_predicted_transport_is_reported_ready() {
    let world = running(json!({"mode": "Required"}), [IB, IB]);
    assert_eq!(verdict(&world), Some(ObservedVerdict::AsForecast));
    assert_eq!(condition(&world, conditions::FABRIC_READY).0, "True");
}

#[test]
fn a_fallback_is_reported_and_fails_the_job_if_the_policy_demands_it() {
    let required = running(json!({"mode": "Required"}), [IB, SOCKET]);
    let (state, message) = condition(&required, conditions::FABRIC_READY);
    assert_eq!((state.as_str(), verdict(&required)), ("False", Some(ObservedVerdict::OtherTransport)));
    assert!(message.contains("forecast RDMA") && message.contains("n1") && message.contains("NET/Socket"), "{message}");
    let mut auto = running(json!({}), [IB, SOCKET]);
    let (state, message) = condition(&auto, conditions::FABRIC_READY);
    assert!(state == "True" && message.contains("NET/Socket"), "{state} {message}");
    assert!(auto.step().status.is_none(), "once");
    let mut stopped = running(json!({"mode": "Required", "onFallback": "Fail"}), [IB, SOCKET]);
    assert_eq!(condition(&stopped, conditions::FABRIC_READY).0, "False");
    stopped.log_observations.clear();
    stopped.step();
    let failed = stopped.job.status.as_ref().unwrap().condition(conditions::FAILED).unwrap();
    assert_eq!(failed.reason, conditions::TRANSPORT_DIFFERS);
    assert!(failed.message.contains("NET/Socket") && failed.message.contains("onFallback"), "{}", failed.message);
}

#[test]
fn missing_logs_are_no_verdict_about_the_fabric() {
    let mut world = running(json!({"mode": "Required", "onFallback": "Fail"}), [IB, "loss 2.5\n"]);
    assert_eq!(verdict(&world), None, "the ranks may still log something");
    world.log_observations.get_mut(&1).unwrap().is_complete = true;
    world.step();
    assert_eq!(verdict(&world), Some(ObservedVerdict::Unknown));
    let (state, message) = condition(&world, conditions::FABRIC_READY);
    assert!(state == "True" && !message.contains("NCCL_DEBUG"), "{state} {message}");
    world.step();
    assert!(world.job.status.as_ref().unwrap().condition(conditions::FAILED).is_none());
}

#[test]
fn slow_links_are_named_by_node_and_devices() {
    let mut world = world(json!({"fabric": {"mode": "Auto"}}), "Active");
    world.run();
    let link = |from, to, bytes_per_second| MeasuredLink { from, to, bytes_per_second };
    let links = vec![link(1, 2, 1e8), link(3, 0, 2e9)];
    let found = Measured::new(4, 16 << 20, 0.1, 1e9, links);
    world.log_observations.insert(0, LogObservation { measured: Some(found), ..LogObservation::default() });
    let done = world.step();
    let measured = world.job.status.as_ref().unwrap().fabric.as_ref().unwrap().measured.clone().unwrap();
    assert_eq!(measured.verdict, MeasuredVerdict::Failed);
    for words in [
        "0.252 GB/s in an all-reduce over 4 ranks, 1.000 GB/s required (10 GB/s predicted for GPUs and their NICs)",
        "; 0.100 GB/s from rank 1 on n0, GPU GPU-0-1",
        "to rank 2 on n1, GPU GPU-1-0, mlx5_0 (rail 0)",
    ] {
        assert!(measured.message.contains(words), "{words}: {}", measured.message);
    }
    assert!(!measured.message.contains("2.000"), "{}", measured.message);
    assert_eq!(measured.bus_bandwidth.0, "251658k");
    assert!(done.events.iter().any(|event| event.reason == "SlowFabric"), "{:?}", done.events);
    let (state, _) = condition(&world, conditions::FABRIC_READY);
    assert_eq!(state, "True", "it is only reported");
    assert!(world.step().status.is_none(), "once");
}
