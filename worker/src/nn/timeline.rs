//! When layers run in a training step, and which of them run forward twice.
//!
//! ```text
//! time   0 .. n-1   forward
//!        n ..       backward, last layer first; before the last layer of a block that is
//!                   recomputed: forward through the block once more
//! ```

use super::graph::{Graph, Node};
use super::layer::Needs;

/// A layer's turn in the backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Visit {
    /// Its second forward pass.
    Again(usize),
    Backward(usize),
}

pub(super) struct Timeline {
    /// The backward pass, from time `n` on.
    pub visits: Vec<Visit>,
    /// Block of each node.
    blocks: Vec<Option<usize>>,
    /// Time of each node's second forward pass.
    again: Vec<Option<usize>>,
    backward: Vec<usize>,
}

impl Timeline {
    /// `needs`: of each node.
    pub fn new(graph: &Graph, needs: &[Needs]) -> Timeline {
        let n = graph.nodes.len();
        let mut blocks = vec![None; n];
        for (number, block) in graph.recomputed_blocks().iter().enumerate() {
            blocks[block.clone()].fill(Some(number));
        }
        let runs_again = second_passes(graph, needs, &blocks);
        let mut timeline =
            Timeline { visits: Vec::with_capacity(2 * n), blocks, again: vec![None; n], backward: vec![0; n] };
        for i in (0..n).rev() {
            let block = timeline.blocks[i].filter(|block| timeline.blocks.get(i + 1) != Some(&Some(*block)));
            if let Some(block) = block {
                for j in graph.recomputed_blocks()[block].clone().filter(|j| runs_again[*j]) {
                    timeline.again[j] = Some(n + timeline.visits.len());
                    timeline.visits.push(Visit::Again(j));
                }
            }
            timeline.backward[i] = n + timeline.visits.len();
            timeline.visits.push(Visit::Backward(i));
        }
        timeline
    }

    pub fn backward(&self, node: usize) -> usize {
        self.backward[node]
    }

    /// Time of its second forward pass, if there is one.
    pub fn again(&self, node: usize) -> Option<usize> {
        self.again[node]
    }

    /// Whether, from the second forward pass on, a node has the value of another node's second
    /// pass.
    pub fn sees_second(&self, node: usize, producer: usize) -> bool {
        self.again[producer].is_some() && self.blocks[node] == self.blocks[producer]
    }
}

pub(super) fn is_differentiable(graph: &Graph, node: &Node) -> bool {
    node.output.iter().chain(&node.inputs).any(|&tensor| graph.tensors[tensor].differentiable)
}

/// The nodes whose values the backward pass of their block needs, directly or for another value.
fn second_passes(graph: &Graph, needs: &[Needs], blocks: &[Option<usize>]) -> Vec<bool> {
    let mut wanted = vec![false; graph.tensors.len()];
    let mut again = vec![false; graph.nodes.len()];
    for (i, node) in graph.nodes.iter().enumerate().rev().filter(|(i, _)| blocks[*i].is_some()) {
        let differentiable = is_differentiable(graph, node);
        let Needs { inputs, output, saved, kept, .. } = needs[i];
        again[i] = differentiable && (output || saved > 0 || kept > 0) || node.output.is_some_and(|own| wanted[own]);
        for (&input, reads) in node.inputs.iter().zip(inputs) {
            let is_inside = blocks[graph.tensors[input].producer] == blocks[i];
            wanted[input] |= is_inside && (again[i] || differentiable && reads);
        }
    }
    again
}
