//! Switchyard: plans and runs training jobs.
#![forbid(unsafe_code)]

pub mod cli;
pub mod topology;
