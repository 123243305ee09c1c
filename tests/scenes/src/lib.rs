//! Machines that do not exist, to run a node agent on.
//!
//! ```text
//!  machines/*.json ── Scene ── Machine ──┬── Stage: sys, proc, dev, scene.json, failures.json, a copy of the mock
//!                    (short)  (expanded) └── the mock of NVML reads the two files beside itself
//! ```
//!
//! A [`Scene`] is what a person writes about a machine, in one line per device at most. [`Machine`] is the same in full. A
//! [`Stage`] is a folder with everything an agent reads; several may stand in one process. [`Failures`] change while an
//! agent runs.
//!
//! A stage has some thousand files: on a slow disk, `TMPDIR` in memory makes the tests many times faster.
//!
//! Not here: what an agent makes of it, which the tests of this package compare with texts of real machines.
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
