//! Plans the operations that cuDNN computes, before any memory is allocated. Our own kernels
//! compute other attention; a convolution that cuDNN refuses is an error.

use super::algorithms::arithmetic;
use super::machine::Machine;
use crate::lowering::{self, Computation, CudnnKinds, Work};
use crate::nn::Graph;
use crate::train::TrainError;
use std::sync::Arc;
use switchyard_cuda::driver::Span;
use switchyard_cuda::operation::{Limits, Operation, Plan, Planned};
use switchyard_cuda::{Error, version};
use switchyard_worker_contract::config;
use switchyard_worker_contract::event::{CudnnCoverage, GpuPaths};

/// Preferred workspace limit of a convolution. The fastest 16-bit convolutions use a few MB, a stem
/// with 3 channels 60 MB for 64 images (cuDNN 9.19 on an H200). Exact f32 convolutions rearrange
/// whole tensors, which can be as large as this.
const WORKSPACE: usize = 256 << 20;

/// cuDNN's answer for each kind of operation.
pub(super) struct CudnnPlans {
    /// The version, or why cuDNN cannot be used.
    version: Result<String, String>,
    kinds: Vec<(Operation, Result<Arc<Plan>, String>)>,
}

impl CudnnPlans {
    /// Plans all supported operations of a graph on the current device. Does not open cuDNN if the
    /// graph has none.
    pub fn new(machine: &Machine, graph: &Graph, config: config::Gpu) -> CudnnPlans {
        let all = CudnnKinds::of(graph, arithmetic(config.matmul));
        if all.is_empty() {
            return CudnnPlans { version: Err(String::new()), kinds: Vec::new() };
        }
        let cudnn = machine.cudnn();
        let plan = |operation: &Operation| {
            let cudnn = cudnn.as_ref().map_err(String::clone)?;
            let within = |workspace_bytes| {
                let limits = Limits { deterministic: config.deterministic, workspace_bytes };
                Plan::new(cudnn, operation, limits).map(Arc::new)
            };
            // The memory plan counts the workspace: a batch that does not fit is refused, instead
            // of running on slower kernels.
            let any = || within(machine.context.device().memory_bytes);
            let plan = match operation {
                Operation::Convolution(_) => within(WORKSPACE).or_else(|_| any()),
                Operation::Attention(_) => any(),
            };
            plan.map_err(|error| error.to_string())
        };
        let kinds: Vec<_> = all.into_iter().map(|operation| (operation, plan(&operation))).collect();
        let shown = |number: usize| version::library(i64::try_from(number).unwrap_or(i64::MAX));
        let version = cudnn.map(|cudnn| shown(cudnn.version()).to_string());
        CudnnPlans { version, kinds }
    }

    /// Rejects a computation with a convolution that cuDNN refuses.
    ///
    /// # Errors
    /// The convolution, and the reason.
    pub fn check(&self, computation: &Computation) -> Result<(), TrainError> {
        for work in computation.works(|span| span)?.all() {
            let Work::Cudnn(lowering::Cudnn { operation, .. }) = work else { continue };
            if let Some((_, Err(reason))) = self.kinds.iter().find(|(known, _)| known == operation) {
                return Err(TrainError::NoGpu(format!("{operation}: {reason}; expected a cuDNN that computes it")));
            }
        }
        Ok(())
    }

    /// The kinds that cuDNN computes.
    pub fn kinds(&self) -> CudnnKinds {
        let planned = self.kinds.iter().filter_map(|(kind, answer)| Some((*kind, answer.as_ref().ok()?)));
        CudnnKinds::new(planned.map(|(kind, plan)| (kind, plan.workspace_bytes())).collect())
    }

    /// Prepares an operation for queueing.
    ///
    /// # Errors
    /// The memory is too small, or a call fails.
    ///
    /// # Panics
    /// It is not one of [`CudnnPlans::kinds`].
    pub fn planned(&self, of: &lowering::Cudnn<Span>) -> Result<Planned, Error> {
        let known = self.kinds.iter().find(|(known, _)| *known == of.operation);
        let plan = known.and_then(|(_, answer)| answer.as_ref().ok());
        let plan = plan.expect("invariant: works are planned for what cuDNN has accepted");
        Planned::new(plan, &of.memory, of.workspace)
    }

    /// The operations that cuDNN computes, and why our kernels compute others.
    pub fn paths(&self) -> GpuPaths {
        let (convolutions, attention) = (self.coverage(is_convolution), self.coverage(is_attention(false)));
        let attention_gradient = self.coverage(is_attention(true));
        GpuPaths { convolutions, attention, attention_gradient, epilogues: false, fallbacks: self.fallbacks() }
    }

    fn coverage(&self, counts: impl Fn(&Operation) -> bool) -> CudnnCoverage {
        let all = self.kinds.iter().filter(|(kind, _)| counts(kind));
        let add = |sum: CudnnCoverage, (_, answer): &(_, Result<Arc<Plan>, String>)| CudnnCoverage {
            queried: sum.queried + 1,
            accepted: sum.accepted + u32::from(answer.is_ok()),
        };
        all.fold(CudnnCoverage::default(), add)
    }

    fn fallbacks(&self) -> Vec<String> {
        match &self.version {
            Err(_) if self.kinds.is_empty() => Vec::new(),
            Err(reason) => vec![format!("attention: kernels of ours: {reason}")],
            Ok(_) => {
                let attention = self.kinds.iter().filter(|(kind, _)| !is_convolution(kind));
                let refused = attention.filter_map(|(kind, answer)| Some((kind, answer.as_ref().err()?)));
                refused.map(|(kind, reason)| format!("kernels of ours: {kind}: {reason}")).collect()
            }
        }
    }

    /// Logs which operations use cuDNN, and why others do not.
    pub fn log(&self) {
        for (name, convolutions) in [("convolutions", true), ("attention", false)] {
            let counts = |kind: &Operation| is_convolution(kind) == convolutions;
            let CudnnCoverage { queried, accepted } = self.coverage(counts);
            if let (Ok(version), 1..) = (&self.version, queried) {
                eprintln!("note: cuDNN {version} accepts {accepted} of {queried} kinds of {name}");
            }
        }
        self.fallbacks().iter().for_each(|text| eprintln!("note: {text}"));
    }
}

fn is_convolution(kind: &Operation) -> bool {
    matches!(kind, Operation::Convolution(_))
}

fn is_attention(backward: bool) -> impl Fn(&Operation) -> bool {
    move |kind| matches!(kind, Operation::Attention(attention) if attention.backward == backward)
}
