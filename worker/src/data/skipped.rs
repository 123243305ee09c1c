//! Files that are not read, counted by reason.

use std::collections::BTreeMap;
use std::fmt::{self, Display, Formatter};
use std::path::{Path, PathBuf};
use switchyard_worker_contract::event::Skipped;

/// Why a selected file is not read.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Reason {
    /// Its name starts with a dot.
    Hidden,
    /// It has no bytes.
    Empty,
    /// A link to a directory that contains it.
    Loop,
    /// Its name has this extension, in lower case; empty for none.
    Extension(String),
    /// It belongs to another part of the data set than `train` and `val`.
    Part(String),
}

impl Display for Reason {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Reason::Hidden => f.write_str("hidden"),
            Reason::Empty => f.write_str("empty"),
            Reason::Loop => f.write_str("a link to a directory above it"),
            Reason::Extension(extension) if extension.is_empty() => f.write_str("no file extension"),
            Reason::Extension(extension) => write!(f, "`.{extension}` is not a format that is read"),
            Reason::Part(part) => write!(f, "`{part}` is neither `train` nor `val`"),
        }
    }
}

/// The files that are not read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct SkippedFiles(Vec<(PathBuf, Reason)>);

impl SkippedFiles {
    pub(super) fn add(&mut self, path: &Path, reason: Reason) {
        self.0.push((path.to_owned(), reason));
    }

    /// Count and first file of each reason.
    pub(super) fn by_reason(&self) -> Vec<Skipped> {
        self.below(Path::new(""))
    }

    /// Count and first file of each reason below a directory.
    pub(super) fn below(&self, directory: &Path) -> Vec<Skipped> {
        let mut reasons: BTreeMap<&Reason, (u64, &Path)> = BTreeMap::new();
        for (path, reason) in self.0.iter().filter(|(path, _)| path.starts_with(directory)) {
            let (files, first) = reasons.entry(reason).or_insert((0, path));
            *files += 1;
            *first = (*first).min(path);
        }
        let skipped = |(reason, (files, first)): (&Reason, (u64, &Path))| Skipped {
            reason: reason.to_string(),
            files,
            example: first.display().to_string(),
        };
        reasons.into_iter().map(skipped).collect()
    }
}
