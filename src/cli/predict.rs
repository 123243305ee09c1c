//! `switchyard plan --device`: predicts the minimum time of a training step on a GPU.

use crate::args::Cli;
use crate::event_loop::event_loop;
use crate::failure::Failure;
use crate::output::emit;
use crate::text::columns;
use crate::{manifest, screen};
use serde_json::json;
use std::path::Path;
use switchyard_core::units::{binary, grouped, percent, rate, three_digits};
use switchyard_local::{self as local, RunError, Worker};
use switchyard_plan::local::{Engine, engine};
use switchyard_worker_contract::exit::Exit;
use switchyard_worker_contract::prediction::{Bound, Operation, Part, Prediction};

/// Predicts the step of a manifest on the GPU of a device file.
pub(super) fn predict(cli: &Cli, file: &Path, device: &Path) -> Result<Exit, Failure> {
    let job = manifest::read(file)?;
    let engine = engine(&job).map_err(RunError::from)?;
    let worker = Worker::find(None).map_err(|error| Failure::new(error, Exit::Unexpected))?;
    // Make the path absolute, so that the worker accepts every path that a shell does.
    let device =
        std::path::absolute(device).map_err(|error| Failure::usage(format!("{}: {error}", device.display())))?;
    let found = event_loop()?.block_on(local::predict(&worker, &engine, &device)).map_err(RunError::from)?;
    let seconds = found.seconds();
    let mut value = json!(found);
    value["seconds"] = seconds.into();
    value["itemsPerSecond"] = (found.items as f64 / seconds).into();
    emit(cli.output, "Prediction", &value, || table(&found, &engine));
    Ok(Exit::Done)
}

fn table(found: &Prediction, engine: &Engine) -> String {
    let Prediction { gpu, items, item, memory_bytes, memory_limit_bytes, operations, .. } = found;
    let (seconds, all) = (found.seconds(), |of: fn(&Operation) -> f64| operations.iter().map(of).sum::<f64>());
    let mut rows =
        vec![["", "kernel", "launches", "bytes", "FLOP", "time", "share", "bound by"].map(String::from).to_vec()];
    rows.extend(operations.iter().map(|operation| row(operation, seconds)));
    let sums = [
        all(|operation| operation.launches as f64),
        all(|operation| operation.bytes),
        all(|operation| operation.flops),
    ];
    rows.push(vec![
        "step".into(),
        String::new(),
        three_digits(sums[0]),
        binary(sums[1] as u64),
        flops(sums[2]),
        time(seconds),
        percent(1.0),
    ]);
    let launch = match gpu.launch_seconds {
        Some(_) => "",
        None => " Launches are counted as nothing: the device file has no launchSeconds.",
    };
    let merged = match engine.config.batch_merge {
        0 | 1 => String::new(),
        count => format!(", in {count} micro-batches"),
    };
    format!(
        "{}, {} parameters, {}; {} {} of a rank in a step{}\n{}, {} of {} that the rank may take\nrates: {}\n\n{}\n\
         At least {} a step, at most {} {}/s and GPU. Each operation moves its bytes once and computes at the full rate; what ranks do together and \
         what the host does is not counted.{launch}",
        found.model,
        screen::millions(found.parameters),
        screen::precision_words(engine.config.precision),
        grouped(*items),
        item.word(),
        merged,
        gpu.name,
        binary(*memory_bytes),
        binary(*memory_limit_bytes),
        gpu.source,
        columns(&rows),
        time(seconds),
        rate(*items as f64 / seconds),
        item.word(),
    )
}

fn row(operation: &Operation, step: f64) -> Vec<String> {
    let part = match operation.part {
        Part::Forward => "forward",
        Part::Backward => "backward",
        Part::Update => "update",
    };
    let bound = match operation.bound {
        Bound::Memory => "memory",
        Bound::Arithmetic => "arithmetic",
        Bound::Launch => "launches",
    };
    vec![
        part.to_owned(),
        operation.name.clone(),
        operation.launches.to_string(),
        binary(operation.bytes as u64),
        flops(operation.flops),
        time(operation.seconds),
        percent(operation.seconds / step),
        bound.to_owned(),
    ]
}

/// In milliseconds, or in microseconds if less than one.
fn time(seconds: f64) -> String {
    match seconds {
        seconds if seconds < 1e-3 => format!("{} µs", three_digits(seconds * 1e6)),
        seconds => format!("{} ms", three_digits(seconds * 1e3)),
    }
}

/// `2.1 T`; empty for zero.
fn flops(count: f64) -> String {
    match count {
        0.0 => String::new(),
        count if count >= 1e12 => format!("{} T", three_digits(count / 1e12)),
        count if count >= 1e9 => format!("{} G", three_digits(count / 1e9)),
        count => format!("{} M", three_digits(count / 1e6)),
    }
}
