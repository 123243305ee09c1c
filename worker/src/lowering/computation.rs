//! Everything a GPU stores and runs in a training, as data.

use super::contents::{Contents, Initial};
use super::cost::{self, Costed};
use super::input::Inputs;
use super::launch::{Launch, Memory, Span, Work};
use super::plan::Plan;
use super::predict::predict;
use super::refused::Refused;
use super::target::Target;
use super::update::Update;
use crate::nn::{Bucket, Graph, Layout};
use switchyard_cuda::kernels;
use switchyard_worker_contract::config::{self, Precision, SampleType};
use switchyard_worker_contract::prediction::{Gpu, Operation};

/// Forward and backward ops of a micro-batch, in order.
#[derive(Debug, Clone)]
pub struct Pass<M> {
    pub forward: Vec<Work<M>>,
    /// Includes the mean loss.
    pub backward: Vec<Work<M>>,
}

/// All ops of a training.
#[derive(Debug, Clone)]
pub struct Works<M> {
    /// First micro-batch of a step.
    pub first: Pass<M>,
    /// Later micro-batches, which add their gradients and loss.
    pub later: Pass<M>,
    /// Runs after the last micro-batch, once gradients and loss are reduced over all ranks.
    pub update: Vec<Work<M>>,
    /// Rounds the weights to 16 bits after the host has written them.
    pub round: Option<Work<M>>,
    /// Losses and correct predictions of a batch.
    pub evaluation: Vec<Work<M>>,
}

/// Costs of a step's ops, each list in the order of its [`Works`].
#[derive(Debug, Clone)]
pub struct Costs {
    /// Forward and backward of the first micro-batch.
    pub first: Vec<Costed>,
    /// Forward and backward of a later micro-batch.
    pub later: Vec<Costed>,
    pub update: Vec<Costed>,
}

/// A network, its update, and the inputs of each batch.
pub struct Computation {
    plan: Plan,
    update: Update,
    inputs: Inputs,
    /// All memory except the inputs.
    contents: Vec<Contents>,
}

impl Computation {
    /// `samples`: the element type of images from the reader.
    ///
    /// # Errors
    /// The network or its update is not supported on GPUs.
    pub fn new(
        graph: Graph,
        optimizer: &config::Optimizer,
        precision: Precision,
        samples: SampleType,
        target: Target,
    ) -> Result<Computation, Refused> {
        let plan = match samples {
            SampleType::UInt8 => Plan::new(graph, target.clone())?,
            SampleType::Float32 => Plan::new(graph, target.clone())?.with_normalised_images(),
        };
        let update = Update::new(plan.layout(), optimizer, precision, target)?;
        let used = used(&works(&plan, &update, &|span| span)?);
        let inputs = Inputs::new(&used, plan.losses(), plan.vocabulary());
        let contents = contents(&plan, &update, &inputs, &used);
        Ok(Computation { plan, update, inputs, contents })
    }

    pub fn layout(&self) -> &Layout {
        self.plan.layout()
    }

    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    pub fn update(&self) -> &Update {
        &self.update
    }

    pub fn inputs(&self) -> &Inputs {
        &self.inputs
    }

    /// All memory except the inputs.
    pub fn contents(&self) -> &[Contents] {
        &self.contents
    }

    /// The same computation in the same memory, but with our own kernels instead of cuBLASLt
    /// epilogues.
    pub fn without_epilogues(self) -> Computation {
        Computation { plan: self.plan.without_epilogues(), ..self }
    }

    /// For each gradient bucket, the number of backward ops after which it and all earlier buckets
    /// are final; for the first micro-batch of a step, and for later ones.
    ///
    /// # Errors
    /// None for a computation returned by [`Computation::new`].
    pub fn complete(&self, buckets: &[Bucket]) -> Result<[Vec<usize>; 2], Refused> {
        let Works { first, later, .. } = self.works(|span| span)?;
        Ok([first, later].map(|pass| complete(&pass, buckets)))
    }

    /// Lower bounds of the time of a step with `micro_batches` micro-batches, by operation, slowest
    /// first.
    ///
    /// # Errors
    /// None for a computation returned by [`Computation::new`].
    pub fn predict(&self, micro_batches: u32, gpu: &Gpu) -> Result<Vec<Operation>, Refused> {
        predict(&self.plan, &self.update, micro_batches, gpu)
    }

    /// Memory traffic and arithmetic of each op of a step.
    ///
    /// # Errors
    /// None for a computation returned by [`Computation::new`].
    pub fn costs(&self) -> Result<Costs, Refused> {
        let pass = |adds: bool| cost::pass_costs(&self.plan, &self.update, adds);
        Ok(Costs { first: pass(false)?, later: pass(true)?, update: cost::update_costs(&self.update)? })
    }

    /// For each cost of a micro-batch (`adds`: a later one that adds to its predecessors), the name
    /// of its layer, or an empty string.
    ///
    /// # Errors
    /// None for a computation returned by [`Computation::new`].
    pub fn layers(&self, adds: bool) -> Result<Vec<String>, Refused> {
        cost::layers(&self.plan, &self.update, adds)
    }

    /// All ops. `place` maps spans to device memory.
    ///
    /// # Errors
    /// A kernel rejects the memory returned by `place`.
    pub fn works<M: kernels::Memory>(&self, place: impl Fn(Span) -> M) -> Result<Works<M>, Refused> {
        works(&self.plan, &self.update, &place)
    }
}

fn works<M: kernels::Memory>(plan: &Plan, update: &Update, place: &dyn Fn(Span) -> M) -> Result<Works<M>, Refused> {
    let losses = plan.losses();
    let pass = |adds: bool| -> Result<Pass<M>, Refused> {
        let (backward, forward): (Vec<Launch<M>>, Vec<Launch<M>>) =
            plan.launches(adds, place)?.into_iter().partition(|launch| launch.backward);
        let mut backward = only_works(backward);
        backward.extend(update.losses(&losses, adds, place)?.into_iter().map(Work::Kernel));
        Ok(Pass { forward: only_works(forward), backward })
    };
    Ok(Works {
        first: pass(false)?,
        later: pass(true)?,
        update: update.launches(place)?.into_iter().map(Work::Kernel).collect(),
        round: update.round(place)?.map(Work::Kernel),
        evaluation: only_works(plan.evaluation(place)?),
    })
}

fn only_works<M>(launches: Vec<Launch<M>>) -> Vec<Work<M>> {
    launches.into_iter().map(|launch| launch.work).collect()
}

impl<M> Works<M> {
    /// All ops.
    pub fn all(&self) -> impl Iterator<Item = &Work<M>> {
        let Works { first, later, update, round, evaluation } = self;
        let passes = [first, later].into_iter().flat_map(|pass| pass.forward.iter().chain(&pass.backward));
        passes.chain(update).chain(round).chain(evaluation)
    }
}

/// The memories that ops use, with the bytes used.
fn used(works: &Works<Span>) -> Vec<(Memory, usize)> {
    let mut used: Vec<(Memory, usize)> = Vec::new();
    for work in works.all() {
        for span in work.reads().into_iter().chain(work.writes()) {
            let end = span.at + span.bytes;
            match used.iter_mut().find(|(memory, _)| *memory == span.memory) {
                Some((_, bytes)) => *bytes = end.max(*bytes),
                None => used.push((span.memory, end)),
            }
        }
    }
    used
}

/// The memory of the update, and all other memory that is used.
fn contents(plan: &Plan, update: &Update, inputs: &Inputs, used: &[(Memory, usize)]) -> Vec<Contents> {
    let mut all = update.memory();
    for &(memory, bytes) in used {
        let is_input = inputs.place(Span { memory, at: 0, bytes: 0 }).is_some();
        if is_input || all.iter().any(|contents| contents.memory == memory) {
            continue;
        }
        let initial = match memory {
            Memory::Constants => Initial::Bytes(bytemuck::cast_slice(&plan.constants()).to_vec()),
            Memory::Statistics => Initial::Bytes(bytemuck::cast_slice(&plan.initial_statistics()).to_vec()),
            _ => Initial::Unwritten,
        };
        all.push(Contents { memory, bytes, initial });
    }
    all
}

fn complete(pass: &Pass<Span>, buckets: &[Bucket]) -> Vec<usize> {
    let writes = |work: &Work<Span>, bucket: &Bucket| {
        let own = 4 * bucket.range.start..4 * bucket.range.end;
        let touches = |span: Span| span.at < own.end && own.start < span.at + span.bytes;
        work.writes().into_iter().any(|span| span.memory == Memory::Gradients && touches(span))
    };
    let last = |bucket: &Bucket| pass.backward.iter().rposition(|work| writes(work, bucket)).map_or(0, |at| at + 1);
    let mut most = 0;
    let reached = |bucket: &Bucket| {
        most = last(bucket).max(most);
        most
    };
    buckets.iter().map(reached).collect()
}
