//! Placement of jobs with roles.

use super::*;

/// A job with these roles: name, pods, GPUs and cores of each, and the role it is near to.
fn with_roles(roles: &[(&str, u32, u32, u32, Option<&str>)]) -> TrainJob {
    let of_role = |(name, replicas, gpus, cpu, near): &(&str, u32, u32, u32, Option<&str>)| {
        let mut limits = json!({"cpu": cpu});
        if *gpus > 0 {
            limits[GPU_RESOURCE] = json!(gpus);
        }
        let mut role = json!({"name": name, "replicas": replicas, "resourcesPerNode": {"limits": limits}});
        near.iter().for_each(|near| role["near"] = json!(near));
        role
    };
    let document = json!({
        "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "metadata": {"name": "a"},
        "spec": {
            "trainer": {"framework": "Torch", "image": "i"},
            "roles": roles.iter().map(of_role).collect::<Vec<_>>(),
        },
    });
    let mut job = schema::train_job(&document).unwrap();
    job.status.get_or_insert_default().device_allocation = Some(DeviceAllocation::DevicePlugin);
    job
}

/// Resources that the pods of a placed job use on each node: GPUs, and that none is used twice.
fn gpus_by_node(placed: &Placed) -> BTreeMap<&str, usize> {
    let mut all: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for node in &placed.status.nodes {
        all.entry(&node.node_name).or_default().extend(node.gpus.iter().map(String::as_str));
    }
    let distinct = |gpus: &Vec<&str>| {
        let mut sorted = gpus.clone();
        sorted.sort_unstable();
        sorted.dedup();
        assert_eq!(sorted.len(), gpus.len(), "a GPU twice: {gpus:?}");
        gpus.len()
    };
    all.iter().map(|(node, gpus)| (*node, distinct(gpus))).collect()
}

#[test]
fn every_role_takes_its_share() {
    let cluster = Cluster::h200(&["r1", "r1", "r1"]);
    let placed = cluster.place(&with_roles(&[("eval", 1, 4, 8, None), ("worker", 2, 8, 8, None)])).unwrap();
    assert_eq!(placed.status.nodes.len(), 3);
    assert_eq!(gpus_by_node(&placed).values().copied().collect::<Vec<_>>(), [8, 8, 4]);
    // Ranks follow the roles, and processes the GPUs.
    let ranks: Vec<i32> = placed.status.nodes.iter().map(|node| node.first_rank).collect();
    assert_eq!(ranks, [0, 4, 12]);
    assert!(placed.status.reason.starts_with("role eval: 4 ranks on n0"), "{}", placed.status.reason);
    let refused = cluster.place(&with_roles(&[("eval", 1, 4, 8, None), ("worker", 3, 8, 8, None)])).unwrap_err();
    assert!(refused.sentence.starts_with("role eval: no node has room for 4 GPUs"), "{}", refused.sentence);
    let refused = cluster.place(&with_roles(&[("worker", 4, 8, 8, None), ("eval", 1, 0, 8, None)])).unwrap_err();
    assert_eq!(refused.changes[0].field, "roles[worker].replicas: 3");
    // Cores of all roles on a node are added up: two pods of 40 cores do not fit into 64.
    assert!(cluster.place(&with_roles(&[("worker", 3, 8, 40, None), ("eval", 1, 0, 24, None)])).is_ok());
    assert!(cluster.place(&with_roles(&[("worker", 3, 8, 40, None), ("eval", 1, 0, 40, None)])).is_err());
}

#[test]
fn a_role_is_placed_on_the_nodes_of_the_role_that_it_is_near_to() {
    let mut cluster = Cluster::h200(&["r1", "r1", "r2", "r2"]);
    // The second rack is free, and the first one has the better GPUs for the workers.
    for name in ["n02", "n03"] {
        cluster.nodes.get_mut(name).unwrap().taken = 1;
    }
    let placed = cluster.place(&with_roles(&[("worker", 2, 8, 8, None), ("ps", 2, 0, 8, Some("worker"))])).unwrap();
    assert_eq!(names(&placed), ["n00", "n01", "n00", "n01"]);
    assert!(
        placed.status.reason.ends_with("; on the nodes of role worker, without the network"),
        "{}",
        placed.status.reason
    );
}

#[test]
fn without_room_there_it_is_placed_in_the_smallest_domain_around() {
    let mut cluster = Cluster::h200(&["r1", "r2", "r2", "r1"]);
    for (name, taken) in [("n01", 3), ("n02", 1), ("n03", 1)] {
        cluster.nodes.get_mut(name).unwrap().taken = taken;
    }
    let levels = Levels::new(vec!["example.com/rack:2".parse().unwrap()]).unwrap();
    let roles = |near| with_roles(&[("worker", 1, 8, 60, None), ("ps", 1, 0, 8, near)]);
    let placed = cluster.place_with(&roles(Some("worker")), &levels).unwrap();
    assert_eq!(names(&placed), ["n00", "n03"]);
    let reason = &placed.status.reason;
    assert!(reason.contains("; in the same example.com/rack as role worker, "), "{reason}");
    assert!(reason.ends_with(" GB/s between them"), "{reason}");
    assert_eq!(
        names(&cluster.place_with(&roles(None), &levels).unwrap()),
        ["n00", "n01"],
        "without `near`, where the fewest GPUs are free"
    );
    cluster.nodes.remove("n03");
    let placed = cluster.place_with(&roles(Some("worker")), &levels).unwrap();
    assert_eq!(names(&placed), ["n00", "n01"]);
    assert!(placed.status.reason.contains("; on other nodes than role worker"), "{}", placed.status.reason);
}

#[test]
fn pods_outside_the_rendezvous_share_nodes_if_there_are_too_few() {
    let cluster = Cluster::h200(&["r1", "r1", "r1"]);
    let placed = cluster.place(&with_roles(&[("learner", 1, 8, 8, None), ("actor", 12, 1, 4, None)])).unwrap();
    assert_eq!(gpus_by_node(&placed).values().copied().collect::<Vec<_>>(), [8, 6, 6], "{:?}", names(&placed));
    assert!(placed.status.reason.contains("role actor: 12 pods share 2 nodes"), "{}", placed.status.reason);
    assert!(cluster.place(&with_roles(&[("learner", 1, 8, 8, None), ("actor", 17, 1, 4, None)])).is_err());
    // Ranks of a ring have a node each.
    let refused = cluster.place(&with_roles(&[("actor", 4, 1, 4, None)])).unwrap_err();
    assert!(refused.sentence.starts_with("role actor: 3 of 4 needed nodes"), "{}", refused.sentence);
}

#[test]
fn a_required_domain_contains_all_roles() {
    let mut cluster = Cluster::h200(&["r1", "r1", "r2", "r2"]);
    let mut job = with_roles(&[("worker", 1, 8, 8, None), ("eval", 1, 4, 8, None)]);
    job.spec.topology_policy = serde_json::from_value(json!({
        "mode": "Required", "domains": [{"key": "example.com/rack", "mode": "Required"}],
    }))
    .unwrap();
    // The first rack has the room for a worker, but not for both.
    cluster.nodes.get_mut("n01").unwrap().taken = 255;
    assert_eq!(names(&cluster.place(&job).unwrap()), ["n02", "n03"]);
    cluster.nodes.get_mut("n03").unwrap().taken = 255;
    let refused = cluster.place(&job).unwrap_err();
    assert_eq!(refused.sentence, "every role has room, but no example.com/rack has room for all of them");
}
