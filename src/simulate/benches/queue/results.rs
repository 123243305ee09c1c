//! Reads and writes the result file, row by row.

use serde_json::{Value, json};
use std::error::Error;
use std::fs;
use std::path::PathBuf;

/// The columns that identify a row.
const KEY: [&str; 5] = ["part", "trace", "load", "model", "rule"];

/// The result file, rewritten after each row so that an interrupted run keeps its results.
pub(crate) struct Results {
    file: Option<PathBuf>,
    /// The machine of rows that name none.
    machine: Value,
    commands: Vec<Value>,
    rows: Vec<Value>,
}

impl Results {
    /// Keeps the file's rows if `is_piece`.
    pub(crate) fn open(file: Option<PathBuf>, is_piece: bool) -> Result<Results, Box<dyn Error>> {
        let mut results = Results { file, machine: json!(cpu()), commands: Vec::new(), rows: Vec::new() };
        if let Some(file) = results.file.as_ref().filter(|file| is_piece && file.exists()) {
            let before: Value = serde_json::from_str(&fs::read_to_string(file)?)?;
            let list = |name: &str| before[name].as_array().cloned().unwrap_or_default();
            (results.commands, results.rows) = (list("commands"), list("results"));
            results.machine = before["machine"].clone();
        }
        let command = json!(command());
        results.commands.retain(|before| *before != command);
        results.commands.push(command);
        Ok(results)
    }

    /// Adds a row, replacing the row with the same key.
    pub(crate) fn put(&mut self, mut row: Value) -> Result<(), Box<dyn Error>> {
        if self.machine != json!(cpu()) {
            row["machine"] = json!(cpu());
        }
        match self.rows.iter_mut().find(|before| KEY.iter().all(|key| before[key] == row[key])) {
            Some(before) => *before = row,
            None => self.rows.push(row),
        }
        let Some(file) = &self.file else { return Ok(()) };
        let report = json!({"command": "cargo xtask bench queue", "commands": self.commands, "machine": self.machine, "results": self.rows});
        Ok(fs::write(file, serde_json::to_string_pretty(&report)? + "\n")?)
    }
}

fn cpu() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or_default();
    name.trim_start_matches(['\t', ' ', ':']).into()
}

/// The command line that reproduces these rows.
fn command() -> String {
    let mut arguments = std::env::args().skip(1).filter(|word| word != "--bench");
    let mut chosen = Vec::new();
    while let Some(word) = arguments.next() {
        if word == "--json" {
            arguments.next();
        } else {
            chosen.push(word);
        }
    }
    match chosen.is_empty() {
        true => "cargo xtask bench queue".into(),
        false => format!("cargo bench -p switchyard-simulate --bench queue -- {}", chosen.join(" ")),
    }
}
