//! Finds settings in a training manifest that cost speed, do nothing, or break the job. Pure: documents in, findings out.
//!
//! ```text
//! TrainJob, PyTorchJob, MPIJob, … ─> read ─> Workload (pods, containers, environment) ─> rules ─> Finding
//! ```
//!
//! Nothing is known of a cluster here: what depends on nodes is for the preflight. A field of an unexpected type is passed over: the API
//! server refuses it with a better message.

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
    /// The job fails, or does something else than the manifest says.
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
    /// The field.
    pub field: Path,
    /// What was got.
    pub got: String,
    /// Why it matters, in one sentence.
    pub why: String,
    /// The exact change that mends it.
    pub fix: String,
    /// Where a vendor says so.
    pub link: Option<&'static str>,
}

/// What is known besides the manifest.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    /// The NCCL of the image; otherwise any release.
    pub nccl: Option<Version>,
}

/// A document that was looked at.
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

/// Looks at a document. A `List` is looked at item by item; what starts no training is left out.
pub fn lint(document: &Value, options: Options) -> Vec<Linted> {
    let look = |workload: view::Workload| {
        let mut findings = rules::findings(&workload, options);
        findings.sort_by(|a, b| (&a.field, a.severity, a.rule).cmp(&(&b.field, b.severity, b.rule)));
        Linted { kind: workload.kind, kind_word: workload.kind_word, name: workload.name, findings }
    };
    read::workloads(document).into_iter().map(look).collect()
}
