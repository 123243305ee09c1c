//! Plans a graph: parameter order, and the memory each layer reads and writes.
//!
//! ```text
//! time      0 .. n-1 forward, n .. 2n-1 backward (layer i at 2n-1-i)
//! tensors   from the layer that computes them to the last one that reads them
//! gradients from the first writer (the tensor's last reader) to the tensor's producer
//! ```
//!
//! A gradient that a layer transforms in place shares the memory of the original.

use super::arena::{Region, disjoint};
use super::error::ModelError;
use super::graph::{Graph, Node, TensorInfo};
use super::layer::{Flow, INPUTS, Needs};
use super::layout::Layout;
use super::memory::{self, Span};
use crate::cpu::Format;

/// How a node delivers the gradient of an input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    None,
    Write,
    Add,
    /// Computed in the memory of the output's gradient.
    InPlace,
    OverInput,
}

/// A gradient that a layer cannot write to its destination directly, and that is moved there
/// afterwards.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pass<P> {
    /// Index of the input.
    pub input: usize,
    pub from: P,
    pub to: P,
    /// Add instead of copy.
    pub add: bool,
}

pub(crate) struct NodePlan {
    pub inputs: [Region; INPUTS],
    /// The `inputs` that backward reads; the others are empty.
    pub backward_inputs: [Region; INPUTS],
    pub output: Region,
    pub backward_output: Region,
    pub saved: Region,
    pub kept: Region,
    pub scratch: Region,
    pub backward_scratch: Region,
    pub d_output: Region,
    pub d_inputs: [Region; INPUTS],
    pub modes: [Mode; INPUTS],
    pub passes: Vec<Pass<Region>>,
    /// Whether there is a backward pass.
    pub backward: bool,
    /// The layer's parameters in order, by ordinal.
    pub ordinals: Vec<usize>,
    /// For each parameter, whether a later layer has already written its gradient.
    pub written: Vec<bool>,
    /// Ordinals of the parameters that are final after this node, ascending.
    pub finished: Vec<usize>,
    /// Range of its statistics.
    pub statistics: std::ops::Range<usize>,
}

/// Memory alignment that a device requires.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Alignment {
    /// Address alignment in bytes.
    pub address: usize,
    /// Row-pitch alignment in elements; 1 for contiguous rows.
    pub row: usize,
}

pub(crate) struct NetworkPlan {
    pub layout: Layout,
    pub nodes: Vec<NodePlan>,
    pub bytes: usize,
    /// Arena size if every element were f32.
    pub bytes_f32: usize,
}

/// Buffers before they are placed, by index.
#[derive(Default)]
struct Buffers {
    sizes: Vec<(usize, Format)>,
    times: Vec<(usize, usize)>,
}

impl Buffers {
    fn new_at(&mut self, len: usize, format: Format, time: usize) -> usize {
        self.sizes.push((len, format));
        self.times.push((time, time));
        self.sizes.len() - 1
    }

    fn reach(&mut self, buffer: usize, time: usize) {
        let (from, to) = &mut self.times[buffer];
        (*from, *to) = ((*from).min(time), (*to).max(time));
    }

    fn place(&self, alignment: usize, f32_only: bool) -> Option<(Vec<Region>, usize)> {
        let format = |format| if f32_only { Format::F32 } else { format };
        let spans: Option<Vec<Span>> = self
            .sizes
            .iter()
            .zip(&self.times)
            .map(|(&(len, own), &(from, to))| Some(Span { bytes: len.checked_mul(format(own).size())?, from, to }))
            .collect();
        let (offsets, bytes) = memory::place(&spans?, alignment)?;
        let regions = offsets.iter().zip(&self.sizes);
        Some((regions.map(|(&offset, &(len, own))| Region { offset, len, format: format(own) }).collect(), bytes))
    }
}

/// Parameters in the order in which backward completes them: the reverse of the first layer that
/// uses them; within a layer, in the layer's order.
fn lay_out_parameters(graph: &Graph) -> Result<(Layout, Vec<usize>), ModelError> {
    let mut first = vec![usize::MAX; graph.parameters.len()];
    for (index, node) in graph.nodes.iter().enumerate().rev() {
        node.parameters.iter().for_each(|&parameter| first[parameter] = index);
    }
    if let Some(unused) = graph.parameters.iter().find(|parameter| !parameter.used) {
        return Err(ModelError::UnusedParameter { parameter: unused.name.clone() });
    }
    let mut layout = Layout::default();
    let mut ordinals = vec![0; graph.parameters.len()];
    for (index, node) in graph.nodes.iter().enumerate().rev() {
        for &parameter in &node.parameters {
            if first[parameter] == index {
                let info = &graph.parameters[parameter];
                ordinals[parameter] = layout.push(info.name.clone(), &info.shape, info.role, info.initial);
                let slot = &mut layout.parameters[ordinals[parameter]];
                slot.export_axes = info.export_axes.clone();
                slot.export_names = info.export_names.clone();
            }
        }
    }
    let mut names: Vec<&str> = layout.parameters.iter().map(|parameter| parameter.name.as_str()).collect();
    names.sort_unstable();
    if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(ModelError::DuplicateParameter { parameter: pair[0].to_owned() });
    }
    Ok((layout, ordinals))
}

impl Graph {
    /// The layout of the parameters.
    ///
    /// # Errors
    /// A parameter is unused, or two have the same name.
    pub fn layout(&self) -> Result<Layout, ModelError> {
        Ok(lay_out_parameters(self)?.0)
    }
}

/// A node before buffers are placed; buffers are given by index.
struct Draft {
    needs: Needs,
    saved: usize,
    kept: usize,
    scratch: usize,
    backward_scratch: usize,
    d_output: Option<usize>,
    d_inputs: [Option<usize>; INPUTS],
    modes: [Mode; INPUTS],
    passes: Vec<Pass<usize>>,
    backward: bool,
}

impl NetworkPlan {
    /// Plans a graph for a device with the given alignment; `needs` returns a layer's memory needs
    /// on that device.
    ///
    /// # Errors
    /// The errors of `needs`, or the graph is not a valid network.
    pub fn new<E: From<ModelError>>(
        graph: &Graph,
        alignment: Alignment,
        needs: &dyn Fn(&Node) -> Result<Needs, E>,
    ) -> Result<NetworkPlan, E> {
        let (layout, ordinals) = lay_out_parameters(graph)?;
        let n = graph.nodes.len();
        let mut buffers = Buffers::default();
        // A tensor is alive from its producer to its last reader in forward.
        let value =
            |tensor: &TensorInfo| buffers.new_at(tensor.pitched_len(alignment.row), graph.format(), tensor.producer);
        let values: Vec<usize> = graph.tensors.iter().map(value).collect();
        let mut readers = vec![0usize; graph.tensors.len()];
        for (i, node) in graph.nodes.iter().enumerate() {
            for &input in &node.inputs {
                buffers.reach(values[input], i);
                readers[input] += 1;
            }
        }
        let mut gradients: Vec<Option<usize>> = vec![None; graph.tensors.len()];
        let mut drafts: Vec<Draft> = Vec::with_capacity(n);
        for (i, node) in graph.nodes.iter().enumerate().rev() {
            drafts.push(draft(graph, needs(node)?, &mut buffers, &values, &readers, &mut gradients, i, node)?);
        }
        drafts.reverse();
        let (regions, bytes) = buffers.place(alignment.address, false).ok_or(ModelError::TooLarge)?;
        let bytes_f32 = if graph.format() == Format::F32 {
            bytes
        } else {
            buffers.place(alignment.address, true).ok_or(ModelError::TooLarge)?.1
        };
        let mut written = vec![false; layout.parameters.len()];
        let statistics = statistics_ranges(graph);
        let mut nodes: Vec<NodePlan> = Vec::with_capacity(n);
        for (node, (draft, statistics)) in graph.nodes.iter().zip(drafts.iter().zip(statistics)).rev() {
            nodes.push(node_plan(node, draft, &values, &regions, &ordinals, &mut written, statistics));
        }
        nodes.reverse();
        // A parameter is final after the first node that uses it.
        let mut seen = vec![false; layout.parameters.len()];
        for node in &mut nodes {
            let mut fresh = node.ordinals.clone();
            fresh.retain(|&ordinal| !std::mem::replace(&mut seen[ordinal], true));
            fresh.sort_unstable();
            node.finished = fresh;
        }
        let plan = NetworkPlan { layout, nodes, bytes, bytes_f32 };
        plan.check();
        Ok(plan)
    }

    /// Asserts the invariants that the arena's unsafe code relies on.
    fn check(&self) {
        for node in &self.nodes {
            let forward = [node.output, node.saved, node.kept, node.scratch];
            assert!(disjoint(self.bytes, &node.inputs, &forward), "invariant: regions of forward are apart");
            let mut written = vec![node.d_output, node.saved, node.kept, node.backward_scratch];
            for (region, mode) in node.d_inputs.iter().zip(node.modes) {
                if !matches!(mode, Mode::None | Mode::InPlace) {
                    written.push(*region);
                }
            }
            for pass in &node.passes {
                assert!(disjoint(self.bytes, &[pass.from], &[pass.to]), "invariant: a pass goes elsewhere");
                // The sum being added to must survive the layer.
                let own: Vec<Region> = written.iter().filter(|region| **region != pass.to).copied().collect();
                assert!(disjoint(self.bytes, &own, &[pass.to]), "invariant: the layer leaves the sum alone");
            }
            let mut read = node.backward_inputs.to_vec();
            read.push(node.backward_output);
            assert!(disjoint(self.bytes, &read, &written), "invariant: regions of backward are apart");
        }
    }
}

#[allow(clippy::too_many_arguments)]
fn draft(
    graph: &Graph,
    needs: Needs,
    buffers: &mut Buffers,
    values: &[usize],
    readers: &[usize],
    gradients: &mut [Option<usize>],
    i: usize,
    node: &Node,
) -> Result<Draft, ModelError> {
    let (forward, backward) = (i, 2 * graph.nodes.len() - 1 - i);
    let d_output = node.output.and_then(|output| gradients[output]);
    let mut tensors = node.output.iter().chain(&node.inputs);
    let differentiable = tensors.any(|&t| graph.tensors[t].differentiable);
    if let (Some(_), None, true) = (node.output, d_output, differentiable) {
        return Err(ModelError::UnusedOutput { layer: node.name.clone() });
    }
    if needs.output && differentiable && node.output.is_some_and(|output| d_output == Some(values[output])) {
        return Err(ModelError::Overwritten { layer: node.name.clone() });
    }
    let saved = buffers.new_at(needs.saved, Format::F32, forward);
    let kept = buffers.new_at(needs.kept, graph.format(), forward);
    let mut modes = [Mode::None; INPUTS];
    let mut d_inputs = [None; INPUTS];
    let mut passes = Vec::new();
    if differentiable {
        buffers.reach(saved, backward);
        buffers.reach(kept, backward);
        d_output.into_iter().for_each(|buffer| buffers.reach(buffer, backward));
        if let Some(output) = node.output.filter(|_| needs.output) {
            buffers.reach(values[output], backward);
        }
        let lens: Vec<usize> = buffers.sizes.iter().map(|(len, _)| *len).collect();
        let same_len = |buffer: Option<usize>, len: usize| buffer.is_some_and(|buffer| lens[buffer] == len);
        let mut taken = false;
        for (k, &input) in node.inputs.iter().enumerate() {
            if needs.inputs[k] {
                buffers.reach(values[input], backward);
            }
            if !graph.tensors[input].differentiable && !needs.always[k] {
                continue;
            }
            let len = lens[values[input]];
            let mut fresh = || buffers.new_at(len, graph.format(), backward);
            let in_place = needs.flow[k] == Flow::InPlace && same_len(d_output, len);
            let mut passed = |from: usize, to: usize, add: bool| {
                passes.push(Pass { input: k, from, to, add });
                Some(to)
            };
            // A layer adds to the gradients of other layers, not to its own for the same tensor.
            let own_sum = |sum: usize| d_inputs.contains(&Some(sum)) || d_output == Some(sum);
            let gradient;
            (modes[k], d_inputs[k], gradient) = match (gradients[input], needs.flow[k], d_output) {
                (Some(sum), Flow::Accumulate, _) if !own_sum(sum) => (Mode::Add, Some(sum), Some(sum)),
                (Some(sum), Flow::InPlace, Some(d)) if in_place => (Mode::InPlace, None, passed(d, sum, true)),
                (Some(sum), Flow::Write | Flow::Accumulate, _) => {
                    let own = fresh();
                    (Mode::Write, Some(own), passed(own, sum, true))
                }
                (None, Flow::InPlace, Some(d)) if in_place && !taken => {
                    taken = true;
                    (Mode::InPlace, None, Some(d))
                }
                (None, Flow::InPlace, Some(d)) if in_place => (Mode::InPlace, None, passed(d, fresh(), false)),
                (None, Flow::OverInput, _) if readers[input] == 1 => {
                    (Mode::OverInput, Some(values[input]), Some(values[input]))
                }
                (None, Flow::Write | Flow::Accumulate, _) => {
                    let own = fresh();
                    (Mode::Write, Some(own), Some(own))
                }
                _ => return Err(ModelError::Shared { layer: node.name.clone() }),
            };
            gradients[input] = gradient;
            gradient.into_iter().chain(d_inputs[k]).for_each(|buffer| buffers.reach(buffer, backward));
        }
    }
    Ok(Draft {
        saved,
        kept,
        scratch: buffers.new_at(needs.scratch, Format::F32, forward),
        backward_scratch: buffers.new_at(
            if differentiable { needs.backward_scratch } else { 0 },
            Format::F32,
            backward,
        ),
        needs,
        d_output,
        d_inputs,
        modes,
        passes,
        backward: differentiable,
    })
}

fn node_plan(
    node: &Node,
    draft: &Draft,
    values: &[usize],
    regions: &[Region],
    ordinals: &[usize],
    written: &mut [bool],
    statistics: std::ops::Range<usize>,
) -> NodePlan {
    let mut inputs = [Region::EMPTY; INPUTS];
    let mut backward_inputs = inputs;
    let mut d_inputs = inputs;
    for (k, &input) in node.inputs.iter().enumerate() {
        inputs[k] = regions[values[input]];
        if draft.backward && draft.needs.inputs[k] && draft.modes[k] != Mode::OverInput {
            backward_inputs[k] = inputs[k];
        }
        d_inputs[k] = draft.d_inputs[k].map_or(Region::EMPTY, |buffer| regions[buffer]);
    }
    let output = node.output.map_or(Region::EMPTY, |output| regions[values[output]]);
    let own: Vec<usize> = node.parameters.iter().map(|&parameter| ordinals[parameter]).collect();
    let before = own.iter().map(|&ordinal| std::mem::replace(&mut written[ordinal], true)).collect();
    NodePlan {
        inputs,
        backward_inputs,
        output,
        backward_output: if draft.backward && draft.needs.output { output } else { Region::EMPTY },
        saved: regions[draft.saved],
        kept: regions[draft.kept],
        scratch: regions[draft.scratch],
        backward_scratch: regions[draft.backward_scratch],
        d_output: draft.d_output.map_or(Region::EMPTY, |buffer| regions[buffer]),
        d_inputs,
        modes: draft.modes,
        passes: draft
            .passes
            .iter()
            .map(|pass| Pass { input: pass.input, from: regions[pass.from], to: regions[pass.to], add: pass.add })
            .collect(),
        backward: draft.backward,
        ordinals: own,
        written: before,
        finished: Vec::new(),
        statistics,
    }
}

/// Range of each node's statistics in one array.
fn statistics_ranges(graph: &Graph) -> Vec<std::ops::Range<usize>> {
    let mut at = 0;
    let len = |node: &Node| -> usize { node.statistics.iter().map(|&index| graph.statistics[index].len).sum() };
    graph
        .nodes
        .iter()
        .map(|node| {
            let start = at;
            at += len(node);
            start..at
        })
        .collect()
}
