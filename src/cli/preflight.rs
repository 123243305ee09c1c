//! `switchyard preflight`: the nodes that a job would get are checked as the controller checks them when it places the job.

use super::args::{Cli, Output, PreflightArgs};
use super::cluster::{in_namespace, look, name_of, open};
use super::run::json_line;
use super::{fabric, manifest, print, print_yaml, refuse};
use serde_json::json;
use switchyard_core::units::counted;
use switchyard_crds::{PlacementStatus, PreflightMode};
use switchyard_fabric::preflight::blocking;
use switchyard_worker_contract::exit::Exit;

/// Checks, and prints what was found. Blocks are told by the exit code, whatever mode the job has.
pub(super) fn preflight(cli: &Cli, args: &PreflightArgs) -> Exit {
    let mut job = match manifest::read(&args.file) {
        Ok(job) => job,
        Err(error) => return refuse(&error.0, Exit::Usage),
    };
    job.spec.fabric.preflight.mode = PreflightMode::Report;
    let mut cluster = match open(&args.place) {
        Ok(cluster) => cluster,
        Err((error, exit)) => return refuse(&error, exit),
    };
    let job = in_namespace(job, &cluster);
    let found = match look(&mut cluster, &job) {
        Ok(found) => found,
        Err(error) => return refuse(&error, Exit::Usage),
    };
    let placement = match found.place {
        Ok(placed) => placed.status,
        Err(why) => return refuse(&format!("not placeable: {why}"), Exit::NotPlaceable),
    };
    let decided = match found.fabric {
        Some(Ok(decided)) => decided.status,
        Some(Err(why)) => return refuse(&why, Exit::NotPlaceable),
        None => {
            let why = "it has no GPUs and one node, or our own engine, which needs no fabric";
            return refuse(&format!("there is nothing to check for {}: {why}", name_of(&job)), Exit::Usage);
        }
    };
    let result = || {
        let nodes: Vec<&str> = placement.nodes.iter().map(|node| node.node_name.as_str()).collect();
        json!({"job": name_of(&job), "nodes": nodes, "preflight": decided.preflight})
    };
    match cli.output {
        Output::Json => json_line("Preflight", result()),
        Output::Yaml => print_yaml(&result()),
        Output::Table | Output::Dot => print(&fabric::checks(&job, &decided, &nodes(&placement), cli.verbose)),
    }
    match decided.preflight.as_ref().and_then(blocking) {
        Some(_) => Exit::PreflightRefused,
        None => Exit::Done,
    }
}

/// The nodes in words: their names, or how many there are.
fn nodes(placement: &PlacementStatus) -> String {
    /// More names than this are a wall.
    const NAMED: usize = 8;
    match placement.nodes.len() {
        count if count > NAMED => counted(count as u64, "node"),
        _ => placement.nodes.iter().map(|node| node.node_name.as_str()).collect::<Vec<_>>().join(" "),
    }
}
