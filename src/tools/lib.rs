//! Tools around a training run that need no cluster: convert foreign manifests, explain errors in
//! logs, and report on runs.
//!
//! - [`convert`] converts Kubeflow manifests to TrainJobs, and accounts for every field.
//! - [`doctor`] finds known errors in logs, who reported them and when, and which was first.
//! - [`report`] turns a run directory into figures, rule-based advice, charts and one page.
//!
//! Pure: lines and documents in, values out. `switchyard-cli` reads the files.
#![forbid(unsafe_code)]

pub mod convert;
pub mod doctor;
pub mod report;
