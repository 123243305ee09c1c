use super::kernel;
use super::pipeline::Pipeline;
use super::state::State;
use crate::cpu::{Cpu, HalfKernel, Isa, Pool};
use crate::nn::{Layout, Network};
use crate::train::TrainError;
use crate::train::exchange::{check_bytes, top_k_bytes};
use crate::train::stages::Stages;
use crate::train::training::Training;
use std::sync::Arc;
use switchyard_worker_contract::config::HalfType;
use switchyard_worker_contract::event::MemoryUse;

/// The static plan of a rank on CPUs.
pub(in crate::train) struct CpuPlan {
    pub(super) cpu: Cpu,
    /// With pipelines, of the stage that needs most memory until the rank knows its own.
    pub(super) network: Network,
    pub(super) stages: Option<Stages>,
    /// The stage of `network`.
    stage: usize,
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
        let Some(stages) = Stages::new(training)? else {
            let network = Network::new(training.graph()?, cpu.clone())?;
            return Ok(CpuPlan { cpu, network, stages: None, stage: 0, half_kernels });
        };
        let network = stages.network(training, 0, &cpu)?;
        let mut plan = CpuPlan { cpu, network, stages: Some(stages), stage: 0, half_kernels };
        let mut largest = (plan.memory(training).total(), 0);
        for stage in 1..training.config.stages() as usize {
            plan = plan.with_stage(training, stage)?;
            largest = largest.max((plan.memory(training).total(), stage));
        }
        plan.with_stage(training, largest.1)
    }

    /// Returns the plan of a stage of the pipelines, if there are any.
    ///
    /// # Errors
    /// The memory is no longer available.
    pub(super) fn with_stage(mut self, training: &Training, stage: usize) -> Result<CpuPlan, TrainError> {
        self.stage = stage;
        if let Some(stages) = &self.stages {
            self.network = stages.network(training, stage, &self.cpu)?;
        }
        Ok(self)
    }

    /// Returns the plan with another kernel for bf16 products.
    ///
    /// # Errors
    /// The memory is no longer available.
    pub(super) fn with_half_kernel(mut self, training: &Training, half: HalfKernel) -> Result<CpuPlan, TrainError> {
        if self.cpu.half != half {
            self.cpu.half = half;
            if self.stages.is_some() {
                let stage = self.stage;
                return self.with_stage(training, stage);
            }
            self.network = Network::new(training.graph()?, self.cpu.clone())?;
        }
        Ok(self)
    }

    /// Layout of the whole network.
    pub fn layout(&self) -> &Layout {
        self.stages.as_ref().map_or_else(|| self.network.layout(), |stages| &stages.layout)
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
            communication: self
                .stages
                .as_ref()
                .map_or(0, |stages| Pipeline::message_bytes(stages, self.stage, training.format())),
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
