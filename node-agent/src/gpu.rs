//! Reads GPUs through NVML.

use crate::nvml::{LIBRARY, Session, reason};
use crate::pci::{self, PciPosition};
use crate::read::{self, Notes};
use crate::{Roots, fabric, nvlink, nvml_raw};
use nvml_wrapper::enum_wrappers::device::PerformanceState;
use nvml_wrapper::enums::device::SampleValue;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper::{Device, Nvml};
use std::path::Path;
use switchyard_crds::gpu_topology::{
    Ecc, EccMode, Gpu, GpuHealth, Link, Mig, MigInstance, MigMode, NumaNode, PcieLink,
};

/// Most GPUs in a description.
const MAX_GPUS: usize = 64;
/// 64-bit words of a NUMA node set: as many nodes as Linux supports.
const NODE_SET_WORDS: usize = 16;
/// `NVML_AFFINITY_SCOPE_NODE`.
const SCOPE_NODE: u32 = 0;
/// `NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`, outside the range that drivers renumber.
const FIELD_RECOVERY_ACTION: u32 = 230;

/// Facts from NVML, or from the PCI bus if NVML does not work.
#[derive(Debug, Default)]
pub(crate) struct GpuFacts {
    /// Number of GPUs, if known.
    pub count: Option<u32>,
    pub gpus: Vec<Gpu>,
    pub links: Vec<Link>,
    /// Number of GPUs with an NVLink to a switch.
    pub at_switches: u32,
    pub driver: Option<String>,
    pub nvml_version: Option<String>,
    pub cuda_version: Option<String>,
    /// Source of the facts.
    pub source: String,
}

/// `nodes` are the machine's NUMA nodes.
pub(crate) fn read_gpus(roots: &Roots, nodes: &[NumaNode], notes: &mut Notes, link_notes: &mut Notes) -> GpuFacts {
    let session = match Session::open(roots.nvml_library.as_deref()) {
        Ok(session) => session,
        Err(error) => {
            let library = roots.nvml_library.as_deref().unwrap_or(Path::new(LIBRARY));
            return without_nvml(roots, &format!("{}: {}", library.display(), reason(&error)), notes);
        }
    };
    let Some(nvml) = session.nvml() else { return GpuFacts::default() };
    let nvml_version = nvml.sys_nvml_version().ok().map(|text| read::clip(&text, 64));
    let mut facts = GpuFacts {
        driver: nvml.sys_driver_version().ok().map(|text| read::clip(&text, 64)),
        cuda_version: nvml.sys_cuda_driver_version().ok().map(cuda_version),
        source: nvml_version.as_ref().map_or("NVML".to_owned(), |version| format!("NVML {version}")),
        nvml_version,
        ..GpuFacts::default()
    };
    let count = match nvml.device_count() {
        Ok(count) => count,
        Err(error) => {
            notes.add(format!("number of GPUs unknown: {}", reason(&error)));
            return facts;
        }
    };
    facts.count = Some(count);
    let (mut devices, mut ports) = (Vec::new(), Vec::new());
    for index in 0..count {
        let found = nvml.device_by_index(index).and_then(|device| Ok((device.uuid()?, device)));
        match found {
            Ok(_) if devices.len() == MAX_GPUS => notes.add(format!("GPU{index}: only {MAX_GPUS} are described")),
            Ok((uuid, device)) => {
                let gpu_ports = nvlink::read_ports(nvml, index, &device, link_notes);
                let gpu = read_gpu(roots, nodes, nvml, &device, Gpu { index, uuid, ..Gpu::default() }, notes);
                facts.gpus.push(Gpu { nvlinks: gpu_ports.links.clone(), ..gpu });
                facts.at_switches += u32::from(gpu_ports.switches.is_some());
                devices.push(device);
                ports.push(gpu_ports);
            }
            Err(error) => notes.add(format!("GPU{index}: {}", reason(&error))),
        }
    }
    if count == 0 {
        notes.add("the driver has no GPU");
    }
    note_hidden(roots, &facts.gpus, notes);
    facts.links = nvlink::read_links(nvml, &facts.gpus, &devices, &ports, link_notes);
    facts
}

/// `13000` is CUDA 13.0.
fn cuda_version(number: i32) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}

/// Notes GPUs that the driver has lost but the PCI bus still lists.
fn note_hidden(roots: &Roots, gpus: &[Gpu], notes: &mut Notes) {
    let on_bus = pci::functions(&roots.sysfs).map(|all| pci::nvidia_gpus(&all)).unwrap_or_default();
    let hidden: Vec<String> =
        on_bus.into_iter().filter(|id| gpus.iter().all(|gpu| gpu.bus_id.as_ref() != Some(id))).collect();
    if !hidden.is_empty() {
        notes.add(format!("on the PCI bus, and not described by the driver: {}", hidden.join(", ")));
    }
}

/// The PCI bus still distinguishes a machine without GPUs from one without a driver.
fn without_nvml(roots: &Roots, why: &str, notes: &mut Notes) -> GpuFacts {
    let source = "sysfs".to_owned();
    match pci::functions(&roots.sysfs).map(|all| pci::nvidia_gpus(&all).len()) {
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

/// Completes `gpu`, which already has its index and UUID, with facts from the driver and sysfs.
fn read_gpu(roots: &Roots, nodes: &[NumaNode], nvml: &Nvml, device: &Device<'_>, gpu: Gpu, notes: &mut Notes) -> Gpu {
    let index = gpu.index;
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
    // `memory_info` uses version 2 of the call. Drivers before 510 only have version 1, so the
    // memory stays unknown.
    let memory_bytes = device.memory_info().map_err(|error| keep("memory", &error)).ok().map(|memory| memory.total);
    let position = bus_id.as_deref().map(|id| pci::position(&roots.sysfs.join("bus/pci/devices").join(id)));
    let position = position.transpose().unwrap_or_else(|error| {
        note("place", &error.to_string());
        None
    });
    let position = position.unwrap_or_default();
    Gpu {
        uuid: read::clip(&gpu.uuid, 96),
        bus_id,
        model,
        memory_bytes,
        numa_node: position.numa_node.or_else(|| numa_by_affinity(device, nodes)),
        memory_numa_node: device.numa_node_id().ok(),
        pcie_link: pcie_link(device, &position),
        pcie_root: position.path.first().cloned(),
        pcie_path: position.path,
        ecc: read_ecc(nvml, device),
        fabric: nvml_raw::fabric_info(nvml, device).as_ref().and_then(fabric::decode),
        mig: read_mig(device),
        health: read_health(device),
        ..gpu
    }
}

/// The first NUMA node near the GPU according to the driver, which knows it even if the firmware
/// does not report it to the kernel. A set of all nodes carries no information.
fn numa_by_affinity(device: &Device<'_>, nodes: &[NumaNode]) -> Option<u32> {
    let words = device.memory_affinity(NODE_SET_WORDS, SCOPE_NODE).ok()?;
    let near = |id: u32| words.get(id as usize / 64).is_some_and(|word| word >> (id % 64) & 1 == 1);
    let first = nodes.iter().map(|node| node.id).find(|id| near(*id))?;
    (nodes.len() == 1 || !nodes.iter().all(|node| near(node.id))).then_some(first)
}

/// The driver's values, falling back to sysfs.
fn pcie_link(device: &Device<'_>, position: &PciPosition) -> Option<PcieLink> {
    let by_kernel = position.link.clone().unwrap_or_default();
    let max_generation = device.max_pcie_link_gen().ok().or(by_kernel.max_generation);
    let generation = device.current_pcie_link_gen().ok().or(by_kernel.generation);
    let is_busy = || matches!(device.performance_state(), Ok(PerformanceState::Zero));
    let link = PcieLink {
        // An idle GPU lowers its link speed to save power.
        generation: generation.filter(|now| max_generation.is_some_and(|max| *now >= max) || is_busy()),
        max_generation,
        width: device.current_pcie_link_width().ok().or(by_kernel.width),
        max_width: device.max_pcie_link_width().ok().or(by_kernel.max_width),
    };
    (link != PcieLink::default()).then_some(link)
}

fn read_ecc(nvml: &Nvml, device: &Device<'_>) -> Option<Ecc> {
    let mode = |enabled| if enabled { EccMode::Enabled } else { EccMode::Disabled };
    let ecc = Ecc {
        mode: device.is_ecc_enabled().ok().map(|state| mode(state.currently_enabled)),
        row_remapping: nvml_raw::row_remapping(nvml, device),
    };
    (ecc != Ecc::default()).then_some(ecc)
}

fn read_mig(device: &Device<'_>) -> Option<Mig> {
    match device.mig_mode().ok()?.current {
        0 => Some(Mig { mode: MigMode::Disabled, instances: Vec::new() }),
        1 => Some(Mig { mode: MigMode::Enabled, instances: read_instances(device) }),
        _ => None,
    }
}

/// Instance numbers have gaps, because a deleted instance leaves one.
fn read_instances(device: &Device<'_>) -> Vec<MigInstance> {
    let most = device.mig_device_count().unwrap_or(0).min(16);
    let instance = |number| {
        let instance = device.mig_device_by_index(number).ok()?;
        Some(MigInstance {
            uuid: read::clip(&instance.uuid().ok()?, 96),
            profile: instance.name().ok().and_then(|name| Some(read::clip(name.rsplit_once("MIG ")?.1, 64))),
        })
    };
    (0..most).filter_map(instance).collect()
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

/// The name for a `nvmlDeviceGpuRecoveryAction_t`; newer drivers add codes.
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
