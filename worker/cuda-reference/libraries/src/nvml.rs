//! `libnvidia-ml.so.1`: GPU health as reported by the driver, with the signatures and constants of
//! `nvml.h` 13.
//!
//! Lists the machine's GPUs, regardless of `CUDA_VISIBLE_DEVICES`. Events are injected as faults
//! and do not depend on time: an error is present once its launch has run.

use crate::abi;
use crate::fault::{self, Faults};
use crate::reported::{CHANGED, driver_events, seen};
use std::collections::BTreeSet;
use std::ffi::{CStr, c_char};
use std::sync::PoisonError;
use std::time::Duration;

/// `nvmlReturn_t`.
type Code = i32;
const SUCCESS: Code = 0;
const INVALID_ARGUMENT: Code = 2;
const NOT_SUPPORTED: Code = 3;
const NOT_FOUND: Code = 6;
const INSUFFICIENT_SIZE: Code = 7;
const TIMEOUT: Code = 10;

const XID: u64 = 8;
/// Lanes supported by the link.
const LANES: u32 = 16;

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlUtilization_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Utilization {
    gpu: u32,
    memory: u32,
}

/// `nvmlProcessInfo_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Process {
    pid: u32,
    used: u64,
    instances: [u32; 2],
}

/// `nvmlEventData_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct EventData {
    device: usize,
    kind: u64,
    data: u64,
    instances: [u32; 2],
}

fn faults() -> Faults {
    fault::requested().unwrap_or_default()
}

/// # Safety
/// `to` must be null or valid for writes.
unsafe fn store<T>(to: *mut T, value: T) -> Code {
    // SAFETY: upheld by the caller.
    unsafe { abi::store(to, value) }.map_or(INVALID_ARGUMENT, |()| SUCCESS)
}

/// # Safety
/// `room` bytes at `to` must be writable.
unsafe fn store_text(to: *mut c_char, room: u32, text: &CStr) -> Code {
    let bytes = text.to_bytes_with_nul();
    if to.is_null() || bytes.len() > room as usize {
        return INSUFFICIENT_SIZE;
    }
    // SAFETY: upheld by the caller; the length was checked.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr().cast(), to, bytes.len()) };
    SUCCESS
}

/// The GPU of a handle, which is its number from 1.
fn gpu(handle: usize) -> Option<usize> {
    handle.checked_sub(1).filter(|gpu| *gpu < abi::count().unwrap_or(0))
}

/// # Safety
/// `to` must be null or valid for writes.
unsafe fn store_of<T>(handle: usize, to: *mut T, value: impl FnOnce(usize) -> T) -> Code {
    // SAFETY: upheld by the caller.
    gpu(handle).map_or(INVALID_ARGUMENT, |gpu| unsafe { store(to, value(gpu)) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlInit_v2() -> Code {
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlErrorString(code: Code) -> *const c_char {
    let text = match code {
        SUCCESS => c"The operation was successful",
        INVALID_ARGUMENT => c"Invalid Argument",
        NOT_SUPPORTED => c"Not Supported",
        NOT_FOUND => c"Not Found",
        INSUFFICIENT_SIZE => c"Insufficient Size",
        TIMEOUT => c"Timeout",
        _ => c"Unknown Error",
    };
    text.as_ptr()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlSystemGetDriverVersion(to: *mut c_char, room: u32) -> Code {
    // SAFETY: per the header's contract.
    unsafe { store_text(to, room, c"580.65.06") }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlSystemGetProcessName(pid: u32, to: *mut c_char, room: u32) -> Code {
    match faults().process {
        // SAFETY: per the header's contract.
        Some((known, _)) if known == u64::from(pid) => unsafe { store_text(to, room, c"python3") },
        _ => NOT_FOUND,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByPciBusId_v2(bus: *const c_char, to: *mut usize) -> Code {
    if bus.is_null() {
        return INVALID_ARGUMENT;
    }
    // SAFETY: per the header's contract.
    let bus = unsafe { CStr::from_ptr(bus) }.to_string_lossy().into_owned();
    match (0..abi::count().unwrap_or(0)).find(|gpu| abi::bus(*gpu) == bus) {
        // SAFETY: per the header's contract.
        Some(gpu) => unsafe { store(to, gpu + 1) },
        None => NOT_FOUND,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMemoryInfo(handle: usize, to: *mut Memory) -> Code {
    // SAFETY: per the header's contract.
    unsafe {
        store_of(handle, to, |gpu| {
            let (free, total) = abi::memory_of(gpu);
            Memory { total, free, used: total - free }
        })
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetComputeRunningProcesses_v3(
    handle: usize,
    count: *mut u32,
    to: *mut Process,
) -> Code {
    if gpu(handle).is_none() || count.is_null() {
        return INVALID_ARGUMENT;
    }
    let found = faults().process;
    // SAFETY: per the header's contract.
    let room = unsafe { count.replace(u32::from(found.is_some())) };
    match found {
        None => SUCCESS,
        Some(_) if room == 0 => INSUFFICIENT_SIZE,
        // SAFETY: as the header says; there is room for one.
        Some((pid, mebibytes)) => unsafe {
            store(to, Process { pid: pid as u32, used: mebibytes << 20, instances: [u32::MAX; 2] })
        },
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCurrentClocksThrottleReasons(handle: usize, to: *mut u64) -> Code {
    // SAFETY: per the header's contract.
    unsafe { store_of(handle, to, |_| faults().slowed.unwrap_or(0)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetTemperature(handle: usize, _sensor: i32, to: *mut u32) -> Code {
    // SAFETY: per the header's contract.
    unsafe { store_of(handle, to, |_| faults().celsius.unwrap_or(40) as u32) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetUtilizationRates(handle: usize, to: *mut Utilization) -> Code {
    let faults = faults();
    if faults.mig {
        return NOT_SUPPORTED;
    }
    let busy = Utilization { gpu: faults.utilization.unwrap_or(97) as u32, memory: 0 };
    // SAFETY: per the header's contract.
    unsafe { store_of(handle, to, |_| busy) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetTotalEccErrors(handle: usize, kind: i32, _counter: i32, to: *mut u64) -> Code {
    // Errors from before this program, which must not be attributed to it.
    const BEFORE: u64 = 5;
    // SAFETY: per the header's contract.
    unsafe { store_of(handle, to, |gpu| BEFORE + u64::from(kind == 1 && driver_events().broken.contains(&gpu))) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCurrPcieLinkWidth(handle: usize, to: *mut u32) -> Code {
    // SAFETY: per the header's contract.
    unsafe { store_of(handle, to, |_| faults().lanes.map_or(LANES, |lanes| lanes as u32)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMaxPcieLinkWidth(handle: usize, to: *mut u32) -> Code {
    // SAFETY: per the header's contract.
    unsafe { store_of(handle, to, |_| LANES) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMigMode(handle: usize, now: *mut u32, later: *mut u32) -> Code {
    let mode = u32::from(faults().mig);
    // SAFETY: per the header's contract.
    unsafe { store_of(handle, now, |_| mode).max(store_of(handle, later, |_| mode)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetSupportedEventTypes(handle: usize, to: *mut u64) -> Code {
    // SAFETY: per the header's contract.
    unsafe { store_of(handle, to, |_| XID) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlEventSetCreate(to: *mut usize) -> Code {
    let mut events = driver_events();
    let seen = events.xids.len();
    events.sets.push(Some((BTreeSet::new(), seen)));
    // SAFETY: per the header's contract.
    unsafe { store(to, events.sets.len()) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceRegisterEvents(handle: usize, kinds: u64, set: usize) -> Code {
    let mut events = driver_events();
    let found = set.checked_sub(1).and_then(|index| events.sets.get_mut(index)?.as_mut());
    match (found, gpu(handle)) {
        (Some((gpus, _)), Some(gpu)) if kinds == XID => {
            gpus.insert(gpu);
            SUCCESS
        }
        _ => INVALID_ARGUMENT,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlEventSetWait_v2(set: usize, to: *mut EventData, milliseconds: u32) -> Code {
    let time = Duration::from_millis(milliseconds.into());
    let waiting = CHANGED.wait_timeout_while(driver_events(), time, |events| events.xids.len() == seen(events, set));
    let (mut events, _) = waiting.unwrap_or_else(PoisonError::into_inner);
    match events.next(set) {
        None => INVALID_ARGUMENT,
        Some(None) => TIMEOUT,
        // SAFETY: per the header's contract.
        Some(Some((gpu, data))) => unsafe {
            store(to, EventData { device: gpu + 1, kind: XID, data, instances: [u32::MAX; 2] })
        },
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlEventSetFree(set: usize) -> Code {
    let mut events = driver_events();
    let found = set.checked_sub(1).and_then(|index| events.sets.get_mut(index)?.take());
    found.map_or(INVALID_ARGUMENT, |_| SUCCESS)
}
