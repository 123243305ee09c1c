//! Plans a graph: parameter order, and the memory each layer reads and writes.
//!
//! ```text
//! tensors   from the layer that computes them to the last one that reads them
//! gradients from the first writer (the tensor's last reader) to the tensor's producer
//! ```
//!
//! A gradient that a layer transforms in place shares the memory of the original. In a block that
//! is recomputed, tensors are alive twice: in the forward pass, and from the second forward pass to
//! the backward pass.

use super::arena::{Region, disjoint};
use super::error::ModelError;
use super::graph::{Graph, Node, TensorInfo};
use super::layer::{Flow, INPUTS, Needs};
use super::layout::Layout;
use super::memory::{self, Span};
use super::timeline::{Timeline, Visit, is_differentiable};
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

/// The memory of a forward pass of a node.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ForwardRegions {
    pub inputs: [Region; INPUTS],
    pub output: Region,
    pub saved: Region,
    pub kept: Region,
    pub scratch: Region,
}

pub(crate) struct NodePlan {
    /// The first forward pass, if a second one precedes backward.
    first: Option<ForwardRegions>,
    /// These five: of the forward pass that precedes backward.
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

impl NodePlan {
    /// The forward pass that precedes backward.
    pub fn last_forward(&self) -> ForwardRegions {
        let NodePlan { inputs, output, saved, kept, scratch, .. } = *self;
        ForwardRegions { inputs, output, saved, kept, scratch }
    }

    pub fn first_forward(&self) -> ForwardRegions {
        self.first.unwrap_or_else(|| self.last_forward())
    }
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
    /// The backward pass.
    pub visits: Vec<Visit>,
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
    /// `saved`, `kept` and `scratch` of the first forward pass, if there are two.
    first: Option<[usize; 3]>,
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
        let (mut layout, ordinals) = lay_out_parameters(graph)?;
        let needs = graph.nodes.iter().map(needs).collect::<Result<Vec<Needs>, E>>()?;
        let mut drafts = Drafts::new(graph, alignment, &needs);
        let mut drafted: Vec<Draft> = Vec::with_capacity(needs.len());
        for (i, needs) in needs.iter().enumerate().rev() {
            drafted.push(drafts.draft(i, *needs)?);
        }
        drafted.reverse();
        let Drafts { buffers, values, timeline, .. } = drafts;
        let (regions, bytes) = buffers.place(alignment.address, false).ok_or(ModelError::TooLarge)?;
        let bytes_f32 = if graph.format() == Format::F32 {
            bytes
        } else {
            buffers.place(alignment.address, true).ok_or(ModelError::TooLarge)?.1
        };
        let mut written = vec![false; layout.parameters.len()];
        let statistics = statistics_ranges(graph);
        let mut nodes: Vec<NodePlan> = Vec::with_capacity(drafted.len());
        for (i, (draft, statistics)) in drafted.iter().zip(statistics).enumerate().rev() {
            let own: Vec<usize> = graph.nodes[i].parameters.iter().map(|&parameter| ordinals[parameter]).collect();
            let before = own.iter().map(|&ordinal| std::mem::replace(&mut written[ordinal], true)).collect();
            nodes.push(values.node_plan(i, &graph.nodes[i], draft, &timeline, &regions, (own, before, statistics)));
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
        let mut done = 0;
        for node in nodes.iter().rev() {
            let first_writes = node.ordinals.iter().zip(&node.written).filter(|(_, written)| !**written);
            first_writes.for_each(|(&ordinal, _)| layout.parameters[ordinal].written_after = done);
            done += node.finished.len();
        }
        let plan = NetworkPlan { layout, nodes, bytes, bytes_f32, visits: timeline.visits };
        plan.check();
        Ok(plan)
    }

    /// Asserts the invariants that the arena's unsafe code relies on.
    fn check(&self) {
        for node in &self.nodes {
            for ForwardRegions { inputs, output, saved, kept, scratch } in [node.first_forward(), node.last_forward()] {
                let written = [output, saved, kept, scratch];
                assert!(disjoint(self.bytes, &inputs, &written), "invariant: regions of forward are apart");
            }
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

/// The buffers of each tensor's value, by tensor.
struct ValueBuffers {
    first: Vec<usize>,
    /// Of the second forward pass.
    second: Vec<Option<usize>>,
    producers: Vec<usize>,
}

impl ValueBuffers {
    /// The value of a tensor that a node has from its last forward pass on.
    fn last(&self, tensor: usize, node: usize, timeline: &Timeline) -> usize {
        let second = self.second[tensor].filter(|_| timeline.sees_second(node, self.producers[tensor]));
        second.unwrap_or(self.first[tensor])
    }

    /// `ordinals`, `written` and `statistics`: see [`NodePlan`].
    fn node_plan(
        &self,
        i: usize,
        node: &Node,
        draft: &Draft,
        timeline: &Timeline,
        regions: &[Region],
        (ordinals, written, statistics): (Vec<usize>, Vec<bool>, std::ops::Range<usize>),
    ) -> NodePlan {
        let tensors = |buffer: &dyn Fn(usize) -> usize| {
            let mut inputs = [Region::EMPTY; INPUTS];
            node.inputs.iter().zip(&mut inputs).for_each(|(&input, region)| *region = regions[buffer(input)]);
            (inputs, node.output.map_or(Region::EMPTY, |output| regions[buffer(output)]))
        };
        let last = |tensor: usize| self.last(tensor, i, timeline);
        let first = draft.first.map(|buffers| {
            let (inputs, output) = tensors(&|tensor| self.first[tensor]);
            let [saved, kept, scratch] = buffers.map(|buffer| regions[buffer]);
            ForwardRegions { inputs, output, saved, kept, scratch }
        });
        let runs_twice = first.is_some();
        let (inputs, output) = tensors(&|tensor| if runs_twice { last(tensor) } else { self.first[tensor] });
        let mut backward_inputs = [Region::EMPTY; INPUTS];
        let mut d_inputs = [Region::EMPTY; INPUTS];
        for (k, &input) in node.inputs.iter().enumerate() {
            if draft.backward && draft.needs.inputs[k] && draft.modes[k] != Mode::OverInput {
                backward_inputs[k] = regions[last(input)];
            }
            d_inputs[k] = draft.d_inputs[k].map_or(Region::EMPTY, |buffer| regions[buffer]);
        }
        NodePlan {
            first,
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
            ordinals,
            written,
            finished: Vec::new(),
            statistics,
        }
    }
}

/// The buffers of a graph, drafted from the last node to the first.
struct Drafts<'a> {
    graph: &'a Graph,
    timeline: Timeline,
    buffers: Buffers,
    values: ValueBuffers,
    /// Nodes that read each tensor.
    readers: Vec<usize>,
    /// Buffer of each tensor's gradient so far.
    gradients: Vec<Option<usize>>,
}

impl<'a> Drafts<'a> {
    fn new(graph: &'a Graph, alignment: Alignment, needs: &[Needs]) -> Drafts<'a> {
        let timeline = Timeline::new(graph, needs);
        let mut buffers = Buffers::default();
        // A tensor is alive from its producer to its last reader in forward.
        let mut value =
            |tensor: &TensorInfo, time| buffers.new_at(tensor.pitched_len(alignment.row), graph.format(), time);
        let first: Vec<usize> = graph.tensors.iter().map(|tensor| value(tensor, tensor.producer)).collect();
        let second = graph.tensors.iter().map(|tensor| Some(value(tensor, timeline.again(tensor.producer)?))).collect();
        let producers = graph.tensors.iter().map(|tensor| tensor.producer).collect();
        let values = ValueBuffers { first, second, producers };
        let mut readers = vec![0; graph.tensors.len()];
        for (i, node) in graph.nodes.iter().enumerate() {
            for &input in &node.inputs {
                buffers.reach(values.first[input], i);
                if let Some(time) = timeline.again(i) {
                    buffers.reach(values.last(input, i, &timeline), time);
                }
                readers[input] += 1;
            }
        }
        Drafts { graph, timeline, buffers, values, readers, gradients: vec![None; graph.tensors.len()] }
    }

    fn draft(&mut self, i: usize, needs: Needs) -> Result<Draft, ModelError> {
        let Drafts { graph, timeline, buffers, values, readers, gradients } = self;
        let node = &graph.nodes[i];
        let backward = timeline.backward(i);
        let forward = timeline.again(i).unwrap_or(i);
        let d_output = node.output.and_then(|output| gradients[output]);
        let differentiable = is_differentiable(graph, node);
        if let (Some(_), None, true) = (node.output, d_output, differentiable) {
            return Err(ModelError::UnusedOutput { layer: node.name.clone() });
        }
        let last = |tensor: usize| values.last(tensor, i, timeline);
        if needs.output && differentiable && node.output.is_some_and(|output| d_output == Some(last(output))) {
            return Err(ModelError::Overwritten { layer: node.name.clone() });
        }
        let first = timeline.again(i).map(|_| {
            let (saved, kept) =
                (buffers.new_at(needs.saved, Format::F32, i), buffers.new_at(needs.kept, graph.format(), i));
            [saved, kept, buffers.new_at(needs.scratch, Format::F32, i)]
        });
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
                buffers.reach(last(output), backward);
            }
            let lens: Vec<usize> = buffers.sizes.iter().map(|(len, _)| *len).collect();
            let same_len = |buffer: Option<usize>, len: usize| buffer.is_some_and(|buffer| lens[buffer] == len);
            let mut taken = false;
            for (k, &input) in node.inputs.iter().enumerate() {
                let value = last(input);
                if needs.inputs[k] {
                    buffers.reach(value, backward);
                }
                if !graph.tensors[input].differentiable && !needs.always[k] {
                    continue;
                }
                let len = lens[value];
                let mut fresh = || buffers.new_at(len, graph.format(), backward);
                let in_place = needs.flow[k] == Flow::InPlace && same_len(d_output, len);
                let mut passed = |from: usize, to: usize, add: bool| {
                    passes.push(Pass { input: k, from, to, add });
                    Some(to)
                };
                // A layer adds to gradients of other layers, not to its own for the same tensor.
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
                    (None, Flow::OverInput, _) if readers[input] == 1 => (Mode::OverInput, Some(value), Some(value)),
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
        let backward_scratch = if differentiable { needs.backward_scratch } else { 0 };
        Ok(Draft {
            first,
            saved,
            kept,
            scratch: buffers.new_at(needs.scratch, Format::F32, forward),
            backward_scratch: buffers.new_at(backward_scratch, Format::F32, backward),
            needs,
            d_output,
            d_inputs,
            modes,
            passes,
            backward: differentiable,
        })
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
