//! Results as text for people.

use crate::PartResult;
use crate::outcome::Outcome;
use serde_json::Value;
use std::fmt::Write;

/// One result: a line, and another one for every row of its tables.
pub(crate) fn part(result: &PartResult) -> String {
    let mut text = String::new();
    let (status, line, rows) = match &result.outcome {
        Outcome::Ok { figures } => ("ok", scalars(figures), tables(figures)),
        Outcome::Absent { reason, looked_for } => {
            let tried = match looked_for.len() {
                0 => String::new(),
                count => format!(" ({count} places tried; all are in the result file)"),
            };
            ("absent", format!("{reason}{tried}"), Vec::new())
        }
        Outcome::Failed { call, code, text, figures } => {
            let code = code.map(|code| format!(" {code}")).unwrap_or_default();
            ("FAILED", format!("{call}{code}: {text}"), figures.as_ref().map(tables).unwrap_or_default())
        }
    };
    // Writing to a string cannot fail.
    let _ = writeln!(text, "{:<28} {status:<7} {:>7.2} s  {line}", result.asks, result.seconds);
    for row in rows {
        let _ = writeln!(text, "    {row}");
    }
    text
}

/// Counts of the outcomes.
pub(crate) fn summary(results: &[PartResult]) -> String {
    let count = |fits: fn(&Outcome) -> bool| results.iter().filter(|result| fits(&result.outcome)).count();
    let ok = count(|outcome| matches!(outcome, Outcome::Ok { .. }));
    let absent = count(|outcome| matches!(outcome, Outcome::Absent { .. }));
    let gpu = results.iter().any(|result| result.part == "driver" && matches!(result.outcome, Outcome::Ok { .. }));
    let machine = if gpu { "" } else { "No GPU on this machine. " };
    format!("{machine}{ok} ok, {absent} absent, {} failed\n", results.len() - ok - absent)
}

/// `name value` of everything but lists of objects.
fn scalars(figures: &Value) -> String {
    let pairs = figures.as_object().into_iter().flatten().filter(|(_, value)| !is_table(value) && !value.is_null());
    pairs.map(|(name, value)| pair(name, value)).collect::<Vec<_>>().join("  ")
}

fn pair(name: &str, value: &Value) -> String {
    match value {
        Value::String(text) => format!("{name} {text}"),
        Value::Object(_) => format!("{name} ({})", scalars(value)),
        other => format!("{name} {other}"),
    }
}

fn is_table(value: &Value) -> bool {
    value.as_array().is_some_and(|rows| rows.iter().all(Value::is_object))
}

fn tables(figures: &Value) -> Vec<String> {
    let lists = figures.as_object().into_iter().flatten().filter(|(_, value)| is_table(value));
    lists.flat_map(|(_, rows)| rows.as_array().into_iter().flatten().map(scalars)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_answer_is_a_line_and_rows() {
        let figures = json!({"version": "13.2", "devices": [{"name": "H100", "share": null, "in": {"ms": 1.5}}]});
        let shown = part(&PartResult { part: "x", asks: "driver", seconds: 0.5, outcome: Outcome::Ok { figures } });
        let lines: Vec<&str> = shown.lines().collect();
        assert!(
            lines[0].starts_with("driver") && lines[0].contains("ok") && lines[0].ends_with("version 13.2"),
            "{shown}"
        );
        assert_eq!(lines[1].split_whitespace().collect::<Vec<_>>().join(" "), "in (ms 1.5) name H100");
        let failed = Outcome::Failed { call: "cuInit".into(), code: Some(999), text: "unknown".into(), figures: None };
        let shown = part(&PartResult { part: "x", asks: "driver", seconds: 0.5, outcome: failed });
        assert!(shown.contains("FAILED") && shown.contains("cuInit 999: unknown"), "{shown}");
    }
}
