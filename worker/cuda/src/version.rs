//! Formats NVIDIA version numbers.

/// Version of a driver or of its API, `major * 1000 + minor * 10` (`cuda.h`).
pub fn cuda(number: i32) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}

/// `major * 10000 + minor * 100 + patch`, as in cuBLASLt, cuDNN since 9 and NCCL since 2.9. Older
/// versions are `major * 1000 + minor * 100 + patch`, which is less than 10000 for all majors below
/// 10.
pub fn library(number: i64) -> String {
    let major = if number < 10_000 { 1000 } else { 10_000 };
    format!("{}.{}.{}", number / major, number % major / 100, number % 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_become_versions() {
        assert_eq!(cuda(13_020), "13.2");
        assert_eq!(cuda(12_000), "12.0");
        assert_eq!(cuda(11_080), "11.8");
        assert_eq!(library(92_600), "9.26.0");
        assert_eq!(library(8_907), "8.9.7");
        assert_eq!(library(130_401), "13.4.1");
        assert_eq!(library(22_703), "2.27.3");
        assert_eq!(library(2_708), "2.7.8");
    }
}
