//! The screens, on the cluster of examples/clusters.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::args::{Cli, Command, WhatifArgs};
use crate::{cluster, whatif};
use clap::Parser;
use switchyard_crds::validate::train_job;
use switchyard_ledger::offline::Earlier;

const CLUSTER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/clusters/two-racks.json");
const JOB: &str = include_str!("../../../examples/clusters/gpt-rack.yaml");

fn open() -> Cluster {
    cluster::cluster(&cluster::read_file(CLUSTER.as_ref()).unwrap()).unwrap()
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

fn whatif_of(arguments: &[&str]) -> String {
    let line = ["switchyard", "whatif", "--snapshot", CLUSTER].iter().chain(arguments);
    let Command::Whatif(args): Command = Cli::try_parse_from(line).unwrap().command else { panic!("not whatif") };
    let args: WhatifArgs = args;
    match whatif::compare(&args) {
        Ok(results) => results.iter().map(|result| result.table(false)).collect::<Vec<_>>().join("\n"),
        Err((error, _)) => error,
    }
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

#[test]
fn what_a_drain_moves() {
    insta::assert_snapshot!(whatif_of(&["--drain", "gpu-01"]));
}

#[test]
fn links_that_are_lost() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/clusters/gpt-rack.yaml");
    insta::assert_snapshot!(whatif_of(&[file, "--lose-link", "gpu-05/3", "--lose-link", "gpu-06/mlx5_2"]));
}

#[test]
fn what_is_not_there_is_named() {
    for (arguments, says) in [
        (["--drain", "gpu-99"], "there is no Node `gpu-99` in this cluster"),
        (["--lose-link", "gpu-01"], "--lose-link: got `gpu-01`; expected NODE/GPU"),
        (["--lose-link", "gpu-01/9"], "there is no GPU 9 on gpu-01"),
        (["--lose-link", "gpu-01/mlx5_9"], "there is no NIC `mlx5_9` on gpu-01"),
        (["--lose-link", "gpu-01/1-2-3"], "expected NODE/GPU"),
    ] {
        let error = whatif_of(&arguments);
        assert!(error.contains(says), "{arguments:?}: {error}");
    }
}

/// The same file gives the same decision, byte for byte, and it is the one that the running job has.
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
