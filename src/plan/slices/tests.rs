use super::*;
use proptest::prelude::*;
use switchyard_crds::{FabricDecision, FabricStatus, PlacementStatus, TrainJobStatus};

/// Cores of a process with interleaved hyper-threads: every second CPU in its part of a machine
/// with 256 CPUs.
fn interleaved(process: u32, offset: u32) -> String {
    let numbers: Vec<String> = (0..16).map(|core| (offset + 32 * process + 2 * core).to_string()).collect();
    numbers.join(",")
}

/// Nodes with eight processes and GPUs each, in `makes` variants.
fn nodes(count: u32, makes: u32) -> Vec<PlacedNode> {
    (0..count)
        .map(|node| PlacedNode {
            first_rank: (8 * node) as i32,
            node_name: format!("gpu-{node:04}.rack-{:03}.zone-a.cluster.example.internal", node / 16),
            gpus: (0..8).map(|gpu| format!("GPU-{node:08x}-6d39-4d7c-8a11-{gpu:012x}")).collect(),
            shape: NodeShape {
                cpus: (0..8).map(|process| interleaved(process, node % makes)).collect(),
                nics: (0..8).map(|nic| format!("mlx5_{nic}")).collect(),
                numa_nodes: vec![0, 1],
            },
        })
        .collect()
}

fn known(prefix: &str, slices: Vec<PlacementSliceSpec>) -> BTreeMap<String, PlacementSliceSpec> {
    (0..).zip(slices).map(|(number, slice): (u32, _)| (format!("{prefix}-{number}"), slice)).collect()
}

#[test]
fn a_small_job_keeps_its_nodes_in_the_status() {
    assert_eq!(named("a", 1, &nodes(INLINE as u32, 2)), None);
    let large = named("a", 1, &nodes(INLINE as u32 + 1, 2)).unwrap();
    assert_eq!((large.count, large.nodes), (1, 129));
}

#[test]
fn equal_rows_stand_once() {
    let slices = cut(3, &nodes(600, 2));
    assert_eq!(
        slices.iter().map(|slice| (slice.first_node, slice.nodes.len())).collect::<Vec<_>>(),
        [(0, 256), (256, 256), (512, 88)]
    );
    assert!(slices.iter().all(|slice| slice.shapes.len() == 2 && slice.attempt == 3));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn cutting_and_joining_round_trips(count in 129_u32..1500, makes in 1_u32..40) {
        let nodes = nodes(count, makes);
        let named = named("job", 2, &nodes).unwrap();
        let known = known(&named.name_prefix, cut(2, &nodes));
        prop_assert_eq!(join(&named, &known), Some(nodes));
    }
}

#[test]
fn missing_slices_and_slices_of_another_placement_are_not_joined() {
    let (mine, theirs) = (nodes(300, 1), nodes(300, 2));
    let named = named("a", 1, &mine).unwrap();
    let whole = known(&named.name_prefix, cut(1, &mine));
    assert!(join(&named, &whole).is_some());
    let mut part = whole.clone();
    part.remove(&format!("{}-1", named.name_prefix));
    assert_eq!(join(&named, &part), None, "one is missing");
    assert_eq!(join(&named, &known(&named.name_prefix, cut(1, &theirs))), None, "another placement");
    let mut edited = whole.clone();
    edited.get_mut(&format!("{}-0", named.name_prefix)).unwrap().nodes[7].gpus.swap(0, 1);
    assert_eq!(join(&named, &edited), None, "another order of GPUs");
    let mut beyond = cut(1, &mine);
    beyond[0].nodes[0].shape = 9;
    let prefix = format!("a-1-{}", digest(&beyond));
    let wrong = SlicesStatus { name_prefix: prefix.clone(), ..named };
    assert_eq!(join(&wrong, &known(&prefix, beyond)), None, "a missing shape");
}

/// Two controllers that decide differently do not overwrite each other's slices.
#[test]
fn placements_and_attempts_have_distinct_slice_names() {
    let prefix = |attempt, makes| named("a", attempt, &nodes(200, makes)).unwrap().name_prefix;
    assert_eq!(prefix(1, 2), prefix(1, 2));
    assert_ne!(prefix(1, 2), prefix(1, 3));
    assert_ne!(prefix(1, 2), prefix(2, 2));
    assert!(prefix(12, 2).starts_with("a-12-"));
}

/// The size limit: 256 KiB for every number of nodes, with a reason and settings of maximum length.
#[test]
fn no_status_is_larger_than_256_kib() {
    for count in [1, 128, 129, 1024, 4096] {
        let nodes = nodes(count, count);
        let decision = |number: usize| FabricDecision {
            name: format!("NCCL_{number:0>40}"),
            outcome: switchyard_crds::DecisionOutcome::Set,
            value: Some("x".repeat(100)),
            class: switchyard_crds::DecisionClass::Must,
            reason: "x".repeat(200),
            evidence: "x".repeat(200),
            nodes: None,
            releases: None,
            link: "https://docs.example/nccl/environment".into(),
        };
        let slices = named("a-job", 7, &nodes);
        let mut largest = 0;
        for slice in cut(7, &nodes) {
            largest = largest.max(serde_json::to_string(&slice).unwrap().len());
        }
        let inline = if slices.is_some() { Vec::new() } else { nodes };
        let placement =
            PlacementStatus { reason: "x".repeat(1024), nodes: inline, slices, ..PlacementStatus::default() };
        let fabric = FabricStatus { decisions: (0..80).map(decision).collect(), ..FabricStatus::default() };
        let status = TrainJobStatus { placement: Some(placement), fabric: Some(fabric), ..TrainJobStatus::default() };
        let size = serde_json::to_string(&status).unwrap().len();
        assert!(size <= 256 * 1024, "{count} nodes: {size} bytes");
        assert!(largest <= 1024 * 1024, "{count} nodes: a slice of {largest} bytes");
    }
}
