//! Convolutions by cuDNN: it is asked for each kind before anything is allocated, and its plans are kept between runs. What it does not compute
//! is a product of patches.

use super::algorithms::arithmetic;
use super::cache::Cache;
use super::machine::{Machine, name_of};
use crate::gpu::{self, ConvolutionKind, Convolutions};
use crate::nn::{Form, Graph};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use switchyard_cuda::convolution::{Accepted, Direction, Planned, Properties, ask};
use switchyard_cuda::cudnn::Cudnn;
use switchyard_cuda::driver::{Context, Device, Span};
use switchyard_cuda::{Error, Library, version};
use switchyard_worker_contract::config::Matmul;

/// Memory that a convolution may use beside its tensors. The fastest in 16 bits use a few MB, a stem of 3 channels 60 MB for 64 images
/// (cuDNN 9.19, for an H200); exact ones in 32 bits turn whole tensors, which then may be as large as this.
const MOST_WORKSPACE: usize = 256 << 20;

/// What cuDNN answers.
pub(super) struct Answers {
    cudnn: Result<(Library, Cudnn), String>,
    matmul: Matmul,
    /// What plans that are kept depend on beside their kinds.
    key: String,
    kinds: Vec<(ConvolutionKind, Result<Accepted, String>)>,
}

/// An [`Accepted`] on disk.
#[derive(Serialize, Deserialize)]
struct Kept {
    workspace_bytes: usize,
    plan: String,
}

impl Answers {
    /// Asks for all convolutions of a graph on a device of the machine, which is the first that this process sees. Nothing is asked of a graph
    /// that has none.
    pub fn new(machine: &Machine, device: &Device, graph: &Graph, matmul: Matmul) -> Answers {
        let all = Convolutions::of(graph);
        let nothing = Answers { cudnn: Err(String::new()), matmul, key: String::new(), kinds: Vec::new() };
        if all.is_empty() {
            return nothing;
        }
        let (library, cudnn) = match machine.cudnn() {
            Ok(found) => found,
            Err(reason) => return Answers { cudnn: Err(reason), ..nothing },
        };
        let key = format!("{}, cuDNN {}, {MOST_WORKSPACE} bytes: convolutions", name_of(device), cudnn.version());
        let mut known = kept(&key);
        let mut properties = None;
        let mut kinds = Vec::new();
        for kind in all {
            let described = kind.described(arithmetic(matmul));
            let answer = match known.remove(&described.kind()) {
                Some(Kept { workspace_bytes, plan }) => Ok(Accepted { workspace_bytes, plan }),
                None => {
                    let of = || Properties::of(&cudnn, 0).map_err(|error| error.to_string());
                    let asked =
                        |device| ask(&cudnn, device, &described, MOST_WORKSPACE).map_err(|error| error.to_string());
                    properties.get_or_insert_with(of).as_ref().map_err(String::clone).and_then(asked)
                }
            };
            kinds.push((kind, answer));
        }
        let has_asked = properties.is_some();
        let answers = Answers { cudnn: Ok((library, cudnn)), matmul, key, kinds };
        if has_asked {
            answers.keep();
        }
        answers
    }

    /// Keeps the plans for later runs, and none of what is refused.
    fn keep(&self) {
        let mut all = kept(&self.key);
        for (kind, answer) in &self.kinds {
            let name = kind.described(arithmetic(self.matmul)).kind();
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
    pub fn convolutions(&self) -> Convolutions {
        let of = |(kind, answer): &(ConvolutionKind, Result<Accepted, String>)| {
            answer.as_ref().ok().map(|accepted| (*kind, accepted.workspace_bytes))
        };
        Convolutions::new(self.kinds.iter().filter_map(of).collect())
    }

    /// Starts cuDNN on the device of a rank, if it computes anything. Whether it takes all of its plans there; the others are by patches from
    /// now on.
    ///
    /// # Errors
    /// The context cannot be used.
    pub fn start(&mut self, context: &Context) -> Result<bool, Error> {
        let accepted = self.kinds.iter().filter(|(_, answer)| answer.is_ok()).count();
        let Ok((library, cudnn)) = &mut self.cudnn else { return Ok(true) };
        if accepted == 0 {
            return Ok(true);
        }
        context.make_current()?;
        match Cudnn::start(library) {
            Ok(started) => *cudnn = started,
            Err(error) => {
                self.cudnn = Err(error.to_string());
                self.kinds.clear();
                return Ok(false);
            }
        }
        for (_, answer) in &mut self.kinds {
            let refused = answer.as_ref().ok().and_then(|accepted| Planned::check(cudnn, accepted).err());
            if let Some(error) = refused {
                *answer = Err(error.to_string());
            }
        }
        let takes_all = self.kinds.iter().filter(|(_, answer)| answer.is_ok()).count() == accepted;
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
    /// It is none of [`Answers::convolutions`].
    pub fn plan(&self, convolution: &gpu::Convolution<Span>) -> Result<Planned, Error> {
        let gpu::Convolution { kind, images, filters, results, workspace } = convolution;
        let found = self.kinds.iter().find(|(known, _)| known == kind).and_then(|(_, answer)| answer.as_ref().ok());
        let both = self.cudnn.as_ref().ok().zip(found);
        let ((_, cudnn), accepted) = both.expect("invariant: works are planned for what cuDNN has accepted");
        Planned::new(
            cudnn,
            &kind.described(arithmetic(self.matmul)),
            accepted,
            [*images, *filters, *results],
            *workspace,
        )
    }

    /// Says which convolutions go which way, and why.
    pub fn tell(&self) {
        match &self.cudnn {
            Err(reason) if !reason.is_empty() => eprintln!("note: convolutions are products of patches: {reason}"),
            Ok((_, cudnn)) => {
                let version = version::library(i64::try_from(cudnn.version()).unwrap_or(i64::MAX));
                let (all, accepted) =
                    (self.kinds.len(), self.kinds.iter().filter(|(_, answer)| answer.is_ok()).count());
                eprintln!("note: cuDNN {version} accepts {accepted} of {all} kinds of convolutions");
                for (ConvolutionKind { shape, direction, adds, .. }, answer) in &self.kinds {
                    let Err(reason) = answer else { continue };
                    let what = match (direction, adds) {
                        (Direction::Forward, _) => "forward",
                        (Direction::Filters, _) => "gradient of the weights",
                        (Direction::Images, false) => "gradient of the input",
                        (Direction::Images, true) => "gradient of the input, added",
                    };
                    let form = Form::Convolution(*shape);
                    eprintln!("note: products of patches: {form}: {what}: {reason}");
                }
            }
            Err(_) => {}
        }
    }
}

/// The plans of earlier runs, by kind.
fn kept(key: &str) -> BTreeMap<String, Kept> {
    let bytes = Cache::of_environment().get(key);
    bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default()
}
