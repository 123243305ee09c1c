//! Records a network's program from its plan and its gradient buckets.

use super::{Access, Content, Event, Lane, Memory, Program, Step, Work};
use crate::nn::arena::Region;
use crate::nn::graph::Node;
use crate::nn::layout::{Bucket, Layout};
use crate::nn::plan::{ForwardRegions, Mode, NetworkPlan, NodePlan};
use crate::nn::timeline::Visit;
use std::ops::Range;

/// How a step's gradients are reduced.
#[derive(Debug, Clone, Copy)]
pub struct Reductions<'a> {
    /// Gradient ranges, in the order in which backward completes them.
    pub buckets: &'a [Bucket],
    /// The buckets of each all-reduce, in order; together they cover all buckets.
    pub runs: &'a [Range<usize>],
    /// Number of communicators, at least 1: all-reduce `i` uses communicator `i % lanes`.
    pub lanes: usize,
    /// Micro-batches per step, at least 1.
    pub micro_batches: usize,
}

impl Program {
    /// Records one training step: all micro-batches, the all-reduces, the optimizer.
    pub(crate) fn record(nodes: &[Node], plan: &NetworkPlan, reductions: &Reductions<'_>) -> Program {
        let tensors = nodes.iter().filter(|node| node.output.is_some()).map(|node| node.name.as_str()).collect();
        let mut recorder = Recorder { layout: &plan.layout, tensors, steps: Vec::new() };
        for micro_batch in 0..reductions.micro_batches {
            let is_last = micro_batch + 1 == reductions.micro_batches;
            for (node, regions) in nodes.iter().zip(&plan.nodes) {
                recorder.forward(node, (&regions.ordinals, regions.first_forward()));
            }
            for visit in &plan.visits {
                let (node, regions) = match *visit {
                    Visit::Again(index) => {
                        let regions = &plan.nodes[index];
                        recorder.forward(&nodes[index], (&regions.ordinals, regions.last_forward()));
                        continue;
                    }
                    Visit::Backward(index) if plan.nodes[index].backward => (&nodes[index], &plan.nodes[index]),
                    Visit::Backward(_) => continue,
                };
                recorder.backward(node, regions, micro_batch > 0);
                for &ordinal in regions.finished.iter().filter(|_| is_last) {
                    recorder.reduce_after(ordinal, reductions);
                }
            }
        }
        recorder.update(reductions);
        Program { steps: recorder.steps, arena: plan.bytes, weights: FLOAT * plan.layout.len }
    }
}

/// Bytes per weight or gradient.
const FLOAT: usize = size_of::<f32>();

struct Recorder<'a> {
    layout: &'a Layout,
    /// Name of each tensor, taken from the layer that computes it.
    tensors: Vec<&'a str>,
    steps: Vec<Step>,
}

impl Recorder<'_> {
    fn push(&mut self, lane: Lane, work: Work, reads: Vec<Access>, writes: Vec<Access>) {
        self.steps.push(Step { lane, work, reads, writes });
    }

    fn value(&self, tensor: usize) -> Content {
        Content::Value(self.tensors[tensor].to_owned())
    }

    fn gradient(&self, tensor: usize) -> Content {
        Content::Gradient(self.tensors[tensor].to_owned())
    }

    fn weights(&self, ordinals: &[usize]) -> Vec<Access> {
        let weight = |&ordinal: &usize| {
            let parameter = &self.layout.parameters[ordinal];
            access(Memory::Weights, parameter.range(), Content::Weight(parameter.name.clone()))
        };
        ordinals.iter().map(weight).collect()
    }

    fn weight_gradient(&self, ordinal: usize) -> Access {
        let parameter = &self.layout.parameters[ordinal];
        access(Memory::Gradients, parameter.range(), Content::WeightGradient(parameter.name.clone()))
    }

    fn forward(&mut self, node: &Node, (ordinals, regions): (&[usize], ForwardRegions)) {
        let name = || node.name.clone();
        let mut reads = Vec::new();
        for (&tensor, region) in node.inputs.iter().zip(&regions.inputs) {
            reads.extend(in_arena(region, self.value(tensor)));
        }
        reads.extend(self.weights(ordinals));
        let mut writes = Vec::new();
        writes.extend(node.output.and_then(|tensor| in_arena(&regions.output, self.value(tensor))));
        writes.extend(in_arena(&regions.saved, Content::Saved(name())));
        writes.extend(in_arena(&regions.kept, Content::Kept(name())));
        writes.extend(in_arena(&regions.scratch, Content::Scratch(name())));
        self.push(Lane::Compute, Work::Forward(name(), node.layer.form()), reads, writes);
    }

    /// `adds`: whether to add to the gradients of earlier micro-batches.
    fn backward(&mut self, node: &Node, regions: &NodePlan, adds: bool) {
        let name = || node.name.clone();
        let scratch = |region: &Region| in_arena(region, Content::Scratch(name()));
        let (mut reads, mut writes, mut passes) = (Vec::new(), Vec::new(), Vec::new());
        for (&tensor, region) in node.inputs.iter().zip(&regions.backward_inputs) {
            reads.extend(in_arena(region, self.value(tensor)));
        }
        if let Some(tensor) = node.output {
            reads.extend(in_arena(&regions.backward_output, self.value(tensor)));
            reads.extend(in_arena(&regions.d_output, self.gradient(tensor)));
        }
        reads.extend(in_arena(&regions.saved, Content::Saved(name())));
        reads.extend(in_arena(&regions.kept, Content::Kept(name())));
        reads.extend(self.weights(&regions.ordinals));
        // A layer can overwrite all of these.
        for region in [&regions.backward_scratch, &regions.saved, &regions.kept, &regions.d_output] {
            writes.extend(scratch(region));
        }
        for (k, &tensor) in node.inputs.iter().enumerate() {
            let pass = regions.passes.iter().find(|pass| pass.input == k);
            let delivered = if pass.is_some() { Content::Part(name(), k) } else { self.gradient(tensor) };
            let region = &regions.d_inputs[k];
            match regions.modes[k] {
                Mode::None => {}
                Mode::Write => writes.extend(in_arena(region, delivered)),
                Mode::Add => {
                    reads.extend(in_arena(region, self.gradient(tensor)));
                    writes.extend(in_arena(region, delivered));
                }
                Mode::InPlace => writes.extend(in_arena(&regions.d_output, delivered)),
                Mode::OverInput => {
                    reads.extend(in_arena(region, self.value(tensor)));
                    writes.extend(in_arena(region, delivered));
                }
            }
            if let Some(pass) = pass {
                let mut from: Vec<Access> = in_arena(&pass.from, Content::Part(name(), k)).into_iter().collect();
                from.extend(in_arena(&pass.to, self.gradient(tensor)).filter(|_| pass.add));
                passes.push((from, in_arena(&pass.to, self.gradient(tensor)).into_iter().collect()));
            }
        }
        for (&ordinal, &written) in regions.ordinals.iter().zip(&regions.written) {
            reads.extend((adds || written).then(|| self.weight_gradient(ordinal)));
            writes.push(self.weight_gradient(ordinal));
        }
        self.push(Lane::Compute, Work::Backward(name(), node.layer.form()), reads, writes);
        for (reads, writes) in passes {
            self.push(Lane::Compute, Work::Pass(name()), reads, writes);
        }
    }

    /// Starts the all-reduce that this gradient completes, if any.
    fn reduce_after(&mut self, ordinal: usize, reductions: &Reductions<'_>) {
        let Reductions { buckets, runs, lanes, .. } = *reductions;
        let ends = |run: &Range<usize>| buckets[run.end - 1].last == ordinal;
        let Some(number) = runs.iter().position(ends) else { return };
        let lane = Lane::Reduce(number % lanes);
        self.push(Lane::Compute, Work::Record(Event::Ready(number)), Vec::new(), Vec::new());
        self.push(lane, Work::Wait(Event::Ready(number)), Vec::new(), Vec::new());
        for index in runs[number].clone() {
            let bucket = &buckets[index];
            let gradients = (bucket.first..=bucket.last).map(|ordinal| self.weight_gradient(ordinal)).collect();
            self.push(lane, Work::Reduce(index), gradients, vec![sum(index, bucket)]);
        }
        self.push(lane, Work::Record(Event::Reduced(number)), Vec::new(), Vec::new());
    }

    fn update(&mut self, reductions: &Reductions<'_>) {
        let Reductions { buckets, runs, .. } = *reductions;
        for number in 0..runs.len() {
            self.push(Lane::Compute, Work::Wait(Event::Reduced(number)), Vec::new(), Vec::new());
        }
        let sums = buckets.iter().enumerate().map(|(index, bucket)| sum(index, bucket)).collect();
        self.push(Lane::Compute, Work::Norm, sums, Vec::new());
        for (index, bucket) in buckets.iter().enumerate() {
            let ordinals: Vec<usize> = (bucket.first..=bucket.last).collect();
            let weights = self.weights(&ordinals);
            let reads = weights.iter().cloned().chain([sum(index, bucket)]).collect();
            self.push(Lane::Compute, Work::Update(index), reads, weights);
        }
    }
}

fn sum(index: usize, bucket: &Bucket) -> Access {
    access(Memory::Gradients, bucket.range.clone(), Content::Sum(index))
}

/// `numbers`: range in f32 elements.
fn access(memory: Memory, numbers: Range<usize>, content: Content) -> Access {
    Access { memory, range: FLOAT * numbers.start..FLOAT * numbers.end, content }
}

/// `None` for an empty region.
fn in_arena(region: &Region, content: Content) -> Option<Access> {
    let range = region.offset..region.offset + region.bytes();
    (!range.is_empty()).then_some(Access { memory: Memory::Arena, range, content })
}
