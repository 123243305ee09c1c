//! The familiar matrix of `nvidia-smi topo -m`.

use super::nic_name;
use crate::text::{Screen, Table, plain};
use std::collections::BTreeSet;
use switchyard_core::path::PathClass;
use switchyard_crds::gpu_topology::GPUTopologyStatus;
use switchyard_topology::cells;
use switchyard_topology::matrix::Cell;

/// A GPU or a NIC in the matrix.
struct Device<'a> {
    label: String,
    /// Its name, shown if there is room.
    name: String,
    shown: cells::Device<'a>,
}

fn devices(status: &GPUTopologyStatus) -> Vec<Device<'_>> {
    let gpus = status.gpus.iter().map(|gpu| (format!("GPU{}", gpu.index), format!("GPU{}", gpu.index)));
    let nics = cells::nics(status).enumerate().map(|(index, nic)| (format!("NIC{index}"), plain(nic_name(nic))));
    let named = gpus.chain(nics).zip(cells::devices(status));
    named.map(|((label, name), shown)| Device { label, name, shown }).collect()
}

/// GPUs and NICs as in `nvidia-smi topo -m`, which names NVLinks and host bridges within a NUMA
/// node.
pub(super) fn matrix(screen: &mut Screen, status: &GPUTopologyStatus) {
    screen.line("");
    screen.line("as nvidia-smi topo -m shows it");
    let devices = devices(status);
    let mut used = BTreeSet::new();
    let mut nvlink = false;
    let cells: Vec<Vec<String>> = devices
        .iter()
        .map(|a| {
            devices
                .iter()
                .map(|b| {
                    let cell = cells::cell(status, &a.shown, &b.shown);
                    match cell {
                        Cell::NvLink(_) => nvlink = true,
                        Cell::Pcie(PathClass::Same) => {}
                        Cell::Pcie(class) => used.extend([class]),
                    }
                    cell.word()
                })
                .collect()
        })
        .collect();
    let variant = |names: bool, gap: usize| {
        let label = |device: &Device<'_>| if names { device.name.clone() } else { device.label.clone() };
        let mut heading = vec![String::new()];
        heading.extend(devices.iter().map(&label));
        heading.push("NUMA".to_owned());
        let mut rows = vec![heading];
        for (device, cells) in devices.iter().zip(&cells) {
            let mut row = vec![label(device)];
            row.extend(cells.iter().cloned());
            row.push(device.shown.numa.map_or("-".to_owned(), |node| node.to_string()));
            rows.push(row);
        }
        Table { rows, gap }
    };
    screen.whole(vec![variant(true, 2), variant(false, 2), variant(false, 1)]);
    let mut legend: Vec<String> =
        used.into_iter().map(|class| format!("{} {}", class.word(), class.meaning())).collect();
    legend.extend(nvlink.then(|| "NV# number of NVLinks".to_owned()));
    screen.phrases(&legend);
}
