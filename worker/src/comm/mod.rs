//! Communication between the ranks of a job: membership, in-place sum all-reduce of gradient
//! buckets, agreement on values, and one root cause when something fails.
//!
//! ```text
//! GroupConfig -> rendezvous with rank 0 (hub, server, client; auth on every connection) -> roster
//!             -> Group: agree, gather, barrier, abort, leave
//! Group, bucket lengths -> connect: shared memory (shm, local) within a host,
//!                                   TCP ring (ring) between hosts
//!             -> Reducer: bucket -> start -> wait (engine)
//! ```
//!
//! A group is formed before anyone knows what will be reduced. The reducer owns the bucket memory
//! and needs only a group. A library that reduces in device memory (NCCL) can replace the reducer;
//! the group stays the same.
//!
//! A reducer has one or more lanes. All-reduces in different lanes run concurrently.
//!
//! Deliberately absent: encryption (connections are authenticated, but their bytes are neither
//! encrypted nor signed), collectives other than the sum all-reduce, and membership changes (a
//! group that fails ends; the launcher starts the next attempt).
//!
//! All ranks must start the same buckets in the same order; otherwise the group fails with an error
//! that names the ranks. Results are bit-identical on all ranks, and reproducible across runs with
//! the same ranks on the same hosts.

mod auth;
mod ballot;
mod client;
mod clock;
mod config;
mod connect;
mod engine;
mod error;
mod frame;
mod gpu_health;
mod group;
mod hang;
mod host;
mod hub;
mod join;
mod kernels;
mod links;
mod local;
mod op_context;
mod options;
mod probe;
mod pulse;
mod reducer;
mod ring;
mod roster;
mod server;
mod setup;
mod shm;
mod socket;
mod state;
mod timing;
mod wait;
mod wire;

pub use config::{Force, GroupConfig, Token};
pub use error::{Cause, CauseKind, CommError};
pub use group::{Aborter, Group};
pub use options::Options;
pub use probe::ConnectionRate;
pub use reducer::Reducer;
pub use timing::Timing;
pub use wire::Wire;
