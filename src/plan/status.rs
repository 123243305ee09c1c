//! Computes a job's next status as changes to the previous one. Both executors use it. It touches
//! only what changes, so that transition times and counters persist.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use switchyard_crds::conditions::{self, Stage};
use switchyard_crds::{NodeCounts, SlowestRank, ThroughputUnit, TrainJob, TrainJobStatus, TrainerStatus};
use switchyard_worker_contract::event::{GpuTrouble, Item, Slowest, Summary};
use switchyard_worker_contract::gpu::GpuFault;

/// Maximum length of a condition message, in characters: enough for one sentence with a cause.
const MAX_MESSAGE: usize = 1024;

/// A status under construction.
#[derive(Debug)]
pub struct Draft<'a> {
    pub(crate) job: &'a TrainJob,
    now: Timestamp,
    pub next: TrainJobStatus,
}

/// Outcome of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ending {
    complete: bool,
    reason: &'static str,
    message: String,
}

impl Ending {
    pub fn complete(message: String) -> Ending {
        Ending { complete: true, reason: Stage::Complete.reason(), message }
    }

    /// `reason` is one of the constants in [`conditions`].
    pub fn failed(reason: &'static str, message: String) -> Ending {
        Ending { complete: false, reason, message }
    }

    pub fn is_complete(&self) -> bool {
        self.complete
    }

    pub fn message(&self) -> &str {
        &self.message
    }
}

/// Truncates to whole seconds, the resolution of API times.
pub fn time(at: Timestamp) -> Time {
    Time(Timestamp::from_second(at.as_second()).unwrap_or(at))
}

/// Reason of a condition.
pub fn reason_of<'a>(status: &'a TrainJobStatus, kind: &str) -> Option<&'a str> {
    status.condition(kind).map(|condition| condition.reason.as_str())
}

/// Message of a condition.
pub fn message_of<'a>(status: &'a TrainJobStatus, kind: &str) -> Option<&'a str> {
    status.condition(kind).map(|condition| condition.message.as_str())
}

/// Whether the job is complete or failed.
pub fn is_over(status: &TrainJobStatus) -> bool {
    status.is(conditions::COMPLETE) || status.is(conditions::FAILED)
}

impl<'a> Draft<'a> {
    /// Starts from the job's current status.
    pub fn new(job: &'a TrainJob, now: Timestamp) -> Draft<'a> {
        let mut next = job.status.clone().unwrap_or_default();
        next.observed_generation = job.metadata.generation;
        next.conditions.retain(|condition| condition.type_ != conditions::READABLE);
        Draft { job, now, next }
    }

    /// Continues from a status that another draft has produced.
    pub(crate) fn of(job: &'a TrainJob, next: TrainJobStatus, now: Timestamp) -> Draft<'a> {
        Draft { job, now, next }
    }

    /// Sets a condition. Its transition time changes only with its status.
    pub fn condition(&mut self, kind: &str, state: &str, reason: &str, message: String) {
        let message: String = message.chars().take(MAX_MESSAGE).collect();
        let generation = self.job.metadata.generation;
        let position = self.next.conditions.iter().position(|condition| condition.type_ == kind);
        let position = position.unwrap_or_else(|| {
            self.next.conditions.push(Condition {
                type_: kind.to_string(),
                status: String::new(),
                reason: String::new(),
                message: String::new(),
                last_transition_time: time(self.now),
                observed_generation: generation,
            });
            self.next.conditions.len() - 1
        });
        let condition = &mut self.next.conditions[position];
        if condition.status != state {
            condition.last_transition_time = time(self.now);
        }
        condition.status = state.to_string();
        condition.reason = reason.to_string();
        condition.message = message;
        condition.observed_generation = generation;
    }

    /// Sets a condition with an explicit transition time.
    pub(crate) fn condition_since(&mut self, kind: &str, state: &str, reason: &str, message: String, since: Timestamp) {
        self.condition(kind, state, reason, message);
        let set = self.next.conditions.iter_mut().filter(|condition| condition.type_ == kind);
        set.for_each(|condition| condition.last_transition_time = time(since));
    }

    pub(crate) fn remove_condition(&mut self, kind: &str) {
        self.next.conditions.retain(|condition| condition.type_ != kind);
    }

    /// Sets the summary condition.
    pub fn stage(&mut self, stage: Stage, message: String) {
        let state = match stage {
            Stage::Complete => "True",
            Stage::Failed => "False",
            _ => "Unknown",
        };
        if !matches!(stage, Stage::Starting | Stage::Running) {
            let progress_conditions = [conditions::PROGRESSING, conditions::STRAGGLER];
            for kind in progress_conditions {
                if self.next.is(kind) {
                    self.condition(kind, "False", stage.reason(), message.clone());
                }
            }
        }
        if stage != Stage::Queued {
            self.remove_condition(conditions::NODES_REQUESTED);
        }
        if !matches!(stage, Stage::Placing | Stage::Restarting | Stage::Failed) {
            self.remove_condition(conditions::PODS_CREATED);
        }
        self.condition(conditions::SUCCEEDED, state, stage.reason(), message);
    }

    /// Ends the job. A repeated call keeps the first completion time.
    pub fn end(&mut self, ending: Ending) {
        if !is_over(&self.next) {
            self.stop();
        }
        // A finished job has no ready pods, and `0/2` would look like a failure.
        self.next.ready = None;
        let Ending { complete, reason, message } = ending;
        let (stage, kind) =
            if complete { (Stage::Complete, conditions::COMPLETE) } else { (Stage::Failed, conditions::FAILED) };
        self.stage(stage, message.clone());
        self.condition(kind, "True", reason, message);
    }

    /// Sets the completion time to now, but never before the start, even if the clock was set back.
    pub fn stop(&mut self) {
        let start = self.next.start_time.as_ref().map_or(self.now, |start| start.0);
        self.next.completion_time = Some(time(self.now.max(start)));
    }

    pub(crate) fn counts(&mut self, counts: NodeCounts) {
        self.next.ready = Some(format!("{}/{}", counts.ready, counts.desired));
        self.next.nodes = Some(counts);
    }

    /// Sets the counts to zero because nothing runs any more.
    pub(crate) fn clear_running(&mut self) {
        if let Some(counts) = self.next.nodes.take() {
            self.counts(NodeCounts { ready: 0, active: 0, ..counts });
        }
        for role in &mut self.next.roles {
            (role.counts.ready, role.counts.active) = (0, 0);
        }
    }

    /// Copies figures. A newer time alone does not count as a change.
    pub fn figures(&mut self, figures: &Summary, at: Timestamp) {
        let next = trainer_status(figures, at);
        let without_time = |status: &TrainerStatus| TrainerStatus { last_updated_time: None, ..status.clone() };
        let previous = self.next.trainer_status.as_ref();
        let is_step = previous.is_none_or(|previous| previous.step != next.step);
        if previous.is_none_or(|previous| without_time(previous) != without_time(&next)) {
            self.next.trainer_status = Some(next);
        }
        self.progressing(figures, is_step);
        if is_step {
            self.straggler(figures.slowest.filter(Slowest::is_straggler));
        }
        self.gpu_fault(figures.gpu);
    }

    /// Reports whether training makes progress. `is_step`: there is a new step. Only the state
    /// causes a write of its own. The rest changes with the figures.
    fn progressing(&mut self, figures: &Summary, is_step: bool) {
        let hung = reason_of(&self.next, conditions::PROGRESSING) == Some(conditions::HUNG);
        if let Some(stuck) = figures.stuck {
            let more = if stuck.ranks > 1 { format!(" ({} ranks are hung)", stuck.ranks) } else { String::new() };
            let since =
                Timestamp::from_second(i64::try_from(stuck.since).unwrap_or(i64::MAX)).unwrap_or(Timestamp::MAX);
            let rank = self.rank_on_node(stuck.rank, stuck.node_rank);
            let message =
                format!("{rank} has been hung since {since} in {}{more}; the job keeps waiting", stuck.doing());
            self.condition(conditions::PROGRESSING, "False", conditions::HUNG, message);
        } else if is_step || hung {
            let message = format!("step {} of {}", figures.step, figures.total_steps);
            self.condition(conditions::PROGRESSING, "True", conditions::STEPS_MADE, message);
        }
    }

    /// Reports which rank is a straggler, and when there is none any more. The slowdown is only in
    /// the figures, because a condition that contained it would change constantly.
    fn straggler(&mut self, straggler: Option<Slowest>) {
        if let Some(slowest) = straggler {
            let message = format!(
                "{} computes and reads at least {} % longer than the median of the other ranks, which wait for it",
                self.rank_on_node(slowest.rank, slowest.node_rank),
                Slowest::PERCENT
            );
            self.condition(conditions::STRAGGLER, "True", conditions::SLOW_RANK, message);
        } else if self.next.is(conditions::STRAGGLER) {
            let message = format!("no rank is {} % slower than the median any longer", Slowest::PERCENT);
            self.condition(conditions::STRAGGLER, "False", conditions::EVEN_PACE, message);
        }
    }

    /// Reports which GPU needs attention, and when none does any more.
    fn gpu_fault(&mut self, gpu: Option<GpuTrouble>) {
        if let Some(gpu) = gpu {
            let reason = match gpu.trouble {
                GpuFault::Xid { .. } => conditions::XID_ERROR,
                GpuFault::Lost => conditions::GPU_LOST,
                GpuFault::MemoryErrors => conditions::MEMORY_ERRORS,
                GpuFault::Slowed { .. } => conditions::LOWERED_CLOCKS,
                GpuFault::NarrowLink { .. } => conditions::NARROW_LINK,
            };
            let message = format!("{}, {}", self.rank_on_node(gpu.rank, gpu.node_rank), gpu.what());
            self.condition(conditions::GPU_TROUBLE, "True", reason, message);
        } else if self.next.is(conditions::GPU_TROUBLE) {
            let message = "the driver reports no GPU problem in this attempt".to_owned();
            self.condition(conditions::GPU_TROUBLE, "False", conditions::GPUS_WELL, message);
        }
    }

    /// A rank and its node, by name if known.
    fn rank_on_node(&self, rank: u32, node_rank: u32) -> String {
        let nodes = self.next.placement.as_ref().map_or(&[][..], |placement| &placement.nodes);
        let name = nodes.get(node_rank as usize).map(|node| node.node_name.as_str()).filter(|name| !name.is_empty());
        name.map_or_else(|| format!("rank {rank} on node {node_rank}"), |name| format!("rank {rank} on {name}"))
    }
}

fn trainer_status(figures: &Summary, at: Timestamp) -> TrainerStatus {
    TrainerStatus {
        step: figures.step as i64,
        total_steps: figures.total_steps as i64,
        progress_percentage: (100 * figures.step / figures.total_steps.max(1)) as i32,
        loss: Some(format!("{:.4}", figures.loss)),
        validation_loss: figures.validation_loss.map(|loss| format!("{loss:.4}")),
        validation_accuracy: figures.accuracy.map(|share| format!("{share:.4}")),
        // For large models a machine may process less than a few samples per second.
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
        slowest: figures.slowest.map(|slowest| SlowestRank {
            rank: slowest.rank as i32,
            node_rank: slowest.node_rank as i32,
            over_median_percent: format!("{:.1}", slowest.over_percent),
        }),
        last_updated_time: Some(time(at)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use switchyard_crds::{PlacedNode, PlacementStatus};

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(1_795_000_000 + second).unwrap()
    }

    #[test]
    fn a_condition_keeps_its_time_until_it_changes() {
        let mut job = crate::job::tests::job("life", serde_json::json!({}));
        let mut step = |second: i64, change: &dyn Fn(&mut Draft<'_>)| {
            let mut draft = Draft::new(&job, at(second));
            change(&mut draft);
            let next = draft.next;
            job.status = Some(next.clone());
            next
        };
        let waits = |draft: &mut Draft<'_>| {
            draft.stage(Stage::Placing, "waits".into());
            draft.condition(conditions::PLACED, "False", conditions::NO_ROOM, "needs 2 nodes, 1 present".into());
        };
        let first = step(0, &waits);
        let second = step(9, &waits);
        assert_eq!(first.conditions, second.conditions);
        let fails = |draft: &mut Draft<'_>| draft.end(Ending::failed(conditions::APPLICATION_FAILURE, "no".into()));
        let failed = step(12, &fails);
        assert_eq!(failed.conditions[0].last_transition_time.0, at(12));
        assert_eq!(failed.completion_time.as_ref().unwrap().0, at(12));
        let later = step(20, &fails);
        assert_eq!(later.completion_time.unwrap().0, at(12), "the end is written once");
    }

    #[test]
    fn the_straggler_condition_changes_with_the_rank_only() {
        let mut job = crate::job::tests::job("life", serde_json::json!({}));
        let figures = |step, slowest| Summary {
            step,
            total_steps: 900,
            loss: 2.0,
            validation_loss: None,
            accuracy: None,
            loss_scale: None,
            skipped_steps: None,
            slowest,
            stuck: None,
            gpu: None,
            items_per_second: 10.0,
            item: Item::Tokens,
            remaining_seconds: None,
            communication_percent: 1.0,
            input_percent: 0.0,
        };
        let slow = |rank, over_percent| Some(Slowest { rank, node_rank: rank / 2, over_percent, steps: 100 });
        let mut step = |step: u64, slowest| {
            let mut draft = Draft::new(&job, at(step as i64));
            let node =
                |first_rank, name: &str| PlacedNode { first_rank, node_name: name.into(), ..PlacedNode::default() };
            let nodes = vec![node(0, "a"), node(2, "b")];
            draft.next.placement = Some(PlacementStatus { nodes, ..PlacementStatus::default() });
            draft.figures(&figures(step, slowest), at(step as i64));
            let next = draft.next;
            job.status = Some(next.clone());
            let slowest = next.trainer_status.clone().unwrap().slowest.unwrap();
            let condition = next.condition(conditions::STRAGGLER).cloned();
            (slowest, condition.map(|c| (c.status, c.reason, c.message, c.last_transition_time.0)))
        };
        let (slowest, condition) = step(100, slow(3, 14.9));
        assert_eq!((slowest.rank, slowest.node_rank, slowest.over_median_percent.as_str()), (3, 1, "14.9"));
        assert_eq!(condition, None, "not set");
        let (_, first) = step(200, slow(3, 15.0));
        let (state, reason, message, since) = first.clone().unwrap();
        assert_eq!((state.as_str(), reason.as_str(), since), ("True", "SlowRank", at(200)));
        assert!(
            message.starts_with("rank 3 on b computes and reads at least 15 % longer than the median"),
            "{message}"
        );
        assert_eq!(step(300, slow(3, 40.0)).1, first);
        assert!(step(400, slow(0, 40.0)).1.unwrap().2.starts_with("rank 0 on a "));
        let (state, reason, _, since) = step(500, slow(0, 3.0)).1.unwrap();
        assert_eq!((state.as_str(), reason.as_str(), since), ("False", "EvenPace", at(500)));
    }

    #[test]
    fn the_worst_gpu_fault_is_a_condition() {
        let mut job = crate::job::tests::job("life", serde_json::json!({}));
        let mut step = |step: u64, gpu: serde_json::Value| {
            let mut draft = Draft::new(&job, at(step as i64));
            let nodes = vec![PlacedNode { node_name: "a".into(), ..PlacedNode::default() }];
            draft.next.placement = Some(PlacementStatus { nodes, ..PlacementStatus::default() });
            let figures = serde_json::json!({"step": step, "totalSteps": 900, "loss": 2.0, "itemsPerSecond": 10.0,
                "communicationPercent": 1.0, "inputPercent": 0.0, "gpu": gpu});
            draft.figures(&serde_json::from_value(figures).unwrap(), at(step as i64));
            let next = draft.next;
            job.status = Some(next.clone());
            let condition = next.condition(conditions::GPU_TROUBLE).cloned();
            condition.map(|c| (c.status, c.reason, c.message, c.last_transition_time.0))
        };
        let gpu = |trouble: serde_json::Value| serde_json::json!({"rank": 1, "nodeRank": 0, "bus": "0000:17:00.0", "trouble": trouble});
        let expected = |state: &str, reason: &str, message: &str, since: i64| {
            Some((state.to_owned(), reason.to_owned(), message.to_owned(), at(since)))
        };
        assert_eq!(step(1, serde_json::Value::Null), None, "not set");
        let lowered = "rank 1 on a, GPU 0000:17:00.0: clocks are lowered by temperature";
        let slowed = gpu(serde_json::json!({"kind": "slowed", "by": "temperature"}));
        assert_eq!(step(2, slowed.clone()), expected("True", "LoweredClocks", lowered, 2));
        assert_eq!(step(3, slowed), expected("True", "LoweredClocks", lowered, 2));
        let xid = gpu(serde_json::json!({"kind": "xid", "xid": 79}));
        let message = "rank 1 on a, GPU 0000:17:00.0: XID 79 (GPU has fallen off the bus)";
        assert_eq!(step(4, xid), expected("True", "XidError", message, 2), "the state has not changed");
        let well = "the driver reports no GPU problem in this attempt";
        assert_eq!(step(5, serde_json::Value::Null), expected("False", "GPUsWell", well, 5));
    }

    #[test]
    fn messages_are_truncated_and_times_have_whole_seconds() {
        let job = crate::job::tests::job("life", serde_json::json!({}));
        let mut draft = Draft::new(&job, at(1).saturating_add(jiff::SignedDuration::from_millis(7)).unwrap());
        draft.stage(Stage::Running, "ä".repeat(2 * MAX_MESSAGE));
        let condition = &draft.next.conditions[0];
        assert_eq!((condition.message.chars().count(), condition.last_transition_time.0), (MAX_MESSAGE, at(1)));
    }
}
