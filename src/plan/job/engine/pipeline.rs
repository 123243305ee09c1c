//! Pipelines: which ranks have the stages of one network.

use super::Check;
use switchyard_crds as api;
use switchyard_worker_contract::config::{Device, Model, Pipeline, RankOrder};

/// Translates the block. Processes are per node.
pub(super) fn pipeline(
    engine: &api::Engine,
    model: Option<&Model>,
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
    let order = model.map_or(RankOrder::default(), |model| {
        let bytes = |order| {
            let merge = u64::from(engine.batch_merge.unsigned_abs());
            let traffic = Traffic::of(model, engine.batch_size_per_process.unsigned_abs())?;
            Some(traffic.between_nodes(Pipeline { stages, order }, (nodes, processes), merge))
        };
        let [by_pipeline, by_stage] = [RankOrder::ByPipeline, RankOrder::ByStage].map(bytes);
        if by_stage < by_pipeline { RankOrder::ByStage } else { RankOrder::ByPipeline }
    });
    Some(Pipeline { stages, order })
}

/// Bytes that ranks exchange.
struct Traffic {
    /// Of the tensor between two stages, per micro-batch.
    activations: u64,
    /// Of all gradients.
    gradients: u64,
}

impl Traffic {
    /// `None` if the tensors between stages depend on the data. `batch`: samples per micro-batch.
    fn of(model: &Model, batch: u32) -> Option<Traffic> {
        let (layers, hidden, context, rows) = match model {
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
        Some(Traffic { activations: 4 * u64::from(batch) * context * hidden, gradients: 4 * weights })
    }

    /// Bytes that all nodes send in a step of `merge` micro-batches.
    fn between_nodes(&self, pipeline: Pipeline, (nodes, processes): (u32, u32), merge: u64) -> u64 {
        let (stages, replicas) = (pipeline.stages, nodes * processes / pipeline.stages);
        let node = |stage: u32, replica: u32| pipeline.order.rank(stage, replica, (stages, replicas)) / processes;
        let mut sent = 0;
        for stage in 0..stages {
            let mut of_stage: Vec<u32> = (0..replicas).map(|replica| node(stage, replica)).collect();
            of_stage.dedup();
            // A ring of the nodes sends all gradients almost twice.
            sent += 2 * (of_stage.len() as u64).saturating_sub(1) * self.gradients / u64::from(stages);
            if stage + 1 < stages {
                let crossing = (0..replicas).filter(|replica| node(stage, *replica) != node(stage + 1, *replica));
                sent += crossing.count() as u64 * 2 * merge * self.activations;
            }
        }
        sent
    }
}
