//! Gang placement, on clusters built from published topology matrices.
#![allow(clippy::unwrap_used)]

mod pipelines;
mod roles;

use super::*;
use crate::cluster::admitted::Admitted;
use crate::cluster::levels::Levels;
use crate::cluster::machine::Shapes;
use crate::cluster::{Avoided, PlacementRules};
use crate::eligible::NodeFacts;
use crate::objects::Defaults;
use crate::resources;
use crate::validate;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde_json::{Value, json};
use std::sync::Arc;
use switchyard_crds::gpu_topology::GPUTopology;
use switchyard_crds::validate as schema;
use switchyard_crds::{DeviceAllocation, Limit};
use switchyard_topology::import::{NicRate, Options, import};
use switchyard_topology::matrix::parse;

const H200: &str = include_str!("../../../../tests/fixtures/topo/f04-h200.txt");
const B200: &str = include_str!("../../../../tests/fixtures/topo/f10-b200.txt");
const A30: &str = include_str!("../../../../tests/fixtures/topo/f08-a30.txt");
const GB200: &str = include_str!("../../../../tests/fixtures/topo/f06-gb200.txt");

fn report(name: &str, text: &str, model: &str) -> GPUTopology {
    let rate = NicRate { nic: None, megabits_per_second: 400_000 };
    let options = Options { name: name.into(), gpu_model: Some(model.into()), rates: vec![rate] };
    import(&parse(text).unwrap(), &options).unwrap().topology
}

#[derive(Default)]
struct Cluster {
    nodes: BTreeMap<String, NodeView>,
    shapes: Shapes,
}

impl Cluster {
    /// Adds an idle node of this kind to a rack.
    fn node(&mut self, name: &str, rack: &str, text: &str, model: &str) -> &mut NodeView {
        let report = report(name, text, model);
        let machine = self.shapes.machine(&report);
        let count = machine.as_ref().map_or(0, |machine| machine.gpus.len());
        let amounts = [("cpu", "64".to_string()), ("pods", "9".into()), (GPU_RESOURCE, count.to_string())];
        let amounts = amounts.map(|(name, amount)| (name.to_string(), Quantity(amount)));
        let amounts = resources::of_quantities(&amounts.into());
        let labels = [("example.com/rack".to_string(), rack.to_string())];
        let facts =
            NodeFacts { name: name.into(), labels: Arc::new(labels.into()), ready: true, ..NodeFacts::default() };
        let (free, allocatable) = (amounts.clone(), amounts);
        let node = NodeView { facts, free, allocatable, machine: Some(machine), ..NodeView::default() };
        self.nodes.insert(name.into(), node);
        self.nodes.get_mut(name).unwrap()
    }

    fn h200(racks: &[&str]) -> Cluster {
        let mut cluster = Cluster::default();
        for (number, rack) in racks.iter().enumerate() {
            cluster.node(&format!("n{number:02}"), rack, H200, "H200");
        }
        cluster
    }

    fn place(&self, job: &TrainJob) -> Result<Placed, NoPlacement> {
        self.place_with(job, &Levels::default())
    }

    fn place_with(&self, job: &TrainJob, levels: &Levels) -> Result<Placed, NoPlacement> {
        self.place_without(job, levels, &BTreeMap::new())
    }

    fn place_without(
        &self,
        job: &TrainJob,
        levels: &Levels,
        avoided_nodes: &BTreeMap<String, Avoided>,
    ) -> Result<Placed, NoPlacement> {
        let valid = validate(job).unwrap();
        let now = Timestamp::from_second(1_000_000).unwrap();
        let rules = PlacementRules { defaults: &Defaults::default(), levels, now };
        let admitted = &Admitted::of_template(&valid, job.status.as_ref());
        place(&PlacementRequest { job, valid: &valid, rules, admitted, avoided_nodes }, &self.nodes)
    }
}

fn job(nodes: u32, gpus: u32, policy: Value) -> TrainJob {
    let mut limits = json!({"cpu": "8"});
    if gpus > 0 {
        limits[GPU_RESOURCE] = json!(gpus);
    }
    let document = json!({
        "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "metadata": {"name": "a"},
        "spec": {
            "trainer": {
                "framework": "Plain", "image": "i", "numNodes": nodes, "numProcPerNode": gpus.max(1),
                "resourcesPerNode": {"limits": limits},
            },
            "topologyPolicy": policy,
        },
    });
    let mut job = schema::train_job(&document).unwrap();
    job.status.get_or_insert_default().device_allocation = Some(DeviceAllocation::DevicePlugin);
    job
}

fn names(placed: &Placed) -> Vec<&str> {
    placed.status.nodes.iter().map(|node| node.node_name.as_str()).collect()
}

#[test]
fn one_node_is_bound_by_its_ring() {
    let placed = Cluster::h200(&["r1", "r1"]).place(&job(1, 8, json!({}))).unwrap();
    assert_eq!(
        placed.status.reason,
        "8 ranks on n00, GPUs 0-7; NVLink ring 370.8 GB/s; bound by the ring inside a node at 370.8 GB/s, best possible 370.8"
    );
    assert_eq!(placed.status.predicted_bus_bandwidth, Some(Quantity("370800M".into())));
    assert_eq!((placed.status.limited_by, placed.status.nodes[0].gpus.len()), (Some(Limit::Ring), 8));
    assert_eq!(placed.status.nodes[0].shape.numa_nodes, [0, 2]);
}

#[test]
fn ranks_have_cores_near_their_gpus() {
    let placed = Cluster::h200(&["r1"]).place(&job(1, 8, json!({}))).unwrap();
    let node = &placed.status.nodes[0];
    // 24 cores of NUMA node 0 for GPUs 0 to 3, 24 cores of NUMA node 2 for the others.
    assert_eq!(node.shape.cpus, ["0-5", "6-11", "12-17", "18-23", "48-53", "54-59", "60-65", "66-71"]);
    let placed = Cluster::h200(&["r1"]).place(&job(1, 2, json!({}))).unwrap();
    assert_eq!(placed.status.nodes[0].shape.cpus.len(), 2);
}

#[test]
fn several_nodes_are_bound_by_their_nics_and_stay_in_a_rack() {
    let mut cluster = Cluster::h200(&["r1", "r2", "r1", "r2", "r2"]);
    let gang_job = job(3, 8, json!({"domains": [{"key": "example.com/rack"}]}));
    let placed = cluster.place(&gang_job).unwrap();
    assert_eq!(names(&placed), ["n01", "n03", "n04"]);
    assert_eq!(
        placed.status.reason,
        "24 ranks on 3 nodes x 8 GPUs in example.com/rack r2; NVLink ring 370.8 GB/s; out of each node 192 GB/s over \
         NIC2,NIC3,NIC4,NIC5; bound by the NICs at 192 GB/s, best possible 192"
    );
    assert_eq!(placed.status.nodes.iter().map(|node| node.first_rank).collect::<Vec<_>>(), [0, 8, 16]);

    cluster.nodes.get_mut("n04").unwrap().facts.unschedulable = true;
    let levels = Levels::new(vec!["example.com/rack".parse().unwrap(), "cluster:2".parse().unwrap()]).unwrap();
    let placed = cluster.place_with(&gang_job, &levels).unwrap();
    assert_eq!(placed.status.limited_by, Some(Limit::Domain));
    assert_eq!(placed.status.predicted_bus_bandwidth, Some(Quantity("96G".into())));
    assert!(placed.status.reason.contains(" in 2 domains of example.com/rack"), "{}", placed.status.reason);
    assert!(placed.status.reason.contains("at 96 GB/s"), "{}", placed.status.reason);
}

#[test]
fn a_refusal_names_the_binding_constraint_and_a_fix() {
    let mut cluster = Cluster::h200(&["r1", "r1", "r2", "r2"]);
    cluster.nodes.get_mut("n03").unwrap().taken = 0b11;
    cluster.nodes.get_mut("n03").unwrap().free = resources::of_quantities(
        &[("cpu", "64"), ("pods", "9"), (GPU_RESOURCE, "6")].map(|(n, a)| (n.to_string(), Quantity(a.into()))).into(),
    );
    let gang_job = job(3, 8, json!({"domains": [{"key": "example.com/rack", "mode": "Required"}]}));
    let refused = cluster.place(&gang_job).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "3 nodes have room for 8 GPUs, cpu 8, but one example.com/rack has at most 2 of 3, in r1; most free GPUs on \
         the others: 6; smallest change that fits: topologyPolicy.domains[0].mode: Preferred (192 GB/s), or trainer.numNodes: 2 \
         (192 GB/s)"
    );
    let refused = cluster.place(&job(5, 8, json!({}))).unwrap_err();
    assert!(
        refused.to_string().starts_with("3 of 5 needed nodes have room for 8 GPUs, cpu 8; most free GPUs"),
        "{refused}"
    );
    cluster.nodes.values_mut().for_each(|node| drop(Arc::make_mut(&mut node.facts.labels).remove("example.com/rack")));
    let refused = cluster.place(&gang_job).unwrap_err().to_string();
    assert!(refused.contains("4 nodes have no label example.com/rack"), "{refused}");
}

#[test]
fn a_gpu_without_nvlink_is_not_treated_as_one_with() {
    let mut cluster = Cluster::default();
    cluster.node("n00", "r1", B200, "B200");
    let gang_job = job(1, 4, json!({"mode": "Required", "nodeTopology": {"minLink": "NVLink"}}));
    let placed = cluster.place(&gang_job).unwrap();
    assert!(placed.status.reason.contains("NVLink ring 721.8 GB/s"), "{}", placed.status.reason);
    assert!(!placed.status.reason.contains("GPUs 0-3"), "{}", placed.status.reason);
    let gang_job = job(1, 8, json!({"mode": "Required", "nodeTopology": {"minLink": "NVLink"}}));
    let refused = cluster.place(&gang_job).unwrap_err().to_string();
    assert!(refused.contains("on 1 node the free GPUs are not joined by NVLink or better"), "{refused}");
    assert!(refused.contains("minLink: NUMA (40 GB/s)"), "{refused}");
    let gang_job = job(1, 8, json!({"nodeTopology": {"minLink": "NVLink"}}));
    let placed = cluster.place(&gang_job).unwrap();
    assert!(placed.status.reason.contains("minLink NVLink is not met"), "{}", placed.status.reason);
}

/// Regression test: trays were predicted NVLink bandwidth, but without a channel NCCL uses the
/// NICs, or fails with a CUDA error.
#[test]
fn nvlink_between_nodes_counts_for_pods_that_claim_a_channel() {
    let mut cluster = Cluster::default();
    for (name, clique) in [("a", "0"), ("b", "1"), ("c", "0")] {
        let labels = Arc::make_mut(&mut cluster.node(name, "r1", GB200, "GB200").facts.labels);
        labels.insert("nvidia.com/gpu.clique".into(), clique.into());
    }
    let mut gang_job = job(2, 4, json!({}));
    let without = cluster.place(&gang_job).unwrap();
    let channel = json!({"spec": {"containers": [], "resourceClaims": [{"name": "channel", "resourceClaimTemplateName": "channel"}]}});
    gang_job.spec.template = serde_json::from_value(channel).unwrap();
    let with = cluster.place(&gang_job).unwrap();
    assert_eq!((names(&without), names(&with)), (vec!["a", "c"], vec!["a", "c"]), "both placements stay in one clique");
    let note = "NVLink between them (721.8 GB/s) does not count: the pods claim no channel of a ComputeDomain \
                (spec.template.spec.resourceClaims)";
    assert_eq!(without.status.limited_by, Some(Limit::NICs));
    assert!(without.status.reason.ends_with(&format!("; {note}")), "{}", without.status.reason);
    assert_ne!(with.status.limited_by, Some(Limit::NICs), "{}", with.status.reason);
    assert!(!with.status.reason.contains("does not count"), "{}", with.status.reason);
}

#[test]
fn better_excluded_nodes_are_named() {
    let mut cluster = Cluster::default();
    cluster.node("a30", "r1", A30, "A30");
    cluster.node("h200", "r1", H200, "H200").facts.unschedulable = true;
    let placed = cluster.place(&job(1, 4, json!({}))).unwrap();
    assert_eq!(names(&placed), ["a30"]);
    // An unusable node does not raise the best possible bandwidth, but a busy one does.
    assert_eq!(placed.status.best_possible, placed.status.predicted_bus_bandwidth);
    let busy = cluster.nodes.get_mut("h200").unwrap();
    (busy.facts.unschedulable, busy.taken) = (false, 0xff);
    let placed = cluster.place(&job(1, 4, json!({}))).unwrap();
    assert!(
        placed.status.reason.ends_with("; 1 better node is left out: h200 (0 of 8 GPUs free)"),
        "{}",
        placed.status.reason
    );
}

/// Regression test: a job that was moved because of a node failure did not say so. `explain` showed
/// the other placement without a reason.
#[test]
fn avoided_nodes_are_named_in_the_placement_reason() {
    let cluster = Cluster::h200(&["r1"; 3]);
    let why = "it ended attempts 3 times within an hour";
    let avoided_nodes = [("n00".to_string(), Avoided { reason: why.to_string(), is_last_resort: false })].into();
    let placed = cluster.place_without(&job(1, 8, json!({})), &Levels::default(), &avoided_nodes).unwrap();
    assert_eq!(names(&placed), ["n01"]);
    assert!(placed.status.reason.ends_with(&format!("; 1 node is avoided: n00 ({why})")), "{}", placed.status.reason);
}

#[test]
fn gpu_nodes_are_kept_for_gpu_jobs() {
    let mut cluster = Cluster::h200(&["r1"]);
    let plain = cluster.node("z", "r1", H200, "H200");
    (plain.machine, plain.allocatable) = (None, plain.allocatable.clone().without(GPU_RESOURCE));
    assert_eq!(names(&cluster.place(&job(1, 0, json!({}))).unwrap()), ["z"]);
    assert_eq!(names(&cluster.place(&job(2, 0, json!({}))).unwrap()), ["n00", "z"]);
}

#[test]
fn nodes_without_a_report_are_used_without_a_bandwidth() {
    let mut cluster = Cluster::h200(&["r1", "r1"]);
    cluster.nodes.values_mut().for_each(|node| node.machine = None);
    let placed = cluster.place(&job(2, 8, json!({}))).unwrap();
    assert_eq!((placed.status.predicted_bus_bandwidth, placed.status.nodes[0].gpus.len()), (None, 0));
    assert!(placed.status.reason.contains("no GPUTopology describes them"), "{}", placed.status.reason);
    let strict = json!({"mode": "Required", "nodeTopology": {"minLink": "NVLink"}});
    let refused = cluster.place(&job(2, 8, strict.clone())).unwrap_err().to_string();
    assert!(refused.contains("2 nodes cannot be used: no GPUTopology"), "{refused}");
    let mut old = Cluster::h200(&["r1"]);
    if let Some(Ok(machine)) = &mut old.nodes.get_mut("n00").unwrap().machine {
        machine.observed = Some(Timestamp::from_second(1_000_000 - 1801).unwrap());
    }
    let refused = old.place(&job(1, 8, strict.clone())).unwrap_err().to_string();
    assert!(refused.contains("its GPUTopology is from 1970-01-12T13:16:39Z"), "{refused}");
    assert!(old.place(&job(1, 8, json!({}))).is_ok(), "a preferred link accepts any node");
    cluster.nodes.values_mut().for_each(|node| node.machine = Some(Err("status.links[3].a: nonsense".into())));
    let refused = cluster.place(&job(2, 8, strict)).unwrap_err().to_string();
    assert!(refused.contains("its GPUTopology cannot be used: status.links[3].a: nonsense"), "{refused}");
}

#[test]
fn claims_need_an_offer() {
    let mut cluster = Cluster::h200(&["r1", "r1"]);
    let mut gang_job = job(1, 2, json!({}));
    gang_job.status.as_mut().unwrap().device_allocation = Some(DeviceAllocation::Claims);
    let refused = cluster.place(&gang_job).unwrap_err().to_string();
    assert!(refused.contains("2 nodes cannot be used: no ResourceSlice offers its GPUs"), "{refused}");
    cluster.nodes.get_mut("n01").unwrap().offered = Some(0b1100_0000);
    let placed = cluster.place(&gang_job).unwrap();
    assert!(placed.status.reason.starts_with("2 ranks on n01, GPUs 6-7;"), "{}", placed.status.reason);
    // Two GPUs that share a NIC. Others have two NICs, but no driver offers them.
    assert_eq!(placed.status.best_possible, placed.status.predicted_bus_bandwidth);
}

#[test]
fn a_gang_that_lost_a_node_moves_one_pod() {
    let mut cluster = Cluster::h200(&["r1"; 6]);
    let mut gang_job = job(3, 4, json!({}));
    let first = cluster.place(&gang_job).unwrap();
    assert_eq!(names(&first), ["n00", "n01", "n02"]);
    gang_job.status.as_mut().unwrap().placement = Some(first.status.clone());
    cluster.nodes.get_mut("n01").unwrap().facts.ready = false;
    // Another job took GPUs on the first nodes, so they would no longer be the first choice.
    cluster.nodes.get_mut("n04").unwrap().taken = 0xf0;
    cluster.nodes.get_mut("n05").unwrap().taken = 0xf0;
    let again = cluster.place(&gang_job).unwrap();
    let kept: Vec<bool> = again.status.nodes.iter().zip(&first.status.nodes).map(|(a, b)| a.gpus == b.gpus).collect();
    assert_eq!((names(&again)[0], names(&again)[2], kept), ("n00", "n02", vec![true, false, true]));
    assert_eq!(again.status.predicted_bus_bandwidth, first.status.predicted_bus_bandwidth);
}

#[test]
fn contradictory_levels_are_rejected() {
    let levels = |texts: &[&str]| -> Result<Levels, String> {
        let parse = |text: &&str| text.parse().map_err(|error: crate::cluster::levels::LevelError| error.to_string());
        Levels::new(texts.iter().map(parse).collect::<Result<_, _>>()?).map_err(|error| error.to_string())
    };
    assert!(levels(&["a", "b:2", "cluster:4"]).is_ok());
    for (texts, expected) in [
        (&["a:-1"][..], "`a:-1`: expected KEY"),
        (&["a:0.5"], "oversubscription from 1 to 1000"),
        (&["a:inf"], "`a:inf`"),
        (&[":2"], "`:2`"),
        (&["a", "a"], "`a` twice"),
        (&["cluster", "a"], "`cluster` before `a`"),
        (&["a:4", "b:2"], "`b`: oversubscription 1:2 is less than that of the level below (1:4)"),
        (&["a", "b", "c", "d", "e", "f", "g", "h"], "8 levels: expected at most 7"),
    ] {
        let refused = levels(texts).unwrap_err();
        assert!(refused.contains(expected), "{texts:?}: {refused}");
    }
    let text = |text: &str| text.parse::<crate::cluster::levels::DomainLevel>().unwrap().to_string();
    assert_eq!(["a.b/c", "a:NVLink", "a:2.5"].map(text), ["a.b/c", "a:NVLink", "a:2.5"]);
}

#[test]
fn other_gpus_are_compared_by_the_gangs_traffic() {
    let mut cluster = Cluster::default();
    let machine = cluster.node("n", "r1", A30, "A30").described().unwrap().clone();
    let gpus = |indices: [usize; 2]| indices.map(|index| machine.gpus[index].uuid.clone());
    // Two GPUs with a bridge are much better than two without, but both pairs have the same 100
    // Gbit/s NIC.
    let difference = compare(&machine, 1, &gpus([0, 1]), &gpus([0, 2])).unwrap();
    assert!(
        difference.starts_with("GPUs 0,2 instead of 0-1: ") && difference.ends_with(" GB/s instead of 80"),
        "{difference}"
    );
    assert_eq!(compare(&machine, 2, &gpus([0, 1]), &gpus([0, 2])), None);
    assert_eq!(compare(&machine, 1, &gpus([0, 1]), &gpus([2, 3])), None);
    assert_eq!(compare(&machine, 2, &[], &gpus([0, 2])), None, "the planned GPUs are unknown");
    assert_eq!(compare(&machine, 1, &gpus([0, 1]), &[]), None, "the actual GPUs are unknown");
}

#[test]
fn ten_thousand_nodes_are_placed() {
    let mut cluster = Cluster::h200(&["r0"]);
    let node = cluster.nodes["n00"].clone();
    for number in 1..10_000 {
        let mut node = node.clone();
        node.facts.name = format!("n{number:05}");
        Arc::make_mut(&mut node.facts.labels).insert("example.com/rack".into(), format!("r{}", number / 20));
        if number % 3 > 0 {
            node.taken = 0xf;
        }
        cluster.nodes.insert(node.facts.name.clone(), node);
    }
    let gang_job = job(128, 8, json!({"domains": [{"key": "example.com/rack"}]}));
    let placed = cluster.place(&gang_job).unwrap();
    assert_eq!(placed.status.nodes.len(), 128);
    let required = json!({"domains": [{"key": "example.com/rack", "mode": "Required"}]});
    println!("{}", cluster.place(&job(1024, 8, required)).unwrap_err());
}

proptest::proptest! {
    /// For any nodes, reports, kubelets and drivers: no panic, no GPU that is already taken, one
    /// pod per node.
    #[test]
    fn any_node_reports_are_handled(
        nodes in proptest::collection::vec(
            (0_usize..5, proptest::bits::u32::ANY, proptest::bits::u32::ANY, proptest::option::of(0_u32..=u32::MAX), 0_i64..12, 0_u8..4),
            0..8,
        ),
        count in 1_u32..5, gpus in 0_u32..18, claims: bool, required: bool, link in 0_usize..3,
    ) {
        let mut cluster = Cluster::default();
        for (number, (kind, taken, in_use, offered, free, rack)) in nodes.iter().enumerate() {
            let (text, model) = [(H200, "H200"), (B200, "B200"), (A30, "A30")][*kind % 3];
            let node = cluster.node(&format!("n{number}"), &rack.to_string(), text, model);
            (node.taken, node.in_use, node.offered) = (*taken, *in_use, *offered);
            node.free = resources::of_quantities(
                &[("cpu", "64".to_string()), ("pods", "9".into()), (GPU_RESOURCE, free.to_string())]
                    .map(|(name, amount)| (name.to_string(), Quantity(amount)))
                    .into(),
            );
            match kind {
                3 => node.machine = None,
                4 => node.machine = Some(Err("nonsense".into())),
                _ => {}
            }
            if *rack == 3 {
                Arc::make_mut(&mut node.facts.labels).clear();
            }
        }
        let link = ["NVLink", "PCIeHost", "System"][link];
        let mode = if required { "Required" } else { "Preferred" };
        let mut gang_job = job(count, gpus, json!({
            "mode": mode, "nodeTopology": {"minLink": link}, "domains": [{"key": "example.com/rack", "mode": mode}],
        }));
        let allocation = if claims { DeviceAllocation::Claims } else { DeviceAllocation::DevicePlugin };
        gang_job.status.as_mut().unwrap().device_allocation = Some(allocation);
        match cluster.place(&gang_job) {
            Ok(placed) => {
                proptest::prop_assert_eq!(placed.status.nodes.len(), count as usize);
                let mut names: Vec<&str> = names(&placed);
                names.sort_unstable();
                names.dedup();
                proptest::prop_assert_eq!(names.len(), count as usize);
                for node in &placed.status.nodes {
                    let view = &cluster.nodes[&node.node_name];
                    let Some(machine) = view.described() else {
                        proptest::prop_assert!(node.gpus.is_empty() && !(claims && gpus > 0));
                        continue;
                    };
                    let set = machine.mask(node.gpus.iter().map(String::as_str));
                    proptest::prop_assert_eq!((node.gpus.len() as u32, set.count_ones()), (gpus, gpus));
                    proptest::prop_assert_eq!(set & !(machine.usable & !view.taken), 0, "a GPU is already taken");
                    proptest::prop_assert!(gpus == 0 || !claims || set & !view.offered.unwrap_or(0) == 0, "a GPU is not offered");
                }
            }
            Err(why) => proptest::prop_assert!(!why.to_string().is_empty()),
        }
    }
}

/// Seen on real nodes: "no single change of the manifest would make it fit", although a toleration
/// would have.
#[test]
fn tolerations_and_selectors_are_suggested_as_changes() {
    let taint = |node: &mut NodeView, value: &str| {
        let taint = json!([{"key": "dedicated", "value": value, "effect": "NoSchedule"}]);
        node.facts.taints = serde_json::from_value(taint).unwrap();
    };
    let changes = |cluster: &Cluster, job: &TrainJob| {
        let why = cluster.place(job).unwrap_err();
        (why.changes.into_iter().map(|change| change.field).collect::<Vec<_>>(), why.sentence)
    };
    let mut cluster = Cluster::h200(&["r1", "r1"]);
    cluster.nodes.values_mut().for_each(|node| taint(node, "ml"));
    let (fields, sentence) = changes(&cluster, &job(2, 8, json!({})));
    assert_eq!(fields, ["template.spec.tolerations: {key: dedicated, value: ml, effect: NoSchedule}"]);
    assert!(sentence.contains("2 nodes cannot be used: taint dedicated=ml:NoSchedule is not tolerated"), "{sentence}");
    // Another rule excludes the other node. No single change is enough for two nodes, but each is
    // enough for one.
    let mut selective = job(2, 8, json!({}));
    let selector = json!({"spec": {"containers": [], "nodeSelector": {"example.com/rack": "r1"}}});
    selective.spec.template = serde_json::from_value(selector).unwrap();
    let mut cluster = Cluster::h200(&["r1", "r2"]);
    taint(cluster.nodes.get_mut("n00").unwrap(), "ml");
    assert_eq!(changes(&cluster, &selective).0, Vec::<String>::new());
    selective.spec.trainer.num_nodes = 1;
    let each = [
        "template.spec.tolerations: {key: dedicated, value: ml, effect: NoSchedule}",
        "template.spec.nodeSelector: without example.com/rack",
    ];
    assert_eq!(changes(&cluster, &selective).0, each);
    // Do not suggest to tolerate the taint of an unhealthy node.
    let mut cluster = Cluster::h200(&["r1"]);
    let trouble = json!([{"key": "node.kubernetes.io/disk-pressure", "effect": "NoSchedule"}]);
    cluster.nodes.get_mut("n00").unwrap().facts.taints = serde_json::from_value(trouble).unwrap();
    assert_eq!(changes(&cluster, &job(1, 8, json!({}))).0, Vec::<String>::new());
}
