//! Sources whose content decides the split, so that it is read once before the first step.
//!
//! One rank reads all blocks: parts of token files, or the heads of image files. The others receive
//! the result, and each compares a share of the blocks of its own copy with it.

use super::dataset::Dataset;
use super::error::DataError;
use super::split::Block;
use super::token_file::TokenFiles;
use super::tokens::Tokens;
use super::windows::Windows;
use super::{folder, open, task::WindowKind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use switchyard_worker_contract::config::{Data, Reader};
use xxhash_rust::xxh3::xxh3_64;

/// An opened source.
pub enum Source {
    /// Nothing is left to read before the first step.
    Opened(Box<Dataset>),
    Unscanned(Box<Unscanned>),
}

/// Files whose blocks are still to be read.
pub struct Unscanned {
    data: Data,
    reader: Reader,
    content: Content,
    read: Arc<AtomicU64>,
}

pub(super) enum Content {
    Tokens(TokenFiles, WindowKind),
    Images(Box<folder::Unsplit>),
}

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
fn share(blocks: u64, rank: u32, world: u32) -> impl Iterator<Item = u64> {
    let first = u64::from(rank).checked_rem(blocks).unwrap_or(0);
    (first..blocks).step_by(world.max(1) as usize)
}

fn combine(hashes: impl Iterator<Item = u64>) -> u64 {
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
    fn decode(bytes: &[u8], blocks: u64) -> Option<Scan> {
        let (digest, bits) = bytes.split_first_chunk()?;
        let blocks = usize::try_from(blocks).ok()?;
        (bits.len() == blocks.div_ceil(8)).then(|| Scan {
            digest: u128::from_le_bytes(*digest),
            validation: (0..blocks).map(|block| bits[block / 8] >> (block % 8) & 1 == 1).collect(),
            hashes: Vec::new(),
        })
    }

    /// What [`Unscanned::share`] returns on a rank with the same files.
    pub fn share(&self, rank: u32, world: u32) -> u64 {
        combine(share(self.hashes.len() as u64, rank, world).map(|block| self.hashes[block as usize]))
    }
}

impl Unscanned {
    pub(super) fn new(data: &Data, reader: &Reader, content: Content) -> Unscanned {
        Unscanned { data: data.clone(), reader: *reader, content, read: Arc::default() }
    }

    fn blocks(&self) -> u64 {
        match &self.content {
            Content::Tokens(files, _) => files.blocks(),
            Content::Images(images) => images.len(),
        }
    }

    /// Description of the files without their contents; equal on ranks with the same files.
    pub fn files(&self) -> String {
        match &self.content {
            Content::Tokens(files, _) => format!("{} token bytes in {} blocks", files.bytes(), files.blocks()),
            Content::Images(images) => format!("{} images, digest {:032x}", images.len(), images.digest()),
        }
    }

    /// Counts the blocks that have been read.
    pub fn blocks_read(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.read)
    }

    /// Reads all blocks, and splits them into training and validation.
    ///
    /// # Errors
    /// A file cannot be read, a token is not in the vocabulary, or there is too little for the
    /// split.
    pub fn scan(&self) -> Result<Scan, DataError> {
        match &self.content {
            Content::Tokens(files, _) => files.scan(&self.read),
            Content::Images(images) => images.scan(&self.read),
        }
    }

    /// Reads the blocks that this rank compares; returns a hash of them.
    ///
    /// # Errors
    /// See [`Unscanned::scan`].
    pub fn share(&self, rank: u32, world: u32) -> Result<u64, DataError> {
        let blocks = share(self.blocks(), rank, world).inspect(|_| {
            self.read.fetch_add(1, Ordering::Relaxed);
        });
        let hashes = match &self.content {
            Content::Tokens(files, _) => files.hashes(blocks),
            Content::Images(images) => images.hashes(blocks),
        };
        Ok(combine(hashes?.into_iter()))
    }

    /// The scan of rank 0, from [`Scan::encode`]; `None` if it is not one of as many blocks.
    pub fn decode(&self, scan: &[u8]) -> Option<Scan> {
        Scan::decode(scan, self.blocks())
    }

    /// The data set, split according to a scan of the same files.
    ///
    /// # Errors
    /// The settings of images are invalid.
    pub fn dataset(&self, scan: &Scan) -> Result<Dataset, DataError> {
        let opened = match &self.content {
            Content::Tokens(files, shape) => {
                let (train, validation) = files.divide(scan);
                let windows = |pieces| Windows { tokens: Tokens::File(pieces), shape: *shape };
                open::Opened {
                    files: files.files(),
                    bytes: files.bytes(),
                    ..open::windows(windows(train), validation.map(windows), scan.digest)
                }
            }
            Content::Images(images) => open::folder(images.split(scan), &self.data, &self.reader)?,
        };
        Ok(Dataset::new(opened, &self.reader))
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
