//! Splits the data into training and validation.
//!
//! The data are cut into blocks (chunks of text, images, rows), and a hash of a block's content
//! decides its split. Duplicate blocks (a copied file, a licence) therefore stay in one split, the
//! result does not depend on names or order, and adding a file moves no block of another file as
//! long as the block size stays the same.

use std::collections::BTreeMap;
use std::ops::Range;
use xxhash_rust::xxh3::xxh3_64;

/// Usual block size in bytes.
const BLOCK: usize = 8 << 10;
/// Minimum block size in bytes: smaller blocks would tear sentences apart.
const SMALLEST_BLOCK: usize = 512;
/// Minimum number of blocks in a text, as far as [`SMALLEST_BLOCK`] allows: with fewer, a short
/// text could not be split at all.
const BLOCKS: usize = 64;

/// A part of the data that belongs to one split.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Block {
    /// Byte, token or row range.
    pub range: Range<usize>,
    /// Content hash.
    pub hash: u64,
    /// Whether it is for validation.
    pub validation: bool,
}

/// Assigns every block to the split that its hash selects.
pub(super) fn choose(blocks: &mut [Block], fraction: f64) {
    // The fraction as a threshold on 64-bit hashes. The cast saturates.
    let threshold = (fraction * 2.0_f64.powi(64)) as u64;
    for block in blocks {
        block.validation = block.hash < threshold;
    }
}

/// Splits the text into training and validation bytes, both in text order. `ends`: file ends.
/// `needed`: bytes of a window, including the byte that follows it. `None` if validation is
/// requested, but the text is too short for a window in both splits.
pub(super) fn divide(bytes: Vec<u8>, ends: &[usize], fraction: f64, needed: usize) -> Option<(Vec<u8>, Vec<u8>)> {
    if fraction <= 0.0 {
        return Some((bytes, Vec::new()));
    }
    let mut blocks = blocks(&bytes, ends);
    choose(&mut blocks, fraction);
    balance(&mut blocks, needed)?;
    Some(separate(bytes, &blocks))
}

/// The blocks of a text, not yet assigned to splits.
fn blocks(bytes: &[u8], ends: &[usize]) -> Vec<Block> {
    let size = (bytes.len() / BLOCKS).clamp(SMALLEST_BLOCK, BLOCK);
    let mut blocks = Vec::with_capacity(bytes.len() / size + ends.len());
    let mut start = 0;
    for end in ends {
        while start < *end {
            let range = start..cut(&bytes[..*end], start, size);
            start = range.end;
            let hash = xxh3_64(&bytes[range.clone()]);
            blocks.push(Block { range, hash, validation: false });
        }
    }
    blocks
}

/// The end of the block that starts at `start`: after the last newline in its last quarter, if
/// there is one.
fn cut(file: &[u8], start: usize, size: usize) -> usize {
    let end = start + size;
    if end >= file.len() {
        return file.len();
    }
    let quarter = end - size / 4;
    file[quarter..end].iter().rposition(|byte| *byte == b'\n').map_or(end, |newline| quarter + newline + 1)
}

/// Moves the blocks with the lowest hashes to validation, or those with the highest to training,
/// until both splits have `needed` bytes (tokens, rows). Equal blocks move together. `None` if
/// impossible.
pub(super) fn balance(blocks: &mut [Block], needed: usize) -> Option<()> {
    let size = |blocks: &[Block], validation: bool| -> usize {
        blocks.iter().filter(|block| block.validation == validation).map(|block| block.range.len()).sum()
    };
    for to in [true, false] {
        let mut missing = needed.saturating_sub(size(blocks, to));
        if missing == 0 {
            continue;
        }
        let mut groups: BTreeMap<u64, usize> = BTreeMap::new();
        for block in blocks.iter().filter(|block| block.validation != to) {
            *groups.entry(block.hash).or_default() += block.range.len();
        }
        let mut order: Vec<(u64, usize)> = groups.into_iter().collect();
        if !to {
            order.reverse();
        }
        for (hash, length) in order {
            if missing == 0 {
                break;
            }
            for block in blocks.iter_mut().filter(|block| block.hash == hash) {
                block.validation = to;
            }
            missing = missing.saturating_sub(length);
        }
    }
    (size(blocks, true) >= needed && size(blocks, false) >= needed).then_some(())
}

/// Extracts the validation blocks. Training is compacted in place, so peak memory is the text plus
/// the validation split.
fn separate(mut bytes: Vec<u8>, blocks: &[Block]) -> (Vec<u8>, Vec<u8>) {
    let length = blocks.iter().filter(|block| block.validation).map(|block| block.range.len()).sum();
    let mut validation = Vec::with_capacity(length);
    let mut kept = 0;
    for block in blocks {
        if block.validation {
            validation.extend_from_slice(&bytes[block.range.clone()]);
        } else {
            bytes.copy_within(block.range.clone(), kept);
            kept += block.range.len();
        }
    }
    bytes.truncate(kept);
    bytes.shrink_to_fit();
    (bytes, validation)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn lines(count: usize) -> Vec<u8> {
        (0..count).flat_map(|line| format!("line {line} of a text without repetition\n").into_bytes()).collect()
    }

    #[test]
    fn blocks_end_after_a_newline() {
        let text = lines(4000);
        let all = blocks(&text, &[text.len()]);
        assert!(all.len() >= BLOCKS, "{}", all.len());
        let mut next = 0;
        for block in &all {
            assert_eq!(block.range.start, next);
            next = block.range.end;
            assert_eq!(text[next - 1], b'\n');
        }
        assert_eq!(next, text.len());
        assert_eq!(cut(&[b'x'; 2000], 0, 512), 512, "without a newline, at the size");
        let early = [b"\n".as_slice(), &[b'x'; 2000]].concat();
        assert_eq!(cut(&early, 0, 512), 512, "a newline far before the end does not count");
    }

    #[test]
    fn no_block_crosses_files() {
        let text = lines(100);
        let ends = [700, 701, text.len()];
        let all = blocks(&text, &ends);
        for end in ends {
            assert!(all.iter().any(|block| block.range.end == end), "{end}");
        }
    }

    #[test]
    fn about_the_fraction() {
        let text = lines(200_000);
        let total = text.len();
        let (train, validation) = divide(text, &[total], 0.1, 129).expect("enough text");
        assert_eq!(train.len() + validation.len(), total);
        let share = validation.len() as f64 / total as f64;
        assert!((0.07..0.13).contains(&share), "{share}");
    }

    #[test]
    fn tiny_texts_get_both_sides_or_none() {
        // One block on each side at most.
        let text = lines(30);
        let (train, validation) = divide(text.clone(), &[text.len()], 0.01, 100).expect("two blocks or more");
        assert!(train.len() >= 100 && validation.len() >= 100, "{} {}", train.len(), validation.len());
        assert_eq!(divide(b"one block".to_vec(), &[9], 0.5, 4), None);
        assert_eq!(divide(b"one block".to_vec(), &[9], 0.0, 4), Some((b"one block".to_vec(), vec![])));
        // A repeated block cannot be in both splits.
        let same = vec![b'x'; 4096];
        assert_eq!(divide(same, &[4096], 0.5, 10), None);
    }

    proptest! {
        #[test]
        fn the_same_block_is_on_one_side(copies in 2usize..6, seed in 0u8..255, fraction in 0.01f64..0.5) {
            // Files of one block each, some of them copies.
            let file = |index: usize| vec![seed.wrapping_add((index % 40) as u8); 300 + index % 40];
            let mut text = Vec::new();
            let mut ends = Vec::new();
            for index in 0..40 * copies {
                text.extend(file(index));
                ends.push(text.len());
            }
            let mut all = blocks(&text, &ends);
            choose(&mut all, fraction);
            prop_assert_eq!(all.len(), ends.len());
            prop_assert!(balance(&mut all, 301).is_some());
            let mut sides: BTreeMap<&[u8], bool> = BTreeMap::new();
            for block in &all {
                let side = *sides.entry(&text[block.range.clone()]).or_insert(block.validation);
                prop_assert_eq!(side, block.validation);
            }
            let (train, validation) = separate(text.clone(), &all);
            prop_assert_eq!(train.len() + validation.len(), text.len());
            let expected: Vec<u8> =
                all.iter().filter(|block| !block.validation).flat_map(|block| text[block.range.clone()].to_vec()).collect();
            prop_assert_eq!(train, expected);
        }
    }
}
