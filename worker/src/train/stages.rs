//! The stages of a pipeline: the layers, parameters and statistics of each.

use super::TrainError;
use super::training::Training;
use crate::cpu::Cpu;
use crate::nn::{Layout, Network};
use std::ops::Range;

/// The whole network, and how it is divided. Pure, so the same on all ranks.
pub(super) struct Stages {
    /// The layers of each stage.
    layers: Vec<Range<usize>>,
    /// Elements of the tensor that each stage receives; 0 for the first.
    pub received: Vec<usize>,
    /// Of the whole network.
    pub layout: Layout,
    /// Names and lengths of all running statistics.
    pub statistics: Vec<(String, usize)>,
    /// The part of the layout that each stage holds. A shared parameter belongs to the first stage
    /// that uses it.
    pub weights: Vec<Range<usize>>,
    /// The part of the statistics that each stage holds.
    pub own_statistics: Vec<Range<usize>>,
    /// Parameters of two stages.
    pub shared: Vec<SharedParameter>,
}

/// A parameter of two stages, which add their gradients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SharedParameter {
    pub name: String,
    /// In ascending order.
    pub stages: [usize; 2],
}

impl Stages {
    /// `None` without pipelines.
    ///
    /// # Errors
    /// The network cannot be cut into this many stages.
    pub fn new(training: &Training) -> Result<Option<Stages>, TrainError> {
        let Some(pipeline) = training.config.pipeline else { return Ok(None) };
        let graph = training.graph()?;
        let count = pipeline.stages as usize;
        let refused = |got: String, expected: String| {
            TrainError::Usage(format!("spec.engine.parallelism.pipelineStages: got {got}; expected {expected}"))
        };
        let layers = graph.stages(count).ok_or_else(|| {
            refused(
                count.to_string(),
                format!("at most {}, the stages that {} has", graph.most_stages(), training.model.words()),
            )
        })?;
        let layout = graph.layout()?;
        let mut stages_of: Vec<Vec<usize>> = vec![Vec::new(); layout.parameters.len()];
        for (stage, layers) in layers.iter().enumerate() {
            for name in graph.parameters_of(layers.clone()) {
                let ordinal = layout.parameters.iter().position(|parameter| parameter.name == name);
                let stages = &mut stages_of[ordinal.expect("invariant: the layout has all parameters")];
                if stages.last() != Some(&stage) {
                    stages.push(stage);
                }
            }
        }
        let mut shared = Vec::new();
        for (parameter, stages) in layout.parameters.iter().zip(&stages_of) {
            match stages.as_slice() {
                [_] => {}
                &[first, second] => {
                    shared.push(SharedParameter { name: parameter.name.clone(), stages: [first, second] });
                }
                others => {
                    let got = format!("{count}, with {} in {} stages", parameter.name, others.len());
                    return Err(refused(got, "every parameter in at most two".to_owned()));
                }
            }
        }
        // Backward completes the last stage first.
        let mut weights = vec![0..0; count];
        for (ordinal, stages) in stages_of.iter().enumerate() {
            let start = layout.parameters[ordinal].offset;
            let end = layout.parameters.get(ordinal + 1).map_or(layout.len, |next| next.offset);
            let range = &mut weights[stages[0]];
            *range = if range.end == 0 { start..end } else { range.start..end };
        }
        if let Some(stage) = weights.iter().position(Range::is_empty) {
            return Err(refused(
                count.to_string(),
                format!("fewer: stage {stage} would have no parameters of its own"),
            ));
        }
        let mut own_statistics = Vec::new();
        let mut at = 0;
        for layers in &layers {
            let len = graph.statistics_of(layers.clone());
            own_statistics.push(at..at + len);
            at += len;
        }
        Ok(Some(Stages {
            received: layers.iter().map(|layers| graph.received_len(layers.start)).collect(),
            statistics: graph.statistics().map(|(name, len)| (name.to_owned(), len)).collect(),
            layers,
            layout,
            weights,
            own_statistics,
            shared,
        }))
    }

    pub fn count(&self) -> usize {
        self.layers.len()
    }

    /// The network of a stage, with memory for the micro-batches that it has begun and not
    /// completed.
    ///
    /// # Errors
    /// The machine lacks the memory.
    pub fn network(&self, training: &Training, stage: usize, cpu: &Cpu) -> Result<Network, TrainError> {
        let graph = training.graph()?.into_stage(self.layers[stage].clone());
        Ok(Network::with_arenas(graph, cpu.clone(), self.in_flight(stage, training.config.batch_merge))?)
    }

    /// Most micro-batches that a stage has begun and not completed.
    pub fn in_flight(&self, stage: usize, merge: u32) -> usize {
        (self.count() - stage).min(merge as usize)
    }
}
