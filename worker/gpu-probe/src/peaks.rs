//! Peak matrix product rates from the vendor's data sheets: dense, without sparsity.

use switchyard_cuda::cublaslt::Arithmetic;
use switchyard_cuda::kernels::Element;

/// Format of a product's elements and its arithmetic; accumulation is in f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Precision {
    /// bf16 in and out.
    Bf16,
    /// f32 in and out, rounded to TF32 in the tensor cores.
    Tf32,
}

impl Precision {
    pub(crate) fn element(self) -> Element {
        match self {
            Precision::Bf16 => Element::Bf16,
            Precision::Tf32 => Element::F32,
        }
    }

    pub(crate) fn arithmetic(self) -> Arithmetic {
        match self {
            Precision::Bf16 => Arithmetic::Ieee,
            Precision::Tf32 => Arithmetic::Tf32,
        }
    }
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

/// Nominal peak in TFLOP/s; `None` for devices that are not in the table.
pub(crate) fn peak(device: &str, precision: Precision) -> Option<f64> {
    // Whole words only, because an L4 is not an L40.
    let words: Vec<&str> = device.split([' ', '-']).collect();
    let fits = |name: &str| {
        let name: Vec<&str> = name.split(' ').collect();
        words.windows(name.len()).any(|window| window == name)
    };
    let (_, bf16, tf32) = PEAKS.iter().find(|(name, ..)| fits(name))?;
    Some(match precision {
        Precision::Bf16 => *bf16,
        Precision::Tf32 => *tf32,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_match_by_whole_words() {
        assert_eq!(peak("NVIDIA H100 80GB HBM3", Precision::Bf16), Some(989.4));
        assert_eq!(peak("NVIDIA H100 PCIe", Precision::Bf16), Some(756.0));
        assert_eq!(peak("NVIDIA H200", Precision::Tf32), Some(494.7));
        assert_eq!(peak("NVIDIA A100-SXM4-40GB", Precision::Tf32), Some(156.0));
        assert_eq!(peak("NVIDIA L40", Precision::Bf16), None);
        assert_eq!(peak("NVIDIA GeForce RTX 4090", Precision::Bf16), None);
    }
}
