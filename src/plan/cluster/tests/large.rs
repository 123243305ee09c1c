//! Jobs with too many nodes to fit into a status.

use super::*;
use crate::slices;
use switchyard_crds::SlicesStatus;

const NODES: u32 = 300;

fn placed() -> (World, SlicesStatus) {
    let mut world = World::new(NODES, json!({"failurePolicy": {"maxRestarts": 3}}));
    world.run();
    let named = slices::of(&world.job).cloned().unwrap();
    (world, named)
}

fn slices_of(world: &World) -> Vec<String> {
    world.objects.keys().filter(|(kind, _)| *kind == Kind::PlacementSlice).map(|(_, name)| name.clone()).collect()
}

#[test]
fn a_decision_names_its_placement_slices() {
    let (world, named) = placed();
    assert_eq!((world.stage(), named.count, named.nodes), ("Running", 2, 300));
    assert_eq!(slices_of(&world), slices::names(&named).collect::<Vec<_>>());
    assert!(world.plan().actions.is_empty());
}

#[test]
fn a_deleted_slice_is_recreated_unchanged() {
    let (mut world, named) = placed();
    let gone = slices::names(&named).nth(1).unwrap();
    world.objects.remove(&(Kind::PlacementSlice, gone.clone()));
    let plan = world.plan();
    let [Action::Create(Object::PlacementSlice(slice))] = plan.actions.as_slice() else { panic!("{:?}", plan.actions) };
    assert_eq!((slice.metadata.name.as_ref(), slice.spec.first_node), (Some(&gone), 256));
    world.run();
    assert_eq!((slices_of(&world).len(), world.attempt()), (2, 1));
}

/// The status that references them may not have been observed yet, whether this controller or its
/// predecessor wrote it.
#[test]
fn slices_are_deleted_once_no_status_can_reference_them() {
    let (mut world, named) = placed();
    let view = world.objects[&(Kind::PlacementSlice, slices::names(&named).next().unwrap())].clone();
    for name in ["a-1-00000000000000aa-0", "a-2-00000000000000bb-0", "a-x-0", "ab-1-0"] {
        world.objects.insert((Kind::PlacementSlice, name.into()), ObjectView { uid: name.into(), ..view.clone() });
    }
    let deleted = |world: &World| -> Vec<String> {
        let deletes = world.plan().actions.into_iter().filter_map(|action| match action {
            Action::Delete { kind: Kind::PlacementSlice, name, .. } => Some(name),
            _ => None,
        });
        deletes.collect()
    };
    assert_eq!(deleted(&world), ["a-1-00000000000000aa-0"], "another placement of this attempt");
    world.exit("a-1-0", 1, "");
    world.step();
    assert_eq!(
        (world.attempt(), slices::of(&world.job)),
        (2, Some(&named)),
        "the previous placement, until the next one is decided"
    );
    world.now = 60;
    assert_eq!(deleted(&world), ["a-1-00000000000000aa-0"], "slices of attempt 2 may be referenced at any moment");
    world.run();
    let now = slices::of(&world.job).cloned().unwrap();
    let left: Vec<String> =
        slices_of(&world).into_iter().filter(|name| name.starts_with("a-2") || name.starts_with("a-1")).collect();
    assert_eq!(left, slices::names(&now).collect::<Vec<_>>());
}

#[test]
fn a_lost_placement_is_an_infrastructure_failure() {
    let (mut world, named) = placed();
    world.job.status.as_mut().unwrap().placement.as_mut().unwrap().nodes.clear();
    let plan = world.step();
    let status = plan.status.unwrap();
    let restarts = status.restarts.clone().unwrap();
    assert_eq!((status.attempt, restarts.infrastructure, restarts.application), (Some(2), 1, 0));
    assert!(status.placement.is_none() && plan.actions.is_empty());
    let message = format!("PlacementSlices {}-0 to 1, which hold the job's placement, were deleted", named.name_prefix);
    assert!(world.message().contains(&message), "{}", world.message());
    world.now = 60;
    world.run();
    assert_eq!((world.stage(), slices::of(&world.job).unwrap().nodes), ("Running", 300));
}

#[test]
fn files_of_many_nodes_are_split_over_config_maps() {
    let limits = json!({"cpu": "2", "nvidia.com/gpu": 8});
    let trainer = json!({"framework": "Plain", "image": "i", "numNodes": 4096, "resourcesPerNode": {"limits": limits}});
    let mut world = World::new(1, json!({"trainer": trainer}));
    let decision = json!({"name": "NCCL_SOCKET_IFNAME", "outcome": "Set", "value": "x".repeat(1000), "class": "Must",
        "reason": "r".repeat(500), "evidence": "e", "link": "l"});
    let status = world.job.status.get_or_insert_default();
    status.fabric = Some(serde_json::from_value(json!({"decisions": vec![decision; 3]})).unwrap());
    let valid = validate(&world.job).unwrap();
    let configs = objects::fabric_configs(&world.job, &valid, 3);
    assert_eq!(configs.len(), 16);
    for config in &configs {
        let size = serde_json::to_string(config).unwrap().len();
        assert!(size < 1 << 20, "{size} bytes");
    }
    for rank in [0, 255, 256, 4095] {
        let pod = objects::pod(&world.job, &valid, &Defaults::default(), 3, rank);
        let volumes = pod.spec.unwrap().volumes.unwrap();
        let source =
            volumes.into_iter().find(|volume| volume.name == "switchyard-fabric-plan").unwrap().config_map.unwrap();
        let own = configs.iter().find(|config| config.metadata.name.as_deref() == Some(source.name.as_str())).unwrap();
        let data = own.data.as_ref().unwrap();
        assert!(
            source.items.unwrap().iter().all(|item| data.contains_key(&item.key)),
            "rank {rank} in {}",
            source.name
        );
        assert!(objects::is_of_attempt(&valid, 3, &source.name));
    }
    assert_eq!(configs[0].metadata.name.as_deref(), Some("a-3-fabric"), "the name is unchanged");
}
