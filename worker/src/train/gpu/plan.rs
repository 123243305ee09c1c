//! The static plan of a rank on a GPU.

use super::cudnn::Answers;
use super::machine::{Machine, Taken, target};
use super::{SLOTS, WORKSPACE, users};
use crate::cpu::Format;
use crate::gpu::{Computation, Contents, Memory, Target};
use crate::nn::Graph;
use crate::nn::Layout;
use crate::train::TrainError;
use crate::train::memory::batch_that_fits;
use crate::train::training::Training;
use switchyard_cuda::driver::Device;
use switchyard_cuda::kernels::fp8;
use switchyard_worker_contract::config::{Matmul, Precision};
use switchyard_worker_contract::env;
use switchyard_worker_contract::event::MemoryUse;

/// What a rank holds and runs on its GPU, planned for the first one of the machine.
pub(in crate::train) struct GpuPlan {
    machine: Machine,
    computation: Computation,
    answers: Answers,
    device: Device,
    compiler: (i32, i32),
    matmul: Matmul,
}

/// What the engine of a rank is made of.
pub(super) struct Planned {
    pub computation: Computation,
    pub answers: Answers,
    /// See [`GpuPlan::kernel`].
    pub kernel: String,
    pub need: MemoryUse,
}

impl Planned {
    /// Says how many linear layers are computed in 8 bits, if the job wants that.
    pub fn tell_fp8(&self, training: &Training) {
        if training.config.gpu.matmul == Matmul::Fp8 {
            let [all, taken] = self.computation.plan().linear_layers();
            let multiple = fp8::MULTIPLE;
            eprintln!(
                "note: {taken} of {all} linear layers are computed in 8 bits: those whose rows, inputs and outputs are multiples of {multiple}"
            );
        }
    }
}

impl GpuPlan {
    /// `kernel`: see [`env::KERNEL`].
    ///
    /// # Errors
    /// A library or a GPU is missing, the job needs what cannot be computed there, or more memory than there is.
    pub fn new(training: &Training, kernel: Option<&str>) -> Result<GpuPlan, TrainError> {
        let config = &training.config;
        if let Some(kernel) = kernel.filter(|kernel| *kernel != "auto") {
            let name = env::KERNEL;
            return Err(TrainError::Usage(format!(
                "{name}: got {kernel} for ranks on GPUs; expected auto: it is for CPUs"
            )));
        }
        let machine = Machine::open()?;
        let device = machine.devices.first().cloned().ok_or(switchyard_cuda::Error::NoDevice)?;
        let compiler = machine.nvrtc.version()?;
        check_fp8(config.gpu.matmul, &device)?;
        let graph = training.graph()?;
        let answers = Answers::new(&machine, &device, &graph, config.gpu);
        let computation = computation(training, graph, target(&device).with(answers.kinds()))?;
        let plan = GpuPlan { machine, computation, answers, device, compiler, matmul: config.gpu.matmul };
        let limit = (plan.device.memory_bytes as f64 * config.memory.fraction) as u64;
        let need = plan.memory();
        if need.total() > limit {
            return Err(too_large(&need, training, limit));
        }
        Ok(plan)
    }

    /// Whether there is room now for the ranks of this process's machine, each on a GPU of its own. A rank looks again when it has its GPU.
    ///
    /// # Errors
    /// Others have so much memory of a GPU that the rank does not fit.
    pub fn check_room(&self, training: &Training) -> Result<(), TrainError> {
        let need = self.memory();
        for Device { bus, .. } in self.machine.devices.iter().take(training.world as usize) {
            let free = users::free_bytes(bus);
            let limit = free.map(|free| (free as f64 * training.config.memory.fraction) as u64);
            if let Some(limit) = limit.filter(|limit| need.total() > *limit) {
                return Err(too_large(&need, training, limit).with_users_of(bus));
            }
        }
        Ok(())
    }

    pub fn layout(&self) -> &Layout {
        self.computation.layout()
    }

    /// Name of the kernels.
    pub fn kernel(&self) -> String {
        let name = name(&self.device, self.compiler);
        match self.matmul {
            Matmul::Ieee => name,
            Matmul::Tf32 => name + ", TF32",
            Matmul::Fp8 => name + ", FP8",
        }
    }

    /// Memory of the GPU.
    pub fn memory(&self) -> MemoryUse {
        memory(&self.computation)
    }

    /// Bytes of the same if all numbers had 32 bits.
    ///
    /// # Errors
    /// None for a job that [`GpuPlan::new`] has planned.
    pub fn memory_fp32(&self, training: &Training) -> Result<u64, TrainError> {
        let (graph, config) = (training.graph_in(Format::F32)?, &training.config);
        let (optimizer, samples) = (&config.optimizer, config.reader.sample_type);
        let target = target(&self.device).with(self.answers.kinds().in_format(Format::F32));
        let computation = Computation::new(graph, optimizer, Precision::Fp32, samples, target)?;
        Ok(memory(&computation).total())
    }

    /// Takes the GPU of a rank. What cuDNN does not take there is planned again without it.
    ///
    /// # Errors
    /// There is no GPU for this rank, or the driver refuses.
    pub(super) fn take(self, local_rank: u32, training: &Training) -> Result<(Taken, Planned), TrainError> {
        let kernel = self.kernel();
        let GpuPlan { machine, mut computation, mut answers, device, .. } = self;
        let taken = machine.take(local_rank)?;
        if !answers.start(&taken.0)? {
            let target = target(&device).with(answers.kinds());
            computation = self::computation(training, training.graph()?, target)?;
        }
        let need = memory(&computation);
        Ok((taken, Planned { computation, answers, kernel, need }))
    }

    /// Memory of the process, without what is the same on every device: pinned batches, and gradients on their way to other ranks.
    pub fn host_memory(&self, training: &Training) -> MemoryUse {
        let flat = 4 * self.layout().len as u64;
        MemoryUse {
            gradients: if training.world > 1 { flat } else { 0 },
            input: (SLOTS * self.computation.inputs().bytes()) as u64,
            ..MemoryUse::default()
        }
    }
}

/// What a rank computes of this network, the one of its job, on a device.
///
/// # Errors
/// A device cannot compute it, or not as the job wants it.
pub(super) fn computation(training: &Training, graph: Graph, target: Target) -> Result<Computation, TrainError> {
    let config = &training.config;
    let fp8 = config.gpu.matmul == Matmul::Fp8;
    if fp8 && graph.format() != Format::Bf16 {
        return Err(TrainError::Usage(format!(
            "spec.engine.precision.matmul: got FP8 with numbers in {:?}; expected mode AMP with computeType BF16",
            graph.format()
        )));
    }
    let (optimizer, samples) = (&config.optimizer, config.reader.sample_type);
    Ok(Computation::new(graph, optimizer, config.precision, samples, Target { fp8, ..target })?)
}

/// # Errors
/// 8 bits are wanted of a device that does not multiply them.
fn check_fp8(matmul: Matmul, device: &Device) -> Result<(), TrainError> {
    let (since, (major, minor)) = (fp8::SINCE, device.capability);
    if matmul == Matmul::Fp8 && device.capability < since {
        return Err(TrainError::Usage(format!(
            "spec.engine.precision.matmul: got FP8 on {}, whose compute capability is {major}.{minor}; expected IEEE, or a GPU of {}.{} or higher",
            device.name, since.0, since.1
        )));
    }
    Ok(())
}

/// Memory of the GPU that a computation needs.
pub(super) fn memory(computation: &Computation) -> MemoryUse {
    let sum = |is: fn(Memory) -> bool| {
        let contents = computation.contents().iter().filter(|contents| is(contents.memory));
        contents.map(|contents: &Contents| contents.bytes as u64).sum::<u64>()
    };
    let weights = sum(|memory| matches!(memory, Memory::Weights | Memory::Half));
    let gradients = sum(|memory| memory == Memory::Gradients);
    let optimizer = sum(|memory| matches!(memory, Memory::Moments(_) | Memory::Chunks | Memory::Norms));
    let all = sum(|_| true) + WORKSPACE as u64;
    MemoryUse {
        weights,
        gradients,
        optimizer,
        activations: all - weights - gradients - optimizer,
        input: (SLOTS * computation.inputs().bytes()) as u64,
    }
}

/// Name of what is compiled by this version of NVRTC for a device.
fn name(device: &Device, (major, minor): (i32, i32)) -> String {
    format!("cuda {}, NVRTC {major}.{minor}", device.architecture())
}

/// `limit`: bytes that a rank may take.
pub(super) fn too_large(need: &MemoryUse, training: &Training, limit: u64) -> TrainError {
    let MemoryUse { weights, gradients, optimizer, activations, .. } = *need;
    TrainError::GpuMemory {
        // Rounded up, and the limit down: the two figures differ whatever the amounts are.
        need: need.total().div_ceil(1 << 20),
        activations: activations >> 20,
        state: (weights + gradients + optimizer) >> 20,
        limit: limit >> 20,
        fraction: training.config.memory.fraction,
        help: batch_that_fits(need, training.config.batch_size_per_process, limit)
            .unwrap_or_else(|| "a smaller model".to_owned()),
        others: String::new(),
    }
}
