//! A tiny NVML of one scene, compiled by `nvml.rs` into a shared library. What it does not have, it does not have:
//! a missing symbol is what an old driver looks like.
//!
//! GPU 0 and 1: two NVLinks to each other (20000 MB/s each) and one that is down. GPU 2 and 3: 18 and 17 NVLinks to a
//! switch, of which the speed of GPU 3's is not known. GPU 4: lost.
#![crate_type = "cdylib"]
#![allow(non_snake_case)]

use std::os::raw::{c_char, c_int, c_longlong, c_uint, c_ulonglong};

const SUCCESS: c_uint = 0;
const INVALID: c_uint = 2;
const NOT_SUPPORTED: c_uint = 3;
const LOST: c_uint = 15;
const BUS_IDS: [&str; 4] = ["00000000:1B:00.0", "00000000:43:00.0", "00000000:9B:00.0", "00000000:C3:00.0"];

unsafe fn put(text: &str, to: *mut c_char) {
    for (index, byte) in text.bytes().chain([0]).enumerate() {
        unsafe { *to.add(index) = byte as c_char };
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInit_v2() -> c_uint {
    SUCCESS
}

#[cfg(not(no_shutdown))]
#[unsafe(no_mangle)]
pub extern "C" fn nvmlShutdown() -> c_uint {
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlSystemGetDriverVersion(to: *mut c_char, _length: c_uint) -> c_uint {
    unsafe { put("580.82.07", to) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCount_v2(count: *mut c_uint) -> c_uint {
    unsafe { *count = 5 };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, device: *mut usize) -> c_uint {
    if index == 4 {
        return LOST;
    }
    unsafe { *device = index as usize + 1 };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetUUID(device: usize, to: *mut c_char, _length: c_uint) -> c_uint {
    unsafe { put(&format!("GPU-0000000{device}-1111-2222-3333-444444444444"), to) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetName(_device: usize, to: *mut c_char, _length: c_uint) -> c_uint {
    unsafe { put("NVIDIA H100 80GB HBM3", to) };
    SUCCESS
}

#[repr(C)]
pub struct PciInfo {
    legacy: [c_char; 16],
    numbers: [c_uint; 5],
    bus_id: [c_char; 32],
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetPciInfo_v3(device: usize, info: *mut PciInfo) -> c_uint {
    unsafe { put(BUS_IDS[device - 1], (&raw mut (*info).bus_id).cast()) };
    SUCCESS
}

#[repr(C)]
pub struct Memory {
    version: c_uint,
    total: c_ulonglong,
    rest: [c_ulonglong; 3],
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMemoryInfo_v2(_device: usize, memory: *mut Memory) -> c_uint {
    unsafe { (*memory).total = 80 << 30 };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMigMode(device: usize, now: *mut c_uint, later: *mut c_uint) -> c_uint {
    unsafe {
        *now = u32::from(device == 2);
        *later = *now;
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetNvLinkState(device: usize, link: c_uint, active: *mut c_uint) -> c_uint {
    let (present, up) = match device {
        1 | 2 => (link < 3, link < 2),
        3 => (link < 18, true),
        _ => (link < 18, link != 11),
    };
    unsafe { *active = u32::from(up) };
    if present { SUCCESS } else { INVALID }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetNvLinkRemoteDeviceType(
    device: usize,
    _link: c_uint,
    kind: *mut c_uint,
) -> c_uint {
    unsafe { *kind = if device <= 2 { 0 } else { 2 } };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetNvLinkRemotePciInfo_v2(
    device: usize,
    _link: c_uint,
    info: *mut PciInfo,
) -> c_uint {
    unsafe { put(BUS_IDS[2 - device], (&raw mut (*info).bus_id).cast()) };
    SUCCESS
}

#[repr(C)]
pub struct FieldValue {
    field: c_uint,
    scope: c_uint,
    timestamp: c_longlong,
    latency: c_longlong,
    kind: c_uint,
    code: c_uint,
    value: c_ulonglong,
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetFieldValues(device: usize, count: c_int, values: *mut FieldValue) -> c_uint {
    if count != 1 {
        return INVALID;
    }
    let value = unsafe { &mut *values };
    value.kind = 1;
    value.code = SUCCESS;
    match (value.field, device) {
        // Links of one GPU differ, so that a caller who forgets the scope is found out.
        (164, 1 | 2) => value.value = 20_000 + c_ulonglong::from(value.scope) * 1000,
        (164, 3) => value.value = 26_562,
        (230, 3) => value.value = 2,
        (230, 1) => value.value = 0,
        _ => value.code = NOT_SUPPORTED,
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetTopologyCommonAncestor(a: usize, b: usize, level: *mut c_uint) -> c_uint {
    unsafe { *level = if a + b == 3 { 20 } else { 50 } };
    SUCCESS
}
