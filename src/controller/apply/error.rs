//! What a write met, as a table: who has to act, and when to try again.

use kube::core::Status;
use std::time::Duration;

/// Sort of a refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Cause {
    /// The object is not as it was when the write was planned.
    Stale,
    /// There is an object of this name already.
    Exists,
    /// The object is not there.
    Gone,
    /// Another object already has the name.
    Taken,
    /// The namespace is being deleted.
    Ending,
    /// Quota, admission or rights: a person has to change something first.
    Forbidden,
    /// The server does not accept the object.
    Invalid,
    /// The server does not know the kind: CRD or API missing.
    Unknown,
    /// The server is busy, responds too late, or does not respond.
    Unreachable,
}

/// When to try again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retry {
    /// When the cache shows something new.
    OnChange,
    /// After the pause of repeated failures.
    BackOff,
}

impl Cause {
    /// All of them.
    pub const ALL: [Cause; 9] = [
        Cause::Stale,
        Cause::Exists,
        Cause::Gone,
        Cause::Taken,
        Cause::Ending,
        Cause::Forbidden,
        Cause::Invalid,
        Cause::Unknown,
        Cause::Unreachable,
    ];

    /// The error policy.
    pub fn retry(self) -> Retry {
        match self {
            Cause::Stale | Cause::Exists | Cause::Gone | Cause::Ending => Retry::OnChange,
            Cause::Taken | Cause::Forbidden | Cause::Invalid | Cause::Unknown | Cause::Unreachable => Retry::BackOff,
        }
    }

    /// Word for metrics.
    pub fn word(self) -> &'static str {
        match self {
            Cause::Stale => "stale",
            Cause::Exists => "exists",
            Cause::Gone => "gone",
            Cause::Taken => "taken",
            Cause::Ending => "ending",
            Cause::Forbidden => "forbidden",
            Cause::Invalid => "invalid",
            Cause::Unknown => "unknown",
            Cause::Unreachable => "unreachable",
        }
    }

    /// Classifies an error of kube's client.
    pub fn of(error: &kube::Error) -> Cause {
        match error {
            kube::Error::Api(status) => Cause::of_status(status),
            _ => Cause::Unreachable,
        }
    }

    fn of_status(status: &Status) -> Cause {
        let ending =
            status.details.iter().flat_map(|details| &details.causes).any(|c| c.reason == "NamespaceTerminating");
        match status.code {
            _ if ending => Cause::Ending,
            401 | 403 => Cause::Forbidden,
            404 if status.details.as_ref().is_none_or(|details| details.name.is_empty()) => Cause::Unknown,
            404 => Cause::Gone,
            409 if status.reason == "AlreadyExists" => Cause::Exists,
            409 => Cause::Stale,
            400 | 405 | 413 | 415 | 422 => Cause::Invalid,
            _ if is_too_large(status) => Cause::Invalid,
            _ => Cause::Unreachable,
        }
    }
}

/// Whether an object is larger than what is stored. For most sizes the API server passes on what etcd, or its own client of etcd, says, as an
/// error of its own.
fn is_too_large(status: &Status) -> bool {
    let says = |words| status.message.contains(words);
    status.code == 413 || says("request is too large") || says("trying to send message larger than max")
}

/// One write that was not done.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot {what}: {why}")]
pub struct Refusal {
    /// What was to be done, such as `create Pod a-1-0`.
    pub what: String,
    /// Why not: the server's own sentence.
    pub why: String,
    /// Sort.
    pub cause: Cause,
}

impl Refusal {
    pub(super) fn new(what: String, error: &kube::Error) -> Refusal {
        let why = match error {
            kube::Error::Api(status) if is_too_large(status) => {
                format!(
                    "{}: the object is larger than the API server stores (1.5 MiB); shorten the job's spec",
                    status.message
                )
            }
            kube::Error::Api(status) => status.message.clone(),
            other => format!("the API server cannot be reached: {other}"),
        };
        Refusal { what, why, cause: Cause::of(error) }
    }

    /// Pod Security `restricted` does not admit a pod.
    pub fn is_by_pod_security_restricted(&self) -> bool {
        self.cause == Cause::Forbidden && self.why.contains("violates PodSecurity \"restricted:")
    }

    pub(super) fn late(what: String, deadline: Duration) -> Refusal {
        let why = format!("the API server did not answer within {} s", deadline.as_secs());
        Refusal { what, why, cause: Cause::Unreachable }
    }
}

#[cfg(test)]
mod tests {
    use super::{Cause, Refusal, Retry};
    use kube::core::Status;
    use kube::core::response::{StatusCause, StatusDetails};

    #[test]
    fn the_table() {
        let status = |code, name: &str, cause: &str| {
            let causes = vec![StatusCause { reason: cause.into(), message: String::new(), field: String::new() }];
            let [group, kind, uid] = [const { String::new() }; 3];
            let details = StatusDetails { name: name.into(), group, kind, uid, causes, retry_after_seconds: 0 };
            let reason = if cause == "AlreadyExists" { cause.to_string() } else { String::new() };
            kube::Error::Api(Status { code, reason, details: Some(details), ..Status::default() }.boxed())
        };
        for (code, name, cause, expected, retry) in [
            (409, "a", "", Cause::Stale, Retry::OnChange),
            (409, "a", "AlreadyExists", Cause::Exists, Retry::OnChange),
            (404, "a", "", Cause::Gone, Retry::OnChange),
            (404, "", "", Cause::Unknown, Retry::BackOff),
            (403, "a", "", Cause::Forbidden, Retry::BackOff),
            (403, "a", "NamespaceTerminating", Cause::Ending, Retry::OnChange),
            (422, "a", "FieldValueInvalid", Cause::Invalid, Retry::BackOff),
            (429, "", "", Cause::Unreachable, Retry::BackOff),
            (500, "", "", Cause::Unreachable, Retry::BackOff),
        ] {
            let found = Cause::of(&status(code, name, cause));
            assert_eq!((found, found.retry()), (expected, retry), "{code} {name} {cause}");
        }
    }

    /// The log said every few minutes that the API server cannot be reached.
    #[test]
    fn an_object_that_is_too_large_is_refused_and_says_what_to_change() {
        for (code, message) in [
            (413, "Request entity too large: limit is 3145728"),
            (500, "etcdserver: request is too large"),
            (
                500,
                "rpc error: code = ResourceExhausted desc = trying to send message larger than max (2098021 vs. 2097152)",
            ),
        ] {
            let error = kube::Error::Api(Status { code, message: message.into(), ..Status::default() }.boxed());
            let refusal = Refusal::new("write the status of TrainJob a".into(), &error);
            let says = format!(
                "cannot write the status of TrainJob a: {message}: the object is larger than the API server stores (1.5 MiB); shorten the \
                 job's spec"
            );
            assert_eq!((refusal.cause, refusal.to_string()), (Cause::Invalid, says));
        }
    }
}
