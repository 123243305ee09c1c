#![allow(clippy::unwrap_used)]

use super::*;
use serde_json::{Value, json};

const CLUSTER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/clusters/two-racks.json");

fn example() -> SnapshotFile {
    snapshot::read_file(CLUSTER.as_ref()).unwrap()
}

fn topology(file: &SnapshotFile) -> ClusterTopology {
    ClusterTopology::of(file, &snapshot::cluster(file).unwrap())
}

fn object<'a>(file: &'a mut SnapshotFile, kind: &str, name: &str) -> &'a mut Value {
    file.items.iter_mut().find(|item| item["kind"] == kind && item["metadata"]["name"] == name).unwrap()
}

/// The example with a fault on every node of the second rack.
fn faulty() -> SnapshotFile {
    let mut file = example();
    object(&mut file, "Node", "gpu-05")["spec"]["unschedulable"] = json!(true);
    object(&mut file, "Node", "gpu-06")["status"]["conditions"][0]["status"] = json!("False");
    object(&mut file, "GPUTopology", "gpu-07")["status"]["observedTime"] = json!("2026-11-20T11:00:00Z");
    let report = object(&mut file, "GPUTopology", "gpu-04");
    report["status"]["gpus"][5]["health"] = json!({"recoveryAction": "GPUReset"});
    report["status"]["nics"][1]["state"] = json!("Down");
    let used = json!({"device": "GPU-gpu-07-3", "resource": "nvidia.com/gpu", "namespace": "team-nlp", "pod": "gone",
        "container": "trainer", "source": "DevicePlugin"});
    object(&mut file, "GPUTopology", "gpu-07")["status"]["inUse"] = json!([used]);
    file.items.retain(|item| item["kind"] != "GPUTopology" || item["metadata"]["name"] != "gpu-08");
    file
}

#[test]
fn two_racks() {
    insta::assert_snapshot!(screen::render(&topology(&example()), 100, false));
}

#[test]
fn what_is_wrong_with_nodes() {
    insta::assert_snapshot!(screen::render(&topology(&faulty()), 100, false));
}

#[test]
fn for_programs() {
    let mut value = json::value(&topology(&faulty()));
    value["nodes"]
        .as_array_mut()
        .unwrap()
        .retain(|node| ["gpu-02", "gpu-04"].contains(&node["name"].as_str().unwrap()));
    insta::assert_snapshot!(serde_json::to_string_pretty(&value).unwrap());
}

#[test]
fn a_large_cluster_shows_domains_only() {
    let mut file = example();
    let nodes: Vec<Value> = file.items.iter().filter(|item| item["kind"] == "Node").cloned().collect();
    for copy in 1..8 {
        for node in &nodes {
            let mut node = node.clone();
            let name = format!("{}-{copy}", node["metadata"]["name"].as_str().unwrap());
            node["metadata"]["name"] = json!(name);
            node["metadata"]["labels"]["example.com/rack"] = json!(format!("r{}", copy + 2));
            file.items.push(node);
        }
    }
    let cluster = topology(&file);
    insta::assert_snapshot!(screen::render(&cluster, 100, false));
    assert!(screen::render(&cluster, 100, true).contains("gpu-08-7"));
}

#[test]
fn no_row_is_wider_than_the_window() {
    for file in [example(), faulty()] {
        let cluster = topology(&file);
        for width in 40..130 {
            for line in screen::render(&cluster, width, true).lines() {
                assert!(line.chars().count() <= width, "{width}: {line}");
            }
        }
    }
}

#[test]
fn levels_are_nested_and_nodes_of_no_domain_follow() {
    let mut document: Value =
        serde_json::from_str(include_str!("../../../../examples/clusters/two-racks.json")).unwrap();
    document["domains"] = json!(["example.com/rack:2", "example.com/block:4"]);
    for item in document["items"].as_array_mut().unwrap().iter_mut().filter(|item| item["kind"] == "Node") {
        let labels = &mut item["metadata"]["labels"];
        labels["example.com/block"] = json!(if labels["example.com/rack"] == "r1" { "west" } else { "east" });
        match item["metadata"]["name"].as_str().unwrap() {
            "gpu-06" => item["metadata"]["labels"] = json!({"example.com/block": "east"}),
            "gpu-08" => item["metadata"]["labels"] = json!({}),
            "gpu-04" => item["status"]["allocatable"]["nvidia.com/gpu"] = json!("0"),
            _ => {}
        }
    }
    let items = document["items"].as_array_mut().unwrap();
    items.retain(|item| item["kind"] != "GPUTopology" || item["metadata"]["name"] != "gpu-04");
    let file: SnapshotFile = serde_json::from_value(document).unwrap();
    insta::assert_snapshot!(screen::render(&topology(&file), 80, false));
}

/// Regression, found on real nodes: `CLUSTER 0 nodes, 0/0 GPUs free`.
#[test]
fn a_cluster_without_gpus_still_has_nodes() {
    let mut file = example();
    file.items.retain(|item| item["kind"] == "Node");
    for node in &mut file.items {
        node["status"]["allocatable"] = json!({"cpu": "8", "memory": "32Gi", "pods": "110"});
    }
    let text = screen::render(&topology(&file), 100, false);
    assert_eq!(text, "CLUSTER 8 nodes without GPUs\n");
}

/// gpu-07 has all its GPUs free and more bandwidth than gpu-08, but no job that requires NVLink
/// gets it.
#[test]
fn a_node_with_a_lost_link_shows_it() {
    let text = screen::render(&topology(&example()), 100, false);
    let node = text.lines().find(|line| line.contains("gpu-07")).unwrap();
    assert!(node.contains("not joined by NVLink"), "{text}");
}
