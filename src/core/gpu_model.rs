//! NVLink count and speed, and PCIe generation, of GPU models.
//!
//! Raw one-way rate of a link, before protocol overhead: lanes times signalling rate. The sources
//! are NVIDIA's architecture white papers, which give the total of both directions: P100 160 GB/s,
//! V100 300, A100 600, H100 900, Blackwell 1800. A800 and H800 are sold with 400 GB/s, H20 and H200
//! with 900, and A30 with 200 over a bridge. The PCIe editions of A100 and H100 use 12 of the links
//! listed here.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuModel {
    /// Word in the product name that identifies the model.
    pub name: &'static str,
    /// NVLinks per GPU; 0 if it has none.
    pub links: u32,
    /// One-way speed of one link, in MB/s (10^6 bytes per second).
    pub megabytes_per_link: u64,
    /// PCIe generation. The link has 16 lanes.
    pub pcie_generation: u32,
}

/// Highest link count of any model.
pub const MAX_LINKS: u32 = 18;

const fn model(name: &'static str, links: u32, megabytes_per_link: u64, pcie_generation: u32) -> GpuModel {
    GpuModel { name, links, megabytes_per_link, pcie_generation }
}

/// Workstation models that share a number with an older NVLink model are omitted, and so stay
/// unknown.
const MODELS: [GpuModel; 25] = [
    model("P100", 4, 20_000, 3),
    model("V100", 6, 25_781, 3),
    model("A100", 12, 25_000, 4),
    model("A800", 8, 25_000, 4),
    model("A30", 4, 25_000, 4),
    model("H100", 18, 26_562, 5),
    model("H200", 18, 26_562, 5),
    model("H20", 18, 26_562, 5),
    model("H800", 8, 26_562, 5),
    model("GH200", 18, 26_562, 5),
    model("B200", 18, 53_125, 5),
    model("B300", 18, 53_125, 6),
    model("GB200", 18, 53_125, 5),
    model("GB300", 18, 53_125, 6),
    model("L40S", 0, 0, 4),
    model("L40", 0, 0, 4),
    model("L20", 0, 0, 4),
    model("L4", 0, 0, 4),
    model("L2", 0, 0, 4),
    model("T4", 0, 0, 3),
    model("P40", 0, 0, 3),
    model("P4", 0, 0, 3),
    model("A10", 0, 0, 4),
    model("A2", 0, 0, 4),
    model("A16", 0, 0, 4),
];

/// Workstation models without NVLink, each identified by all of its words.
const WITHOUT_NVLINK: [&[&str]; 4] = [&["RTX", "PRO"], &["RTX", "ADA"], &["RTX", "4090"], &["RTX", "5090"]];

/// Finds the model for a product name in any spelling: `h100`, `NVIDIA H100 80GB HBM3`,
/// `A100-SXM4-80GB`.
///
/// ```
/// use switchyard_core::gpu_model::find;
/// assert_eq!(find("Tesla V100-SXM2-32GB").unwrap().links, 6);
/// assert!(find("GeForce 256").is_none());
/// ```
pub fn find(name: &str) -> Option<GpuModel> {
    let name = name.to_ascii_uppercase();
    let words: Vec<&str> = name.split(|c: char| !c.is_ascii_alphanumeric()).collect();
    if words.contains(&"RTX") {
        let known = WITHOUT_NVLINK.iter().any(|all| all.iter().all(|word| words.contains(word)));
        // The oldest of these is from 2022 and has PCIe Gen4. For a newer GPU that is too low,
        // which is the safe side.
        return known.then(|| model("RTX", 0, 0, 4));
    }
    MODELS.into_iter().find(|model| words.contains(&model.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_any_spelling() {
        let links = |name: &str| find(name).map(|model| (model.links, model.megabytes_per_link));
        assert_eq!(links("NVIDIA H100 80GB HBM3"), Some((18, 26_562)));
        assert_eq!(links("a100-sxm4-80gb"), Some((12, 25_000)));
        assert_eq!(links("NVIDIA GB200"), Some((18, 53_125)));
        assert_eq!(links("NVIDIA H20"), links("NVIDIA H200"));
        assert_eq!(links("NVIDIA L40S"), Some((0, 0)));
        assert_eq!(links("NVIDIA RTX 6000 Ada Generation"), Some((0, 0)));
        for unknown in ["", "H1000", "NVIDIA RTX A6000", "MI300X", "80GB"] {
            assert_eq!(links(unknown), None, "{unknown}");
        }
    }

    #[test]
    fn totals_match_the_data_sheets() {
        for (name, total) in [("P100", 160), ("V100", 300), ("A100", 600), ("H800", 400), ("H100", 900), ("B200", 1800)]
        {
            let model = find(name).unwrap();
            let megabytes = u64::from(model.links) * model.megabytes_per_link * 2;
            assert!(megabytes.abs_diff(total * 1000) < total * 1000 / 14, "{name}: {megabytes}");
        }
        assert_eq!(MODELS.iter().map(|model| model.links).max(), Some(MAX_LINKS));
    }
}
