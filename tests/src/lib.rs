//! Shared harness for tests that run real processes.
//!
//! ```text
//! Scene (folder with data, manifest) -> Program (with a deadline) -> Ended (code, output) -> no leftovers
//! ```
//!
//! [`programs`] builds the two programs, because cargo does not build other packages' programs for
//! a test.
#![forbid(unsafe_code)]

mod accounts;
mod agent;
pub mod chaos;
pub mod chart;
mod control_plane;
mod controller;
pub mod documents;
pub mod drivers;
mod dry_run;
pub mod faults;
mod follow;
mod golden;
pub mod gpus;
pub mod history;
mod kubelet;
pub mod kueue;
mod leftovers;
mod manifest;
mod mutants;
pub mod nodes;
mod pages;
pub mod placement;
mod pod_resources;
mod pod_tracker;
mod ports;
mod program;
mod programs;
pub mod random;
mod records;
mod scene;
pub mod size;
mod wait;

pub use accounts::{SYSTEM, account, chart_rules, chart_rules_with, role};
pub use agent::{Agent, AgentOptions, Cable, Host, agent_plane, agent_program, agent_token, pod_token};
pub use control_plane::{ControlPlane, Daemon, Options, Reach, Usage, programs_of};
pub use controller::*;
pub use dry_run::refusal;
pub use follow::{Update, follow};
pub use golden::difference;
pub use kubelet::{Command, Kubelet, KubeletOptions, POLICY, Policy};
pub use leftovers::{Leftover, leftovers};
pub use manifest::Manifest;
pub use pages::page;
pub use pod_resources::{PodResources, Reply, message};
pub use pod_tracker::{PodState, PodTracker};
pub use program::{Ended, Program, Running};
pub use programs::{cargo, gpu_probe, mutants_program, programs, shifted_clock, target, xtask};
pub use random::Random;
pub use records::{Anomaly, SyntheticRun};
pub use scene::Scene;
pub use wait::{TIMEOUT, found, found_async, until, until_async};

use std::path::Path;

/// Root folder of the repository.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("invariant: this package is in a folder of the repository")
}
