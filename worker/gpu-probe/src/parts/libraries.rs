//! Installed libraries and their versions.

use super::{Probe, attention, gather};
use crate::numbers::short;
use crate::outcome::Outcome;
use serde_json::{Value, json};
use std::time::Instant;
use switchyard_cuda::Error;
use switchyard_cuda::attention::Attention;
use switchyard_cuda::cudnn::Cudnn;
use switchyard_cuda::driver::Driver;
use switchyard_cuda::find::{CUBLASLT, CUDNN, DRIVER, Found, LibrarySpec, NCCL, NVRTC};
use switchyard_cuda::operation::{Accepted, Operation, Properties, ask};
use switchyard_cuda::{inventory, version};

pub(super) fn driver(probe: &Probe) -> Result<Value, Outcome> {
    let found = probe.places.open(&DRIVER)?;
    let driver = Driver::new(&found.library)?;
    let devices = driver.devices()?.into_iter().map(|device| {
        json!({
            "name": device.name,
            "memoryGiB": device.memory_bytes >> 30,
            "multiprocessors": device.multiprocessors,
            "computeCapability": format!("{}.{}", device.capability.0, device.capability.1),
        })
    });
    let devices: Vec<Value> = devices.collect();
    Ok(figures(&found, &version::cuda(driver.version()?), json!({"devices": devices})))
}

pub(super) fn cublaslt(probe: &Probe) -> Result<Value, Outcome> {
    library(probe, &CUBLASLT, inventory::cublaslt)
}

/// Includes the device's properties if there is one, so that plans can later be queried without it.
pub(super) fn cudnn(probe: &Probe) -> Result<Value, Outcome> {
    let mut figures = library(probe, &CUDNN, inventory::cudnn)?;
    if probe.require_device().is_ok() {
        let cudnn = Cudnn::new(&probe.cudnn()?)?;
        let device = i32::try_from(probe.device).unwrap_or(i32::MAX);
        let json = Properties::of(&cudnn, device)?.json(&cudnn)?;
        let text = |error: serde_json::Error| Outcome::failed("properties of the device", format!("{error}: {json}"));
        figures["deviceProperties"] = serde_json::from_str(json.trim_end_matches('\0')).map_err(text)?;
        return query_around_context(probe, figures);
    }
    Ok(figures)
}

/// Queries cuDNN before a context exists, as the worker does, and afterwards.
///
/// # Errors
/// The answers differ, or cuDNN refuses an operation.
fn query_around_context(probe: &Probe, figures: Value) -> Result<Value, Outcome> {
    let cudnn = Cudnn::new(&probe.cudnn()?)?;
    let properties = Properties::of(&cudnn, i32::try_from(probe.device).unwrap_or(i32::MAX))?;
    let operations = [false, true]
        .map(|backward| Operation::Attention(Attention { shape: attention::shape(probe), backward }))
        .map(|operation| (operation, ask(&cudnn, &properties, &operation, attention::LIMITS)));
    let (context, _) = probe.start()?;
    context.make_current()?;
    let rows = operations.into_iter().map(|(operation, before)| {
        let name = if matches!(operation, Operation::Attention(Attention { backward: true, .. })) {
            "attention gradient"
        } else {
            "attention"
        };
        let start = Instant::now();
        let after = ask(&cudnn, &properties, &operation, attention::LIMITS);
        let seconds = start.elapsed().as_secs_f64();
        let text = |answer: &Result<Accepted, Error>| match answer {
            Ok(accepted) => format!("accepted with {} bytes of workspace", accepted.workspace_bytes),
            Err(error) => error.to_string(),
        };
        let [before, after] = [&before, &after].map(text);
        let row = json!({
            "operation": name, "beforeContext": before, "afterContext": after, "querySeconds": short(seconds),
        });
        let same = if before == after && before.starts_with("accepted") {
            Ok(json!({}))
        } else {
            let text = format!("got `{before}` before a context and `{after}` with one; expected both accepted");
            Err(Outcome::failed(name, text))
        };
        (row, same)
    });
    gather(figures, "queries", rows.collect())
}

pub(super) fn nvrtc(probe: &Probe) -> Result<Value, Outcome> {
    library(probe, &NVRTC, inventory::nvrtc)
}

pub(super) fn nccl(probe: &Probe) -> Result<Value, Outcome> {
    library(probe, &NCCL, inventory::nccl)
}

fn library(
    probe: &Probe,
    wanted: &LibrarySpec,
    version: fn(&Found) -> Result<String, switchyard_cuda::Error>,
) -> Result<Value, Outcome> {
    let found = probe.places.open(wanted)?;
    Ok(figures(&found, &version(&found)?, json!({})))
}

fn figures(found: &Found, version: &str, mut more: Value) -> Value {
    more["version"] = version.into();
    more["foundBy"] = found.origin.name().into();
    more["file"] = found.library.path.display().to_string().into();
    more
}
