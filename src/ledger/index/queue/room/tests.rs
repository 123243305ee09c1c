//! The searches find what trying every set with a full plan finds.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::usage::Share;
use jiff::Timestamp;
use proptest::prelude::*;
use serde_json::{Value, json};
use switchyard_crds::TrainJob;
use switchyard_crds::gpu_topology::GPUTopology;
use switchyard_plan::cluster::admitted::Admitted;
use switchyard_plan::cluster::gang;
use switchyard_plan::cluster::levels::Levels;
use switchyard_plan::cluster::{Avoided, PlacementRules};
use switchyard_plan::objects::Defaults;
use switchyard_plan::resources;
use switchyard_plan::validate;

const GPUS: usize = 4;

/// Nodes of four GPUs in racks of two. The preflight fails on those that lock too little memory.
#[derive(Debug, Clone)]
struct Cluster {
    nodes: Vec<(bool, Option<bool>)>,
    /// Nodes and GPUs of the pods of each job.
    jobs: Vec<Vec<(usize, usize)>>,
    /// The job that needs room.
    pods: usize,
    gpus: usize,
    in_one_rack: bool,
    enforces_preflight: bool,
}

impl Cluster {
    /// The usage, and the takers of each job.
    fn usage(&self) -> (Usage, Vec<Vec<String>>) {
        let mut usage = Usage::default();
        for (number, (is_refused, _)) in self.nodes.iter().enumerate() {
            let node = json!({
                "metadata": {"name": name(number), "labels": {"rack": format!("r{}", number / 2)}},
                "status": {
                    "allocatable": {"pods": "110", "rdma/shared": "63", "nvidia.com/gpu": GPUS.to_string()},
                    "conditions": [{"type": "Ready", "status": "True"}],
                },
            });
            usage.set_node(NodeView::of(&serde_json::from_value(node).unwrap()));
            let gpus: Vec<Value> = (0..GPUS).map(|gpu| json!({"index": gpu, "uuid": uuid(number, gpu)})).collect();
            let report = json!({
                "metadata": {"name": name(number)}, "spec": {},
                "status": {
                    "gpus": gpus,
                    "nics": [{
                        "name": "ib0", "kind": "Physical", "rdmaDevice": "mlx5_0", "port": 1, "linkLayer": "InfiniBand", "state": "Active",
                        "rateMegabitsPerSecond": 400_000,
                    }],
                    "host": {"defaultRoute": "eno0", "lockedMemoryLimit": is_refused.then_some("65536")},
                },
            });
            usage.set_report(&name(number), Ok(&serde_json::from_value::<GPUTopology>(report).unwrap()));
        }
        let mut free: Vec<Vec<String>> =
            (0..self.nodes.len()).map(|node| (0..GPUS).map(|gpu| uuid(node, gpu)).collect()).collect();
        let mut takers = Vec::new();
        for (job, pods) in self.jobs.iter().enumerate() {
            let mut theirs = Vec::new();
            for (pod, (node, gpus)) in pods.iter().enumerate() {
                let node = node % self.nodes.len();
                let stay = free[node].len().saturating_sub(*gpus);
                let gpus = free[node].split_off(stay);
                let amount = json!({"nvidia.com/gpu": gpus.len().to_string(), "pods": "1"});
                let amount = resources::of_quantities(&serde_json::from_value(amount).unwrap());
                theirs.push(format!("job-{job}-{pod}"));
                usage.set_share(&theirs[pod], Some(Share { node: name(node), amount, gpus, ..Share::default() }));
            }
            takers.push(theirs);
        }
        (usage, takers)
    }

    fn job(&self) -> TrainJob {
        let domains = if self.in_one_rack { json!([{"key": "rack", "mode": "Required"}]) } else { json!([]) };
        serde_json::from_value(json!({
            "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob",
            "metadata": {"name": "head", "namespace": "t", "uid": "head"},
            "spec": {
                "trainer": {
                    "framework": "Torch", "image": "i", "numNodes": self.pods,
                    "resourcesPerNode": {"limits": {"nvidia.com/gpu": self.gpus, "rdma/shared": 1}},
                },
                "topologyPolicy": {"domains": domains},
                "fabric": {"preflight": {"mode": if self.enforces_preflight { "Enforce" } else { "Report" }}},
            },
            "status": {"attempt": 1, "deviceAllocation": "DevicePlugin"},
        }))
        .unwrap()
    }

    fn with_request<R>(&self, ask: impl FnOnce(&PlacementRequest<'_>) -> R) -> R {
        let (job, defaults, levels) = (self.job(), Defaults::default(), Levels::default());
        let valid = validate(&job).unwrap();
        let admitted = Admitted::of_template(&valid, job.status.as_ref());
        let avoided = |(number, (_, avoided)): (usize, &(bool, Option<bool>))| {
            let is_last_resort = (*avoided)?;
            Some((name(number), Avoided { reason: "it failed".into(), is_last_resort }))
        };
        let avoided_nodes = self.nodes.iter().enumerate().filter_map(avoided).collect();
        let rules = PlacementRules { defaults: &defaults, levels: &levels, now: Timestamp::UNIX_EPOCH };
        ask(&PlacementRequest { job: &job, valid: &valid, rules, admitted: &admitted, avoided_nodes: &avoided_nodes })
    }
}

fn name(node: usize) -> String {
    format!("n{node:02}")
}

fn uuid(node: usize, gpu: usize) -> String {
    format!("GPU-{node}-{gpu}")
}

/// The nodes that a job gets without some others, by a plan on a fresh overlay.
fn planned_without(
    request: &PlacementRequest<'_>,
    usage: &mut Usage,
    takers: &[Vec<String>],
    jobs: &[usize],
) -> Option<Vec<PlacedNode>> {
    let takers: Vec<String> = jobs.iter().flat_map(|job| takers[*job].clone()).collect();
    let overlay = UsageOverlay::new(usage, &takers);
    place_with_fabric(request, overlay.nodes()).ok().map(|found| found.placed.status.nodes)
}

fn clusters() -> impl Strategy<Value = Cluster> {
    let node = (prop::bool::weighted(0.3), prop::option::weighted(0.2, any::<bool>()));
    let pods = prop::collection::vec((0_usize..8, 1..=GPUS), 1..4);
    (
        prop::collection::vec(node, 1..8),
        prop::collection::vec(pods, 0..12),
        1_usize..5,
        1..=GPUS,
        any::<bool>(),
        any::<bool>(),
    )
        .prop_map(|(nodes, jobs, pods, gpus, in_one_rack, enforces_preflight)| Cluster {
            nodes,
            jobs,
            pods,
            gpus,
            in_one_rack,
            enforces_preflight,
        })
}

proptest! {
    #[test]
    fn searches_find_what_full_plans_find(cluster in clusters()) {
        let (mut usage, takers) = cluster.usage();
        let before = usage.nodes().clone();
        let (fewest_found, first_found, fewest_expected, first_expected) = cluster.with_request(|request| {
            let fewest_found = WithoutJobs::new(request, &mut usage, &takers).fewest();
            let first_found = WithoutJobs::new(request, &mut usage, &takers).first(gang::fits);
            let plan = |usage: &mut Usage, jobs: &[usize]| planned_without(request, usage, &takers, jobs);
            let chosen = fewest(0, takers.len(), |jobs| plan(&mut usage, jobs).is_some());
            let fewest_expected = chosen.and_then(|chosen| Some((chosen.clone(), plan(&mut usage, &chosen)?)));
            let first_expected = (0..=takers.len()).find(|ended| {
                gang::fits(request, UsageOverlay::new(&mut usage, &takers[..*ended].concat()).nodes())
            });
            (fewest_found, first_found, fewest_expected, first_expected)
        });
        prop_assert_eq!(fewest_found, fewest_expected);
        prop_assert_eq!(first_found, first_expected);
        prop_assert_eq!(usage.nodes(), &before);
    }
}

/// The fabric of the first nodes is unacceptable, so their jobs do not make way.
#[test]
fn jobs_make_way_only_where_the_fabric_is_acceptable() {
    let mut cluster = Cluster {
        nodes: vec![(true, None), (true, None), (false, None), (false, None)],
        jobs: (0..4).map(|node| vec![(node, GPUS)]).collect(),
        pods: 2,
        gpus: GPUS,
        in_one_rack: true,
        enforces_preflight: true,
    };
    let chosen = |cluster: &Cluster| {
        let (mut usage, takers) = cluster.usage();
        let found = cluster.with_request(|request| WithoutJobs::new(request, &mut usage, &takers).fewest());
        found.map(|(chosen, _)| chosen)
    };
    assert_eq!(chosen(&cluster), Some(vec![2, 3]));
    cluster.enforces_preflight = false;
    assert_eq!(chosen(&cluster), Some(vec![0, 1]));
}
