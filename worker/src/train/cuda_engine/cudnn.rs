//! Plans the operations that cuDNN computes, before any memory is allocated. Our own kernels compute
//! other attention; a convolution that cuDNN refuses is an error.

use super::algorithms::arithmetic;
use super::machine::Machine;
use crate::gpu::{self, AttentionKind, AttentionPass, ConvolutionKind, CudnnKind, CudnnKinds};
use crate::nn::{Form, Graph};
use crate::train::TrainError;
use std::sync::Arc;
use switchyard_cuda::convolution::Direction;
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
    kinds: Vec<(CudnnKind, Result<Arc<Plan>, String>)>,
}

impl CudnnPlans {
    /// Plans all supported operations of a graph on the current device. Does not open cuDNN if the
    /// graph has none.
    ///
    /// # Errors
    /// cuDNN does not compute a convolution.
    pub fn new(machine: &Machine, graph: &Graph, config: config::Gpu) -> Result<CudnnPlans, TrainError> {
        let described = |kind: CudnnKind| Some((kind, kind.described(arithmetic(config.matmul))?));
        let all: Vec<_> = CudnnKinds::of(graph).into_iter().filter_map(described).collect();
        if all.is_empty() {
            return Ok(CudnnPlans { version: Err(String::new()), kinds: Vec::new() });
        }
        let cudnn = machine.cudnn();
        let plan = |operation: &Operation| {
            let cudnn = cudnn.as_ref().map_err(String::clone)?;
            let within = |workspace_bytes| {
                let limits = Limits { deterministic: config.deterministic, workspace_bytes };
                Plan::new(cudnn, operation, limits).map(Arc::new)
            };
            // The memory plan counts the workspace: a batch that does not fit is refused, instead of
            // running on slower kernels.
            let any = || within(machine.context.device().memory_bytes);
            let plan = match operation {
                Operation::Convolution(_) => within(WORKSPACE).or_else(|_| any()),
                Operation::Attention(_) => any(),
            };
            plan.map_err(|error| error.to_string())
        };
        let kinds: Vec<_> = all.iter().map(|(kind, operation)| (*kind, plan(operation))).collect();
        let refused = kinds
            .iter()
            .find_map(|(kind, answer)| Some((kind, answer.as_ref().err()?)).filter(|_| is_convolution(kind)));
        if let Some((kind, reason)) = refused {
            let text = format!("no cuDNN for {}: {reason}; expected one that computes it", describe(kind));
            return Err(TrainError::NoGpu(text));
        }
        let shown = |number: usize| version::library(i64::try_from(number).unwrap_or(i64::MAX));
        let version = cudnn.map(|cudnn| shown(cudnn.version()).to_string());
        Ok(CudnnPlans { version, kinds })
    }

    /// The kinds that cuDNN computes.
    pub fn kinds(&self) -> CudnnKinds {
        let planned = self.kinds.iter().filter_map(|(kind, answer)| Some((*kind, answer.as_ref().ok()?)));
        CudnnKinds::new(planned.map(|(kind, plan)| (kind, plan.workspace_bytes())).collect())
    }

    /// Prepares a convolution for queueing.
    ///
    /// # Errors
    /// The memory is too small, or a call fails.
    ///
    /// # Panics
    /// It is not one of [`CudnnPlans::kinds`].
    pub fn convolution(&self, of: &gpu::Convolution<Span>) -> Result<Planned, Error> {
        let gpu::Convolution { kind, images, filters, results, workspace } = *of;
        Planned::new(self.plan(&CudnnKind::Convolution(kind)), &[images, filters, results], workspace)
    }

    /// Prepares an attention operation for queueing.
    ///
    /// # Errors
    /// The memory is too small, or a call fails.
    ///
    /// # Panics
    /// It is not one of [`CudnnPlans::kinds`].
    pub fn attention(&self, of: &gpu::Attention<Span>) -> Result<Planned, Error> {
        let plan = self.plan(&CudnnKind::Attention(of.kind));
        let Operation::Attention(attention) = plan.operation() else {
            unreachable!("invariant: attention is described as attention")
        };
        let spans = match of.on {
            AttentionPass::Forward { qkv, out, saved } => attention.spans(qkv, out, saved)?,
            AttentionPass::Backward(on) => attention.backward_spans(on)?,
        };
        Planned::new(plan, &spans, of.workspace)
    }

    fn plan(&self, kind: &CudnnKind) -> &Arc<Plan> {
        let known = self.kinds.iter().find(|(known, _)| known == kind);
        let plan = known.and_then(|(_, answer)| answer.as_ref().ok());
        plan.expect("invariant: works are planned for what cuDNN has accepted")
    }

    /// The operations that cuDNN computes, and why our kernels compute others.
    pub fn paths(&self) -> GpuPaths {
        let (convolutions, attention) = (self.coverage(is_convolution), self.coverage(is_attention(false)));
        let attention_gradient = self.coverage(is_attention(true));
        GpuPaths { convolutions, attention, attention_gradient, epilogues: false, fallbacks: self.fallbacks() }
    }

    fn coverage(&self, counts: impl Fn(&CudnnKind) -> bool) -> CudnnCoverage {
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
                let refused = self.kinds.iter().filter_map(|(kind, answer)| Some((kind, answer.as_ref().err()?)));
                refused.map(|(kind, reason)| format!("kernels of ours: {}: {reason}", describe(kind))).collect()
            }
        }
    }

    /// Logs which operations use cuDNN, and why others do not.
    pub fn log(&self) {
        for (name, contains) in GROUPS {
            let CudnnCoverage { queried, accepted } = self.coverage(contains);
            if let (Ok(version), 1..) = (&self.version, queried) {
                eprintln!("note: cuDNN {version} accepts {accepted} of {queried} kinds of {name}");
            }
        }
        self.fallbacks().iter().for_each(|text| eprintln!("note: {text}"));
    }
}

const GROUPS: [(&str, fn(&CudnnKind) -> bool); 2] =
    [("convolutions", is_convolution), ("attention", |kind| !is_convolution(kind))];

fn is_convolution(kind: &CudnnKind) -> bool {
    matches!(kind, CudnnKind::Convolution(_))
}

fn is_attention(backward: bool) -> impl Fn(&CudnnKind) -> bool {
    move |kind| matches!(kind, CudnnKind::Attention(attention) if attention.backward == backward)
}

fn describe(kind: &CudnnKind) -> String {
    let (form, way) = match *kind {
        CudnnKind::Convolution(ConvolutionKind { shape, direction, adds, .. }) => {
            let way = match (direction, adds) {
                (Direction::Forward, _) => "forward",
                (Direction::Filters, _) => "gradient of the weights",
                (Direction::Images, false) => "gradient of the input",
                (Direction::Images, true) => "gradient of the input, added",
            };
            (Form::Convolution(shape), way)
        }
        CudnnKind::Attention(AttentionKind { shape, backward, .. }) => {
            (Form::Attention(shape), if backward { "gradient" } else { "forward" })
        }
    };
    format!("{form}: {way}")
}
