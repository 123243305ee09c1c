//! Files of token ids, as written by data-preparation tools.
//!
//! They are read in chunks rather than memory-mapped: if a mapped file is truncated, the process
//! dies with SIGBUS regardless of earlier checks, whereas a read past the new end is a reportable
//! error. A window is a few KiB in the page cache, and widening the tokens to 32 bits copies them
//! anyway.

use super::error::DataError;
use super::files::{self, Stamp};
use super::scan::Scan;
use super::split::{self, Block};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use switchyard_worker_contract::config::TokenType;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// Maximum tokens per block; a block belongs to one split.
const BLOCK: u64 = 64 << 10;
/// Minimum tokens per block.
const SMALLEST_BLOCK: u64 = 512;
/// Minimum number of blocks in a file, as far as [`SMALLEST_BLOCK`] allows.
const BLOCKS: u64 = 64;

/// An open file of little-endian token ids, all below the vocabulary when it was opened.
#[derive(Debug)]
pub(super) struct TokenFile {
    path: PathBuf,
    file: File,
    stamp: Stamp,
    width: u64,
    vocabulary: u32,
}

/// Concatenated pieces of a token file.
#[derive(Debug)]
pub(super) struct Pieces {
    file: Arc<TokenFile>,
    /// Start of each piece in this sequence and in the file. Ascending, with adjacent pieces
    /// merged.
    starts: Vec<(u64, u64)>,
    len: u64,
}

impl Pieces {
    /// Token `ranges` of the file, ascending.
    pub(super) fn new(file: Arc<TokenFile>, ranges: impl Iterator<Item = Range<u64>>) -> Pieces {
        let mut starts = Vec::new();
        let (mut len, mut end) = (0, None);
        for range in ranges {
            if end != Some(range.start) {
                starts.push((len, range.start));
            }
            len += range.end - range.start;
            end = Some(range.end);
        }
        starts.shrink_to_fit();
        Pieces { file, starts, len }
    }

    pub(super) fn read(&self, mut start: u64, mut to: &mut [u32], bytes: &mut Vec<u8>) -> Result<(), DataError> {
        let mut piece = self.starts.partition_point(|(here, _)| *here <= start) - 1;
        while !to.is_empty() {
            let (here, in_file) = self.starts[piece];
            let end = self.starts.get(piece + 1).map_or(self.len, |(next, _)| *next);
            let (now, later) = to.split_at_mut(to.len().min((end - start) as usize));
            self.file.read(in_file + (start - here), now, bytes)?;
            start += now.len() as u64;
            to = later;
            piece += 1;
        }
        Ok(())
    }

    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Checks that the file is unchanged.
    pub(super) fn check(&self) -> Result<(), DataError> {
        self.file.check()
    }

    pub(super) fn memory_bytes(&self) -> u64 {
        (self.starts.capacity() * size_of::<(u64, u64)>()) as u64
    }
}

/// A file, or `train.bin` and `val.bin` of a directory, before their tokens are read.
#[derive(Debug)]
pub(super) struct TokenFiles {
    train: Arc<TokenFile>,
    validation: Option<Arc<TokenFile>>,
    fraction: f64,
    /// Tokens per window.
    needed: u64,
}

/// Buffers for a block.
#[derive(Debug, Default)]
struct Buffer {
    tokens: Vec<u32>,
    bytes: Vec<u8>,
}

impl TokenFiles {
    /// Opens the files and checks their lengths.
    pub(super) fn open(
        path: &str,
        token_type: TokenType,
        vocabulary: u32,
        fraction: f64,
        needed: u64,
    ) -> Result<TokenFiles, DataError> {
        let root = files::absolute(Path::new(path));
        let is_directory = files::kind(&root)?.is_dir();
        let train = if is_directory { root.join("train.bin") } else { root.clone() };
        let train = TokenFile::open(&train, token_type, vocabulary)?;
        let validation = root.join("val.bin");
        let validation = (is_directory && validation.exists())
            .then(|| TokenFile::open(&validation, token_type, vocabulary))
            .transpose()?;
        Ok(TokenFiles { train, validation, fraction, needed })
    }

    /// The file and its block with this number; blocks of `val.bin` follow those of `train.bin`.
    fn locate(&self, block: u64) -> (&TokenFile, u64) {
        match (&self.validation, block.checked_sub(self.train.blocks())) {
            (Some(validation), Some(block)) => (validation, block),
            _ => (&self.train, block),
        }
    }

    /// Blocks of all files.
    pub(super) fn blocks(&self) -> u64 {
        self.train.blocks() + self.validation.as_ref().map_or(0, |file| file.blocks())
    }

    pub(super) fn files(&self) -> u64 {
        1 + u64::from(self.validation.is_some())
    }

    pub(super) fn bytes(&self) -> u64 {
        self.train.stamp.len + self.validation.as_ref().map_or(0, |file| file.stamp.len)
    }

    /// Reads these blocks; returns their hashes.
    pub(super) fn hashes(&self, blocks: impl Iterator<Item = u64>) -> Result<Vec<u64>, DataError> {
        let mut buffer = Buffer::default();
        let hash = |block| {
            let (file, block) = self.locate(block);
            file.read_block(block, &mut buffer)?;
            Ok(xxh3_64(&buffer.bytes))
        };
        blocks.map(hash).collect()
    }

    /// Reads all tokens once, to check them and to hash each block, which decides its split.
    /// `read` counts blocks.
    pub(super) fn scan(&self, read: &AtomicU64) -> Result<Scan, DataError> {
        let mut digest = Xxh3::new();
        let mut blocks = Vec::new();
        let mut buffer = Buffer::default();
        for file in std::iter::once(&self.train).chain(&self.validation) {
            digest.update(&file.stamp.len.to_le_bytes());
            for block in 0..file.blocks() {
                let range = file.read_block(block, &mut buffer)?;
                digest.update(&buffer.bytes);
                let range = range.start as usize..range.end as usize;
                blocks.push(Block { range, hash: xxh3_64(&buffer.bytes), validation: false });
                read.fetch_add(1, Ordering::Relaxed);
            }
            file.check()?;
        }
        if self.is_divided() {
            split::choose(&mut blocks, self.fraction);
            split::balance(&mut blocks, self.needed as usize).ok_or_else(|| DataError::NoRoomForValidation {
                got: self.train.stamp.len / self.train.width,
                item: "tokens",
                sample: format!("a window of {} tokens", self.needed),
            })?;
            // Ranks with different fractions must not get the same digest.
            let chosen = blocks.iter().filter(|block| block.validation).map(|block| block.range.len() as u64);
            digest.update(&chosen.sum::<u64>().to_le_bytes());
        }
        Ok(Scan::new(digest.digest128(), &blocks))
    }

    fn is_divided(&self) -> bool {
        self.validation.is_none() && self.fraction > 0.0
    }

    /// The training and validation tokens.
    pub(super) fn divide(&self, scan: &Scan) -> (Pieces, Option<Pieces>) {
        let pieces = |file: &Arc<TokenFile>, side: bool| {
            let chosen = (0..file.blocks()).filter(|block| scan.is_for_validation(*block) == side);
            Pieces::new(Arc::clone(file), chosen.map(|block| file.range(block)))
        };
        let all = |file: &Arc<TokenFile>| Pieces::new(Arc::clone(file), std::iter::once(0..file.tokens()));
        match &self.validation {
            Some(validation) => (all(&self.train), Some(all(validation))),
            None if self.is_divided() => (pieces(&self.train, false), Some(pieces(&self.train, true))),
            None => (all(&self.train), None),
        }
    }
}

impl TokenFile {
    fn open(path: &Path, token_type: TokenType, vocabulary: u32) -> Result<Arc<TokenFile>, DataError> {
        files::check_uncompressed(path, &[])?;
        let file = files::open(path).map_err(|error| DataError::unreadable(path, error))?;
        let stamp = Stamp::of(path, &file)?;
        let width = match token_type {
            TokenType::UInt16 => 2,
            TokenType::UInt32 => 4,
        };
        if stamp.len == 0 {
            return Err(DataError::format(path, "the file is empty", "tokens"));
        }
        if stamp.len % width != 0 {
            let expected = format!("a multiple of {width}, the bytes of a token (spec.engine.data.tokenType)");
            return Err(DataError::format(path, format!("{} bytes", stamp.len), expected));
        }
        Ok(Arc::new(TokenFile { path: path.to_owned(), file, stamp, width, vocabulary }))
    }

    fn tokens(&self) -> u64 {
        self.stamp.len / self.width
    }

    /// Tokens per block; the last block can have fewer.
    fn block_size(&self) -> u64 {
        (self.tokens() / BLOCKS).clamp(SMALLEST_BLOCK, BLOCK)
    }

    fn blocks(&self) -> u64 {
        self.tokens().div_ceil(self.block_size())
    }

    /// The tokens of a block.
    fn range(&self, block: u64) -> Range<u64> {
        let start = block * self.block_size();
        start..(start + self.block_size()).min(self.tokens())
    }

    /// Reads and checks the tokens of a block.
    fn read_block(&self, block: u64, buffer: &mut Buffer) -> Result<Range<u64>, DataError> {
        let range = self.range(block);
        buffer.tokens.resize((range.end - range.start) as usize, 0);
        self.read(range.start, &mut buffer.tokens, &mut buffer.bytes)?;
        Ok(range)
    }

    /// Checks that the file is unchanged.
    fn check(&self) -> Result<(), DataError> {
        self.stamp.check(&self.path, &self.file)
    }

    /// Reads the tokens from `start` on. `bytes` is a buffer for the file's bytes.
    pub(super) fn read(&self, start: u64, to: &mut [u32], bytes: &mut Vec<u8>) -> Result<(), DataError> {
        bytes.resize(to.len() * self.width as usize, 0);
        let read = files::retry(&self.path, || self.file.read_exact_at(bytes, start * self.width));
        read.map_err(|error| match error.kind() {
            std::io::ErrorKind::UnexpectedEof => {
                DataError::Changed { path: self.path.clone(), what: "it has become shorter".to_owned() }
            }
            _ => DataError::unreadable_now(&self.path, error),
        })?;
        if self.width == 2 {
            for (token, bytes) in to.iter_mut().zip(bytes.as_chunks().0) {
                *token = u32::from(u16::from_le_bytes(*bytes));
            }
        } else {
            for (token, bytes) in to.iter_mut().zip(bytes.as_chunks().0) {
                *token = u32::from_le_bytes(*bytes);
            }
        }
        // Checked on every read: a write between two checks must not become an out-of-range index
        // in the model.
        match to.iter().position(|token| *token >= self.vocabulary) {
            None => Ok(()),
            Some(place) => {
                let found = format!("token {} at position {}", to[place], start + place as u64);
                let expected = format!("tokens below the vocabulary of {}", self.vocabulary);
                Err(DataError::format(&self.path, found, expected))
            }
        }
    }
}
