use super::*;
use std::time::Duration;
use switchyard_crds::gpu_topology::{Gpu, Host};

fn source(facts: Facts, state: SourceState, message: Option<&str>) -> FactSource {
    FactSource { facts, source: "test".into(), state, message: message.map(str::to_owned) }
}

fn gpu(uuid: &str) -> Gpu {
    Gpu { uuid: uuid.into(), ..Gpu::default() }
}

fn scanned(facts: GPUTopologyStatus) -> MachineState {
    MachineState { last: Some(Arc::new(Scan { facts, ..Scan::default() })), fault: None }
}

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

fn conditions(status: &GPUTopologyStatus) -> Vec<String> {
    let reported =
        |c: &Condition| format!("{}={} {} {}", c.type_, c.status, c.reason, c.last_transition_time.0.as_second());
    status.conditions.iter().map(reported).collect()
}

#[test]
fn a_complete_machine() {
    let facts = GPUTopologyStatus {
        sources: vec![source(Facts::CPUs, SourceState::Complete, None)],
        gpu_count: Some(1),
        gpus: vec![gpu("GPU-1")],
        ..GPUTopologyStatus::default()
    };
    let status = draft(&scanned(facts), &Kubelet::Unknown("no socket".into())).status(None, at(7));
    let expected = ["Reported=True Complete 7", "Consistent=True NoContradiction 7", "Fresh=True Current 7"];
    assert_eq!(conditions(&status), expected);
    let kubelet = status.source(Facts::InUse).unwrap();
    assert_eq!((kubelet.state, kubelet.message.as_deref()), (SourceState::Unavailable, Some("no socket")));
}

#[test]
fn missing_facts_are_reported() {
    let facts = |state| GPUTopologyStatus {
        sources: vec![source(Facts::GPUs, state, Some("no driver"))],
        ..GPUTopologyStatus::default()
    };
    let reported = |state| {
        let status = draft(&scanned(facts(state)), &Kubelet::Disabled).status(None, at(1));
        assert!(status.source(Facts::InUse).is_none());
        (status.conditions[0].status.clone(), status.conditions[0].reason.clone(), status.conditions[0].message.clone())
    };
    let expected = |status: &str, reason: &str| (status.into(), reason.into(), "GPUs: no driver".to_string());
    assert_eq!(reported(SourceState::Partial), expected("True", "Partial"));
    assert_eq!(reported(SourceState::Unavailable), expected("False", "SourceUnavailable"));
}

#[test]
fn a_hanging_scan_keeps_the_facts() {
    let hang = Some(ScanFault::Hangs(Duration::from_secs(30)));
    let good = GPUTopologyStatus { observed_time: Some(Time(at(5))), gpus: vec![gpu("GPU-1")], ..Default::default() };
    let before = draft(&scanned(good.clone()), &Kubelet::Disabled).status(None, at(6));
    let expected = ["Reported=False ScanHangs 9", "Fresh=False ScanHangs 9"];
    for machine in [MachineState { fault: hang.clone(), ..scanned(good) }, MachineState { fault: hang, last: None }] {
        let status = draft(&machine, &Kubelet::Disabled).status(Some(&before), at(9));
        assert_eq!((&status.gpus, &status.observed_time), (&before.gpus, &before.observed_time));
        let reported = conditions(&status);
        assert_eq!([reported[0].as_str(), reported[2].as_str()], expected);
    }
}

#[test]
fn the_transition_time_changes_only_with_the_status() {
    let facts = |state, message| GPUTopologyStatus {
        sources: vec![source(Facts::GPUs, state, Some(message))],
        ..GPUTopologyStatus::default()
    };
    let step = |before: &GPUTopologyStatus, state, message, now| {
        draft(&scanned(facts(state, message)), &Kubelet::Disabled).status(Some(before), at(now))
    };
    let first = step(&GPUTopologyStatus::default(), SourceState::Complete, "", 1);
    let partial = step(&first, SourceState::Partial, "one lost", 2);
    assert_eq!(conditions(&partial)[0], "Reported=True Partial 1");
    let failed = step(&partial, SourceState::Unavailable, "no driver", 3);
    assert_eq!(conditions(&failed)[0], "Reported=False SourceUnavailable 3");
    assert_eq!(conditions(&failed)[2], "Fresh=True Current 1");
    assert_eq!(differing(&first, &partial), ["conditions", "sources"]);
}

#[test]
fn only_times_and_order_make_no_difference() {
    let status = GPUTopologyStatus {
        gpus: vec![gpu("GPU-1"), gpu("GPU-2")],
        host: Some(Host { kernel: Some("6.8".into()), ..Host::default() }),
        observed_time: Some(Time(at(1))),
        ..GPUTopologyStatus::default()
    };
    let mut other = status.clone();
    other.gpus.reverse();
    other.observed_time = None;
    assert_eq!(differing(&status, &other), Vec::<String>::new());
    other.host = None;
    other.gpus[0].model = Some("H100".into());
    other.memory_bytes = Some(1);
    assert_eq!(differing(&other, &status), ["gpus", "memoryBytes", "host"]);
    assert_eq!(differing(&status, &other).len(), 3);
}
