//! Screens for the cluster in examples/clusters.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::snapshot;
use switchyard_crds::validate::train_job;
use switchyard_ledger::offline::PreviousPlacement;
use switchyard_plan::cluster::queue_order::{Basis, JobAhead};

const CLUSTER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/clusters/two-racks.json");
const JOB: &str = include_str!("../../../examples/clusters/gpt-rack.yaml");

fn open() -> Cluster {
    snapshot::cluster(&snapshot::read_file(CLUSTER.as_ref()).unwrap()).unwrap()
}

fn job(change: impl FnOnce(&mut Value)) -> TrainJob {
    let mut document: Value = serde_saphyr::from_str(JOB).unwrap();
    change(&mut document);
    train_job(&document).unwrap()
}

fn planned(job: &TrainJob) -> String {
    let mut cluster = open();
    let verdict = cluster.explain(job, PreviousPlacement::Ignored).unwrap();
    table(job, &verdict, &cluster, false)
}

#[test]
fn a_job_that_fits() {
    insta::assert_snapshot!(planned(&job(|_| {})));
}

#[test]
fn a_job_that_does_not_fit() {
    let strict = job(|job| {
        job["spec"]["trainer"]["numNodes"] = 4.into();
        job["spec"]["topologyPolicy"]["mode"] = "Required".into();
    });
    insta::assert_snapshot!(planned(&strict));
}

/// Two workers, and parameter servers near them; with four workers one role lacks room.
#[test]
fn a_job_with_roles() {
    const ROLES: &str = include_str!("../../../examples/roles/tensorflow-ps.yaml");
    let with = |workers: u32| {
        let mut document: Value = serde_saphyr::from_str(ROLES).unwrap();
        document["spec"]["roles"][0]["replicas"] = workers.into();
        planned(&train_job(&document).unwrap())
    };
    insta::assert_snapshot!(with(1) + "\n" + &with(9));
}

#[test]
fn a_job_that_runs_is_explained() {
    let mut cluster = open();
    let job = cluster.job("default", "gpt-124m").unwrap().clone();
    let now = cluster.explain(&job, PreviousPlacement::Ignored).unwrap();
    insta::assert_snapshot!(explanation(&job, &now, &cluster, false));
}

/// The same file gives the same decision, byte for byte, and that equals the running job's.
#[test]
fn a_snapshot_reproduces_the_controllers_decision() {
    let mut cluster = open();
    let job = cluster.job("default", "gpt-124m").unwrap().clone();
    let decided = job.status.as_ref().unwrap().placement.clone().unwrap();
    let again = cluster.explain(&job, PreviousPlacement::Ignored).unwrap().placement.unwrap();
    assert_eq!(again.status.nodes, decided.nodes);
    let text = |verdict: &PlacementVerdict| json(&job, verdict).to_string();
    let (one, other) = (
        open().explain(&job, PreviousPlacement::Kept).unwrap(),
        open().explain(&job, PreviousPlacement::Kept).unwrap(),
    );
    assert_eq!(text(&one), text(&other));
}

/// Regression: it was free, and a worse node was chosen.
#[test]
fn a_free_node_excluded_for_its_links_is_named() {
    let text = planned(&job(|_| {}));
    assert!(text.contains("gpu-07: its free GPUs are not joined by NVLink or better"), "{text}");
}

/// Regression: the status mentioned it, but `explain` did not.
#[test]
fn conditions_that_keep_pods_from_starting_are_explained() {
    let mut cluster = open();
    let mut job = cluster.job("default", "gpt-124m").unwrap().clone();
    let why = "0 of 2 pods run; pod gpt-124m-1-0: FailedMount: no; create it";
    for condition in &mut job.status.as_mut().unwrap().conditions {
        if condition.type_ == conditions::SUCCEEDED {
            (condition.reason, condition.message) = (Stage::Starting.reason().into(), why.into());
        }
    }
    let now = cluster.explain(&job, PreviousPlacement::Ignored).unwrap();
    let text = explanation(&job, &now, &cluster, false);
    assert!(text.contains(&format!("waits     {why}")), "{text}");
}

#[test]
fn the_last_step_and_blockers_of_a_job_are_explained() {
    let mut cluster = open();
    let mut job = cluster.job("default", "gpt-124m").unwrap().clone();
    let now = cluster.explain(&job, PreviousPlacement::Ignored).unwrap();
    let mut explained = |kind: &str, state: &str, message: &str| {
        let condition = serde_json::json!({"type": kind, "status": state, "reason": "R", "message": message,
            "lastTransitionTime": "2026-11-20T12:00:00Z"});
        let conditions = &mut job.status.as_mut().unwrap().conditions;
        conditions.retain(|condition| condition.type_ != kind);
        conditions.push(serde_json::from_value(condition).unwrap());
        explanation(&job, &now, &cluster, false)
    };
    assert!(explained("Progressing", "True", "step 5 of 9").contains("progress  step 5 of 9"));
    assert!(
        explained("Progressing", "False", "rank 1 on a stands still").contains("stuck     rank 1 on a stands still")
    );
    assert!(explained("Straggler", "True", "rank 2 on b is slow").contains("slow      rank 2 on b is slow"));
    assert!(!explained("Straggler", "False", "no rank is slow").contains("no rank is slow"));
    assert!(explained("GPUTrouble", "True", "rank 2 on b, GPU").contains("gpu       rank 2 on b, GPU"));
    assert!(!explained("GPUTrouble", "False", "reports nothing").contains("reports nothing"));
}

/// Regression: a step from eight minutes ago looked like the current one.
#[test]
fn an_old_step_is_explained_with_its_age() {
    let mut cluster = open();
    let mut job = cluster.job("default", "gpt-124m").unwrap().clone();
    let read = cluster.now().saturating_sub(jiff::SignedDuration::from_mins(8)).unwrap();
    let conditions =
        [("Succeeded", "Unknown", "Running"), ("Placed", "True", "Placed"), ("Progressing", "True", "StepsMade")];
    let condition = |(kind, status, reason): (&str, &str, &str)| {
        serde_json::json!({"type": kind, "status": status, "reason": reason, "message": "step 5 of 9",
            "lastTransitionTime": "2026-11-20T12:00:00Z"})
    };
    let status = job.status.as_mut().unwrap();
    status.conditions = conditions.map(condition).map(|it| serde_json::from_value(it).unwrap()).to_vec();
    status.trainer_status = serde_json::from_value(
        serde_json::json!({"step": 5, "totalSteps": 9, "progressPercentage": 55, "lastUpdatedTime": read}),
    )
    .unwrap();
    let now = cluster.explain(&job, PreviousPlacement::Ignored).unwrap();
    let text = explanation(&job, &now, &cluster, false);
    assert!(text.contains("progress  step 5 of 9 (8m00s ago)"), "{text}");
}

#[test]
fn preemptions_are_explained() {
    let mut cluster = open();
    let mut job = cluster.job("default", "gpt-124m").unwrap().clone();
    let now = cluster.explain(&job, PreviousPlacement::Ignored).unwrap();
    let hour = |time: &str, preemption: i32| serde_json::json!({"since": time, "preemption": preemption});
    let (old, recent) = (hour("2026-11-01T00:00:00Z", 3), hour(&cluster.now().to_string(), 1));
    for (total, hours, expected) in [
        (0, vec![], None),
        (1, vec![&recent], Some("preempted once within 24 hours; ran for 2h00m before this attempt")),
        (4, vec![&old, &recent], Some("preempted 4 times, within 24 hours once; ran for 2h00m before this attempt")),
        (3, vec![&old], Some("preempted 3 times, within 24 hours never; ran for 2h00m before this attempt")),
    ] {
        let status = job.status.as_mut().unwrap();
        let restarts = serde_json::json!({"application": 0, "preemption": total, "total": total, "recent": hours});
        status.restarts = serde_json::from_value(restarts).unwrap();
        status.ran_seconds = Some(7200);
        let text = explanation(&job, &now, &cluster, false);
        let line = text.lines().map(str::trim).find(|line| line.starts_with("preempted"));
        assert_eq!(line, expected);
    }
}

#[test]
fn a_preempted_job_that_waits_shows_when_it_resumes() {
    let mut cluster = open();
    let mut waits = job(|job| job["spec"]["trainer"]["numNodes"] = 9.into());
    let hour = serde_json::json!({"since": cluster.now(), "infrastructure": 0, "preemption": 2});
    let restarts = serde_json::json!({"application": 0, "preemption": 2, "total": 2, "recent": [hour]});
    waits.status = serde_json::from_value(serde_json::json!({"restarts": restarts})).unwrap();
    let mut now = cluster.explain(&waits, PreviousPlacement::Ignored).unwrap();
    now.ahead = Some(JobAhead {
        name: "other/job".into(),
        nodes: vec!["gpu-01".into()],
        start: Some(("2026-11-20T14:20:00Z".parse().unwrap(), Basis::Limits)),
        ends_before: None,
    });
    now.forecast = None;
    let text = explanation(&waits, &now, &cluster, false);
    let expected = "preempted twice within 24 hours; resumes after other/job, which is expected to start at 14:20 UTC";
    assert!(text.contains(expected), "{text}");
}

/// Regression: the job was reported as placeable, and the API server refused it.
#[test]
fn possible_admission_refusals_are_shown_with_the_placement() {
    let plain = job(|_| {});
    assert!(host_access(&plain).is_empty() && rows("admission", &[]).is_empty());
    let job = job(|job| {
        let volumes = serde_json::json!([{"name": "data", "hostPath": {"path": "/data"}}]);
        job["spec"]["template"] = serde_json::json!({"spec": {"hostNetwork": true, "volumes": volumes}});
    });
    let text = rows("admission", &host_access(&job));
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    assert_eq!(lines.len(), 2, "{text}");
    assert!(
        lines[0].starts_with("admission spec.template.spec.hostNetwork: got hostNetwork: true: refused unless"),
        "{text}"
    );
    assert!(lines[1].starts_with("spec.template.spec.volumes[0].hostPath: got hostPath /data"), "{text}");
}

/// Regression: one output had two positions in the queue, two jobs with reserved nodes, and advice
/// followed by "no single change".
#[test]
fn only_the_controllers_message_explains_the_queue_of_a_waiting_job() {
    let told =
        "0 of 9 needed nodes have room; smallest change that fits: trainer.numNodes: 4; 46th in the queue, no forecast";
    let mut waits = job(|job| job["spec"]["trainer"]["numNodes"] = 9.into());
    let condition = |kind: &str, reason: &str| {
        serde_json::json!({"type": kind, "status": "False", "reason": reason, "message": told,
            "lastTransitionTime": "2026-11-20T12:00:00Z"})
    };
    let conditions = [condition("Succeeded", "Queued"), condition("Placed", "NoRoom")];
    waits.status = serde_json::from_value(serde_json::json!({"conditions": conditions})).unwrap();
    let mut cluster = open();
    let mut now = cluster.explain(&waits, PreviousPlacement::Ignored).unwrap();
    now.placement.as_mut().unwrap_err().changes.clear();
    now.ahead =
        Some(JobAhead { name: "other/job".into(), nodes: vec!["gpu-01".into()], start: None, ends_before: None });
    let text = explanation(&waits, &now, &cluster, false);
    assert_eq!(text.matches("in the queue").count(), 1, "{text}");
    assert!(!text.contains("held") && !text.contains("no single change"), "{text}");
    assert_eq!(explanation_json(&waits, &now)["now"].get("heldFor"), None);
    let fresh = table(&job(|job| job["spec"]["trainer"]["numNodes"] = 9.into()), &now, &cluster, false);
    assert!(fresh.contains("other/job") && fresh.contains("no single change"), "{fresh}");
}
