//! The outcome of one part.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use switchyard_cuda::Error;

/// The result of one part: a line of the record.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct PartResult {
    pub(crate) part: String,
    /// Short description of what the part checks.
    #[serde(rename = "asks")]
    pub(crate) title: String,
    /// Produced on the reference libraries with small sizes: the figures are meaningless.
    #[serde(rename = "rehearsal")]
    pub(crate) is_rehearsal: bool,
    pub(crate) seconds: f64,
    #[serde(flatten)]
    pub(crate) outcome: Outcome,
}

/// The outcome of one part. Functions return outcomes other than `Ok` as errors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "status", rename_all_fields = "camelCase")]
pub(crate) enum Outcome {
    /// The part works.
    Ok {
        /// What was found or measured; key names include the units.
        figures: Value,
    },
    /// A prerequisite is missing on this machine.
    Absent {
        reason: String,
        /// Names and paths that were tried, in order; empty if nothing was searched for.
        looked_for: Vec<String>,
    },
    /// Not run, or not to its end, because the budget does not suffice. A later run tries again.
    Skipped { reason: String },
    /// Everything is present but does not work.
    Failed {
        call: String,
        /// The call's error code, if it returns one.
        #[serde(skip_serializing_if = "Option::is_none")]
        code: Option<i64>,
        /// The library's error message.
        text: String,
        /// Figures obtained despite the failure.
        #[serde(skip_serializing_if = "Option::is_none")]
        figures: Option<Value>,
    },
}

impl Outcome {
    /// A missing prerequisite that is not a file.
    pub(crate) fn absent(reason: impl Into<String>) -> Outcome {
        Outcome::Absent { reason: reason.into(), looked_for: Vec::new() }
    }

    /// A failure without a code.
    pub(crate) fn failed(call: impl Into<String>, text: impl Into<String>) -> Outcome {
        Outcome::Failed { call: call.into(), code: None, text: text.into(), figures: None }
    }
}

impl From<Error> for Outcome {
    fn from(error: Error) -> Outcome {
        let words = error.to_string();
        match error {
            Error::NotFound { tried, .. } => {
                let looked_for = tried.iter().map(|path| path.display().to_string()).collect();
                Outcome::Absent { reason: words, looked_for }
            }
            Error::NoDevice => Outcome::absent(words),
            Error::NotLoaded { text, .. } => Outcome::failed("dlopen", text),
            Error::NoSymbol { .. } => Outcome::failed("dlsym", words),
            Error::Call { call, code, text, .. } => {
                Outcome::Failed { call, code: Some(code.into()), text, figures: None }
            }
            Error::Refused { call, text } => Outcome::failed(call, text),
        }
    }
}

impl From<Result<Value, Outcome>> for Outcome {
    fn from(result: Result<Value, Outcome>) -> Outcome {
        result.map_or_else(|stop| stop, |figures| Outcome::Ok { figures })
    }
}
