//! `switchyard convert`: converts manifests of other operators to TrainJobs, and lists unsupported
//! settings on standard error.

use crate::args::{Cli, ConvertArgs, Output};
use crate::failure::Failure;
use crate::output::{emit_object, print};
use crate::{input, yaml};
use serde_json::Value;
use std::fmt::Display;
use switchyard_core::units::{counted, plural};
use switchyard_plan as plan;
use switchyard_tools::convert::{self, ConvertError, Converted};
use switchyard_worker_contract::exit::Exit;

/// A converted file: the TrainJobs with their unsupported settings, and the skipped documents.
struct File {
    jobs: Vec<Converted>,
    skipped: Vec<String>,
}

/// Converts a file; prints nothing unless all of it is valid.
pub(super) fn convert(cli: &Cli, args: &ConvertArgs) -> Result<Exit, Failure> {
    let text = input::read(&args.file, "manifest of at most 16 MiB", input::MANIFESTS)?;
    let file = read(&input::name(&args.file), &text)?;
    for (index, converted) in file.jobs.iter().enumerate() {
        if index > 0 && cli.output != Output::Json {
            print("---");
        }
        emit_object(cli.output, &converted.job);
    }
    if !cli.quiet {
        let notes = notes(&file);
        anstream::eprint!("{notes}");
    }
    Ok(Exit::Done)
}

fn read(name: &str, text: &str) -> Result<File, Failure> {
    let wrong = |fault: &dyn Display| Failure::usage(format!("error[SY0002]: {name}: {fault}"));
    let mut file = File { jobs: Vec::new(), skipped: Vec::new() };
    let documents: Vec<Value> = yaml::documents(name, text)?.iter().map(|document| document.value.to_json()).collect();
    // A runtime becomes part of the jobs that name it.
    let is_used = |item: &Value| {
        let is_runtime = item["kind"].as_str().is_some_and(|kind| kind.ends_with("TrainingRuntime"));
        is_runtime && documents.iter().any(|job| job["spec"]["runtimeRef"]["name"] == item["metadata"]["name"])
    };
    for document in &documents {
        let items = document.get("items").and_then(Value::as_array).filter(|_| is_list(document));
        for item in items.map_or_else(|| std::slice::from_ref(document), Vec::as_slice) {
            match convert::convert(item, &documents) {
                Ok(converted) => {
                    check(&converted.job).map_err(|fault| wrong(&fault))?;
                    file.jobs.push(converted);
                }
                Err(ConvertError::UnknownKind(_)) if is_used(item) => {}
                Err(ConvertError::UnknownKind(kind)) => file.skipped.push(kind),
                Err(error) => return Err(wrong(&error)),
            }
        }
    }
    if file.jobs.is_empty() {
        let got = file.skipped.pop().unwrap_or_else(|| "no document".into());
        return Err(wrong(&ConvertError::UnknownKind(got)));
    }
    Ok(file)
}

fn is_list(document: &Value) -> bool {
    document["kind"].as_str().is_some_and(|kind| kind.ends_with("List"))
}

/// Checks that a cluster would accept the job.
fn check(job: &Value) -> Result<(), String> {
    let faults: Vec<String> = match switchyard_crds::validate::train_job(job) {
        Err(faults) => faults.iter().map(ToString::to_string).collect(),
        Ok(job) => plan::validate(&job).err().unwrap_or_default().iter().map(ToString::to_string).collect(),
    };
    if faults.is_empty() {
        return Ok(());
    }
    Err(format!("what it becomes is no valid TrainJob; expected a manifest without these:\n  {}", faults.join("\n  ")))
}

/// Lists the fields without a counterpart.
fn notes(file: &File) -> String {
    let mut out = String::new();
    for converted in &file.jobs {
        let name = converted.job["metadata"]["name"].as_str().unwrap_or_default();
        let count = converted.notes.len() as u64;
        if count > 0 {
            out.push_str(&format!("{name}: {} to look at\n", counted(count, "field")));
        }
        for note in &converted.notes {
            out.push_str(&format!("  {}: {}\n      {}\n", note.path, note.value, note.what));
        }
    }
    let passed = file.skipped.len() as u64;
    if passed > 0 {
        let kinds = file.skipped.join(", ");
        out.push_str(&format!("{passed} document{} skipped: {kinds}\n", plural(passed)));
    }
    out
}

#[cfg(test)]
mod tests;
