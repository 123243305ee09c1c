//! How the processes of a job reach each other, which settings follow from that, and why. Pure.
//!
//! ```text
//! the chosen gang (reports, devices, pod) + profile ─> decide ─> decisions ─> conf (per node), env, status
//! ```
//!
//! Every setting has a class (`docs/placement-and-fabric.md`). *Must*: without it the job breaks or
//! silently falls back. *May*: the system section of NCCL's guide allows it to stay. *Never*: for
//! debugging only; it is not set, and the reason is recorded. A user's own value always wins.
//!
//! [`variables`] describes known environment variables as tables, [`lint`] checks manifests against
//! them without a cluster, and [`preflight`] checks the chosen gang against the facts of its nodes.
#![forbid(unsafe_code)]

mod compare;
mod conf;
mod decide;
pub mod forecast;
mod gang;
pub mod lint;
mod needs;
mod observed;
pub mod preflight;
pub mod profile;
mod rules;
pub mod variables;

pub use compare::{Prediction, compare};
pub use conf::{CONF_DIR, MERGE_SCRIPT, STAGING_DIR, conf, reasons};
pub use decide::{FabricRefusal, decide};
pub use gang::{Gang, Member, claims_channel, facts};
pub use needs::{FabricRequest, required_resources, shared_memory};
pub use observed::{Channel, LogObservation};
pub use rules::{CONF_FILE, CONF_PATH, interface, interfaces};
