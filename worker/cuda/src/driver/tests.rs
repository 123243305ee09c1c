use super::stream::{Copy2D, DEVICE_MEMORY, DISABLE_TIMING, EXTERNAL, NON_BLOCKING, NOT_READY, Side2D};
use super::{
    COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR, Functions, MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
    MULTIPROCESSOR_COUNT, NO_DEVICE, graph, module,
};
use crate::header::{Header, fetched};
use std::mem::offset_of;
use std::path::PathBuf;

/// The directory of `cuda.h`.
fn header() -> [PathBuf; 1] {
    [fetched("cuda-header", "cargo xtask data cuda")]
}

fn compiled(folders: &[PathBuf], conditions: &[String], functions: &[&str]) -> (bool, String) {
    Header { name: "cuda.h", folders }.compiled(conditions, functions)
}

/// Our bindings as conditions on the header.
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
fn constants_layouts_and_names_match_the_header() {
    let header = header();
    let (is_good, text) = compiled(&header, &conditions(), Functions::NAMES);
    assert!(is_good, "{text}");
}

#[test]
fn a_wrong_constant_or_name_is_detected() {
    let header = header();
    let (is_good, text) = compiled(&header, &["CUDA_ERROR_NO_DEVICE == 101".to_owned()], &[]);
    assert!(!is_good && text.contains("CUDA_ERROR_NO_DEVICE == 101"), "{text}");
    let (is_good, text) = compiled(&header, &[], &["cuMemAlloc_v9"]);
    assert!(!is_good && text.contains("cuMemAlloc_v9"), "{text}");
}
