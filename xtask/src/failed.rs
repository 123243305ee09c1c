//! Records the failures of the last `cargo xtask test` in the target folder, so that the next run
//! starts with them.

use crate::stages::Stage;
use crate::totals::{Name, Totals};
use crate::workspace::target;
use std::fs;
use std::path::PathBuf;

fn file() -> PathBuf {
    target().join("tests/failed.json")
}

/// The tests that failed last time; empty if none did or the file cannot be read.
pub(crate) fn last() -> Vec<Name> {
    fs::read(file()).ok().and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default()
}

/// Replaces the records of these stages. If the file cannot be written, the next run only loses its
/// order.
pub(crate) fn write(stages: &[&Stage], totals: &Totals) {
    let failed = merged(last(), stages, totals.failures.iter().map(|failure| failure.name.clone()));
    let _ = serde_json::to_vec_pretty(&failed).map(|text| fs::write(file(), text));
}

/// Keeps the failures of stages that did not run.
fn merged(last: Vec<Name>, stages: &[&Stage], now: impl Iterator<Item = Name>) -> Vec<Name> {
    let mut failed: Vec<Name> =
        last.into_iter().filter(|name| stages.iter().all(|stage| stage.name != name.stage)).chain(now).collect();
    failed.sort();
    failed
}

#[cfg(test)]
mod tests {
    use super::merged;
    use crate::stages::STAGES;
    use crate::totals::Name;

    fn name(stage: &str, test: &str) -> Name {
        Name { stage: stage.to_owned(), program: "a/b".to_owned(), test: test.to_owned() }
    }

    #[test]
    fn failures_of_skipped_stages_are_kept() {
        let ran: Vec<_> = STAGES.iter().filter(|stage| stage.name == "pure").collect();
        let last = vec![name("plane", "old"), name("pure", "mended")];
        let now = vec![name("pure", "new")].into_iter();
        assert_eq!(merged(last, &ran, now), [name("plane", "old"), name("pure", "new")]);
    }
}
