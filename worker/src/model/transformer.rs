//! Shared by GPT and BERT.

use super::check_sizes;
use crate::nn::ModelError;

/// Standard deviation of initial weights.
pub(super) const DEVIATION: f32 = 0.02;

pub(super) struct Sizes {
    pub layers: u32,
    pub hidden: u32,
    pub heads: u32,
    pub context: u32,
    pub vocabulary: u32,
}

impl Sizes {
    /// # Errors
    /// A size is 0, or heads do not divide the hidden size.
    pub fn check(&self) -> Result<(), ModelError> {
        check_sizes(&[
            ("layers", self.layers),
            ("hidden size", self.hidden),
            ("heads", self.heads),
            ("context length", self.context),
            ("vocabulary size", self.vocabulary),
        ])?;
        if self.hidden.is_multiple_of(self.heads) {
            return Ok(());
        }
        Err(ModelError::Heads { hidden: self.hidden as usize, heads: self.heads as usize })
    }
}
