//! A run of tokens, wherever it is stored.

use super::error::DataError;
use super::synthetic::MadeTokens;
use super::token_file::TokenFile;
use std::ops::Range;
use std::sync::Arc;

#[derive(Debug)]
pub(super) enum Tokens {
    /// Text in memory; a byte is a token.
    Text(Vec<u8>),
    /// Pieces of a file.
    File(Pieces),
    /// Synthetic tokens.
    Made(MadeTokens),
}

/// Pieces of a token file, one after the other.
#[derive(Debug)]
pub(super) struct Pieces {
    file: Arc<TokenFile>,
    /// Start of each piece in this run and in the file. Ascending, with neighbours merged.
    starts: Vec<(u64, u64)>,
    len: u64,
}

impl Pieces {
    /// `ranges` of tokens of the file, ascending.
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

    fn read(&self, mut start: u64, mut to: &mut [u32], bytes: &mut Vec<u8>) -> Result<(), DataError> {
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
}

impl Tokens {
    pub(super) fn len(&self) -> u64 {
        match self {
            Tokens::Text(text) => text.len() as u64,
            Tokens::File(pieces) => pieces.len,
            Tokens::Made(made) => made.len(),
        }
    }

    /// Whether they are not synthetic.
    pub(super) fn is_real(&self) -> bool {
        !matches!(self, Tokens::Made(_))
    }

    /// The tokens from `start` on. `bytes` is scratch memory.
    ///
    /// # Panics
    /// The range is not within the run.
    pub(super) fn read(&self, start: u64, to: &mut [u32], bytes: &mut Vec<u8>) -> Result<(), DataError> {
        let end = start + to.len() as u64;
        assert!(end <= self.len(), "tokens {start} to {end} of {}", self.len());
        match self {
            Tokens::Text(text) => {
                for (token, byte) in to.iter_mut().zip(&text[start as usize..]) {
                    *token = u32::from(*byte);
                }
                Ok(())
            }
            Tokens::File(pieces) => pieces.read(start, to, bytes),
            Tokens::Made(made) => {
                made.read(start, to);
                Ok(())
            }
        }
    }

    pub(super) fn check(&self) -> Result<(), DataError> {
        match self {
            Tokens::File(pieces) => pieces.file.check(),
            Tokens::Text(_) | Tokens::Made(_) => Ok(()),
        }
    }

    pub(super) fn memory_bytes(&self) -> u64 {
        match self {
            Tokens::Text(text) => text.capacity() as u64,
            Tokens::File(pieces) => (pieces.starts.capacity() * size_of::<(u64, u64)>()) as u64,
            Tokens::Made(_) => 0,
        }
    }
}
