//! The programs on this machine: real processes, files, images and third-party frameworks.
#![forbid(unsafe_code)]
#![allow(missing_docs, clippy::unwrap_used)]

mod bad_input;
mod diagnose;
mod example;
mod fabric;
mod frameworks;
mod images;
mod preflight;
mod report;
mod run;
