//! Usable link rates as NCCL counts them: one-way, in MB/s (10^6 bytes per second).
//!
//! These are lower than the raw rate of the wire, because they account for protocol overhead and
//! measured efficiency. Sources: NCCL 2.30.7, `src/graph/topo.h` (NVLink per link, sockets),
//! `topo.cc` (PCIe by generation, unknown NICs).

use crate::devices::UNKNOWN_NIC;

/// Rate of one NVLink, from its raw rate: P100 18.0 GB/s, V100 to A100 20.0, GA102 bridges 12.0,
/// H100 20.6, Blackwell 40.1.
pub fn nvlink(raw: u64) -> u32 {
    match raw {
        ..17_000 => 12_000,
        17_000..22_000 => 18_000,
        22_000..26_000 => 20_000,
        26_000..40_000 => 20_600,
        _ => 40_100,
    }
}

/// Lowest compute capability times ten, and the rate of one NVLink from there on
/// (`ncclTopoNVLinkBw`).
const NVLINKS: [(u32, u32); 7] =
    [(100, 40_100), (90, 20_600), (87, 20_000), (86, 12_000), (80, 20_000), (70, 20_000), (60, 18_000)];

/// Rate of one NVLink of a GPU, by compute capability times ten: 90 for H100.
pub fn nvlink_by_sm(sm: u32) -> u32 {
    NVLINKS.iter().find(|(from, _)| sm >= *from).map_or(UNKNOWN_NVLINK, |(_, rate)| *rate)
}

/// Lowest compute capability, times ten, whose NVLinks have this rate.
pub fn sm_by_nvlink(link_rate: u32) -> Option<u32> {
    NVLINKS.iter().rev().find(|(_, rate)| *rate == link_rate).map(|(sm, _)| *sm)
}

/// Rate of an NVLink of unknown generation: the rate of V100 and A100.
pub const UNKNOWN_NVLINK: u32 = 20_000;

/// Number of PCIe lanes for which [`pcie`] gives the rate.
pub const LANES: u32 = 16;

/// Rate of a PCIe link of 16 lanes. Assumes Gen3 if the generation is unknown.
pub fn pcie(generation: Option<u32>) -> u32 {
    match generation {
        Some(1) => 3_000,
        Some(2) => 6_000,
        Some(4) => 24_000,
        Some(5) => 48_000,
        Some(6..) => 96_000,
        _ => 12_000,
    }
}

/// More than any real link carries. Capping rates here keeps sums from overflowing.
pub const MAX_RATE: u32 = 2_000_000;

/// Rate of a NIC, from its raw rate in megabits: 48 GB/s for 400 Gbit/s. Assumes 10 Gbit/s if
/// unknown.
pub fn nic(megabits: Option<u64>) -> u32 {
    match megabits {
        Some(megabits @ 1..) => {
            u32::try_from(megabits.saturating_mul(12) / 100).map_or(MAX_RATE, |rate| rate.min(MAX_RATE))
        }
        _ => UNKNOWN_NIC,
    }
}

/// Rate between the sockets of a machine, by CPU vendor and by PCIe generation of its GPUs, which
/// distinguishes the platforms: Intel 10 GB/s up to Gen4, 22 from Sapphire Rapids on; AMD 16; Arm
/// 6.
pub fn socket(vendor: Option<&str>, generation: Option<u32>) -> u32 {
    match vendor {
        Some("GenuineIntel") if generation >= Some(5) => 22_000,
        Some("AuthenticAMD") => 16_000,
        Some("ARM") => 6_000,
        _ => UNKNOWN_SOCKET,
    }
}

/// Rate between sockets of an unknown platform.
pub const UNKNOWN_SOCKET: u32 = 10_000;

/// Rate between the sockets of a machine whose CPU family and model NCCL knows
/// (`ncclTopoGetInterCpuBw`). `architecture` is NCCL's name for the instruction set. A platform
/// that NCCL does not know counts as [`UNKNOWN_SOCKET`]; NCCL itself treats this path as free.
pub fn socket_by_model(architecture: Option<&str>, vendor: Option<&str>, model: Option<(i64, i64)>) -> u32 {
    /// Lowest models of family 6 that are Granite Rapids, Sapphire Rapids and Skylake.
    const INTEL: [(i64, u32); 3] = [(0xCF, 40_000), (0x8F, 22_000), (0x55, 10_000)];
    match (architecture, vendor) {
        (Some("arm64"), _) => 6_000,
        (Some("ppc64"), _) => 32_000,
        (_, Some("AuthenticAMD")) => 16_000,
        (_, Some("GenuineIntel")) => match model {
            Some((6, model)) => INTEL.iter().find(|(from, _)| model >= *from).map_or(6_000, |(_, rate)| *rate),
            Some(_) => 6_000,
            None => UNKNOWN_SOCKET,
        },
        (_, Some("CentaurHauls" | "  Shanghai  ")) => {
            if model == Some((7, 0x5B)) {
                9_000
            } else {
                6_000
            }
        }
        _ => UNKNOWN_SOCKET,
    }
}

/// Formats a rate in GB/s: `370.8`, `192`.
pub fn gigabytes(megabytes: u32) -> String {
    let text = format!("{:.1}", f64::from(megabytes) / 1000.0);
    text.strip_suffix(".0").map_or(text.clone(), str::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_by_generation() {
        let raw = [14_062, 20_000, 25_000, 25_781, 26_562, 50_000, 53_125];
        assert_eq!(raw.map(nvlink), [12_000, 18_000, 20_000, 20_000, 20_600, 40_100, 40_100]);
        assert_eq!(18 * nvlink(26_562), 370_800, "H100: measured 371 to 377 (nccl#1264)");
        assert_eq!([100_000, 200_000, 400_000, 800_000].map(|rate| nic(Some(rate))), [12_000, 24_000, 48_000, 96_000]);
        assert_eq!((nic(None), nic(Some(0)), nic(Some(u64::MAX))), (1_250, 1_250, 2_000_000), "nonsense is bounded");
        assert_eq!([None, Some(3), Some(4), Some(5), Some(6)].map(pcie), [12_000, 12_000, 24_000, 48_000, 96_000]);
        assert_eq!(
            [60, 70, 80, 86, 90, 100, 120].map(nvlink_by_sm),
            [18_000, 20_000, 20_000, 12_000, 20_600, 40_100, 40_100]
        );
        for rate in [12_000, 18_000, 20_000, 20_600, 40_100] {
            assert_eq!(sm_by_nvlink(rate).map(nvlink_by_sm), Some(rate));
        }
        let intel = |model| socket_by_model(Some("x86_64"), Some("GenuineIntel"), model);
        assert_eq!(
            [None, Some((6, 0x4F)), Some((6, 85)), Some((6, 143)), Some((6, 0xCF))].map(intel),
            [10_000, 6_000, 10_000, 22_000, 40_000]
        );
        assert_eq!(
            (socket_by_model(Some("arm64"), None, None), socket_by_model(Some("x86_64"), Some("AuthenticAMD"), None)),
            (6_000, 16_000)
        );
        assert_eq!((socket(Some("GenuineIntel"), Some(5)), socket(Some("GenuineIntel"), Some(4))), (22_000, 10_000));
    }
}
