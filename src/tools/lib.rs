//! Tools around a training that need no cluster: manifests of others to ours, errors in logs, and what a run did.
//!
//! - [`convert`]: Kubeflow's manifests to TrainJobs; every field is accounted for, so that nothing is dropped silently.
//! - [`doctor`]: known errors as a table, who reports a line and when, and which error was first.
//! - [`report`]: a run directory to figures, advice by rules, charts and one page.
//!
//! Pure: lines and documents in, values out. Files are read by `switchyard-cli`.
#![forbid(unsafe_code)]

pub mod convert;
pub mod doctor;
pub mod report;
