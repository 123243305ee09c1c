//! Pipelines: the network is cut into stages, and each rank has the weights of one.

use super::EngineConfig;
use serde::{Deserialize, Serialize};

/// The pipelines of a job. Its ranks are the stages of one or more pipelines, which train on
/// different samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Pipeline {
    /// At least 2; divides the number of ranks.
    pub stages: u32,
    /// How stages and pipelines are numbered.
    #[serde(default, skip_serializing_if = "RankOrder::is_default")]
    pub order: RankOrder,
}

/// The order of the ranks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum RankOrder {
    /// The stages of a pipeline follow each other.
    #[default]
    ByPipeline,
    /// The ranks of a stage follow each other.
    ByStage,
    /// The ranks of a block of stages and pipelines follow each other, pipeline by pipeline, and so
    /// do the blocks.
    Blocks {
        /// Divides the number of stages.
        stages: u32,
        /// Divides the number of pipelines.
        pipelines: u32,
    },
}

impl RankOrder {
    fn is_default(&self) -> bool {
        *self == RankOrder::default()
    }

    /// The rank of a stage of a pipeline, among this many stages and pipelines.
    pub fn rank(self, stage: u32, replica: u32, all: (u32, u32)) -> u32 {
        let (stages, pipelines) = self.block(all);
        let block = replica / pipelines * (all.0 / stages) + stage / stages;
        block * stages * pipelines + replica % pipelines * stages + stage % stages
    }

    /// The stage and the pipeline of a rank, among this many stages and pipelines.
    fn place(self, rank: u32, all: (u32, u32)) -> (u32, u32) {
        let (stages, pipelines) = self.block(all);
        let (block, within) = (rank / (stages * pipelines), rank % (stages * pipelines));
        let rows = all.0 / stages;
        (block % rows * stages + within % stages, block / rows * pipelines + within / stages)
    }

    /// Stages and pipelines of a block.
    fn block(self, (stages, replicas): (u32, u32)) -> (u32, u32) {
        match self {
            RankOrder::ByPipeline => (stages, 1),
            RankOrder::ByStage => (1, replicas),
            RankOrder::Blocks { stages: own, pipelines } => (own.clamp(1, stages), pipelines.clamp(1, replicas)),
        }
    }
}

/// A rank's place in the pipelines. Without pipelines, each rank is a pipeline of one stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PipelinePlace {
    /// Number of its stage, from 0.
    pub stage: u32,
    /// Number of stages.
    pub stages: u32,
    /// The rank's pipeline.
    pub replica: u32,
    /// Number of pipelines.
    pub replicas: u32,
    order: RankOrder,
}

impl PipelinePlace {
    /// The rank at this place.
    pub fn rank(&self) -> u32 {
        self.rank_of(self.stage, self.replica)
    }

    /// The rank of a stage in the same pipeline.
    pub fn in_stage(&self, stage: u32) -> u32 {
        self.rank_of(stage, self.replica)
    }

    /// The rank of a stage in a pipeline.
    pub fn rank_of(&self, stage: u32, replica: u32) -> u32 {
        self.order.rank(stage, replica, (self.stages, self.replicas))
    }

    /// The ranks of this stage, ascending: they hold the same weights.
    pub fn stage_ranks(&self) -> impl Iterator<Item = u32> + use<> {
        let place = *self;
        (0..self.replicas).map(move |replica| place.rank_of(place.stage, replica))
    }

    /// The stage before, in the same pipeline.
    pub fn previous(&self) -> Option<u32> {
        self.stage.checked_sub(1).map(|stage| self.in_stage(stage))
    }

    /// The stage after, in the same pipeline.
    pub fn next(&self) -> Option<u32> {
        (self.stage + 1 < self.stages).then(|| self.in_stage(self.stage + 1))
    }
}

impl Pipeline {
    /// The place of one of `world` ranks.
    pub fn place(&self, rank: u32, world: u32) -> PipelinePlace {
        let Pipeline { stages, order } = *self;
        let replicas = (world / stages.max(1)).max(1);
        let (stage, replica) = order.place(rank, (stages.max(1), replicas));
        PipelinePlace { stage, stages, replica, replicas, order }
    }
}

impl EngineConfig {
    /// Number of stages of a pipeline; 1 without pipelines.
    pub fn stages(&self) -> u32 {
        self.pipeline.map_or(1, |pipeline| pipeline.stages.max(1))
    }

    /// Number of pipelines of `world` ranks, which train on different samples.
    pub fn replicas(&self, world: u32) -> u32 {
        world / self.stages()
    }

    /// The place of one of `world` ranks.
    pub fn place(&self, rank: u32, world: u32) -> PipelinePlace {
        self.pipeline.unwrap_or(Pipeline { stages: 1, order: RankOrder::default() }).place(rank, world)
    }
}

/// Share of a step in which a stage waits for others, if all stages take equally long and messages
/// no time (Huang et al. 2019, "GPipe"). `merge`: micro-batches of a step.
pub fn idle_share(stages: u32, merge: u32) -> f64 {
    let idle = f64::from(stages.saturating_sub(1));
    idle / (idle + f64::from(merge))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_has_one_place() {
        let blocks = RankOrder::Blocks { stages: 2, pipelines: 2 };
        for order in [RankOrder::ByPipeline, RankOrder::ByStage, blocks] {
            for (stages, replicas) in [(1, 3), (2, 1), (2, 4), (3, 2), (4, 6)] {
                if order == blocks && (stages % 2 == 1 || replicas % 2 == 1) {
                    continue;
                }
                for rank in 0..stages * replicas {
                    let place = Pipeline { stages, order }.place(rank, stages * replicas);
                    assert_eq!((place.rank(), place.stages, place.replicas), (rank, stages, replicas), "{order:?}");
                    assert!(place.stage_ranks().any(|other| other == rank), "{order:?}");
                }
            }
        }
    }

    #[test]
    fn neighbours_are_in_the_same_pipeline() {
        let place = PipelinePlace { stage: 1, stages: 3, replica: 1, replicas: 2, order: RankOrder::ByPipeline };
        assert_eq!((place.previous(), place.next()), (Some(3), Some(5)));
        assert_eq!(place.stage_ranks().collect::<Vec<_>>(), [1, 4]);
        let place = PipelinePlace { order: RankOrder::ByStage, ..place };
        assert_eq!((place.previous(), place.next()), (Some(1), Some(5)));
        assert_eq!(place.stage_ranks().collect::<Vec<_>>(), [2, 3]);
        // Ranks 0 to 3 are stages 0 and 1 of pipelines 0 and 1.
        let blocks = Pipeline { stages: 4, order: RankOrder::Blocks { stages: 2, pipelines: 2 } };
        let third = blocks.place(3, 16);
        assert_eq!((third.stage, third.replica, third.previous(), third.next()), (1, 1, Some(2), Some(6)));
        assert_eq!(third.stage_ranks().collect::<Vec<_>>(), [1, 3, 9, 11]);
        let first = PipelinePlace { stage: 0, ..place };
        let last = PipelinePlace { stage: 2, ..place };
        assert_eq!((first.previous(), last.next()), (None, None));
    }

    #[test]
    fn more_micro_batches_leave_less_idle() {
        assert_eq!([idle_share(1, 4), idle_share(2, 3), idle_share(4, 9)], [0.0, 0.25, 0.25]);
    }
}
