//! State shared by the blocks and warps of a launch.

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
    /// Whether to count sectors and bank conflicts.
    pub(crate) is_counted: bool,
}

/// State shared by all warps of a launch.
pub(crate) struct Machine<'a> {
    pub(crate) memory: &'a mut Memory,
    pub(crate) shared: Allocation,
    pub(crate) now: Now,
    pub(crate) is_counted: bool,
    pub(crate) counts: Counts,
}
