//! What can go wrong in this room, and the root cause that a whole group reports.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Whether a rank failed or was told to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum CauseKind {
    /// Something went wrong.
    Failed,
    /// A signal asked this rank to stop; the number of the signal.
    Stopped(i32),
}

/// The first failure of a group. Every rank reports the same one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Cause {
    /// The rank that failed.
    pub origin_rank: u32,
    /// Host name of that rank; filled in by the group when empty.
    #[serde(default)]
    pub host: String,
    /// Failure or stop.
    pub kind: CauseKind,
    /// What happened there.
    pub text: String,
    /// What the rank that noticed it was doing; filled in by the group when empty.
    #[serde(default)]
    pub during: String,
}

impl Cause {
    /// A failure of `origin_rank`; host and operation are filled in by [`super::Communicator::abort`].
    pub fn failed(origin_rank: u32, text: impl Into<String>) -> Cause {
        Cause { origin_rank, host: String::new(), kind: CauseKind::Failed, text: text.into(), during: String::new() }
    }

    /// A stop that a signal asked for.
    pub fn stopped(origin_rank: u32, signal: i32) -> Cause {
        let text = format!("stopped by signal {signal}");
        Cause { kind: CauseKind::Stopped(signal), ..Cause::failed(origin_rank, text) }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}", self.origin_rank)?;
        if !self.host.is_empty() {
            write!(f, " on {}", self.host)?;
        }
        write!(f, ": {}", self.text)?;
        if !self.during.is_empty() {
            write!(f, " (during {})", self.during)?;
        }
        Ok(())
    }
}

/// Any failure of this room. Texts are lowercase and name what was expected and what was found.
#[derive(Debug, thiserror::Error)]
pub enum CommError {
    /// A variable of the environment is missing or has no meaning.
    #[error("{name}: got {got}, expected {expected}")]
    Variable {
        /// Name of the variable.
        name: &'static str,
        /// What it holds.
        got: String,
        /// What it should hold.
        expected: String,
    },
    /// The key file cannot be used.
    #[error("key file {path}: got {got}, expected {expected}")]
    KeyFile {
        /// Path of the file.
        path: String,
        /// What was found.
        got: String,
        /// What was expected.
        expected: &'static str,
    },
    /// A group that cannot exist.
    #[error("group of ranks: got {got}, expected {expected}")]
    Group {
        /// What was asked for.
        got: String,
        /// What is possible.
        expected: String,
    },
    /// Rank 0 could not be reached in time.
    #[error("no connection to rank 0 at {address} within {seconds:.0} s; last error: {last}")]
    Unreachable {
        /// The rendezvous address.
        address: String,
        /// Seconds tried.
        seconds: f64,
        /// Last error.
        last: String,
    },
    /// The other side of a handshake said no.
    #[error("refused by {by}: {reason}")]
    Refused {
        /// Who refused.
        by: String,
        /// Why.
        reason: String,
    },
    /// Some ranks never came.
    #[error("{} of {world} ranks did not arrive within {seconds:.0} s: {}", missing.len(), ranks_text(missing))]
    Missing {
        /// The absent ranks.
        missing: Vec<u32>,
        /// Size of the group.
        world: u32,
        /// Seconds waited.
        seconds: f64,
    },
    /// The asked transport does not fit where the ranks are.
    #[error("transport {got} is not possible: {why}")]
    Transport {
        /// What was asked for.
        got: String,
        /// Why it cannot be.
        why: String,
    },
    /// A system call failed while the group was set up.
    #[error("cannot {what}: {source}")]
    System {
        /// What was tried.
        what: String,
        /// The error of the system.
        #[source]
        source: std::io::Error,
    },
    /// Another program answered, or the bytes were damaged.
    #[error("protocol error with {with}: {text}")]
    Protocol {
        /// The other side.
        with: String,
        /// What was wrong.
        text: String,
    },
    /// [`super::Communicator::agree`] found different values. Every rank gets this same text.
    #[error("{0}")]
    Disagreement(String),
    /// The group is broken; this is the root cause.
    #[error("{0}")]
    Failed(Cause),
}

impl CommError {
    /// The root cause, if the group failed.
    pub fn cause(&self) -> Option<&Cause> {
        match self {
            CommError::Failed(cause) => Some(cause),
            _ => None,
        }
    }

    pub(super) fn system(what: impl Into<String>, source: impl Into<std::io::Error>) -> CommError {
        CommError::System { what: what.into(), source: source.into() }
    }

    pub(super) fn protocol(with: impl Into<String>, text: impl fmt::Display) -> CommError {
        CommError::Protocol { with: with.into(), text: text.to_string() }
    }
}

/// `rank 3`, or `ranks 1, 2, 5`.
pub(super) fn ranks_text(ranks: &[u32]) -> String {
    let list: Vec<String> = ranks.iter().take(16).map(u32::to_string).collect();
    let more = if ranks.len() > 16 { format!(" and {} more", ranks.len() - 16) } else { String::new() };
    format!("rank{} {}{more}", if ranks.len() == 1 { "" } else { "s" }, list.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_read_like_a_sentence() {
        let cause = Cause { host: "b".into(), during: "barrier".into(), ..Cause::failed(3, "connection closed") };
        assert_eq!(cause.to_string(), "rank 3 on b: connection closed (during barrier)");
        assert_eq!(Cause::stopped(1, 15).to_string(), "rank 1: stopped by signal 15");
    }

    #[test]
    fn missing_ranks_are_listed() {
        let error = CommError::Missing { missing: vec![1, 3], world: 4, seconds: 60.0 };
        assert_eq!(error.to_string(), "2 of 4 ranks did not arrive within 60 s: ranks 1, 3");
    }
}
