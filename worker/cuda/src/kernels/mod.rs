//! CUDA C kernels: their sources, their compilation, and calls with checked sizes.
//!
//! The sources are in this crate rather than in the engine because `gpu-probe` runs them too, and
//! the tests on the PTX executor need them without the engine. They include no NVIDIA headers, so
//! none need to be installed. A program is compiled for the widths of a model, which are constants
//! in it. A [`Call`] is data: a device launches it or the executor runs it, and it lists the memory
//! it reads and writes.

pub mod activation;
pub mod attention;
pub mod average_pool;
pub mod batch_norm;
pub mod cross_entropy;
pub mod elementwise;
pub mod embedding;
pub mod fp8;
pub mod gather;
pub mod gradients;
pub mod input;
pub mod layer_norm;
pub mod max_pool;
pub mod optimizer;
pub mod recorded;
mod signature;
pub mod windows;

use crate::error::Error;
use crate::nvrtc::{Compiled, Nvrtc};
pub use signature::Format;

/// Headers that the sources include.
const HEADERS: [(&str, &str); 5] = [
    ("columns.cuh", include_str!("columns.cuh")),
    ("device.cuh", include_str!("device.cuh")),
    ("parts.cuh", include_str!("parts.cuh")),
    ("rows.cuh", include_str!("rows.cuh")),
    ("windows.cuh", include_str!("windows.cuh")),
];

/// A source, and its floating-point options.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Source {
    pub(crate) name: &'static str,
    pub(crate) text: &'static str,
    /// `--fmad=false` rounds every operation as on a CPU; `--use_fast_math` is for results that are
    /// rounded to 16 bits anyway.
    pub(crate) arithmetic: &'static str,
}

const SOURCES: [&Source; 14] = [
    &activation::SOURCE,
    &attention::SOURCE,
    &average_pool::SOURCE,
    &batch_norm::SOURCE,
    &cross_entropy::SOURCE,
    &elementwise::SOURCE,
    &embedding::SOURCE,
    &fp8::SOURCE,
    &gather::SOURCE,
    &gradients::SOURCE,
    &input::SOURCE,
    &layer_norm::SOURCE,
    &max_pool::SOURCE,
    &optimizer::SOURCE,
];

/// Element type in memory; the kernels compute in `f32`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Element {
    F32,
    Bf16,
    F16,
}

impl Element {
    pub fn bytes(self) -> usize {
        match self {
            Element::F32 => 4,
            Element::Bf16 | Element::F16 => 2,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Element::F32 => "float",
            Element::Bf16 => "bf16",
            Element::F16 => "f16",
        }
    }
}

/// Rows of equal width.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rows {
    pub element: Element,
    /// Elements per row.
    pub width: u32,
    /// Row pitch in elements; a multiple of 16 bytes, the widest access of a thread.
    pub pitch: u32,
}

impl Rows {
    fn check(self, call: &'static str) -> Result<(), Error> {
        let Rows { element, width, pitch } = self;
        let vector = 16 / element.bytes() as u32;
        if width == 0 || pitch < width || !pitch.is_multiple_of(vector) {
            let text = format!(
                "width {width} and pitch {pitch}, expected a pitch that is a multiple of {vector}, not below the width"
            );
            return Err(Error::refused(call, text));
        }
        Ok(())
    }

    /// Grid of kernels whose threads keep to their columns (`columns.cuh`), for `count` rows on at
    /// most `max_blocks` blocks: blocks side by side, and blocks that share the rows.
    fn columns(self, count: u32, max_blocks: u32) -> (u32, u32) {
        let vectors = self.vectors();
        let row_threads = vectors.next_power_of_two().min(32);
        let tiles = vectors.div_ceil(row_threads);
        (tiles, count.div_ceil(COLUMN_THREADS / row_threads).min(max_blocks / tiles).max(1))
    }

    /// Vector accesses per row.
    fn vectors(self) -> u32 {
        self.width.div_ceil(16 / self.element.bytes() as u32)
    }

    fn bytes(self, rows: u32) -> usize {
        rows as usize * self.pitch as usize * self.element.bytes()
    }

    fn program(self, source: &'static Source) -> Program {
        let Rows { element, width, pitch } = self;
        let definitions =
            vec![format!("-DELEMENT={}", element.name()), format!("-DWIDTH={width}"), format!("-DPITCH={pitch}")];
        Program { source, definitions }
    }
}

/// Threads per block of kernels whose threads keep to their columns.
const COLUMN_THREADS: u32 = 256;

/// Columns per block of kernels that join partial sums (`parts.cuh`).
const JOINED_COLUMNS: u32 = 8;

/// A source, and the constants that it is compiled with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    source: &'static Source,
    definitions: Vec<String>,
}

impl Program {
    /// Compiles the kernels for an architecture, for example `sm_90`.
    ///
    /// # Errors
    /// The compiler's messages.
    pub fn compile(&self, nvrtc: &Nvrtc, architecture: &str) -> Result<Compiled, Error> {
        nvrtc.compile((self.source.name, self.source.text), &HEADERS, &self.options(architecture))
    }

    /// Everything that determines the machine code, except the compiler.
    pub fn identity(&self, architecture: &str) -> String {
        let headers = HEADERS.iter().flat_map(|(name, text)| [*name, *text]);
        let parts = [self.source.name, self.source.text].into_iter().chain(headers);
        let options = self.options(architecture);
        parts.chain(options.iter().map(String::as_str)).collect::<Vec<_>>().join("\n")
    }

    fn options(&self, architecture: &str) -> Vec<String> {
        let mut options = vec![format!("--gpu-architecture={architecture}"), self.source.arithmetic.to_owned()];
        // No run-time cost: profilers and the executor report line numbers, and the log contains
        // registers and spills.
        options.extend(["-lineinfo", "--ptxas-options=-v"].map(str::to_owned));
        options.extend(self.definitions.iter().cloned());
        options
    }
}

/// Memory of a kernel; its size is checked when a call is made.
pub trait Memory: Copy {
    fn bytes(&self) -> usize;
}

/// A kernel argument. For memory it records how the kernel accesses it.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub enum Argument<M> {
    Reads(M),
    Writes(M),
    /// Reads and writes.
    Updates(M),
    /// Optional memory that is not given: a null pointer.
    Absent,
    Int(u32),
    Float(#[serde(with = "recorded::bits")] f32),
}

impl<M> Argument<M> {
    /// The same argument with other memory.
    fn map<N, E>(&self, memory: impl Fn(&M) -> Result<N, E>) -> Result<Argument<N>, E> {
        Ok(match self {
            Argument::Reads(of) => Argument::Reads(memory(of)?),
            Argument::Writes(of) => Argument::Writes(memory(of)?),
            Argument::Updates(of) => Argument::Updates(memory(of)?),
            Argument::Absent => Argument::Absent,
            Argument::Int(value) => Argument::Int(*value),
            Argument::Float(value) => Argument::Float(*value),
        })
    }
}

/// A kernel launch as data, for a device or for the tests' executor. Calls are made only by the
/// functions of this module, which check sizes, or restored from the [record](recorded) of a call
/// that they made and the executor ran. Launching one therefore requires no unsafe code.
#[derive(Debug, Clone, PartialEq)]
pub struct Call<M> {
    pub(crate) program: Program,
    pub(crate) kernel: &'static str,
    pub(crate) blocks: u32,
    pub(crate) threads: u32,
    pub(crate) shared_bytes: u32,
    pub(crate) arguments: Vec<Argument<M>>,
}

impl<M> Call<M> {
    /// The program that contains the kernel.
    pub fn program(&self) -> &Program {
        &self.program
    }

    pub fn kernel(&self) -> &'static str {
        self.kernel
    }

    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Threads per block.
    pub fn threads(&self) -> u32 {
        self.threads
    }

    /// Dynamic shared memory in bytes.
    pub fn shared_bytes(&self) -> u32 {
        self.shared_bytes
    }

    pub fn arguments(&self) -> &[Argument<M>] {
        &self.arguments
    }
}

/// Rejects memory that is smaller than a call needs.
fn sizes<M: Memory>(call: &'static str, memory: &[(&str, M, usize)]) -> Result<(), Error> {
    match memory.iter().find(|(_, given, needed)| given.bytes() < *needed) {
        Some((name, given, needed)) => {
            Err(Error::refused(call, format!("{name} of {} bytes, expected at least {needed}", given.bytes())))
        }
        None => Ok(()),
    }
}
