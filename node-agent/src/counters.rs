//! GPU counters (memory, PCIe and NVLink errors) and RDMA port counters (link-down events, errors).
//! They change all the time, so they feed metrics and watchers and are never part of a description.

use crate::nvlink::MAX_LINKS;
use crate::nvml::Session;
use crate::nvml_raw::{self, Remote};
use crate::pci;
use crate::read;
use nvml_wrapper::enum_wrappers::device::{EccCounter, MemoryError};
use nvml_wrapper::enum_wrappers::nv_link::ErrorCounter;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use std::collections::BTreeMap;
use std::path::Path;

/// NVLink errors and their names in metrics.
const LINK_ERRORS: [(ErrorCounter, &str); 4] = [
    (ErrorCounter::DlReplay, "replay"),
    (ErrorCounter::DlRecovery, "recovery"),
    (ErrorCounter::DlCrcFlit, "crc_flit"),
    (ErrorCounter::DlCrcData, "crc_data"),
];

/// Counters of one GPU since the driver was loaded. Counters that the GPU lacks are absent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GpuCounters {
    /// PCI address in the form of sysfs.
    pub bus_id: String,
    pub corrected_ecc_errors: Option<u64>,
    pub uncorrected_ecc_errors: Option<u64>,
    /// PCIe packet retransmissions.
    pub pcie_replays: Option<u64>,
    /// Errors over all active NVLinks by kind: `replay`, `recovery`, `crc_flit`, `crc_data`.
    pub nvlink_errors: BTreeMap<&'static str, u64>,
    /// Active NVLinks to other GPUs, by their PCI address.
    pub nvlinks: BTreeMap<String, u32>,
}

/// Reads the counters of all responding GPUs, in NVML order. Empty without NVML.
pub fn read(library: Option<&Path>) -> Vec<GpuCounters> {
    let Ok(session) = Session::open(library) else { return Vec::new() };
    let Some(nvml) = session.nvml() else { return Vec::new() };
    let devices = (0..nvml.device_count().unwrap_or(0)).filter_map(|index| nvml.device_by_index(index).ok());
    devices.filter_map(|device| read_gpu(nvml, &device)).collect()
}

/// Error counters of an RDMA port that indicate a bad cable, a wrong MTU or a peer that does not
/// respond, in `counters` and `hw_counters`. Sources: the kernel's
/// `Documentation/ABI/stable/sysfs-class-infiniband`, NCCL's troubleshooting guide.
const PORT_ERRORS: [(&str, &str); 5] = [
    ("counters", "symbol_error"),
    ("hw_counters", "rnr_nak_retry_err"),
    ("hw_counters", "packet_seq_err"),
    ("hw_counters", "implied_nak_seq_err"),
    ("hw_counters", "local_ack_timeout_err"),
];

/// Counters of one RDMA port since its driver was loaded. Counters that the port lacks are absent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PortCounters {
    pub device: String,
    /// Counted from 1.
    pub port: u32,
    pub link_downed: Option<u64>,
    /// Errors by the kernel's counter name.
    pub errors: BTreeMap<&'static str, u64>,
}

/// Reads the counters of all RDMA ports, ordered by device and number. Ports without counters are
/// skipped.
pub fn read_ports(sysfs: &Path) -> Vec<PortCounters> {
    let mut all = Vec::new();
    for (device, path) in read::entries(&sysfs.join("class/infiniband")).unwrap_or_default() {
        for (number, port) in read::entries(&path.join("ports")).unwrap_or_default() {
            let Some(number) = read::number(&number) else { continue };
            let count = |folder: &str, name: &str| read::number_in::<u64>(&port.join(folder).join(name));
            let errors = PORT_ERRORS.iter().filter_map(|(folder, name)| Some((*name, count(folder, name)?)));
            let counters = PortCounters {
                device: device.clone(),
                port: number,
                link_downed: count("counters", "link_downed"),
                errors: errors.collect(),
            };
            if counters.link_downed.is_some() || !counters.errors.is_empty() {
                all.push(counters);
            }
        }
    }
    all
}

fn read_gpu(nvml: &Nvml, device: &Device<'_>) -> Option<GpuCounters> {
    let ecc = |kind| device.total_ecc_errors(kind, EccCounter::Volatile).ok();
    let mut counters = GpuCounters {
        bus_id: pci::bus_id(&device.pci_info().ok()?.bus_id)?,
        corrected_ecc_errors: ecc(MemoryError::Corrected),
        uncorrected_ecc_errors: ecc(MemoryError::Uncorrected),
        pcie_replays: device.pcie_replay_counter().ok().map(u64::from),
        ..GpuCounters::default()
    };
    for number in 0..MAX_LINKS {
        let link = device.link_wrapper_for(number);
        match link.is_active() {
            Ok(true) => {}
            // The first link index that the GPU does not have; also returned for GPUs without
            // NVLink.
            Err(NvmlError::InvalidArg | NvmlError::NotSupported) => break,
            Ok(false) | Err(_) => continue,
        }
        // At a switch the remote end is not a GPU, and drivers differ in the PCI address they
        // report for it.
        if nvml_raw::remote_device_type(nvml, device, number) == Some(Remote::Gpu)
            && let Some(other) = link.remote_pci_info().ok().and_then(|info| pci::bus_id(&info.bus_id))
        {
            *counters.nvlinks.entry(other).or_default() += 1;
        }
        for (kind, word) in LINK_ERRORS {
            if let Ok(errors) = link.error_counter(kind) {
                *counters.nvlink_errors.entry(word).or_default() += errors;
            }
        }
    }
    Some(counters)
}
