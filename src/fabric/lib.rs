//! The fabric: how the processes of a job reach each other, which settings follow from that, and why. Pure.
//!
//! ```text
//! the chosen gang (reports, devices, pod) + profile ─> decide ─> decisions ─> conf (per node), env, status
//! ```
//!
//! Three classes (`docs/placement-and-fabric.md`): *Must*, without which the job breaks or falls back silently; *May*, which the system section of NCCL's guide
//! allows to stay; *Never*, which is for debugging and is not set, with the reason. A user's own value always wins.
//!
//! [`variables`] knows the environment variables that people set, as tables; [`lint`] checks manifests against them without a cluster, and
//! [`preflight`] checks the chosen gang with the facts of its nodes.
#![forbid(unsafe_code)]

mod compare;
mod conf;
mod decide;
pub mod forecast;
mod gang;
pub mod lint;
mod needs;
pub mod preflight;
pub mod profile;
mod rules;
mod seen;
pub mod variables;

pub use compare::{Prediction, compare};
pub use conf::{FOLDER, MERGE, PLAN, conf, reasons};
pub use decide::{Refused, decide};
pub use gang::{Gang, Member, claims_channel, facts};
pub use needs::{Asked, needs, shared_memory};
pub use rules::{CONF_FILE, CONF_PATH, interface, interfaces};
pub use seen::{Seen, Way};
