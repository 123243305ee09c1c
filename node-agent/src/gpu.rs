//! GPUs and the links between them, by NVML.

use crate::Roots;
use crate::nvml_raw::{self, Remote};
use crate::pci;
use crate::read::{self, Notes};
use nvml_wrapper::enum_wrappers::device::TopologyLevel;
use nvml_wrapper::enums::device::SampleValue;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper::{Device, Nvml};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use switchyard_crds::gpu_topology::{Gpu, GpuHealth, Link, LinkKind, LinkVia, Mig, MigMode, PathClass};

/// No GPU has more NVLinks; the driver's own limit.
const MAX_LINKS: u32 = 18;
/// `NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`, outside of the range that drivers renumber.
const FIELD_RECOVERY_ACTION: u32 = 230;
const LIBRARY: &str = "libnvidia-ml.so.1";

/// What NVML, or the PCI bus in its place, tells.
#[derive(Debug, Default)]
pub(crate) struct GpuFacts {
    /// Number of GPUs; `None` when it is not known.
    pub count: Option<u32>,
    pub gpus: Vec<Gpu>,
    pub links: Vec<Link>,
    pub driver: Option<String>,
    /// What was read.
    pub source: String,
}

/// NVML while it is initialised.
///
/// The drop of [`Nvml`] panics when the library lacks `nvmlShutdown`; then this one leaves the library open instead.
struct Session(Option<Nvml>);

impl Drop for Session {
    fn drop(&mut self) {
        if let Some(nvml) = self.0.take() {
            match nvml.lib().nvmlShutdown {
                Ok(_) => drop(nvml),
                Err(_) => std::mem::forget(nvml),
            }
        }
    }
}

pub(crate) fn read_gpus(roots: &Roots, notes: &mut Notes, link_notes: &mut Notes) -> GpuFacts {
    let library = roots.nvml_library.as_deref().map_or(OsStr::new(LIBRARY), |path| path.as_os_str());
    let session = match Nvml::builder().lib_path(library).init() {
        Ok(nvml) => Session(Some(nvml)),
        Err(error) => return without_nvml(roots, &format!("{}: {}", library.display(), reason(&error)), notes),
    };
    let Some(nvml) = &session.0 else { return GpuFacts::default() };
    let driver = nvml.sys_driver_version().ok().map(|text| read::clip(&text, 64));
    let source = nvml.sys_nvml_version().map_or("NVML".to_owned(), |version| format!("NVML {version}"));
    let count = match nvml.device_count() {
        Ok(count) => count,
        Err(error) => {
            notes.add(format!("number of GPUs unknown: {}", reason(&error)));
            return GpuFacts { driver, source, ..GpuFacts::default() };
        }
    };
    let mut facts = GpuFacts { count: Some(count), driver, source, ..GpuFacts::default() };
    let mut devices = Vec::new();
    for index in 0..count {
        let found = nvml.device_by_index(index).and_then(|device| Ok((device.uuid()?, device)));
        match found {
            Ok((uuid, device)) => {
                facts.gpus.push(read_gpu(roots, index, &uuid, &device, notes));
                devices.push(device);
            }
            Err(error) => notes.add(format!("GPU{index}: {}", reason(&error))),
        }
    }
    if count == 0 {
        notes.add("the driver has no GPU");
    }
    facts.links = read_links(nvml, &facts.gpus, &devices, link_notes);
    facts
}

/// The last sentence of an error: the outer ones name the wrapper's function only.
fn reason(error: &NvmlError) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(inner) = source {
        text = inner.to_string();
        source = inner.source();
    }
    text
}

/// Without NVML the PCI bus still tells a machine without GPUs from one without a driver.
fn without_nvml(roots: &Roots, why: &str, notes: &mut Notes) -> GpuFacts {
    let source = "sysfs".to_owned();
    match pci::nvidia_gpus(&roots.sysfs) {
        Ok(0) => {
            notes.add("no NVIDIA GPU on the PCI bus");
            GpuFacts { count: Some(0), source, ..GpuFacts::default() }
        }
        Ok(count) => {
            notes.add(format!("{count} NVIDIA GPUs on the PCI bus, but NVML does not work: {why}"));
            GpuFacts { source, ..GpuFacts::default() }
        }
        Err(error) => {
            notes.add(format!("NVML does not work: {why}; PCI bus: {error}"));
            GpuFacts { source, ..GpuFacts::default() }
        }
    }
}

fn read_gpu(roots: &Roots, index: u32, uuid: &str, device: &Device<'_>, notes: &mut Notes) -> Gpu {
    let mut note = |fact: &str, error: &str| notes.add(format!("GPU{index}: {fact} unknown: {error}"));
    let mut keep = |fact: &str, error: &NvmlError| {
        if !matches!(error, NvmlError::NotSupported) {
            note(fact, &reason(error));
        }
    };
    let bus_id = device.pci_info().map_err(|error| keep("PCI address", &error)).ok().and_then(|info| {
        let id = pci::bus_id(&info.bus_id);
        id.map(|id| read::clip(&id, 32))
    });
    let model = device.name().map_err(|error| keep("model", &error)).ok().map(|name| read::clip(&name, 128));
    // `memory_info` is version 2 of the call; drivers before 510 have version 1 only, and then it stays unknown.
    let memory_bytes = device.memory_info().map_err(|error| keep("memory", &error)).ok().map(|memory| memory.total);
    let place = bus_id.as_deref().map(|id| pci::place(&roots.sysfs.join("bus/pci/devices").join(id)));
    let place = place.transpose().unwrap_or_else(|error| {
        note("place", &error.to_string());
        None
    });
    let place = place.unwrap_or_default();
    Gpu {
        index,
        uuid: read::clip(uuid, 96),
        bus_id,
        model,
        memory_bytes,
        numa_node: place.numa_node,
        pcie_root: place.path.first().cloned(),
        pcie_path: place.path,
        mig: read_mig(device),
        health: read_health(device),
    }
}

fn read_mig(device: &Device<'_>) -> Option<Mig> {
    match device.mig_mode().ok()?.current {
        0 => Some(Mig { mode: MigMode::Disabled, instances: Vec::new() }),
        1 => Some(Mig { mode: MigMode::Enabled, instances: Vec::new() }),
        _ => None,
    }
}

fn read_health(device: &Device<'_>) -> Option<GpuHealth> {
    let sample = device.field_values_for(&[FieldId(FIELD_RECOVERY_ACTION)]).ok()?.pop()?.ok()?;
    let code = match sample.value.ok()? {
        SampleValue::U32(code) => u64::from(code),
        SampleValue::U64(code) => code,
        SampleValue::I64(code) => u64::try_from(code).ok()?,
        SampleValue::F64(_) => return None,
    };
    Some(GpuHealth { recovery_action: recovery_action(code) })
}

/// The word for `nvmlDeviceGpuRecoveryAction_t`; newer drivers add codes.
pub fn recovery_action(code: u64) -> String {
    match code {
        0 => "None".to_owned(),
        1 => "GPUReset".to_owned(),
        2 => "NodeReboot".to_owned(),
        3 => "DrainP2P".to_owned(),
        4 => "DrainAndReset".to_owned(),
        other => format!("Code{other}"),
    }
}

/// NVLinks of one GPU that are up.
#[derive(Debug, Default)]
struct Ports {
    /// To other GPUs by PCI address: count, speed of all in MB/s.
    gpus: BTreeMap<String, (u32, Option<u64>)>,
    /// To switches.
    switches: Option<(u32, Option<u64>)>,
}

fn read_ports(nvml: &Nvml, index: u32, device: &Device<'_>, notes: &mut Notes) -> Ports {
    let mut ports = Ports::default();
    for number in 0..MAX_LINKS {
        let link = device.link_wrapper_for(number);
        match link.is_active() {
            Ok(true) => {}
            Ok(false) => continue,
            // The first link a GPU does not have, and GPUs without NVLink.
            Err(NvmlError::InvalidArg | NvmlError::NotSupported) => break,
            Err(error) => {
                notes.add(format!("GPU{index} NVLink {number}: {}", reason(&error)));
                continue;
            }
        }
        let speed = nvml_raw::link_speed(nvml, device, number);
        let slot = match nvml_raw::remote_device_type(nvml, device, number) {
            Some(Remote::Switch) => ports.switches.get_or_insert((0, Some(0))),
            Some(Remote::Gpu) => match link.remote_pci_info().map(|info| pci::bus_id(&info.bus_id)) {
                Ok(Some(id)) => ports.gpus.entry(id).or_insert((0, Some(0))),
                Ok(None) => continue,
                Err(error) => {
                    notes.add(format!("GPU{index} NVLink {number}: other end unknown: {}", reason(&error)));
                    continue;
                }
            },
            Some(Remote::Other) => continue,
            None => {
                notes.add(format!("GPU{index} NVLink {number}: other end unknown"));
                continue;
            }
        };
        slot.0 += 1;
        slot.1 = slot.1.zip(speed).map(|(sum, speed)| sum + speed);
    }
    ports
}

/// One entry for the NVLinks and one for the PCIe side of every pair. `gpus` and `devices` are in the same order.
fn read_links(nvml: &Nvml, gpus: &[Gpu], devices: &[Device<'_>], notes: &mut Notes) -> Vec<Link> {
    if gpus.len() < 2 {
        return Vec::new();
    }
    let ports: Vec<Ports> =
        gpus.iter().zip(devices).map(|(gpu, device)| read_ports(nvml, gpu.index, device, notes)).collect();
    let mut links = Vec::new();
    for a in 0..gpus.len() {
        for b in a + 1..gpus.len() {
            let entry = |kind| Link {
                a: gpus[a].uuid.clone(),
                b: gpus[b].uuid.clone(),
                kind,
                count: None,
                via: None,
                megabytes_per_second: None,
                path_class: None,
            };
            let direct = gpus[b].bus_id.as_ref().and_then(|id| ports[a].gpus.get(id)).copied();
            let switched = ports[a].switches.zip(ports[b].switches).map(|(x, y)| {
                let speed = x.1.zip(y.1).map(|(x, y)| x.min(y));
                (x.0.min(y.0), speed)
            });
            let nvlink = direct.map(|found| (found, LinkVia::Direct));
            if let Some(((count, speed), via)) = nvlink.or(switched.map(|found| (found, LinkVia::Switch))) {
                links.push(Link {
                    count: Some(count),
                    via: Some(via),
                    megabytes_per_second: speed.filter(|speed| *speed > 0),
                    ..entry(LinkKind::NVLink)
                });
            }
            match nvml.topology_common_ancestor(&devices[a], &devices[b]) {
                Ok(level) => links.push(Link { path_class: Some(path_class(level)), ..entry(LinkKind::PCIe) }),
                Err(NvmlError::NotSupported) => {}
                Err(error) => {
                    let (a, b) = (gpus[a].index, gpus[b].index);
                    notes.add(format!("GPU{a} to GPU{b}: common ancestor unknown: {}", reason(&error)));
                }
            }
        }
    }
    links
}

fn path_class(level: TopologyLevel) -> PathClass {
    match level {
        TopologyLevel::Internal => PathClass::Internal,
        TopologyLevel::Single => PathClass::PIX,
        TopologyLevel::Multiple => PathClass::PXB,
        TopologyLevel::HostBridge => PathClass::PHB,
        TopologyLevel::Node => PathClass::NODE,
        TopologyLevel::System => PathClass::SYS,
    }
}
