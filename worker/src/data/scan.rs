//! What the ranks learn from files whose content decides the split.
//!
//! One rank reads all blocks: parts of token files, or the heads of image files. The others receive
//! the result, and each compares a share of the blocks of its own copy with it.

use super::split::Block;
use xxhash_rust::xxh3::xxh3_64;

/// What the blocks of all files contain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scan {
    digest: u128,
    /// Whether each block is for validation.
    validation: Vec<bool>,
    /// Of each block; empty on ranks that did not read them.
    hashes: Vec<u64>,
}

/// The blocks that a rank compares: every rank has at least one.
pub(super) fn share(blocks: u64, rank: u32, world: u32) -> impl Iterator<Item = u64> {
    let first = u64::from(rank).checked_rem(blocks).unwrap_or(0);
    (first..blocks).step_by(world.max(1) as usize)
}

/// A hash of hashes.
pub(super) fn combine(hashes: impl Iterator<Item = u64>) -> u64 {
    xxh3_64(&hashes.flat_map(u64::to_le_bytes).collect::<Vec<u8>>())
}

impl Scan {
    pub(super) fn new(digest: u128, blocks: &[Block]) -> Scan {
        let (validation, hashes) = blocks.iter().map(|block| (block.validation, block.hash)).unzip();
        Scan { digest, validation, hashes }
    }

    /// Digest of both splits.
    pub(super) fn digest(&self) -> u128 {
        self.digest
    }

    pub(super) fn is_for_validation(&self, block: u64) -> bool {
        self.validation[block as usize]
    }

    /// The digest and the split, for the other ranks: 16 bytes, and one bit per block.
    pub fn encode(&self) -> Vec<u8> {
        let bits = self
            .validation
            .chunks(8)
            .map(|bits| bits.iter().enumerate().fold(0, |byte, (at, validation)| byte | u8::from(*validation) << at));
        self.digest.to_le_bytes().into_iter().chain(bits).collect()
    }

    /// Decodes [`Scan::encode`]; `None` if the bytes do not describe this many blocks.
    pub(super) fn decode(bytes: &[u8], blocks: u64) -> Option<Scan> {
        let (digest, bits) = bytes.split_first_chunk()?;
        let blocks = usize::try_from(blocks).ok()?;
        (bits.len() == blocks.div_ceil(8)).then(|| Scan {
            digest: u128::from_le_bytes(*digest),
            validation: (0..blocks).map(|block| bits[block / 8] >> (block % 8) & 1 == 1).collect(),
            hashes: Vec::new(),
        })
    }

    /// What [`super::Unscanned::share`] returns on a rank with the same files.
    pub fn share(&self, rank: u32, world: u32) -> u64 {
        combine(share(self.hashes.len() as u64, rank, world).map(|block| self.hashes[block as usize]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shares_of_all_ranks_cover_all_blocks() {
        for (blocks, world) in [(1, 4), (7, 3), (64, 64), (1000, 7)] {
            let mut seen: Vec<u64> = (0..world).flat_map(|rank| share(blocks, rank, world)).collect();
            seen.sort_unstable();
            seen.dedup();
            assert_eq!(seen, (0..blocks).collect::<Vec<_>>(), "{blocks} blocks, {world} ranks");
            assert!(
                (0..world).all(|rank| share(blocks, rank, world).next().is_some()),
                "{blocks} blocks, {world} ranks"
            );
        }
        assert_eq!(share(0, 3, 4).next(), None);
    }

    #[test]
    fn the_split_of_any_number_of_blocks_is_decoded() {
        for blocks in [0, 1, 7, 8, 9, 1000] {
            let validation: Vec<bool> = (0..blocks).map(|block| block % 3 == 0).collect();
            let scan = Scan { digest: 7 << 100, validation, hashes: Vec::new() };
            let bytes = scan.encode();
            assert_eq!(Scan::decode(&bytes, blocks), Some(scan));
            assert_eq!(Scan::decode(&bytes, blocks + 8), None);
            assert_eq!(Scan::decode(&bytes[1..], blocks), None);
        }
    }
}
