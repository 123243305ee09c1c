//! The screens, on the cluster of examples/clusters.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::snapshot;
use switchyard_crds::validate::train_job;
use switchyard_ledger::offline::Earlier;

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
    let verdict = cluster.look(job, Earlier::Forgotten).unwrap();
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

#[test]
fn a_job_that_runs_is_explained() {
    let mut cluster = open();
    let job = cluster.job("default", "gpt-124m").unwrap().clone();
    let now = cluster.look(&job, Earlier::Forgotten).unwrap();
    insta::assert_snapshot!(explanation(&job, &now, &cluster, false));
}

/// The same file gives the same decision, byte for byte, and it equals that of the running job.
#[test]
fn a_snapshot_gives_the_decision_of_the_controller_again() {
    let mut cluster = open();
    let job = cluster.job("default", "gpt-124m").unwrap().clone();
    let decided = job.status.as_ref().unwrap().placement.clone().unwrap();
    let again = cluster.look(&job, Earlier::Forgotten).unwrap().place.unwrap();
    assert_eq!(again.status.nodes, decided.nodes);
    let text = |verdict: &Verdict| json(&job, verdict).to_string();
    let (one, other) = (open().look(&job, Earlier::Kept).unwrap(), open().look(&job, Earlier::Kept).unwrap());
    assert_eq!(text(&one), text(&other));
}
