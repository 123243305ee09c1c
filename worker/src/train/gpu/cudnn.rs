//! What cuDNN computes: it is asked for each kind of convolution and attention before anything is allocated, and its plans are kept between runs. Other
//! convolutions are products of patches, other attention is computed by our kernels.

use super::algorithms::arithmetic;
use super::cache::Cache;
use super::machine::{Machine, name_of};
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

/// Memory that an operation may use beside its tensors. The fastest convolutions in 16 bits use a few MB, a stem of 3 channels 60 MB for 64 images
/// (cuDNN 9.19, for an H200); exact ones in 32 bits turn whole tensors, which then may be as large as this.
const MOST_WORKSPACE: usize = 256 << 20;

/// What cuDNN answers.
pub(super) struct Answers {
    cudnn: Result<(Library, Cudnn), String>,
    /// What plans that are kept depend on beside their kinds.
    key: String,
    /// With the operation that is asked for.
    kinds: Vec<(CudnnKind, Operation, Result<Accepted, String>)>,
}

/// An [`Accepted`] on disk.
#[derive(Serialize, Deserialize)]
struct Kept {
    workspace_bytes: usize,
    plan: String,
}

impl Answers {
    /// Asks for all that cuDNN may compute of a graph on a device of the machine, which is the first that this process sees. Nothing is asked of a
    /// graph that has none of it.
    pub fn new(machine: &Machine, device: &Device, graph: &Graph, config: config::Gpu) -> Answers {
        let described = |kind: CudnnKind| Some((kind, kind.described(arithmetic(config.matmul))?));
        let all = CudnnKinds::of(graph, config.deterministic).into_iter().filter_map(described);
        let refused = |reason: &str, all: Vec<(CudnnKind, Operation)>| {
            let kinds = all.into_iter().map(|(kind, operation)| (kind, operation, Err(reason.to_owned())));
            Answers { cudnn: Err(reason.to_owned()), key: String::new(), kinds: kinds.collect() }
        };
        let all: Vec<(CudnnKind, Operation)> = all.collect();
        if all.is_empty() {
            return refused("", all);
        }
        let (library, cudnn) = match machine.cudnn() {
            Ok(found) => found,
            Err(reason) => return refused(&reason, all),
        };
        let limits = Limits { deterministic: config.deterministic, workspace_bytes: MOST_WORKSPACE };
        let key = format!("{}, cuDNN {}, {limits:?}: plans", name_of(device), cudnn.version());
        let mut known = kept(&key);
        let mut properties = None;
        let mut kinds = Vec::new();
        for (kind, operation) in all {
            let answer = match known.remove(&operation.kind()) {
                Some(Kept { workspace_bytes, plan }) => Ok(Accepted { workspace_bytes, plan }),
                None => {
                    let of = || Properties::of(&cudnn, 0).map_err(|error| error.to_string());
                    let asked = |device| ask(&cudnn, device, &operation, limits).map_err(|error| error.to_string());
                    properties.get_or_insert_with(of).as_ref().map_err(String::clone).and_then(asked)
                }
            };
            kinds.push((kind, operation, answer));
        }
        let has_asked = properties.is_some();
        let answers = Answers { cudnn: Ok((library, cudnn)), key, kinds };
        if has_asked {
            answers.keep();
        }
        answers
    }

    /// Keeps the plans for later runs, and none of what is refused.
    fn keep(&self) {
        let mut all = kept(&self.key);
        for (_, operation, answer) in &self.kinds {
            let name = operation.kind();
            match answer {
                Ok(Accepted { workspace_bytes, plan }) => {
                    all.insert(name, Kept { workspace_bytes: *workspace_bytes, plan: plan.clone() })
                }
                Err(_) => all.remove(&name),
            };
        }
        Cache::of_environment().put(&self.key, &serde_json::to_vec(&all).unwrap_or_default());
    }

    /// What cuDNN computes.
    pub fn kinds(&self) -> CudnnKinds {
        let of = |(kind, _, answer): &(CudnnKind, Operation, Result<Accepted, String>)| {
            answer.as_ref().ok().map(|accepted| (*kind, accepted.workspace_bytes))
        };
        CudnnKinds::new(self.kinds.iter().filter_map(of).collect())
    }

    fn accepted(&self) -> usize {
        self.kinds.iter().filter(|(_, _, answer)| answer.is_ok()).count()
    }

    /// Starts cuDNN on the device of a rank, if it computes anything. Whether it takes all of its plans there; the others are gone from now
    /// on.
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
        let takes_all = self.accepted() == accepted;
        if !takes_all {
            self.keep();
        }
        Ok(takes_all)
    }

    /// A convolution ready to be queued.
    ///
    /// # Errors
    /// cuDNN refuses.
    ///
    /// # Panics
    /// It is none of [`Answers::kinds`].
    pub fn convolution(&self, of: &gpu::Convolution<Span>) -> Result<Planned, Error> {
        let gpu::Convolution { kind, images, filters, results, workspace } = *of;
        let (cudnn, operation, accepted) = self.planned(&CudnnKind::Convolution(kind));
        Planned::new(cudnn, operation, accepted, &[images, filters, results], workspace)
    }

    /// The same for attention.
    ///
    /// # Errors
    /// cuDNN refuses.
    ///
    /// # Panics
    /// It is none of [`Answers::kinds`].
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

    /// Says what goes which way, and why.
    pub fn tell(&self) {
        let is_convolution = |kind: &CudnnKind| matches!(kind, CudnnKind::Convolution(_));
        let of = |convolutions: bool| self.kinds.iter().filter(move |(kind, ..)| is_convolution(kind) == convolutions);
        for (is, what, otherwise) in
            [(true, "convolutions", "products of patches"), (false, "attention", "kernels of ours")]
        {
            let all = of(is).count();
            match &self.cudnn {
                _ if all == 0 => {}
                Err(reason) => eprintln!("note: {what}: {otherwise}: {reason}"),
                Ok((_, cudnn)) => {
                    let version = version::library(i64::try_from(cudnn.version()).unwrap_or(i64::MAX));
                    let accepted = of(is).filter(|(_, _, answer)| answer.is_ok()).count();
                    eprintln!("note: cuDNN {version} accepts {accepted} of {all} kinds of {what}");
                    for (kind, _, answer) in of(is) {
                        if let Err(reason) = answer {
                            eprintln!("note: {otherwise}: {}: {reason}", words(kind));
                        }
                    }
                }
            }
        }
    }
}

fn words(kind: &CudnnKind) -> String {
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

/// The plans of earlier runs, by kind.
fn kept(key: &str) -> BTreeMap<String, Kept> {
    let bytes = Cache::of_environment().get(key);
    bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default()
}
