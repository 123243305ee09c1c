//! Prints results to standard output: for people, as JSON, or as YAML.

use crate::args::Output;
use serde::Serialize;
use serde_json::{Value, json};
use std::io::{ErrorKind, IsTerminal, Write};

/// API version of the commands' JSON output.
pub(crate) const CLI_VERSION: &str = "cli.switchyard.dev/v1";
/// Width of output that does not go to a terminal.
const PIPE_WIDTH: usize = 100;

/// Prints a result as a table, as YAML, or as one line of JSON of this kind.
pub(crate) fn emit(output: Output, kind: &str, value: &impl Serialize, table: impl FnOnce() -> String) {
    match output {
        Output::Json => json_line(kind, json!(value)),
        Output::Yaml => print(&yaml(value)),
        Output::Table | Output::Dot => print(&table()),
    }
}

/// Prints an object that has its own `apiVersion` and `kind`; the default is YAML, ready to be
/// saved.
pub(crate) fn emit_object(output: Output, object: &impl Serialize) {
    match output {
        Output::Json => print(&json!(object).to_string()),
        Output::Table | Output::Yaml | Output::Dot => print(&yaml(object)),
    }
}

/// Prints one JSON object on one line.
pub(crate) fn json_line(kind: &str, body: Value) {
    print(&with_kind(kind, body).to_string());
}

pub(crate) fn with_kind(kind: &str, mut body: Value) -> Value {
    body["apiVersion"] = CLI_VERSION.into();
    body["kind"] = kind.into();
    body
}

pub(crate) fn yaml(value: &impl Serialize) -> String {
    serde_saphyr::to_string(value).unwrap_or_default()
}

/// Prints to standard output. A closed pipe (`| head`) is not an error; any other write error, such
/// as a full disk, is reported.
pub(crate) fn print(text: &str) {
    let written = writeln!(anstream::stdout(), "{}", text.trim_end());
    if let Err(error) = written.as_ref()
        && error.kind() != ErrorKind::BrokenPipe
    {
        anstream::eprintln!("error: the result cannot be printed: {error}");
    }
}

/// Width of standard output in columns.
pub(crate) fn width() -> usize {
    let terminal = std::io::stdout().is_terminal().then(terminal_size::terminal_size).flatten();
    terminal.map_or(PIPE_WIDTH, |(width, _)| usize::from(width.0))
}
