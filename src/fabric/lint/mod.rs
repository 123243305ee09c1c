//! Finds settings in a training manifest that cost speed, have no effect, or break the job. Pure:
//! documents in, findings out.
//!
//! ```text
//! TrainJob, PyTorchJob, MPIJob, … ─> read ─> Workload (pods, containers, environment) ─> rules ─> Finding
//! ```
//!
//! The linter does not know the cluster; the preflight covers what depends on nodes. Fields of an
//! unexpected type are skipped, because the API server rejects them with a better message.

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

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// The job fails, or does something other than the manifest says.
    Error,
    /// The job works, but slowly or by luck.
    Warning,
    /// Informational.
    Note,
}

impl Severity {
    /// Name in the output.
    pub fn word(self) -> &'static str {
        match self {
            Severity::Error => "error",
            Severity::Warning => "warning",
            Severity::Note => "note",
        }
    }
}

/// A finding about a manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Id of the rule, one of [`RULES`].
    pub rule: &'static str,
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

/// Facts that the manifest does not contain.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    /// NCCL release of the image; `None` to accept any release.
    pub nccl: Option<Version>,
}

/// A document that was checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Linted {
    pub kind: Kind,
    /// Kind as the document spells it.
    pub kind_word: String,
    /// Name of the object; empty if it has none.
    pub name: String,
    /// In document order.
    pub findings: Vec<Finding>,
}

/// Checks a document. A `List` is checked item by item. Objects that start no training are omitted.
pub fn lint(document: &Value, options: Options) -> Vec<Linted> {
    let look = |workload: view::Workload| {
        let mut findings = rules::findings(&workload, options);
        findings.sort_by(|a, b| (&a.field, a.severity, a.rule).cmp(&(&b.field, b.severity, b.rule)));
        Linted { kind: workload.kind, kind_word: workload.kind_word, name: workload.name, findings }
    };
    read::workloads(document).into_iter().map(look).collect()
}
