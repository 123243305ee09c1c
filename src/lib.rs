//! Switchyard: plans and runs training jobs.
#![forbid(unsafe_code)]
