use super::kernel;
use super::state::State;
use crate::cpu::{Cpu, HalfKernel, Isa, Pool};
use crate::nn::{Layout, Network};
use crate::train::TrainError;
use crate::train::exchange::{check_bytes, top_k_bytes};
use crate::train::training::Training;
use std::sync::Arc;
use switchyard_worker_contract::config::HalfType;
use switchyard_worker_contract::event::MemoryUse;

/// The static plan of a rank on CPUs.
pub(in crate::train) struct CpuPlan {
    pub(super) cpu: Cpu,
    pub(super) network: Network,
    /// Kernels for bf16 products allowed in this process, best first.
    pub(super) half_kernels: Vec<HalfKernel>,
}

impl CpuPlan {
    /// `kernel`: see [`switchyard_worker_contract::env::KERNEL`].
    ///
    /// # Errors
    /// The model or the kernels cannot be used.
    pub fn new(training: &Training, kernel: Option<&str>) -> Result<CpuPlan, TrainError> {
        let (isa, half_kernels) = (Isa::detect(kernel)?, HalfKernel::usable(kernel)?);
        let half = half_kernels.first().copied().unwrap_or(HalfKernel::F32);
        let cpu = Cpu { pool: Arc::new(Pool::new(training.config.cpu_threads as usize)), isa, half };
        let network = Network::new(training.graph()?, cpu.clone())?;
        Ok(CpuPlan { cpu, network, half_kernels })
    }

    /// Returns the plan with another kernel for bf16 products.
    ///
    /// # Errors
    /// The memory is no longer available.
    pub(super) fn with_half_kernel(mut self, training: &Training, half: HalfKernel) -> Result<CpuPlan, TrainError> {
        if self.cpu.half != half {
            self.cpu.half = half;
            self.network = Network::new(training.graph()?, self.cpu.clone())?;
        }
        Ok(self)
    }

    pub fn layout(&self) -> &Layout {
        self.network.layout()
    }

    /// The kernel for bf16 products; `None` if there are none.
    pub fn half_kernel(&self, training: &Training) -> Option<HalfKernel> {
        (training.half_type() == Some(HalfType::Bf16)).then_some(self.cpu.half)
    }

    /// Name of the kernels in use.
    pub fn kernel(&self, training: &Training) -> String {
        kernel::name(&self.cpu, self.half_kernel(training))
    }

    /// Host memory of the process, without the device-independent part.
    pub fn memory(&self, training: &Training) -> MemoryUse {
        let layout = self.network.layout();
        let flat = 4 * layout.len as u64;
        let gradients = match &training.places {
            Some(places) => places.bytes() + 4 * training.most_owned() as u64,
            None => flat,
        };
        MemoryUse {
            weights: flat + if training.half_type().is_some() { flat / 2 } else { 0 },
            gradients: gradients + check_bytes(&training.config) + top_k_bytes(training),
            optimizer: State::optimizer_bytes(training, layout),
            activations: self.network.memory_bytes() as u64,
            input: 0,
            communication: 0,
            process: 0,
        }
    }

    /// Activations without recomputation, in bytes; `None` if nothing is recomputed.
    pub fn kept_activations(&self) -> Option<u64> {
        self.network.memory_bytes_kept().map(|bytes| bytes as u64)
    }

    /// Host memory with all values in f32.
    pub fn memory_fp32(&self, training: &Training) -> MemoryUse {
        let flat = 4 * self.network.layout().len as u64;
        MemoryUse { weights: flat, activations: self.network.memory_bytes_f32() as u64, ..self.memory(training) }
    }
}
