//! Runs the layers of a planned graph, forward and backward.
#![allow(unsafe_code)]

use super::arena::{Arena, Region};
use super::error::ModelError;
use super::graph::{Graph, Node, StatisticInfo};
use super::layer::{
    Backward, Forward, Gradients, INPUTS, InputGradient, Kernels, LossSums, Parameters, Statistics, WeightSource,
    Weights,
};
use super::layers::{RECEIVED, SENT};
use super::layout::{GradientSink, Layout};
use super::plan::{Alignment, ForwardRegions, Mode, NetworkPlan, NodePlan};
use super::program::{Program, Reductions};
use super::timeline::Visit;
use crate::cpu::values::with_format;
use crate::cpu::{Cpu, Gemm, Values, ValuesMut, ops};
use crate::data::Batch;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

/// A timed layer, for profiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Operation {
    /// Index of the layer; see [`Network::name`].
    pub node: u32,
    /// Whether this is the backward pass.
    pub backward: bool,
    pub start: Instant,
    pub end: Instant,
}

/// The tensors at the ends of a stage, and their gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Boundary {
    /// Written before forward.
    Input,
    /// Read after forward.
    Output,
    /// Written before backward.
    OutputGradient,
    /// Read after backward.
    InputGradient,
}

/// A network and its memory.
pub struct Network {
    nodes: Vec<Node>,
    plan: NetworkPlan,
    /// Arena size without recomputation, which otherwise is what the plan has.
    bytes_kept: Option<usize>,
    /// One for each micro-batch between its forward and backward pass.
    arenas: Vec<Arena>,
    /// The arena in use.
    arena: usize,
    kernels: Kernels,
    statistics: Vec<StatisticInfo>,
    /// Written by the last forward pass.
    batch_statistics: Vec<f32>,
    recording: bool,
    operations: Vec<Operation>,
    /// Index of the running layer.
    position: Arc<AtomicU32>,
}

impl Network {
    /// Plans the memory of a graph and allocates it.
    ///
    /// # Errors
    /// The graph is not a valid network, or the machine lacks the memory.
    pub fn new(graph: Graph, cpu: Cpu) -> Result<Network, ModelError> {
        Network::with_arenas(graph, cpu, 1)
    }

    /// As [`Network::new`], with memory for several micro-batches between their forward and
    /// backward passes.
    ///
    /// # Errors
    /// See [`Network::new`].
    pub fn with_arenas(mut graph: Graph, cpu: Cpu, arenas: usize) -> Result<Network, ModelError> {
        let alignment = Alignment { address: Arena::ALIGNMENT, row: 1 };
        let plan =
            |graph: &Graph| NetworkPlan::new(graph, alignment, &|node| Ok::<_, ModelError>(node.layer.needs(&cpu)));
        let planned = plan(&graph)?;
        let bytes_kept = graph.stop_recomputing().then(|| plan(&graph)).transpose()?.map(|plan| plan.bytes);
        let plan = planned;
        let arenas: Option<Vec<Arena>> = (0..arenas).map(|_| Arena::new(plan.bytes)).collect();
        let arenas = arenas.ok_or(ModelError::Memory(plan.bytes >> 20))?;
        let Graph { nodes, statistics, .. } = graph;
        let len = statistics.iter().map(|statistic| statistic.len).sum();
        let operations = Vec::with_capacity(nodes.len() + plan.visits.len());
        Ok(Network {
            nodes,
            plan,
            bytes_kept,
            arenas,
            arena: 0,
            kernels: Kernels { gemm: Gemm::new(cpu.clone()), cpu },
            statistics,
            batch_statistics: vec![0.0; len],
            recording: false,
            operations,
            position: Arc::default(),
        })
    }

    pub fn layout(&self) -> &Layout {
        &self.plan.layout
    }

    /// Names and lengths of the running statistics, in the order of [`Network::batch_statistics`].
    pub fn statistics(&self) -> impl Iterator<Item = (&str, usize)> {
        self.statistics.iter().map(|statistic| (statistic.name.as_str(), statistic.len))
    }

    /// Initial values of the running statistics.
    pub fn initial_statistics(&self) -> Vec<f32> {
        self.statistics.iter().flat_map(|s| std::iter::repeat_n(s.initial, s.len)).collect()
    }

    /// Statistics of the last micro-batch.
    pub fn batch_statistics(&self) -> &[f32] {
        &self.batch_statistics
    }

    /// The program of one training step: all micro-batches, the all-reduces, the optimizer.
    pub fn program(&self, reductions: &Reductions<'_>) -> Program {
        Program::record(&self.nodes, &self.plan, reductions)
    }

    /// Number of layers.
    pub fn layers(&self) -> usize {
        self.nodes.len()
    }

    /// Name and kind of a layer.
    pub fn name(&self, node: usize) -> (&str, &'static str) {
        (&self.nodes[node].name, self.nodes[node].layer.kind())
    }

    /// Parameters whose gradients are final after the backward pass of a layer.
    pub fn finished_parameters(&self, node: usize) -> usize {
        let finished = self.plan.nodes[node].finished.iter();
        finished.map(|&ordinal| self.plan.layout.parameters[ordinal].len).sum()
    }

    /// Index of the running layer, for use by another thread.
    pub fn position(&self) -> Arc<AtomicU32> {
        Arc::clone(&self.position)
    }

    /// Bytes of activations, their gradients and scratch memory.
    pub fn memory_bytes(&self) -> usize {
        self.arenas.iter().map(Arena::bytes).sum::<usize>() + self.kernels.gemm.memory_bytes()
    }

    /// [`Network::memory_bytes`] without recomputation; `None` if nothing is recomputed.
    pub fn memory_bytes_kept(&self) -> Option<usize> {
        Some(self.arenas.len() * self.bytes_kept? + self.kernels.gemm.memory_bytes())
    }

    /// [`Network::memory_bytes`] if every tensor were f32.
    pub fn memory_bytes_f32(&self) -> usize {
        self.arenas.len() * self.plan.bytes_f32 + self.kernels.gemm.memory_bytes()
    }

    /// Switches the recording of layer times on or off.
    pub fn record(&mut self, on: bool) {
        self.recording = on;
        self.operations.clear();
    }

    /// Operations since the last forward pass started, in order.
    pub fn operations(&self) -> &[Operation] {
        &self.operations
    }

    /// Selects the memory that the next passes use. A micro-batch has the same in both of them.
    ///
    /// # Panics
    /// If there is no such memory.
    pub fn select(&mut self, arena: usize) {
        assert!(arena < self.arenas.len(), "memory {arena} of {}", self.arenas.len());
        self.arena = arena;
    }

    /// The bytes of a tensor at an end of this stage, in the network's format; empty at an end of
    /// the whole network.
    pub fn boundary(&mut self, boundary: Boundary) -> &mut [u8] {
        let ends = self.nodes.iter().zip(&self.plan.nodes);
        let end = match boundary {
            Boundary::Input | Boundary::InputGradient => ends.take(1).find(|(node, _)| node.layer.kind() == RECEIVED),
            Boundary::Output | Boundary::OutputGradient => {
                ends.rev().take(1).find(|(node, _)| node.layer.kind() == SENT)
            }
        };
        let Some((_, regions)) = end else { return &mut [] };
        let region = match boundary {
            Boundary::Input => regions.output,
            Boundary::Output => regions.inputs[0],
            Boundary::OutputGradient => regions.d_inputs[0],
            Boundary::InputGradient => regions.d_output,
        };
        // SAFETY: no layer runs, and `&mut self` excludes other references.
        match unsafe { self.arenas[self.arena].write(&region) } {
            ValuesMut::F32(values) => bytemuck::cast_slice_mut(values),
            ValuesMut::Bf16(values) => bytemuck::cast_slice_mut(values),
            ValuesMut::F16(values) => bytemuck::cast_slice_mut(values),
        }
    }

    /// Forward pass of a training step.
    ///
    /// # Panics
    /// If the batch does not match the graph, or the weights do not match the layout.
    pub fn forward(&mut self, mut weights: Weights<'_>, batch: &Batch) -> LossSums {
        self.forward_from(&mut weights, batch)
    }

    /// As [`Network::forward`]; each layer waits for its own parameters only.
    ///
    /// # Panics
    /// See [`Network::forward`].
    pub fn forward_from(&mut self, source: &mut dyn WeightSource, batch: &Batch) -> LossSums {
        self.run_forward(source, batch, true)
    }

    /// Forward pass only; must not be followed by backward.
    ///
    /// # Panics
    /// See [`Network::forward`].
    pub fn evaluate(&mut self, mut weights: Weights<'_>, batch: &Batch) -> LossSums {
        self.run_forward(&mut weights, batch, false)
    }

    fn run_forward(&mut self, source: &mut dyn WeightSource, batch: &Batch, training: bool) -> LossSums {
        assert_eq!(source.weights(&[]).master.len(), self.plan.layout.len, "length of the weights");
        self.operations.clear();
        let mut loss_sums = LossSums::default();
        for index in 0..self.nodes.len() {
            let weights = source.weights(&self.plan.nodes[index].ordinals);
            let regions = self.plan.nodes[index].first_forward();
            self.run_layer(index, regions, (weights, batch, training), &mut loss_sums);
        }
        loss_sums
    }

    fn run_layer(
        &mut self,
        index: usize,
        regions: ForwardRegions,
        (weights, batch, training): (Weights<'_>, &Batch, bool),
        loss_sums: &mut LossSums,
    ) {
        let Network { nodes, plan, arenas, arena, kernels, batch_statistics, recording, operations, position, .. } =
            self;
        let arena = &arenas[*arena];
        let NodePlan { ordinals, statistics, .. } = &plan.nodes[index];
        position.store(index as u32, Ordering::Relaxed);
        let start = recording.then(Instant::now);
        let statistics = if training {
            Statistics::Batch(&mut batch_statistics[statistics.clone()])
        } else {
            Statistics::Running(&weights.statistics[statistics.clone()])
        };
        // SAFETY: `NetworkPlan::check` asserted that written regions are disjoint from all
        // others, and one layer runs at a time.
        let (inputs, output, saved, kept, scratch) = unsafe {
            (
                read(arena, &regions.inputs),
                arena.write(&regions.output),
                arena.floats(&regions.saved),
                arena.write(&regions.kept),
                arena.floats(&regions.scratch),
            )
        };
        nodes[index].layer.forward(&mut Forward {
            inputs,
            output,
            saved,
            kept,
            scratch,
            batch,
            kernels,
            statistics,
            loss_sums,
            parameters: Parameters { layout: &plan.layout, ordinals, weights },
        });
        record_operation(operations, start, index, false);
    }

    /// Computes the gradients of `scale` times the loss of the last [`Network::forward`], which
    /// must have used the same weights and batch.
    pub fn backward(&mut self, weights: Weights<'_>, batch: &Batch, scale: f32, sink: &mut dyn GradientSink) {
        for turn in 0..self.plan.visits.len() {
            let index = match self.plan.visits[turn] {
                Visit::Again(index) => {
                    let regions = self.plan.nodes[index].last_forward();
                    self.run_layer(index, regions, (weights, batch, true), &mut LossSums::default());
                    continue;
                }
                Visit::Backward(index) => index,
            };
            let Network { nodes, plan, arenas, arena, kernels, recording, operations, position, .. } = self;
            let arena = &arenas[*arena];
            let (node, regions) = (&mut nodes[index], &plan.nodes[index]);
            if !regions.backward {
                continue;
            }
            position.store(index as u32, Ordering::Relaxed);
            let start = recording.then(Instant::now);
            // SAFETY: as in `run_layer`; `d_inputs` that share the memory of `d_output` are not
            // handed out.
            let (inputs, output, d_output, d_inputs, saved, kept, scratch) = unsafe {
                (
                    read(arena, &regions.backward_inputs),
                    arena.read(&regions.backward_output),
                    arena.write(&regions.d_output),
                    gradients(arena, regions),
                    arena.floats(&regions.saved),
                    arena.write(&regions.kept),
                    arena.floats(&regions.backward_scratch),
                )
            };
            let parameters = Parameters { layout: &plan.layout, ordinals: &regions.ordinals, weights };
            node.layer.backward(&mut Backward {
                inputs,
                output,
                d_output,
                d_inputs,
                saved,
                kept,
                scratch,
                batch,
                kernels,
                scale,
                parameters,
                gradients: Gradients { ordinals: &regions.ordinals, written: &regions.written, sink: &mut *sink },
            });
            pass_on(arena, regions, &kernels.cpu);
            regions.finished.iter().for_each(|&ordinal| sink.finished(ordinal));
            record_operation(operations, start, index, true);
        }
    }
}

fn record_operation(operations: &mut Vec<Operation>, start: Option<Instant>, index: usize, backward: bool) {
    if let Some(start) = start {
        operations.push(Operation { node: index as u32, backward, start, end: Instant::now() });
    }
}

/// # Safety
/// As [`Arena::read`].
unsafe fn read<'a>(arena: &Arena, regions: &[Region; INPUTS]) -> [Values<'a>; INPUTS] {
    // SAFETY: as promised by the caller.
    std::array::from_fn(|k| unsafe { arena.read(&regions[k]) })
}

/// # Safety
/// As [`Arena::write`].
unsafe fn gradients<'a>(arena: &Arena, regions: &NodePlan) -> [InputGradient<'a>; INPUTS] {
    std::array::from_fn(|k| {
        // SAFETY: as promised by the caller.
        let memory = || unsafe { arena.write(&regions.d_inputs[k]) };
        match regions.modes[k] {
            Mode::None => InputGradient::None,
            Mode::Write => InputGradient::Write(memory()),
            Mode::Add => InputGradient::Add(memory()),
            Mode::InPlace => InputGradient::InPlace,
            Mode::OverInput => InputGradient::OverInput(memory()),
        }
    })
}

/// Copies or adds gradients to their destinations.
fn pass_on(arena: &Arena, regions: &NodePlan, cpu: &Cpu) {
    for pass in &regions.passes {
        // SAFETY: the layer has released its slices, and `NetworkPlan::check` asserted that the two
        // regions are disjoint.
        let (from, mut to) = unsafe { (arena.read(&pass.from), arena.write(&pass.to)) };
        with_format!(pass.to.format, E => {
            if pass.add {
                ops::add_to::<E>(cpu, from.of::<E>(), to.of::<E>());
            } else {
                ops::convert::<E, E>(cpu, from.of::<E>(), to.of::<E>());
            }
        });
    }
}
