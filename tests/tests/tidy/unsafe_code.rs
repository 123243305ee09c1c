//! Files that may contain `unsafe`.

use crate::tidy::{RustFile, caught, members, metadata, none, read, rust_files};
use switchyard_tests::root;

/// Files with unsafe code and its purpose. A file that no longer needs any must be removed from the
/// list.
const LISTED: &[(&str, &str)] = &[
    ("node-agent/src/nvml_raw.rs", "NVML calls that its wrapper lacks"),
    ("node-agent/tests/nvml_reports/library.rs", "a library with NVML's C interface"),
    ("tests/clock/src/lib.rs", "a system call intercepted for programs under test"),
    ("tests/nvml-mock/src/device.rs", "functions with NVML's C interface"),
    ("tests/nvml-mock/src/events.rs", "functions with NVML's C interface"),
    ("tests/nvml-mock/src/links.rs", "functions with NVML's C interface"),
    ("tests/nvml-mock/src/memory.rs", "writes through callers' pointers"),
    ("tests/nvml-mock/src/system.rs", "functions with NVML's C interface"),
    ("worker/src/amp/weights.rs", "disjoint parts of a buffer for several threads"),
    ("worker/checkpoint/tests/hostile.rs", "a counting allocator"),
    ("worker/src/comm/engine.rs", "views of registered buckets"),
    ("worker/src/comm/fifo.rs", "streams in memory shared with other processes"),
    ("worker/src/comm/kernels.rs", "vector instructions for sums"),
    ("worker/src/comm/local.rs", "memory shared with other processes"),
    ("worker/src/comm/reducer.rs", "views of registered buckets"),
    ("worker/src/comm/shm.rs", "shared memory mappings"),
    ("worker/src/cpu/aligned.rs", "aligned allocation"),
    ("worker/src/cpu/attention.rs", "disjoint parts of a buffer for several threads"),
    ("worker/src/cpu/convolution.rs", "operands by address, with checked sizes"),
    ("worker/src/cpu/gemm/amx.rs", "the matrix unit, which has no stable intrinsics"),
    ("worker/src/cpu/gemm/block.rs", "parts of a product by address"),
    ("worker/src/cpu/gemm/kernel.rs", "tiles by address"),
    ("worker/src/cpu/gemm/kernel_x86.rs", "vector instructions"),
    ("worker/src/cpu/gemm/mod.rs", "disjoint parts of a buffer for several threads"),
    ("worker/src/cpu/gemm/operand.rs", "operands by address, read by several threads"),
    ("worker/src/cpu/gemm/pack.rs", "packing by address"),
    ("worker/src/cpu/gemm/pack_avx2.rs", "vector instructions"),
    ("worker/src/cpu/gemm/pack_avx512.rs", "vector instructions"),
    ("worker/src/cpu/gemm/panel.rs", "packing by address"),
    ("worker/src/cpu/gemm/tile.rs", "tiles by address"),
    ("worker/src/cpu/gemm/windows.rs", "packing by address"),
    ("worker/src/cpu/gemm/winograd/gradient.rs", "disjoint parts of a buffer for several threads"),
    ("worker/src/cpu/gemm/winograd/lanes.rs", "vector instructions"),
    ("worker/src/cpu/gemm/winograd/mod.rs", "tiles by address"),
    ("worker/src/cpu/gemm/winograd/transform.rs", "tiles by address"),
    ("worker/src/cpu/isa.rs", "functions compiled for an instruction set"),
    ("worker/src/cpu/ops/gather.rs", "disjoint parts of a buffer for several threads"),
    ("worker/src/cpu/ops/pieces.rs", "disjoint parts of a buffer for several threads"),
    ("worker/src/cpu/pool.rs", "work borrowed by persistent threads"),
    ("worker/cuda/src/cublaslt.rs", "cuBLASLt functions"),
    ("worker/cuda/src/cudnn.rs", "cuDNN functions"),
    ("worker/cuda/src/driver.rs", "CUDA driver functions"),
    ("worker/cuda/src/driver/graph.rs", "CUDA driver functions"),
    ("worker/cuda/src/driver/memory.rs", "CUDA driver functions"),
    ("worker/cuda/src/driver/module.rs", "CUDA driver functions"),
    ("worker/cuda/src/driver/pinned.rs", "host memory allocated by the CUDA driver"),
    ("worker/cuda/src/driver/stream.rs", "CUDA driver functions"),
    ("worker/cuda/src/library.rs", "opening NVIDIA libraries and looking up functions"),
    ("worker/cuda/src/nccl.rs", "NCCL functions"),
    ("worker/cuda/src/nvml.rs", "NVML functions"),
    ("worker/cuda/src/nvrtc.rs", "NVRTC functions"),
    ("worker/cuda/src/nvtx.rs", "tables that profilers fill with their functions"),
    ("worker/cuda/src/operation.rs", "cuDNN plans on checked memory"),
    ("worker/cuda-reference/libraries/src/abi/device.rs", "functions with the CUDA driver's C interface"),
    ("worker/cuda-reference/libraries/src/abi/graph.rs", "functions with the CUDA driver's C interface"),
    ("worker/cuda-reference/libraries/src/abi/memory.rs", "functions with the CUDA driver's C interface"),
    ("worker/cuda-reference/libraries/src/abi/mod.rs", "writes through a CUDA driver caller's pointers"),
    ("worker/cuda-reference/libraries/src/abi/module.rs", "functions with the CUDA driver's C interface"),
    ("worker/cuda-reference/libraries/src/abi/stream.rs", "functions with the CUDA driver's C interface"),
    ("worker/cuda-reference/libraries/src/blas/descriptors.rs", "functions with cuBLASLt's C interface"),
    ("worker/cuda-reference/libraries/src/blas/matmul.rs", "functions with cuBLASLt's C interface"),
    ("worker/cuda-reference/libraries/src/dnn/descriptors.rs", "functions with cuDNN's C interface"),
    ("worker/cuda-reference/libraries/src/dnn/execute.rs", "functions with cuDNN's C interface"),
    ("worker/cuda-reference/libraries/src/dnn/mod.rs", "functions with cuDNN's C interface"),
    ("worker/cuda-reference/libraries/src/dnn/plans.rs", "a call of one of these functions"),
    ("worker/cuda-reference/libraries/src/dnn/tests.rs", "calls of these functions"),
    ("worker/cuda-reference/libraries/src/blas/mod.rs", "functions with cuBLASLt's C interface"),
    ("worker/cuda-reference/libraries/src/finding.rs", "ending a process"),
    ("worker/cuda-reference/libraries/src/host.rs", "host memory of a copy, by address"),
    ("worker/cuda-reference/libraries/src/nccl.rs", "functions with NCCL's C interface"),
    ("worker/cuda-reference/libraries/src/nvml.rs", "functions with NVML's C interface"),
    ("worker/cuda-reference/libraries/src/nvrtc.rs", "functions with NVRTC's C interface"),
    ("worker/cuda-reference/libraries/src/nvtx.rs", "functions with NVTX's C interface"),
    ("worker/cuda-reference/libraries/src/gpu/run.rs", "copies from and to host memory"),
    ("worker/cuda-reference/libraries/tests/findings.rs", "driver calls that safe code cannot make"),
    ("worker/src/nn/arena.rs", "one allocation cut by a plan"),
    ("worker/src/nn/network.rs", "slices of the arena for one layer at a time"),
    ("worker/src/recorder/words.rs", "a mapped file of atomic words"),
    ("worker/src/optimizer/state.rs", "disjoint parts of a buffer for several threads"),
    ("worker/src/process.rs", "a C library function"),
    ("worker/src/train/memory.rs", "a C library function"),
    ("worker/src/cpu/values.rs", "addresses shared by threads"),
    ("worker/tests/data/memory.rs", "a counting allocator"),
    ("worker/tests/gpu_allocation.rs", "a counting allocator"),
    ("worker/tests/no_allocation.rs", "a counting allocator"),
];

fn check(RustFile { path: file, mentions, .. }: &RustFile) -> Vec<String> {
    let listed = LISTED.iter().any(|(known, _)| known == file);
    let mut lines = mentions.all.iter().filter(|mention| mention.path == ["unsafe"]).map(|mention| mention.line);
    match (listed, lines.next()) {
        (false, Some(line)) => {
            vec![format!("{file}:{line}: unsafe code in a file that is not listed in tests/tests/tidy/unsafe_code.rs")]
        }
        (true, None) => vec![format!("{file}: no unsafe code left: remove it from the list")],
        _ => Vec::new(),
    }
}

/// The root of a library or program must forbid unsafe code. It may only deny it if the package has
/// a listed module that allows it again.
fn check_root(file: &str, source: &str, package_has_unsafe: bool) -> Option<String> {
    let has = |level: &str| source.lines().any(|line| line == format!("#![{level}(unsafe_code)]"));
    match package_has_unsafe {
        _ if has("forbid") => None,
        true if has("deny") => None,
        true => Some(format!("{file}: expected #![deny(unsafe_code)] or #![forbid(unsafe_code)]")),
        false => Some(format!("{file}: expected #![forbid(unsafe_code)]")),
    }
}

#[test]
fn unsafe_code_is_in_listed_files_only() {
    let mut faults: Vec<String> = rust_files().iter().flat_map(check).collect();
    for (file, reason) in LISTED {
        assert!(!reason.is_empty());
        if !root().join(file).is_file() {
            faults.push(format!("{file}: is listed and does not exist"));
        }
    }
    none(&faults);
}

#[test]
fn every_crate_root_denies_unsafe_code() {
    let mut faults = Vec::new();
    for package in members(metadata()) {
        for target in package["targets"].as_array().into_iter().flatten() {
            let product = target["kind"].as_array().into_iter().flatten().any(|kind| kind == "lib" || kind == "bin");
            let path = target["src_path"].as_str().unwrap_or_default();
            let file = path.strip_prefix(&format!("{}/", root().display())).unwrap_or(path);
            let folder = file.rsplit_once('/').map_or("", |(folder, _)| folder);
            let has_unsafe = LISTED.iter().any(|(listed, _)| listed.starts_with(&format!("{folder}/")));
            if product && let Some(source) = read(file) {
                faults.extend(check_root(file, &source, has_unsafe));
            }
        }
    }
    none(&faults);
}

#[test]
fn unlisted_unsafe_code_is_caught() {
    let check = |file: &str, source: &str| check(&RustFile::new(file, source.into()));
    caught(&check("src/plan/mod.rs", "fn f() {\n unsafe { g() } }"), &["src/plan/mod.rs:2: unsafe code"]);
    none(&check("src/plan/mod.rs", "#![forbid(unsafe_code)] // unsafe\nfn f() { \"unsafe\"; }"));
    caught(&check(LISTED[0].0, "fn f() {}"), &["remove it from the list"]);
    assert!(check_root("x/lib.rs", "//! x\n#![deny(unsafe_code)]\n", true).is_none());
    assert!(
        check_root("x/lib.rs", "//! x\n#![deny(unsafe_code)]\n", false).is_some_and(|fault| fault.contains("forbid"))
    );
    assert!(check_root("x/lib.rs", "//! #![forbid(unsafe_code)]\n", true).is_some());
}
