//! What connects GPUs, and values by field.

use crate::device::pci_info;
use crate::memory::{Answer, Code, INVALID_ARGUMENT, NOT_SUPPORTED, Out, SUCCESS};
use crate::session::{Handle, with, with_gpu};
use nvml_wrapper_sys::bindings::{nvmlFieldValue_t, nvmlPciInfo_t, nvmlValue_t};
use std::ffi::{c_int, c_uint};
use switchyard_scenes::LinkEnd;

/// `NVML_FI_DEV_NVLINK_GET_SPEED`.
const FIELD_NVLINK_SPEED: c_uint = 164;
/// `NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`.
const FIELD_RECOVERY_ACTION: c_uint = 230;
/// `NVML_VALUE_TYPE_UNSIGNED_INT`.
const UNSIGNED_INT: c_uint = 1;

/// The end of a link, and whether the link is up.
fn link(device: Handle, number: c_uint) -> Answer<(LinkEnd, bool)> {
    with_gpu(device, |session, gpu| {
        let links = session.machine.links(gpu.index, &session.failures);
        links.get(number as usize).copied().ok_or(if links.is_empty() { NOT_SUPPORTED } else { INVALID_ARGUMENT })
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetNvLinkState(device: Handle, number: c_uint, to: Out<c_uint>) -> Code {
    to.put(link(device, number).map(|(_, up)| c_uint::from(up)))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetNvLinkRemoteDeviceType(device: Handle, number: c_uint, to: Out<c_uint>) -> Code {
    to.put(link(device, number).map(|(end, _)| if end == LinkEnd::Switch { 2 } else { 0 }))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetNvLinkRemotePciInfo_v2(device: Handle, number: c_uint, to: Out<nvmlPciInfo_t>) -> Code {
    to.put(link(device, number).and_then(|(end, _)| {
        let LinkEnd::Gpu(other) = end else { return Err(NOT_SUPPORTED) };
        with(|session| pci_info(&session.machine.gpus[other as usize].path).ok_or(NOT_SUPPORTED))
    }))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetFieldValues(device: Handle, count: c_int, values: Out<nvmlFieldValue_t>) -> Code {
    // As many as the agent asks for at once.
    if count != 1 {
        return INVALID_ARGUMENT;
    }
    values.update(|value| {
        let answer = match value.fieldId {
            FIELD_NVLINK_SPEED => link(device, value.scopeId).and_then(|_| {
                with_gpu(device, |_, gpu| gpu.kind.link_speed.map(|speed| speed as c_uint).ok_or(NOT_SUPPORTED))
            }),
            FIELD_RECOVERY_ACTION => {
                with_gpu(device, |session, gpu| Ok(session.failures.recovery.get(&gpu.index).copied().unwrap_or(0)))
            }
            _ => Err(NOT_SUPPORTED),
        };
        value.valueType = UNSIGNED_INT;
        value.value = nvmlValue_t { ullVal: answer.unwrap_or(0).into() };
        value.nvmlReturn = answer.err().unwrap_or(SUCCESS);
        SUCCESS
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetTopologyCommonAncestor(a: Handle, b: Handle, to: Out<c_uint>) -> Code {
    to.put(with(|session| {
        let (one, other) = (session.gpu(a)?, session.gpu(b)?);
        Ok(session.machine.ancestor(one.index, other.index, &session.failures) as c_uint)
    }))
}
