//! Yardsticks for a loss: what the best model without, or with one byte of, context could reach.

/// Entropy of a single byte, nats per token: the mean loss of the best model that knows only how often each byte
/// occurs. 0 for an empty text.
pub fn unigram_entropy(bytes: &[u8]) -> f64 {
    let mut counts = [0_u64; 256];
    for byte in bytes {
        counts[usize::from(*byte)] += 1;
    }
    weighted(&counts) / (bytes.len().max(1) as f64)
}

/// Entropy of a byte given the one before it, nats per token, over all neighbours: the mean loss of the best model that
/// knows only how often each byte follows each other byte. 0 for a text of fewer than two bytes.
pub fn bigram_entropy(bytes: &[u8]) -> f64 {
    let mut counts = vec![0_u64; 1 << 16];
    for pair in bytes.windows(2) {
        counts[usize::from(pair[0]) << 8 | usize::from(pair[1])] += 1;
    }
    counts.chunks_exact(256).map(weighted).sum::<f64>() / (bytes.len().saturating_sub(1).max(1) as f64)
}

/// Entropy of a distribution given by counts, times the sum of the counts.
fn weighted(counts: &[u64]) -> f64 {
    let total: u64 = counts.iter().sum();
    let terms = counts.iter().filter(|count| **count > 0).map(|count| {
        let count = *count as f64;
        count * (total as f64 / count).ln()
    });
    terms.sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_close(got: f64, expected: f64) {
        assert!((got - expected).abs() < 1e-12, "got {got}, expected {expected}");
    }

    #[test]
    fn by_hand() {
        let two = 2.0_f64.ln();
        assert_close(unigram_entropy(b"abab"), two);
        assert_close(bigram_entropy(b"abab"), 0.0);
        // a 3/4, b 1/4.
        assert_close(unigram_entropy(b"aaab"), 0.75 * (4.0_f64 / 3.0).ln() + 0.25 * 4.0_f64.ln());
        // Pairs aa aa ab: after a, two of three are a.
        assert_close(bigram_entropy(b"aaab"), (2.0 * 1.5_f64.ln() + 3.0_f64.ln()) / 3.0);
        // Pairs aa ab ba ab bb: after a, one a and two b; after b, one a and one b.
        let after_a = 3.0_f64.ln() + 2.0 * 1.5_f64.ln();
        assert_close(bigram_entropy(b"aababb"), (after_a + 2.0 * two) / 5.0);
    }

    #[test]
    fn limits() {
        for text in [b"".as_slice(), b"x", b"xxxxxxx"] {
            assert_close(unigram_entropy(text), 0.0);
            assert_close(bigram_entropy(text), 0.0);
        }
        let uniform: Vec<u8> = (0..=255).collect();
        assert_close(unigram_entropy(&uniform), 256.0_f64.ln());
        assert_close(bigram_entropy(&uniform), 0.0);
    }
}
