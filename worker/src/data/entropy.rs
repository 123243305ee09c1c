//! Reference values for the loss: the best that a model with no context, or with one token of
//! context, can reach.

use super::error::DataError;
use super::tokens::Tokens;

/// Largest vocabulary for token counts.
const MAX_VOCABULARY: u32 = 1 << 16;
/// Largest vocabulary for pair counts: 8 MiB.
const MAX_PAIRS: u32 = 1 << 10;
/// Tokens read at a time.
const PIECE: usize = 1 << 16;

/// Token entropies in nats, as reference values for next-token loss.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Entropies {
    /// Unigram entropy: the lower bound for a model without context.
    pub unigram: f64,
    /// Entropy given the previous token; `None` for a large vocabulary.
    pub bigram: Option<f64>,
}

/// Unigram and bigram entropies of tokens below `vocabulary`, in nats per token. 0 if there is
/// nothing to count.
pub(super) fn of(tokens: &Tokens, vocabulary: u32) -> Result<Option<Entropies>, DataError> {
    if vocabulary > MAX_VOCABULARY {
        return Ok(None);
    }
    let width = vocabulary as usize;
    let mut singles = vec![0_u64; width];
    let mut pairs = if vocabulary <= MAX_PAIRS { vec![0_u64; width * width] } else { Vec::new() };
    let (mut piece, mut bytes) = (vec![0; PIECE], Vec::new());
    let mut before = None;
    let mut start = 0;
    while start < tokens.len() {
        let piece = &mut piece[..PIECE.min((tokens.len() - start) as usize)];
        tokens.read(start, piece, &mut bytes)?;
        start += piece.len() as u64;
        for token in piece.iter().map(|token| *token as usize) {
            singles[token] += 1;
            if let Some(before) = before.replace(token).filter(|_| !pairs.is_empty()) {
                pairs[before * width + token] += 1;
            }
        }
    }
    let mean = |sum: f64, count: u64| sum / count.max(1) as f64;
    let given = pairs.chunks_exact(width).map(weighted).sum::<f64>();
    Ok(Some(Entropies {
        unigram: mean(weighted(&singles), tokens.len()),
        bigram: (!pairs.is_empty()).then(|| mean(given, tokens.len().saturating_sub(1))),
    }))
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

    fn assert_close(text: &[u8], unigram: f64, bigram: f64) {
        let got = of(&Tokens::Text(text.to_vec()), 256).expect("in memory").expect("a small vocabulary");
        assert!((got.unigram - unigram).abs() < 1e-12, "{got:?}, expected {unigram}");
        assert!((got.bigram.expect("a small vocabulary") - bigram).abs() < 1e-12, "{got:?}, expected {bigram}");
    }

    #[test]
    fn by_hand() {
        let two = 2.0_f64.ln();
        assert_close(b"abab", two, 0.0);
        // a 3/4, b 1/4. Pairs aa aa ab: after a, two of three are a.
        let single = 0.75 * (4.0_f64 / 3.0).ln() + 0.25 * 4.0_f64.ln();
        assert_close(b"aaab", single, (2.0 * 1.5_f64.ln() + 3.0_f64.ln()) / 3.0);
        // Pairs aa ab ba ab bb: after a, one a and two b; after b, one a and one b.
        let after_a = 3.0_f64.ln() + 2.0 * 1.5_f64.ln();
        assert_close(b"aababb", two, (after_a + 2.0 * two) / 5.0);
    }

    #[test]
    fn limits() {
        for text in [b"".as_slice(), b"x", b"xxxxxxx"] {
            assert_close(text, 0.0, 0.0);
        }
        // Longer than one chunk, so one pair spans two chunks.
        let uniform: Vec<u8> = (0..=255).cycle().take(2 * PIECE).collect();
        assert_close(&uniform, 256.0_f64.ln(), 0.0);
        let large = |vocabulary| of(&Tokens::Text(b"ab".to_vec()), vocabulary).expect("in memory");
        assert_eq!(large(5000).map(|entropies| entropies.bigram), Some(None));
        assert_eq!(large(70_000), None);
    }
}
