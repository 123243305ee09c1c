//! Fictional machines on which tests run a node agent.
//!
//! ```text
//!  machines/*.json ── Scene ── Machine ──┬── Stage: sys, proc, dev, scene.json, failures.json, a copy of the mock
//!                    (short)  (expanded) └── the NVML mock reads the two files next to itself
//! ```
//!
//! A [`Scene`] is a hand-written description of a machine, with at most one line per device.
//! [`Machine`] is its expanded form. A [`Stage`] is a folder with everything that an agent reads; a
//! process can have several. [`Failures`] change while an agent runs.
//!
//! A stage has thousands of files. On a slow disk, a `TMPDIR` in memory makes the tests many times
//! faster.
//!
//! Not here: the agent's reports, which the tests of this package compare with texts from real
//! machines.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod failures;
mod files;
mod machine;
mod path;
mod scene;
mod stage;
mod tree;

pub use failures::{Driver, FabricFailure, Failures, Xid};
pub use machine::{Ancestor, Gpu, LinkEnd, Machine, Port};
pub use scene::{DriverModule, FabricScene, GpuGroup, NicGroup, NumaScene, Scene, SceneError};
pub use stage::{FAILURES_FILE, SCENE_FILE, Stage};
pub use tree::Tree;
