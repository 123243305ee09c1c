//! The NVLink fabric between machines: decodes the driver's values and checks that all GPUs of a
//! machine agree.

use crate::read::Notes;
use switchyard_crds::gpu_topology::{Fabric, FabricHealth, FabricState, FabricSummary, Gpu};

/// Result of `nvmlDeviceGetGpuFabricInfoV`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FabricInfo {
    /// 0: the driver reports no fabric; 1 not started, 2 in progress, 3 completed.
    pub state: u8,
    /// Result of the registration, an `nvmlReturn_t`.
    pub status: u32,
    /// All zeros for a machine without a fabric.
    pub cluster_uuid: [u8; 16],
    /// Partition of the cluster.
    pub clique_id: u32,
    /// See [`faults`].
    pub health_mask: u32,
    /// 0: not reported; 1 healthy, 2 unhealthy, 3 limited capacity. Absent in version 2 of the
    /// call.
    pub health_summary: u8,
}

/// Two bits each from bit 0: 1 is true and 2 is false, so that `0xaa` is a healthy GPU (`nvml.h`,
/// `NVML_GPU_FABRIC_HEALTH_MASK_*`).
const FLAGS: [&str; 4] = ["DegradedBandwidth", "RouteRecovery", "RouteUnhealthy", "AccessTimeoutRecovery"];

/// Names of the faults in a health mask.
pub fn faults(mask: u32) -> Vec<String> {
    let flags = FLAGS.iter().enumerate().filter(|(index, _)| mask >> (2 * index) & 3 == 1);
    let configuration = match mask >> 8 & 15 {
        // Not reported, or healthy.
        0 | 1 => None,
        2 => Some("IncorrectSystemGUID".to_owned()),
        3 => Some("IncorrectChassisSerial".to_owned()),
        4 => Some("NoPartition".to_owned()),
        5 => Some("InsufficientNVLinks".to_owned()),
        other => Some(format!("Configuration{other}")),
    };
    flags.map(|(_, name)| (*name).to_owned()).chain(configuration).collect()
}

/// Decodes the driver's values. `None` if it reports no fabric.
pub fn decode(info: &FabricInfo) -> Option<Fabric> {
    let state = match info.state {
        1 => FabricState::NotStarted,
        2 => FabricState::InProgress,
        3 => FabricState::Completed,
        _ => return None,
    };
    let done = state == FabricState::Completed;
    let cluster_uuid = (done && info.cluster_uuid != [0; 16]).then(|| uuid(&info.cluster_uuid));
    let result = if info.status == 0 { "Success".to_owned() } else { format!("Code{}", info.status) };
    Some(Fabric {
        state,
        result: done.then_some(result),
        clique_id: cluster_uuid.is_some().then_some(info.clique_id),
        cluster_uuid,
        health: health(info),
    })
}

fn health(info: &FabricInfo) -> Option<FabricHealth> {
    let faults = faults(info.health_mask);
    let summary = match info.health_summary {
        1 => FabricSummary::Healthy,
        2 => FabricSummary::Unhealthy,
        3 => FabricSummary::LimitedCapacity,
        _ if info.health_mask == 0 => return None,
        _ if faults.is_empty() => FabricSummary::Healthy,
        _ => FabricSummary::Unhealthy,
    };
    Some(FabricHealth { summary, faults })
}

fn uuid(bytes: &[u8; 16]) -> String {
    let mut text = String::new();
    for (index, byte) in bytes.iter().enumerate() {
        if [4, 6, 8, 10].contains(&index) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

/// The fabric position that all GPUs agree on, with the worst health and the faults of all GPUs.
/// `None`, with a note, if they disagree.
pub(crate) fn of_machine(gpus: &[Gpu], notes: &mut Notes) -> Option<Fabric> {
    let first = gpus.iter().find_map(|gpu| gpu.fabric.as_ref())?;
    let position =
        |fabric: &Fabric| (fabric.state, fabric.result.clone(), fabric.cluster_uuid.clone(), fabric.clique_id);
    let odd: Vec<String> = gpus
        .iter()
        .filter(|gpu| gpu.fabric.as_ref().map(position) != Some(position(first)))
        .map(|gpu| format!("GPU{}", gpu.index))
        .collect();
    if !odd.is_empty() {
        notes.add(format!("{} not in the same fabric position as the first GPU that has one", odd.join(", ")));
        return None;
    }
    let all: Vec<&FabricHealth> = gpus.iter().filter_map(|gpu| gpu.fabric.as_ref()?.health.as_ref()).collect();
    let worst = [FabricSummary::Unhealthy, FabricSummary::LimitedCapacity, FabricSummary::Healthy];
    let health = worst.into_iter().find(|summary| all.iter().any(|health| health.summary == *summary)).map(|summary| {
        let mut faults: Vec<String> = all.iter().flat_map(|health| health.faults.clone()).collect();
        faults.sort();
        faults.dedup();
        FabricHealth { summary, faults }
    });
    Some(Fabric { health, ..first.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(health_mask: u32) -> FabricInfo {
        FabricInfo { state: 3, cluster_uuid: [0xab; 16], clique_id: 7, health_mask, ..FabricInfo::default() }
    }

    #[test]
    fn health_masks_are_decoded() {
        for healthy in [0, 0xaa, 0x1aa] {
            assert_eq!(faults(healthy), Vec::<String>::new(), "{healthy:#x}");
        }
        assert_eq!(faults(0xa9), ["DegradedBandwidth"]);
        assert_eq!(faults(0x55), FLAGS);
        assert_eq!(faults(0x5aa), ["InsufficientNVLinks"]);
        assert_eq!(faults(0x9aa), ["Configuration9"]);
    }

    #[test]
    fn fabric_positions_are_decoded() {
        let fabric = decode(&info(0xaa)).unwrap();
        assert_eq!(fabric.cluster_uuid.as_deref(), Some("abababab-abab-abab-abab-abababababab"));
        assert_eq!((fabric.clique_id, fabric.result.as_deref()), (Some(7), Some("Success")));
        assert_eq!(fabric.health.unwrap().summary, FabricSummary::Healthy, "version 2 has no summary");
        assert_eq!(decode(&FabricInfo::default()), None);
        let alone = decode(&FabricInfo { cluster_uuid: [0; 16], ..info(0) }).unwrap();
        assert_eq!((alone.cluster_uuid, alone.clique_id, alone.health), (None, None, None));
        let starting = decode(&FabricInfo { state: 2, ..info(0) }).unwrap();
        assert_eq!((starting.state, starting.result, starting.clique_id), (FabricState::InProgress, None, None));
        let limited = decode(&FabricInfo { health_summary: 3, ..info(0xaa) }).unwrap();
        assert_eq!(limited.health.unwrap().summary, FabricSummary::LimitedCapacity);
        let failed = decode(&FabricInfo { status: 18, ..info(0) }).unwrap();
        assert_eq!(failed.result.as_deref(), Some("Code18"));
    }

    #[test]
    fn a_machine_has_the_position_that_all_its_gpus_share() {
        let gpu = |index, mask| Gpu { index, fabric: decode(&info(mask)), ..Gpu::default() };
        let mut notes = Notes::default();
        let fabric = of_machine(&[gpu(0, 0xaa), gpu(1, 0xa9), gpu(2, 0x2aa)], &mut notes).unwrap();
        assert_eq!(fabric.clique_id, Some(7));
        let health = fabric.health.unwrap();
        assert_eq!(health.summary, FabricSummary::Unhealthy);
        assert_eq!(health.faults, ["DegradedBandwidth", "IncorrectSystemGUID"]);
        assert_eq!(notes.message(), None);

        let mut notes = Notes::default();
        let elsewhere = Gpu { index: 1, fabric: decode(&FabricInfo { clique_id: 8, ..info(0xaa) }), ..Gpu::default() };
        assert_eq!(of_machine(&[gpu(0, 0xaa), elsewhere, Gpu { index: 2, ..Gpu::default() }], &mut notes), None);
        assert!(notes.message().unwrap().starts_with("GPU1, GPU2 not in the same fabric position"));
        assert_eq!(of_machine(&[Gpu::default()], &mut Notes::default()), None);
    }
}
