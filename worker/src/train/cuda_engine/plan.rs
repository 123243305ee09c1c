//! The static plan of a rank on a GPU.

use super::algorithms::arithmetic;
use super::cudnn::CudnnPlans;
use super::machine::{Machine, target};
use super::{SLOTS, WORKSPACE, users};
use crate::cpu::Format;
use crate::lowering::{Computation, Contents, Memory, Target};
use crate::nn::Graph;
use crate::nn::Layout;
use crate::train::TrainError;
use crate::train::exchange::check_bytes;
use crate::train::memory::batch_that_fits;
use crate::train::training::Training;
use switchyard_cuda::driver::Device;
use switchyard_cuda::kernels::fp8;
use switchyard_cuda::nccl::COMMUNICATOR_BYTES;
use switchyard_worker_contract::config::{EngineConfig, Matmul, Precision, SyncPolicy, WireType};
use switchyard_worker_contract::env;
use switchyard_worker_contract::event::MemoryUse;

/// Memory and launches of a rank on its GPU.
pub(in crate::train) struct CudaPlan {
    // Dropped before the context.
    pub(super) cudnn_plans: CudnnPlans,
    pub(super) machine: Machine,
    pub(super) computation: Computation,
    compiler: (i32, i32),
    matmul: Matmul,
}

impl CudaPlan {
    /// Logs how many linear layers use FP8, if the job requests it.
    pub(super) fn log_fp8(&self) {
        if self.matmul == Matmul::Fp8 {
            let [all, taken] = self.computation.plan().linear_layers();
            let multiple = fp8::MULTIPLE;
            eprintln!(
                "note: {taken} of {all} linear layers are computed in 8 bits: those whose rows, inputs and outputs are multiples of {multiple}"
            );
        }
    }

    /// Takes the GPU of a rank. `kernel`: see [`env::KERNEL`].
    ///
    /// # Errors
    /// A library or a GPU is missing, or the job needs unsupported features or more memory than
    /// there is.
    pub fn new(training: &Training, local_rank: u32, kernel: Option<&str>) -> Result<CudaPlan, TrainError> {
        let config = &training.config;
        if let Some(kernel) = kernel.filter(|kernel| *kernel != "auto") {
            let name = env::KERNEL;
            return Err(TrainError::Usage(format!(
                "{name}: got {kernel} for ranks on GPUs; expected auto: it is for CPUs"
            )));
        }
        check_exchange(config)?;
        let machine = Machine::open(local_rank, config.devices_per_process)?;
        let (compiler, device) = (machine.nvrtc.version()?, machine.context.device());
        check_fp8(config.gpu.matmul, device)?;
        let limit = (device.memory_bytes as f64 * config.memory.fraction) as u64;
        let graph = training.graph()?;
        let cudnn_plans = CudnnPlans::new(&machine, &graph, config.gpu);
        let computation = computation(training, graph, target(device).with(cudnn_plans.kinds()))?;
        cudnn_plans.check(&computation)?;
        let plan = CudaPlan { cudnn_plans, machine, computation, compiler, matmul: config.gpu.matmul };
        let need = plan.memory(training);
        if need.total() > limit {
            return Err(too_large(&need, training, limit));
        }
        Ok(plan)
    }

    /// Checks that enough GPU memory is free for the ranks on this machine, one GPU each. A rank
    /// checks again before it allocates.
    ///
    /// # Errors
    /// Other processes use so much memory of a GPU that the rank does not fit.
    pub fn check_room(&self, training: &Training) -> Result<(), TrainError> {
        let need = self.memory(training);
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
        let name = name(self.machine.context.device(), self.compiler);
        match self.matmul {
            Matmul::Ieee => name,
            Matmul::Tf32 => name + ", TF32",
            Matmul::Fp8 => name + ", FP8",
        }
    }

    /// GPU memory.
    pub fn memory(&self, training: &Training) -> MemoryUse {
        memory(&self.computation, training)
    }

    /// GPU memory in bytes with all values in f32.
    ///
    /// # Errors
    /// Never for a job that [`CudaPlan::new`] has planned.
    pub fn memory_fp32(&self, training: &Training) -> Result<u64, TrainError> {
        let (graph, config) = (training.graph_in(Format::F32)?, &training.config);
        let (optimizer, samples) = (&config.optimizer, config.reader.sample_type);
        let target = target(self.machine.context.device()).with(self.cudnn_plans.kinds().in_f32());
        let computation = Computation::new(graph, optimizer, Precision::Fp32, samples, target)?;
        Ok(memory(&computation, training).total())
    }

    /// Host memory of the process, without the device-independent part: pinned batches, and
    /// gradients in transfer to other ranks.
    pub fn host_memory(&self, training: &Training) -> MemoryUse {
        let flat = 4 * self.layout().len as u64;
        MemoryUse {
            gradients: if training.world > 1 { flat } else { 0 },
            input: (SLOTS * self.computation.inputs().bytes()) as u64,
            ..MemoryUse::default()
        }
    }
}

/// Lowers the job's network for a target.
///
/// # Errors
/// The target cannot compute it, or not as the job requests it.
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
    Ok(Computation::new(
        graph,
        optimizer,
        config.precision,
        samples,
        Target { fp8, arithmetic: arithmetic(config.gpu.matmul), ..target },
    )?)
}

/// Rejects ways to exchange gradients that only CPUs have.
fn check_exchange(config: &EngineConfig) -> Result<(), TrainError> {
    let refused = |field: &str, got: &str, expected: &str| {
        Err(TrainError::Usage(format!(
            "spec.engine.{field}: got {got} on GPUs; expected {expected}: only CPUs have it yet"
        )))
    };
    match (config.sync, config.compression) {
        (SyncPolicy::Local(_), _) => refused("sync.type", "Local", "EveryStep"),
        (SyncPolicy::EveryStep, Some(_)) => refused("communication.compression.type", "TopK", "None"),
        (SyncPolicy::EveryStep, None) => Ok(()),
    }
}

/// # Errors
/// FP8 is requested on a device without FP8 support.
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

/// GPU memory needed by a computation.
pub(super) fn memory(computation: &Computation, training: &Training) -> MemoryUse {
    let sum = |is: fn(Memory) -> bool| {
        let contents = computation.contents().iter().filter(|contents| is(contents.memory));
        contents.map(|contents: &Contents| contents.bytes as u64).sum::<u64>()
    };
    let weights = sum(|memory| matches!(memory, Memory::Weights | Memory::Half));
    let gradients = sum(|memory| memory == Memory::Gradients);
    let optimizer = sum(|memory| matches!(memory, Memory::Moments(_) | Memory::Chunks | Memory::Norms));
    let all = sum(|_| true) + WORKSPACE as u64;
    let overlap = &training.config.overlap;
    let wire = if training.world > 1 && overlap.wire_type != WireType::Fp32 { gradients / 2 } else { 0 };
    MemoryUse {
        weights,
        gradients: gradients + wire + check_bytes(&training.config),
        optimizer,
        activations: all - weights - gradients - optimizer,
        input: (SLOTS * computation.inputs().bytes()) as u64,
        communication: if training.world > 1 { u64::from(overlap.communicators) * COMMUNICATOR_BYTES } else { 0 },
        process: 0,
    }
}

/// Name of the kernels compiled for a device by this NVRTC version.
fn name(device: &Device, (major, minor): (i32, i32)) -> String {
    format!("cuda {}, NVRTC {major}.{minor}", device.architecture())
}

/// `limit`: bytes that a rank can use.
pub(super) fn too_large(need: &MemoryUse, training: &Training, limit: u64) -> TrainError {
    let MemoryUse { weights, gradients, optimizer, activations, communication, .. } = *need;
    TrainError::GpuMemory {
        // Rounded up, and the limit down, so that the two figures always differ.
        need: need.total().div_ceil(1 << 20),
        activations: activations >> 20,
        state: (weights + gradients + optimizer) >> 20,
        communication: communication >> 20,
        limit: limit >> 20,
        fraction: training.config.memory.fraction,
        help: batch_that_fits(need, training.config.batch_size_per_process, limit)
            .unwrap_or_else(|| "a smaller model".to_owned()),
        others: String::new(),
    }
}
