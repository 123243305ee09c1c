//! The GPUs of this machine, and the libraries that compute on them.

use super::users::gpu_usage;
use crate::lowering::{CudnnKinds, Target};
use crate::process::variable;
use crate::train::TrainError;
use std::path::Path;
use switchyard_cuda::cublaslt::{Arithmetic, CublasLt};
use switchyard_cuda::cudnn::Cudnn;
use switchyard_cuda::driver::{Context, Device, Driver};
use switchyard_cuda::find::{CUBLASLT, CUDNN, DRIVER, LibrarySpec, NVRTC, Places, VARIABLE};
use switchyard_cuda::nvrtc::Nvrtc;
use switchyard_cuda::operation;
use switchyard_cuda::{Error, Library, version};

/// Selects the GPUs that a process sees; read by the driver.
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

/// Blocks per multiprocessor in a launch: enough that the tail of one block is hidden by others.
const BLOCKS: u32 = 4;

/// The GPU environment of this machine, and the GPU of a rank.
pub(super) struct Machine {
    pub context: Context,
    pub devices: Vec<Device>,
    pub nvrtc: Nvrtc,
    pub cublaslt: Library,
    /// cuBLASLt's major CUDA version.
    cublaslt_cuda_major: i32,
    places: Places,
}

impl Machine {
    /// Opens the libraries and takes a GPU: the one named by the environment if it names exactly
    /// one, otherwise the one with the rank's number on its node. `ranks`: the number of ranks of
    /// this process, all of which fail together.
    ///
    /// # Errors
    /// A library is missing, there are fewer GPUs than ranks, or the driver refuses.
    pub fn open(local_rank: u32, ranks: u32) -> Result<Machine, TrainError> {
        let places = Places::new(|name| std::env::var_os(name), Path::new("/"), None);
        let library = |wanted: &LibrarySpec| places.open(wanted).map(|found| found.library).map_err(missing);
        let driver = Driver::new(&library(&DRIVER)?).map_err(missing)?;
        let (nvrtc, cublaslt) = (library(&NVRTC)?, library(&CUBLASLT)?);
        let devices = driver.devices().map_err(missing)?;
        let supported = driver.version().map_err(missing)? / 1000;
        let opened = Nvrtc::new(&nvrtc).map_err(missing)?;
        let (compiler, _) = opened.version().map_err(missing)?;
        let cublaslt_cuda_major = CublasLt::new(&cublaslt).map_err(missing)?.version() / 10_000;
        let cublaslt_cuda_major = i32::try_from(cublaslt_cuda_major).unwrap_or(i32::MAX);
        for (name, major, file) in
            [(NVRTC.name, compiler, &nvrtc.path), (CUBLASLT.name, cublaslt_cuda_major, &cublaslt.path)]
        {
            if major > supported {
                return Err(TrainError::NoGpu(format!(
                    "{name} in {} is of CUDA {major}, and the driver supports CUDA {supported}: expected a newer driver, or libraries of CUDA \
                     {supported} in a folder that {VARIABLE} names",
                    file.display()
                )));
            }
        }
        let device = select(&devices, local_rank, ranks)?;
        // Another process may use it exclusively.
        let context = driver.context(device).map_err(|error| TrainError::from(error).with_users_of(&device.bus))?;
        Ok(Machine { context, devices, nvrtc: opened, cublaslt, cublaslt_cuda_major, places })
    }

    /// Starts cuDNN on the current device. Must be called after cuBLASLt is loaded, because
    /// otherwise cuDNN aborts the process.
    ///
    /// # Errors
    /// The reason cuDNN cannot be used.
    pub fn cudnn(&self) -> Result<Cudnn, String> {
        let library = match self.places.open(&CUDNN) {
            Ok(found) => found.library,
            Err(Error::NotFound { .. }) => return Err("cuDNN is not on this machine".to_owned()),
            Err(error) => return Err(error.to_string()),
        };
        let cudnn = Cudnn::new(&library).map_err(|error| error.to_string())?;
        let [found, since] = [cudnn.version(), operation::SINCE];
        let [shown, wanted] = [found, since].map(|number| version::library(i64::try_from(number).unwrap_or(i64::MAX)));
        if found < since || found / 10_000 != operation::MAJOR {
            let major = operation::MAJOR;
            return Err(format!(
                "cuDNN in {} is {shown}, expected {wanted} or newer of version {major}",
                library.path.display()
            ));
        }
        let (major, expected) = (cudnn.cuda_major(), self.cublaslt_cuda_major);
        if i32::try_from(major) != Ok(expected) {
            let file = library.path.display();
            return Err(format!("cuDNN in {file} is for CUDA {major}, and cuBLASLt of CUDA {expected}"));
        }
        Cudnn::start(&library).map_err(|error| error.to_string())
    }
}

/// The GPU of a rank; see [`Machine::open`].
fn select(devices: &[Device], local_rank: u32, ranks: u32) -> Result<&Device, TrainError> {
    let first = devices.first().ok_or_else(|| missing(Error::NoDevice))?;
    if variable(VISIBLE).is_some_and(|names| !names.contains(',')) {
        return Ok(first);
    }
    let last = local_rank.max(ranks.saturating_sub(1)) as usize;
    if let (Some(device), Some(_)) = (devices.get(local_rank as usize), devices.get(last)) {
        return Ok(device);
    }
    let help = match devices.iter().find(|device| gpu_usage(&device.bus).is_divided) {
        // The driver shows a process either one instance or whole GPUs.
        Some(Device { bus, .. }) => {
            format!("MIG divides GPU {bus}: a process sees one instance of it; use whole GPUs")
        }
        None => format!("lower trainer.numProcPerNode, or name the GPU of each rank in {VISIBLE}"),
    };
    Err(TrainError::NoGpu(format!(
        "rank {} of this node has no GPU, the driver shows {}{}; expected one for each rank: {help}",
        last + 1,
        devices.len(),
        visible_devices()
    )))
}

/// Device part of cache keys.
pub(super) fn cache_name(device: &Device) -> String {
    format!("{} {}", device.name, device.architecture())
}

/// The lowering target for a device, without cuDNN.
pub(super) fn target(device: &Device) -> Target {
    target_of(u32::try_from(device.multiprocessors).unwrap_or(1), device.shared_bytes)
}

/// The lowering target for a device that may be absent. `shared_bytes`: maximum per block.
pub(super) fn target_of(multiprocessors: u32, shared_bytes: u32) -> Target {
    Target {
        blocks: BLOCKS * multiprocessors.max(1),
        shared_bytes,
        cudnn: CudnnKinds::none(),
        epilogues: true,
        fp8: false,
        arithmetic: Arithmetic::Ieee,
    }
}

fn missing(error: Error) -> TrainError {
    let text = match &error {
        Error::NotFound { tried, .. } => {
            let tried: Vec<String> = tried.iter().map(|path| path.display().to_string()).collect();
            format!("{error}; looked for {}", tried.join(", "))
        }
        Error::NoDevice => format!("{error}{}", visible_devices()),
        _ => error.to_string(),
    };
    TrainError::NoGpu(text)
}

/// The environment's GPU selection, for error messages; it may name GPUs that do not exist.
fn visible_devices() -> String {
    // An empty value hides all GPUs, which differs from an unset variable.
    std::env::var(VISIBLE).map_or_else(|_| String::new(), |names| format!(" ({VISIBLE}={names})"))
}
