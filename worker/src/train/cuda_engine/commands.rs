//! GPU commands, ready to be queued: kernels are loaded, and matrix products have their algorithms.

use super::algorithms::Algorithms;
use super::cache::Cache;
use super::cudnn::CudnnPlans;
use super::machine::cache_name;
use super::memories::Memories;
use super::programs::Compiler;
use crate::lowering::{Work, Works};
use crate::recorder::Recorder;
use std::collections::BTreeMap;
use switchyard_cuda::Error;
use switchyard_cuda::cublaslt::{Matrix, Planned, Product};
use switchyard_cuda::driver::{Context, Event, Lines, Loaded, Span, Stream};
use switchyard_cuda::kernels::{Call, Program};
use switchyard_cuda::nvrtc::Nvrtc;
use switchyard_cuda::operation;
use switchyard_worker_contract::config::{self, EngineConfig};

/// Compiles kernels, selects algorithms, and queues commands.
pub(super) struct Dispatcher {
    algorithms: Algorithms,
    cudnn_plans: CudnnPlans,
    programs: Vec<Loaded>,
    /// Programs compiled in this run.
    compiled: u64,
    cache: Cache,
    config: config::Gpu,
}

/// Commands in execution order.
pub(super) type Commands = Vec<Command>;

/// An operation, or an event recorded after one.
pub(super) enum Command {
    /// A launch, with the index of its program.
    Kernel(usize, Call<Span>),
    Product(Box<Planned>),
    Cudnn(Box<operation::Planned>),
    Copy {
        bytes: usize,
        count: usize,
        from: Lines,
        to: Lines,
    },
    Record(Event),
}

impl Dispatcher {
    /// Loads the programs of all operations, with as many threads as the configuration has, and
    /// compiles those that are not cached.
    ///
    /// # Errors
    /// A kernel cannot be compiled or loaded.
    pub fn new(
        context: &Context,
        (nvrtc, algorithms, cudnn_plans): (&Nvrtc, Algorithms, CudnnPlans),
        works: &Works<Span>,
        config: &EngineConfig,
        recorder: &Recorder,
    ) -> Result<Dispatcher, Error> {
        context.make_current()?;
        let (cache, device) = (Cache::from_env(), cache_name(context.device()));
        let compiler = Compiler::new((context, nvrtc), (&cache, &device), recorder)?;
        let programs = compiler.load(&distinct(works), config.cpu_threads as usize)?;
        let compiled = compiler.compiled();
        Ok(Dispatcher { algorithms, cudnn_plans, programs, compiled, cache, config: config.gpu })
    }

    /// Caches new results for the next run, and logs how many there are.
    pub fn save_cache(&self) {
        self.algorithms.save(&self.cache);
        if let Some(folder) = self.cache.folder() {
            let (compiled, programs, queried) = (self.compiled, self.programs.len(), self.algorithms.queried());
            eprintln!(
                "note: {compiled} of {programs} programs for the GPU were compiled, and cuBLASLt was asked for {queried} algorithms; the \
                 others were in {}",
                folder.display()
            );
        }
    }

    /// Whether repeated commands are captured as a CUDA graph.
    pub fn has_graphs(&self) -> bool {
        self.config.graphs
    }

    /// # Errors
    /// No algorithm multiplies matrices of some shape.
    pub fn commands(&mut self, works: Vec<Work<Span>>) -> Result<Commands, Error> {
        works.into_iter().map(|work| self.command(work)).collect()
    }

    /// # Errors
    /// No algorithm multiplies matrices of this shape, or cuDNN rejects an operation it had
    /// accepted.
    pub fn command(&mut self, work: Work<Span>) -> Result<Command, Error> {
        match work {
            Work::Kernel(call) => Ok(Command::Kernel(self.program(call.program()), call)),
            Work::Product(product) => Ok(Command::Product(Box::new(self.algorithms.plan(product)?))),
            Work::Cudnn(cudnn) => Ok(Command::Cudnn(Box::new(self.cudnn_plans.planned(&cudnn)?))),
            Work::Copy { from, to } => Ok(copy(&from, &to)),
        }
    }

    /// The index of a program.
    fn program(&self, program: &Program) -> usize {
        let known = self.programs.iter().position(|loaded| loaded.program() == program);
        known.expect("invariant: the programs of all works are loaded")
    }

    /// Queues commands, without allocating.
    ///
    /// # Errors
    /// A call or an earlier operation failed.
    pub fn queue(&self, commands: &[Command], memories: &Memories, stream: &Stream) -> Result<(), Error> {
        commands.iter().try_for_each(|command| match command {
            Command::Kernel(program, call) => self.programs[*program].launch(call, stream),
            Command::Product(planned) => planned.run(0, memories.workspace.span(), stream),
            Command::Cudnn(planned) => planned.run(stream),
            Command::Copy { bytes, count, from, to } => stream.copy_lines(*bytes, *count, *from, *to),
            Command::Record(event) => stream.record(event),
        })
    }
}

/// Why cuBLASLt rejects the epilogue of a product, if it rejects any.
pub(super) fn refused_epilogue(algorithms: &mut Algorithms, works: &Works<Span>) -> Option<Error> {
    let products = works.all().filter_map(|work| match work {
        Work::Product(product) if product.epilogue.is_some() => Some(*product),
        _ => None,
    });
    // One product per kind is enough: many layers share a kind.
    let kinds: BTreeMap<String, Product> = products.map(|product| (product.kind(), product)).collect();
    kinds.into_values().find_map(|product| algorithms.plan(product).err())
}

/// The distinct programs of all operations.
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

fn copy(from: &Matrix<Span>, to: &Matrix<Span>) -> Command {
    let lines = |matrix: &Matrix<Span>| Lines { span: matrix.memory, pitch: matrix.pitch * matrix.format.bytes() };
    Command::Copy { bytes: from.columns * from.format.bytes(), count: from.rows, from: lines(from), to: lines(to) }
}
