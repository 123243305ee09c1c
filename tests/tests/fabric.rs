//! Fabric decisions for jobs on cloud nodes, through the same index and planner as the
//! controller's. The decisions, NCCL's files and the pod additions are compared with reviewed
//! snapshots; further assertions hold for all of them.

mod files;
mod properties;
pub(crate) mod scenes;

use scenes::{JOBS, SCENES, look};
use serde_json::json;
use std::collections::BTreeSet;
use switchyard_crds::{DecisionOutcome, FabricDecision};
use switchyard_tests::difference;

/// Formats decisions for review: applied settings, and the number of those left alone.
fn review(scene: &scenes::Scene, job: &scenes::Job) -> String {
    let found = look(scene, job);
    let fabric = match &found.fabric {
        Ok(fabric) => fabric,
        Err(why) => return serde_saphyr::to_string(&json!({"refused": why})).unwrap(),
    };
    let decided = |wanted: DecisionOutcome| fabric.decisions.iter().filter(move |decision| decision.outcome == wanted);
    let files = found.files.as_ref().map(|map| {
        // Fold nodes with identical files.
        let mut folded: Vec<(String, Vec<&str>)> = Vec::new();
        for (name, text) in map {
            match folded.iter_mut().find(|(known, _)| known == text) {
                Some((_, names)) => names.push(name),
                None => folded.push((text.clone(), vec![name])),
            }
        }
        folded.into_iter().map(|(text, names)| json!({"files": names, "text": text})).collect::<Vec<_>>()
    });
    let review = json!({
        "transport": fabric.transport, "summary": fabric.summary, "profile": fabric.profile, "resources": fabric.resources,
        "set": decided(DecisionOutcome::Set).map(line).collect::<Vec<_>>(),
        "user": decided(DecisionOutcome::User).map(line).collect::<Vec<_>>(),
        "leftAlone": decided(DecisionOutcome::NotSet).count(),
        "conf": files,
        "pod": found.pod,
    });
    serde_saphyr::to_string(&review).unwrap()
}

/// `Must NCCL_NET=IB, nodes 0-1, NCCL 2.10-: evidence`.
fn line(decision: &FabricDecision) -> String {
    let FabricDecision { class, name, value, nodes, releases, evidence, .. } = decision;
    let part = |words: &str, value: &Option<String>| value.as_ref().map_or(String::new(), |it| format!("{words}{it}"));
    let (value, nodes, releases) = (part("=", value), part(", nodes ", nodes), part(", NCCL ", releases));
    format!("{class:?} {name}{value}{nodes}{releases}: {evidence}")
}

/// Jobs are shown as their difference from the first one on the same nodes.
#[test]
fn every_scene_matches_the_reviewed_text() {
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path("fabric/golden");
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    let mut count = 0;
    for scene in &SCENES {
        let mut first = None;
        for job in &JOBS {
            let text = review(scene, job);
            let shown = first.as_deref().map_or_else(|| text.clone(), |first| difference(first, &text));
            settings.bind(|| insta::assert_snapshot!(format!("{}__{}", scene.name, job.name), shown));
            first.get_or_insert(text);
            count += 1;
        }
    }
    assert!(count >= 60, "{count} scenes");
    settings.bind(|| insta::assert_snapshot!("reasons", reasons()));
}

/// All reasons of applied settings, with their sources.
fn reasons() -> String {
    let plans = SCENES.iter().flat_map(|scene| JOBS.iter().map(move |job| look(scene, job)));
    let decisions = plans.filter_map(|found| found.fabric.ok()).flat_map(|fabric| fabric.decisions);
    let applied = decisions.filter(|decision| decision.outcome != DecisionOutcome::NotSet);
    let lines: BTreeSet<String> = applied.map(|it| format!("{}: {} <{}>", it.name, it.reason, it.link)).collect();
    lines.into_iter().collect::<Vec<_>>().join("\n")
}
