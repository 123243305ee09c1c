//! Works of a GPU, ready to be queued: kernels are loaded, products have their algorithms.

use super::WORKSPACE;
use super::memories::Memories;
use crate::cpu::Format;
use crate::gpu::{Matrix, Pass, Product, Work};
use crate::recorder::Recorder;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use switchyard_cuda::cublaslt::{self, Arithmetic, CublasLt, Planned};
use switchyard_cuda::driver::{Context, Lines, Loaded, Span, Stream};
use switchyard_cuda::kernels::{Call, Element, Program};
use switchyard_cuda::nvrtc::Nvrtc;
use switchyard_cuda::{Error, Library};

/// What makes works ready.
pub(super) struct Workshop {
    context: Context,
    nvrtc: Nvrtc,
    cublaslt: CublasLt,
    programs: Vec<Loaded>,
    /// Programs that were compiled, for who watches.
    compiled: Arc<AtomicU64>,
}

/// Works in their order.
pub(super) type Commands = Vec<Command>;

/// Forward and backward of a micro-batch.
pub(super) struct Passes {
    pub forward: Commands,
    pub backward: Commands,
}

/// A work.
pub(super) enum Command {
    /// With the number of its program.
    Kernel(usize, Call<Span>),
    Product(Box<Planned>),
    Copy {
        bytes: usize,
        count: usize,
        from: Lines,
        to: Lines,
    },
}

impl Workshop {
    /// # Errors
    /// cuBLASLt does not start on the device.
    pub fn new(context: &Context, nvrtc: Nvrtc, cublaslt: &Library, recorder: &Recorder) -> Result<Workshop, Error> {
        context.make_current()?;
        let cublaslt = CublasLt::start(cublaslt)?;
        let compiled = Arc::new(AtomicU64::new(0));
        recorder.count({
            let compiled = Arc::clone(&compiled);
            move || compiled.load(Ordering::Relaxed)
        });
        Ok(Workshop { context: context.clone(), nvrtc, cublaslt, programs: Vec::new(), compiled })
    }

    /// # Errors
    /// A kernel cannot be compiled or loaded, or no algorithm multiplies matrices of some shape.
    pub fn commands(&mut self, works: Vec<Work<Span>>) -> Result<Commands, Error> {
        let commands = works.into_iter().map(|work| match work {
            Work::Kernel(call) => Ok(Command::Kernel(self.program(call.program())?, call)),
            Work::Product(product) => {
                Ok(Command::Product(Box::new(self.cublaslt.plan(described(&product), WORKSPACE, 1)?)))
            }
            Work::Copy { from, to } => Ok(copy(&from, &to)),
        });
        commands.collect()
    }

    /// # Errors
    /// See [`Workshop::commands`].
    pub fn passes(&mut self, pass: Pass<Span>) -> Result<Passes, Error> {
        Ok(Passes { forward: self.commands(pass.forward)?, backward: self.commands(pass.backward)? })
    }

    /// The number of a program, which is compiled once.
    fn program(&mut self, program: &Program) -> Result<usize, Error> {
        if let Some(known) = self.programs.iter().position(|loaded| loaded.program() == program) {
            return Ok(known);
        }
        self.programs.push(self.context.load(program.clone(), &self.nvrtc)?);
        self.compiled.fetch_add(1, Ordering::Relaxed);
        Ok(self.programs.len() - 1)
    }

    /// Queues commands. Allocates nothing.
    ///
    /// # Errors
    /// A call fails, or work failed earlier.
    pub fn queue(&self, commands: &[Command], memories: &Memories, stream: &Stream) -> Result<(), Error> {
        commands.iter().try_for_each(|command| match command {
            Command::Kernel(program, call) => self.programs[*program].launch(call, stream),
            Command::Product(planned) => planned.run(0, memories.workspace.span(), stream),
            Command::Copy { bytes, count, from, to } => stream.copy_lines(*bytes, *count, *from, *to),
        })
    }
}

fn matrix(matrix: &Matrix<Span>) -> cublaslt::Matrix {
    let Matrix { memory, rows, columns, pitch, format, is_transposed } = *matrix;
    let element = match format {
        Format::F32 => Element::F32,
        Format::Bf16 => Element::Bf16,
        Format::F16 => Element::F16,
    };
    cublaslt::Matrix { span: memory, element, rows, columns, pitch, is_transposed }
}

fn described(product: &Product<Span>) -> cublaslt::Product {
    let Product { left, right, result, adds } = product;
    let [left, right, result] = [left, right, result].map(matrix);
    cublaslt::Product { left, right, result, adds: *adds, arithmetic: Arithmetic::Ieee }
}

fn copy(from: &Matrix<Span>, to: &Matrix<Span>) -> Command {
    let lines = |matrix: &Matrix<Span>| Lines { span: matrix.memory, pitch: matrix.pitch * matrix.format.size() };
    Command::Copy { bytes: from.columns * from.format.size(), count: from.rows, from: lines(from), to: lines(to) }
}
