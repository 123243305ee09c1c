//! What the ranks exchange, and in which steps.

use super::DECIMAL;
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What the ranks exchange, and in which steps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum SyncType {
    /// Gradients, in every step.
    #[default]
    EveryStep,
    /// Weights, every few steps.
    Local,
}

/// What the ranks exchange, and in which steps.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("(self.type == 'Local') == has(self.everySteps)")
    .message("everySteps must be set with type Local, and with no other").field_path(".everySteps"))]
#[x_kube(validation = Rule::new("self.type == 'Local' || !has(self.outerOptimizer)")
    .message("outerOptimizer is for type Local").field_path(".outerOptimizer"))]
pub struct SyncPolicy {
    /// `EveryStep` (default): ranks reduce their gradients in every step. `Local`: each rank takes
    /// `everySteps` optimizer steps on its own data, then the ranks average their weights. This
    /// divides the traffic by `everySteps`; the loss can change. CPUs only.
    #[serde(rename = "type", default)]
    pub kind: SyncType,

    /// Optimizer steps between two averages, with type `Local`. Checkpoints, evaluations and stops
    /// wait for the next average.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000))]
    pub every_steps: Option<i64>,

    /// How the average changes the weights, with type `Local`. Default: the weights become the
    /// average.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outer_optimizer: Option<OuterOptimizer>,
}

/// How the average of the ranks changes the weights.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum OuterOptimizerType {
    /// The weights become the average.
    #[default]
    Average,
    /// A step with Nesterov momentum along the mean change.
    Nesterov,
}

/// How the average of the ranks changes the weights.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.type == 'Nesterov' || (!has(self.learningRate) && !has(self.momentum))")
    .message("learningRate and momentum are for type Nesterov").field_path(".type"))]
#[x_kube(validation = Rule::new("!has(self.learningRate) || double(self.learningRate) > 0.0")
    .message("learningRate must be greater than 0").field_path(".learningRate"))]
#[x_kube(validation = Rule::new("!has(self.momentum) || double(self.momentum) < 1.0")
    .message("momentum must be less than 1").field_path(".momentum"))]
pub struct OuterOptimizer {
    /// `Average` (default): the weights become the average of all ranks. `Nesterov`: the mean
    /// change since the last average is the gradient of a step with Nesterov momentum, as in DiLoCo
    /// (arXiv:2311.08105).
    #[serde(rename = "type", default)]
    pub kind: OuterOptimizerType,

    /// Learning rate of type `Nesterov`, a decimal string. Default "0.7".
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = DECIMAL))]
    pub learning_rate: Option<String>,

    /// Momentum of type `Nesterov`, a decimal string below 1. Default "0.9".
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = DECIMAL))]
    pub momentum: Option<String>,
}

/// State that is divided among the ranks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Sharding {
    /// Nothing.
    #[default]
    None,
    /// The optimizer's state.
    Optimizer,
    /// The optimizer's state and gradients.
    Gradients,
}

/// How gradients are summed between hosts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Algorithm {
    /// A cost model chooses.
    #[default]
    Auto,
    /// Around a ring.
    Ring,
    /// Exchanges of everything, at doubling distances.
    RecursiveDoubling,
    /// Recursive halving, then doubling.
    HalvingDoubling,
    /// Two binary trees.
    Tree,
}

/// Who updates the weights.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum CommunicationMode {
    /// Every rank, with the gradients of all.
    #[default]
    Collective,
    /// Parameter servers.
    ParameterServer,
}

/// How parameter servers update the weights.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Updates {
    /// With the sum of the gradients of all ranks.
    #[default]
    Synchronous,
    /// With the gradients of each rank, as they arrive.
    Asynchronous,
    /// With the change of each rank's weights in several steps, as it arrives.
    Geo,
}

/// Where parameter servers run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ServerPlacement {
    /// In the processes of the ranks.
    #[default]
    Ranks,
    /// Each in a process of its own.
    Dedicated,
}

/// Servers that hold and update the weights.
#[derive(KubeSchema, Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.updates != 'Synchronous' || !has(self.maxStaleness)")
    .message("maxStaleness is for updates Asynchronous and Geo: synchronous servers wait for all ranks").field_path(".maxStaleness"))]
#[x_kube(validation = Rule::new("(self.updates == 'Geo') == has(self.everySteps)")
    .message("everySteps must be set with updates Geo, and with no other").field_path(".everySteps"))]
pub struct ParameterServers {
    /// Number of servers. Each holds an equal part of the weights, in buckets of about 1 MiB, and
    /// the optimizer's state of that part.
    #[schemars(range(min = 1, max = 1024))]
    pub servers: i32,

    /// `Ranks` (default): servers run in the processes of the ranks, spread evenly. `Dedicated`:
    /// each runs in a process of its own, which needs neither data nor model. Only with
    /// `switchyard run` on one machine.
    #[serde(default)]
    pub placement: ServerPlacement,

    /// `Synchronous` (default): a server waits for the gradients of all ranks; weights have the
    /// bits of a collective run on one host. `Asynchronous`: it applies the gradients of each rank
    /// as they arrive. `Geo`: each rank takes `everySteps` optimizer steps on its own data, then
    /// sends the change of its weights, without waiting for the others. With the last two, the loss
    /// can change.
    #[serde(default)]
    pub updates: Updates,

    /// Pushes that a rank can be ahead of the slowest one before it waits, with `Asynchronous` and
    /// `Geo`. Default 4.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1_000_000))]
    pub max_staleness: Option<i32>,

    /// Optimizer steps between two pushes of a rank, with `Geo`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000))]
    pub every_steps: Option<i64>,
}

/// How ranks exchange gradients, and which.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("(self.mode == 'ParameterServer') == has(self.parameterServer)")
    .message("parameterServer must be set with mode ParameterServer, and with no other").field_path(".parameterServer"))]
#[x_kube(validation = Rule::new("self.mode == 'Collective' || self.algorithm == 'Auto'")
    .message("algorithm is for mode Collective: parameter servers add gradients in rank order").field_path(".algorithm"))]
#[x_kube(validation = Rule::new("self.mode == 'Collective' || self.compression.type == 'None'")
    .message("compression is for mode Collective: parameter servers take all gradients").field_path(".compression.type"))]
pub struct Communication {
    /// Who updates the weights. `Collective` (default): every rank, with the sum of all gradients.
    /// `ParameterServer`: servers, to which the ranks send gradients and which send the weights
    /// back. CPUs only.
    #[serde(default)]
    pub mode: CommunicationMode,

    /// Settings of mode `ParameterServer`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parameter_server: Option<ParameterServers>,

    /// How gradients are summed between hosts. `Auto` (default): a cost model chooses for each
    /// all-reduce, from its size, the number of hosts and the measured rate. `Ring`: each host link
    /// carries the fewest bytes. `HalvingDoubling`: the same bytes in fewer steps, between distant
    /// hosts too. `RecursiveDoubling`: the fewest steps. `Tree`: few steps, pipelined. Within a
    /// host, ranks always sum in shared memory. CPUs only: on GPUs, NCCL chooses.
    #[serde(default)]
    pub algorithm: Algorithm,

    /// Which gradients are sent. Default: all.
    #[serde(default)]
    pub compression: Compression,
}

/// Which gradients are sent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum CompressionType {
    /// All.
    #[default]
    None,
    /// The largest ones.
    TopK,
}

/// Which gradients are sent.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("(self.type == 'TopK') == has(self.ratio)")
    .message("ratio must be set with type TopK, and with no other").field_path(".ratio"))]
#[x_kube(validation = Rule::new("!has(self.ratio) || (double(self.ratio) > 0.0 && double(self.ratio) <= 1.0)")
    .message("ratio must be greater than 0 and at most 1").field_path(".ratio"))]
pub struct Compression {
    /// `None` (default): all gradients. `TopK`: each rank sends the `ratio` largest gradients, and
    /// adds the others to its next gradients (error feedback). The loss can change. CPUs only.
    #[serde(rename = "type", default)]
    pub kind: CompressionType,

    /// Fraction of the gradients that a rank sends with type `TopK`, a decimal string. Below 1 /
    /// (2 * ranks) this is less than all gradients in 32 bits: an entry has 8 bytes, and every rank
    /// needs those of all others.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = DECIMAL))]
    pub ratio: Option<String>,
}
