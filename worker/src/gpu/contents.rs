//! What memory of a device holds before the first step.

use super::launch::Memory;

/// What a memory of the device is before the first step.
#[derive(Debug, Clone, PartialEq)]
pub struct Contents {
    pub memory: Memory,
    pub bytes: usize,
    pub initial: Initial,
}

/// What is in a memory before the first step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Initial {
    /// Whatever: it is written before it is read.
    Unwritten,
    Zeros,
    /// As many as it has.
    Bytes(Vec<u8>),
}
