//! Changes to the cluster in examples/clusters.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::args::Command;
use clap::Parser;

const CLUSTER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/clusters/two-racks.json");

fn whatif_of(arguments: &[&str]) -> String {
    let line = ["switchyard", "whatif", "--snapshot", CLUSTER].iter().chain(arguments);
    let Command::Whatif(args) = Cli::try_parse_from(line).unwrap().command else { panic!("not whatif") };
    match compare(&args) {
        Ok(results) => results.iter().map(|result| result.table(false)).collect::<Vec<_>>().join("\n"),
        Err(failure) => failure.message,
    }
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
fn missing_objects_are_named() {
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
