//! Direct calls of NVML functions that nvml-wrapper 0.13 lacks or gets wrong. The only unsafe code
//! of this crate.
//!
//! * `NvLink::remote_device_type` passes NVML a temporary and always returns `Unknown`.
//! * `Device::field_values_for` cannot set `scopeId`, so it always queries link 0.
//! * It lacks the calls for the fabric and for remapped rows.

use crate::fabric::FabricInfo;
use nvml_wrapper::{Device, Nvml};
use nvml_wrapper_sys::bindings::{nvmlFieldValue_t, nvmlGpuFabricInfo_v3_t};
use switchyard_crds::gpu_topology::RowRemapping;

/// The remote end of an NVLink.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Remote {
    Gpu,
    Switch,
    /// A processor, or a newer kind of device.
    Other,
}

/// `NVML_FI_DEV_NVLINK_GET_SPEED`: speed of the link in `scopeId`, MB/s. Outside the range that
/// drivers renumber.
const FIELD_NVLINK_SPEED: u32 = 164;
/// Size of `nvmlGpuFabricInfo_v2_t`, a prefix of version 3, with the version number in the upper
/// bits.
const FABRIC_VERSION_2: u32 = 36 | 2 << 24;
const FABRIC_VERSION_3: u32 = 40 | 3 << 24;

/// The remote end of a link. `None` if the driver does not report it.
pub(crate) fn remote_device_type(nvml: &Nvml, device: &Device<'_>, link: u32) -> Option<Remote> {
    let call = nvml.lib().nvmlDeviceGetNvLinkRemoteDeviceType.as_ref().ok()?;
    let mut kind = u32::MAX;
    // SAFETY: `call` is the symbol of the loaded library with the signature of NVML's header. The
    // handle is valid while `device` borrows an initialised `Nvml`. NVML writes one C enum (32
    // bits) through the pointer, which points to a live `u32`, and keeps no pointer after it
    // returns.
    let code = unsafe { call(device.handle(), link, &raw mut kind) };
    (code == 0).then_some(match kind {
        0 => Remote::Gpu,
        2 => Remote::Switch,
        _ => Remote::Other,
    })
}

/// Speed of one link in one direction in MB/s. `None` if the driver does not report it.
pub(crate) fn link_speed(nvml: &Nvml, device: &Device<'_>, link: u32) -> Option<u64> {
    let call = nvml.lib().nvmlDeviceGetFieldValues.as_ref().ok()?;
    // SAFETY: the structure consists of integers, a C enum kept as integer, and a union of numbers:
    // all zeros is a value of each of them.
    let mut value: nvmlFieldValue_t = unsafe { std::mem::zeroed() };
    value.fieldId = FIELD_NVLINK_SPEED;
    value.scopeId = link;
    // SAFETY: as above; NVML reads and writes exactly one element of the array that starts at the
    // pointer.
    let code = unsafe { call(device.handle(), 1, &raw mut value) };
    if code != 0 || value.nvmlReturn != 0 {
        return None;
    }
    // SAFETY: every member of the union is a plain number and the whole union was initialised, so
    // every view of it is valid; `valueType` says which one holds the result.
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

/// Position in the fabric. `None` if the driver does not report it.
pub(crate) fn fabric_info(nvml: &Nvml, device: &Device<'_>) -> Option<FabricInfo> {
    let call = nvml.lib().nvmlDeviceGetGpuFabricInfoV.as_ref().ok()?;
    // Drivers before 560 only know version 2.
    [FABRIC_VERSION_3, FABRIC_VERSION_2].into_iter().find_map(|version| {
        let mut info = nvmlGpuFabricInfo_v3_t {
            version,
            clusterUuid: [0; 16],
            status: 0,
            cliqueId: 0,
            state: 0,
            healthMask: 0,
            healthSummary: 0,
        };
        // SAFETY: as above; NVML writes as many bytes as the version says, which are at most those
        // of the structure.
        let code = unsafe { call(device.handle(), &raw mut info) };
        (code == 0).then_some(FabricInfo {
            state: info.state,
            status: info.status,
            cluster_uuid: info.clusterUuid,
            clique_id: info.cliqueId,
            health_mask: info.healthMask,
            health_summary: info.healthSummary,
        })
    })
}

/// State of row remapping. `None` if the model does not support it or the driver does not report
/// it.
pub(crate) fn row_remapping(nvml: &Nvml, device: &Device<'_>) -> Option<RowRemapping> {
    let call = nvml.lib().nvmlDeviceGetRemappedRows.as_ref().ok()?;
    let (mut correctable, mut uncorrectable, mut pending, mut failed) = (0, 0, 0, 0);
    // SAFETY: as above; NVML writes one `unsigned int` through each of the four pointers.
    let code = unsafe {
        call(device.handle(), &raw mut correctable, &raw mut uncorrectable, &raw mut pending, &raw mut failed)
    };
    (code == 0).then_some(match (failed, pending) {
        (0, 0) => RowRemapping::Clean,
        (0, _) => RowRemapping::Pending,
        _ => RowRemapping::Failed,
    })
}
