//! Installed libraries and their versions.

use super::Probe;
use crate::outcome::Outcome;
use serde_json::{Value, json};
use switchyard_cuda::cudnn::Cudnn;
use switchyard_cuda::driver::Driver;
use switchyard_cuda::find::{CUBLASLT, CUDNN, DRIVER, Found, LibrarySpec, NCCL, NVRTC};
use switchyard_cuda::operation::Properties;
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

/// Includes the device's properties if there is one, so that plans can be requested without it.
pub(super) fn cudnn(probe: &Probe) -> Result<Value, Outcome> {
    let mut figures = library(probe, &CUDNN, inventory::cudnn)?;
    if probe.require_device().is_ok() {
        let cudnn = Cudnn::new(&probe.cudnn()?)?;
        let device = i32::try_from(probe.device).unwrap_or(i32::MAX);
        let json = Properties::of(&cudnn, device)?.json(&cudnn)?;
        let text = |error: serde_json::Error| Outcome::failed("properties of the device", format!("{error}: {json}"));
        figures["deviceProperties"] = serde_json::from_str(json.trim_end_matches('\0')).map_err(text)?;
    }
    Ok(figures)
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
