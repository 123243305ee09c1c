//! Fabric decisions for jobs on cloud nodes, through the same index and planner as the
//! controller's. The decisions, NCCL's files and the pod additions are compared with reviewed
//! snapshots; further assertions hold for all of them.

mod files;
mod properties;
pub(crate) mod scenes;

use scenes::{JOBS, SCENES, look};
use serde_json::json;
use switchyard_crds::DecisionOutcome;

/// Formats decisions for review: applied settings in full, and only the names of those left alone.
fn review(scene: &scenes::Scene, job: &scenes::Job) -> String {
    let found = look(scene, job);
    let fabric = match &found.fabric {
        Ok(fabric) => fabric,
        Err(why) => return serde_saphyr::to_string(&json!({"refused": why})).unwrap(),
    };
    let decided = |wanted: DecisionOutcome| fabric.decisions.iter().filter(move |decision| decision.outcome == wanted);
    let left: Vec<&str> = decided(DecisionOutcome::NotSet).map(|decision| decision.name.as_str()).collect();
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
        "set": decided(DecisionOutcome::Set).collect::<Vec<_>>(),
        "user": decided(DecisionOutcome::User).collect::<Vec<_>>(),
        "leftAlone": left.join(" "),
        "conf": files,
        "pod": found.pod,
    });
    serde_saphyr::to_string(&review).unwrap()
}

#[test]
fn every_scene_matches_the_reviewed_text() {
    let mut count = 0;
    for scene in &SCENES {
        for job in &JOBS {
            insta::with_settings!({snapshot_path => "fabric/golden", prepend_module_to_snapshot => false}, {
                insta::assert_snapshot!(format!("{}__{}", scene.name, job.name), review(scene, job));
            });
            count += 1;
        }
    }
    assert!(count >= 60, "{count} scenes");
}
