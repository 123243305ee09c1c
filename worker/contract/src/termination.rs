//! Termination message of a pod: a JSON document that outlives the log.

use crate::event::{Failure, Summary};
use serde::{Deserialize, Serialize};

/// How a job's processes in one pod ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Termination {
    /// Exit code of the pod.
    pub exit_code: u8,
    /// State of the job; only from the first node's pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub summary: Option<Summary>,
    /// The first failure, or the stop, as far as this pod could determine; present unless
    /// `exit_code` is 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<Failure>,
}

/// Suffix of truncated text.
const CUT: &str = " ...";

impl Termination {
    /// Longest message that the kubelet keeps, in bytes.
    pub const LIMIT: usize = 4096;

    /// Serializes to JSON of at most [`Termination::LIMIT`] bytes. Long texts are truncated, never
    /// the JSON itself.
    pub fn message(&self) -> String {
        let mut cut = self.clone();
        loop {
            let text = serde_json::to_string(&cut).expect("invariant: a termination is plain data");
            let over = text.len().saturating_sub(Termination::LIMIT);
            let Some(failure) = cut.failure.as_mut().filter(|_| over > 0) else { return text };
            // What the rank was doing matters less than the cause.
            if failure.during.is_empty() {
                shorten(&mut failure.cause, over);
            } else {
                shorten(&mut failure.during, over);
            }
        }
    }

    /// Parses a message; `None` if it is not one of ours.
    pub fn parse(message: &str) -> Option<Termination> {
        serde_json::from_str(message).ok()
    }

    /// The failure behind all pods of one attempt: the report of the pod where it happened,
    /// otherwise any other.
    pub fn root_cause(pods: &[Termination]) -> Option<&Failure> {
        let failures = || pods.iter().filter_map(|pod| pod.failure.as_ref());
        failures().find(|failure| failure.rank == failure.origin_rank).or_else(|| failures().next())
    }
}

/// Truncates text that makes the JSON `over` bytes too long. JSON escapes a byte as up to six, so
/// at least a sixth must go; the caller repeats this until the message fits.
fn shorten(text: &mut String, over: usize) {
    let whole = text.strip_suffix(CUT).map_or(text.len(), str::len);
    let keep = text.floor_char_boundary(whole.saturating_sub(over.div_ceil(6) + CUT.len()));
    text.truncate(keep);
    if keep > 0 {
        text.push_str(CUT);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn failed(rank: u32, origin_rank: u32, cause: &str, during: &str) -> Termination {
        let failure = Failure { rank, origin_rank, cause: cause.into(), during: during.into(), exit_code: 5 };
        Termination { exit_code: 5, summary: None, failure: Some(failure) }
    }

    #[test]
    fn root_cause_prefers_the_pod_that_failed() {
        let pods = [failed(0, 2, "connection closed", ""), failed(2, 2, "killed", ""), failed(5, 2, "closed", "")];
        assert_eq!(Termination::root_cause(&pods).unwrap().cause, "killed");
        assert_eq!(Termination::root_cause(&pods[..1]).unwrap().cause, "connection closed");
        let done = Termination { exit_code: 0, summary: None, failure: None };
        assert_eq!(Termination::root_cause(&[done]), None);
    }

    proptest! {
        #[test]
        fn message_is_valid_json_within_the_limit(
            (cause, times) in (".{1,3}|[\\x00-\\x1f\"\\\\]", 0usize..3000),
            (during, repeats) in (".{1,3}", 0usize..3000),
        ) {
            let whole = failed(1, 1, &cause.repeat(times), &during.repeat(repeats));
            let message = whole.message();
            prop_assert!(message.len() <= Termination::LIMIT, "{} bytes", message.len());
            let read = Termination::parse(&message).expect("JSON");
            let (read, whole) = (read.failure.expect("a failure"), whole.failure.expect("a failure"));
            if read.cause != whole.cause {
                prop_assert!(read.during.is_empty() && message.len() > Termination::LIMIT / 2, "cut to {} bytes", message.len());
                prop_assert!(whole.cause.starts_with(read.cause.strip_suffix(CUT).expect("the truncation suffix")));
            }
        }
    }
}
