//! `switchyard preflight`: runs the controller's preflight checks on the nodes that a job would
//! get.

use crate::args::{Cli, PreflightArgs};
use crate::failure::Failure;
use crate::output::emit;
use crate::snapshot::{self, decide, in_namespace, name_of};
use crate::{fabric, manifest};
use serde_json::json;
use switchyard_core::units::counted;
use switchyard_crds::{PlacementStatus, PreflightMode};
use switchyard_fabric::preflight::blocking;
use switchyard_worker_contract::exit::Exit;

/// Checks the nodes and prints the findings. The exit code reports blocking findings regardless of
/// the job's mode.
pub(super) fn preflight(cli: &Cli, args: &PreflightArgs) -> Result<Exit, Failure> {
    let mut job = manifest::read(&args.file)?;
    job.spec.fabric.preflight.mode = PreflightMode::Report;
    let mut cluster = snapshot::open(&snapshot::read(&args.source)?)?;
    let job = in_namespace(job, &cluster);
    let found = decide(&mut cluster, &job)?;
    let not_placeable = |why: String| Failure::new(why, Exit::NotPlaceable);
    let placement = found.placement.map_err(|why| not_placeable(format!("not placeable: {why}")))?.status;
    let Some(decided) = found.fabric else {
        let why = "it has no GPUs and one node, or our own engine, which needs no fabric";
        return Err(Failure::usage(format!("there is nothing to check for {}: {why}", name_of(&job))));
    };
    let decided = decided.map_err(not_placeable)?.status;
    let names: Vec<&str> = placement.nodes.iter().map(|node| node.node_name.as_str()).collect();
    let result = json!({"job": name_of(&job), "nodes": names, "preflight": decided.preflight});
    emit(cli.output, "Preflight", &result, || fabric::checks(&job, &decided, &nodes(&placement), cli.verbose));
    let is_blocked = decided.preflight.as_ref().and_then(blocking).is_some();
    Ok(if is_blocked { Exit::PreflightRefused } else { Exit::Done })
}

/// The nodes' names, or their number if there are many.
fn nodes(placement: &PlacementStatus) -> String {
    /// Longer lists are unreadable.
    const NAMED: usize = 8;
    match placement.nodes.len() {
        count if count > NAMED => counted(count as u64, "node"),
        _ => placement.nodes.iter().map(|node| node.node_name.as_str()).collect::<Vec<_>>().join(" "),
    }
}
