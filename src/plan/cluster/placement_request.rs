//! Input of a placement search.

use super::admitted::Admitted;
use super::levels::Levels;
use crate::ValidJob;
use crate::objects::Defaults;
use jiff::Timestamp;
use std::collections::BTreeMap;
use switchyard_crds::TrainJob;

/// Operator settings that affect placement, and the current time, because reports go stale.
#[derive(Debug, Clone, Copy)]
pub struct PlacementRules<'a> {
    pub defaults: &'a Defaults,
    /// The operator's topology levels.
    pub levels: &'a Levels,
    pub now: Timestamp,
}

/// A job to be placed.
#[derive(Debug, Clone, Copy)]
pub struct PlacementRequest<'a> {
    /// `status.deviceAllocation` is the GPU mechanism of its pods, `status.placement` their
    /// previous placement.
    pub job: &'a TrainJob,
    pub valid: &'a ValidJob,
    pub rules: PlacementRules<'a>,
    /// Requests and rules of its pods.
    pub admitted: &'a Admitted,
    /// Avoided nodes.
    pub avoided_nodes: &'a BTreeMap<String, Avoided>,
}

/// Why a node is avoided.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Avoided {
    pub reason: String,
    /// It is used only if there is no placement without it.
    pub is_last_resort: bool,
}
