//! Which libraries a machine has, and their versions.

use crate::cublaslt::CublasLt;
use crate::cudnn::Cudnn;
use crate::driver::{Device, Driver};
use crate::error::Error;
use crate::find::{CUBLASLT, CUDNN, DRIVER, Found, NCCL, NVML, NVRTC, Origin, Places, Wanted};
use crate::nccl::Nccl;
use crate::nvml::Nvml;
use crate::nvrtc::Nvrtc;
use crate::version;
use std::path::PathBuf;

/// A library that was looked for.
pub struct Item {
    pub name: &'static str,
    /// Where it is, if it is there.
    pub place: Option<(PathBuf, Origin)>,
    /// As NVIDIA writes it, or why it cannot be used.
    pub version: Result<String, Error>,
}

/// Looks for all libraries, and for GPUs.
pub fn look(places: &Places) -> (Vec<Item>, Vec<Device>) {
    let mut devices = Vec::new();
    let driver = item(places, &DRIVER, |found| {
        let driver = Driver::new(&found.library)?;
        devices = driver.devices()?;
        Ok(version::cuda(driver.version()?))
    });
    let others = [item(places, &NVRTC, nvrtc), item(places, &CUBLASLT, cublaslt), item(places, &NCCL, nccl)];
    let mut items: Vec<Item> = [driver].into_iter().chain(others).collect();
    // Without cuBLASLt, cuDNN ends the process instead of failing.
    if items[2].version.is_ok() {
        items.push(item(places, &CUDNN, cudnn));
    }
    items.push(item(places, &NVML, nvml));
    (items, devices)
}

/// The version of NVRTC.
///
/// # Errors
/// It cannot be used.
pub fn nvrtc(found: &Found) -> Result<String, Error> {
    let (major, minor) = Nvrtc::new(&found.library)?.version()?;
    Ok(format!("{major}.{minor}"))
}

/// The version of cuBLASLt.
///
/// # Errors
/// It cannot be used.
pub fn cublaslt(found: &Found) -> Result<String, Error> {
    Ok(version::library(CublasLt::new(&found.library)?.version() as i64))
}

/// The version of NCCL.
///
/// # Errors
/// It cannot be used.
pub fn nccl(found: &Found) -> Result<String, Error> {
    Ok(version::library(Nccl::new(&found.library)?.version()?.into()))
}

/// The version of cuDNN, which needs a cuBLASLt that can be used.
///
/// # Errors
/// It cannot be used.
pub fn cudnn(found: &Found) -> Result<String, Error> {
    Ok(version::library(Cudnn::new(&found.library)?.version() as i64))
}

/// The version of the driver by NVML, which comes with it.
///
/// # Errors
/// It cannot be used.
pub fn nvml(found: &Found) -> Result<String, Error> {
    Nvml::new(&found.library)?.driver_version()
}

fn item(places: &Places, wanted: &'static Wanted, version: impl FnOnce(&Found) -> Result<String, Error>) -> Item {
    match places.open(wanted) {
        Ok(found) => Item {
            name: wanted.name,
            version: version(&found),
            place: Some((found.library.path.clone(), found.origin)),
        },
        Err(error) => Item { name: wanted.name, place: None, version: Err(error) },
    }
}
