//! A job that looks for a place.

use super::admitted::Admitted;
use super::levels::Levels;
use crate::ValidJob;
use crate::objects::Defaults;
use jiff::Timestamp;
use std::collections::BTreeMap;
use switchyard_crds::TrainJob;

/// Settings of the operator that affect placement, and the current time: reports that are not renewed go stale.
#[derive(Debug, Clone, Copy)]
pub struct PlacementRules<'a> {
    pub defaults: &'a Defaults,
    /// Levels of domains that the operator knows.
    pub levels: &'a Levels,
    pub now: Timestamp,
}

/// A job that looks for a place.
#[derive(Debug, Clone, Copy)]
pub struct Question<'a> {
    /// `status.deviceAllocation` says how its pods get their GPUs, `status.placement` where they were before.
    pub job: &'a TrainJob,
    pub valid: &'a ValidJob,
    pub rules: PlacementRules<'a>,
    /// What its pods ask for.
    pub admitted: &'a Admitted,
    /// Nodes that are avoided.
    pub left_out: &'a BTreeMap<String, Avoided>,
}

/// Why a node is avoided.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Avoided {
    pub why: String,
    /// It is used where no place can be found without it.
    pub is_last_resort: bool,
}
