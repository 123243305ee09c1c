//! Pipelines: which ranks have the stages of one network, and the bytes that they exchange.

use super::Check;
use std::collections::BTreeMap;
use switchyard_crds as api;
use switchyard_worker_contract::config::{Device, EngineConfig, Model, Pipeline, Precision, RankOrder, WireType};

/// Translates the block. Processes are per node. [`ordered`] numbers the ranks.
pub(super) fn pipeline(
    engine: &api::Engine,
    device: Device,
    (nodes, processes): (u32, u32),
    check: &mut Check<'_>,
) -> Option<Pipeline> {
    let stages = engine.parallelism.pipeline_stages.unsigned_abs();
    if stages < 2 {
        return None;
    }
    const FIELD: &str = "parallelism.pipelineStages";
    if device == Device::Cuda {
        check.fault(FIELD, format!("{stages} on GPUs"), "1: only ranks on CPUs form pipelines yet");
    }
    let ranks = nodes * processes;
    if !ranks.is_multiple_of(stages) {
        let got = format!("{stages} with {nodes} x {processes} ranks");
        check.fault(FIELD, got, "a number that divides spec.trainer.numNodes * spec.trainer.numProcPerNode");
    }
    Some(Pipeline { stages, order: RankOrder::default() })
}

/// Numbers the ranks so that nodes exchange the fewest bytes.
pub(super) fn ordered(config: EngineConfig, shape: (u32, u32)) -> EngineConfig {
    let best = |(pipeline, traffic): (Pipeline, Traffic)| traffic.best_order(pipeline.stages, shape);
    let order = config.pipeline.zip(Traffic::of(&config)).map_or(RankOrder::default(), best);
    EngineConfig { pipeline: config.pipeline.map(|pipeline| Pipeline { order, ..pipeline }), ..config }
}

/// Bytes that ranks exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Traffic {
    /// Of the tensor between two stages, for each micro-batch. Its gradient has as many.
    pub activations: u64,
    /// Micro-batches of a step.
    pub micro_batches: u64,
    /// Of the gradients of a stage, if stages are equally large.
    pub gradients: u64,
}

impl Traffic {
    /// `None` without pipelines, and if the tensors between stages depend on the data.
    pub fn of(config: &EngineConfig) -> Option<Traffic> {
        let stages = u64::from(config.pipeline?.stages);
        let (layers, hidden, context, rows) = match &config.model {
            Model::Gpt(gpt) => {
                let tables = if gpt.tied_head { 1 } else { 2 };
                (gpt.layers, gpt.hidden_size, gpt.context_length, tables * gpt.vocabulary_size)
            }
            Model::Bert(bert) => (bert.layers, bert.hidden_size, bert.context_length, bert.embedding_rows()),
            Model::ResNet(_) | Model::Mlp(_) | Model::Custom(_) => return None,
        };
        let [layers, hidden, context, rows] = [layers, hidden, context, rows].map(u64::from);
        // Of a block: 3 for queries, keys and values, 1 for their projection, 8 for the MLP.
        let weights = 12 * layers * hidden * hidden + (rows + context) * hidden;
        let activation_bytes = if config.precision == Precision::Fp32 { 4 } else { 2 };
        let gradient_bytes = if config.overlap.wire_type == WireType::Fp32 { 4 } else { 2 };
        Some(Traffic {
            activations: activation_bytes * u64::from(config.batch_size_per_process) * context * hidden,
            micro_batches: u64::from(config.batch_merge.max(1)),
            gradients: gradient_bytes * weights / stages,
        })
    }

    /// Bytes that a pipeline sends in a step across one boundary between stages, both ways.
    pub fn of_boundary(&self) -> u64 {
        2 * self.micro_batches * self.activations
    }

    /// Bytes that the nodes of a ring send in a step, all together.
    pub fn of_ring(&self, nodes: u64) -> u64 {
        2 * nodes.saturating_sub(1) * self.gradients
    }

    /// The rank order in which nodes send the fewest bytes: with many activations, each pipeline is
    /// within as few nodes as possible, with many gradients, each stage, and between these a node
    /// has a block of stages and pipelines.
    pub fn best_order(&self, stages: u32, shape: (u32, u32)) -> RankOrder {
        let (nodes, processes) = shape;
        let pipelines = nodes * processes / stages;
        let divides = |part: &u32| processes.is_multiple_of(*part) && stages.is_multiple_of(*part);
        let blocks =
            (2..stages).filter(divides).map(|part| RankOrder::Blocks { stages: part, pipelines: processes / part });
        let fits = |order: &RankOrder| match order {
            RankOrder::Blocks { pipelines: own, .. } => *own > 1 && *own < pipelines && pipelines.is_multiple_of(*own),
            RankOrder::ByPipeline | RankOrder::ByStage => true,
        };
        let orders = [RankOrder::ByPipeline, RankOrder::ByStage].into_iter().chain(blocks).filter(fits);
        // Of equal ones the first.
        orders.min_by_key(|order| self.between_nodes(Pipeline { stages, order: *order }, shape)).unwrap_or_default()
    }

    /// Bytes that pairs of nodes exchange in a step, by their positions in rank order. Processes
    /// are per node.
    pub fn of_pairs(&self, pipeline: Pipeline, (nodes, processes): (u32, u32)) -> BTreeMap<[usize; 2], u64> {
        let (stages, replicas) = (pipeline.stages, nodes * processes / pipeline.stages);
        let node =
            |stage: u32, replica: u32| (pipeline.order.rank(stage, replica, (stages, replicas)) / processes) as usize;
        let mut pairs = BTreeMap::new();
        let mut exchange = |one: usize, other: usize, bytes: u64| {
            if one != other {
                *pairs.entry([one.min(other), one.max(other)]).or_default() += bytes;
            }
        };
        for stage in 0..stages {
            let mut ring: Vec<usize> = (0..replicas).map(|replica| node(stage, replica)).collect();
            ring.dedup();
            let count = ring.len() as u64;
            for (from, to) in ring.iter().zip(ring.iter().cycle().skip(1)) {
                exchange(*from, *to, self.of_ring(count) / count);
            }
            if stage + 1 < stages {
                (0..replicas).for_each(|it| exchange(node(stage, it), node(stage + 1, it), self.of_boundary()));
            }
        }
        pairs
    }

    /// Bytes that all nodes send in a step. Processes are per node.
    pub fn between_nodes(&self, pipeline: Pipeline, (nodes, processes): (u32, u32)) -> u64 {
        let (stages, replicas) = (pipeline.stages, nodes * processes / pipeline.stages);
        let node = |stage: u32, replica: u32| pipeline.order.rank(stage, replica, (stages, replicas)) / processes;
        let mut sent = 0;
        for stage in 0..stages {
            let mut of_stage: Vec<u32> = (0..replicas).map(|replica| node(stage, replica)).collect();
            of_stage.dedup();
            sent += self.of_ring(of_stage.len() as u64);
            if stage + 1 < stages {
                let crossing = (0..replicas).filter(|replica| node(stage, *replica) != node(stage + 1, *replica));
                sent += crossing.count() as u64 * self.of_boundary();
            }
        }
        sent
    }
}
