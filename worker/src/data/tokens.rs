//! A sequence of tokens in any storage.

use super::error::DataError;
use super::phrases::SyntheticTokens;
use super::token_file::Pieces;

#[derive(Debug)]
pub(super) enum Tokens {
    /// Text in memory; a byte is a token.
    Text(Vec<u8>),
    /// Pieces of a file.
    File(Pieces),
    /// Synthetic tokens.
    Synthetic(SyntheticTokens),
}

impl Tokens {
    pub(super) fn len(&self) -> u64 {
        match self {
            Tokens::Text(text) => text.len() as u64,
            Tokens::File(pieces) => pieces.len(),
            Tokens::Synthetic(tokens) => tokens.len(),
        }
    }

    /// Whether they are not synthetic.
    pub(super) fn is_real(&self) -> bool {
        !matches!(self, Tokens::Synthetic(_))
    }

    /// Reads the tokens from `start` on. `bytes` is scratch memory.
    ///
    /// # Panics
    /// If the range exceeds the sequence.
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
            Tokens::Synthetic(tokens) => {
                tokens.read(start, to);
                Ok(())
            }
        }
    }

    pub(super) fn check(&self) -> Result<(), DataError> {
        match self {
            Tokens::File(pieces) => pieces.check(),
            Tokens::Text(_) | Tokens::Synthetic(_) => Ok(()),
        }
    }

    pub(super) fn memory_bytes(&self) -> u64 {
        match self {
            Tokens::Text(text) => text.capacity() as u64,
            Tokens::File(pieces) => pieces.memory_bytes(),
            Tokens::Synthetic(_) => 0,
        }
    }
}
