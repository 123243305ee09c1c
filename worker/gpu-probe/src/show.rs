//! Human-readable results.

use crate::outcome::{Outcome, PartResult};
use serde_json::Value;
use std::fmt::Write;

/// One result: a line, and one more for every row of its tables.
pub(crate) fn part(result: &PartResult) -> String {
    let mut text = String::new();
    let (status, figures) = match &result.outcome {
        Outcome::Ok { figures } => ("ok", Some(figures)),
        Outcome::Absent { .. } => ("absent", None),
        Outcome::Skipped { .. } => ("skipped", None),
        Outcome::Failed { figures, .. } => ("FAILED", figures.as_ref()),
    };
    let rows = figures.map(tables).unwrap_or_default();
    // Writing to a string cannot fail.
    let _ = writeln!(text, "{:<28} {status:<7} {:>7.2} s  {}", result.title, result.seconds, line(&result.outcome));
    for row in rows {
        let _ = writeln!(text, "    {row}");
    }
    text
}

/// An outcome on one line.
pub(crate) fn line(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Ok { figures } => scalars(figures),
        Outcome::Absent { reason, looked_for } if looked_for.is_empty() => reason.clone(),
        Outcome::Skipped { reason } => reason.clone(),
        Outcome::Absent { reason, looked_for } => {
            format!("{reason} ({} places tried; all are in the results)", looked_for.len())
        }
        Outcome::Failed { call, code, text, .. } => {
            let code = code.map(|code| format!(" {code}")).unwrap_or_default();
            format!("{call}{code}: {text}")
        }
    }
}

/// The failures with their reasons, the skipped parts, and the number of outcomes of each kind.
pub(crate) fn summary(results: &[PartResult]) -> String {
    let count = |fits: fn(&Outcome) -> bool| results.iter().filter(|result| fits(&result.outcome)).count();
    let ok = count(|outcome| matches!(outcome, Outcome::Ok { .. }));
    let absent = count(|outcome| matches!(outcome, Outcome::Absent { .. }));
    let skipped = results.iter().filter(|result| matches!(result.outcome, Outcome::Skipped { .. }));
    let skipped: Vec<&str> = skipped.map(|result| result.part.as_str()).collect();
    let (list, number) = match skipped.len() {
        0 => (String::new(), String::new()),
        number => (format!("skipped: {}\n", skipped.join(", ")), format!(", {number} skipped")),
    };
    let failures = results.iter().filter_map(|result| match &result.outcome {
        Outcome::Failed { .. } => Some(format!("failed: {}: {}\n", result.part, line(&result.outcome))),
        _ => None,
    });
    let is_missing = |result: &PartResult| result.part == "driver" && matches!(result.outcome, Outcome::Absent { .. });
    let machine = if results.iter().any(is_missing) { "No GPU on this machine. " } else { "" };
    format!(
        "{}{list}{machine}{ok} ok, {absent} absent, {} failed{number}\n",
        failures.collect::<String>(),
        results.len() - ok - absent - skipped.len()
    )
}

/// `name value` pairs, without lists of objects.
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
    fn a_result_is_a_line_and_its_rows() {
        let result = |outcome| PartResult {
            part: "x".into(),
            title: "driver".into(),
            is_rehearsal: false,
            seconds: 0.5,
            outcome,
        };
        let figures = json!({"version": "13.2", "devices": [{"name": "H100", "share": null, "in": {"ms": 1.5}}]});
        let shown = part(&result(Outcome::Ok { figures }));
        let lines: Vec<&str> = shown.lines().collect();
        assert!(
            lines[0].starts_with("driver") && lines[0].contains("ok") && lines[0].ends_with("version 13.2"),
            "{shown}"
        );
        assert_eq!(lines[1].split_whitespace().collect::<Vec<_>>().join(" "), "in (ms 1.5) name H100");
        let failed = Outcome::Failed { call: "cuInit".into(), code: Some(999), text: "unknown".into(), figures: None };
        let failed = result(failed);
        let shown = part(&failed);
        assert!(shown.contains("FAILED") && shown.contains("cuInit 999: unknown"), "{shown}");
        let missing = PartResult { part: "driver".into(), ..result(Outcome::absent("no library")) };
        let both = "failed: x: cuInit 999: unknown\nNo GPU on this machine. 0 ok, 1 absent, 1 failed\n";
        assert_eq!(summary(&[failed, missing]), both);
        let late = result(Outcome::Skipped { reason: "needs 9 s".into() });
        assert!(part(&late).contains("skipped    0.50 s  needs 9 s"), "{}", part(&late));
        assert_eq!(summary(&[late]), "skipped: x\n0 ok, 0 absent, 0 failed, 1 skipped\n");
        // Other parts say nothing about the GPU.
        assert_eq!(summary(&[result(Outcome::absent("no torch"))]), "0 ok, 1 absent, 0 failed\n");
    }
}
