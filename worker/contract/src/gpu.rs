//! A rank's GPU: implementations in use, and its health as reported by NVML: hardware errors, and
//! causes of reduced clocks.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Implementations that a rank uses on its GPU where there are several.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuPaths {
    /// Directions of distinct convolutions; those that are plain matrix products are not counted.
    pub convolutions: CudnnCoverage,
    /// Forward passes of distinct 16-bit attentions.
    pub attention: CudnnCoverage,
    /// Backward passes of distinct 16-bit attentions.
    pub attention_gradient: CudnnCoverage,
    /// Whether cuBLASLt computes the epilogues of its products.
    pub epilogues: bool,
    /// Slower implementations that replace what a library refused, with the reasons.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub fallbacks: Vec<String>,
}

/// Kinds of an operation that cuDNN computes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CudnnCoverage {
    /// Kinds for which cuDNN was queried.
    pub queried: u32,
    /// Kinds that it computes.
    pub accepted: u32,
}

/// Health of a GPU since its rank began to monitor it. Each report replaces the previous one.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuReport {
    /// Rank among all ranks of the job.
    pub rank: u32,
    /// PCI address, for example `0000:17:00.0`.
    pub bus: String,
    /// Seconds of monitoring.
    pub seconds: f64,
    /// Seconds of reduced clocks, by cause; causes can overlap.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub slowed: Vec<Slowed>,
    /// Critical errors (XIDs) in the order in which the driver reported them, at most
    /// [`GpuReport::MAX_XIDS`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub xids: Vec<u32>,
    /// The driver can no longer reach the GPU.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_lost: bool,
    /// Memory errors corrected by ECC; absent if not counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub corrected_errors: Option<u64>,
    /// Memory errors that ECC could not correct; absent if not counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uncorrected_errors: Option<u64>,
    /// Seconds in which a kernel ran, from NVML's samples; absent if not reported, as with MIG. A
    /// kernel that waits for other GPUs counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub busy_seconds: Option<f64>,
    /// Highest temperature.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub highest_celsius: Option<u32>,
    /// Narrowest observed width of its PCIe link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pcie: Option<PcieWidth>,
}

/// Time with reduced clocks.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Slowed {
    /// Why.
    pub by: SlowedBy,
    /// How long.
    pub seconds: f64,
}

/// Why a GPU's clocks are reduced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum SlowedBy {
    /// At its power limit: normal under full load.
    Power,
    /// Too hot.
    Temperature,
    /// The machine requests it because its power supply is overloaded.
    PowerBrake,
    /// The hardware gives no reason.
    Hardware,
}

impl SlowedBy {
    /// Display name.
    pub fn label(self) -> &'static str {
        match self {
            SlowedBy::Power => "its power limit",
            SlowedBy::Temperature => "temperature",
            SlowedBy::PowerBrake => "the power supply of the machine",
            SlowedBy::Hardware => "the hardware",
        }
    }
}

/// Lanes of a PCIe link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PcieWidth {
    /// Lanes in use.
    pub lanes: u32,
    /// Lanes that it supports.
    pub most: u32,
}

/// XIDs after which a GPU computes nothing until it is reset: its microcontrollers have halted, it
/// has left the bus, its memory cannot be trusted, or its firmware does not respond.
const FATAL: [u32; 5] = [62, 79, 95, 119, 120];

/// NVIDIA's name for an XID; `None` for rare ones.
pub fn xid_meaning(xid: u32) -> Option<&'static str> {
    Some(match xid {
        13 => "graphics engine exception",
        31 => "GPU memory page fault",
        43 => "GPU stopped processing",
        45 => "preemptive cleanup",
        48 => "double-bit ECC error",
        62 => "internal microcontroller halt",
        63 => "row remapping event",
        64 => "row remapping failure",
        74 => "NVLink error",
        79 => "GPU has fallen off the bus",
        94 => "contained memory error",
        95 => "uncontained memory error",
        119 => "GSP RPC timeout",
        120 => "GSP error",
        140 => "unrecovered ECC error",
        145 | 149 => "NVLink error",
        _ => return None,
    })
}

/// `XID 79 (GPU has fallen off the bus)`
fn xid_text(xid: u32) -> String {
    xid_meaning(xid).map_or_else(|| format!("XID {xid}"), |meaning| format!("XID {xid} ({meaning})"))
}

impl GpuReport {
    /// Most XIDs kept: a failing GPU repeats the same ones.
    pub const MAX_XIDS: usize = 16;
    /// Tolerated percentage of time with clocks reduced by heat or by the machine.
    const SLOWED_PERCENT: f64 = 10.0;
    /// Minimum monitoring time for percentages to be meaningful.
    const MIN_SECONDS: f64 = 30.0;

    /// Percentage of the time in which a kernel ran; `None` if not reported.
    pub fn busy_percent(&self) -> Option<f64> {
        self.busy_seconds.filter(|_| self.seconds > 0.0).map(|busy| 100.0 * busy / self.seconds)
    }

    /// Percentage of the time with clocks reduced for this cause.
    pub fn slowed_percent(&self, by: SlowedBy) -> f64 {
        let seconds = self.slowed.iter().find(|slowed| slowed.by == by).map_or(0.0, |slowed| slowed.seconds);
        if self.seconds > 0.0 { 100.0 * seconds / self.seconds } else { 0.0 }
    }

    /// Errors that the driver reported, as a suffix for another failure message; empty if there are
    /// none.
    pub fn errors(&self) -> String {
        let mut known: Vec<u32> = Vec::new();
        for xid in &self.xids {
            if !known.contains(xid) {
                known.push(*xid);
            }
        }
        let mut words: Vec<String> = known.into_iter().map(xid_text).collect();
        if let Some(count) = self.uncorrected_errors.filter(|count| *count > 0) {
            words.push(format!("{count} memory errors that ECC could not mend"));
        }
        if self.is_lost {
            words.push("GPU lost".to_owned());
        }
        if words.is_empty() {
            return String::new();
        }
        format!("; the driver reported for GPU {}: {}", self.bus, words.join(", "))
    }

    /// Whether the GPU can no longer compute anything.
    pub fn is_unusable(&self) -> bool {
        self.is_lost || self.xids.iter().any(|xid| FATAL.contains(xid))
    }

    /// The most urgent problem, if it needs attention. Reaching the power limit is normal.
    pub fn worst_fault(&self) -> Option<GpuFault> {
        // The first fatal XID, else the last one: errors only follow from an earlier one if that
        // was fatal.
        let xid = self.xids.iter().find(|xid| FATAL.contains(xid)).or(self.xids.last());
        if let Some(xid) = xid {
            return Some(GpuFault::Xid { xid: *xid });
        }
        if self.is_lost {
            return Some(GpuFault::Lost);
        }
        if self.uncorrected_errors.is_some_and(|count| count > 0) {
            return Some(GpuFault::MemoryErrors);
        }
        let unusual = [SlowedBy::Temperature, SlowedBy::PowerBrake, SlowedBy::Hardware];
        let slow = unusual.into_iter().find(|by| self.slowed_percent(*by) >= GpuReport::SLOWED_PERCENT);
        if let Some(by) = slow.filter(|_| self.seconds >= GpuReport::MIN_SECONDS) {
            return Some(GpuFault::Slowed { by });
        }
        let narrow = self.pcie.filter(|width| width.lanes < width.most);
        narrow.map(|PcieWidth { lanes, most }| GpuFault::NarrowLink { lanes, most })
    }
}

/// A GPU problem that needs attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum GpuFault {
    /// The driver reported a critical error.
    Xid {
        /// Number in NVIDIA's XID catalogue.
        xid: u32,
    },
    /// The driver cannot reach the GPU.
    Lost,
    /// ECC could not correct a memory error.
    MemoryErrors,
    /// The clocks are reduced for much of the time.
    Slowed {
        /// The cause.
        by: SlowedBy,
    },
    /// The PCIe link uses fewer lanes than it supports.
    NarrowLink {
        /// Lanes in use.
        lanes: u32,
        /// Lanes that it supports.
        most: u32,
    },
}

impl GpuFault {
    /// Sort key by urgency: 0 is the most urgent.
    pub fn urgency(&self) -> u8 {
        match self {
            GpuFault::Xid { .. } => 0,
            GpuFault::Lost => 1,
            GpuFault::MemoryErrors => 2,
            GpuFault::Slowed { .. } => 3,
            GpuFault::NarrowLink { .. } => 4,
        }
    }
}

impl fmt::Display for GpuFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GpuFault::Xid { xid } => f.write_str(&xid_text(*xid)),
            GpuFault::Lost => f.write_str("the driver cannot reach it"),
            GpuFault::MemoryErrors => f.write_str("memory errors that ECC could not mend"),
            GpuFault::Slowed { by } => write!(f, "clocks are lowered by {}", by.label()),
            GpuFault::NarrowLink { lanes, most } => write!(f, "its PCIe link uses {lanes} of {most} lanes"),
        }
    }
}

/// PCI address of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct PciAddress {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

impl From<PciAddress> for String {
    fn from(address: PciAddress) -> String {
        address.to_string()
    }
}

impl TryFrom<String> for PciAddress {
    type Error = String;

    fn try_from(text: String) -> Result<PciAddress, String> {
        PciAddress::parse(&text)
            .ok_or_else(|| format!("PCI address: got `{text}`; expected an address like 0000:17:00.0"))
    }
}

impl PciAddress {
    /// Parses an address. The driver writes the domain with four digits, NVML with eight.
    pub fn parse(text: &str) -> Option<PciAddress> {
        let (rest, function) = text.trim().rsplit_once('.')?;
        let mut parts = rest.rsplit(':');
        let (device, bus, domain) = (parts.next()?, parts.next()?, parts.next().unwrap_or("0"));
        let byte = |text: &str| u8::from_str_radix(text, 16).ok();
        let domain = u32::from_str_radix(domain, 16).ok()?;
        Some(PciAddress { domain, bus: byte(bus)?, device: byte(device)?, function: byte(function)? })
    }
}

/// The most urgent GPU problem of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuTrouble {
    /// The rank that uses the GPU.
    pub rank: u32,
    /// Its node, from 0.
    pub node_rank: u32,
    /// PCI address of the GPU on that node; absent if the driver's address has another format.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bus: Option<PciAddress>,
    /// The problem.
    pub trouble: GpuFault,
}

impl GpuTrouble {
    /// `GPU 0000:17:00.0: XID 79 (GPU has fallen off the bus)`
    pub fn what(&self) -> String {
        let gpu = self.bus.map_or_else(|| "its GPU".to_owned(), |bus| format!("GPU {bus}"));
        format!("{gpu}: {}", self.trouble)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> GpuReport {
        GpuReport { rank: 3, bus: "0000:17:00.0".into(), seconds: 100.0, ..GpuReport::default() }
    }

    fn slowed(by: SlowedBy, seconds: f64) -> GpuReport {
        GpuReport { slowed: vec![Slowed { by, seconds }], ..report() }
    }

    #[test]
    fn only_unusual_causes_count_and_the_worst_is_reported() {
        let wide = Some(PcieWidth { lanes: 16, most: 16 });
        for fine in [
            report(),
            slowed(SlowedBy::Power, 99.0),
            slowed(SlowedBy::Temperature, 9.9),
            GpuReport { pcie: wide, ..report() },
        ] {
            assert_eq!(fine.worst_fault(), None, "{fine:?}");
        }
        let short = GpuReport { seconds: 29.0, ..slowed(SlowedBy::Temperature, 29.0) };
        assert_eq!(short.worst_fault(), None, "too short for a percentage");
        assert_eq!(
            slowed(SlowedBy::Temperature, 10.0).worst_fault(),
            Some(GpuFault::Slowed { by: SlowedBy::Temperature })
        );
        let narrow = GpuReport { pcie: Some(PcieWidth { lanes: 4, most: 16 }), ..slowed(SlowedBy::Power, 50.0) };
        assert_eq!(narrow.worst_fault().unwrap().to_string(), "its PCIe link uses 4 of 16 lanes");
        let memory = GpuReport { uncorrected_errors: Some(1), corrected_errors: Some(7), ..narrow };
        assert_eq!(memory.worst_fault(), Some(GpuFault::MemoryErrors));
        let lost = GpuReport { is_lost: true, ..memory };
        assert_eq!(lost.worst_fault(), Some(GpuFault::Lost));
        let xids = GpuReport { xids: vec![63, 79, 45], ..lost };
        assert_eq!(xids.worst_fault().unwrap().to_string(), "XID 79 (GPU has fallen off the bus)");
        assert_eq!(GpuReport { xids: vec![63, 999], ..report() }.worst_fault().unwrap().to_string(), "XID 999");
    }

    #[test]
    fn only_fatal_xids_make_a_gpu_unusable() {
        assert!(
            !report().is_unusable() && !GpuReport { xids: vec![13, 31, 43, 45, 48, 63, 94], ..report() }.is_unusable()
        );
        assert!(GpuReport { is_lost: true, ..report() }.is_unusable());
        assert!(FATAL.into_iter().all(|xid| GpuReport { xids: vec![13, xid], ..report() }.is_unusable()));
    }

    #[test]
    fn errors_are_listed_once_each() {
        assert_eq!(report().errors(), "");
        let report = GpuReport { xids: vec![31, 45, 31], uncorrected_errors: Some(2), is_lost: true, ..report() };
        assert_eq!(
            report.errors(),
            "; the driver reported for GPU 0000:17:00.0: XID 31 (GPU memory page fault), XID 45 (preemptive cleanup), 2 memory errors \
             that ECC could not mend, GPU lost"
        );
    }

    #[test]
    fn four_and_eight_digit_domains_are_equal() {
        let address = PciAddress::parse("00000000:1B:00.0").unwrap();
        assert_eq!((Some(address), address.to_string().as_str()), (PciAddress::parse("0000:1b:00.0"), "0000:1b:00.0"));
        assert!(["", "1b", "0000:zz:00.0", "0000:1b:00"].into_iter().all(|text| PciAddress::parse(text).is_none()));
        let trouble = GpuTrouble { rank: 3, node_rank: 1, bus: Some(address), trouble: GpuFault::Xid { xid: 79 } };
        let text = r#"{"rank":3,"nodeRank":1,"bus":"0000:1b:00.0","trouble":{"kind":"xid","xid":79}}"#;
        assert_eq!(serde_json::to_string(&trouble).unwrap(), text);
        assert_eq!(serde_json::from_str::<GpuTrouble>(text).unwrap(), trouble);
        assert_eq!(trouble.what(), "GPU 0000:1b:00.0: XID 79 (GPU has fallen off the bus)");
    }
}
