//! Determines the faults of a GPU or NIC from all facts in the report.

use crate::text::plain;
use switchyard_core::units::plural;
use switchyard_crds::gpu_topology::{
    Ecc, Fabric, FabricState, FabricSummary, Gpu, Mig, MigMode, NvLinks, PcieLink, RowRemapping,
};
use switchyard_topology::fold::numbers;

/// The health of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Health {
    Unknown,
    /// No fault is known.
    Good,
    /// The faults.
    Faulty(Vec<String>),
}

impl Health {
    /// `-`, `ok` or `warn`.
    pub(super) fn word(&self) -> &'static str {
        match self {
            Health::Unknown => "-",
            Health::Good => "ok",
            Health::Faulty(_) => "warn",
        }
    }

    /// The word, followed by the faults.
    pub(super) fn sentence(&self) -> String {
        match self {
            Health::Faulty(faults) => format!("warn: {}", faults.join(", ")),
            other => other.word().to_owned(),
        }
    }
}

pub(super) fn of_gpu(gpu: &Gpu) -> Health {
    let checks = [
        gpu.health.as_ref().map(|health| recovery(&health.recovery_action)),
        gpu.nvlinks.as_ref().map(nvlinks),
        gpu.pcie_link.as_ref().and_then(pcie),
        gpu.ecc.as_ref().and_then(memory),
        gpu.fabric.as_ref().map(fabric),
        gpu.mig.as_ref().map(mig),
    ];
    if checks.iter().all(Option::is_none) {
        return Health::Unknown;
    }
    let faults: Vec<String> = checks.into_iter().flatten().flatten().collect();
    if faults.is_empty() { Health::Good } else { Health::Faulty(faults) }
}

fn recovery(action: &str) -> Option<String> {
    match action {
        "None" => None,
        "GPUReset" => Some("the driver requests a reset of this GPU".to_owned()),
        "NodeReboot" => Some("the driver requests a reboot of this machine".to_owned()),
        other => Some(format!("the driver requests recovery action {}", plain(other))),
    }
}

fn nvlinks(links: &NvLinks) -> Option<String> {
    let down = u64::try_from(links.down.len()).unwrap_or(u64::MAX);
    (down > 0).then(|| format!("NVLink{} {} down", plural(down), numbers(links.down.iter().copied())))
}

/// The fault of a PCIe link; `None` if unknown. The report omits a generation lowered by power
/// saving, so a lower one is a fault.
pub(super) fn pcie(link: &PcieLink) -> Option<Option<String>> {
    let width = link.width.zip(link.max_width);
    let generation = link.generation.zip(link.max_generation);
    if width.is_none() && generation.is_none() {
        return None;
    }
    let narrow = width.filter(|(now, most)| now < most).map(|(now, most)| format!("PCIe x{now} of x{most}"));
    let slow = generation.filter(|(now, most)| now < most).map(|(now, most)| format!("PCIe Gen{now} of Gen{most}"));
    let faults: Vec<String> = [narrow, slow].into_iter().flatten().collect();
    Some((!faults.is_empty()).then(|| faults.join(", ")))
}

fn memory(ecc: &Ecc) -> Option<Option<String>> {
    ecc.row_remapping.as_ref().map(|state| match state {
        RowRemapping::Clean => None,
        RowRemapping::Pending => Some("a row of its memory waits for a reset to be replaced".to_owned()),
        RowRemapping::Failed => Some("a row of its memory could not be replaced: exchange this GPU".to_owned()),
    })
}

fn fabric(fabric: &Fabric) -> Option<String> {
    if fabric.state != FabricState::Completed {
        return Some(format!("NVLink fabric {:?}", fabric.state));
    }
    if let Some(result) = fabric.result.as_deref().filter(|result| *result != "Success") {
        return Some(format!("NVLink fabric: {}", plain(result)));
    }
    let health = fabric.health.as_ref().filter(|health| health.summary != FabricSummary::Healthy)?;
    let faults: Vec<String> = health.faults.iter().map(|fault| plain(fault)).collect();
    let because = if faults.is_empty() { String::new() } else { format!(" ({})", faults.join(", ")) };
    Some(format!("NVLink fabric {:?}{because}", health.summary))
}

fn mig(mig: &Mig) -> Option<String> {
    let count = u64::try_from(mig.instances.len()).unwrap_or(u64::MAX);
    (mig.mode == MigMode::Enabled).then(|| format!("split into {count} MIG instance{}", plural(count)))
}
