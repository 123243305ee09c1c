//! Files of token ids, as written by data-preparation tools.
//!
//! They are read in chunks rather than memory-mapped: if a mapped file is truncated, the process
//! dies with SIGBUS regardless of earlier checks, whereas a read past the new end is a reportable
//! error. A window is a few KiB in the page cache, and widening the tokens to 32 bits copies them
//! anyway.

use super::error::DataError;
use super::files::{self, Stamp};
use super::split::{self, Block};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use switchyard_worker_contract::config::TokenType;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// Maximum tokens per block; a block belongs to one split.
const BLOCK: usize = 64 << 10;
/// Minimum tokens per block.
const SMALLEST_BLOCK: usize = 512;
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
        self.file.stamp.check(&self.file.path, &self.file.file)
    }

    pub(super) fn memory_bytes(&self) -> u64 {
        (self.starts.capacity() * size_of::<(u64, u64)>()) as u64
    }
}

/// The training and validation tokens of the files.
pub(super) struct Opened {
    pub train: Pieces,
    pub validation: Option<Pieces>,
    pub files: u64,
    pub bytes: u64,
    pub digest: Xxh3,
}

/// Opens a file, or `train.bin` and `val.bin` of a directory. All tokens are read once, to check
/// them and to hash each block, which decides its split. `needed`: tokens per window.
pub(super) fn open(
    path: &str,
    token_type: TokenType,
    vocabulary: u32,
    fraction: f64,
    needed: u64,
) -> Result<Opened, DataError> {
    let root = super::files::absolute(Path::new(path));
    let directory = super::files::kind(&root)?.is_dir();
    let mut digest = Xxh3::new();
    let train = if directory { root.join("train.bin") } else { root.clone() };
    let (train, blocks) = TokenFile::open(&train, token_type, vocabulary, &mut digest)?;
    let validation = root.join("val.bin");
    let pieces = |file: &Arc<TokenFile>, blocks: &[Block], side: bool| {
        let chosen = blocks.iter().filter(|block| block.validation == side);
        Pieces::new(Arc::clone(file), chosen.map(|block| block.range.start as u64..block.range.end as u64))
    };
    let bytes = train.stamp.len;
    if directory && validation.exists() {
        let (file, blocks_of_validation) = TokenFile::open(&validation, token_type, vocabulary, &mut digest)?;
        return Ok(Opened {
            train: pieces(&train, &blocks, false),
            validation: Some(pieces(&file, &blocks_of_validation, false)),
            files: 2,
            bytes: bytes + file.stamp.len,
            digest,
        });
    }
    let mut blocks = blocks;
    let mut validation = None;
    if fraction > 0.0 {
        split::choose(&mut blocks, fraction);
        split::balance(&mut blocks, needed as usize).ok_or_else(|| DataError::NoRoomForValidation {
            got: bytes / train.width,
            item: "tokens",
            sample: format!("a window of {needed} tokens"),
        })?;
        let chosen = pieces(&train, &blocks, true);
        // Ranks with different fractions must not get the same digest.
        digest.update(&chosen.len().to_le_bytes());
        validation = Some(chosen);
    }
    Ok(Opened { train: pieces(&train, &blocks, false), validation, files: 1, bytes, digest })
}

impl TokenFile {
    fn open(
        path: &Path,
        token_type: TokenType,
        vocabulary: u32,
        digest: &mut Xxh3,
    ) -> Result<(Arc<TokenFile>, Vec<Block>), DataError> {
        files::check_uncompressed(path, &[])?;
        let file = super::files::open(path).map_err(|error| DataError::unreadable(path, error))?;
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
        let file = TokenFile { path: path.to_owned(), file, stamp, width, vocabulary };
        let blocks = file.scan(digest)?;
        Ok((Arc::new(file), blocks))
    }

    /// Reads all tokens; returns the blocks with their hashes.
    fn scan(&self, digest: &mut Xxh3) -> Result<Vec<Block>, DataError> {
        let total = self.stamp.len / self.width;
        let size = ((total / BLOCKS) as usize).clamp(SMALLEST_BLOCK, BLOCK);
        digest.update(&self.stamp.len.to_le_bytes());
        let mut blocks = Vec::new();
        let (mut tokens, mut bytes) = (vec![0; size.min(total as usize)], Vec::new());
        let mut start = 0;
        while start < total {
            let tokens = &mut tokens[..size.min((total - start) as usize)];
            self.read(start, tokens, &mut bytes)?;
            digest.update(&bytes);
            let range = start as usize..start as usize + tokens.len();
            start = range.end as u64;
            blocks.push(Block { range, hash: xxh3_64(&bytes), validation: false });
        }
        self.stamp.check(&self.path, &self.file)?;
        Ok(blocks)
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
