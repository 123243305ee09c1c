//! Opens NVIDIA's own libraries without a GPU. Only `cargo xtask test --gpu-libraries` fetches
//! them.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::Command;
use switchyard_cuda::cublaslt::CublasLt;
use switchyard_cuda::cudnn::Cudnn;
use switchyard_cuda::find::{CUBLASLT, CUDNN, Found, LibrarySpec, NCCL, NVRTC, Origin, Places, VARIABLE};
use switchyard_cuda::inventory;
use switchyard_cuda::nccl::Nccl;

/// Directories in `target/data`.
const LIBRARIES: [&str; 4] = ["gpu-cublas", "gpu-cudnn", "gpu-nccl", "nvrtc"];
/// Libraries in the worker's image (`xtask/src/images.rs`, and those that the worker itself links).
const IN_IMAGE: [&str; 9] = [
    "ld-linux-x86-64.so.2",
    "libc.so.6",
    "libdl.so.2",
    "libgcc_s.so.1",
    "libm.so.6",
    "libpthread.so.0",
    "librt.so.1",
    "libstdc++.so.6",
    "libz.so.1",
];

/// The library directories. A missing library cannot be opened.
fn folders() -> Vec<PathBuf> {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/data");
    LIBRARIES.iter().map(|name| data.join(name)).collect()
}

fn open(folders: &[PathBuf], wanted: &LibrarySpec) -> Found {
    let variable = std::env::join_paths(folders).unwrap();
    let places = Places::new(|name| (name == VARIABLE).then(|| variable.clone()), Path::new("/nowhere"), None);
    let found = places.open(wanted).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(found.origin, Origin::Variable);
    found
}

#[test]
#[ignore = "needs NVIDIA's libraries: cargo xtask test --gpu-libraries"]
fn all_functions_resolve_and_versions_are_readable() {
    let folders = folders();
    let cublaslt = open(&folders, &CUBLASLT);
    assert!(CublasLt::new(&cublaslt.library).is_ok());
    assert_eq!(inventory::cublaslt(&cublaslt).unwrap(), "13.1.0");
    let cudnn = open(&folders, &CUDNN);
    assert_eq!(inventory::cudnn(&cudnn).unwrap(), "9.19.0");
    assert_eq!(Cudnn::new(&cudnn.library).unwrap().cuda_major(), 13);
    let nccl = open(&folders, &NCCL);
    assert_eq!(inventory::nccl(&nccl).unwrap(), "2.28.9");
    let id = Nccl::new(&nccl.library).unwrap().unique_id();
    assert!(id.is_ok_and(|id| id.0.iter().any(|byte| *byte != 0)), "it needs no GPU");
    assert_eq!(inventory::nvrtc(&open(&folders, &NVRTC)).unwrap(), "13.0");
}

#[test]
#[ignore = "needs NVIDIA's libraries: cargo xtask test --gpu-libraries"]
fn the_worker_image_has_all_their_dependencies() {
    let folders = folders();
    let mut seen = 0;
    for file in folders.iter().flat_map(|folder| std::fs::read_dir(folder).unwrap()) {
        let file = file.unwrap().path();
        let name = file.file_name().unwrap().to_string_lossy().into_owned();
        let is_opened = ["libcublasLt.so", "libcudnn", "libnccl.so", "libnvrtc.so", "libnvrtc-builtins.so"];
        if !is_opened.iter().any(|start| name.starts_with(start)) {
            continue;
        }
        let output = Command::new("readelf").arg("-d").arg(&file).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let needed = text.lines().filter(|line| line.contains("(NEEDED)"));
        for needed in needed.filter_map(|line| line.split(['[', ']']).nth(1)) {
            // The parts of cuDNN are in the same directory.
            let is_beside = needed.starts_with("libcudnn") && file.with_file_name(needed).is_file();
            assert!(IN_IMAGE.contains(&needed) || is_beside, "{name} needs {needed}");
            seen += 1;
        }
    }
    assert!(seen > 12, "{seen} were read");
}
