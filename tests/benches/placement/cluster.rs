//! A cluster of 10,000 nodes as the controller sees it, and a job for it.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::Arc;
use switchyard_crds::names::GPU_RESOURCE;
use switchyard_crds::{DeviceAllocation, TrainJob};
use switchyard_plan::cluster::machine::Shapes;
use switchyard_plan::cluster::view::NodeView;
use switchyard_plan::eligible::NodeFacts;
use switchyard_plan::resources;
use switchyard_tests::{Random, root};
use switchyard_topology::{import, matrix};

/// 10,000 nodes as the controller sees them: 500 racks with one machine type each, and 30 % of the
/// nodes empty.
pub fn nodes() -> BTreeMap<String, NodeView> {
    let (mut shapes, random) = (Shapes::default(), Random::new(9));
    let mut machines = Vec::new();
    for (file, model) in
        [("f03b-hgx-h100", "H100"), ("f04-h200", "H200"), ("f02-dgx-a100", "A100"), ("f10-b200", "B200")]
    {
        let text = std::fs::read_to_string(root().join(format!("tests/fixtures/topo/{file}.txt"))).unwrap();
        let rates = vec![import::NicRate { nic: None, megabits_per_second: 400_000 }];
        let options = import::Options { name: file.into(), gpu_model: Some(model.into()), rates };
        machines
            .push(shapes.machine(&import::import(&matrix::parse(&text).unwrap(), &options).unwrap().topology).unwrap());
    }
    let amounts = [("cpu", "64"), ("memory", "1Ti"), ("pods", "110"), (GPU_RESOURCE, "8")];
    let amounts =
        resources::of_quantities(&amounts.map(|(name, amount)| (name.to_string(), Quantity(amount.into()))).into());
    let node = |number: usize| {
        let name = format!("gpu-{number:05}");
        let labels = [("example.com/rack", number / 20), ("example.com/block", number / 500)];
        let labels = labels.map(|(label, domain)| (label.to_string(), domain.to_string()));
        let facts =
            NodeFacts { name: name.clone(), labels: Arc::new(labels.into()), ready: true, ..NodeFacts::default() };
        let taken = if random.below(10) < 3 { 0 } else { random.next() as u32 & 0xff };
        let machine = Some(Ok(machines[number / 20 % machines.len()].clone()));
        let (allocatable, free) = (amounts.clone(), amounts.clone());
        (name, NodeView { facts, machine, taken, allocatable, free, offered: Some(0xff), ..NodeView::default() })
    };
    (0..10_000).map(node).collect()
}

pub fn job(nodes: u32, required: bool) -> TrainJob {
    let mode = if required { "Required" } else { "Preferred" };
    let mut job = switchyard_crds::validate::train_job(&json!({
        "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "metadata": {"name": "bench"},
        "spec": {
            "trainer": {
                "framework": "Plain", "image": "none", "numNodes": nodes,
                "resourcesPerNode": {"limits": {"cpu": "32", GPU_RESOURCE: 8}},
            },
            "topologyPolicy": {"domains": [{"key": "example.com/rack", "mode": mode}]},
        },
    }))
    .unwrap();
    job.status.get_or_insert_default().device_allocation = Some(DeviceAllocation::Claims);
    job
}
