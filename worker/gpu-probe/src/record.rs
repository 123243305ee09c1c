//! Persistent results: one JSON line per part, appended when it ends. A crash, or running out of
//! machine time, loses one part.

use crate::outcome::{Outcome, PartResult};
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::path::Path;

/// File name in the results folder.
const FILE: &str = "results.jsonl";

/// The results of this run, and of earlier ones of the same kind.
pub(crate) struct Record {
    file: Option<File>,
    results: Vec<PartResult>,
}

impl Record {
    /// Without a folder, nothing is kept. Results of the other kind (rehearsal or not) are ignored.
    pub(crate) fn open(folder: Option<&Path>, is_rehearsal: bool) -> Result<Record, String> {
        let Some(folder) = folder else { return Ok(Record { file: None, results: Vec::new() }) };
        let path = folder.join(FILE);
        let mut text = String::new();
        let opened = std::fs::create_dir_all(folder).and_then(|()| {
            let mut file = OpenOptions::new().create(true).append(true).read(true).open(&path)?;
            file.read_to_string(&mut text)?;
            if !text.is_empty() && !text.ends_with('\n') {
                // Keep a truncated line from swallowing the next one.
                file.write_all(b"\n")?;
            }
            Ok(file)
        });
        let file = opened.map_err(|error| format!("cannot write {}: {error}", path.display()))?;
        let mut record = Record { file: Some(file), results: Vec::new() };
        let known = text.lines().filter_map(|line| serde_json::from_str(line).ok());
        known
            .filter(|result: &PartResult| result.is_rehearsal == is_rehearsal)
            .for_each(|result| record.replace(result));
        Ok(record)
    }

    pub(crate) fn add(&mut self, result: PartResult) -> Result<(), String> {
        if let Some(file) = &mut self.file {
            let line = serde_json::to_string(&result).map_err(|error| error.to_string())? + "\n";
            let written = file.write_all(line.as_bytes()).and_then(|()| file.sync_data());
            written.map_err(|error| format!("cannot write {FILE}: {error}"))?;
        }
        self.replace(result);
        Ok(())
    }

    /// Replaces an earlier result of the same part. Skipping a part does not undo its result.
    fn replace(&mut self, result: PartResult) {
        if is_skipped(&result) && self.has(&result.part) {
            return;
        }
        self.results.retain(|other| other.part != result.part);
        self.results.push(result);
    }

    pub(crate) fn get(&self, part: &str) -> Option<&PartResult> {
        self.results.iter().find(|result| result.part == part)
    }

    /// Whether the part has run.
    pub(crate) fn has(&self, part: &str) -> bool {
        self.get(part).is_some_and(|result| !is_skipped(result))
    }

    pub(crate) fn results(&self) -> &[PartResult] {
        &self.results
    }
}

fn is_skipped(result: &PartResult) -> bool {
    matches!(result.outcome, Outcome::Skipped { .. })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result(part: &str, seconds: f64, is_rehearsal: bool) -> PartResult {
        PartResult { part: part.into(), title: "?".into(), is_rehearsal, seconds, outcome: Outcome::absent("x") }
    }

    #[test]
    fn results_persist_and_the_last_one_counts() {
        let folder = tempfile::tempdir().unwrap();
        let open = |is_rehearsal| Record::open(Some(folder.path()), is_rehearsal).unwrap();
        let mut record = open(false);
        for (part, seconds) in [("a", 1.0), ("b", 2.0), ("a", 3.0)] {
            record.add(result(part, seconds, false)).unwrap();
        }
        assert_eq!(open(false).results(), record.results());
        assert_eq!(record.get("a").map(|result| result.seconds), Some(3.0));
        assert!(!open(true).has("a"), "a rehearsal does not count");
    }

    #[test]
    fn a_skipped_part_has_no_result_and_keeps_an_earlier_one() {
        let skipped =
            |part| PartResult { outcome: Outcome::Skipped { reason: "x".into() }, ..result(part, 0.0, false) };
        let mut record = Record::open(None, false).unwrap();
        record.add(skipped("a")).unwrap();
        assert!(!record.has("a") && record.get("a").is_some());
        record.add(result("a", 1.0, false)).unwrap();
        record.add(skipped("a")).unwrap();
        assert_eq!(record.results(), [result("a", 1.0, false)]);
    }

    #[test]
    fn a_truncated_line_loses_only_its_part() {
        let folder = tempfile::tempdir().unwrap();
        let open = || Record::open(Some(folder.path()), false).unwrap();
        open().add(result("a", 1.0, false)).unwrap();
        let mut file = OpenOptions::new().append(true).open(folder.path().join(FILE)).unwrap();
        file.write_all(br#"{"part":"b","asks""#).unwrap();
        open().add(result("c", 1.0, false)).unwrap();
        let names: Vec<String> = open().results().iter().map(|result| result.part.clone()).collect();
        assert_eq!(names, ["a", "c"]);
    }
}
