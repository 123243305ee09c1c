//! Validates alert rules and dashboards with Prometheus' own `promtool`, and evaluates the alerts
//! on synthetic series.

use crate::chart::metrics::{boards, read};
use anyhow::{Result, ensure};
use std::fs;
use std::path::Path;
use std::sync::OnceLock;
use switchyard_tests::{Ended, Program, TIMEOUT, programs_of, root};
use tempfile::TempDir;

fn promtool(folder: &Path, arguments: &[&str]) -> Ended {
    static PROGRAM: OnceLock<std::path::PathBuf> = OnceLock::new();
    let program = PROGRAM.get_or_init(|| {
        let folders = programs_of(&["promtool"]).unwrap_or_else(|error| panic!("{error:#}"));
        folders[0].join("promtool")
    });
    Program::new(program, folder, arguments).run(TIMEOUT)
}

/// A folder with these rules and the tests of `alerts.yaml`.
fn folder(rules: &str) -> Result<TempDir> {
    let folder = tempfile::tempdir()?;
    fs::write(folder.path().join("rules.yaml"), rules)?;
    fs::copy(root().join("tests/tests/chart/alerts.yaml"), folder.path().join("alerts.yaml"))?;
    Ok(folder)
}

#[test]
fn alerts_fire_when_they_should_and_only_then() -> Result<()> {
    let rules = read("rules.yaml")?;
    let checked = |rules: &str| -> Result<(Ended, Ended)> {
        let folder = folder(rules)?;
        let check = promtool(folder.path(), &["check", "rules", "--lint=all", "--lint-fatal", "rules.yaml"]);
        Ok((check, promtool(folder.path(), &["test", "rules", "alerts.yaml"])))
    };
    let (check, test) = checked(&rules)?;
    ensure!(check.code == Some(0), "{}{}", check.stdout, check.stderr);
    ensure!(test.code == Some(0), "{}{}", test.stdout, test.stderr);
    // Every alert must be covered by `alerts.yaml`.
    let played = fs::read_to_string(root().join("tests/tests/chart/alerts.yaml"))?;
    let alerts: Vec<&str> = rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    ensure!(alerts.len() > 10, "{alerts:?}");
    for alert in alerts {
        ensure!(played.contains(&format!("alertname=\"{alert}\"")), "{alert} is not in alerts.yaml");
    }
    // An alert that fires too early, one that never fires, and an invalid expression.
    for (from, to, is_checked) in [
        ("absent(switchyard_leader)\n        for: 5m", "absent(switchyard_leader)\n        for: 1m", true),
        ("max(switchyard_queue_age_seconds) > 30", "max(switchyard_queue_age_seconds) > 300", true),
        ("max(switchyard_leader) < 1", "max(switchyard_leader < 1", false),
    ] {
        ensure!(rules.contains(from), "{from}");
        let (check, test) = checked(&rules.replacen(from, to, 1))?;
        assert_eq!(check.code == Some(0), is_checked, "{to}: {}{}", check.stdout, check.stderr);
        assert_ne!(test.code, Some(0), "{to}: {}", test.stdout);
    }
    Ok(())
}

#[test]
fn every_dashboard_panel_has_a_valid_query() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let parses = |expression: &str| {
        // Grafana substitutes its variables.
        let expression = expression.replace("$__rate_interval", "5m");
        promtool(folder.path(), &["--experimental", "promql", "format", &expression]).code == Some(0)
    };
    let boards = boards()?;
    assert!(boards.len() > 20, "{} expressions", boards.len());
    for (location, expression) in boards {
        assert!(parses(&expression), "{location}: {expression}");
    }
    assert!(!parses("sum(rate(switchyard_events_total[$__rate_interval])"));
    Ok(())
}
