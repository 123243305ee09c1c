//! `ProvisioningRequest`: how a gang requests nodes from the cluster's autoscaler. This kind
//! belongs to another project. It is modelled here only as far as Switchyard writes and reads it;
//! its CRD comes with the autoscaler.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResource;
use serde::{Deserialize, Serialize};

/// Pods that need room. Immutable.
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
    /// Class that decides whether the autoscaler only checks for room or provisions nodes.
    pub provisioning_class_name: String,
    /// Groups of equal pods.
    pub pod_sets: Vec<PodSet>,
}

/// Equal pods.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodSet {
    /// Template of each pod.
    pub pod_template_ref: PodTemplateRef,
    /// Number of pods.
    pub count: i32,
}

/// A PodTemplate of the same namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodTemplateRef {
    /// Name of the PodTemplate.
    pub name: String,
}

/// Status written by the autoscaler.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ProvisioningRequestStatus {
    /// Accepted, Provisioned, Failed, BookingExpired and CapacityRevoked.
    #[serde(default)]
    pub conditions: Vec<Condition>,
}
