//! A minimal NVML whose GPUs count errors and send events, compiled by the tests into a shared
//! library.
//!
//! GPU 0 has two NVLinks to GPU 1, which has one back. Each counter's value is derived from its
//! number; GPU 1 has no ECC. Events: XID 79 on GPU 0, a recovery action on GPU 1, a timeout, and
//! then the driver disappears.
#![crate_type = "cdylib"]
#![allow(non_snake_case)]

use std::os::raw::{c_char, c_uint, c_ulonglong};
use std::sync::atomic::{AtomicU32, Ordering};

const SUCCESS: c_uint = 0;
const INVALID: c_uint = 2;
const NOT_SUPPORTED: c_uint = 3;
const TIMEOUT: c_uint = 10;
const LOST: c_uint = 15;
const BUS_IDS: [&str; 2] = ["00000000:1B:00.0", "00000000:43:00.0"];
const XID: c_ulonglong = 8;
const RECOVERY: c_ulonglong = 0x8000;

unsafe fn put(text: &str, to: *mut c_char) {
    for (index, byte) in text.bytes().chain([0]).enumerate() {
        unsafe { *to.add(index) = byte as c_char };
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInit_v2() -> c_uint {
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlShutdown() -> c_uint {
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCount_v2(count: *mut c_uint) -> c_uint {
    unsafe { *count = 2 };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, device: *mut usize) -> c_uint {
    unsafe { *device = index as usize + 1 };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetUUID(device: usize, to: *mut c_char, _length: c_uint) -> c_uint {
    unsafe { put(&format!("GPU-{device}"), to) };
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

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetTotalEccErrors(
    device: usize,
    kind: c_uint,
    _counter: c_uint,
    errors: *mut c_ulonglong,
) -> c_uint {
    unsafe { *errors = c_ulonglong::from(kind) + 3 };
    if device == 1 { SUCCESS } else { NOT_SUPPORTED }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetPcieReplayCounter(device: usize, replays: *mut c_uint) -> c_uint {
    unsafe { *replays = device as c_uint };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetNvLinkState(device: usize, link: c_uint, active: *mut c_uint) -> c_uint {
    unsafe { *active = u32::from(device == 1 || link == 0) };
    if link < 2 { SUCCESS } else { INVALID }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetNvLinkRemoteDeviceType(
    _device: usize,
    _link: c_uint,
    kind: *mut c_uint,
) -> c_uint {
    unsafe { *kind = 0 };
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

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetNvLinkErrorCounter(
    _device: usize,
    link: c_uint,
    kind: c_uint,
    errors: *mut c_ulonglong,
) -> c_uint {
    unsafe { *errors = c_ulonglong::from(10 * kind + link) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlEventSetCreate(set: *mut usize) -> c_uint {
    unsafe { *set = 1 };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlEventSetFree(_set: usize) -> c_uint {
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetSupportedEventTypes(device: usize, types: *mut c_ulonglong) -> c_uint {
    unsafe { *types = if device == 1 { XID } else { XID | RECOVERY | 1 } };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceRegisterEvents(device: usize, types: c_ulonglong, _set: usize) -> c_uint {
    // Only the events that are both wanted and supported.
    if types == if device == 1 { XID } else { XID | RECOVERY } { SUCCESS } else { INVALID }
}

#[repr(C)]
pub struct EventData {
    device: usize,
    kind: c_ulonglong,
    data: c_ulonglong,
    instances: [c_uint; 2],
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlEventSetWait_v2(_set: usize, event: *mut EventData, _milliseconds: c_uint) -> c_uint {
    static WAITS: AtomicU32 = AtomicU32::new(0);
    let event = unsafe { &mut *event };
    match WAITS.fetch_add(1, Ordering::SeqCst) {
        0 => (event.device, event.kind, event.data) = (1, XID, 79),
        1 => (event.device, event.kind) = (2, RECOVERY),
        2 => return TIMEOUT,
        _ => return LOST,
    }
    SUCCESS
}
