//! Cuts a network into stages: consecutive layers that run on one rank.
//!
//! A cut is possible where exactly one tensor is computed before it and read after it, and depends
//! on parameters: that tensor travels forward, its gradient back. Residual blocks therefore stay
//! whole. Among the possible cuts, those are chosen with which the most expensive stage costs
//! least.

use super::Form;
use super::graph::{Graph, Node, TensorInfo};
use super::layers::{RECEIVED, SENT, StageEnd};
use std::ops::Range;

/// FLOP in the time in which a CPU core reads or writes an element of a tensor.
const FLOP_PER_ELEMENT: f64 = 16.0;
/// Ratio of both passes to the forward pass: backward computes two gradients.
const BOTH_PASSES: f64 = 3.0;

impl Graph {
    /// The layers of `count` stages, in forward order, by predicted costs; `None` if the network
    /// has too few places to cut.
    pub fn stages(&self, count: usize) -> Option<Vec<Range<usize>>> {
        let costs: Vec<f64> = self.nodes.iter().map(|node| self.cost(node)).collect();
        divide(&costs, &self.cuts(), count)
    }

    /// The largest number of stages.
    pub fn most_stages(&self) -> usize {
        self.cuts().len() + 1
    }

    /// Names of the parameters that these layers use.
    pub fn parameters_of(&self, layers: Range<usize>) -> impl Iterator<Item = &str> {
        let used = self.nodes[layers].iter().flat_map(|node| &node.parameters);
        used.map(|parameter| self.parameters[*parameter].name.as_str())
    }

    /// Names and lengths of the running statistics.
    pub fn statistics(&self) -> impl Iterator<Item = (&str, usize)> {
        self.statistics.iter().map(|statistic| (statistic.name.as_str(), statistic.len))
    }

    /// Elements of the running statistics of these layers.
    pub fn statistics_of(&self, layers: Range<usize>) -> usize {
        let statistics = self.nodes[layers].iter().flat_map(|node| &node.statistics);
        statistics.map(|statistic| self.statistics[*statistic].len).sum()
    }

    /// Elements of the tensor that a stage that begins with this layer receives.
    pub fn received_len(&self, layer: usize) -> usize {
        self.crossing(layer).map_or(0, |tensor| self.tensors[tensor].len())
    }

    /// One of the [`Graph::stages`] alone.
    ///
    /// # Panics
    /// The layers are not a stage.
    pub fn into_stage(mut self, layers: Range<usize>) -> Graph {
        let crossing = |layer: usize| self.crossing(layer).expect("invariant: one tensor crosses a cut");
        let input = (layers.start > 0).then(|| crossing(layers.start));
        let output = (layers.end < self.nodes.len()).then(|| crossing(layers.end));
        let mut stage = Graph::new(self.batch(), *self.kind(), self.format());
        let mut tensors = vec![usize::MAX; self.tensors.len()];
        if let Some(input) = input {
            tensors[input] = 0;
            let shape = self.tensors[input].shape.clone();
            stage.tensors.push(TensorInfo { shape, producer: 0, differentiable: true });
            stage.nodes.push(end("received", RECEIVED, Vec::new(), Some(0)));
        }
        let [parameters, statistics] = [
            renumber(self.parameters.len(), self.nodes[layers.clone()].iter().flat_map(|node| &node.parameters)),
            renumber(self.statistics.len(), self.nodes[layers.clone()].iter().flat_map(|node| &node.statistics)),
        ];
        for node in self.nodes.drain(..).skip(layers.start).take(layers.len()) {
            let output = node.output.map(|output| {
                tensors[output] = stage.tensors.len();
                let TensorInfo { shape, differentiable, .. } = &self.tensors[output];
                let producer = stage.nodes.len();
                stage.tensors.push(TensorInfo { shape: shape.clone(), producer, differentiable: *differentiable });
                tensors[output]
            });
            stage.nodes.push(Node {
                inputs: node.inputs.iter().map(|input| tensors[*input]).collect(),
                output,
                parameters: node.parameters.iter().filter_map(|parameter| parameters[*parameter]).collect(),
                statistics: node.statistics.iter().filter_map(|statistic| statistics[*statistic]).collect(),
                ..node
            });
        }
        if let Some(output) = output {
            stage.nodes.push(end("sent", SENT, vec![tensors[output]], None));
        }
        let at = |layer: usize| layer.clamp(layers.start, layers.end) - layers.start + usize::from(input.is_some());
        let blocks = self.blocks.iter().map(|block| at(block.start)..at(block.end));
        stage.blocks = blocks.filter(|block| !block.is_empty()).collect();
        stage.recomputes = self.recomputes;
        stage.parameters = kept(self.parameters, &parameters);
        stage.statistics = kept(self.statistics, &statistics);
        stage
    }

    /// The layers before which a cut is possible.
    fn cuts(&self) -> Vec<usize> {
        (1..self.nodes.len()).filter(|layer| self.crossing(*layer).is_some()).collect()
    }

    /// The one tensor that crosses a cut before this layer.
    fn crossing(&self, layer: usize) -> Option<usize> {
        let read = self.nodes[layer..].iter().flat_map(|node| &node.inputs);
        let mut read = read.copied().filter(|tensor| self.tensors[*tensor].producer < layer);
        let first = read.next()?;
        (read.all(|other| other == first) && self.tensors[first].differentiable).then_some(first)
    }

    /// Predicted FLOP of both passes of a layer.
    fn cost(&self, node: &Node) -> f64 {
        let elements = |tensors: &mut dyn Iterator<Item = &usize>| -> f64 {
            tensors.map(|tensor| self.tensors[*tensor].len() as f64).sum()
        };
        let moved = elements(&mut node.inputs.iter().chain(&node.output));
        let computed = match node.layer.form() {
            Form::Product(product) => 2.0 * (product.rows * product.inputs) as f64 * product.outputs as f64,
            Form::Convolution(shape) => 2.0 * shape.output_len() as f64 * shape.window_len() as f64,
            Form::Attention(shape) => {
                let scores = (shape.batch * shape.context) as f64 * shape.context as f64;
                4.0 * scores * shape.hidden() as f64 * if shape.causal { 0.5 } else { 1.0 }
            }
            _ => 0.0,
        };
        BOTH_PASSES * (computed + FLOP_PER_ELEMENT * moved)
    }
}

fn end(name: &str, kind: &'static str, inputs: Vec<usize>, output: Option<usize>) -> Node {
    let layer = Box::new(StageEnd(kind));
    Node { name: name.to_owned(), layer, inputs, output, parameters: Vec::new(), statistics: Vec::new() }
}

/// The new number of each item that is used, in the old order.
fn renumber<'a>(len: usize, used: impl Iterator<Item = &'a usize>) -> Vec<Option<usize>> {
    let mut numbers = vec![None; len];
    used.for_each(|item| numbers[*item] = Some(0));
    for (new, number) in numbers.iter_mut().flatten().enumerate() {
        *number = new;
    }
    numbers
}

fn kept<T>(items: Vec<T>, numbers: &[Option<usize>]) -> Vec<T> {
    items.into_iter().zip(numbers).filter_map(|(item, number)| number.map(|_| item)).collect()
}

/// Divides layers into `count` ranges between cuts so that the largest sum of costs is least; of
/// equal divisions, the one with the earliest cuts.
fn divide(costs: &[f64], cuts: &[usize], count: usize) -> Option<Vec<Range<usize>>> {
    let bounds: Vec<usize> = std::iter::once(0).chain(cuts.iter().copied()).chain([costs.len()]).collect();
    let mut before = vec![0.0];
    for cost in costs {
        before.push(before[before.len() - 1] + cost);
    }
    let sum = |from: usize, to: usize| before[bounds[to]] - before[bounds[from]];
    // The least largest sum of the first bounds, and the bound before the last range.
    let mut best: Vec<(f64, Vec<usize>)> =
        (0..bounds.len()).map(|end| (if end == 0 { 0.0 } else { f64::INFINITY }, Vec::new())).collect();
    for _ in 0..count {
        let mut next = vec![(f64::INFINITY, Vec::new()); bounds.len()];
        for (end, least) in next.iter_mut().enumerate() {
            for (start, (largest, starts)) in best.iter().enumerate().take(end) {
                let largest = largest.max(sum(start, end));
                if largest < least.0 {
                    *least = (largest, starts.iter().copied().chain([start]).collect());
                }
            }
        }
        best = next;
    }
    let (largest, starts) = best.pop()?;
    largest.is_finite().then(|| {
        let ends = starts.iter().skip(1).copied().chain([bounds.len() - 1]);
        starts.iter().zip(ends).map(|(start, end)| bounds[*start]..bounds[end]).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_most_expensive_stage_costs_least() {
        let costs = [1.0, 1.0, 1.0, 1.0, 4.0, 1.0];
        assert_eq!(divide(&costs, &[1, 2, 3, 4, 5], 2), Some(vec![0..4, 4..6]));
        assert_eq!(divide(&costs, &[1, 2, 3, 4, 5], 3), Some(vec![0..4, 4..5, 5..6]));
        assert_eq!(divide(&costs, &[1, 2], 2), Some(vec![0..2, 2..6]));
        assert_eq!(divide(&costs, &[1, 2], 4), None);
        assert_eq!(divide(&costs, &[1, 2], 1), Some(std::iter::once(0..6).collect()));
    }

    proptest! {
        #[test]
        fn no_other_division_is_better(costs in prop::collection::vec(0.1f64..9.0, 2..9), cut in 1usize..8) {
            let cuts: Vec<usize> = (1..costs.len()).collect();
            let largest = |stages: &[Range<usize>]| {
                stages.iter().map(|stage| costs[stage.clone()].iter().sum::<f64>()).fold(0.0, f64::max)
            };
            let cut = 1 + cut % (costs.len() - 1);
            let got = divide(&costs, &cuts, 2).unwrap();
            prop_assert!(largest(&got) <= largest(&[0..cut, cut..costs.len()]) + 1e-9);
        }
    }
}
