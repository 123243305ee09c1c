//! How the GPU of a rank fares, as the driver's NVML sees it: errors of the hardware, and what keeps it from its speed.

use serde::{Deserialize, Serialize};
use std::fmt;

/// What a GPU has met since its rank began to watch it. Each one replaces the one before it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuReport {
    /// Rank among all ranks of the job.
    pub rank: u32,
    /// Its PCI address, such as `0000:17:00.0`.
    pub bus: String,
    /// Seconds that it was watched.
    pub seconds: f64,
    /// Seconds in which its clocks were lowered, by cause; a moment may have several causes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub slowed: Vec<Slowed>,
    /// Critical errors that the driver reported (XID), in order, the first [`GpuReport::MOST_XIDS`] of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub xids: Vec<u32>,
    /// The driver cannot reach it any more.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_lost: bool,
    /// Memory errors that ECC has mended; absent if they are not counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub corrected_errors: Option<u64>,
    /// Memory errors that ECC could not mend; absent if they are not counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uncorrected_errors: Option<u64>,
    /// Highest temperature.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub highest_celsius: Option<u32>,
    /// Fewest lanes of its PCIe link that were in use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pcie: Option<PcieWidth>,
}

/// A time in which clocks were lowered.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Slowed {
    /// Why.
    pub by: SlowedBy,
    /// How long.
    pub seconds: f64,
}

/// Why the clocks of a GPU are lower than they could be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum SlowedBy {
    /// It takes as much power as it may: usual under full load.
    Power,
    /// It is too hot.
    Temperature,
    /// The machine asks it to: its power supply is overloaded.
    PowerBrake,
    /// The hardware does not say why.
    Hardware,
}

impl SlowedBy {
    /// Names for people.
    pub fn words(self) -> &'static str {
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
    /// In use.
    pub lanes: u32,
    /// That it could use.
    pub most: u32,
}

/// XIDs after which a GPU computes nothing until it is reset: its microcontrollers have stopped, it has left the bus, its memory is not
/// to be trusted, or its firmware does not respond.
const FINAL: [u32; 5] = [62, 79, 95, 119, 120];

/// What an XID means, in NVIDIA's words; `None` for those that are rare.
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
    /// Most XIDs that are kept: a GPU that fails repeats the same ones.
    pub const MOST_XIDS: usize = 16;
    /// Share of the time in which clocks may be lowered by heat or by the machine, percent.
    const SLOWED_PERCENT: f64 = 10.0;
    /// Seconds before a share of time says anything.
    const ENOUGH_SECONDS: f64 = 30.0;

    /// Share of the time in which clocks were lowered by this cause, percent.
    pub fn slowed_percent(&self, by: SlowedBy) -> f64 {
        let seconds = self.slowed.iter().find(|slowed| slowed.by == by).map_or(0.0, |slowed| slowed.seconds);
        if self.seconds > 0.0 { 100.0 * seconds / self.seconds } else { 0.0 }
    }

    /// Errors that its driver reported, to be appended to what somebody else says of a failure; empty without any.
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
            words.push("that it is lost".to_owned());
        }
        if words.is_empty() {
            return String::new();
        }
        format!("; the driver reported for GPU {}: {}", self.bus, words.join(", "))
    }

    /// Whether it computes nothing any more.
    pub fn is_over(&self) -> bool {
        self.is_lost || self.xids.iter().any(|xid| FINAL.contains(xid))
    }

    /// The worst that it has met, if a person should look at it. That it reaches its power limit is usual.
    pub fn trouble(&self) -> Option<Trouble> {
        // The first that ends it, else the last: of several errors the later ones follow from the first only if it was final.
        let xid = self.xids.iter().find(|xid| FINAL.contains(xid)).or(self.xids.last());
        if let Some(xid) = xid {
            return Some(Trouble::Xid { xid: *xid });
        }
        if self.is_lost {
            return Some(Trouble::Lost);
        }
        if self.uncorrected_errors.is_some_and(|count| count > 0) {
            return Some(Trouble::MemoryErrors);
        }
        let unusual = [SlowedBy::Temperature, SlowedBy::PowerBrake, SlowedBy::Hardware];
        let slow = unusual.into_iter().find(|by| self.slowed_percent(*by) >= GpuReport::SLOWED_PERCENT);
        if let Some(by) = slow.filter(|_| self.seconds >= GpuReport::ENOUGH_SECONDS) {
            return Some(Trouble::Slowed { by });
        }
        let narrow = self.pcie.filter(|width| width.lanes < width.most);
        narrow.map(|PcieWidth { lanes, most }| Trouble::NarrowLink { lanes, most })
    }
}

/// What a person should look at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum Trouble {
    /// The driver reported a critical error.
    Xid {
        /// Its number in NVIDIA's catalogue.
        xid: u32,
    },
    /// The driver cannot reach the GPU.
    Lost,
    /// ECC could not mend an error of the memory.
    MemoryErrors,
    /// The clocks are lowered for much of the time.
    Slowed {
        /// Why.
        by: SlowedBy,
    },
    /// The PCIe link has fewer lanes in use than it could have.
    NarrowLink {
        /// In use.
        lanes: u32,
        /// That it could use.
        most: u32,
    },
}

impl Trouble {
    /// What a person should look at first has the least.
    pub fn weight(&self) -> u8 {
        match self {
            Trouble::Xid { .. } => 0,
            Trouble::Lost => 1,
            Trouble::MemoryErrors => 2,
            Trouble::Slowed { .. } => 3,
            Trouble::NarrowLink { .. } => 4,
        }
    }
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Trouble::Xid { xid } => f.write_str(&xid_text(*xid)),
            Trouble::Lost => f.write_str("the driver cannot reach it"),
            Trouble::MemoryErrors => f.write_str("memory errors that ECC could not mend"),
            Trouble::Slowed { by } => write!(f, "clocks are lowered by {}", by.words()),
            Trouble::NarrowLink { lanes, most } => write!(f, "its PCIe link uses {lanes} of {most} lanes"),
        }
    }
}

/// A place on a PCI bus.
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
        PciAddress::parse(&text).ok_or_else(|| format!("PCI address: got `{text}`; expected such as 0000:17:00.0"))
    }
}

impl PciAddress {
    /// Reads an address; the driver and NVML write the domain with four and with eight digits.
    pub fn parse(text: &str) -> Option<PciAddress> {
        let (rest, function) = text.trim().rsplit_once('.')?;
        let mut parts = rest.rsplit(':');
        let (device, bus, domain) = (parts.next()?, parts.next()?, parts.next().unwrap_or("0"));
        let byte = |text: &str| u8::from_str_radix(text, 16).ok();
        let domain = u32::from_str_radix(domain, 16).ok()?;
        Some(PciAddress { domain, bus: byte(bus)?, device: byte(device)?, function: byte(function)? })
    }
}

/// The GPU of a job that a person should look at first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuTrouble {
    /// The rank that computes on it.
    pub rank: u32,
    /// Its node, from 0.
    pub node_rank: u32,
    /// Where the GPU is on that node; absent if the driver writes addresses in another way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bus: Option<PciAddress>,
    /// What it has met.
    pub trouble: Trouble,
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
    fn the_worst_is_named_and_what_is_usual_is_not() {
        let wide = Some(PcieWidth { lanes: 16, most: 16 });
        for fine in [
            report(),
            slowed(SlowedBy::Power, 99.0),
            slowed(SlowedBy::Temperature, 9.9),
            GpuReport { pcie: wide, ..report() },
        ] {
            assert_eq!(fine.trouble(), None, "{fine:?}");
        }
        let short = GpuReport { seconds: 29.0, ..slowed(SlowedBy::Temperature, 29.0) };
        assert_eq!(short.trouble(), None, "too short to tell");
        assert_eq!(slowed(SlowedBy::Temperature, 10.0).trouble(), Some(Trouble::Slowed { by: SlowedBy::Temperature }));
        let narrow = GpuReport { pcie: Some(PcieWidth { lanes: 4, most: 16 }), ..slowed(SlowedBy::Power, 50.0) };
        assert_eq!(narrow.trouble().unwrap().to_string(), "its PCIe link uses 4 of 16 lanes");
        let memory = GpuReport { uncorrected_errors: Some(1), corrected_errors: Some(7), ..narrow };
        assert_eq!(memory.trouble(), Some(Trouble::MemoryErrors));
        let lost = GpuReport { is_lost: true, ..memory };
        assert_eq!(lost.trouble(), Some(Trouble::Lost));
        let xids = GpuReport { xids: vec![63, 79, 45], ..lost };
        assert_eq!(xids.trouble().unwrap().to_string(), "XID 79 (GPU has fallen off the bus)");
        assert_eq!(GpuReport { xids: vec![63, 999], ..report() }.trouble().unwrap().to_string(), "XID 999");
    }

    #[test]
    fn only_some_errors_are_the_end() {
        assert!(!report().is_over() && !GpuReport { xids: vec![13, 31, 43, 45, 48, 63, 94], ..report() }.is_over());
        assert!(GpuReport { is_lost: true, ..report() }.is_over());
        assert!(FINAL.into_iter().all(|xid| GpuReport { xids: vec![13, xid], ..report() }.is_over()));
    }

    #[test]
    fn errors_are_told_once_each() {
        assert_eq!(report().errors(), "");
        let report = GpuReport { xids: vec![31, 45, 31], uncorrected_errors: Some(2), is_lost: true, ..report() };
        assert_eq!(
            report.errors(),
            "; the driver reported for GPU 0000:17:00.0: XID 31 (GPU memory page fault), XID 45 (preemptive cleanup), 2 memory errors \
             that ECC could not mend, that it is lost"
        );
    }

    #[test]
    fn addresses_of_both_forms_are_one() {
        let address = PciAddress::parse("00000000:1B:00.0").unwrap();
        assert_eq!((Some(address), address.to_string().as_str()), (PciAddress::parse("0000:1b:00.0"), "0000:1b:00.0"));
        assert!(["", "1b", "0000:zz:00.0", "0000:1b:00"].into_iter().all(|text| PciAddress::parse(text).is_none()));
        let trouble = GpuTrouble { rank: 3, node_rank: 1, bus: Some(address), trouble: Trouble::Xid { xid: 79 } };
        let text = r#"{"rank":3,"nodeRank":1,"bus":"0000:1b:00.0","trouble":{"kind":"xid","xid":79}}"#;
        assert_eq!(serde_json::to_string(&trouble).unwrap(), text);
        assert_eq!(serde_json::from_str::<GpuTrouble>(text).unwrap(), trouble);
        assert_eq!(trouble.what(), "GPU 0000:1b:00.0: XID 79 (GPU has fallen off the bus)");
    }
}
