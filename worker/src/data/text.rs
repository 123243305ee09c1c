//! In-memory text, split into training and validation.

use super::error::DataError;
use super::skipped::SkippedFiles;
use super::{files, split};
use switchyard_worker_contract::config::Files;
use xxhash_rust::xxh3::Xxh3;

/// Text for training and validation. One byte is one token.
#[derive(Debug)]
pub(super) struct Corpus {
    pub train: Vec<u8>,
    /// Empty if the fraction is 0.
    pub validation: Vec<u8>,
    /// Non-empty files.
    pub files: u64,
    /// Empty files.
    pub skipped: SkippedFiles,
}

impl Corpus {
    /// Reads all files and splits their text.
    ///
    /// `data.path` is a file, or a directory. In a directory, every file is read that matches a
    /// pattern in `data.include` (no patterns: every file) and none in `data.exclude`. Hidden files
    /// and directories are skipped, as are directories marked by a `CACHEDIR.TAG`, such as cargo's
    /// `target`; links to directories are not followed. Files are read in path order, as bytes,
    /// whatever they contain. With a `fraction` above 0, both splits get at least `needed` bytes,
    /// one window, however short the text is. At most `limit` bytes are kept.
    pub(super) fn load(data: &Files, fraction: f64, needed: u64, limit: u64) -> Result<Self, DataError> {
        let text = files::read(data, limit)?;
        let got = text.bytes.len() as u64;
        let (train, validation) =
            split::divide(text.bytes, &text.ends, fraction, needed as usize).ok_or_else(|| {
                DataError::NoRoomForValidation { got, item: "tokens", sample: format!("a window of {needed} tokens") }
            })?;
        Ok(Self { train, validation, files: text.ends.len() as u64, skipped: text.skipped })
    }

    /// Hashes both splits: ranks with the same digest read the same text and split it in the same
    /// way.
    pub(super) fn digest(&self, hash: &mut Xxh3) {
        for split in [&self.train, &self.validation] {
            // Without the length, a byte could move between the splits unnoticed.
            hash.update(&(split.len() as u64).to_le_bytes());
            hash.update(split);
        }
    }
}

#[cfg(test)]
mod tests;
