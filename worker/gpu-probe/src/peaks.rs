//! Peak matrix product rates from the vendor's data sheets: dense, without sparsity.

/// TFLOP/s by the format of the factors; accumulation is in f32.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Peak {
    pub(crate) bf16: f64,
    /// f32 in memory, rounded to TF32 in the tensor cores.
    pub(crate) tf32: f64,
}

/// Words in the device name, and TFLOP/s in bf16 and TF32. The first match counts.
const PEAKS: [(&str, f64, f64); 10] = [
    ("B200", 2250.0, 1125.0),
    ("H200 NVL", 835.0, 417.5),
    ("H200", 989.4, 494.7),
    ("GH200", 989.4, 494.7),
    ("H100 NVL", 835.0, 417.5),
    ("H100 PCIe", 756.0, 378.0),
    ("H100", 989.4, 494.7),
    ("A100", 312.0, 156.0),
    ("L40S", 362.0, 183.0),
    ("L4", 121.0, 60.0),
];

/// Nominal peak; `None` for devices that are not in the table.
pub(crate) fn peak(device: &str) -> Option<Peak> {
    // Whole words only, because an L4 is not an L40.
    let words: Vec<&str> = device.split([' ', '-']).collect();
    let fits = |name: &str| {
        let name: Vec<&str> = name.split(' ').collect();
        words.windows(name.len()).any(|window| window == name)
    };
    PEAKS.iter().find(|(name, ..)| fits(name)).map(|(_, bf16, tf32)| Peak { bf16: *bf16, tf32: *tf32 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_match_by_whole_words() {
        let bf16 = |device| peak(device).map(|peak| peak.bf16);
        assert_eq!(bf16("NVIDIA H100 80GB HBM3"), Some(989.4));
        assert_eq!(bf16("NVIDIA H100 PCIe"), Some(756.0));
        assert_eq!(peak("NVIDIA H200"), Some(Peak { bf16: 989.4, tf32: 494.7 }));
        assert_eq!(bf16("NVIDIA A100-SXM4-40GB"), Some(312.0));
        assert_eq!(peak("NVIDIA L40"), None);
        assert_eq!(peak("NVIDIA GeForce RTX 4090"), None);
    }
}
