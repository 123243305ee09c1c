//! The status of a job from what was observed: conditions, placement, figures. Pure.

use crate::local::LocalPlan;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use switchyard_crds::conditions::{self, Stage};
use switchyard_crds::{PlacedNode, PlacementStatus, Restarts, ThroughputUnit, TrainJobStatus, TrainerStatus};
use switchyard_worker_contract::event::{Item, Summary};

/// What is known about a job at one moment.
#[derive(Debug, Clone)]
pub struct Observed<'a> {
    /// Stage of the job.
    pub stage: Stage,
    /// One sentence about the stage; the root cause for `Failed`.
    pub message: String,
    /// Generation of the spec.
    pub generation: Option<i64>,
    /// Attempt number; `None` before the first.
    pub attempt: Option<u32>,
    /// Restarts so far.
    pub restarts: u32,
    /// Start of the first attempt.
    pub start: Option<Timestamp>,
    /// The plan of the current attempt.
    pub plan: Option<&'a LocalPlan>,
    /// Why there is no placement.
    pub not_placeable: Option<String>,
    /// The last figures.
    pub figures: Option<Figures>,
}

/// Figures of a running job, folded over its ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Figures {
    /// Optimizer steps done.
    pub step: u64,
    /// Optimizer steps in all.
    pub total_steps: u64,
    /// Mean training loss of the last interval, nats.
    pub loss: f64,
    /// Last validation loss, nats.
    pub validation_loss: Option<f64>,
    /// Share of the validation split classified right, where the model classifies.
    pub accuracy: Option<f64>,
    /// Items per second of the whole job.
    pub items_per_second: f64,
    /// What is counted.
    pub item: Item,
    /// Factor of the loss, with mixed precision.
    pub loss_scale: Option<f64>,
    /// Steps skipped because of an overflow, with mixed precision.
    pub skipped_steps: Option<u64>,
    /// Seconds until the last step; `None` while too little is known.
    pub remaining_seconds: Option<f64>,
    /// Share of the step time the slowest rank waits for reductions, percent.
    pub communication_percent: f64,
    /// Share of the step time the slowest rank waits for input, percent.
    pub input_percent: f64,
    /// Time of the report.
    pub at: Timestamp,
}

impl Figures {
    /// Figures folded over ranks: here, or by the supervisor of a pod.
    pub fn of(summary: &Summary, at: Timestamp) -> Figures {
        Figures {
            step: summary.step,
            total_steps: summary.total_steps,
            loss: summary.loss,
            validation_loss: summary.validation_loss,
            accuracy: summary.accuracy,
            items_per_second: summary.items_per_second,
            item: summary.item,
            loss_scale: summary.loss_scale,
            skipped_steps: summary.skipped_steps,
            remaining_seconds: summary.remaining_seconds,
            communication_percent: summary.communication_percent,
            input_percent: summary.input_percent,
            at,
        }
    }
}

/// Makes the status. Transition times of `previous` are kept where the condition's status has not changed.
pub fn status(observed: &Observed<'_>, previous: Option<&TrainJobStatus>, now: Timestamp) -> TrainJobStatus {
    let terminal = matches!(observed.stage, Stage::Complete | Stage::Failed | Stage::Suspended);
    let mut found = Vec::new();
    let mut set = |kind: &str, state: &str, reason: &str, message: String| {
        let before = previous.and_then(|status| status.conditions.iter().find(|condition| condition.type_ == kind));
        let since =
            before.filter(|condition| condition.status == state).map_or(Time(now), |c| c.last_transition_time.clone());
        found.push(Condition {
            type_: kind.to_string(),
            status: state.to_string(),
            reason: reason.to_string(),
            message,
            last_transition_time: since,
            observed_generation: observed.generation,
        });
    };
    let summary = match observed.stage {
        Stage::Complete => "True",
        Stage::Failed => "False",
        _ => "Unknown",
    };
    set(conditions::SUCCEEDED, summary, observed.stage.reason(), observed.message.clone());
    match observed.stage {
        Stage::Complete => set(conditions::COMPLETE, "True", "Complete", observed.message.clone()),
        Stage::Failed => set(conditions::FAILED, "True", "Failed", observed.message.clone()),
        _ => {}
    }
    match (observed.plan, &observed.not_placeable) {
        (_, Some(why)) => set(conditions::PLACED, "False", "NotPlaceable", why.clone()),
        (Some(plan), None) => set(conditions::PLACED, "True", "Placed", plan.reason.clone()),
        (None, None) => {}
    }
    TrainJobStatus {
        observed_generation: observed.generation,
        start_time: observed.start.map(Time),
        completion_time: match previous.and_then(|status| status.completion_time.clone()) {
            Some(time) => Some(time),
            None => terminal.then_some(Time(now)),
        },
        attempt: observed.attempt.map(|attempt| attempt as i32),
        conditions: found,
        restarts: observed.attempt.map(|_| Restarts {
            application: observed.restarts as i32,
            total: observed.restarts as i32,
            ..Restarts::default()
        }),
        attempt_time: None,
        ready: None,
        nodes: None,
        placement: observed.plan.map(placement),
        fabric: None,
        device_allocation: None,
        trainer_status: observed.figures.as_ref().map(trainer_status),
    }
}

fn placement(plan: &LocalPlan) -> PlacementStatus {
    PlacementStatus {
        reason: plan.reason.clone(),
        nodes: plan
            .nodes
            .iter()
            .map(|node| {
                let mut numa_nodes: Vec<i32> =
                    node.processes.iter().flat_map(|process| process.numa_nodes.iter().map(|id| *id as i32)).collect();
                numa_nodes.sort_unstable();
                numa_nodes.dedup();
                PlacedNode {
                    first_rank: node.first_rank as i32,
                    node_name: node.node_name.clone(),
                    cpus: node.processes.iter().filter_map(|process| process.cpus.clone()).collect(),
                    numa_nodes,
                    ..PlacedNode::default()
                }
            })
            .collect(),
        ..PlacementStatus::default()
    }
}

pub(super) fn trainer_status(figures: &Figures) -> TrainerStatus {
    TrainerStatus {
        step: figures.step as i64,
        total_steps: figures.total_steps as i64,
        progress_percentage: (100 * figures.step / figures.total_steps.max(1)) as i32,
        loss: Some(format!("{:.4}", figures.loss)),
        validation_loss: figures.validation_loss.map(|loss| format!("{loss:.4}")),
        validation_accuracy: figures.accuracy.map(|share| format!("{share:.4}")),
        // Of large models less than a few samples a second pass through a machine.
        throughput: Some(match figures.items_per_second {
            few if few < 100.0 => format!("{few:.2}"),
            many => format!("{many:.0}"),
        }),
        throughput_unit: Some(match figures.item {
            Item::Tokens => ThroughputUnit::Tokens,
            Item::Images => ThroughputUnit::Images,
            Item::Samples => ThroughputUnit::Samples,
        }),
        skipped_steps: figures.skipped_steps.map(|steps| steps as i64),
        estimated_remaining_seconds: figures.remaining_seconds.map(|seconds| seconds.ceil() as i64),
        exposed_communication_percent: Some(format!("{:.1}", figures.communication_percent)),
        input_wait_percent: Some(format!("{:.1}", figures.input_percent)),
        last_updated_time: Some(Time(figures.at)),
    }
}
