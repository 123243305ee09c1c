//! The errors that are known, as data: what a line must contain, what it means, what to check, and which check would have found it before the
//! start.
//!
//! An entry is a text that some program prints. Texts change with releases; an entry may have several. A line of each with the source that prints
//! it is in `samples`, where a test reads it.

mod cuda;
mod frameworks;
mod machine;
mod nccl;
mod worker;

pub(super) use worker::{FAILURE, PEER, SILENT};

/// How an error relates to others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// It is a cause: others may follow from it.
    Cause,
    /// It is a symptom: its cause may be on this rank or on another one.
    Symptom,
    /// A peer has ended or does not respond: the cause is elsewhere.
    Follower,
    /// Not an error, but worth knowing.
    Remark,
}

impl Role {
    /// One word for people and programs.
    pub fn word(self) -> &'static str {
        match self {
            Role::Cause => "cause",
            Role::Symptom => "symptom",
            Role::Follower => "follower",
            Role::Remark => "remark",
        }
    }
}

/// A known error.
#[derive(Debug, Clone, Copy)]
pub struct Known {
    /// Its id; stable.
    pub id: &'static str,
    /// The program that prints it.
    pub says: &'static str,
    /// How it relates to others.
    pub role: Role,
    /// Groups of texts: a line matches if it contains all texts of one group.
    pub texts: &'static [&'static [&'static str]],
    /// What it means, in one sentence.
    pub means: &'static str,
    /// What to check, the most telling first.
    pub look: &'static [&'static str],
    /// The check or rule that would have found it before the start; empty if there is none.
    pub told_by: &'static str,
    /// Further reading; empty if there is none.
    pub link: &'static str,
}

/// NCCL's own page.
pub(super) const NCCL_PAGE: &str = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html";
/// NVIDIA's catalogue of XID errors.
pub(super) const XID_PAGE: &str = "https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html";

/// All of them.
pub fn known() -> impl Iterator<Item = &'static Known> {
    let tables: [&[Known]; 5] = [&machine::KNOWN, &cuda::KNOWN, &nccl::KNOWN, &frameworks::KNOWN, &worker::KNOWN];
    tables.into_iter().flatten()
}
