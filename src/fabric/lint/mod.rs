//! Finds settings in a training manifest that cost speed, do nothing, or break the job. Pure: documents in, findings out.
//!
//! ```text
//! TrainJob, PyTorchJob, MPIJob, … ─> read ─> Workload (pods, containers, environment) ─> rules ─> Finding
//! ```
//!
//! Nothing here knows a cluster: the preflight covers what depends on nodes. A field of an unexpected type is skipped: the API server refuses it
//! with a better message.

mod command;
mod cursor;
mod path;
mod read;
mod rules;
#[cfg(test)]
mod tests;
mod view;

pub use cursor::Cursor;
pub use path::{Path, Step};
pub use rules::{RULES, Rule};
pub use view::Kind;

use crate::variables::nccl::Version;
use serde_json::Value;

/// How much a finding matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// The job fails, or does something other than the manifest says.
    Error,
    /// The job works, slower or by luck.
    Warning,
    /// Worth knowing.
    Note,
}

impl Severity {
    /// One word for people and programs.
    pub fn word(self) -> &'static str {
        match self {
            Severity::Error => "error",
            Severity::Warning => "warning",
            Severity::Note => "note",
        }
    }
}

/// Something about a manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Id of the rule, one of [`RULES`].
    pub rule: &'static str,
    /// How much it matters.
    pub severity: Severity,
    pub field: Path,
    pub got: String,
    /// Why it matters, in one sentence.
    pub why: String,
    /// The exact change that fixes it.
    pub fix: String,
    /// The vendor's documentation.
    pub link: Option<&'static str>,
}

/// Facts beside the manifest.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    /// The NCCL of the image; otherwise any release.
    pub nccl: Option<Version>,
}

/// A document that was checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Linted {
    /// What it is.
    pub kind: Kind,
    /// Its kind, in the words of the document.
    pub kind_word: String,
    /// Name of the object; empty when it has none.
    pub name: String,
    /// In the order of the document.
    pub findings: Vec<Finding>,
}

/// Checks a document. A `List` is checked item by item; objects that start no training are left out.
pub fn lint(document: &Value, options: Options) -> Vec<Linted> {
    let look = |workload: view::Workload| {
        let mut findings = rules::findings(&workload, options);
        findings.sort_by(|a, b| (&a.field, a.severity, a.rule).cmp(&(&b.field, b.severity, b.rule)));
        Linted { kind: workload.kind, kind_word: workload.kind_word, name: workload.name, findings }
    };
    read::workloads(document).into_iter().map(look).collect()
}
