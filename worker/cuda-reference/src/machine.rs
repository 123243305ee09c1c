//! What the blocks and warps of a launch have in common.

use crate::counts::Counts;
use crate::memory::{Allocation, Memory};
use crate::ptx::{Constant, Entry, Register};
use crate::race::Now;

/// A kernel with its arguments.
pub(crate) struct Kernel<'a> {
    pub(crate) entry: &'a Entry,
    pub(crate) constants: Vec<(Register, Constant)>,
    pub(crate) blocks: u32,
    pub(crate) threads: u32,
    pub(crate) shared_bytes: usize,
    pub(crate) seed: u64,
    /// Whether sectors and bank conflicts are counted.
    pub(crate) is_counted: bool,
}

/// What all warps of a launch share.
pub(crate) struct Machine<'a> {
    pub(crate) memory: &'a mut Memory,
    pub(crate) shared: Allocation,
    pub(crate) now: Now,
    pub(crate) is_counted: bool,
    pub(crate) counts: Counts,
}
