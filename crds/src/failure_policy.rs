//! What happens when a process of a TrainJob fails.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What happens when a process fails. A failure has a class: `application` (the program), `infrastructure` (the node or the image:
/// node lost, eviction, out of memory, image pull) or `preemption`. Each class has a budget of its own.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FailurePolicy {
    /// How many times the whole group is restarted after a failure of the application. Default 0. There is no restart for wrong
    /// data, a wrong manifest or a loss that is not finite, which would fail again.
    #[serde(default)]
    #[schemars(range(min = 0, max = 1000))]
    pub max_restarts: i32,

    /// How many times within 24 hours the group is restarted after a failure of the infrastructure. Default 10. No effect in `switchyard run`.
    #[serde(default = "ten")]
    #[schemars(range(min = 0, max = 1000))]
    pub max_infrastructure_restarts: i32,

    /// How many times within 24 hours the group is restarted after a preemption, or to leave a cordoned node. Default 100. No effect in
    /// `switchyard run`.
    #[serde(default = "one_hundred")]
    #[schemars(range(min = 0, max = 10000))]
    pub max_preemption_restarts: i32,

    /// Seconds without progress after which a rank of the engine counts as hung. Without it: 600; within a step, once twenty are done,
    /// ten times their median and at least 30. Slow input, validation and checkpoints that move on are progress.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 604_800))]
    pub progress_timeout_seconds: Option<i32>,

    /// What follows if a rank of the engine hangs. `Restart`: the attempt fails with exit code 10, within `maxRestarts`. `Report`:
    /// its log says so, and the job goes on waiting. Default `Restart`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_hang: Option<OnHang>,

    /// Rules that are checked before the budgets; the first that matches the pod that failed first decides. No effect in
    /// `switchyard run`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 20))]
    #[x_kube(merge_strategy = kube::core::ListMerge::Atomic)]
    pub rules: Vec<FailureRule>,
}

impl Default for FailurePolicy {
    fn default() -> Self {
        FailurePolicy {
            max_restarts: 0,
            max_infrastructure_restarts: 10,
            max_preemption_restarts: 100,
            progress_timeout_seconds: None,
            on_hang: None,
            rules: Vec::new(),
        }
    }
}

/// What follows if a rank of the engine hangs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum OnHang {
    /// The attempt fails, and the next one starts within the budget.
    Restart,
    /// The log says so, and the job goes on waiting.
    Report,
}

/// What a rule does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum FailureAction {
    /// The job fails at once.
    FailTrainJob,
    /// The group is started again within the budget of the failure's class.
    RestartTrainJob,
    /// The group is started again, and no budget is charged.
    RestartTrainJobAndIgnoreMaxRestarts,
}

/// A rule over the pod that failed first.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.onExitCodes) != has(self.onPodCondition)")
    .message("set exactly one of onExitCodes and onPodCondition"))]
pub struct FailureRule {
    /// What to do when the rule matches.
    pub action: FailureAction,

    /// Matches by the exit code of the trainer container.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_exit_codes: Option<OnExitCodes>,

    /// Matches by a condition of the pod that is `True`, such as `DisruptionTarget`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_pod_condition: Option<OnPodCondition>,
}

/// Whether the code must be among the values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ExitCodeOperator {
    /// The code is one of the values.
    In,
    /// The code is not 0 and none of the values.
    NotIn,
}

/// Matches by exit code.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OnExitCodes {
    /// Whether the code must be among the values.
    pub operator: ExitCodeOperator,

    /// Exit codes.
    #[schemars(length(min = 1, max = 255), inner(range(min = 1, max = 255)))]
    #[x_kube(merge_strategy = kube::core::ListMerge::Set)]
    pub values: Vec<i32>,
}

/// Matches by a condition of the pod.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OnPodCondition {
    /// Type of the condition.
    #[serde(rename = "type")]
    #[schemars(length(min = 1, max = 316))]
    pub kind: String,
}

fn ten() -> i32 {
    10
}
fn one_hundred() -> i32 {
    100
}
