//! The static plan of a rank on a GPU.

use super::convolutions::Answers;
use super::machine::{Machine, Taken, target};
use super::{SLOTS, WORKSPACE, users};
use crate::cpu::Format;
use crate::gpu::{Computation, Contents, Memory};
use crate::nn::Layout;
use crate::train::TrainError;
use crate::train::memory::batch_that_fits;
use crate::train::training::Training;
use switchyard_cuda::driver::Device;
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
        let (optimizer, samples) = (&config.optimizer, config.reader.sample_type);
        let graph = training.graph()?;
        let answers = Answers::new(&machine, &device, &graph, config.gpu.matmul);
        let target = target(&device).with(answers.convolutions());
        let computation = Computation::new(graph, optimizer, config.precision, samples, target)?;
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
        let target = target(&self.device).with(self.answers.convolutions().in_format(Format::F32));
        let computation = Computation::new(graph, optimizer, Precision::Fp32, samples, target)?;
        Ok(memory(&computation).total())
    }

    /// Takes the GPU of a rank. What cuDNN does not take there is planned again, by patches.
    ///
    /// # Errors
    /// There is no GPU for this rank, or the driver refuses.
    pub(super) fn take(self, local_rank: u32, training: &Training) -> Result<(Taken, Planned), TrainError> {
        let (kernel, config) = (self.kernel(), &training.config);
        let GpuPlan { machine, mut computation, mut answers, device, .. } = self;
        let taken = machine.take(local_rank)?;
        if !answers.start(&taken.0)? {
            let (optimizer, samples) = (&config.optimizer, config.reader.sample_type);
            let target = target(&device).with(answers.convolutions());
            computation = Computation::new(training.graph()?, optimizer, config.precision, samples, target)?;
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
