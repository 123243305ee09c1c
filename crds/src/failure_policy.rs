//! Reaction to a failed process of a TrainJob.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Reaction to a failed process. A failure has a class: `application` (the program),
/// `infrastructure` (the node or the image: node lost, eviction, out of memory, image pull) or
/// `preemption`. Each class has its own restart budget.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FailurePolicy {
    /// Maximum number of restarts of the whole group after application failures. Default 0. Invalid
    /// data, an invalid manifest or a non-finite loss causes no restart, because it would fail
    /// again.
    #[serde(default)]
    #[schemars(range(min = 0, max = 1000))]
    pub max_restarts: i32,

    /// Maximum number of restarts within 24 hours after infrastructure failures. Default 10.
    /// Ignored by `switchyard run`.
    #[serde(default = "ten")]
    #[schemars(range(min = 0, max = 1000))]
    pub max_infrastructure_restarts: i32,

    /// Maximum number of restarts within 24 hours after preemptions, including those to leave a
    /// cordoned node. Default 100. Ignored by `switchyard run`.
    #[serde(default = "one_hundred")]
    #[schemars(range(min = 0, max = 10000))]
    pub max_preemption_restarts: i32,

    /// Seconds without progress after which a rank of the engine counts as hung. Default 600;
    /// within a step, once twenty steps are done, ten times their median and at least 30. Slow
    /// input, validation and checkpoints count as progress while they advance.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 604_800))]
    pub progress_timeout_seconds: Option<i32>,

    /// Reaction to a hung rank of the engine. `Restart`: the attempt fails with exit code 10,
    /// within `maxRestarts`. `Report`: its log reports the hang, and the job keeps waiting. Default
    /// `Restart`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_hang: Option<OnHang>,

    /// Rules that are checked before the budgets, against the pod that failed first. The first
    /// match decides. Ignored by `switchyard run`.
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

/// Reaction to a hung rank of the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum OnHang {
    /// The attempt fails, and the next one starts within the budget.
    Restart,
    /// The log reports the hang, and the job keeps waiting.
    Report,
}

/// Action of a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum FailureAction {
    /// The job fails at once.
    FailTrainJob,
    /// The group restarts within the budget of the failure's class.
    RestartTrainJob,
    /// The group restarts, and no budget is charged.
    RestartTrainJobAndIgnoreMaxRestarts,
}

/// A rule about the pod that failed first.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.onExitCodes) != has(self.onPodCondition)")
    .message("set exactly one of onExitCodes and onPodCondition"))]
pub struct FailureRule {
    /// Action if the rule matches.
    pub action: FailureAction,

    /// Matches the exit code of the trainer container.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_exit_codes: Option<OnExitCodes>,

    /// Matches a pod condition that is `True`, such as `DisruptionTarget`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_pod_condition: Option<OnPodCondition>,
}

/// How the exit code is compared with the values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ExitCodeOperator {
    /// The code is one of the values.
    In,
    /// The code is neither 0 nor one of the values.
    NotIn,
}

/// Matches an exit code.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OnExitCodes {
    /// How the exit code is compared with the values.
    pub operator: ExitCodeOperator,

    /// Exit codes.
    #[schemars(length(min = 1, max = 255), inner(range(min = 1, max = 255)))]
    #[x_kube(merge_strategy = kube::core::ListMerge::Set)]
    pub values: Vec<i32>,
}

/// Matches a pod condition.
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
