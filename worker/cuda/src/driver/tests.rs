use super::stream::{Copy2D, DEVICE_MEMORY, DISABLE_TIMING, EXTERNAL, NON_BLOCKING, NOT_READY, Side2D};
use super::{
    COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR, Functions, MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
    MULTIPROCESSOR_COUNT, NO_DEVICE, graph, module,
};
use std::io::Write;
use std::mem::offset_of;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The folder of `cuda.h`; `None` where nobody has fetched it. `cargo xtask test` requires it with `SWITCHYARD_TEST_CUDA_HEADER`, so that
/// no test can pass without it.
fn header() -> Option<PathBuf> {
    let above = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    let folder = above.map(|folder| folder.join("target/data/cuda-header")).find(|folder| folder.is_dir());
    let is_required = std::env::var_os("SWITCHYARD_TEST_CUDA_HEADER").is_some();
    assert!(folder.is_some() || !is_required, "target/data/cuda-header is missing, but cargo xtask asked for it");
    folder
}

/// What the compiler says of a C file with these conditions.
fn compiled(header: &Path, conditions: &[String], functions: &[&str]) -> (bool, String) {
    let asserts = conditions.iter().map(|condition| format!("_Static_assert({condition}, \"{condition}\");\n"));
    let functions = functions.iter().map(|name| format!("void *of_{name} = (void *)&{name};\n"));
    let text: String =
        ["#include <cuda.h>\n#include <stddef.h>\n".to_owned()].into_iter().chain(asserts).chain(functions).collect();
    let mut compiler = Command::new("cc");
    compiler.arg("-I").arg(header).args(["-fsyntax-only", "-x", "c", "-"]);
    let mut child = compiler.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// What the bindings say, in the words of the header.
fn conditions() -> Vec<String> {
    let numbers = [
        ("CUDA_ERROR_NO_DEVICE", NO_DEVICE),
        ("CUDA_ERROR_NOT_READY", NOT_READY),
        ("CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT", MULTIPROCESSOR_COUNT),
        ("CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR", COMPUTE_CAPABILITY_MAJOR),
        ("CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR", COMPUTE_CAPABILITY_MINOR),
        ("CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
        ("CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES", module::MAX_DYNAMIC_SHARED_SIZE_BYTES),
        ("CU_STREAM_NON_BLOCKING", NON_BLOCKING as i32),
        ("CU_EVENT_DISABLE_TIMING", DISABLE_TIMING as i32),
        ("CU_EVENT_RECORD_EXTERNAL", EXTERNAL as i32),
        ("CU_MEMORYTYPE_DEVICE", DEVICE_MEMORY as i32),
        ("CU_STREAM_CAPTURE_MODE_THREAD_LOCAL", graph::THREAD_LOCAL as i32),
        ("sizeof(CUDA_MEMCPY2D)", size_of::<Copy2D>() as i32),
    ];
    let copy = [
        ("src", "XInBytes", offset_of!(Copy2D, from) + offset_of!(Side2D, x_bytes)),
        ("src", "Y", offset_of!(Copy2D, from) + offset_of!(Side2D, y)),
        ("src", "MemoryType", offset_of!(Copy2D, from) + offset_of!(Side2D, kind)),
        ("src", "Host", offset_of!(Copy2D, from) + offset_of!(Side2D, host)),
        ("src", "Device", offset_of!(Copy2D, from) + offset_of!(Side2D, device)),
        ("src", "Array", offset_of!(Copy2D, from) + offset_of!(Side2D, array)),
        ("src", "Pitch", offset_of!(Copy2D, from) + offset_of!(Side2D, pitch)),
        ("dst", "XInBytes", offset_of!(Copy2D, to) + offset_of!(Side2D, x_bytes)),
        ("dst", "MemoryType", offset_of!(Copy2D, to) + offset_of!(Side2D, kind)),
        ("dst", "Device", offset_of!(Copy2D, to) + offset_of!(Side2D, device)),
        ("dst", "Pitch", offset_of!(Copy2D, to) + offset_of!(Side2D, pitch)),
        ("", "WidthInBytes", offset_of!(Copy2D, width_bytes)),
        ("", "Height", offset_of!(Copy2D, height)),
    ];
    let numbers = numbers.map(|(name, value)| format!("{name} == {value}"));
    let copy = copy.map(|(side, field, at)| format!("offsetof(CUDA_MEMCPY2D, {side}{field}) == {at}"));
    numbers.into_iter().chain(copy).collect()
}

#[test]
fn constants_layouts_and_names_are_those_of_the_header() {
    let Some(header) = header() else { return };
    let (is_good, text) = compiled(&header, &conditions(), Functions::NAMES);
    assert!(is_good, "{text}");
}

#[test]
fn a_planted_constant_or_name_is_found() {
    let Some(header) = header() else { return };
    let (is_good, text) = compiled(&header, &["CUDA_ERROR_NO_DEVICE == 101".to_owned()], &[]);
    assert!(!is_good && text.contains("CUDA_ERROR_NO_DEVICE == 101"), "{text}");
    let (is_good, text) = compiled(&header, &[], &["cuMemAlloc_v9"]);
    assert!(!is_good && text.contains("cuMemAlloc_v9"), "{text}");
}
