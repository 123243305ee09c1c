//! Faults found in a launch.

use crate::ptx::Place;
use std::fmt;

/// The kinds of faults that a launch is checked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    #[error("{what} {bytes} bytes {place}, out of bounds")]
    OutOfBounds { what: &'static str, bytes: usize, place: String },
    #[error("{what} {bytes} bytes {place}, expected an address that is a multiple of {bytes}")]
    Misaligned { what: &'static str, bytes: usize, place: String },
    #[error("reads {bytes} bytes {place} that nobody has written")]
    NeverWritten { bytes: usize, place: String },
    #[error("{what} {bytes} bytes {place} that block {block}, thread {thread} {did} with no barrier between")]
    Race { what: &'static str, bytes: usize, place: String, block: u32, thread: u32, did: &'static str },
    #[error("{what} {bytes} bytes {place}, which the launch does not declare")]
    Undeclared { what: &'static str, bytes: usize, place: String },
    #[error("a barrier that {reached} of {threads} threads reach")]
    Barrier { reached: u32, threads: u32 },
    #[error("lanes {mask:#010x} in the mask, but {active:#010x} take part")]
    Mask { mask: u32, active: u32 },
    #[error("a value of lane {lane}, which does not take part")]
    InactiveLane { lane: u32 },
    #[error("a barrier of lanes {mask:#010x}: only those of whole warps are executed")]
    PartOfAWarp { mask: u32 },
    #[error("no end after {0} instructions of a warp")]
    Endless(u64),
}

/// The first fault of a launch, with its location.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    pub fault: Fault,
    pub kernel: String,
    /// Source line; 0 without `-lineinfo`.
    pub line: u32,
    /// Line at which the function containing `line` was inlined; 0 if it was not.
    pub inlined_at: u32,
    /// PTX line.
    pub ptx_line: u32,
    pub block: u32,
    /// Index within its block.
    pub thread: u32,
    /// Seed of the order of blocks and warps.
    pub seed: u64,
}

impl Finding {
    pub(crate) fn new(fault: Fault, kernel: &str, place: Place, [block, thread]: [u32; 2], seed: u64) -> Finding {
        let Place { ptx, line, inlined_at } = place;
        Finding { fault, kernel: kernel.to_owned(), line, inlined_at, ptx_line: ptx, block, thread, seed }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, line {}", self.kernel, self.line)?;
        if self.inlined_at != 0 {
            write!(f, " (inlined at line {})", self.inlined_at)?;
        }
        let Finding { ptx_line, block, thread, fault, seed, .. } = self;
        write!(f, ", PTX line {ptx_line}, block {block}, thread {thread}: {fault}; seed {seed}")
    }
}

impl std::error::Error for Finding {}
