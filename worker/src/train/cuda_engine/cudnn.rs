//! Selects the operations that cuDNN computes. It is queried for each kind of convolution and
//! attention before anything is allocated, and its plans are cached between runs. Other
//! convolutions use im2col and GEMM; other attention uses our own kernels.

use super::algorithms::arithmetic;
use super::cache::Cache;
use super::machine::{Machine, cache_name};
use crate::gpu::{self, AttentionKind, AttentionPass, ConvolutionKind, CudnnKind, CudnnKinds};
use crate::nn::{Form, Graph};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use switchyard_cuda::convolution::Direction;
use switchyard_cuda::cudnn::Cudnn;
use switchyard_cuda::driver::{Context, Device, Span};
use switchyard_cuda::operation::{Accepted, Limits, Operation, Planned, Properties, ask};
use switchyard_cuda::{Error, Library, version};
use switchyard_worker_contract::config;
use switchyard_worker_contract::event::{CudnnCoverage, GpuPaths};

/// Workspace limit of a convolution. The fastest 16-bit convolutions use a few MB, a stem with 3
/// channels 60 MB for 64 images (cuDNN 9.19 on an H200). Exact f32 convolutions rearrange whole
/// tensors, which can be as large as this.
const MAX_WORKSPACE: usize = 256 << 20;

/// cuDNN's answer for each kind of operation.
pub(super) struct CudnnPlans {
    cudnn: Result<(Library, Cudnn), String>,
    /// Everything that cached plans depend on besides their kinds.
    key: String,
    /// Kind, operation and answer.
    kinds: Vec<(CudnnKind, Operation, Result<Accepted, String>)>,
}

/// An [`Accepted`] on disk.
#[derive(Serialize, Deserialize)]
struct CachedPlan {
    workspace_bytes: usize,
    plan: String,
}

impl CudnnPlans {
    /// Queries cuDNN for all supported operations of a graph, on the first device that this process
    /// sees. Does not open cuDNN if the graph has none.
    pub fn new(machine: &Machine, device: &Device, graph: &Graph, config: config::Gpu) -> CudnnPlans {
        let described = |kind: CudnnKind| Some((kind, kind.described(arithmetic(config.matmul))?));
        let all = CudnnKinds::of(graph).into_iter().filter_map(described);
        let refused = |reason: &str, all: Vec<(CudnnKind, Operation)>| {
            let kinds = all.into_iter().map(|(kind, operation)| (kind, operation, Err(reason.to_owned())));
            CudnnPlans { cudnn: Err(reason.to_owned()), key: String::new(), kinds: kinds.collect() }
        };
        let all: Vec<(CudnnKind, Operation)> = all.collect();
        if all.is_empty() {
            return refused("", all);
        }
        let (library, cudnn) = match machine.cudnn() {
            Ok(found) => found,
            Err(reason) => return refused(&reason, all),
        };
        let limits = |operation: &Operation| Limits {
            deterministic: config.deterministic,
            workspace_bytes: match operation {
                Operation::Convolution(_) => MAX_WORKSPACE,
                // The memory plan counts it: a batch that does not fit is refused, instead of
                // running on slower kernels.
                Operation::Attention(_) => device.memory_bytes,
            },
        };
        let (version, bytes) = (cudnn.version(), device.memory_bytes);
        let key = format!(
            "{}, cuDNN {version}, deterministic {}, {MAX_WORKSPACE} and {bytes} bytes: plans",
            cache_name(device),
            config.deterministic
        );
        let mut known = cached_plans(&key);
        let mut properties = None;
        let mut kinds = Vec::new();
        for (kind, operation) in all {
            let answer = match known.remove(&operation.kind()) {
                Some(CachedPlan { workspace_bytes, plan }) => Ok(Accepted { workspace_bytes, plan }),
                None => {
                    let of = || Properties::of(&cudnn, 0).map_err(|error| error.to_string());
                    let query =
                        |device| ask(&cudnn, device, &operation, limits(&operation)).map_err(|error| error.to_string());
                    properties.get_or_insert_with(of).as_ref().map_err(String::clone).and_then(query)
                }
            };
            kinds.push((kind, operation, answer));
        }
        let has_queried = properties.is_some();
        let plans = CudnnPlans { cudnn: Ok((library, cudnn)), key, kinds };
        if has_queried {
            plans.save();
        }
        plans
    }

    /// Caches the accepted plans for later runs; rejected ones are removed.
    fn save(&self) {
        let mut all = cached_plans(&self.key);
        for (_, operation, answer) in &self.kinds {
            let name = operation.kind();
            match answer {
                Ok(Accepted { workspace_bytes, plan }) => {
                    all.insert(name, CachedPlan { workspace_bytes: *workspace_bytes, plan: plan.clone() })
                }
                Err(_) => all.remove(&name),
            };
        }
        Cache::from_env().put(&self.key, &serde_json::to_vec(&all).unwrap_or_default());
    }

    /// The kinds that cuDNN computes.
    pub fn kinds(&self) -> CudnnKinds {
        let of = |(kind, _, answer): &(CudnnKind, Operation, Result<Accepted, String>)| {
            answer.as_ref().ok().map(|accepted| (*kind, accepted.workspace_bytes))
        };
        CudnnKinds::new(self.kinds.iter().filter_map(of).collect())
    }

    fn accepted(&self) -> usize {
        self.kinds.iter().filter(|(_, _, answer)| answer.is_ok()).count()
    }

    /// Starts cuDNN on a rank's device, if it computes anything. Returns whether it accepts all its
    /// plans there; rejected ones are dropped.
    ///
    /// # Errors
    /// The context cannot be used.
    pub fn start(&mut self, context: &Context) -> Result<bool, Error> {
        let accepted = self.accepted();
        let Ok((library, cudnn)) = &mut self.cudnn else { return Ok(true) };
        if accepted == 0 {
            return Ok(true);
        }
        context.make_current()?;
        match Cudnn::start(library) {
            Ok(started) => *cudnn = started,
            Err(error) => {
                let reason = error.to_string();
                self.kinds.iter_mut().for_each(|(_, _, answer)| *answer = Err(reason.clone()));
                self.cudnn = Err(reason);
                return Ok(false);
            }
        }
        for (_, _, answer) in &mut self.kinds {
            let refused = answer.as_ref().ok().and_then(|accepted| Planned::check(cudnn, accepted).err());
            if let Some(error) = refused {
                *answer = Err(error.to_string());
            }
        }
        let accepts_all = self.accepted() == accepted;
        if !accepts_all {
            self.save();
        }
        Ok(accepts_all)
    }

    /// Prepares a convolution for queueing.
    ///
    /// # Errors
    /// cuDNN rejects it.
    ///
    /// # Panics
    /// It is not one of [`CudnnPlans::kinds`].
    pub fn convolution(&self, of: &gpu::Convolution<Span>) -> Result<Planned, Error> {
        let gpu::Convolution { kind, images, filters, results, workspace } = *of;
        let (cudnn, operation, accepted) = self.planned(&CudnnKind::Convolution(kind));
        Planned::new(cudnn, operation, accepted, &[images, filters, results], workspace)
    }

    /// Prepares an attention operation for queueing.
    ///
    /// # Errors
    /// cuDNN rejects it.
    ///
    /// # Panics
    /// It is not one of [`CudnnPlans::kinds`].
    pub fn attention(&self, of: &gpu::Attention<Span>) -> Result<Planned, Error> {
        let (cudnn, operation, accepted) = self.planned(&CudnnKind::Attention(of.kind));
        let Operation::Attention(attention) = operation else {
            unreachable!("invariant: attention is described as attention")
        };
        let spans = match of.on {
            AttentionPass::Forward { qkv, out, saved } => attention.spans(qkv, out, saved)?,
            AttentionPass::Backward(on) => attention.backward_spans(on)?,
        };
        Planned::new(cudnn, operation, accepted, &spans, of.workspace)
    }

    fn planned(&self, kind: &CudnnKind) -> (&Cudnn, &Operation, &Accepted) {
        let known = self.kinds.iter().find(|(known, ..)| known == kind);
        let found = known.and_then(|(_, operation, answer)| Some((operation, answer.as_ref().ok()?)));
        let both = self.cudnn.as_ref().ok().zip(found);
        let ((_, cudnn), (operation, accepted)) =
            both.expect("invariant: works are planned for what cuDNN has accepted");
        (cudnn, operation, accepted)
    }

    /// The operations that cuDNN computes, and what computes the refused ones.
    pub fn paths(&self) -> GpuPaths {
        let (convolutions, attention) = (self.coverage(is_convolution), self.coverage(is_attention(false)));
        let attention_gradient = self.coverage(is_attention(true));
        let fallbacks = GROUPS.iter().flat_map(|group| self.fallbacks(group)).collect();
        GpuPaths { convolutions, attention, attention_gradient, epilogues: false, fallbacks }
    }

    fn coverage(&self, counts: impl Fn(&CudnnKind) -> bool) -> CudnnCoverage {
        let all = self.kinds.iter().filter(|(kind, ..)| counts(kind));
        let add = |sum: CudnnCoverage, (_, _, answer): &(_, _, Result<Accepted, String>)| CudnnCoverage {
            queried: sum.queried + 1,
            accepted: sum.accepted + u32::from(answer.is_ok()),
        };
        all.fold(CudnnCoverage::default(), add)
    }

    /// What replaces the refused operations of a group, and why.
    fn fallbacks(&self, group: &Group) -> Vec<String> {
        let Group { name, otherwise, contains } = group;
        let mut kinds = self.kinds.iter().filter(|(kind, ..)| contains(kind)).peekable();
        match &self.cudnn {
            Err(reason) if kinds.peek().is_some() => vec![format!("{name}: {otherwise}: {reason}")],
            Err(_) => Vec::new(),
            Ok(_) => kinds
                .filter_map(|(kind, _, answer)| {
                    let reason = answer.as_ref().err()?;
                    Some(format!("{otherwise}: {}: {reason}", describe(kind)))
                })
                .collect(),
        }
    }

    /// Logs which operations use cuDNN, and why others do not.
    pub fn log(&self) {
        for group in &GROUPS {
            let CudnnCoverage { queried, accepted } = self.coverage(group.contains);
            if let (Ok((_, cudnn)), 1..) = (&self.cudnn, queried) {
                let version = version::library(i64::try_from(cudnn.version()).unwrap_or(i64::MAX));
                eprintln!("note: cuDNN {version} accepts {accepted} of {queried} kinds of {}", group.name);
            }
            self.fallbacks(group).iter().for_each(|text| eprintln!("note: {text}"));
        }
    }
}

/// Operations with the same fallback.
struct Group {
    name: &'static str,
    otherwise: &'static str,
    contains: fn(&CudnnKind) -> bool,
}

const GROUPS: [Group; 2] = [
    Group { name: "convolutions", otherwise: "products of patches", contains: is_convolution },
    Group { name: "attention", otherwise: "kernels of ours", contains: |kind| !is_convolution(kind) },
];

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

/// The cached plans of earlier runs, by kind.
fn cached_plans(key: &str) -> BTreeMap<String, CachedPlan> {
    let bytes = Cache::from_env().get(key);
    bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default()
}
