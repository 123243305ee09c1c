//! The outcome of one part.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use switchyard_cuda::Error;

/// The result of one part: a line of the record.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct PartResult {
    pub(crate) part: String,
    /// The question, in a few words.
    pub(crate) asks: String,
    /// Of the reference libraries, with small sizes: its figures mean nothing.
    #[serde(rename = "rehearsal")]
    pub(crate) is_rehearsal: bool,
    pub(crate) seconds: f64,
    #[serde(flatten)]
    pub(crate) outcome: Outcome,
}

/// The outcome of one part of the probe. Functions return outcomes other than `Ok` as their error.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "status", rename_all_fields = "camelCase")]
pub(crate) enum Outcome {
    /// It works.
    Ok {
        /// What was found or measured; units are in the names.
        figures: Value,
    },
    /// Something that the part needs is not on this machine.
    Absent {
        reason: String,
        /// Names and folders that were tried, in order; empty if nothing was searched for.
        looked_for: Vec<String>,
    },
    /// Everything exists and does not work.
    Failed {
        call: String,
        /// The returned code, if the call returns one.
        #[serde(skip_serializing_if = "Option::is_none")]
        code: Option<i64>,
        /// The library's message.
        text: String,
        /// What was found or measured nevertheless.
        #[serde(skip_serializing_if = "Option::is_none")]
        figures: Option<Value>,
    },
}

impl Outcome {
    /// Something is missing that was not searched for in files.
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
