//! The GPU plan of a network: memory, and forward and backward launches.

use super::format::VECTOR;
use super::launch::{Launch, Span};
use super::layers::{self, Lowering};
use super::refused::Refused;
use super::target::{Computed, Target};
use crate::cpu::Format;
use crate::nn::graph::{Graph, Node, StatisticInfo};
use crate::nn::layers::Loss;
use crate::nn::plan::{Alignment, NetworkPlan};
use crate::nn::program::{Program, Reductions};
use crate::nn::{Form, Layout, Lengths, Needs};
use switchyard_cuda::kernels;

/// Alignment of arena addresses in bytes: as `cuMemAlloc` aligns, and at least what every kernel
/// needs.
const ADDRESS: usize = 256;

/// A network planned for a GPU.
pub struct Plan {
    target: Target,
    format: Format,
    /// Whether the reader normalises images.
    is_normalised: bool,
    statistics: Vec<StatisticInfo>,
    nodes: Vec<Node>,
    /// The lowering input of each node.
    computed: Vec<Computed>,
    plan: NetworkPlan,
}

impl Plan {
    /// Plans the memory and the launches of a graph.
    ///
    /// # Errors
    /// A layer has no form or no kernel, or the graph is not a valid network.
    pub fn new(graph: Graph, target: Target) -> Result<Plan, Refused> {
        let format = graph.format();
        for node in &graph.nodes {
            check(&graph, node)?;
        }
        let needs = |node: &Node| -> Result<Needs, Refused> {
            let needs = layers::needs(&node.layer.form(), &target, format);
            needs.map_err(|reason| reason.of(&node.name, node.layer.kind()))
        };
        // The plan runs backwards over the layers; check forwards first, so that an error names the
        // first layer.
        graph.nodes.iter().try_for_each(|node| needs(node).map(drop))?;
        graph.nodes.iter().try_for_each(|node| check_rows(&graph, node))?;
        let alignment = Alignment { address: ADDRESS, row: VECTOR / format.size() };
        let plan = NetworkPlan::new(&graph, alignment, &needs)?;
        let (mut loss, mut row, mut constant) = (0, 0, 0);
        let computed = graph.nodes.iter().map(|node| {
            let computed = Computed { form: node.layer.form(), loss, row, constant };
            match &computed.form {
                Form::CrossEntropy(of) => (loss, row) = (loss + 1, row + of.rows),
                other => constant += constants(other).len(),
            }
            computed
        });
        let computed = computed.collect();
        let Graph { nodes, statistics, .. } = graph;
        let plan = Plan { target, format, is_normalised: false, statistics, nodes, computed, plan };
        plan.launches(false, |span| span)?;
        plan.evaluation(|span| span)?;
        Ok(plan)
    }

    /// The same plan for images normalised by the reader: they arrive as
    /// [`Memory::Values`](super::Memory::Values) instead of
    /// [`Memory::Pixels`](super::Memory::Pixels).
    pub fn with_normalised_images(self) -> Plan {
        Plan { is_normalised: true, ..self }
    }

    /// See [`Computation::without_epilogues`](super::Computation::without_epilogues).
    pub(super) fn without_epilogues(self) -> Plan {
        Plan { target: Target { epilogues: false, ..self.target }, ..self }
    }

    pub fn layout(&self) -> &Layout {
        &self.plan.layout
    }

    pub(super) fn format(&self) -> Format {
        self.format
    }

    /// Bytes of [`Memory::Arena`](super::Memory::Arena).
    pub fn arena_bytes(&self) -> usize {
        self.plan.bytes
    }

    /// Names and lengths of the running statistics, as for CPU networks.
    pub fn statistics(&self) -> impl Iterator<Item = (&str, usize)> {
        self.statistics.iter().map(|statistic| (statistic.name.as_str(), statistic.len))
    }

    /// Initial values of the running statistics.
    pub fn initial_statistics(&self) -> Vec<f32> {
        self.statistics.iter().flat_map(|statistic| std::iter::repeat_n(statistic.initial, statistic.len)).collect()
    }

    /// A layer's form.
    pub(super) fn form(&self, layer: &str) -> Option<&Form> {
        let at = self.nodes.iter().position(|node| node.name == layer)?;
        self.computed.get(at).map(|computed| &computed.form)
    }

    /// Rows of the token table; 0 without one.
    pub(super) fn vocabulary(&self) -> u32 {
        let of = |computed: &Computed| match &computed.form {
            Form::Embedding(tables) => u32::try_from(tables.vocabulary).ok(),
            _ => None,
        };
        self.computed.iter().filter_map(of).max().unwrap_or(0)
    }

    /// Number of linear layers, and how many of them are computed in FP8.
    pub fn linear_layers(&self) -> [usize; 2] {
        let in_fp8 = |computed: &Computed| layers::in_fp8(&computed.form, &self.target, self.format);
        let known: Vec<bool> = self.computed.iter().filter_map(in_fp8).collect();
        [known.len(), known.into_iter().filter(|is| *is).count()]
    }

    /// In the order of [`Memory::Factors`](super::Memory::Factors).
    pub fn losses(&self) -> Vec<Loss> {
        let loss = |computed: &Computed| match &computed.form {
            Form::CrossEntropy(loss) => Some(*loss),
            _ => None,
        };
        self.computed.iter().filter_map(loss).collect()
    }

    /// The contents of [`Memory::Constants`](super::Memory::Constants).
    pub fn constants(&self) -> Vec<u32> {
        self.computed.iter().flat_map(|computed| constants(&computed.form)).collect()
    }

    /// The program of one training step, as on CPUs: its checks also hold for the launches.
    pub fn program(&self, reductions: &Reductions<'_>) -> Program {
        Program::record(&self.nodes, &self.plan, reductions)
    }

    /// Forward and backward launches of a micro-batch, in order. `adds`: whether to add to the
    /// gradients of earlier micro-batches. `place` maps spans to device memory.
    ///
    /// # Errors
    /// A kernel rejects the sizes, or the memory returned by `place`.
    pub fn launches<M: kernels::Memory>(
        &self,
        adds: bool,
        place: impl Fn(Span) -> M,
    ) -> Result<Vec<Launch<M>>, Refused> {
        let mut lowering = self.lowering(&place, adds, false);
        let mut launches = self.lower(&mut lowering, false)?;
        launches.extend(self.lower(&mut lowering, true)?);
        Ok(launches)
    }

    /// Launches that compute the losses and correct predictions of a batch with the running
    /// statistics, in order. They compute no gradients, and write nothing outside the arena except
    /// [`Memory::Losses`](super::Memory::Losses), [`Memory::Correct`](super::Memory::Correct) and
    /// workspaces.
    ///
    /// # Errors
    /// See [`Plan::launches`].
    pub fn evaluation<M: kernels::Memory>(&self, place: impl Fn(Span) -> M) -> Result<Vec<Launch<M>>, Refused> {
        self.lower(&mut self.lowering(&place, false, true), false)
    }

    fn lowering<'a, M>(&'a self, place: &'a dyn Fn(Span) -> M, adds: bool, evaluates: bool) -> Lowering<'a, M> {
        Lowering {
            target: &self.target,
            format: self.format,
            layout: &self.plan.layout,
            place,
            adds,
            evaluates,
            is_normalised: self.is_normalised,
            works: Vec::new(),
        }
    }

    fn lower<M: kernels::Memory>(
        &self,
        lowering: &mut Lowering<'_, M>,
        backward: bool,
    ) -> Result<Vec<Launch<M>>, Refused> {
        let mut parts: Vec<_> = self.nodes.iter().zip(&self.computed).zip(&self.plan.nodes).collect();
        if backward {
            parts.reverse();
            parts.retain(|(_, regions)| regions.backward);
        }
        let mut launches = Vec::new();
        for ((node, computed), regions) in parts {
            let lowered = match backward {
                true => lowering.backward(computed, regions),
                false => lowering.forward(computed, regions),
            };
            lowered.map_err(|reason| reason.of(&node.name, node.layer.kind()))?;
            let works = std::mem::take(&mut lowering.works);
            launches.extend(works.into_iter().map(|work| Launch { layer: node.name.clone(), backward, work }));
        }
        Ok(launches)
    }
}

fn constants(form: &Form) -> Vec<u32> {
    match form {
        Form::Rows(selected) => selected.fixed.clone(),
        Form::Pixels(pixels) => layers::input::constants(pixels),
        _ => Vec::new(),
    }
}

/// Checks that a layer's form matches its tensors and parameters.
fn check(graph: &Graph, node: &Node) -> Result<(), Refused> {
    let (layer, kind, form) = (node.name.clone(), node.layer.kind(), node.layer.form());
    let Some(lengths) = form.lengths() else { return Err(Refused::Own { layer, kind }) };
    let planned = Lengths {
        inputs: node.inputs.iter().map(|&tensor| graph.tensors[tensor].len()).collect(),
        parameters: node
            .parameters
            .iter()
            .map(|&parameter| graph.parameters[parameter].shape.iter().product())
            .collect(),
        output: node.output.map_or(0, |tensor| graph.tensors[tensor].len()),
    };
    if lengths != planned {
        return Err(Refused::Form { layer, kind, form: form.to_string() });
    }
    Ok(())
}

/// Checks that a form's row widths match its tensors, so that both agree on row padding.
fn check_rows(graph: &Graph, node: &Node) -> Result<(), Refused> {
    let form = node.layer.form();
    let (inputs, output) = layers::widths(&form);
    let has = |tensor: usize, width: usize| graph.tensors[tensor].shape.last() == Some(&width);
    let agree = node.inputs.iter().zip(inputs).all(|(&tensor, width)| has(tensor, width));
    match agree && node.output.is_none_or(|tensor| has(tensor, output)) {
        true => Ok(()),
        false => Err(Refused::Form { layer: node.name.clone(), kind: node.layer.kind(), form: form.to_string() }),
    }
}
