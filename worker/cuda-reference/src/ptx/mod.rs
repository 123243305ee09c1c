//! PTX as NVRTC emits it: entries are decoded once into steps with numbered registers.

mod arithmetic;
mod decode;
mod entry;
mod operands;
mod scan;

use std::collections::BTreeMap;

/// Generic address of the first byte of shared memory.
pub(crate) const SHARED: u64 = 0x6000_0000_0000;

/// Text that is not PTX, or PTX that this crate does not support.
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

/// The kernels of one compilation.
#[derive(Debug)]
pub struct Module {
    entries: BTreeMap<String, Entry>,
}

impl Module {
    /// Parses the PTX of one compilation.
    ///
    /// # Errors
    /// An unsupported directive, instruction or modifier, with its line.
    pub fn parse(text: &str) -> Result<Module, ParseError> {
        entry::module(&scan::tokens(text)?)
    }

    /// Kernel names.
    pub fn kernels(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// Byte sizes of a kernel's parameters; `None` if the module has no such kernel.
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
    /// Byte sizes of the parameters.
    pub(crate) parameters: Vec<usize>,
    pub(crate) steps: Vec<Step>,
    /// Number of registers, including constants.
    pub(crate) registers: usize,
    /// Registers initialised before the first step and never changed.
    pub(crate) constants: Vec<(Register, Constant)>,
    pub(crate) shared_bytes: usize,
    /// Whether it uses dynamic shared memory.
    pub(crate) has_dynamic_shared: bool,
    /// The product of `.maxntid`.
    pub(crate) most_threads: Option<u32>,
}

pub(crate) type Register = u32;

/// A value known when a warp starts.
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

/// A special register. Launches are one-dimensional.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Special {
    Thread,
    Threads,
    Block,
    Blocks,
    Lane,
    Warp,
}

/// Source location of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Place {
    pub(crate) ptx: u32,
    /// Source line; 0 without `-lineinfo`.
    pub(crate) line: u32,
    /// Line at which the function of that line was inlined; 0 if it was not.
    pub(crate) inlined_at: u32,
}

/// One instruction.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Step {
    pub(crate) guard: Option<Guard>,
    pub(crate) operation: Operation,
    pub(crate) place: Place,
}

/// Lanes skip the step if the predicate is false (true if negated).
#[derive(Debug, Clone, Copy)]
pub(crate) struct Guard {
    pub(crate) predicate: Register,
    pub(crate) negated: bool,
}

/// One register across all lanes of a warp.
pub(crate) type Lanes = [u64; 32];

/// A function of up to three registers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Function {
    /// Computes one lane.
    pub(crate) lane: fn(u64, u64, u64) -> u64,
    /// Computes all lanes in one call, because most instructions execute with full warps.
    pub(crate) warp: fn(&Lanes, &Lanes, &Lanes) -> Lanes,
}

/// `.ftz`: whether subnormals are flushed to zero.
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
    /// `to` receives the old value; without it the instruction is `red`.
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
    Nothing,
}

/// A memory access of `parts` consecutive values of `bytes` bytes each.
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
    /// Global and generic addresses; the latter may refer to shared memory.
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
