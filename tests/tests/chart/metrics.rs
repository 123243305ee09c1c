//! Dashboards and alerts query metrics that exist: the series exposed by a real controller and a
//! real agent.

use crate::chart::installed;
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use switchyard_tests::TIMEOUT;
use switchyard_tests::chart::{chart, objects, policy_arguments, render};
use switchyard_tests::{
    Agent, AgentOptions, ControllerOptions, Host, http_address, page, plain_job, start_controller, until,
};

/// Names of the series on a metrics page, derived from each metric's type.
fn series(page: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for line in page.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let Some((name, kind)) = line.split_once(' ') else { continue };
        let ends: &[&str] = match kind {
            "counter" => &["_total"],
            "histogram" => &["_bucket", "_sum", "_count"],
            _ => &[""],
        };
        names.extend(ends.iter().map(|end| format!("{name}{end}")));
    }
    names
}

/// All of our metric names in a text.
fn metric_names(text: &str) -> BTreeSet<String> {
    let is_word = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    let words = text.split(|c: char| !is_word(c)).filter(|word| word.starts_with("switchyard_"));
    words.map(str::to_string).collect()
}

/// Conditions of the gauges that are 1 while a condition holds, from their HELP: what follows
/// `1 while an`.
fn conditions(page: &str) -> BTreeMap<&str, &str> {
    let helps = page.lines().filter_map(|line| line.strip_prefix("# HELP ")?.split_once(' '));
    let conditions = helps.filter_map(|(name, help)| {
        let condition = help.strip_prefix("1 while an ")?.split(';').next()?;
        Some((name, condition.trim_end_matches('.')))
    });
    conditions.collect()
}

/// Alerts that fire while a gauge is 1 but word its condition differently than the gauge's HELP,
/// and the number of those that use the same words.
fn reworded(rules: &Value, page: &str) -> (Vec<String>, usize) {
    let conditions = conditions(page);
    let (mut reworded, mut same) = (Vec::new(), 0);
    for rule in rules["groups"][0]["rules"].as_array().into_iter().flatten() {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
        let expression = text(&rule["expr"]);
        for name in metric_names(&expression).iter().filter(|_| expression.ends_with("> 0")) {
            let Some(condition) = conditions.get(name.as_str()) else { continue };
            let summary = text(&rule["annotations"]["summary"]).replace("{{ $labels.policy }} ", "");
            if summary.contains(condition) {
                same += 1;
            } else {
                reworded.push(format!("{}: {summary}; {name}: {condition}", rule["alert"]));
            }
        }
    }
    (reworded, same)
}

/// Reads a file from the chart's `files` folder.
pub(crate) fn read(name: &str) -> Result<String> {
    std::fs::read_to_string(chart().join("files").join(name)).with_context(|| name.to_string())
}

/// Queries of the dashboard: location and expression.
pub(crate) fn boards() -> Result<Vec<(String, String)>> {
    let mut all = Vec::new();
    let board: Value = serde_json::from_str(&read("dashboard.json")?)?;
    for panel in board["panels"].as_array().context("panels")? {
        for target in panel["targets"].as_array().context("targets")? {
            // A dashboard with a hard-coded data source works on one machine only.
            assert_eq!(target["datasource"]["uid"], "${datasource}", "{}", panel["title"]);
            all.push((format!("panel {}", panel["title"]), target["expr"].as_str().context("expr")?.to_string()));
        }
    }
    Ok(all)
}

/// Queries of dashboards and alerts.
fn expressions() -> Result<Vec<(String, String)>> {
    let mut all = boards()?;
    let rules: Value = serde_saphyr::from_str(&read("rules.yaml")?)?;
    for rule in rules["groups"][0]["rules"].as_array().context("rules")? {
        for (annotation, words) in [("summary", 10), ("description", 10)] {
            let text = rule["annotations"][annotation].as_str().unwrap_or_default();
            assert!(text.len() > words, "{}: no {annotation}", rule["alert"]);
        }
        all.push((format!("alert {}", rule["alert"]), rule["expr"].as_str().context("expr")?.to_string()));
    }
    Ok(all)
}

#[test]
fn dashboards_and_alerts_query_existing_series() -> Result<()> {
    let plane = installed();
    let host = Host::new()?;
    let agent = Agent::start(plane, "metrics", &host, &AgentOptions::default())?;
    let options = ControllerOptions {
        kubeconfig: Some(plane.controller_kubeconfig()?),
        arguments: policy_arguments(&objects(&render(&[])?)?),
        ..ControllerOptions::default()
    };
    let controller = start_controller(plane, "controller", &options)?;
    // Some series first appear with a job. This one waits because there are no nodes.
    let made = plane.kubectl_with(&["create", "-n", "default", "-f", "-"], &plain_job("a", 1, "run").to_string());
    ensure!(made.code == Some(0), "{}", made.stderr);
    let latest = [
        "switchyard_jobs",
        "switchyard_policy_missing",
        "switchyard_policy_refuses_foreign",
        "switchyard_events_total",
        "switchyard_agent_devices",
    ];
    let (mut known, mut metrics) = (BTreeSet::new(), String::new());
    let are_known = || {
        metrics = http_address(&controller).and_then(|address| page(address, "/metrics")).unwrap_or_default();
        known = series(&metrics);
        known.extend(series(&agent.page("/metrics")));
        Ok(latest.iter().all(|name| known.contains(*name)))
    };
    until("serving all metrics", TIMEOUT, are_known)?;
    let expressions = expressions()?;
    assert!(known.len() > 20 && expressions.len() > 20, "{} series, {} expressions", known.len(), expressions.len());
    let unknown = |text: &str| metric_names(text).into_iter().filter(|name| !known.contains(name)).collect::<Vec<_>>();
    for (location, expression) in &expressions {
        assert!(!metric_names(expression).is_empty(), "{location}: queries none of our series");
        assert!(
            unknown(expression).is_empty(),
            "{location}: unknown series {:?} in {expression}; known: {known:#?}",
            unknown(expression)
        );
    }
    let mut rules: Value = serde_saphyr::from_str(&read("rules.yaml")?)?;
    assert_eq!(reworded(&rules, &metrics), (Vec::new(), 2));
    // The checks must report another wording, and a misspelled metric.
    let alerts = rules["groups"][0]["rules"].as_array_mut().context("rules")?;
    let missing = alerts.iter_mut().find(|rule| rule["alert"] == "SwitchyardPolicyMissing");
    missing.context("the alert")?["annotations"]["summary"] =
        "The admission policy {{ $labels.policy }} is missing".into();
    assert_eq!(reworded(&rules, &metrics).0.len(), 1);
    assert_eq!(unknown("rate(switchyard_reconcile_total[5m]) + switchyard_leader"), ["switchyard_reconcile_total"]);
    Ok(())
}
