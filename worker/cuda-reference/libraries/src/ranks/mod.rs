//! The ranks of a communicator of NCCL, and what they sum.
//!
//! ```text
//! communicator (a thread) ── Unix socket ── root (threads of the process that made the id) ── the other ranks
//! ```
//!
//! Ranks are processes, or threads of one. The root adds in the order of the ranks and rounds after each addition to the type of the
//! numbers, as NCCL does from hop to hop. It compares what the ranks call: another count, type or operation, or calls of several
//! communicators in another order, are a [`finding`](crate::finding) of every rank, where NCCL hangs or sums what does not belong together.
//! A rank that is gone is an asynchronous error of the others, whose work then waits until the communicator is aborted.

mod communicator;
mod root;
mod socket;

pub(crate) use communicator::{Communicator, await_news};
pub(crate) use root::{format, is_operation, open};
pub(crate) use socket::Call;

/// `ncclResult_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Status(pub(crate) i32);

pub(crate) const SUCCESS: Status = Status(0);
pub(crate) const SYSTEM_ERROR: Status = Status(2);
pub(crate) const INVALID_USAGE: Status = Status(5);
pub(crate) const REMOTE_ERROR: Status = Status(6);
pub(crate) const IN_PROGRESS: Status = Status(7);
