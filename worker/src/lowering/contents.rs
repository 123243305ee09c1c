//! Initial contents of device memories.

use super::launch::Memory;

/// A device memory before the first step.
#[derive(Debug, Clone, PartialEq)]
pub struct Contents {
    pub memory: Memory,
    pub bytes: usize,
    pub initial: Initial,
}

/// Initial contents of a memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Initial {
    /// Undefined; written before it is read.
    Unwritten,
    Zeros,
    /// Exactly as many bytes as the memory has.
    Bytes(Vec<u8>),
}
