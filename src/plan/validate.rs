//! Finds all faults of a job that its schema and rules cannot detect: of the job itself, of its
//! template, and of its framework's requirements.

use crate::job::{self, Invalid, ValidJob};
use crate::{frameworks, objects};
use switchyard_crds::TrainJob;

/// Checks a job that satisfies its schema and rules.
///
/// # Errors
/// All faults.
pub fn validate(job: &TrainJob) -> Result<ValidJob, Vec<Invalid>> {
    let (valid, mut faults) = match job::read(job) {
        Ok(valid) => (Some(valid), Vec::new()),
        Err(faults) => (None, faults),
    };
    if job.spec.roles.is_empty() {
        faults.extend(objects::faults(job));
    }
    for (role, alone) in job::alone(job) {
        // The template is the same for all roles.
        for fault in objects::faults(&alone).into_iter().map(|fault| job::fault_of(role, fault)) {
            if !faults.contains(&fault) {
                faults.push(fault);
            }
        }
    }
    if let Some(valid) = valid.as_ref().filter(|_| faults.is_empty()) {
        faults.extend(frameworks::faults(job, valid));
    }
    valid.filter(|_| faults.is_empty()).ok_or(faults)
}
