//! Where and when a training run saves its state.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Where and when the state of the training is saved. A run whose directory holds checkpoints of
/// the same job resumes from the newest complete one.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("!has(self.volumeName) || self.path.startsWith('/')")
    .message("path must begin with / when volumeName is set: the volume is mounted there").field_path(".path"))]
pub struct Checkpoint {
    /// Name of a volume of the template, which is mounted at `path` in the trainer container. With
    /// several nodes, all of them must be able to write to it. Default: no volume is mounted; the
    /// template must mount one. Ignored by `switchyard run`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63))]
    pub volume_name: Option<String>,

    /// Directory of the checkpoints: in a cluster a path in the container, in `switchyard run` a
    /// path on this machine, relative to the current directory unless it begins with `/`.
    #[schemars(length(min = 1, max = 4096))]
    pub path: String,

    /// Seconds between two checkpoints; 0 disables saving by time. Default 600.
    #[serde(default = "six_hundred")]
    #[schemars(range(min = 0, max = 1_000_000_000))]
    pub period_seconds: i64,

    /// Steps between two checkpoints; 0 disables saving by steps. Default 0. If both are set,
    /// whichever comes first.
    #[serde(default)]
    #[schemars(range(min = 0, max = 1_000_000_000))]
    pub every_steps: i64,

    /// Number of complete checkpoints to keep; older ones are deleted. Default 2: a spare in case
    /// the newest is damaged.
    #[serde(default = "two")]
    #[schemars(range(min = 1, max = 1000))]
    pub keep: i32,

    /// `Save` (default): a checkpoint is written within the grace period when the job is suspended
    /// or stopped. `Discard`: progress since the last checkpoint is lost.
    #[serde(default)]
    pub on_suspend: OnSuspend,
}

/// What happens to the steps since the last checkpoint when a job is suspended or stopped.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum OnSuspend {
    /// Save them in a final checkpoint.
    #[default]
    Save,
    /// Discard progress since the last checkpoint.
    Discard,
}

fn six_hundred() -> i64 {
    600
}
fn two() -> i32 {
    2
}
