//! PTX as NVRTC writes it: entries, decoded once into steps that name registers by number.

mod arithmetic;
mod decode;
mod entry;
mod matrix;
mod operands;
mod scan;

use std::collections::BTreeMap;

/// Generic address of the first byte of shared memory.
pub(crate) const SHARED: u64 = 0x6000_0000_0000;

/// Text that is not PTX, or PTX that this crate does not execute.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line} of the PTX: {text}")]
pub struct ParseError {
    pub line: u32,
    pub text: String,
}

impl ParseError {
    fn new(line: u32, text: impl Into<String>) -> ParseError {
        ParseError { line, text: text.into() }
    }
}

/// The kernels of a compilation.
#[derive(Debug)]
pub struct Module {
    entries: BTreeMap<String, Entry>,
}

impl Module {
    /// Reads the PTX of one compilation.
    ///
    /// # Errors
    /// A directive, an instruction or a modifier that is not known, with its line.
    pub fn parse(text: &str) -> Result<Module, ParseError> {
        entry::module(&scan::tokens(text)?)
    }

    /// Names of the kernels.
    pub fn kernels(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// Bytes of each parameter of a kernel; `None` if it is not in the module.
    pub fn parameters(&self, kernel: &str) -> Option<&[usize]> {
        self.entries.get(kernel).map(|entry| entry.parameters.as_slice())
    }

    pub(crate) fn entry(&self, name: &str) -> Option<&Entry> {
        self.entries.get(name)
    }
}

/// A kernel.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) name: String,
    /// Sizes of the parameters in bytes.
    pub(crate) parameters: Vec<usize>,
    pub(crate) steps: Vec<Step>,
    /// Number of registers, constants included.
    pub(crate) registers: usize,
    /// Registers that have their value before the first step and keep it.
    pub(crate) constants: Vec<(Register, Constant)>,
    pub(crate) shared_bytes: usize,
    /// Whether it uses the shared memory whose size the launch gives.
    pub(crate) has_dynamic_shared: bool,
    /// The product of `.maxntid`.
    pub(crate) most_threads: Option<u32>,
}

pub(crate) type Register = u32;

/// A value that is known when a warp starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Constant {
    Bits(u64),
    Special(Special),
    /// Bytes of a parameter.
    Parameter {
        index: usize,
        offset: usize,
        bytes: usize,
    },
}

/// A special register. Launches have one dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Special {
    Thread,
    Threads,
    Block,
    Blocks,
    Lane,
    Warp,
}

/// Where a step stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Place {
    pub(crate) ptx: u32,
    /// Line of the source, 0 without `-lineinfo`.
    pub(crate) line: u32,
    /// Line at which the function of that line was inlined, 0 if it was not.
    pub(crate) inlined_at: u32,
}

/// One instruction.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Step {
    pub(crate) guard: Option<Guard>,
    pub(crate) operation: Operation,
    pub(crate) place: Place,
}

/// Lanes whose predicate is false, or true if negated, leave the step out.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Guard {
    pub(crate) predicate: Register,
    pub(crate) negated: bool,
}

/// A register of each lane of a warp.
pub(crate) type Lanes = [u64; 32];

/// A function of up to three registers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Function {
    /// For one lane.
    pub(crate) lane: fn(u64, u64, u64) -> u64,
    /// For all lanes in one call: most instructions of most kernels are of whole warps.
    pub(crate) warp: fn(&Lanes, &Lanes, &Lanes) -> Lanes,
}

/// `.ftz`: whether subnormal numbers are zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flush {
    Nothing,
    Operands,
    All,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Operation {
    Compute {
        function: Function,
        to: Register,
        from: [Register; 3],
        flush: Flush,
    },
    /// Copies parts of `bits` bits each out of one register, or into it.
    Split {
        to: [Register; 4],
        parts: usize,
        bits: u32,
        from: Register,
    },
    Join {
        to: Register,
        parts: usize,
        bits: u32,
        from: [Register; 4],
    },
    Load {
        access: Access,
        to: [Register; 4],
    },
    Store {
        access: Access,
        from: [Register; 4],
    },
    /// `to` gets the old value; without it the instruction is `red`.
    Atomic {
        access: Access,
        function: Function,
        to: Option<Register>,
        from: [Register; 2],
    },
    Branch {
        target: u32,
    },
    Exit,
    BlockBarrier,
    WarpBarrier {
        mask: Register,
    },
    Shuffle {
        mode: Shuffle,
        to: Register,
        valid: Option<Register>,
        from: Register,
        lane: Register,
        clamp: Register,
        mask: Register,
    },
    Vote {
        mode: Vote,
        to: Register,
        predicate: Register,
        negated: bool,
        mask: Register,
    },
    Multiply(Product),
    LoadMatrices(Matrices),
    Nothing,
}

/// A product of a whole warp on tensor cores: 16 x 16 by 16 x 8 numbers of 16 bits, added to numbers of 32 bits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Product {
    pub(crate) widen: fn(u16) -> f32,
    pub(crate) to: [Register; 4],
    pub(crate) left: [Register; 4],
    pub(crate) right: [Register; 2],
    pub(crate) from: [Register; 4],
}

/// Four matrices of 8 x 8 numbers of 16 bits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Matrices {
    /// Of each lane the row that it gives the address of.
    pub(crate) rows: Access,
    pub(crate) is_transposed: bool,
    pub(crate) to: [Register; 4],
}

/// An access to memory: `parts` numbers of `bytes` bytes each from the address on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Access {
    pub(crate) space: Space,
    pub(crate) base: Register,
    pub(crate) offset: i64,
    pub(crate) bytes: usize,
    pub(crate) parts: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Space {
    /// Global and generic addresses; the latter may be of shared memory.
    Global,
    Shared,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shuffle {
    Up,
    Down,
    Exchange,
    Index,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Vote {
    All,
    Any,
    Uniform,
    Ballot,
}

#[cfg(test)]
mod tests;
