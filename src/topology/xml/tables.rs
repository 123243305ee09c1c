//! NCCL's vocabulary and limits for topology files, as data: tags, attributes, words and sizes
//! (NVIDIA/nccl 2.30.7 `src/graph/{xml.h,xml.cc,topo.cc}`).

/// A tag that NCCL reads.
#[derive(Debug)]
pub(super) struct Tag {
    pub(super) name: &'static str,
    /// Valid parent tags; empty for the outermost tag.
    pub(super) inside: &'static [&'static str],
    /// Attributes that NCCL reads.
    pub(super) attributes: &'static [&'static str],
}

/// Every tag that NCCL reads.
pub(super) const TAGS: [Tag; 9] = [
    Tag { name: "system", inside: &[], attributes: &["version", "name"] },
    Tag {
        name: "cpu",
        inside: &["system"],
        attributes: &["numaid", "host_hash", "affinity", "arch", "vendor", "familyid", "modelid"],
    },
    Tag {
        name: "pci",
        inside: &["cpu", "pci"],
        attributes: &[
            "busid",
            "class",
            "vendor",
            "device",
            "subsystem_vendor",
            "subsystem_device",
            "link_speed",
            "link_width",
        ],
    },
    Tag { name: "pcilink", inside: &["pci"], attributes: &["target"] },
    Tag { name: "gpu", inside: &["pci"], attributes: &["dev", "sm", "rank", "gdr", "keep", "mlopart"] },
    Tag { name: "nvlink", inside: &["gpu"], attributes: &["target", "count", "tclass"] },
    Tag { name: "c2c", inside: &["gpu"], attributes: &["bw", "count"] },
    Tag { name: "nic", inside: &["pci", "cpu"], attributes: &[] },
    Tag {
        name: "net",
        inside: &["nic"],
        attributes: &[
            "name", "dev", "speed", "port", "latency", "guid", "maxconn", "gdr", "rail", "plane", "coll", "net", "gin",
            "rma", "keep",
        ],
    },
];

/// Maximum length of a name or value, in bytes. NCCL's buffers hold 256, but its reader stops at
/// the 254th character (`xmlGetValue`, `xmlGetToken`).
pub(super) const MAX_LEN: usize = 253;
/// Maximum number of attributes of a tag. NCCL reads no more.
pub(super) const MAX_ATTRIBUTES: usize = 16;
/// Maximum number of tags directly inside a tag.
pub(super) const MAX_CHILDREN: usize = 640;
/// Maximum number of tags in a file. NCCL has room for 256, and its reader needs room for one more
/// at every end tag.
pub(super) const MAX_ELEMENTS: usize = 255;

/// Maximum number of tags in a file for a machine with this many NICs. NCCL adds its own tags to
/// the same table of 256: up to 18 NVLinks and one C2C for the GPU of the rank, and two tags for
/// every NIC (`ncclTopoFillGpu`, `ncclTopoFillNet`).
pub(super) fn max_elements(nics: usize) -> usize {
    256_usize.saturating_sub(1 + 18 + 1 + 2 * nics)
}

/// PCIe link speeds as the kernel writes them, by prefix, in units of 100 Mbit/s per lane
/// (`kvDictPciGen`). Anything else counts as 8 GT/s.
const SPEEDS: [(&str, u32); 11] = [
    ("2.5 GT/s", 15),
    ("5 GT/s", 30),
    ("8 GT/s", 60),
    ("16 GT/s", 120),
    ("32 GT/s", 240),
    ("2.5 GT/s PCIe", 15),
    ("5.0 GT/s PCIe", 30),
    ("8.0 GT/s PCIe", 60),
    ("16.0 GT/s PCIe", 120),
    ("32.0 GT/s PCIe", 240),
    ("64.0 GT/s PCIe", 480),
];
/// Speed of a text that is not in [`SPEEDS`].
const UNKNOWN_SPEED: u32 = 60;

/// Speed of one lane in units of 100 Mbit/s; `None` if NCCL does not know the text.
pub(super) fn lane_speed(text: &str) -> Option<u32> {
    SPEEDS.iter().find(|(word, _)| text.starts_with(word)).map(|(_, speed)| *speed)
}

/// Rate of a link as NCCL counts it, in MB/s. NCCL computes width times speed divided by 80, in
/// GB/s (`ncclTopoAddPci`).
pub(super) fn link_rate(speed: Option<&str>, width: Option<&str>) -> u32 {
    let speed = speed.and_then(lane_speed).unwrap_or(UNKNOWN_SPEED);
    let width = width.and_then(number).and_then(|width| u32::try_from(width).ok()).filter(|width| *width > 0);
    // No slot has more than 32 lanes. This bounds nonsensical widths.
    width.unwrap_or(16).min(32) * speed * 25 / 2
}

/// Link speed of a PCIe generation, in the kernel's current spelling.
pub(super) fn speed_word(generation: u32) -> Option<&'static str> {
    const WORDS: [&str; 6] =
        ["2.5 GT/s PCIe", "5.0 GT/s PCIe", "8.0 GT/s PCIe", "16.0 GT/s PCIe", "32.0 GT/s PCIe", "64.0 GT/s PCIe"];
    usize::try_from(generation).ok()?.checked_sub(1).and_then(|at| WORDS.get(at)).copied()
}

/// Instruction sets: NCCL's name, and the name from `uname -m`.
pub(super) const ARCHITECTURES: [(&str, &str); 3] = [("x86_64", "x86_64"), ("arm64", "aarch64"), ("ppc64", "ppc64le")];

/// Vendors of x86 CPUs that NCCL knows.
pub(super) const VENDORS: [&str; 4] = ["GenuineIntel", "AuthenticAMD", "CentaurHauls", "  Shanghai  "];

/// Bus id prefix of made-up bridges, by convention of vendor files.
pub(super) const INVENTED: &str = "ffff:";

/// Placeholder for an NVSwitch that a virtual machine does not see (`ncclTopoGetXmlFromGpu`).
pub(super) const HIDDEN_SWITCH: &str = "fffffff:ffff:ff";

/// PCI classes, by prefix.
pub(super) mod class {
    pub(in super::super) const BRIDGE: &str = "0x060400";
    pub(in super::super) const GPU: &str = "0x03";
    pub(in super::super) const NIC: &str = "0x02";
    pub(in super::super) const SWITCH: &str = "0x0680";
    /// Full classes that the kernel shows for a GPU without a monitor, an InfiniBand adapter and an
    /// Ethernet adapter.
    pub(in super::super) const WHOLE_GPU: &str = "0x030200";
    pub(in super::super) const WHOLE_INFINIBAND: &str = "0x020700";
    pub(in super::super) const WHOLE_ETHERNET: &str = "0x020000";
    pub(in super::super) const WHOLE_SWITCH: &str = "0x068000";
}

/// Parses an integer, decimal or with `0x`.
pub(super) fn number(text: &str) -> Option<i64> {
    match text.strip_prefix("0x") {
        Some(hex) => i64::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    }
}

/// Whether this is a bus id as NCCL compares it: four domain digits, lower case (`checkBDFFormat`,
/// `int64ToBusId`).
pub(super) fn is_bus_id(text: &str) -> bool {
    let is_hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    text.len() == 12
        && text.bytes().enumerate().all(|(at, byte)| match at {
            4 | 7 => byte == b':',
            10 => byte == b'.',
            _ => is_hex(byte),
        })
}

/// Whether NCCL treats a PCI device of this class as a bridge, which is its default
/// (`kvDictPciClass`).
pub(super) fn is_bridge(class: &str) -> bool {
    ![class::GPU, class::NIC, class::SWITCH].iter().any(|other| class.starts_with(other))
}

#[cfg(test)]
mod tests {
    use super::*;
    use switchyard_core::rates;

    #[test]
    fn rates_match_core_rates() {
        for generation in 1..=6 {
            assert_eq!(link_rate(speed_word(generation), Some("16")), rates::pcie(Some(generation)), "{generation}");
        }
        assert_eq!((link_rate(None, None), link_rate(Some(""), Some("0"))), (12_000, 12_000));
        assert_eq!(link_rate(Some("16 GT/s"), Some("8")), 12_000);
        // NCCL's table lists this speed only with the suffix PCIe.
        assert_eq!((lane_speed("64 GT/s"), lane_speed("16.0 GT/s")), (None, None));
        assert_eq!(link_rate(Some("2.5 GT/s"), Some("99999999999")), 3_000, "nonsense is bounded");
    }

    #[test]
    fn bus_ids() {
        assert!(is_bus_id("0000:1a:00.0") && is_bus_id("ffff:ff:01.0"));
        for wrong in ["0000:1A:00.0", "00000000:1a:00.0", "10000:1a:00.0", "1a:00.0", "0000:1a:00", "0000:1a-00.0", ""]
        {
            assert!(!is_bus_id(wrong), "{wrong}");
        }
    }
}
