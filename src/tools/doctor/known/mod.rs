//! Table of known errors: the text that a line must contain, its meaning, what to check, and the
//! preflight check that would have found it.
//!
//! An entry matches text printed by a particular program. Because texts change with releases, an
//! entry can have several. `samples` has a line for each, with its source, for a test.

mod cuda;
mod frameworks;
mod machine;
mod nccl;
mod worker;

pub(super) use worker::{FAILURE, PEER, SILENT};

/// How an error relates to others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// A cause: other errors can follow from it.
    Cause,
    /// A symptom: its cause can be on this rank or another.
    Symptom,
    /// A symptom in general words: a specific one in the same log explains it, earlier or later.
    General,
    /// A peer has ended or does not respond, so the cause is elsewhere.
    Follower,
    /// Not an error, but worth knowing.
    Remark,
}

impl Role {
    /// The role as one word.
    pub fn word(self) -> &'static str {
        match self {
            Role::Cause => "cause",
            Role::Symptom | Role::General => "symptom",
            Role::Follower => "follower",
            Role::Remark => "remark",
        }
    }
}

/// A known error.
#[derive(Debug, Clone, Copy)]
pub struct KnownError {
    /// Stable id.
    pub id: &'static str,
    /// The program that prints it.
    pub says: &'static str,
    /// How it relates to others.
    pub role: Role,
    /// Alternatives; a line matches if it contains all texts of one of them.
    pub texts: &'static [&'static [&'static str]],
    pub means: &'static str,
    /// What to check, most informative first.
    pub look: &'static [&'static str],
    /// The check or rule that would have found it before the start; empty if there is none.
    pub told_by: &'static str,
    /// Further reading; empty if there is none.
    pub link: &'static str,
}

/// NCCL's troubleshooting page.
pub(super) const NCCL_PAGE: &str = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html";
/// NVIDIA's catalogue of XID errors.
pub(super) const XID_PAGE: &str = "https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html";

/// All known errors.
pub fn known() -> impl Iterator<Item = &'static KnownError> {
    let tables: [&[KnownError]; 5] = [&machine::KNOWN, &cuda::KNOWN, &nccl::KNOWN, &frameworks::KNOWN, &worker::KNOWN];
    tables.into_iter().flatten()
}
