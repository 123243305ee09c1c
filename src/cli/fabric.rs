//! Formats fabric settings and their reasons.

use crate::snapshot::name_of;
use serde_json::{Value, json};
use switchyard_core::units::plural;
use switchyard_crds::{
    DecisionOutcome, FabricDecision, FabricStatus, PreflightSeverity, PreflightStatus, TrainJob, Transport,
};
use switchyard_fabric::forecast::{Forecast, InterNode, lines};
use switchyard_fabric::preflight::CHECKS;

/// How the processes of a job reach each other, formatted for people. `verbose` adds the source of
/// each entry.
pub(super) fn table(job: &TrainJob, fabric: &FabricStatus, forecast: Option<&Forecast>, verbose: bool) -> String {
    let mut text = format!("fabric of {}: {}\n", name_of(job), headline(fabric));
    for resource in &fabric.resources {
        text.push_str(&format!(
            "  each pod also asks for {} {}: {}\n",
            resource.name, resource.quantity.0, resource.reason
        ));
    }
    if let Some(forecast) = forecast {
        text.push_str("\nforecast\n");
        lines(forecast).iter().for_each(|line| text.push_str(&format!("  {line}\n")));
        let could = matches!(forecast.summary.between, Some(InterNode::Rdma { .. }));
        if could && fabric.transport == Some(Transport::TCP) {
            text.push_str("  that is what the ports could do; the pods go over TCP: see NCCL_IB_DISABLE below\n");
        }
    }
    for (outcome, title) in [
        (DecisionOutcome::Set, "set for you"),
        (DecisionOutcome::User, "your own, which stays"),
        (DecisionOutcome::NotSet, "left alone"),
    ] {
        let of: Vec<&FabricDecision> = fabric.decisions.iter().filter(|decision| decision.outcome == outcome).collect();
        if of.is_empty() {
            continue;
        }
        text.push_str(&format!("\n{title} ({})\n", of.len()));
        for decision in of {
            entry(&mut text, decision, verbose);
        }
    }
    if let Some(preflight) = &fabric.preflight {
        text.push_str(&format!("\npreflight: {}\n", counts(preflight)));
        findings(&mut text, preflight);
    }
    text
}

/// Results of the checks on the chosen nodes, formatted for people. `verbose` adds why checks do
/// not apply.
pub(super) fn checks(job: &TrainJob, fabric: &FabricStatus, nodes: &str, verbose: bool) -> String {
    let none = PreflightStatus::default();
    let preflight = fabric.preflight.as_ref().unwrap_or(&none);
    let mut text = format!("{} checks on {nodes} for {}: {}\n", CHECKS.len(), name_of(job), counts(preflight));
    findings(&mut text, preflight);
    if verbose {
        text.push_str("\nnot applicable\n");
        for skip in &preflight.skipped {
            text.push_str(&format!("  {} {}: {}\n", skip.check, skip.title, skip.reason));
        }
    }
    text
}

/// `24 ok, 1 BLOCK, 1 warn, 1 not applicable (12 NVLink between nodes)`.
fn counts(preflight: &PreflightStatus) -> String {
    let of = |severity| preflight.findings.iter().filter(|finding| finding.severity == severity).count();
    let mut parts = vec![format!("{} ok", preflight.passed)];
    for (count, word) in [(of(PreflightSeverity::Block), "BLOCK"), (of(PreflightSeverity::Warn), "warn")] {
        if count > 0 {
            parts.push(format!("{count} {word}"));
        }
    }
    let skipped: Vec<String> = preflight.skipped.iter().map(|skip| format!("{} {}", skip.check, skip.title)).collect();
    match skipped.len() {
        0 => {}
        1..=4 => parts.push(format!("{} not applicable ({})", skipped.len(), skipped.join(", "))),
        more => parts.push(format!("{more} not applicable (-v: why)")),
    }
    parts.join(", ")
}

fn findings(text: &mut String, preflight: &PreflightStatus) {
    for finding in &preflight.findings {
        let word = if finding.severity == PreflightSeverity::Block { "BLOCK" } else { "warn" };
        text.push_str(&format!("{word} {} {}   {}\n", finding.check, finding.title, finding.message));
        for (word, line) in [("found", &finding.evidence), ("effect", &finding.effect), ("fix", &finding.fix)] {
            if !line.is_empty() {
                text.push_str(&format!("    {word:<9} {line}\n"));
            }
        }
    }
}

/// Transport, forecast and profile in one line.
pub(super) fn headline(fabric: &FabricStatus) -> String {
    let transport =
        fabric.transport.map_or("not known what carries the data".to_string(), |transport| format!("{transport:?}"));
    let mut parts = vec![fabric.summary.clone().unwrap_or(transport)];
    parts.extend(fabric.profile.as_ref().map(|profile| format!("profile {profile}")));
    parts.join("; ")
}

fn entry(text: &mut String, decision: &FabricDecision, verbose: bool) {
    let FabricDecision { name, outcome, value, class, reason, evidence, nodes, releases, link } = decision;
    let value = value.as_ref().map(|value| format!("={value}")).unwrap_or_default();
    let on = nodes
        .as_ref()
        .map(|nodes| format!("   on node{} {nodes}", plural(if nodes.contains(['-', ',']) { 2 } else { 1 })));
    text.push_str(&format!("  {name}{value}{}\n", on.unwrap_or_default()));
    let mut row = |word: &str, line: &str| text.push_str(&format!("    {word:<9} {line}\n"));
    row("why", reason);
    if *outcome != DecisionOutcome::NotSet || verbose {
        row("evidence", evidence);
    }
    if verbose {
        row("class", &format!("{class:?}"));
        if let Some(releases) = releases {
            row("NCCL", releases);
        }
        row("read", link);
    }
}

/// The same as JSON.
pub(super) fn json(job: &TrainJob, fabric: &FabricStatus) -> Value {
    json!({"job": name_of(job), "fabric": fabric})
}
