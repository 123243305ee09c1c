//! All that a GPU holds and runs in a training, as data.

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

/// Forward and backward of a micro-batch, in order.
#[derive(Debug, Clone)]
pub struct Pass<M> {
    pub forward: Vec<Work<M>>,
    /// With the mean loss.
    pub backward: Vec<Work<M>>,
}

/// Everything that is run.
#[derive(Debug, Clone)]
pub struct Works<M> {
    /// The first micro-batch of a step.
    pub first: Pass<M>,
    /// Another, whose gradients and loss are added.
    pub later: Pass<M>,
    /// What follows the last micro-batch, once gradients and loss are those of all ranks.
    pub update: Vec<Work<M>>,
    /// Copies the weights into 16 bits, after the host has written them.
    pub round: Option<Work<M>>,
    /// Losses and right predictions of a batch.
    pub evaluation: Vec<Work<M>>,
}

/// What the works of a step move and compute, each list in the order of its [`Works`].
#[derive(Debug, Clone)]
pub struct Costs {
    /// Forward and backward.
    pub first: Vec<Costed>,
    /// The same.
    pub later: Vec<Costed>,
    pub update: Vec<Costed>,
}

/// A network, its update, and what comes with a batch.
pub struct Computation {
    plan: Plan,
    update: Update,
    inputs: Inputs,
    /// All memory but that of the inputs.
    contents: Vec<Contents>,
}

impl Computation {
    /// `samples`: how images come.
    ///
    /// # Errors
    /// The network, or its update, cannot be computed on a GPU.
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

    /// All memory but that of the inputs.
    pub fn contents(&self) -> &[Contents] {
        &self.contents
    }

    /// The same in the same memory, with kernels of ours for what cuBLASLt does after products.
    pub fn without_epilogues(self) -> Computation {
        Computation { plan: self.plan.without_epilogues(), ..self }
    }

    /// For each bucket of gradients how many backward works of a micro-batch complete it and all before it; for the first micro-batch of a
    /// step, and for another.
    ///
    /// # Errors
    /// None for a computation that [`Computation::new`] has returned.
    pub fn complete(&self, buckets: &[Bucket]) -> Result<[Vec<usize>; 2], Refused> {
        let Works { first, later, .. } = self.works(|span| span)?;
        Ok([first, later].map(|pass| complete(&pass, buckets)))
    }

    /// How long a step of so many micro-batches takes at least, by operation, the slowest first.
    ///
    /// # Errors
    /// None for a computation that [`Computation::new`] has returned.
    pub fn predict(&self, micro_batches: u32, gpu: &Gpu) -> Result<Vec<Operation>, Refused> {
        predict(&self.plan, &self.update, micro_batches, gpu)
    }

    /// What each work of a step moves and computes.
    ///
    /// # Errors
    /// None for a computation that [`Computation::new`] has returned.
    pub fn costs(&self) -> Result<Costs, Refused> {
        let pass = |adds: bool| cost::of_pass(&self.plan, &self.update, adds);
        Ok(Costs { first: pass(false)?, later: pass(true)?, update: cost::of_update(&self.update)? })
    }

    /// For each cost of a micro-batch, the first of a step or another that adds to it, the name of its layer, or an empty one.
    ///
    /// # Errors
    /// None for a computation that [`Computation::new`] has returned.
    pub fn layers(&self, adds: bool) -> Result<Vec<String>, Refused> {
        cost::layers(&self.plan, &self.update, adds)
    }

    /// What is run. `place` says which memory of the device a span is.
    ///
    /// # Errors
    /// A kernel does not take the memory that `place` gives.
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
    /// All of them.
    pub fn all(&self) -> impl Iterator<Item = &Work<M>> {
        let Works { first, later, update, round, evaluation } = self;
        let passes = [first, later].into_iter().flat_map(|pass| pass.forward.iter().chain(&pass.backward));
        passes.chain(update).chain(round).chain(evaluation)
    }
}

/// Every memory that works use, and how many bytes of it.
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

/// The memory of the update, and what else is used.
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
