//! The placement of a job with many nodes, as PlacementSlices.

use super::metadata;
use crate::slices;
use switchyard_crds::{PlacementSlice, PlacementStatus, TrainJob, labels};

/// The slices of a placement. Empty if the status contains the placement itself.
pub fn placement_slices(job: &TrainJob, placement: &PlacementStatus) -> Vec<PlacementSlice> {
    let Some(named) = &placement.slices else { return Vec::new() };
    let attempt = named_attempt(job, &named.name_prefix).unwrap_or_default();
    let parts = slices::names(named).zip(slices::cut(attempt, &placement.nodes));
    parts
        .map(|(name, spec)| {
            let mut slice = PlacementSlice::new(&name, spec);
            slice.metadata = metadata(job, name);
            slice.metadata.labels.get_or_insert_default().insert(labels::ATTEMPT.into(), attempt.to_string());
            slice
        })
        .collect()
}

/// The attempt in the name of a job's object, such as `JOB-ATTEMPT-DIGEST-0`.
pub fn named_attempt(job: &TrainJob, name: &str) -> Option<u32> {
    let rest = name.strip_prefix(job.metadata.name.as_deref()?)?.strip_prefix('-')?;
    rest.split('-').next()?.parse().ok()
}
