//! All the text, in memory, divided into training and validation.

use super::error::DataError;
use super::{files, split};
use switchyard_worker_contract::config::TextData;
use xxhash_rust::xxh3::Xxh3;

/// Most bytes of text that are kept in memory: 4 GiB. Every rank keeps all of them.
pub const MAX_BYTES: u64 = 4 << 30;

/// Text for training and validation. One byte is one token.
#[derive(Debug)]
pub struct Corpus {
    train: Vec<u8>,
    validation: Vec<u8>,
    files: u64,
    empty_files: u64,
}

impl Corpus {
    /// Reads all files and divides their text.
    ///
    /// `data.path` is a file, or a directory of which every file is read that matches a pattern of `data.include` (no
    /// pattern: every file) and none of `data.exclude`. Hidden files and directories are left out, and directories
    /// marked by a `CACHEDIR.TAG` such as cargo's `target`; links to directories are not followed. Files are read in
    /// the order of their paths, as bytes, whatever is in them. With a `data.validation_fraction` above 0 both sides
    /// get at least one window of `context_length` tokens, however short the text is.
    ///
    /// # Errors
    /// See [`DataError`]. Whether the text suffices for a step is said by [`super::Sampler::new`].
    pub fn load(data: &TextData, context_length: u32) -> Result<Self, DataError> {
        Self::load_up_to(data, context_length, MAX_BYTES)
    }

    fn load_up_to(data: &TextData, context_length: u32, limit: u64) -> Result<Self, DataError> {
        if !(0.0..=0.5).contains(&data.validation_fraction) {
            return Err(DataError::Fraction { got: data.validation_fraction });
        }
        if context_length == 0 {
            return Err(DataError::Zero { field: "spec.engine.model.gpt.contextLength" });
        }
        let text = files::read(data, limit)?;
        let got = text.bytes.len() as u64;
        let (train, validation) =
            split::divide(text.bytes, &text.ends, data.validation_fraction, context_length as usize + 1)
                .ok_or(DataError::NoRoomForValidation { got, context_length: context_length.into() })?;
        Ok(Self { train, validation, files: text.ends.len() as u64, empty_files: text.empty_files })
    }

    /// The text for training.
    pub fn train(&self) -> &[u8] {
        &self.train
    }

    /// The text for validation; empty when the fraction is 0.
    pub fn validation(&self) -> &[u8] {
        &self.validation
    }

    /// Files read, without the empty ones.
    pub fn files(&self) -> u64 {
        self.files
    }

    /// Files left out because they are empty.
    pub fn empty_files(&self) -> u64 {
        self.empty_files
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        (self.train.len() + self.validation.len()) as u64
    }

    /// Bytes of memory it takes.
    pub fn memory_bytes(&self) -> u64 {
        (self.train.capacity() + self.validation.capacity()) as u64
    }

    /// Digest of both splits, 32 hexadecimal digits. Two ranks with the same digest read the same text and divided it
    /// in the same way. It is computed anew by every call.
    pub fn digest(&self) -> String {
        let mut hash = Xxh3::new();
        for split in [&self.train, &self.validation] {
            // Without the length a byte could move from one split to the other unseen.
            hash.update(&(split.len() as u64).to_le_bytes());
            hash.update(split);
        }
        format!("{:032x}", hash.digest128())
    }
}

#[cfg(test)]
mod tests;
