//! Writes this node's GPUTopology to the API server whenever it must change. Only this module talks
//! to the server.
//!
//! The object and its status are applied separately, both by server-side apply with one field
//! manager, so a second agent on the same node applies the same fields and changes nothing.

use crate::pause::spread;
use crate::report::{Draft, differing};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, Resource, ResourceExt};
use serde_json::{Value, json};
use std::time::Duration;
use switchyard_crds::gpu_topology::{GPUTopology, GPUTopologyStatus};
use tokio::time::Instant;

/// Field manager of everything that the agent writes.
const MANAGER: &str = "switchyard-agent";
/// Time limit for all calls of one write.
const TIMEOUT: Duration = Duration::from_secs(15);
/// Earliest renewal of a report, as a share of the renewal period.
const EARLIEST: f64 = 0.8;

/// Why the object on the server is not up to date.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WriteError {
    /// The Node that should own the object does not exist.
    #[error("there is no Node {0}")]
    NoNode(String),
    #[error("{}", reason_of(.0))]
    Api(Box<kube::Error>),
    #[error("no answer within {} s", TIMEOUT.as_secs())]
    Timeout,
}

impl From<kube::Error> for WriteError {
    fn from(error: kube::Error) -> Self {
        WriteError::Api(Box::new(error))
    }
}

impl WriteError {
    /// A short label value for metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            WriteError::NoNode(_) => "no_node",
            WriteError::Timeout => "timeout",
            WriteError::Api(error) => match error.as_ref() {
                kube::Error::Api(status) => match status.code {
                    401 | 403 => "forbidden",
                    404 => "not_found",
                    409 => "conflict",
                    400 | 422 => "invalid",
                    429 => "throttled",
                    500..=599 => "server",
                    _ => "other",
                },
                _ => "unreachable",
            },
        }
    }
}

/// The server's own message, or the innermost cause: the outer errors only name client layers.
fn reason_of(error: &kube::Error) -> String {
    if let kube::Error::Api(status) = error {
        return status.message.clone();
    }
    let mut inner: &dyn std::error::Error = error;
    while let Some(source) = inner.source() {
        inner = source;
    }
    format!("the API server cannot be reached: {inner}")
}

/// Result of [`Writer::sync`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum WriteOutcome {
    /// The object was up to date.
    Nothing,
    /// These fields of the status were changed.
    Facts(Vec<String>),
    /// Nothing changed, but the report was due for renewal.
    Renewal,
}

/// The object as last read from the server.
#[derive(Debug)]
struct LastRead {
    status: GPUTopologyStatus,
    /// When to read it again and renew the report.
    renew_at: Instant,
}

#[derive(Debug)]
pub(crate) struct Writer {
    topologies: Api<GPUTopology>,
    nodes: Api<Node>,
    node: String,
    /// Age at which a report is renewed.
    renew: Duration,
    last_read: Option<LastRead>,
}

impl Writer {
    pub fn new(client: Client, node: &str, renew: Duration) -> Writer {
        let (topologies, nodes) = (Api::all(client.clone()), Api::all(client));
        Writer { topologies, nodes, node: node.into(), renew, last_read: None }
    }

    /// When the report must be renewed; `None` if it was never read.
    pub fn renew_at(&self) -> Option<Instant> {
        self.last_read.as_ref().map(|last_read| last_read.renew_at)
    }

    /// When the facts on the server were read.
    pub fn observed(&self) -> Option<Timestamp> {
        self.last_read.as_ref()?.status.observed_time.as_ref().map(|time| time.0)
    }

    /// Updates the object on the server to the draft. Makes no call if the draft is unchanged and
    /// the report is recent.
    ///
    /// # Errors
    /// A call failed; the next `sync` reads the object again.
    pub async fn sync(&mut self, draft: &Draft) -> Result<WriteOutcome, WriteError> {
        let now = Timestamp::now();
        if let Some(last_read) = &self.last_read {
            let unchanged = differing(&draft.status(Some(&last_read.status), now), &last_read.status).is_empty();
            if unchanged && Instant::now() < last_read.renew_at {
                return Ok(WriteOutcome::Nothing);
            }
        }
        self.last_read = None;
        tokio::time::timeout(TIMEOUT, self.write(draft, now)).await.map_err(|_| WriteError::Timeout)?
    }

    async fn write(&mut self, draft: &Draft, now: Timestamp) -> Result<WriteOutcome, WriteError> {
        let before = self.get_or_create().await?;
        let before = before.status.unwrap_or_default();
        let status = draft.status(Some(&before), now);
        let changed = differing(&status, &before);
        // Another agent on this node may have renewed the report, and writing the same facts again
        // does not make them newer.
        let is_newer = status.observed_time > before.observed_time;
        let is_old = before.observed_time.as_ref().is_none_or(|time| age(time, now) >= self.renew.mul_f64(EARLIEST));
        if changed.is_empty() && !(is_newer && is_old) {
            let age = before.observed_time.as_ref().map_or(Duration::ZERO, |time| age(time, now));
            let rest = spread(self.renew, EARLIEST).saturating_sub(age);
            // Facts that cannot be renewed are checked no more often than others.
            let rest = if rest.is_zero() { spread(self.renew, EARLIEST) } else { rest };
            self.last_read = Some(LastRead { status: before, renew_at: Instant::now() + rest });
            return Ok(WriteOutcome::Nothing);
        }
        let body = json!({"status": &status});
        self.topologies.patch_status(&self.node, &apply(), &Patch::Apply(self.object(body))).await?;
        self.last_read = Some(LastRead { status, renew_at: Instant::now() + spread(self.renew, EARLIEST) });
        Ok(if changed.is_empty() { WriteOutcome::Renewal } else { WriteOutcome::Facts(changed) })
    }

    /// Reads the object, or creates it, owned by the current Node so that it is deleted with the
    /// Node.
    async fn get_or_create(&self) -> Result<GPUTopology, WriteError> {
        let node = self.nodes.get_opt(&self.node).await?;
        let uid = node.and_then(|node| node.uid()).ok_or_else(|| WriteError::NoNode(self.node.clone()))?;
        if let Some(object) = self.topologies.get_opt(&self.node).await?
            && object.owner_references().iter().any(|owner| owner.uid == uid)
        {
            return Ok(object);
        }
        let owner =
            json!({"apiVersion": Node::api_version(&()), "kind": Node::kind(&()), "name": self.node, "uid": uid});
        let body = self.object(json!({"metadata": {"name": self.node, "ownerReferences": [owner]}, "spec": {}}));
        Ok(self.topologies.patch(&self.node, &apply(), &Patch::Apply(body)).await?)
    }

    fn object(&self, mut body: Value) -> Value {
        body["apiVersion"] = GPUTopology::api_version(&()).into();
        body["kind"] = GPUTopology::kind(&()).into();
        body["metadata"]["name"] = self.node.as_str().into();
        body
    }
}

/// Forces ownership of all report fields, so changes by others are reverted.
fn apply() -> PatchParams {
    PatchParams::apply(MANAGER).force()
}

/// Zero for a time in the future, because clocks differ.
fn age(time: &Time, now: Timestamp) -> Duration {
    Duration::try_from(now.duration_since(time.0)).unwrap_or(Duration::ZERO)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kube::core::Status;

    #[test]
    fn failures_have_a_label_and_a_message() {
        for (code, expected) in [
            (401, "forbidden"),
            (403, "forbidden"),
            (404, "not_found"),
            (409, "conflict"),
            (422, "invalid"),
            (429, "throttled"),
            (503, "server"),
            (301, "other"),
        ] {
            let status = Status { code, message: "the server's words".into(), ..Status::default() };
            let error = WriteError::from(kube::Error::Api(status.boxed()));
            assert_eq!((error.reason(), error.to_string().as_str()), (expected, "the server's words"), "{code}");
        }
        let refused = std::io::Error::new(std::io::ErrorKind::ConnectionRefused, "connection refused");
        let error = WriteError::from(kube::Error::Service(Box::new(refused)));
        assert_eq!(error.reason(), "unreachable");
        assert_eq!(error.to_string(), "the API server cannot be reached: connection refused");
        assert_eq!(WriteError::NoNode("a".into()).to_string(), "there is no Node a");
    }

    #[test]
    fn a_future_time_has_no_age() {
        let at = |second| Timestamp::from_second(second).unwrap();
        assert_eq!(age(&Time(at(10)), at(70)), Duration::from_secs(60));
        assert_eq!(age(&Time(at(70)), at(10)), Duration::ZERO);
    }
}
