//! `switchyard report JOB`: writes the report of a job in a cluster from the API server's data.
//!
//! The records of a finished pod's ranks are out of reach unless the job keeps its run directory on
//! a volume. The logs contain rank 0's events. Together with the configuration and the status they
//! form a local run directory, and the report lists what is missing.

use super::{Live, request_error};
use crate::args::{Cli, ReportArgs};
use crate::connect::wait_for;
use crate::failure::Failure;
use crate::report as local;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::LogParams;
use kube::{Api, ResourceExt};
use serde_json::json;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use switchyard_crds::names::TRAINER;
use switchyard_crds::{Framework, TrainJob};
use switchyard_local::RunDir;
use switchyard_tools::report::Document;
use switchyard_worker_contract::event::Event;
use switchyard_worker_contract::exit::Exit;

/// Writes a job's report to `runs/JOB-cluster` or to `--out`.
pub(crate) fn report(cli: &Cli, args: &ReportArgs) -> Result<Exit, Failure> {
    let name = args.subject.display().to_string();
    let folder = wait_for(async {
        // The argument can be a directory or a job, so the error describes both.
        let neither = |Failure { message, exit }: Failure| {
            let text = "expected the directory of a run, which is not here, or the name of a TrainJob in a cluster";
            Failure::new(format!("{name}: {text}: {message}"), exit)
        };
        let live = Live::open(&args.connection).await.map_err(neither)?;
        let job = live.job(&name).await.map_err(neither)?;
        if job.spec.trainer.framework != Framework::Switchyard {
            let framework = json!(job.spec.trainer.framework);
            let text =
                format!("{name} runs {}: there are figures of our own engine only", framework.as_str().unwrap_or("-"));
            return Err(Failure::usage(text));
        }
        fetch(&live, &job).await
    })?;
    local::report(cli, &ReportArgs { subject: folder, ..args.clone() })
}

/// Creates the job's run directory.
async fn fetch(live: &Live, job: &TrainJob) -> Result<PathBuf, Failure> {
    let folder = Path::new("runs").join(format!("{}-cluster", job.name_any()));
    let cannot = |error: std::io::Error| Failure::unexpected(format!("cannot write {}: {error}", folder.display()));
    std::fs::create_dir_all(&folder).map_err(cannot)?;
    let run_dir = RunDir::existing(&folder);
    let replace = |name: &str, text: &str| run_dir.replace(name, text).map_err(Failure::unexpected);
    let mut shown = job.clone();
    shown.metadata.managed_fields = None;
    replace(Document::Status.file(), &serde_saphyr::to_string(&shown).unwrap_or_default())?;
    let attempt = job.status.as_ref().and_then(|status| status.attempt).unwrap_or(1);
    let maps: Api<ConfigMap> = Api::namespaced(live.client.clone(), &live.namespace);
    let map = maps.get_opt(&format!("{}-{attempt}", job.name_any())).await;
    let map = map.map_err(|error| request_error("get the configuration", error))?;
    let engine = map.and_then(|map| map.data?.remove(Document::Engine.file()));
    if let Some(engine) = engine {
        replace(Document::Engine.file(), &engine)?;
    }
    let mut events = String::new();
    for pod in live.pods_of_job(job).await? {
        let params = LogParams { container: Some(TRAINER.into()), timestamps: true, ..LogParams::default() };
        // A missing log makes the report less complete; use the others.
        match live.pods().logs(&pod.name, &params).await {
            Ok(log) => log.lines().filter_map(|line| event(line, pod.attempt)).for_each(|line| events.push_str(&line)),
            Err(error) => {
                anstream::eprintln!("warning: {}", request_error(&format!("read the log of {}", pod.name), error))
            }
        }
    }
    if events.is_empty() {
        let text = format!("{}: no rank has said anything yet, or its pods and their logs are gone", job.name_any());
        return Err(Failure::usage(text));
    }
    replace("events.jsonl", &events)?;
    Ok(folder)
}

/// Converts a log line and its time to a line of `events.jsonl`. `None` if it is not an event, or
/// repeats others.
pub(super) fn event(line: &str, attempt: u32) -> Option<String> {
    let (time, line) = line.split_once(' ')?;
    let event: Event = serde_json::from_str(line).ok()?;
    match &event {
        Event::Summary(_) => return None,
        // Only rank 0's progress is reported in full; other pods repeat it as a sign of life.
        Event::Progress(progress) if progress.rank != 0 => return None,
        _ => {}
    }
    let rank = event.rank().unwrap_or(0);
    let mut text = String::new();
    let time = time.parse::<Timestamp>().ok();
    writeln!(text, "{}", json!({"time": time, "attempt": attempt, "rank": rank, "event": event})).ok()?;
    Some(text)
}
