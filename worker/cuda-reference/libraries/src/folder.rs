//! A folder for `SWITCHYARD_CUDA_LIBRARIES`.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use switchyard_cuda::find::VARIABLE;
use switchyard_cuda_reference::compiler::cache;
use switchyard_cuda_reference::fetched;

/// File name chosen by cargo.
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

/// Name for `NVTX_INJECTION64_PATH`: a profiler that writes into the folder in
/// [`RANGES`](crate::RANGES).
pub const RECORDER: &str = "libnvtx-recorder.so";

/// Links this library under NVIDIA's file names, next to the test program, which depends on this
/// package and so makes cargo build it.
///
/// # Panics
/// If the library is missing, or the folder cannot be created.
pub fn folder() -> PathBuf {
    let program = std::env::current_exe().expect("the program of the test");
    let candidates = program.ancestors().skip(1).take(2).flat_map(|folder| [folder.join("deps"), folder.to_path_buf()]);
    let library = candidates
        .map(|folder| folder.join(LIBRARY))
        .find(|file| file.is_file())
        .expect("the library next to the test");
    let folder = library.with_file_name("switchyard-cuda-libraries");
    std::fs::create_dir_all(&folder).expect("a folder");
    for name in NAMES {
        // Several tests may do this concurrently.
        match std::os::unix::fs::symlink(Path::new("..").join(LIBRARY), folder.join(name)) {
            Ok(()) => {}
            Err(error) => assert_eq!(error.kind(), ErrorKind::AlreadyExists, "{name}: {error}"),
        }
    }
    folder
}

/// Environment that makes a program use these libraries, and them use NVRTC.
///
/// # Panics
/// As for [`folder`] and [`fetched`].
pub fn environment() -> Vec<(&'static str, OsString)> {
    let nvrtc = fetched("nvrtc");
    vec![
        (VARIABLE, folder().into()),
        ("SWITCHYARD_REFERENCE_NVRTC", nvrtc.into()),
        ("SWITCHYARD_REFERENCE_CACHE", cache().into()),
    ]
}
