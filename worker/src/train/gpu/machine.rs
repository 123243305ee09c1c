//! The GPUs of this machine, and the libraries that compute on them.

use super::users::in_use;
use crate::gpu::{CudnnKinds, Target};
use crate::process::variable;
use crate::train::TrainError;
use std::path::Path;
use switchyard_cuda::cublaslt::CublasLt;
use switchyard_cuda::cudnn::Cudnn;
use switchyard_cuda::driver::{Context, Device, Driver};
use switchyard_cuda::find::{CUBLASLT, CUDNN, DRIVER, LibrarySpec, NVRTC, Places, VARIABLE};
use switchyard_cuda::nvrtc::Nvrtc;
use switchyard_cuda::operation;
use switchyard_cuda::{Error, Library, version};

/// Names the GPUs that a process sees; the driver reads it.
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

/// Blocks of a launch for each multiprocessor: enough that the end of one block is hidden behind others.
const BLOCKS: u32 = 4;

/// What is found on this machine.
pub(super) struct Machine {
    driver: Driver,
    pub devices: Vec<Device>,
    pub nvrtc: Nvrtc,
    pub cublaslt: Library,
    /// The major version of CUDA of it.
    products: i32,
    places: Places,
}

/// A GPU, the compiler, and cuBLASLt.
pub(super) type Taken = (Context, Nvrtc, Library);

impl Machine {
    /// Opens the libraries and asks for the GPUs. None of them is used yet.
    ///
    /// # Errors
    /// A library or a GPU is missing.
    pub fn open() -> Result<Machine, TrainError> {
        let places = Places::new(|name| std::env::var_os(name), Path::new("/"), None);
        let library = |wanted: &LibrarySpec| places.open(wanted).map(|found| found.library).map_err(missing);
        let driver = Driver::new(&library(&DRIVER)?).map_err(missing)?;
        let (nvrtc, cublaslt) = (library(&NVRTC)?, library(&CUBLASLT)?);
        let devices = driver.devices().map_err(missing)?;
        let supported = driver.version().map_err(missing)? / 1000;
        let opened = Nvrtc::new(&nvrtc).map_err(missing)?;
        let (compiler, _) = opened.version().map_err(missing)?;
        let products = CublasLt::new(&cublaslt).map_err(missing)?.version() / 10_000;
        let products = i32::try_from(products).unwrap_or(i32::MAX);
        for (name, major, file) in [(NVRTC.name, compiler, &nvrtc.path), (CUBLASLT.name, products, &cublaslt.path)] {
            if major > supported {
                return Err(TrainError::NoGpu(format!(
                    "{name} in {} is of CUDA {major}, and the driver supports CUDA {supported}: expected a newer driver, or libraries of CUDA \
                     {supported} in a folder that {VARIABLE} names",
                    file.display()
                )));
            }
        }
        Ok(Machine { driver, devices, nvrtc: opened, cublaslt, products, places })
    }

    /// Takes a GPU: the only one that the environment names, else that of the rank's number on its node.
    ///
    /// # Errors
    /// There are fewer GPUs than ranks on the node, or the driver refuses.
    pub fn take(self, local_rank: u32) -> Result<Taken, TrainError> {
        let named = variable(VISIBLE).filter(|names| !names.contains(','));
        let index = if named.is_some() { 0 } else { local_rank as usize };
        let Some(device) = self.devices.get(index) else {
            let (rank, count) = (local_rank + 1, self.devices.len());
            let divided = self.devices.iter().find(|device| in_use(&device.bus).is_divided);
            let help = match divided {
                // The driver shows a process one instance, or whole GPUs.
                Some(Device { bus, .. }) => {
                    format!("MIG divides GPU {bus}: a process sees one instance of it; use whole GPUs")
                }
                None => format!("lower trainer.numProcPerNode, or name the GPU of each rank in {VISIBLE}"),
            };
            return Err(TrainError::NoGpu(format!(
                "rank {rank} of this node has no GPU, the driver shows {count}{}; expected one for each rank: {help}",
                choice()
            )));
        };
        // Another process may have it for itself.
        let context =
            self.driver.context(device).map_err(|error| TrainError::from(error).with_users_of(&device.bus))?;
        Ok((context, self.nvrtc, self.cublaslt))
    }

    /// cuDNN, which is opened after cuBLASLt: without it, it ends the process. It is not started.
    ///
    /// # Errors
    /// Why it cannot be used.
    pub fn cudnn(&self) -> Result<(Library, Cudnn), String> {
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
        let (major, expected) = (cudnn.cuda_major(), self.products);
        if i32::try_from(major) != Ok(expected) {
            let file = library.path.display();
            return Err(format!("cuDNN in {file} is for CUDA {major}, and cuBLASLt of CUDA {expected}"));
        }
        Ok((library, cudnn))
    }
}

/// What entries of the cache depend on.
pub(super) fn name_of(device: &Device) -> String {
    format!("{} {}", device.name, device.architecture())
}

/// What launches on a device without cuDNN are planned for.
pub(super) fn target(device: &Device) -> Target {
    target_of(u32::try_from(device.multiprocessors).unwrap_or(1), device.shared_bytes)
}

/// The same for a device that need not be there. `shared_bytes`: of a block, at most.
pub(super) fn target_of(multiprocessors: u32, shared_bytes: u32) -> Target {
    Target {
        blocks: BLOCKS * multiprocessors.max(1),
        shared_bytes,
        cudnn: CudnnKinds::none(),
        epilogues: true,
        fp8: false,
    }
}

fn missing(error: Error) -> TrainError {
    let text = match &error {
        Error::NotFound { tried, .. } => {
            let tried: Vec<String> = tried.iter().map(|path| path.display().to_string()).collect();
            format!("{error}; looked for {}", tried.join(", "))
        }
        Error::NoDevice => format!("{error}{}", choice()),
        _ => error.to_string(),
    };
    TrainError::NoGpu(text)
}

/// What the environment says of GPUs, where it says anything: it may name GPUs that are not there.
fn choice() -> String {
    // An empty text hides all of them, which is no way to say nothing.
    std::env::var(VISIBLE).map_or_else(|_| String::new(), |names| format!(" ({VISIBLE}={names})"))
}
