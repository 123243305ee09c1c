//! Read-only commands on a running or saved cluster: `plan --cluster`, `explain JOB`, `snapshot`.

use crate::args::{Cli, ExplainArgs, PlanArgs, SnapshotArgs};
use crate::failure::Failure;
use crate::output::{emit, emit_object, print};
use crate::snapshot::{self, decide, in_namespace, name_of};
use crate::{fabric, manifest, topo, verdict};
use switchyard_crds::TrainJob;
use switchyard_plan::cluster::fabric::FabricDecisions;
use switchyard_worker_contract::exit::Exit;

/// Prints the objects that decide placements.
pub(super) fn snapshot(cli: &Cli, args: &SnapshotArgs) -> Result<Exit, Failure> {
    emit_object(cli.output, &snapshot::read(&args.source)?);
    Ok(Exit::Done)
}

/// Shows where a job would be placed.
pub(super) fn plan(cli: &Cli, args: &PlanArgs) -> Result<Exit, Failure> {
    let job = manifest::read(&args.file)?;
    let file = snapshot::read_for(&args.source, Some(&job))?;
    let mut cluster = snapshot::open(&file)?;
    let job = in_namespace(of_namespace(job, args.namespace.as_deref())?, &cluster);
    let found = decide(&mut cluster, &job)?;
    let is_refused = matches!(found.fabric, Some(Err(_)));
    let exit = if found.placement.is_ok() && !is_refused { Exit::Done } else { Exit::NotPlaceable };
    if args.fabric && found.placement.is_ok() {
        show_fabric(cli, &job, found.fabric)?;
        return Ok(exit);
    }
    if let (true, Ok(placed)) = (args.svg, &found.placement) {
        print(&topo::cluster::drawing(&file, &cluster, &name_of(&job), &placed.status));
        return Ok(exit);
    }
    let access = verdict::host_access(&job);
    let mut body = verdict::json(&job, &found);
    let unkept = verdict::unkept_files(&job);
    for (key, sentences) in [("admission", &access), ("storage", &unkept)] {
        if !sentences.is_empty() {
            body[key] = sentences.clone().into();
        }
    }
    emit(cli.output, "PlacementVerdict", &body, || {
        let table = verdict::table(&job, &found, &cluster, cli.verbose);
        table + &verdict::rows("admission", &access) + &verdict::rows("storage", &unkept)
    });
    Ok(exit)
}

/// Puts the job into the namespace from the command line. As with kubectl, the manifest must not
/// name another one.
fn of_namespace(mut job: TrainJob, namespace: Option<&str>) -> Result<TrainJob, Failure> {
    match (&job.metadata.namespace, namespace) {
        (Some(own), Some(wanted)) if own != wanted => Err(Failure::usage(format!(
            "--namespace: got {wanted}; expected {own}, as in the manifest (metadata.namespace)"
        ))),
        (None, Some(wanted)) => {
            job.metadata.namespace = Some(wanted.to_owned());
            Ok(job)
        }
        _ => Ok(job),
    }
}

/// Explains a job's placement, or why it waits.
pub(super) fn explain(cli: &Cli, args: &ExplainArgs) -> Result<Exit, Failure> {
    let mut cluster = snapshot::open(&snapshot::read(&args.source)?)?;
    let namespace = args.namespace.as_deref().unwrap_or(cluster.namespace());
    let Some(job) = cluster.job(namespace, &args.subject).cloned() else {
        let jobs: Vec<String> = cluster.jobs().iter().map(|job| name_of(job)).collect();
        let known =
            if jobs.is_empty() { "there is none".to_string() } else { format!("there are {}", jobs.join(", ")) };
        return Err(Failure::usage(format!("no TrainJob {namespace}/{}; {known} (--namespace)", args.subject)));
    };
    let found = decide(&mut cluster, &job)?;
    if args.fabric {
        // Show the recorded decision; before there is one, show what would be decided.
        let decided = job.status.as_ref().and_then(|status| status.fabric.clone()).filter(|f| !f.decisions.is_empty());
        let forecast = found.fabric.as_ref().and_then(|found| found.as_ref().ok()?.forecast.clone());
        let decided = decided.map(|status| Ok(FabricDecisions { status, forecast, blamed: Vec::new() }));
        show_fabric(cli, &job, decided.or(found.fabric))?;
    } else {
        emit(cli.output, "Explanation", &verdict::explanation_json(&job, &found), || {
            verdict::explanation(&job, &found, &cluster, cli.verbose)
        });
    }
    Ok(Exit::Done)
}

/// Prints every setting of the fabric.
fn show_fabric(cli: &Cli, job: &TrainJob, fabric: Option<Result<FabricDecisions, String>>) -> Result<(), Failure> {
    let Some(decided) = fabric else {
        let what = "data stays inside a node, or our own engine carries it and reads no such settings";
        return Err(Failure::usage(format!("{} has no use for settings of a fabric: {what}", name_of(job))));
    };
    let found = decided.map_err(|why| Failure::new(why, Exit::NotPlaceable))?;
    emit(cli.output, "Fabric", &fabric::json(job, &found.status), || {
        fabric::table(job, &found.status, found.forecast.as_ref(), cli.verbose)
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::json;

    /// The first-job page applies in a namespace that `plan` did not know.
    #[test]
    fn a_plan_is_for_the_namespace_that_is_named() {
        let job = |namespace: Option<&str>| -> TrainJob {
            let metadata = json!({"name": "a", "namespace": namespace});
            let document = json!({"apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "metadata": metadata, "spec": {}});
            serde_json::from_value(document).unwrap()
        };
        let named = |own, wanted| of_namespace(job(own), wanted).map(|job| job.metadata.namespace).ok();
        assert_eq!(named(None, Some("team")), Some(Some("team".into())));
        assert_eq!(named(Some("team"), Some("team")), Some(Some("team".into())));
        assert_eq!(named(Some("team"), None), Some(Some("team".into())));
        assert_eq!(named(None, None), Some(None));
        let refused = of_namespace(job(Some("own")), Some("team")).unwrap_err().message;
        assert_eq!(refused, "--namespace: got team; expected own, as in the manifest (metadata.namespace)");
    }
}
