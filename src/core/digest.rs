//! A digest for detecting changed text.

/// FNV-1a. Not collision-resistant: do not use on adversarial input.
pub fn fnv1a(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |digest, byte| (digest ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From the test vectors of the algorithm's authors.
    #[test]
    fn matches_published_test_vectors() {
        assert_eq!(
            ["", "a", "foobar"].map(fnv1a),
            [0xcbf2_9ce4_8422_2325, 0xaf63_dc4c_8601_ec8c, 0x8594_4171_f739_67e8]
        );
    }
}
