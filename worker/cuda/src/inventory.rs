//! The libraries on a machine, and their versions.

use crate::cublaslt::CublasLt;
use crate::cudnn::Cudnn;
use crate::driver::{Device, Driver};
use crate::error::Error;
use crate::find::{CUBLASLT, CUDNN, DRIVER, Found, LibrarySpec, NCCL, NVML, NVRTC, Origin, Places};
use crate::nccl::Nccl;
use crate::nvml::Nvml;
use crate::nvrtc::Nvrtc;
use crate::version;
use std::path::PathBuf;

/// A library that was searched for.
pub struct Item {
    pub name: &'static str,
    /// Its location, if found.
    pub place: Option<(PathBuf, Origin)>,
    /// The version in NVIDIA's notation, or why the library is unusable.
    pub version: Result<String, Error>,
}

/// Searches for all libraries, and for GPUs.
pub fn detect(places: &Places) -> (Vec<Item>, Vec<Device>) {
    let mut devices = Vec::new();
    let driver = item(places, &DRIVER, |found| {
        let driver = Driver::new(&found.library)?;
        devices = driver.devices()?;
        Ok(version::cuda(driver.version()?))
    });
    let others = [item(places, &NVRTC, nvrtc), item(places, &CUBLASLT, cublaslt), item(places, &NCCL, nccl)];
    let mut items: Vec<Item> = [driver].into_iter().chain(others).collect();
    // Without cuBLASLt, cuDNN aborts the process instead of failing.
    if items[2].version.is_ok() {
        items.push(item(places, &CUDNN, cudnn));
    }
    items.push(item(places, &NVML, nvml));
    (items, devices)
}

/// The NVRTC version.
///
/// # Errors
/// The library is unusable.
pub fn nvrtc(found: &Found) -> Result<String, Error> {
    let (major, minor) = Nvrtc::new(&found.library)?.version()?;
    Ok(format!("{major}.{minor}"))
}

/// The cuBLASLt version.
///
/// # Errors
/// The library is unusable.
pub fn cublaslt(found: &Found) -> Result<String, Error> {
    Ok(version::library(CublasLt::new(&found.library)?.version() as i64))
}

/// The NCCL version.
///
/// # Errors
/// The library is unusable.
pub fn nccl(found: &Found) -> Result<String, Error> {
    Ok(version::library(Nccl::new(&found.library)?.version()?.into()))
}

/// The cuDNN version; requires a usable cuBLASLt.
///
/// # Errors
/// The library is unusable.
pub fn cudnn(found: &Found) -> Result<String, Error> {
    Ok(version::library(Cudnn::new(&found.library)?.version() as i64))
}

/// The driver version according to NVML, which is part of the driver.
///
/// # Errors
/// The library is unusable.
pub fn nvml(found: &Found) -> Result<String, Error> {
    Nvml::new(&found.library)?.driver_version()
}

fn item(places: &Places, wanted: &'static LibrarySpec, version: impl FnOnce(&Found) -> Result<String, Error>) -> Item {
    match places.open(wanted) {
        Ok(found) => Item {
            name: wanted.name,
            version: version(&found),
            place: Some((found.library.path.clone(), found.origin)),
        },
        Err(error) => Item { name: wanted.name, place: None, version: Err(error) },
    }
}
