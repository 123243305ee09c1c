//! Jobs whose pods reference claims.

use super::*;

/// A queued job of one pod that uses this claim.
fn with_claim(name: &str, claim: &str) -> [Value; 2] {
    let volumes = json!([{"name": "data", "persistentVolumeClaim": {"claimName": claim}}]);
    let mut waits = job(name, 1, "2026-01-02T00:00:00Z", waiting());
    waits["spec"]["template"] = json!({"spec": {"volumes": volumes}});
    let mut pod = pod(name, 0, None, 0);
    pod["spec"]["volumes"] = volumes;
    pod["spec"]["schedulingGates"] = json!([{"name": switchyard_crds::labels::GANG_GATE}]);
    [waits, pod]
}

fn claim(name: &str, volume: &str) -> Value {
    json!({"kind": "PersistentVolumeClaim", "metadata": {"name": name, "namespace": "ns"},
        "spec": {"volumeName": volume, "storageClassName": "local"}})
}

fn volume(name: &str, node: &str) -> Value {
    let is_in = json!({"key": "metadata.name", "operator": "In", "values": [node]});
    json!({"kind": "PersistentVolume", "metadata": {"name": name}, "spec": {
        "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchFields": [is_in]}]}}}})
}

/// Two nodes, the first of them busy.
fn two_nodes() -> Vec<Value> {
    let mut items: Vec<Value> = ["n1", "n2"].map(node).into();
    items.extend([job("small", 1, "2026-01-01T00:00:00Z", placed(&["n1"])), pod("small", 0, Some("n1"), 0)]);
    items
}

/// Regression test: `explain` called a job "placeable" whose volume is on another node, and showed
/// every other job a reservation for it.
#[test]
fn a_job_waits_for_its_volumes_node_and_reserves_no_other() {
    let mut items = two_nodes();
    items.extend(with_claim("pinned", "data"));
    let explain = |items: &[Value], job: &TrainJob| cluster(items).explain(job, PreviousPlacement::Ignored).unwrap();
    let pinned: TrainJob = cluster(&items).job("ns", "pinned").unwrap().clone();
    assert_eq!(nodes(&explain(&items, &pinned)), ["n2"], "without claims in the snapshot they are not checked");
    items.extend([claim("data", "pv-1"), volume("pv-1", "n1")]);
    let why = explain(&items, &pinned).placement.unwrap_err();
    assert!(why.sentence.contains("PersistentVolumeClaim data has no volume there"), "{}", why.sentence);
    let late = explain(&items, &fresh("late", 1, json!({})));
    let held = late.ahead.as_ref().map(|ahead| ahead.nodes.as_slice());
    assert_eq!((nodes(&late), held), (vec!["n2"], Some(&["n1".to_string()][..])), "it reserves only its volume's node");
    let volumes = json!([{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]);
    let new = fresh("new", 1, json!({"template": {"spec": {"volumes": volumes}}}));
    assert!(explain(&items, &new).placement.is_err(), "`plan` reads them for a job that does not exist yet");
}

#[test]
fn a_job_that_names_a_missing_claim_is_not_queued() {
    let mut items = two_nodes();
    items.extend(with_claim("early", "nope"));
    items.extend([claim("other", "pv-1"), volume("pv-1", "n1")]);
    let early: TrainJob = cluster(&items).job("ns", "early").unwrap().clone();
    let verdict = cluster(&items).explain(&early, PreviousPlacement::Ignored).unwrap();
    let absent = "PersistentVolumeClaim nope does not exist: create it in the job's namespace, or correct its name in \
                  spec.template.spec.volumes";
    assert_eq!((verdict.placement.unwrap_err().sentence.as_str(), verdict.forecast), (absent, None));
    let gang = cluster(&items).explain(&fresh("gang", 2, json!({})), PreviousPlacement::Ignored).unwrap();
    assert_eq!(gang.ahead, None);
}
