//! Communication between the ranks of a job: membership, in-place all-reduce of gradient buckets,
//! collectives on the caller's memory, agreement on values, and one root cause when something
//! fails.
//!
//! ```text
//! GroupConfig -> rendezvous with rank 0 (hub, server, client; auth on every connection) -> roster
//!             -> Group: agree, gather, barrier, abort, leave
//! Group, bucket lengths -> connect: shared memory (shm, local) within a host,
//!                                   plans over TCP (remote) between hosts
//!             -> Reducer: bucket -> start -> wait (engine): all-reduce, or scatter and gather
//! Group, hosts of parameter servers -> parameters: client, server
//! Group       -> mesh: streams in shared memory (fifo) and TCP to every rank
//!             -> Collectives: all-reduce, reduce-scatter, all-gather, broadcast, all-to-all, send
//! ```
//!
//! A group is formed before anyone knows what will be reduced. The reducer owns the bucket memory
//! and needs only a group. A library that reduces in device memory (NCCL) can replace the reducer;
//! the group stays the same.
//!
//! Algorithms are data: a file in `plan` generates the steps of each rank, a cost model chooses,
//! and `executor` runs the steps over any channels. The exception is the sum of registered
//! buckets within a host (`local`): all ranks map each other's buckets, so one pass without
//! copies replaces the messages of a plan.
//!
//! A reducer has one or more lanes. All-reduces in different lanes run concurrently.
//!
//! Deliberately absent: encryption (connections are authenticated, but their bytes are neither
//! encrypted nor signed), and membership changes (a group that fails ends; the launcher starts the
//! next attempt).
//!
//! All ranks must start the same operations in the same order; otherwise the group fails with an
//! error that names the ranks. Results are bit-identical on all ranks, and reproducible across runs
//! with the same ranks on the same hosts.

mod auth;
mod ballot;
mod channel;
mod client;
mod clock;
mod collectives;
mod config;
mod connect;
mod data_type;
mod engine;
mod error;
mod executor;
mod fifo;
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
mod mesh;
mod op_context;
mod operation;
mod options;
mod packing;
mod parameters;
mod plan;
mod probe;
mod pulse;
mod reducer;
mod remote;
mod roster;
mod server;
mod setup;
mod shm;
mod socket;
mod state;
mod timing;
mod wait;
mod wire;

pub use collectives::Collectives;
pub use config::{Force, GroupConfig, Token};
pub use data_type::{DataType, Number, Reduction};
pub(crate) use error::format_ranks;
pub use error::{Cause, CauseKind, CommError};
pub use group::{Aborter, Group};
pub use options::Options;
pub use packing::{Packing, Segment};
pub use parameters::{
    Handler, Message, MessageKind, ParameterClient, ParameterLinks, ParameterServer, accept_ranks, connect_parameters,
    connect_servers,
};
pub use plan::Algorithm;
pub use probe::ConnectionRate;
pub use reducer::{BucketRun, Reducer};
pub use timing::Timing;
pub use wire::Wire;
