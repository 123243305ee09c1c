//! Kubernetes objects of a job, as a pure function of the job. Cannot fail for a valid job.
//!
//! | object | name | when |
//! |---|---|---|
//! | Pod, gated | `JOB-ATTEMPT-NODERANK` | one per node |
//! | ConfigMap, immutable | `JOB-ATTEMPT` | frameworks Switchyard (the engine's configuration), MPI and Horovod (the hostfile) |
//! | ConfigMap, immutable | `JOB-ATTEMPT-fabric`, from node 256 on `JOB-ATTEMPT-fabric-1` and so on | GPUs on more than one node; created when the gang is placed |
//! | PlacementSlice, immutable | `JOB-ATTEMPT-DIGEST-NUMBER` | more than 128 nodes; created before the status that references them |
//! | PodDisruptionBudget | `JOB` | always: a drain must not end a run |
//! | Service, headless | `JOB` | more than one node |
//! | NetworkPolicy | `JOB` | more than one node |
//! | ResourceClaim | `JOB-ATTEMPT-NODERANK` | GPUs by claims; created when the gang is placed |
//! | PodTemplate, ProvisioningRequest | `JOB-ATTEMPT`; with roles, the PodTemplates are `JOB-ATTEMPT-ROLE` | while a gang waits for nodes that the cluster autoscaler may add |
//! | Secret, immutable | `JOB-key-UID8` | more than one node and framework Switchyard |
//!
//! All of them have the job's labels and owner reference. A job of one pod gets only what it needs.

mod builder;
mod claim;
mod fabric;
mod kind;
mod merge;
mod pod;
mod provisioning;
mod slices;
#[cfg(test)]
mod tests;
mod unkept;

pub use claim::claim;
pub use fabric::fabric_configs;
pub use kind::Kind;
pub use merge::{MergeConflict, conflicts, faults};
pub(crate) use pod::trainer_container;
pub use pod::{label_patch, placement_patch, pod, run_as_non_root};
pub use provisioning::{annotate_consumer, provisioning, provisioning_name};
pub use slices::{named_attempt, placement_slices};
pub use unkept::unkept_files;

use super::job::short_uid;
use super::{ValidJob, frameworks};
use k8s_openapi::api::core::v1::{ConfigMap, Pod, PodTemplate, Secret, Service};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use switchyard_crds::{Framework, PlacementSlice, ProvisioningRequest, TrainJob, labels};
use switchyard_fabric::profile::Profile;
use switchyard_worker_contract::config::EngineConfig;
use switchyard_worker_contract::pod::{CONFIG_FILE, HOST_FILE};

/// Operator settings that affect objects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Defaults {
    /// Worker image for jobs that name none.
    pub worker_image: String,
    /// Pull secrets for that image in the jobs' namespaces, if the template names none.
    pub image_pull_secrets: Vec<String>,
    /// Device class of GPU claims.
    pub gpu_class: String,
    /// DRA driver whose attributes contain the GPU UUIDs.
    pub gpu_driver: String,
    /// The administrator's fabric settings. `None` selects the built-in profile that matches the
    /// nodes.
    pub fabric_profile: Option<Profile>,
}

impl Default for Defaults {
    /// The names that NVIDIA's DRA driver uses.
    fn default() -> Defaults {
        Defaults {
            worker_image: concat!("switchyard-worker:", env!("CARGO_PKG_VERSION")).into(),
            image_pull_secrets: Vec::new(),
            gpu_class: "gpu.nvidia.com".into(),
            gpu_driver: "gpu.nvidia.com".into(),
            fabric_profile: None,
        }
    }
}

/// An object of a job.
#[derive(Debug, Clone, PartialEq)]
pub enum Object {
    /// One node of the job.
    Pod(Box<Pod>),
    /// DNS names of the pods.
    Service(Box<Service>),
    /// GPUs of one node of the job.
    Claim(Box<ResourceClaim>),
    ConfigMap(ConfigMap),
    /// The job's key: 32 random bytes, generated when it is written.
    Secret(Secret),
    /// Blocks drains.
    PodDisruptionBudget(PodDisruptionBudget),
    /// Blocks traffic from other pods.
    NetworkPolicy(NetworkPolicy),
    /// Part of the placement.
    PlacementSlice(Box<PlacementSlice>),
    /// A pod's requirements, for the autoscaler.
    PodTemplate(Box<PodTemplate>),
    /// Requests nodes from the autoscaler.
    ProvisioningRequest(Box<ProvisioningRequest>),
}

impl Object {
    pub fn kind(&self) -> Kind {
        match self {
            Object::Pod(_) => Kind::Pod,
            Object::Service(_) => Kind::Service,
            Object::Claim(_) => Kind::ResourceClaim,
            Object::ConfigMap(_) => Kind::ConfigMap,
            Object::Secret(_) => Kind::Secret,
            Object::PodDisruptionBudget(_) => Kind::PodDisruptionBudget,
            Object::NetworkPolicy(_) => Kind::NetworkPolicy,
            Object::PlacementSlice(_) => Kind::PlacementSlice,
            Object::PodTemplate(_) => Kind::PodTemplate,
            Object::ProvisioningRequest(_) => Kind::ProvisioningRequest,
        }
    }

    pub fn metadata(&self) -> &ObjectMeta {
        match self {
            Object::Pod(object) => &object.metadata,
            Object::Service(object) => &object.metadata,
            Object::Claim(object) => &object.metadata,
            Object::ConfigMap(object) => &object.metadata,
            Object::Secret(object) => &object.metadata,
            Object::PodDisruptionBudget(object) => &object.metadata,
            Object::NetworkPolicy(object) => &object.metadata,
            Object::PlacementSlice(object) => &object.metadata,
            Object::PodTemplate(object) => &object.metadata,
            Object::ProvisioningRequest(object) => &object.metadata,
        }
    }

    pub fn name(&self) -> &str {
        self.metadata().name.as_deref().unwrap_or_default()
    }

    /// Desired state in the cluster: labels, owner and content.
    pub fn content(&self) -> Value {
        let value = match self {
            Object::Pod(object) => serde_json::to_value(object),
            Object::Service(object) => serde_json::to_value(object),
            Object::Claim(object) => serde_json::to_value(object),
            Object::ConfigMap(object) => serde_json::to_value(object),
            Object::Secret(object) => serde_json::to_value(object),
            Object::PodDisruptionBudget(object) => serde_json::to_value(object),
            Object::NetworkPolicy(object) => serde_json::to_value(object),
            Object::PlacementSlice(object) => serde_json::to_value(object),
            Object::PodTemplate(object) => serde_json::to_value(object),
            Object::ProvisioningRequest(object) => serde_json::to_value(object),
        };
        let mut value = value.expect("invariant: a Kubernetes object serialises to JSON");
        if let Some(map) = value.as_object_mut() {
            map.retain(|key, _| !matches!(key.as_str(), "apiVersion" | "kind"));
        }
        value
    }
}

/// The part of an observed object that [`Object::content`] is compared with.
pub fn observed_content(object: &Value) -> Value {
    let mut value = object.clone();
    if let Some(map) = value.as_object_mut() {
        map.retain(|key, _| !matches!(key.as_str(), "apiVersion" | "kind" | "status"));
    }
    if let Some(metadata) = value.get_mut("metadata").and_then(Value::as_object_mut) {
        metadata.retain(|key, _| matches!(key.as_str(), "name" | "namespace" | "labels" | "ownerReferences"));
    }
    value
}

/// Objects that live as long as the job.
pub fn shared(job: &TrainJob, valid: &ValidJob) -> Vec<Object> {
    let name = &valid.name;
    let selector = json!({"matchLabels": {labels::JOB_UID: uid(job)}});
    let mut objects = vec![Object::PodDisruptionBudget(object(
        metadata(job, name.clone()),
        // Not `maxUnavailable: 0`, because the disruption controller would then read the owner's
        // scale, and a TrainJob has none. Unready pods, as on a lost node, may be evicted: a drain
        // would otherwise hang on them forever.
        json!({"spec": {
            "minAvailable": valid.request.nodes, "selector": selector, "unhealthyPodEvictionPolicy": "AlwaysAllow",
        }}),
    ))];
    if valid.request.nodes > 1 {
        let service = json!({"spec": {
            "clusterIP": "None",
            // Ranks look up rank 0 before any pod is ready.
            "publishNotReadyAddresses": true,
            "selector": {labels::JOB_UID: uid(job)},
        }});
        let policy = json!({"spec": {
            "podSelector": selector,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": selector}]}],
        }});
        objects.push(Object::Service(Box::new(object(metadata(job, name.clone()), service))));
        objects.push(Object::NetworkPolicy(object(metadata(job, name.clone()), policy)));
        if job.spec.trainer.framework == Framework::Switchyard {
            let secret = json!({"type": "Opaque", "immutable": true});
            objects.push(Object::Secret(object(metadata(job, key_name(job, valid)), secret)));
        }
    }
    objects
}

/// ConfigMap for the pods of one attempt: the engine's configuration, or the hosts for `mpirun`.
pub fn config_map(job: &TrainJob, valid: &ValidJob, attempt: u32) -> Option<ConfigMap> {
    let data = match &valid.engine {
        Some(engine) => json!({CONFIG_FILE: engine_text(engine, valid)}),
        None => json!({HOST_FILE: frameworks::hostfile(job, valid, attempt)?}),
    };
    let mut metadata = metadata(job, config_name(valid, attempt));
    metadata.labels.get_or_insert_default().insert(labels::ATTEMPT.into(), attempt.to_string());
    Some(object(metadata, json!({"immutable": true, "data": data})))
}

fn engine_text(engine: &EngineConfig, valid: &ValidJob) -> String {
    let engine = EngineConfig {
        // By default the worker uses the cores of its pod.
        cpu_threads: valid.request.threads.unwrap_or(0) * engine.devices_per_process,
        ..engine.clone()
    };
    serde_json::to_string_pretty(&engine).expect("invariant: an engine configuration serialises to JSON")
}

/// Name of an attempt's configuration.
fn config_name(valid: &ValidJob, attempt: u32) -> String {
    format!("{}-{attempt}", valid.name)
}

/// Whether the name is one of this attempt's objects.
pub fn is_of_attempt(valid: &ValidJob, attempt: u32, name: &str) -> bool {
    let config = config_name(valid, attempt);
    name.strip_prefix(&config).is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
}

/// Name of the Secret. The UID avoids the Secret of an earlier job of the same name: the operator
/// cannot read Secrets, so it could not distinguish the two.
fn key_name(job: &TrainJob, valid: &ValidJob) -> String {
    format!("{}-key-{}", valid.name, short_uid(job))
}

fn job_name(job: &TrainJob) -> &str {
    job.metadata.name.as_deref().unwrap_or_default()
}

fn uid(job: &TrainJob) -> &str {
    job.metadata.uid.as_deref().unwrap_or_default()
}

/// Labels of all objects of the job.
fn job_labels(job: &TrainJob) -> BTreeMap<String, String> {
    [("app.kubernetes.io/managed-by", "switchyard"), (labels::JOB_NAME, job_name(job)), (labels::JOB_UID, uid(job))]
        .map(|(name, value)| (name.to_string(), value.to_string()))
        .into()
}

fn metadata(job: &TrainJob, name: String) -> ObjectMeta {
    ObjectMeta {
        name: Some(name),
        namespace: job.metadata.namespace.clone(),
        labels: Some(job_labels(job)),
        owner_references: Some(vec![OwnerReference {
            api_version: labels::API_VERSION.into(),
            kind: "TrainJob".into(),
            name: job_name(job).into(),
            uid: uid(job).into(),
            controller: Some(true),
            block_owner_deletion: Some(true),
        }]),
        ..ObjectMeta::default()
    }
}

/// Builds a typed object from its metadata and the rest as JSON, which reads like a manifest.
fn object<K: DeserializeOwned + k8s_openapi::Metadata<Ty = ObjectMeta>>(metadata: ObjectMeta, rest: Value) -> K {
    let mut rest = rest;
    rest["apiVersion"] = K::API_VERSION.into();
    rest["kind"] = K::KIND.into();
    let mut object: K =
        serde_json::from_value(rest).expect("invariant: the objects written here have the form of their kind");
    *object.metadata_mut() = metadata;
    object
}
