//! A run of tokens, wherever it is stored.

use super::error::DataError;
use super::phrases::MadeTokens;
use super::token_file::Pieces;

#[derive(Debug)]
pub(super) enum Tokens {
    /// Text in memory; a byte is a token.
    Text(Vec<u8>),
    /// Pieces of a file.
    File(Pieces),
    /// Synthetic tokens.
    Made(MadeTokens),
}

impl Tokens {
    pub(super) fn len(&self) -> u64 {
        match self {
            Tokens::Text(text) => text.len() as u64,
            Tokens::File(pieces) => pieces.len(),
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
            Tokens::File(pieces) => pieces.check(),
            Tokens::Text(_) | Tokens::Made(_) => Ok(()),
        }
    }

    pub(super) fn memory_bytes(&self) -> u64 {
        match self {
            Tokens::Text(text) => text.capacity() as u64,
            Tokens::File(pieces) => pieces.memory_bytes(),
            Tokens::Made(_) => 0,
        }
    }
}
