//! `ProvisioningRequest`: how a gang asks the cluster's autoscaler for nodes. Another project's kind, and here only as much of it as Switchyard writes
//! and reads; its CRD comes with the autoscaler.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResource;
use serde::{Deserialize, Serialize};

/// Pods for which room is asked. It never changes.
#[derive(CustomResource, Serialize, Deserialize, Debug, Clone, Default, PartialEq, Eq)]
#[kube(
    group = "autoscaling.x-k8s.io",
    version = "v1",
    kind = "ProvisioningRequest",
    plural = "provisioningrequests",
    singular = "provisioningrequest",
    namespaced,
    status = "ProvisioningRequestStatus",
    schema = "disabled",
    derive = "PartialEq"
)]
#[serde(rename_all = "camelCase")]
pub struct ProvisioningRequestSpec {
    /// What the autoscaler does: check, or make nodes.
    pub provisioning_class_name: String,
    /// The pods.
    pub pod_sets: Vec<PodSet>,
}

/// Pods that are alike.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodSet {
    /// What each of them asks for.
    pub pod_template_ref: PodTemplateRef,
    /// How many there are.
    pub count: i32,
}

/// A PodTemplate of the same namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodTemplateRef {
    /// Its name.
    pub name: String,
}

/// What the autoscaler says.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ProvisioningRequestStatus {
    /// Accepted, Provisioned, Failed, BookingExpired and CapacityRevoked.
    #[serde(default)]
    pub conditions: Vec<Condition>,
}
