//! A folder that `SWITCHYARD_CUDA_LIBRARIES` may name.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use switchyard_cuda::find::VARIABLE;
use switchyard_cuda_reference::compiler::cache;
use switchyard_cuda_reference::fetched;

/// As cargo calls it.
const LIBRARY: &str = "libswitchyard_cuda_libraries.so";
const NAMES: [&str; 7] = [
    "libcuda.so.1",
    "libcublasLt.so.13",
    "libcudnn.so.9",
    "libnvrtc.so.13",
    "libnccl.so.2",
    "libnvidia-ml.so.1",
    RECORDER,
];

/// The name for `NVTX_INJECTION64_PATH`: of a profiler that writes into the folder in [`RANGES`](crate::RANGES).
pub const RECORDER: &str = "libnvtx-recorder.so";

/// The library under the names of NVIDIA's, beside the program of the test, which depends on this package; that makes cargo build it.
///
/// # Panics
/// The library is not there, or the folder cannot be made.
pub fn folder() -> PathBuf {
    let program = std::env::current_exe().expect("the program of the test");
    let beside = program.ancestors().skip(1).take(2).flat_map(|folder| [folder.join("deps"), folder.to_path_buf()]);
    let library =
        beside.map(|folder| folder.join(LIBRARY)).find(|file| file.is_file()).expect("the library beside the test");
    let folder = library.with_file_name("switchyard-cuda-libraries");
    std::fs::create_dir_all(&folder).expect("a folder");
    for name in NAMES {
        // Several tests do this at the same time.
        match std::os::unix::fs::symlink(Path::new("..").join(LIBRARY), folder.join(name)) {
            Ok(()) => {}
            Err(error) => assert_eq!(error.kind(), ErrorKind::AlreadyExists, "{name}: {error}"),
        }
    }
    folder
}

/// The variables with which a program finds the libraries, and they find NVRTC.
///
/// # Panics
/// As [`folder`] and [`fetched`].
pub fn environment() -> Vec<(&'static str, OsString)> {
    let nvrtc = fetched("nvrtc");
    vec![
        (VARIABLE, folder().into()),
        ("SWITCHYARD_REFERENCE_NVRTC", nvrtc.into()),
        ("SWITCHYARD_REFERENCE_CACHE", cache().into()),
    ]
}
