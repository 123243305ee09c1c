//! Works of a GPU, ready to be queued: kernels are loaded, products have their algorithms.

use super::WORKSPACE;
use super::memories::Memories;
use crate::cpu::Format;
use crate::gpu::{Matrix, Product, Work, Works};
use crate::recorder::Recorder;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use switchyard_cuda::cublaslt::{self, Arithmetic, CublasLt, Planned};
use switchyard_cuda::driver::{Context, Event, Lines, Loaded, Span, Stream};
use switchyard_cuda::kernels::{Call, Element, Program};
use switchyard_cuda::nvrtc::Nvrtc;
use switchyard_cuda::{Error, Library};
use switchyard_worker_contract::config::EngineConfig;

/// What makes works ready.
pub(super) struct Workshop {
    cublaslt: CublasLt,
    programs: Vec<Loaded>,
    has_graphs: bool,
}

/// Works in their order.
pub(super) type Commands = Vec<Command>;

/// A work, or a mark behind one.
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
    Record(Event),
}

impl Workshop {
    /// Compiles the programs of works, as many at a time as the configuration has threads.
    ///
    /// # Errors
    /// cuBLASLt does not start on the device, or a kernel cannot be compiled or loaded.
    pub fn new(
        context: &Context,
        (nvrtc, cublaslt): (&Nvrtc, &Library),
        works: &Works<Span>,
        config: &EngineConfig,
        recorder: &Recorder,
    ) -> Result<Workshop, Error> {
        let threads = config.cpu_threads as usize;
        context.make_current()?;
        let cublaslt = CublasLt::start(cublaslt)?;
        let compiled = Arc::new(AtomicU64::new(0));
        recorder.count({
            let compiled = Arc::clone(&compiled);
            move || compiled.load(Ordering::Relaxed)
        });
        let programs = distinct(works);
        let next = AtomicUsize::new(0);
        let load = || -> Result<Vec<Loaded>, Error> {
            let mut loaded = Vec::new();
            while let Some(program) = programs.get(next.fetch_add(1, Ordering::Relaxed)) {
                loaded.push(context.load((*program).clone(), nvrtc)?);
                compiled.fetch_add(1, Ordering::Relaxed);
            }
            Ok(loaded)
        };
        let loaded = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..threads.clamp(1, programs.len().max(1))).map(|_| scope.spawn(load)).collect();
            let ended = threads.into_iter().map(|thread| thread.join().expect("invariant: compiling does not panic"));
            ended.collect::<Result<Vec<_>, Error>>()
        })?;
        let programs = loaded.into_iter().flatten().collect();
        Ok(Workshop { cublaslt, programs, has_graphs: config.gpu.graphs })
    }

    /// Whether what is queued again becomes a graph.
    pub fn has_graphs(&self) -> bool {
        self.has_graphs
    }

    /// # Errors
    /// No algorithm multiplies matrices of some shape.
    pub fn commands(&self, works: Vec<Work<Span>>) -> Result<Commands, Error> {
        let commands = works.into_iter().map(|work| match work {
            Work::Kernel(call) => Ok(Command::Kernel(self.program(call.program()), call)),
            Work::Product(product) => {
                Ok(Command::Product(Box::new(self.cublaslt.plan(described(&product), WORKSPACE, 1)?)))
            }
            Work::Copy { from, to } => Ok(copy(&from, &to)),
        });
        commands.collect()
    }

    /// The number of a program.
    fn program(&self, program: &Program) -> usize {
        let known = self.programs.iter().position(|loaded| loaded.program() == program);
        known.expect("invariant: the programs of all works are loaded")
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
            Command::Record(event) => stream.record(event),
        })
    }
}

/// The programs of works, each once.
fn distinct(works: &Works<Span>) -> Vec<&Program> {
    let mut programs = Vec::new();
    for work in works.all() {
        if let Work::Kernel(call) = work
            && !programs.contains(&call.program())
        {
            programs.push(call.program());
        }
    }
    programs
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
