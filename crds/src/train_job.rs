//! `TrainJob`: a user's request, and its state.
//!
//! Every field is implemented; a field is added together with its feature.

use crate::checkpoint::Checkpoint;
use crate::engine::Engine;
use crate::fabric::FabricPolicy;
use crate::failure_policy::FailurePolicy;
use crate::role::{MAX_ROLES, Role, SuccessPolicy};
use crate::topology_policy::TopologyPolicy;
use crate::train_job_status::TrainJobStatus;
use crate::trainer::{Framework, Trainer};
use k8s_openapi::api::core::v1::PodTemplateSpec;
use kube::{CustomResource, KubeSchema};
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// What to train and how. Immutable after creation, except for `suspend`, the deadline and the time
/// to live.
#[derive(CustomResource, KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "training.switchyard.dev",
    version = "v1alpha1",
    kind = "TrainJob",
    plural = "trainjobs",
    singular = "trainjob",
    shortname = "tj",
    category = "switchyard",
    namespaced,
    status = "TrainJobStatus",
    derive = "PartialEq",
    doc = "A distributed training job: one group of processes that starts, trains and ends together.",
    validation = Rule::new("self.metadata.name.size() <= 50 && self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')")
        .message("metadata.name must have at most 50 characters and be lower-case letters, digits and '-', starting with a letter and not ending with '-': names of pods and Services are derived from it"),
    printcolumn(name = "Stage", type_ = "string", json_path = ".status.conditions[?(@.type==\"Succeeded\")].reason", description = "Stage of the job"),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.ready", description = "Nodes that are ready, of those wanted"),
    printcolumn(name = "Restarts", type_ = "integer", json_path = ".status.restarts.total", description = "Restarts of the whole group"),
    printcolumn(name = "Progress", type_ = "integer", json_path = ".status.trainerStatus.progressPercentage", description = "Percent of the steps done"),
    printcolumn(name = "Figures", type_ = "date", json_path = ".status.trainerStatus.lastUpdatedTime", description = "Age of the progress and of the other figures"),
    printcolumn(name = "BusBW", type_ = "string", json_path = ".status.placement.predictedBusBandwidth", description = "Predicted bandwidth of the ring, bytes per second"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "Queue", type_ = "string", json_path = ".metadata.labels.kueue\\.x-k8s\\.io/queue-name", priority = 1, description = "Queue named by the job's label"),
    printcolumn(name = "Topology", type_ = "string", json_path = ".spec.topologyPolicy.mode", priority = 1, description = "How strictly placement respects topology"),
    printcolumn(name = "ETA", type_ = "integer", json_path = ".status.trainerStatus.estimatedRemainingSeconds", priority = 1, description = "Estimated remaining seconds")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.trainer == oldSelf.trainer && self.topologyPolicy == oldSelf.topologyPolicy && self.fabric == oldSelf.fabric && self.gangPolicy == oldSelf.gangPolicy && self.failurePolicy == oldSelf.failurePolicy && self.managedBy == oldSelf.managedBy && has(self.queue) == has(oldSelf.queue) && (!has(self.queue) || self.queue == oldSelf.queue) && has(self.template) == has(oldSelf.template) && (!has(self.template) || self.template == oldSelf.template) && has(self.checkpoint) == has(oldSelf.checkpoint) && (!has(self.checkpoint) || self.checkpoint == oldSelf.checkpoint) && has(self.engine) == has(oldSelf.engine) && (!has(self.engine) || self.engine == oldSelf.engine) && has(self.roles) == has(oldSelf.roles) && (!has(self.roles) || self.roles == oldSelf.roles) && has(self.successPolicy) == has(oldSelf.successPolicy) && (!has(self.successPolicy) || self.successPolicy == oldSelf.successPolicy)")
    .message("spec is immutable but for suspend, activeDeadlineSeconds and ttlSecondsAfterFinished: delete the TrainJob and create it again with the new values"))]
#[x_kube(validation = Rule::new("(self.trainer.framework == 'Switchyard') == has(self.engine)")
    .message("engine must be set with trainer.framework Switchyard, and with no other framework").field_path(".engine"))]
#[x_kube(validation = Rule::new("self.trainer.framework != 'Switchyard' || (!has(self.trainer.command) && !has(self.trainer.args))")
    .message("trainer.command and trainer.args are for other frameworks: with framework Switchyard the worker is started").field_path(".trainer"))]
#[x_kube(validation = Rule::new("self.trainer.framework == 'Switchyard' || !has(self.fabric.preflight.minBusBandwidth)")
    .message("minBusBandwidth is measured by our own engine, which other images do not have: framework must be Switchyard; for NCCL run nccl-tests as a separate job").field_path(".fabric.preflight.minBusBandwidth"))]
#[x_kube(validation = Rule::new("self.trainer.framework == 'Switchyard' || !has(self.checkpoint)")
    .message("checkpoint is for framework Switchyard: other frameworks save their own checkpoints").field_path(".checkpoint"))]
#[x_kube(validation = Rule::new("!has(self.queue) || !has(self.queue.preemptible) || self.queue.preemptible != 'Always' || self.failurePolicy.maxPreemptionRestarts > 0")
    .message("queue.preemptible Always needs failurePolicy.maxPreemptionRestarts of at least 1: with 0, the first preemption would end the job").field_path(".queue.preemptible"))]
#[x_kube(validation = Rule::new("!has(self.engine) || self.engine.device != 'Cpu' || !has(self.trainer.resourcesPerNode) \
    || !has(self.trainer.resourcesPerNode.limits) || !('nvidia.com/gpu' in self.trainer.resourcesPerNode.limits)")
    .message("with engine.device Cpu the GPUs of trainer.resourcesPerNode would stay unused: remove nvidia.com/gpu, or set engine.device to Auto")
    .field_path(".engine.device"))]
#[x_kube(validation = Rule::new("!has(self.roles) || self.trainer.framework != 'Switchyard'")
    .message("roles are for other frameworks: with framework Switchyard, engine describes all processes").field_path(".roles"))]
#[x_kube(validation = Rule::new("!has(self.roles) || (self.trainer.numNodes == 1 && !has(self.trainer.numProcPerNode) && !has(self.trainer.cpuThreads) \
    && !has(self.trainer.resourcesPerNode) && !has(self.trainer.command) && !has(self.trainer.args))")
    .message("with roles, pods are described in each role: use replicas instead of trainer.numNodes, and move trainer.numProcPerNode, resourcesPerNode, command and args into the roles; cpuThreads has no effect")
    .field_path(".roles"))]
#[x_kube(validation = Rule::new("!has(self.roles) || self.roles.all(role, !has(role.near) || self.roles.exists(other, other.name == role.near && !has(other.near)))")
    .message("near must name another role of the job that has no near itself").field_path(".roles"))]
#[x_kube(validation = Rule::new("!has(self.successPolicy) || (has(self.roles) && self.roles.exists(role, role.name == self.successPolicy.role))")
    .message("successPolicy.role must name one of the roles").field_path(".successPolicy.role"))]
#[x_kube(validation = Rule::new("!has(self.roles) || self.roles.all(role, !has(role.onFailure) || role.onFailure != 'Ignore' || (has(self.successPolicy) && self.successPolicy.role != role.name))")
    .message("onFailure Ignore is for roles that the job does not wait for: set successPolicy.role to another role").field_path(".roles"))]
#[x_kube(validation = Rule::new("!has(self.roles) || !(self.trainer.framework in ['TensorFlow', 'Paddle']) || !self.roles.exists(role, role.name == 'ps') || (has(self.successPolicy) && self.successPolicy.role != 'ps')")
    .message("parameter servers never end by themselves: set successPolicy.role to the role whose completion completes the job").field_path(".roles"))]
pub struct TrainJobSpec {
    /// `true`: the job has no pods; those of a running attempt are deleted, which frees their
    /// resources. Setting it to `false` starts a new attempt, which does not count as a restart.
    /// Default `false`. In `switchyard run` it must be `false`.
    #[serde(default)]
    pub suspend: bool,

    /// The controller that reconciles the job. Switchyard ignores the job unless this is the
    /// default. Immutable.
    #[serde(default)]
    pub managed_by: ManagedBy,

    /// Seconds from `status.placedTime` after which an unfinished job fails with the reason
    /// `DeadlineExceeded`. Time in the queue does not count, restarts do, and the clock restarts
    /// when the job is resumed. A job with a limit can start before a job ahead of it in the queue,
    /// if it ends before that one can start. Raising the limit after the job is placed gives no
    /// such advantage: see `status.placedLimitSeconds`. Default: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub active_deadline_seconds: Option<i64>,

    /// Seconds after `status.completionTime` at which the job and everything that belongs to it are
    /// deleted. Default: never.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub ttl_seconds_after_finished: Option<i32>,

    /// Processes, their resources and environment. Default: one node with one process.
    #[serde(default)]
    pub trainer: Trainer,

    /// Template of each node's pod. Switchyard's own settings are merged into it by name: the
    /// container `trainer` is ours, volumes, environment and mounts of other names are kept, and
    /// the status reports which side won a conflict. `spec.containers` can be omitted. Ignored by
    /// `switchyard run`, which starts no containers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "pod_template_schema")]
    pub template: Option<PodTemplateSpec>,

    /// Groups of pods that run different programs, such as parameter servers and workers. The pods
    /// of all roles are one gang. Only with frameworks other than Switchyard. Default: none, all
    /// pods are alike.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(min = 1, max = MAX_ROLES))]
    #[x_kube(merge_strategy = kube::core::ListMerge::Map(vec!["name".into()]))]
    pub roles: Vec<Role>,

    /// When a job with roles is complete. Default: once all pods of all roles have succeeded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub success_policy: Option<SuccessPolicy>,

    /// Gang scheduling: all pods of an attempt are scheduled, or none.
    #[serde(default)]
    pub gang_policy: GangPolicy,

    /// The job's part in the administrator's queue policy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue: Option<QueueOptions>,

    /// How strictly placement respects topology.
    #[serde(default)]
    pub topology_policy: TopologyPolicy,

    /// How the processes reach each other: allowed transports, and checks before they start.
    #[serde(default)]
    pub fabric: FabricPolicy,

    /// Reaction to a failed process. Default: the job fails with it.
    #[serde(default)]
    pub failure_policy: FailurePolicy,

    /// Where and when the state of the training is saved; only with `trainer.framework:
    /// Switchyard`. Default: nowhere.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<Checkpoint>,

    /// Configuration of Switchyard's own training engine; only with `trainer.framework:
    /// Switchyard`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub engine: Option<Engine>,
}

/// The controller that reconciles a job.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ManagedBy {
    /// Switchyard's controller.
    #[default]
    #[serde(rename = "training.switchyard.dev/trainjob-controller")]
    TrainJobController,
    /// Kueue's MultiKueue, which runs the job in another cluster.
    #[serde(rename = "kueue.x-k8s.io/multikueue")]
    MultiKueue,
}

/// Gang scheduling: all pods of an attempt are scheduled, or none.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GangPolicy {
    /// Seconds that the pods of a placed attempt have to be scheduled, all of them. After that the
    /// attempt is rolled back, so that it does not hold part of its resources, and retried. Default
    /// 300. The administrator sets an upper bound for all jobs
    /// (`controller.maxScheduleTimeoutSeconds`, 600 by default).
    #[serde(default = "three_hundred")]
    #[schemars(range(min = 1, max = 86400))]
    pub schedule_timeout_seconds: i32,

    /// Reaction when an administrator cordons a node of the running job, which is the first step of
    /// `kubectl drain`. Default `Protect`.
    #[serde(default)]
    pub disruption: Disruption,

    /// When the pods of the next attempt can start.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replacement: Option<Replacement>,
}

/// The job's part in the administrator's queue policy (`queue.policy` in the chart).
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct QueueOptions {
    /// Whether the queue policy can stop the running job for a job of the same priority.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preemptible: Option<Preemptible>,
}

/// Whether the queue policy can stop the running job for a job of the same priority. `Always`:
/// it can; the job is stopped like a suspended one and resumes from its own checkpoint. `Never`:
/// the job keeps its nodes, and waits for nodes that no job ahead of it holds. Default: `Always`
/// with `checkpoint`, otherwise `Never`. Jobs of higher priority can stop the job either way.
#[derive(JsonSchema, Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Preemptible {
    /// It can, once the job has run for the administrator's quantum, unless it was preempted too
    /// often.
    Always,
    /// It never stops the job.
    Never,
}

/// When the pods of the next attempt can start: after a failure, a preemption, or when a suspended
/// job is resumed. `AfterTermination`: once no container of an older attempt can still run, or 30 s
/// after the grace period of its pod, or, if its node does not report,
/// `controller.nodeGraceSeconds` after the pod was deleted. `Immediate`: at once, for programs
/// whose older attempts cannot overwrite what newer ones write. Default: `Immediate` with
/// `trainer.framework: Switchyard`, otherwise `AfterTermination`. Ignored by `switchyard run`,
/// where an attempt starts once all processes of the previous one have ended.
#[derive(JsonSchema, Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Replacement {
    /// Two attempts never write the same files, unless the wait times out. The status then names
    /// the pod that could still be running.
    AfterTermination,
    /// Pods of the older attempt can still be terminating. Checkpoints of our own engine carry the
    /// number of their attempt.
    Immediate,
}

/// Reaction when a node of a running job is cordoned.
#[derive(JsonSchema, Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Disruption {
    /// The job stays there until it ends; a drain waits for it.
    #[default]
    Protect,
    /// The job saves its state, leaves the node and continues without it. This counts as a
    /// preemption.
    Checkpoint,
}

impl Default for GangPolicy {
    fn default() -> Self {
        GangPolicy { schedule_timeout_seconds: 300, disruption: Disruption::Protect, replacement: None }
    }
}

impl TrainJobSpec {
    /// Whether the queue policy can stop the running job for a job of the same priority: the job's
    /// choice, or whether it has checkpoints.
    pub fn preemptible(&self) -> Preemptible {
        let default = if self.checkpoint.is_some() { Preemptible::Always } else { Preemptible::Never };
        self.queue.as_ref().and_then(|queue| queue.preemptible).unwrap_or(default)
    }

    /// When the pods of the next attempt can start: the job's choice, or the default of its
    /// framework.
    pub fn replacement(&self) -> Replacement {
        self.gang_policy.replacement.unwrap_or(match self.trainer.framework {
            Framework::Switchyard => Replacement::Immediate,
            _ => Replacement::AfterTermination,
        })
    }
}

/// The schema of a pod template without its descriptions, which are five sixths of it (335 kB: too
/// big for the annotation of a client-side `kubectl apply`). `spec.containers` becomes optional,
/// because the trainer container is ours.
fn pod_template_schema(generator: &mut SchemaGenerator) -> Schema {
    fn strip(value: &mut Value) {
        match value {
            Value::Object(map) => {
                // Under `properties`, `description` would be the name of a field.
                map.retain(|key, value| key != "description" || !value.is_string());
                map.values_mut().for_each(strip);
            }
            Value::Array(list) => list.iter_mut().for_each(strip),
            _ => {}
        }
    }
    let mut schema = PodTemplateSpec::json_schema(generator).to_value();
    strip(&mut schema);
    schema["description"] = "Template of each node's pod: a Kubernetes PodTemplateSpec.".into();
    if let Some(spec) = schema.pointer_mut("/properties/spec").and_then(Value::as_object_mut) {
        spec.remove("required");
    }
    Schema::try_from(schema).expect("invariant: an object is a schema")
}

fn three_hundred() -> i32 {
    300
}
