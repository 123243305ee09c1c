//! `switchyard tune`: runs the job with other settings for about a minute, and shows which ones
//! make its steps shorter.
//!
//! ```text
//! manifest ─> settings to try ─> trials, each a run of some steps ─> choice ─> table, manifest
//! ```

mod choice;
mod settings;
mod trial;

use crate::args::{Cli, TuneArgs};
use crate::event_loop::event_loop;
use crate::failure::Failure;
use crate::output::{emit, width, yaml};
use crate::text::{Screen, columns};
use crate::{machine, manifest};
use choice::Tuned;
use serde_json::{Value, json};
use settings::{Scope, Settings};
use std::path::Path;
use switchyard_core::units::three_digits;
use switchyard_local::{RunDir, RunError, Worker};
use switchyard_plan::local::{Devices, LocalSnapshot, plan as make_plan};
use switchyard_worker_contract::exit::Exit;
use trial::Bench;

/// Tunes a job on this machine.
pub(super) fn tune(cli: &Cli, args: &TuneArgs) -> Result<Exit, Failure> {
    let (document, job) = manifest::read_document(&args.file)?;
    if job.spec.engine.is_none() {
        return Err(Failure::usage(
            "spec.engine: got nothing; expected a job of Switchyard's engine, whose steps are measured",
        ));
    }
    let topology = machine::this_machine()?;
    let exit = if args.worker.is_some() { Exit::Usage } else { Exit::Unexpected };
    let worker = Worker::find(args.worker.as_deref()).map_err(|error| Failure::new(error, exit))?;
    let plan = make_plan(&LocalSnapshot {
        job: &job,
        nodes: std::slice::from_ref(&topology),
        attempt: 1,
        rendezvous: "ADDRESS:PORT",
        run_dir: "RUN_DIR",
        devices: Devices::default(),
        hosts: None,
    });
    let scope = Scope::of(&plan.map_err(RunError::from)?);
    let name = format!("{}-tune", job.metadata.name.as_deref().unwrap_or_default());
    let run_dir = RunDir::choose(&name, args.run_dir.as_deref());
    let runtime = event_loop()?;
    let bench = Bench {
        job: &job,
        topology: &topology,
        worker: &worker,
        run_dir: &run_dir,
        quiet: cli.quiet,
        trials: Vec::new(),
    };
    // The ranks end with the thread that starts them.
    let tuned = tokio::task::LocalSet::new().block_on(&runtime, search(bench, &scope, args))?;
    let file = match &args.out {
        Some(file) => Some(write(file, document, &tuned)?),
        None => None,
    };
    emit(cli.output, "Tuning", &tuned, || table(&tuned, &run_dir.short(), file.as_deref()));
    Ok(Exit::Done)
}

/// Tries the values of one setting after another, each with the best of those before. In the end,
/// the manifest's settings and the best ones run once more, one after the other: only that pair
/// decides, because a machine's speed drifts.
async fn search(mut bench: Bench<'_>, scope: &Scope, args: &TuneArgs) -> Result<Tuned, Failure> {
    let own = Settings::of(bench.job);
    let fields = scope.fields(&own);
    let count: usize = fields.iter().map(|(_, values)| values.len()).sum();
    let steps = match args.steps {
        Some(steps) => steps,
        // The manifest's settings run twice, and the best ones once more.
        None => bench.steps_within(f64::from(args.seconds), count + 3, &own).await?,
    };
    let mut best = bench.run(&own, steps).await?;
    for (field, values) in fields {
        for value in values {
            let settings = bench.trials[best].settings.clone().with(field, value);
            let trial = bench.run(&settings, steps).await?;
            if bench.trials[trial].step_ms < bench.trials[best].step_ms {
                best = trial;
            }
        }
    }
    let found = bench.trials[best].settings.clone();
    let pair = match found == own {
        true => None,
        false => Some((bench.run(&own, steps).await?, bench.run(&found, steps).await?)),
    };
    Ok(Tuned::of(bench.trials, pair, scope))
}

/// Writes the manifest with the chosen settings; returns the path for display.
fn write(file: &Path, mut document: Value, tuned: &Tuned) -> Result<String, Failure> {
    merge(&mut document, &tuned.patch);
    let reasons: String = tuned.reasons.iter().map(|reason| format!("# {reason}\n")).collect();
    let text = format!("# Made by `switchyard tune`.\n{reasons}{}", yaml(&document));
    let name = file.display().to_string();
    std::fs::write(file, text).map_err(|error| Failure::unexpected(format!("cannot write {name}: {error}")))?;
    Ok(name)
}

/// Merges as in RFC 7386.
fn merge(document: &mut Value, patch: &Value) {
    match patch.as_object() {
        Some(fields) => {
            if !document.is_object() {
                *document = json!({});
            }
            for (name, value) in fields {
                match (value, document.as_object_mut()) {
                    (Value::Null, Some(document)) => drop(document.remove(name)),
                    _ => merge(&mut document[name], value),
                }
            }
        }
        None => *document = patch.clone(),
    }
}

fn table(tuned: &Tuned, run_dir: &str, file: Option<&str>) -> String {
    let heading =
        ["trial", "cpuThreads", "communicators", "bucketSizeMiB", "step p50", "p99", "waits for ranks", "steps"];
    let mut rows = vec![heading.map(String::from).to_vec()];
    rows.extend(tuned.trials.iter().zip(1..).map(|(trial, number)| {
        let [threads, communicators, bucket] = trial.settings.words();
        let ms = |ms: f64| format!("{} ms", three_digits(ms));
        let times = [ms(trial.step_ms), ms(trial.step_ms_p99), ms(trial.communication_ms)];
        [number.to_string(), threads, communicators, bucket]
            .into_iter()
            .chain(times)
            .chain([trial.steps.to_string()])
            .collect()
    }));
    let mut screen = Screen::new(width());
    tuned.reasons.iter().for_each(|reason| screen.paragraph("", reason));
    if let Some(file) = file {
        screen.paragraph("manifest", file);
    } else if tuned.is_better {
        screen.paragraph("patch", &tuned.patch.to_string());
    }
    screen.paragraph("runs", run_dir);
    format!("{}\n\n{}", columns(&rows), screen.into_text())
}

#[cfg(test)]
mod tests {
    use super::merge;
    use serde_json::json;

    #[test]
    fn a_patch_sets_and_removes_fields() {
        let mut document = json!({"spec": {"engine": {"overlap": {"bucketSizeMiB": 4}, "steps": 10}}});
        merge(
            &mut document,
            &json!({"spec": {"trainer": {"cpuThreads": 2}, "engine": {"overlap": {"bucketSizeMiB": null}}}}),
        );
        let expected = json!({"spec": {"trainer": {"cpuThreads": 2}, "engine": {"overlap": {}, "steps": 10}}});
        assert_eq!(document, expected);
    }
}
