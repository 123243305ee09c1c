//! The two NVML calls that nvml-wrapper 0.13 gets wrong, made directly. The only unsafe code of this crate.
//!
//! * `NvLink::remote_device_type` hands NVML a temporary and returns `Unknown` whatever the answer is.
//! * `Device::field_values_for` cannot set `scopeId`, so it asks for link 0 always.

use nvml_wrapper::{Device, Nvml};

/// What is at the other end of an NVLink.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Remote {
    /// Another GPU.
    Gpu,
    /// An NVSwitch.
    Switch,
    /// A processor, or something newer.
    Other,
}

/// `NVML_FI_DEV_NVLINK_GET_SPEED`: speed of the link in `scopeId`, MB/s. Outside of the range that drivers renumber.
const FIELD_NVLINK_SPEED: u32 = 164;

/// What is at the other end of a link. `None`: the driver does not tell.
pub(crate) fn remote_device_type(nvml: &Nvml, device: &Device<'_>, link: u32) -> Option<Remote> {
    let call = nvml.lib().nvmlDeviceGetNvLinkRemoteDeviceType.as_ref().ok()?;
    let mut kind = u32::MAX;
    // SAFETY: `call` is the symbol of the loaded library with the signature of NVML's header. The handle is valid while
    // `device` borrows an initialised `Nvml`. NVML writes one C enum (32 bits) through the pointer, which points to a
    // live `u32`, and keeps no pointer after it returns.
    let code = unsafe { call(device.handle(), link, &raw mut kind) };
    (code == 0).then_some(match kind {
        0 => Remote::Gpu,
        2 => Remote::Switch,
        _ => Remote::Other,
    })
}

/// Speed of one link in one direction, MB/s. `None`: the driver does not tell.
pub(crate) fn link_speed(nvml: &Nvml, device: &Device<'_>, link: u32) -> Option<u64> {
    let call = nvml.lib().nvmlDeviceGetFieldValues.as_ref().ok()?;
    let read = |pointer| {
        // SAFETY: as above; NVML reads and writes exactly one element of the array that starts at `pointer`.
        unsafe { call(device.handle(), 1, pointer) }
    };
    // SAFETY: the structure consists of integers, a C enum kept as integer, and a union of numbers: all zero is a value
    // of each of them.
    let mut value = unsafe { zeroed_for(&read) };
    value.fieldId = FIELD_NVLINK_SPEED;
    value.scopeId = link;
    if read(&raw mut value) != 0 || value.nvmlReturn != 0 {
        return None;
    }
    // SAFETY: every member of the union is a plain number and the whole union was initialised, so every view of it is
    // valid; which one holds the answer is said by `valueType`.
    let speed = unsafe {
        match value.valueType {
            1 => u64::from(value.value.uiVal),
            2 => value.value.ulVal,
            3 => value.value.ullVal,
            _ => return None,
        }
    };
    (speed > 0).then_some(speed)
}

/// An all-zero value of the type that `call` takes a pointer to: nvml-wrapper does not export its name.
///
/// # Safety
/// All zero must be a value of `T`.
unsafe fn zeroed_for<T>(_call: &impl Fn(*mut T) -> u32) -> T {
    // SAFETY: promised by the caller.
    unsafe { std::mem::zeroed() }
}
