//! Communication between the ranks of a job: membership, in-place sum all-reduce of gradient buckets, agreement on
//! values, and one root cause when something fails.
//!
//! ```text
//! GroupConfig -> rendezvous with rank 0 (hub, server, client; auth on every connection) -> roster
//!             -> Group: agree, gather, barrier, abort, leave
//! Group, bucket lengths -> connect: shared memory (shm, local) within a host, TCP ring (ring) between hosts
//!             -> Reducer: bucket -> start -> wait (engine)
//! ```
//!
//! A group is formed without knowing what will be reduced; the reducer owns the memory of the buckets and needs only a
//! group. A library that reduces in a device's memory takes the reducer's place, and the group stays as it is.
//!
//! A reducer has one or more lanes: all-reduces of buckets in different lanes run at the same time.
//!
//! Deliberately absent: encryption (connections are authenticated, their bytes are neither encrypted nor signed),
//! collectives other than the sum all-reduce, and a change of members (a group that fails ends; the launcher starts the
//! next attempt).
//!
//! All ranks must start the same buckets in the same order; otherwise the group fails and names the ranks. Results are
//! bit-identical on all ranks, and from run to run with the same ranks on the same hosts.

mod auth;
mod ballot;
mod client;
mod clock;
mod config;
mod connect;
mod engine;
mod error;
mod frame;
mod gpus;
mod group;
mod host;
mod hub;
mod join;
mod kernels;
mod links;
mod local;
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
mod standstill;
mod state;
mod timing;
mod turn;
mod wait;
mod wire;

pub use config::{Force, GroupConfig, Token};
pub use error::{Cause, CauseKind, CommError};
pub use group::{Aborter, Group};
pub use options::Options;
pub use probe::Probed;
pub use reducer::Reducer;
pub use timing::Timing;
pub use wire::Wire;
