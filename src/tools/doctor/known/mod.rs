//! The errors that are known, as data: what a line must contain, what it means, what to look at, and what would have told before.
//!
//! An entry is a text that somebody's program prints. Texts change with releases; an entry may have several. A line of each with the source
//! that prints it is in `samples`, where a test reads it.

mod cuda;
mod frameworks;
mod machine;
mod nccl;
mod worker;

pub(super) use worker::{FAILURE, PEER};

/// Whether an error explains others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// It stands for itself: others may follow from it.
    Cause,
    /// It has a cause, which may be on this rank or on another one.
    Symptom,
    /// A peer has ended or does not answer: the cause is elsewhere.
    Follower,
    /// No error, but good to know.
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
    /// Whose words these are.
    pub says: &'static str,
    /// Whether it explains others.
    pub role: Role,
    /// Any of these groups of texts, of which a line must contain all.
    pub texts: &'static [&'static [&'static str]],
    /// What it means, in one sentence.
    pub means: &'static str,
    /// What to look at, most telling first.
    pub look: &'static [&'static str],
    /// The check or rule that would have told before the start; empty when there is none.
    pub told_by: &'static str,
    /// Where more is written; empty when nowhere.
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
