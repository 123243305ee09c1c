//! Kinds of the objects that the controller writes.

use serde::Serialize;
use std::fmt;

/// A kind. What is done with an object by its kind is an exhaustive `match`: a new kind cannot fall into the arm of another one.
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
    /// The word that the API uses.
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
