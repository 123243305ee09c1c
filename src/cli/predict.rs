//! `switchyard plan --device`: predicts the minimum time of a training step on a GPU, and the
//! communication that it cannot hide.

use crate::args::Cli;
use crate::event_loop::event_loop;
use crate::failure::Failure;
use crate::output::emit;
use crate::text::columns;
use crate::{manifest, screen};
use serde::Serialize;
use serde_json::json;
use std::path::Path;
use switchyard_core::units::{binary, grouped, percent, rate, three_digits};
use switchyard_local::{self as local, RunError, Worker};
use switchyard_plan::local::{Engine, engine};
use switchyard_worker_contract::config::{EngineConfig, WireType};
use switchyard_worker_contract::exit::Exit;
use switchyard_worker_contract::prediction::{Bound, Operation, Part, Prediction};

/// Bytes of the first and the last bucket: the last is complete with the last gradient, so
/// backward hides none of it.
const LAST_BUCKET: f64 = (1 << 20) as f64;

/// The gradient exchange of a step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Exchange {
    /// Bytes that a rank sends, if the ranks form a ring.
    sent_bytes: f64,
    seconds: f64,
    /// Seconds after the end of the backward pass.
    exposed_seconds: f64,
}

impl Exchange {
    /// At a bus bandwidth in bytes per second; `backward` is the backward pass of a step. Only that
    /// of the last micro-batch overlaps.
    fn of(config: &EngineConfig, (world, parameters): (u32, u64), backward: f64, rate: f64) -> Exchange {
        let ranks = f64::from(world);
        let value_bytes = if config.overlap.wire_type == WireType::Fp32 { 4.0 } else { 2.0 };
        let bytes = value_bytes * parameters as f64;
        let sent_bytes = 2.0 * (ranks - 1.0) / ranks * bytes;
        let seconds = sent_bytes / rate;
        let last = if bytes > 0.0 { seconds * (LAST_BUCKET.min(bytes) / bytes) } else { 0.0 };
        let hidden = match config.overlap.enabled && !config.overlap.sync_all_reduce {
            true => (backward / f64::from(config.batch_merge.max(1))).min(seconds - last),
            false => 0.0,
        };
        Exchange { sent_bytes, seconds, exposed_seconds: seconds - hidden }
    }
}

/// Predicts the step of a manifest on the GPU of a device file; with a bus bandwidth in GB/s also
/// the exchange of gradients.
pub(super) fn predict(cli: &Cli, file: &Path, device: &Path, bus_bandwidth: Option<f64>) -> Result<Exit, Failure> {
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
    let backward = found.operations.iter().filter(|operation| operation.part == Part::Backward);
    let backward = backward.map(|operation| operation.seconds).sum();
    let exchange =
        bus_bandwidth.map(|rate| Exchange::of(&engine.config, (engine.world, found.parameters), backward, rate * 1e9));
    if let Some(exchange) = exchange {
        value["exchange"] = json!(exchange);
    }
    emit(cli.output, "Prediction", &value, || {
        let exchange = exchange.map_or_else(String::new, |exchange| exchange_words(exchange, engine.world, seconds));
        format!("{}{exchange}", table(&found, &engine))
    });
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

fn exchange_words(exchange: Exchange, world: u32, step: f64) -> String {
    let Exchange { sent_bytes, seconds, exposed_seconds } = exchange;
    format!(
        "\nEach of {world} ranks sends {} a step, which takes {}. At most {} of that are exposed, if the GPU needs no longer than it must: {} of the step.",
        binary(sent_bytes as u64),
        time(seconds),
        time(exposed_seconds),
        percent(exposed_seconds / (step + exposed_seconds)),
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

#[cfg(test)]
mod tests {
    use super::Exchange;
    use switchyard_worker_contract::config::{EngineConfig, WireType};

    #[test]
    fn backward_hides_all_but_the_last_bucket() {
        let job = serde_json::json!({
            "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "metadata": {"name": "a"},
            "spec": {"trainer": {"numProcPerNode": 4}, "engine": {
                "model": {"type": "MLP", "mlp": {"hiddenSizes": [8]}}, "data": {"format": "Synthetic"}, "steps": 5,
            }},
        });
        let job = switchyard_crds::validate::train_job(&job).unwrap();
        let config = switchyard_plan::local::engine(&job).unwrap().config;
        // 64 MiB, of which a ring of four sends 96.
        let of = |config: &EngineConfig, backward| {
            let found = Exchange::of(config, (4, 16 << 20), backward, f64::from(96 << 20));
            (found.sent_bytes, found.seconds, found.exposed_seconds)
        };
        let (bytes, last) = (f64::from(96 << 20), 1.0 / 64.0);
        assert_eq!(of(&config, 0.25), (bytes, 1.0, 0.75));
        assert_eq!(of(&config, 9.0), (bytes, 1.0, last));
        let mut other = config.clone();
        other.batch_merge = 5;
        assert_eq!(of(&other, 1.25), (bytes, 1.0, 0.75), "only the last micro-batch overlaps");
        other.overlap.wire_type = WireType::Bf16;
        assert_eq!(of(&other, 0.5), (bytes / 2.0, 0.5, 0.4));
        other.overlap.enabled = false;
        assert_eq!(of(&other, 9.0), (bytes / 2.0, 0.5, 0.5));
    }
}
