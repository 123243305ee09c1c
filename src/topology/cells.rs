//! A report as the matrix of `nvidia-smi topo -m`: its devices and the cell of each pair.

use super::matrix::Cell;
use super::report::{numa_of, reported_class};
use switchyard_core::path::{PathClass, path_class};
use switchyard_crds::gpu_topology::{GPUTopologyStatus, Gpu, LinkKind, Nic};

/// A GPU or a NIC of the matrix.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Device<'a> {
    /// The GPU; `None` for a NIC.
    pub gpu: Option<&'a Gpu>,
    pub numa: Option<u32>,
    path: &'a [String],
}

/// The devices in row and column order: GPUs, then NICs.
pub fn devices<'a>(status: &'a GPUTopologyStatus) -> Vec<Device<'a>> {
    let gpu = |gpu: &'a Gpu| Device { gpu: Some(gpu), numa: numa_of(status, gpu.numa_node), path: &gpu.pcie_path };
    let nics = nics(status).map(|nic| Device { gpu: None, numa: numa_of(status, nic.numa_node), path: &nic.pcie_path });
    status.gpus.iter().map(gpu).chain(nics).collect()
}

/// NICs on the PCI bus. Virtual functions are skipped, because their port is already listed.
pub fn nics(status: &GPUTopologyStatus) -> impl Iterator<Item = &Nic> {
    status.nics.iter().filter(|nic| !nic.pcie_path.is_empty() && nic.virtual_function_of.is_none())
}

/// The cell in row `a` and column `b`: NVLinks if there are any, otherwise the PCIe path class that
/// the driver reports, otherwise the class derived from the paths.
pub fn cell(status: &GPUTopologyStatus, a: &Device<'_>, b: &Device<'_>) -> Cell {
    if std::ptr::eq(a, b) {
        return Cell::Pcie(PathClass::Same);
    }
    if let (Some(x), Some(y)) = (a.gpu, b.gpu) {
        let between = |kind: LinkKind| {
            status.links.iter().find(move |link| {
                link.kind == kind && ((link.a == x.uuid && link.b == y.uuid) || (link.a == y.uuid && link.b == x.uuid))
            })
        };
        if let Some(count) = between(LinkKind::NVLink).and_then(|link| link.count) {
            return Cell::NvLink(count);
        }
        if let Some(class) = between(LinkKind::PCIe).and_then(|link| link.path_class) {
            return Cell::Pcie(reported_class(class));
        }
    }
    // Two ports of one function are as near as two functions of one card.
    Cell::Pcie(path_class(a.path, b.path, a.numa, b.numa).max(PathClass::Pix))
}
