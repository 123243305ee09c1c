//! Kinds of objects that the controller writes.

use serde::Serialize;
use std::fmt;

/// Kind of an object. Code that depends on the kind is an exhaustive `match`, so a new kind cannot
/// fall into another one's arm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub enum Kind {
    ConfigMap,
    NetworkPolicy,
    PlacementSlice,
    Pod,
    PodDisruptionBudget,
    PodTemplate,
    ProvisioningRequest,
    ResourceClaim,
    Secret,
    Service,
    TrainJob,
}

impl Kind {
    /// The kind's name in the API.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::ConfigMap => "ConfigMap",
            Kind::NetworkPolicy => "NetworkPolicy",
            Kind::PlacementSlice => "PlacementSlice",
            Kind::Pod => "Pod",
            Kind::PodDisruptionBudget => "PodDisruptionBudget",
            Kind::PodTemplate => "PodTemplate",
            Kind::ProvisioningRequest => "ProvisioningRequest",
            Kind::ResourceClaim => "ResourceClaim",
            Kind::Secret => "Secret",
            Kind::Service => "Service",
            Kind::TrainJob => "TrainJob",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
