//! The ranks of an NCCL communicator, and their reductions.
//!
//! ```text
//! communicator (a thread) ── Unix socket ── root (threads of the process that made the id) ── the other ranks
//! ```
//!
//! Ranks are processes, or threads of one. The root adds in rank order and rounds to the element
//! type after each addition, as NCCL does from hop to hop. It compares the ranks' calls: a
//! different count, type or operation, or a different order across communicators, is a
//! [`finding`](crate::finding) on every rank, where NCCL would hang or return garbage. A lost rank
//! is an asynchronous error on the others, whose work then waits until the communicator is aborted.

mod communicator;
mod log;
mod root;
mod socket;

pub(crate) use communicator::{Communicator, await_change};
pub(crate) use root::{FIRST_OWN, SCALED, SUM, format, open};
pub(crate) use socket::Call;

/// `ncclResult_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Status(pub(crate) i32);

pub(crate) const SUCCESS: Status = Status(0);
pub(crate) const SYSTEM_ERROR: Status = Status(2);
pub(crate) const INVALID_USAGE: Status = Status(5);
pub(crate) const REMOTE_ERROR: Status = Status(6);
pub(crate) const IN_PROGRESS: Status = Status(7);
