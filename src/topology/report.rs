//! Converts a `GPUTopology` report to [`Devices`].

use switchyard_core::devices::{Devices, Gpu, Nic};
use switchyard_core::gpu_model::{self, GpuModel};
use switchyard_core::path::{PathClass, path_class};
use switchyard_core::rates;
use switchyard_crds::gpu_topology::{
    FabricState, GPUTopologyStatus, Gpu as ReportedGpu, LinkKind, LinkVia, Measured, MeasuredLink, MigMode,
    Nic as ReportedNic, NicKind, PathClass as Reported, PcieLink, RowRemapping,
};

/// The devices of a node with their names.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NamedDevices {
    /// Input for placement.
    pub devices: Devices,
    /// Usable GPUs, one bit each: whole GPUs without a pending recovery action.
    pub usable: u32,
    /// For each NIC of `devices`, its position in the report.
    pub nics: Vec<usize>,
}

/// Why a report has no usable devices.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReportError {
    /// More GPUs than a mask has bits.
    #[error("status.gpus: {0} GPUs: expected at most 32")]
    TooManyGpus(usize),
    /// Two GPUs have the same UUID.
    #[error(
        "status.gpus[{second}].uuid: {uuid:?} is also the UUID of gpus[{first}]: expected a unique UUID for every GPU"
    )]
    SameUuid {
        uuid: String,
        /// Position of the first GPU.
        first: usize,
        /// Position of the second GPU.
        second: usize,
    },
    /// A link to a missing GPU.
    #[error("status.links[{link}].{end}: {uuid:?} is not the UUID of a GPU in status.gpus")]
    UnknownGpu { link: usize, end: &'static str, uuid: String },
    /// A link from a GPU to itself.
    #[error("status.links[{0}]: both ends are the same GPU: expected two")]
    Loop(usize),
}

/// Converts a path class as an agent reports it.
pub(super) fn reported_class(class: Reported) -> PathClass {
    match class {
        Reported::Internal | Reported::PIX => PathClass::Pix,
        Reported::PXB => PathClass::Pxb,
        Reported::PHB => PathClass::Phb,
        Reported::NODE => PathClass::Node,
        Reported::SYS => PathClass::Sys,
    }
}

/// NUMA node of a device. Firmware often omits it on machines with a single NUMA node.
pub fn numa_of(status: &GPUTopologyStatus, reported: Option<u32>) -> Option<u32> {
    match status.numa_nodes.as_slice() {
        [only] => reported.or(Some(only.id)),
        _ => reported,
    }
}

/// Reads the devices of a report. Reports have raw rates; [`rates`] converts them to usable ones.
///
/// # Errors
/// The first contradiction in the report.
pub fn devices(status: &GPUTopologyStatus) -> Result<NamedDevices, ReportError> {
    let gpus = &status.gpus;
    if gpus.len() > 32 {
        return Err(ReportError::TooManyGpus(gpus.len()));
    }
    for (second, gpu) in gpus.iter().enumerate() {
        if let Some(first) = gpus[..second].iter().position(|other| other.uuid == gpu.uuid) {
            return Err(ReportError::SameUuid { uuid: gpu.uuid.clone(), first, second });
        }
    }
    let models: Vec<Option<GpuModel>> = gpus.iter().map(|gpu| gpu_model::find(gpu.model.as_deref()?)).collect();
    let generations = models.iter().map(|model| model.map(|model| model.pcie_generation));
    let vendor = status.cpus.as_ref().and_then(|cpus| cpus.vendor.as_deref());
    let mut devices = Devices {
        gpus: generations
            .clone()
            .zip(gpus)
            .map(|(known, gpu)| Gpu { pcie_rate: link_rate(gpu.pcie_link.as_ref(), known), ..Gpu::default() })
            .collect(),
        direct_links: vec![0; gpus.len() * gpus.len()],
        gpu_paths: vec![PathClass::Same; gpus.len() * gpus.len()],
        socket_rate: rates::socket(vendor, generations.flatten().max()),
        ..Devices::default()
    };
    let numa = |gpu: &ReportedGpu| numa_of(status, gpu.numa_node);
    for (a, one) in gpus.iter().enumerate() {
        for (b, other) in gpus.iter().enumerate().filter(|(b, _)| *b != a) {
            let class = path_class(&one.pcie_path, &other.pcie_path, numa(one), numa(other));
            devices.gpu_paths[a * gpus.len() + b] = class.max(PathClass::Pix);
        }
    }
    links(status, &models, &mut devices)?;
    let nics = training_nics(status);
    let nic_rate = |nic: &usize| {
        let nic = &status.nics[*nic];
        let known = nic.pcie_link.as_ref().filter(|link| link.generation.or(link.max_generation).is_some());
        let slot = known.map_or(u32::MAX, |link| link_rate(Some(link), None));
        Nic { rate: rates::nic(nic.rate_megabits_per_second).min(slot) }
    };
    devices.nics = nics.iter().map(nic_rate).collect();
    for gpu in gpus {
        let to_nic = |nic: &usize| {
            let nic = &status.nics[*nic];
            path_class(&gpu.pcie_path, &nic.pcie_path, numa(gpu), numa_of(status, nic.numa_node)).max(PathClass::Pix)
        };
        devices.nic_paths.extend(nics.iter().map(to_nic));
    }
    measured(status, &mut devices);
    let usable = gpus.iter().enumerate().filter(|(_, gpu)| is_usable(gpu)).fold(0, |mask, (gpu, _)| mask | 1 << gpu);
    Ok(NamedDevices { devices, usable, nics })
}

/// Replaces nominal rates with those measured on this machine.
fn measured(status: &GPUTopologyStatus, devices: &mut Devices) {
    for Measured { link, megabytes_per_second, .. } in &status.measured {
        let rate = (*megabytes_per_second).clamp(1, rates::MAX_RATE.into()) as u32;
        match link {
            MeasuredLink::NVLink => {
                devices.gpus.iter_mut().filter(|gpu| gpu.link_rate > 0).for_each(|gpu| gpu.link_rate = rate);
            }
            MeasuredLink::PCIe => devices.gpus.iter_mut().for_each(|gpu| gpu.pcie_rate = rate),
            MeasuredLink::Socket => devices.socket_rate = rate,
            MeasuredLink::NIC => devices.nics.iter_mut().for_each(|nic| nic.rate = rate),
        }
    }
}

/// Rate of a PCIe link as trained, because a link that trained with fewer lanes than possible also
/// has fewer under load. `usual` is the generation to use if the link reports none.
fn link_rate(link: Option<&PcieLink>, usual: Option<u32>) -> u32 {
    let generation = link.and_then(|link| link.generation.or(link.max_generation)).or(usual);
    let width = link.and_then(|link| link.width).unwrap_or(rates::LANES).clamp(1, rates::LANES);
    rates::pcie(generation) / rates::LANES * width
}

fn is_usable(gpu: &ReportedGpu) -> bool {
    let is_whole = gpu.mig.as_ref().is_none_or(|mig| mig.mode == MigMode::Disabled);
    // Programs fail to start on a GPU that is not registered with the fabric (CUDA error 802), and
    // should not run on one with broken memory.
    let is_settled = gpu.fabric.as_ref().is_none_or(|fabric| {
        fabric.state == FabricState::Completed && fabric.result.as_deref().is_none_or(|result| result == "Success")
    });
    let is_sound = gpu.ecc.as_ref().is_none_or(|ecc| ecc.row_remapping != Some(RowRemapping::Failed));
    is_whole && is_settled && is_sound && gpu.health.as_ref().is_none_or(|health| health.recovery_action == "None")
}

fn links(status: &GPUTopologyStatus, models: &[Option<GpuModel>], devices: &mut Devices) -> Result<(), ReportError> {
    let gpus = &status.gpus;
    let count = gpus.len();
    // More direct NVLinks than any GPU has must go through a switch.
    let is_switched = |uuid: &str| {
        let own =
            status.links.iter().filter(|link| link.kind == LinkKind::NVLink && (link.a == uuid || link.b == uuid));
        own.filter_map(|link| link.count).fold(0, u32::saturating_add) > gpu_model::MAX_LINKS
    };
    let switched: Vec<bool> = status.gpus.iter().map(|gpu| is_switched(&gpu.uuid)).collect();
    for (link, reported) in status.links.iter().enumerate() {
        let find = |end: &'static str, uuid: &String| {
            let unknown = || ReportError::UnknownGpu { link, end, uuid: uuid.clone() };
            status.gpus.iter().position(|gpu| gpu.uuid == *uuid).ok_or_else(unknown)
        };
        let (a, b) = (find("a", &reported.a)?, find("b", &reported.b)?);
        if a == b {
            return Err(ReportError::Loop(link));
        }
        let pairs = [a * count + b, b * count + a];
        let Some(links) = reported.count.filter(|links| reported.kind == LinkKind::NVLink && *links > 0) else {
            if let Some(class) = reported.path_class {
                pairs.iter().for_each(|pair| devices.gpu_paths[*pair] = reported_class(class));
            }
            continue;
        };
        // The model is more precise: data sheets give 25 GB/s for a link of A100 and of H100, which
        // carries more.
        let raw = models[a].filter(|model| model.links > 0).map(|model| model.megabytes_per_link);
        let raw = raw.or(reported.megabytes_per_second.map(|all| all / u64::from(links)));
        let rate = raw.map_or(rates::UNKNOWN_NVLINK, rates::nvlink);
        let links = u8::try_from(links).unwrap_or(u8::MAX);
        let via_switch = reported.via == Some(LinkVia::Switch) || switched[a] && switched[b];
        for gpu in [a, b] {
            let gpu = &mut devices.gpus[gpu];
            gpu.link_rate = gpu.link_rate.max(rate);
            if via_switch {
                gpu.switch_links = gpu.switch_links.max(links);
            }
        }
        if !via_switch {
            pairs.iter().for_each(|pair| devices.direct_links[*pair] = links);
        }
    }
    Ok(())
}

/// Positions of the NICs that carry training traffic: RDMA ports that are up, of one link layer
/// (InfiniBand if present, because Ethernet ports next to it serve storage) and of the highest
/// rate. Without RDMA ports, every PCI device that is up. A virtual function is not a rail, because
/// it shares the port of its physical function.
pub fn training_nics(status: &GPUTopologyStatus) -> Vec<usize> {
    let up = |nic: &ReportedNic| nic.state.as_deref().is_none_or(|state| ["Active", "Up", "Unknown"].contains(&state));
    let own_port = |nic: &ReportedNic| nic.virtual_function_of.is_none();
    let all = |wanted: &dyn Fn(&ReportedNic) -> bool| -> Vec<usize> {
        let nics = status.nics.iter().enumerate().filter(|(_, nic)| up(nic) && own_port(nic) && wanted(nic));
        nics.map(|(position, _)| position).collect()
    };
    let mut rdma = all(&|nic| nic.rdma_device.is_some());
    if rdma.is_empty() {
        return all(&|nic| nic.kind == NicKind::Physical && !nic.pcie_path.is_empty());
    }
    let layer = |nic: usize| status.nics[nic].link_layer.as_deref();
    if rdma.iter().any(|nic| layer(*nic) == Some(INFINIBAND)) {
        rdma.retain(|nic| layer(*nic).is_none_or(|layer| layer == INFINIBAND));
    }
    let rate = |nic: usize| status.nics[nic].rate_megabits_per_second;
    let most = rdma.iter().filter_map(|nic| rate(*nic)).max();
    rdma.retain(|nic| rate(*nic).is_none() || rate(*nic) == most);
    rdma
}

/// Link layer of InfiniBand ports, as the kernel spells it.
pub const INFINIBAND: &str = "InfiniBand";

#[cfg(test)]
mod tests {
    use super::*;
    use switchyard_crds::gpu_topology::{Ecc, Fabric, GpuHealth, Link, Mig};

    fn gpu(uuid: &str) -> ReportedGpu {
        ReportedGpu { uuid: uuid.into(), model: Some("NVIDIA H100 80GB HBM3".into()), ..ReportedGpu::default() }
    }

    fn nvlink(a: &str, b: &str, count: u32, via: Option<LinkVia>) -> Link {
        let (kind, megabytes) = (LinkKind::NVLink, Some(26_562 * u64::from(count)));
        Link {
            a: a.into(),
            b: b.into(),
            kind,
            count: Some(count),
            via,
            megabytes_per_second: megabytes,
            path_class: None,
        }
    }

    fn status(links: Vec<Link>) -> GPUTopologyStatus {
        GPUTopologyStatus { gpus: ["a", "b", "c"].map(gpu).into(), links, ..GPUTopologyStatus::default() }
    }

    #[test]
    fn nvlinks_go_to_a_switch_or_a_peer() {
        let switch = Some(LinkVia::Switch);
        let named = devices(&status(vec![nvlink("a", "b", 18, switch), nvlink("a", "c", 17, switch)])).unwrap();
        let links: Vec<u8> = named.devices.gpus.iter().map(|gpu| gpu.switch_links).collect();
        assert_eq!((links, named.devices.gpus[0].link_rate), (vec![18, 18, 17], 20_600));
        let named = devices(&status(vec![nvlink("a", "b", 4, None)])).unwrap();
        assert_eq!((named.devices.direct(0, 1), named.devices.gpus[0].switch_links), (4, 0));
        let all = vec![nvlink("a", "b", 18, None), nvlink("a", "c", 18, None), nvlink("b", "c", 18, None)];
        let named = devices(&status(all)).unwrap();
        assert_eq!((named.devices.direct(0, 1), named.devices.gpus[0].switch_links), (0, 18), "no GPU has 36 links");
    }

    #[test]
    fn links_count_as_trained() {
        let mut status = status(vec![]);
        let link = |generation, width| PcieLink { generation, max_generation: Some(5), width, max_width: Some(16) };
        status.gpus[0].pcie_link = Some(link(Some(5), Some(8)));
        status.gpus[1].pcie_link = Some(link(None, Some(16)));
        status.gpus[2].pcie_link = Some(link(Some(3), None));
        let rates: Vec<u32> = devices(&status).unwrap().devices.gpus.iter().map(|gpu| gpu.pcie_rate).collect();
        assert_eq!(rates, [24_000, 48_000, 12_000]);
        let mut nic = ReportedNic {
            rdma_device: Some("mlx5_0".into()),
            rate_megabits_per_second: Some(400_000),
            ..ReportedNic::default()
        };
        nic.pcie_link = Some(link(Some(4), Some(8)));
        status.nics = vec![nic];
        assert_eq!(devices(&status).unwrap().devices.nics, [Nic { rate: 12_000 }]);
    }

    #[test]
    fn gpus_with_fabric_or_memory_faults_are_unusable() {
        let mut status = status(vec![]);
        let fabric = |state, result: Option<&str>| Fabric {
            state,
            result: result.map(str::to_string),
            cluster_uuid: None,
            clique_id: None,
            health: None,
        };
        status.gpus[0].fabric = Some(fabric(FabricState::InProgress, None));
        status.gpus[1].fabric = Some(fabric(FabricState::Completed, Some("Success")));
        status.gpus[2].ecc = Some(Ecc { mode: None, row_remapping: Some(RowRemapping::Failed) });
        assert_eq!(devices(&status).unwrap().usable, 0b010);
    }

    #[test]
    fn measured_rates_take_precedence() {
        let mut status = status(vec![nvlink("a", "b", 18, Some(LinkVia::Switch))]);
        let entry = |link, megabytes_per_second| Measured { link, megabytes_per_second, source: "test".into() };
        status.measured = vec![entry(MeasuredLink::NVLink, 19_000), entry(MeasuredLink::Socket, u64::MAX)];
        let devices = devices(&status).unwrap().devices;
        assert_eq!((devices.nvlink_rate(0, 1), devices.gpus[2].link_rate), (18 * 19_000, 0));
        assert_eq!(devices.socket_rate, 2_000_000, "nonsense is bounded");
    }

    #[test]
    fn mig_and_unhealthy_gpus_are_unusable() {
        let mut status = status(vec![]);
        status.gpus[0].mig = Some(Mig { mode: MigMode::Enabled, instances: vec![] });
        status.gpus[1].health = Some(GpuHealth { recovery_action: "None".into() });
        status.gpus[2].health = Some(GpuHealth { recovery_action: "GPUReset".into() });
        assert_eq!(devices(&status).unwrap().usable, 0b010);
    }

    #[test]
    fn contradictions_are_reported() {
        let text = |status: &GPUTopologyStatus| devices(status).unwrap_err().to_string();
        assert!(text(&status(vec![nvlink("a", "x", 1, None)])).contains(r#"status.links[0].b: "x""#));
        assert!(text(&status(vec![nvlink("a", "a", 1, None)])).contains("both ends"));
        let mut same = status(vec![]);
        same.gpus[2].uuid = "a".into();
        assert!(text(&same).contains("status.gpus[2].uuid"));
        same.gpus = (0..33).map(|number| gpu(&number.to_string())).collect();
        assert!(text(&same).contains("33 GPUs"));
        assert_eq!(
            devices(&GPUTopologyStatus::default()).unwrap().devices,
            Devices { socket_rate: 10_000, ..Devices::default() }
        );
    }

    #[test]
    fn active_rdma_ports_carry_the_training() {
        let nic = |name: &str, rdma: bool, state: &str| ReportedNic {
            name: name.into(),
            rdma_device: rdma.then(|| name.into()),
            state: Some(state.into()),
            rate_megabits_per_second: Some(400_000),
            pcie_path: vec!["pci0000:00".into(), "0000:00:01.0".into()],
            ..ReportedNic::default()
        };
        let mut status = status(vec![]);
        status.nics = vec![nic("eth0", false, "Up"), nic("mlx5_0", true, "Active"), nic("mlx5_1", true, "Down")];
        let named = devices(&status).unwrap();
        assert_eq!((named.nics, named.devices.nics), (vec![1], vec![Nic { rate: 48_000 }]));
        let function =
            ReportedNic { virtual_function_of: Some("0000:00:01.0".into()), ..nic("mlx5_2", true, "Active") };
        status.nics.push(function);
        assert_eq!(devices(&status).unwrap().nics, [1], "a virtual function is the same port again");
        let of_storage = ReportedNic { link_layer: Some("Ethernet".into()), ..nic("mlx5_3", true, "Active") };
        status.nics.push(of_storage);
        assert_eq!(devices(&status).unwrap().nics, [1, 4], "all that is known is Ethernet");
        status.nics[1].link_layer = Some("InfiniBand".into());
        assert_eq!(devices(&status).unwrap().nics, [1], "an Ethernet port beside InfiniBand is for storage");
        status.nics[4] = ReportedNic { rate_megabits_per_second: Some(100_000), ..nic("mlx5_3", true, "Active") };
        assert_eq!(devices(&status).unwrap().nics, [1], "and so is a slower one");
        status.nics.truncate(1);
        assert_eq!(devices(&status).unwrap().nics, [0], "without RDMA what is there");
    }
}
