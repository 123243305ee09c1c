//! `switchyard preflight` as users run it.

use crate::preflight::gangs::eight_nodes;
use crate::preflight::stage::Stage;
use serde_json::{Value, json};
use switchyard_tests::{Ended, Scene, TIMEOUT};

fn run(stage: &Stage, line: &str) -> Ended {
    let scene = Scene::new();
    // Without a snapshot time, nothing would count as outdated.
    let snapshot = json!({"apiVersion": "cli.switchyard.dev/v1", "kind": "ClusterSnapshot", "takenAt": crate::preflight::stage::NOW, "items": stage.items});
    scene.write("cluster.json", snapshot.to_string());
    scene.write("job.yaml", serde_saphyr::to_string(&stage.job).unwrap());
    let line = format!("preflight job.yaml --snapshot cluster.json {line}");
    let ended = scene.switchyard(line.trim().split(' ')).run(TIMEOUT);
    for text in [&ended.stdout, &ended.stderr] {
        assert!(!text.contains('\u{1b}') && !text.contains("panicked"), "{line}: {text}");
    }
    ended
}

fn faulty() -> Stage {
    let mut stage = eight_nodes();
    (0..6).for_each(|node| {
        stage.node(node, |status| status.host.as_mut().unwrap().locked_memory_limit = Some("65536".into()))
    });
    stage.node(2, |status| status.gpus[2].pcie_link.as_mut().unwrap().width = Some(8));
    stage
}

#[test]
fn the_screen_matches_the_reviewed_text() {
    let ended = run(&faulty(), "");
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(7), ""), "{}", ended.stdout);
    insta::with_settings!({snapshot_path => "golden", prepend_module_to_snapshot => false}, {
        insta::assert_snapshot!("screen", ended.stdout);
        insta::assert_snapshot!("screen_verbose", run(&faulty(), "-v").stdout);
    });
}

#[test]
fn exit_codes_reflect_the_findings() {
    assert_eq!(run(&Stage::new("hgx-h100-infiniband", "torch"), "").code, Some(0));
    let mut warns = Stage::new("hgx-h100-infiniband", "torch");
    warns.ports(1, |nic| nic.mtu_bytes = Some(2044));
    assert_eq!(run(&warns, "").code, Some(0), "a warning blocks nothing");
    // The command shows its findings regardless of the job's mode.
    for mode in ["None", "Report", "Enforce"] {
        let mut stage = faulty();
        stage.set("/spec/fabric", json!({"preflight": {"mode": mode}}));
        assert_eq!(run(&stage, "").code, Some(7), "{mode}");
    }
    let mut large = Stage::new("hgx-h100-infiniband", "torch");
    large.set("/spec/trainer/numNodes", json!(3));
    let ended = run(&large, "");
    assert_eq!(ended.code, Some(8));
    assert!(ended.stderr.contains("not placeable"), "{}", ended.stderr);
}

#[test]
fn programs_get_one_document() {
    let ended = run(&faulty(), "-o json");
    let document: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!((document["kind"].as_str(), ended.code), (Some("Preflight"), Some(7)));
    let findings = document["preflight"]["findings"].as_array().unwrap();
    assert_eq!((&findings[0]["check"], &findings[0]["severity"]), (&json!(8), &json!("Block")));
    assert_eq!(document["nodes"].as_array().unwrap().len(), 8);
    let counted =
        document["preflight"]["passed"].as_i64().unwrap() + document["preflight"]["notApplicable"].as_i64().unwrap();
    assert_eq!(counted, 25);
}
