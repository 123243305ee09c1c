//! Errors of a group, and the root cause that all its ranks report.

use serde::{Deserialize, Serialize};
use std::fmt;
use switchyard_worker_contract::event::member_name;

/// How a rank failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum CauseKind {
    Failed,
    /// Terminated by this signal.
    Stopped(i32),
    /// Alive, but makes no progress.
    Hung,
}

/// The first failure of a group. Every rank reports the same one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Cause {
    pub origin_rank: u32,
    /// Host name of that rank; the group fills it in if it is empty.
    #[serde(default)]
    pub host: String,
    pub kind: CauseKind,
    pub text: String,
    /// What the reporting rank was doing; the group fills it in if it is empty.
    #[serde(default)]
    pub during: String,
}

impl Cause {
    /// A failure of `origin_rank`; [`super::Group::abort`] fills in host and operation.
    pub fn failed(origin_rank: u32, text: impl Into<String>) -> Cause {
        Cause { origin_rank, host: String::new(), kind: CauseKind::Failed, text: text.into(), during: String::new() }
    }

    /// A hung rank; rank 0 fills in what the others are waiting for.
    pub fn hung(origin_rank: u32, text: impl Into<String>) -> Cause {
        Cause { kind: CauseKind::Hung, ..Cause::failed(origin_rank, text) }
    }

    /// A rank that a signal stopped.
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

/// Any error of this module. Messages are lowercase and name the expected and the actual value.
#[derive(Debug, thiserror::Error)]
pub enum CommError {
    /// An environment variable is missing or invalid.
    #[error("{name}: got {got}, expected {expected}")]
    Variable { name: &'static str, got: String, expected: String },
    #[error("key file {path}: got {got}, expected {expected}")]
    KeyFile { path: String, got: String, expected: &'static str },
    /// An argument of a collective is invalid; no rank has started anything.
    #[error("{name}: got {got}, expected {expected}")]
    Argument { name: &'static str, got: String, expected: String },
    /// Impossible sizes or ranks.
    #[error("group of ranks: got {got}, expected {expected}")]
    Group { got: String, expected: String },
    #[error("no connection to rank 0 at {address} within {seconds:.0} s; last error: {last}")]
    Unreachable { address: String, seconds: f64, last: String },
    /// The peer refused the handshake.
    #[error("refused by {by}: {reason}")]
    Refused { by: String, reason: String },
    #[error("{} of {members} {} did not arrive within {seconds:.0} s: {}", missing.len(), plural(*members, *world), format_members(missing, *world))]
    Missing { missing: Vec<u32>, world: u32, members: u32, seconds: f64 },
    /// The requested transport is not possible with these hosts.
    #[error("transport {got} is not possible: {why}")]
    Transport { got: String, why: String },
    /// A system call failed while the group was set up.
    #[error("cannot {what}: {source}")]
    System {
        /// The action, as in "cannot ...".
        what: String,
        #[source]
        source: std::io::Error,
    },
    /// The peer is another program, or bytes were corrupted.
    #[error("protocol error with {with}: {text}")]
    Protocol { with: String, text: String },
    /// [`super::Group::agree`] found different values. Every rank gets this text.
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

    /// The error with its sources on one line.
    pub(super) fn with_sources(&self) -> String {
        let mut text = self.to_string();
        let mut source = std::error::Error::source(self);
        while let Some(cause) = source {
            text = format!("{text}: {cause}");
            source = cause.source();
        }
        text
    }

    pub(super) fn system(what: impl Into<String>, source: impl Into<std::io::Error>) -> CommError {
        CommError::System { what: what.into(), source: source.into() }
    }

    pub(super) fn protocol(with: impl Into<String>, text: impl fmt::Display) -> CommError {
        CommError::Protocol { with: with.into(), text: text.to_string() }
    }
}

/// Names the members of a group with `world` ranks.
pub(super) fn plural(members: u32, world: u32) -> &'static str {
    if members == world { "ranks" } else { "parameter servers and ranks" }
}

/// `ranks 1, 2, parameter server 0`: servers are counted after the `world` ranks.
pub(super) fn format_members(members: &[u32], world: u32) -> String {
    let ranks: Vec<u32> = members.iter().copied().filter(|member| *member < world).collect();
    let ranks = (!ranks.is_empty()).then(|| format_ranks(&ranks));
    let servers = members.iter().filter(|member| **member >= world).map(|member| member_name(*member, world));
    ranks.into_iter().chain(servers).collect::<Vec<_>>().join(", ")
}

/// `rank 3`, or `ranks 1, 2, 5`.
pub(crate) fn format_ranks(ranks: &[u32]) -> String {
    let list: Vec<String> = ranks.iter().take(16).map(u32::to_string).collect();
    let more = if ranks.len() > 16 { format!(" and {} more", ranks.len() - 16) } else { String::new() };
    format!("rank{} {}{more}", if ranks.len() == 1 { "" } else { "s" }, list.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_is_one_readable_line() {
        let cause = Cause { host: "b".into(), during: "barrier".into(), ..Cause::failed(3, "connection closed") };
        assert_eq!(cause.to_string(), "rank 3 on b: connection closed (during barrier)");
        assert_eq!(Cause::stopped(1, 15).to_string(), "rank 1: stopped by signal 15");
    }

    #[test]
    fn missing_ranks_are_listed() {
        let error = CommError::Missing { missing: vec![1, 3, 5], world: 4, members: 6, seconds: 60.0 };
        assert_eq!(
            error.to_string(),
            "3 of 6 parameter servers and ranks did not arrive within 60 s: ranks 1, 3, parameter server 1"
        );
    }
}
