//! Classification of write errors: who has to act, and when to retry.

use kube::core::Status;
use std::time::Duration;

/// Kind of a write error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Cause {
    /// The object has changed since the write was planned.
    Stale,
    /// An object of this name already exists.
    Exists,
    /// The object does not exist.
    Gone,
    /// An object that does not belong to the job has the name.
    Taken,
    /// The namespace is being deleted.
    Ending,
    /// Quota, admission or permissions: a user has to change something first.
    Forbidden,
    /// The server rejects the object as invalid.
    Invalid,
    /// The server does not know the kind, because a CRD or an API is missing.
    Unknown,
    /// The server is busy, responds too late, or does not respond.
    Unreachable,
}

/// When to retry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retry {
    /// When the cache shows something new.
    OnChange,
    /// After a backoff.
    BackOff,
}

impl Cause {
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

    /// When to retry a write that failed for this cause.
    pub fn retry(self) -> Retry {
        match self {
            Cause::Stale | Cause::Exists | Cause::Gone | Cause::Ending => Retry::OnChange,
            Cause::Taken | Cause::Forbidden | Cause::Invalid | Cause::Unknown | Cause::Unreachable => Retry::BackOff,
        }
    }

    /// Value of the metrics label.
    pub fn label(self) -> &'static str {
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

/// Whether an object exceeds the storage limit. For most sizes the API server passes on the error
/// of etcd, or of its etcd client, with status 500.
fn is_too_large(status: &Status) -> bool {
    let contains = |text| status.message.contains(text);
    status.code == 413 || contains("request is too large") || contains("trying to send message larger than max")
}

/// A failed API call.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot {operation}: {message}")]
pub struct ApiError {
    /// The operation, such as `create Pod a-1-0`.
    pub operation: String,
    /// The server's error message.
    pub message: String,
    pub cause: Cause,
}

impl ApiError {
    pub(super) fn new(operation: String, error: &kube::Error) -> ApiError {
        let message = match error {
            kube::Error::Api(status) if is_too_large(status) => {
                format!(
                    "{}: the object exceeds the API server's size limit (1.5 MiB); shorten the job's spec",
                    status.message
                )
            }
            kube::Error::Api(status) => status.message.clone(),
            other => format!("the API server cannot be reached: {other}"),
        };
        ApiError { operation, message, cause: Cause::of(error) }
    }

    /// Whether Pod Security `restricted` rejected a pod.
    pub fn violates_restricted_pod_security(&self) -> bool {
        self.cause == Cause::Forbidden && self.message.contains("violates PodSecurity \"restricted:")
    }

    pub(super) fn timeout(operation: String, deadline: Duration) -> ApiError {
        let message = format!("the API server did not respond within {} s", deadline.as_secs());
        ApiError { operation, message, cause: Cause::Unreachable }
    }
}

#[cfg(test)]
mod tests {
    use super::{ApiError, Cause, Retry};
    use kube::core::Status;
    use kube::core::response::{StatusCause, StatusDetails};

    #[test]
    fn status_codes_map_to_causes_and_retries() {
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

    /// Regression test: the log reported every few minutes that the API server was unreachable.
    #[test]
    fn an_oversized_object_is_invalid_and_the_error_suggests_a_fix() {
        for (code, message) in [
            (413, "Request entity too large: limit is 3145728"),
            (500, "etcdserver: request is too large"),
            (
                500,
                "rpc error: code = ResourceExhausted desc = trying to send message larger than max (2098021 vs. 2097152)",
            ),
        ] {
            let response = kube::Error::Api(Status { code, message: message.into(), ..Status::default() }.boxed());
            let error = ApiError::new("write the status of TrainJob a".into(), &response);
            let expected = format!(
                "cannot write the status of TrainJob a: {message}: the object exceeds the API server's size limit (1.5 MiB); shorten the \
                 job's spec"
            );
            assert_eq!((error.cause, error.to_string()), (Cause::Invalid, expected));
        }
    }
}
