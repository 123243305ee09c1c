//! The order of nodes in pipelines, and what their links carry.

use super::*;

/// Ranks of two processes per node, in pipelines of this many stages.
fn pipelines(nodes: u32, stages: u32, hidden: u32, merge: u32) -> TrainJob {
    let gpt = json!({"layers": 8, "hiddenSize": hidden, "heads": 4, "contextLength": 256});
    let document = json!({
        "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "metadata": {"name": "a"},
        "spec": {
            "trainer": {
                "image": "i", "numNodes": nodes, "numProcPerNode": 2, "resourcesPerNode": {"limits": {"cpu": "8"}},
            },
            "engine": {
                "model": {"type": "GPT", "gpt": gpt}, "data": {"path": "/data"}, "steps": 9, "batchSizePerProcess": 4,
                "batchMerge": merge, "parallelism": {"pipelineStages": stages},
            },
        },
    });
    schema::train_job(&document).unwrap()
}

/// The sentences about the pipelines.
fn about(placed: &Placed) -> Vec<&str> {
    let starts = ["ranks ordered", "after stage", "ring"];
    placed.status.reason.split("; ").filter(|sentence| starts.iter().any(|start| sentence.starts_with(start))).collect()
}

#[test]
fn nodes_of_a_pipeline_are_in_one_rack() {
    let cluster = Cluster::h200(&["r1", "r1", "r1", "r2", "r2", "r3", "r3", "r3"]);
    let levels = Levels::new(vec!["example.com/rack:4".parse().unwrap()]).unwrap();
    let placed = cluster.place_with(&pipelines(8, 4, 64, 8), &levels).unwrap();
    // In the order of the racks, the second and the third pipeline would be in two racks each. The
    // last one is: its nodes are next to nodes of their racks in the rings of the stages.
    assert_eq!(names(&placed), ["n00", "n01", "n03", "n04", "n06", "n05", "n02", "n07"]);
    let placed = cluster.place_with(&pipelines(8, 2, 64, 8), &levels).unwrap();
    let by_name = ["n00", "n01", "n02", "n03", "n04", "n05", "n06", "n07"];
    assert_eq!(names(&placed), by_name, "a node has whole pipelines");
}

#[test]
fn the_reason_says_what_each_link_carries() {
    let cluster = Cluster::h200(&["r1", "r1", "r2", "r2"]);
    let levels = Levels::new(vec!["example.com/rack".parse().unwrap(), "cluster:4".parse().unwrap()]).unwrap();
    // Each pipeline is in a rack, and rings leave it, two on each node.
    let placed = cluster.place_with(&pipelines(4, 4, 64, 8), &levels).unwrap();
    assert_eq!(
        about(&placed),
        [
            "ranks ordered by pipeline: nodes send about 11.2 MiB a step, by stage 24 MiB",
            "after stages 0, 2: activations of 256 KiB per micro-batch, and as much back, within nodes",
            "after stage 1: activations of 256 KiB per micro-batch, and as much back, at 48 GB/s, 87.4 µs a step",
            "rings of stages 0-3: gradients of about 416 KiB at 6 GB/s, 71 µs a step",
        ]
    );
    // One micro-batch of a wide network: each stage is in a node.
    let placed = cluster.place_with(&pipelines(2, 2, 2048, 1), &levels).unwrap();
    assert_eq!(
        about(&placed),
        [
            "ranks ordered by stage: nodes send about 32 MiB a step, by pipeline 3.01 GiB",
            "after stage 0: activations of 8 MiB per micro-batch, and as much back, at 24 GB/s, 699 µs a step",
            "rings of stages 0-1: gradients of about 770 MiB within nodes",
        ]
    );
}

#[test]
fn without_a_report_the_rate_is_unknown() {
    let mut cluster = Cluster::h200(&["r1", "r1"]);
    cluster.nodes.get_mut("n01").unwrap().machine = None;
    let placed = cluster.place(&pipelines(2, 4, 64, 8)).unwrap();
    assert_eq!(
        about(&placed),
        [
            "after stages 0, 2: activations of 256 KiB per micro-batch, and as much back, within nodes",
            "after stage 1: activations of 256 KiB per micro-batch, and as much back, between nodes, at an unknown rate",
        ]
    );
}
