//! Devices and contexts.

use super::{CURRENT, Machine, Pointer, done, machine, store, with};
use crate::code::{CallResult, Code, DEVICE_UNAVAILABLE, INVALID_DEVICE, INVALID_VALUE};
use crate::gpu::Gpu;
use std::ffi::c_char;
use std::sync::{MutexGuard, PoisonError};

const NAME: &[u8] = b"Switchyard reference GPU\0";
/// CUDA 13.0.
const VERSION: i32 = 13_000;

/// Attributes of an H200, by `CUdevice_attribute` number.
const ATTRIBUTES: [(i32, i32); 12] = [
    (1, 1024),        // threads of a block
    (8, 49_152),      // shared memory of a block
    (10, 32),         // lanes of a warp
    (16, 132),        // multiprocessors
    (38, 62_914_560), // bytes of L2
    (39, 2048),       // threads of a multiprocessor
    (41, 1),          // unified addresses
    (75, 9),          // compute capability
    (76, 0),
    (81, 233_472), // shared memory of a multiprocessor
    (83, 1),       // managed memory
    (97, 232_448), // shared memory of a block on request
];

fn gpu(device: i32) -> CallResult<MutexGuard<'static, Gpu>> {
    let gpu = usize::try_from(device).ok().and_then(|index| machine().ok()?.gpus.get(index)).ok_or(INVALID_DEVICE)?;
    Ok(gpu.lock().unwrap_or_else(PoisonError::into_inner))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuInit(flags: u32) -> i32 {
    done(if flags == 0 { Machine::start() } else { Err(INVALID_VALUE) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(version: *mut i32) -> i32 {
    let asked = crate::fault::requested().unwrap_or_default().driver_version;
    // SAFETY: per the header's contract.
    done(unsafe { store(version, asked.map_or(VERSION, |version| version as i32)) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut i32) -> i32 {
    // SAFETY: per the header's contract.
    done(machine().and_then(|machine| unsafe { store(count, machine.gpus.len() as i32) }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(device: *mut i32, ordinal: i32) -> i32 {
    // SAFETY: per the header's contract.
    done(gpu(ordinal).and_then(|_| unsafe { store(device, ordinal) }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, length: i32, device: i32) -> i32 {
    // SAFETY: per the header's contract.
    done(gpu(device).and_then(|_| unsafe { store_text(name, length, NAME) }))
}

/// Stores a zero-terminated string, truncated to fit.
///
/// # Safety
/// `length` bytes at `to` must be writable.
unsafe fn store_text(to: *mut c_char, length: i32, text: &[u8]) -> CallResult<()> {
    let Ok(length @ 1..) = usize::try_from(length) else { return Err(INVALID_VALUE) };
    for (index, byte) in text.iter().take(length).enumerate() {
        let byte = if index + 1 == length { 0 } else { *byte };
        // SAFETY: upheld by the caller.
        unsafe { to.add(index).write(byte as c_char) };
    }
    Ok(())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetPCIBusId(id: *mut c_char, length: i32, device: i32) -> i32 {
    done(gpu(device).and_then(|_| {
        let ordinal = usize::try_from(device).ok().and_then(|index| machine().ok()?.ordinals.get(index).copied());
        let text = super::bus(ordinal.ok_or(INVALID_DEVICE)?) + "\0";
        // SAFETY: per the header's contract.
        unsafe { store_text(id, length, text.as_bytes()) }
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, device: i32) -> i32 {
    // SAFETY: per the header's contract.
    done(gpu(device).and_then(|gpu| unsafe { store(bytes, gpu.memory().1 as usize) }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetAttribute(value: *mut i32, attribute: i32, device: i32) -> i32 {
    if let Err(code) = gpu(device) {
        return done(Err(code));
    }
    let asked = crate::fault::requested().unwrap_or_default().capability.map(|number| number as i32);
    let known = match (attribute, asked) {
        (75, Some(asked)) => Some(asked / 10),
        (76, Some(asked)) => Some(asked % 10),
        _ => ATTRIBUTES.iter().find(|(number, _)| *number == attribute).map(|(_, known)| *known),
    };
    // SAFETY: per the header's contract.
    done(known.ok_or(INVALID_VALUE).and_then(|known| unsafe { store(value, known) }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut Pointer, device: i32) -> i32 {
    if machine().is_ok_and(|machine| machine.is_busy) {
        return done(Err(DEVICE_UNAVAILABLE));
    }
    let raw = std::ptr::without_provenance_mut(device as usize + 1);
    // SAFETY: per the header's contract.
    done(gpu(device).and_then(|mut gpu| unsafe {
        gpu.retain();
        store(context, raw)
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxSetCurrent(context: Pointer) -> i32 {
    CURRENT.set(context.addr());
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxSynchronize() -> i32 {
    done(with(|gpu| {
        let all = gpu.queue.all();
        gpu.synchronize(&all)
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(code: i32, text: *mut *const c_char) -> i32 {
    let known = Code(code).text();
    // SAFETY: per the header's contract.
    let stored = unsafe { store(text, known.map_or(std::ptr::null(), std::ffi::CStr::as_ptr)) };
    done(stored.and(known.map(|_| ()).ok_or(INVALID_VALUE)))
}
