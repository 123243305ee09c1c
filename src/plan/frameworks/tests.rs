//! Environment of each framework, reviewed as YAML in `snapshots/`, and precedence over user
//! settings.

mod roles;

use super::*;
use crate::objects::{self, Defaults};
use crate::validate;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use switchyard_crds::names::TRAINER;
use switchyard_fabric::variables::{per_process, rendezvous};

const FRAMEWORKS: [&str; 6] = ["Torch", "Paddle", "Horovod", "MPI", "JAX", "TensorFlow"];

fn job(framework: &str, trainer: Value, template: Value) -> Result<(TrainJob, ValidJob), String> {
    let mut all = json!({"framework": framework, "image": "image", "command": ["train"], "args": ["--fast"]});
    for (name, value) in trainer.as_object().into_iter().flatten() {
        all[name] = value.clone();
    }
    let mut document = json!({
        "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "metadata": {"name": "job"}, "spec": {"trainer": all},
    });
    if !template.is_null() {
        document["spec"]["template"] = template;
    }
    let mut job = switchyard_crds::validate::train_job(&document).map_err(|faults| format!("{faults:?}"))?;
    job.metadata.namespace = Some("team".into());
    job.metadata.uid = Some("5d3f8a52-4a44-4d2a-9d0e-0123456789ab".into());
    let valid = validate(&job).map_err(|faults| format!("{faults:?}"))?;
    Ok((job, valid))
}

fn of(framework: &str, nodes: u32, gpus: u32) -> (TrainJob, ValidJob) {
    let limits = json!({"limits": {"nvidia.com/gpu": gpus}});
    job(framework, json!({"numNodes": nodes, "resourcesPerNode": limits}), Value::Null).unwrap()
}

fn entries(job: &(TrainJob, ValidJob), node_rank: u32) -> Vec<Entry> {
    environment(&GangPod::new(&job.0, &job.1, 3, node_rank))
}

/// The trainer container in the pod of a node.
fn trainer(job: &(TrainJob, ValidJob), node_rank: u32) -> k8s_openapi::api::core::v1::Container {
    let spec = objects::pod(&job.0, &job.1, &Defaults::default(), 3, node_rank).spec.unwrap();
    spec.containers.into_iter().find(|container| container.name == TRAINER).unwrap()
}

#[test]
fn every_framework_has_its_environment() {
    for (framework, nodes) in FRAMEWORKS.into_iter().flat_map(|framework| [(framework, 1), (framework, 3)]) {
        let job = of(framework, nodes, 2);
        let ranks = if nodes == 1 { vec![0] } else { vec![0, 2] };
        let shown: Vec<Value> = ranks
            .into_iter()
            .map(|rank| {
                let container = trainer(&job, rank);
                json!({"nodeRank": rank, "command": container.command, "args": container.args, "env": container.env, "volumeMounts": container.volume_mounts})
            })
            .collect();
        let hosts = hostfile(&job.0, &job.1, 3);
        insta::assert_yaml_snapshot!(format!("{framework}_on_{nodes}"), json!({"hostfile": hosts, "pods": shown}));
    }
}

#[test]
fn one_process_per_node_needs_no_torchrun() {
    let value = |job: &(TrainJob, ValidJob), name: &str| {
        let found = entries(job, 1).into_iter().find(|entry| entry.name == name);
        found.map(|entry| entry.source)
    };
    let single = of("Torch", 4, 1);
    assert_eq!(value(&single, "WORLD_SIZE"), Some(Source::Value("4".into())));
    assert_eq!(value(&single, "RANK"), Some(Source::Value("1".into())));
    let several = of("Torch", 4, 8);
    assert_eq!((value(&several, "WORLD_SIZE"), value(&several, "RANK")), (None, None), "only torchrun sets these");
    assert_eq!(value(&several, "PET_NPROC_PER_NODE"), Some(Source::Value("8".into())));
}

/// S18: a resolver caches for half a minute that a name does not exist. Names exist as soon as
/// their pod has an address, and no attempt looks up a name that an earlier one may have looked up
/// too early.
#[test]
fn attempts_have_distinct_host_names_despite_dns_caches() {
    for framework in FRAMEWORKS {
        let job = of(framework, 2, 1);
        let hosts = |attempt: u32| -> Vec<String> {
            let pod = GangPod::new(&job.0, &job.1, attempt, 1);
            let is_name = |text: &String| text.contains(&format!("job-{attempt}"));
            let values = environment(&pod).into_iter().filter_map(|entry| match entry.source {
                Source::Value(value) => Some(value),
                Source::Field(_) => None,
            });
            values.chain(hostfile(&job.0, &job.1, attempt)).filter(is_name).collect()
        };
        let (third, fourth) = (hosts(3), hosts(4));
        assert!(!third.is_empty() && third.len() == fourth.len(), "{framework}: {third:?}");
        assert!(third.iter().all(|host| !fourth.contains(host)), "{framework}: {third:?}");
        let shared = objects::shared(&job.0, &job.1);
        let service = shared.iter().find(|object| object.kind() == objects::Kind::Service).unwrap().content();
        assert_eq!(service.pointer("/spec/publishNotReadyAddresses"), Some(&json!(true)), "{framework}");
    }
}

/// The linter's name table matches the planner, and correctly marks the variables that differ
/// between nodes.
#[test]
fn the_documented_variable_table_is_accurate() {
    for framework in FRAMEWORKS {
        let mut seen: BTreeMap<&str, Vec<Option<Source>>> = BTreeMap::new();
        let known: Vec<&str> = rendezvous(framework).iter().map(|variable| variable.name).collect();
        let job = of(framework, 2, 1);
        let both = [entries(&job, 0), entries(&job, 1)];
        for name in &known {
            let of_node =
                |node: &Vec<Entry>| node.iter().find(|entry| entry.name == *name).map(|entry| entry.source.clone());
            seen.insert(name, both.iter().map(of_node).collect());
        }
        for entry in both.iter().flatten() {
            assert!(known.contains(&entry.name), "{framework}: {} is in no table", entry.name);
            assert!(!per_process(entry.name), "{framework}: {} is the launcher's", entry.name);
        }
        for variable in rendezvous(framework) {
            let sources = &seen[variable.name];
            let differs = sources[0] != sources[1] || matches!(sources[0], Some(Source::Field(_)));
            assert!(sources.iter().all(Option::is_none) || differs == variable.differs, "{framework}: {variable:?}");
        }
    }
}

#[test]
fn user_overrides_are_reported() {
    let env = json!([{"name": "PET_NODE_RANK", "value": "0"}, {"name": "PET_NPROC_PER_NODE", "value": "1"}, {"name": "MINE", "value": "1"}]);
    let (job, valid) = job("Torch", json!({"numNodes": 2, "env": env}), Value::Null).unwrap();
    let conflicts: Vec<String> =
        objects::conflicts(&job, &valid, &Defaults::default()).iter().map(ToString::to_string).collect();
    assert_eq!(
        conflicts,
        [
            "spec.trainer.env[PET_NODE_RANK]: the value is taken; Switchyard would set it: it differs from node to node, and with a single value the nodes cannot find each other",
            "spec.trainer.env[PET_NPROC_PER_NODE]: the value is taken; Switchyard would set it: keeping it correct is now up to you",
        ]
    );
}

#[test]
fn variables_beyond_the_kernel_limit_are_rejected() {
    let long = |name: &str| {
        let mut document = json!({"apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "metadata": {"name": name},
            "spec": {"trainer": {"framework": "TensorFlow", "image": "image", "numNodes": 1024}}});
        document["metadata"]["namespace"] = "n".repeat(63).into();
        let mut job = switchyard_crds::validate::train_job(&document).unwrap();
        job.metadata.namespace = Some("n".repeat(63));
        validate(&job)
    };
    assert!(long("short").is_ok());
    let faults = long(&"j".repeat(50)).unwrap_err();
    assert!(faults[0].got.starts_with("1024 with the names of as many nodes in TF_CONFIG"), "{faults:?}");
}

proptest! {
    // Each case walks the whole schema.
    #![proptest_config(ProptestConfig::with_cases(48))]
    /// User settings always reach the program, except for the rank's identity.
    #[test]
    fn the_user_wins(
        framework in 0..FRAMEWORKS.len(),
        nodes in 1..4_u32,
        asked in prop::collection::btree_map(0..40_usize, "[a-z]{0,4}", 0..8),
        of_template in prop::collection::btree_map(0..40_usize, "[A-Z]{0,4}", 0..8),
    ) {
        let framework = FRAMEWORKS[framework];
        let known = rendezvous(framework);
        let name = |index: usize| known.get(index).map_or_else(|| format!("MINE_{index}"), |variable| variable.name.to_string());
        let list = |map: &BTreeMap<usize, String>| -> Vec<Value> {
            map.iter().map(|(index, value)| json!({"name": name(*index), "value": value})).collect()
        };
        let mut in_template = list(&of_template);
        in_template.push(json!({"name": "SWITCHYARD_NODE_RANK", "value": "9"}));
        let template = json!({"spec": {"containers": [{"name": "trainer", "env": in_template}]}});
        let made = job(framework, json!({"numNodes": nodes, "env": list(&asked)}), template).unwrap();
        let env = trainer(&made, nodes - 1).env.unwrap();
        let got: BTreeMap<String, Option<String>> = env.iter().map(|entry| (entry.name.clone(), entry.value.clone())).collect();
        prop_assert_eq!(got.len(), env.len(), "a name twice");
        for (index, value) in of_template.iter().chain(&asked) {
            let expected = asked.get(index).unwrap_or(value);
            prop_assert_eq!(got[&name(*index)].as_ref(), Some(expected));
        }
        prop_assert_eq!(got["SWITCHYARD_NODE_RANK"].clone(), Some((nodes - 1).to_string()));
        for entry in entries(&made, nodes - 1) {
            prop_assert!(got.contains_key(entry.name));
        }
        // A variable that refers to another comes after it.
        let position = |wanted: &str| env.iter().position(|entry| entry.name == wanted);
        if env.iter().any(|entry| entry.value.as_deref().is_some_and(|value| value.starts_with("$(POD_IP)"))) {
            prop_assert!(position("POD_IP") < position("PADDLE_MASTER"));
        }
        let conflicts = objects::conflicts(&made.0, &made.1, &Defaults::default());
        let own: std::collections::BTreeSet<&str> = entries(&made, 0).iter().chain(&entries(&made, nodes - 1)).map(|entry| entry.name).collect();
        let decided = asked.keys().chain(of_template.keys()).filter(|index| own.contains(name(**index).as_str())).count();
        let taken = conflicts.iter().filter(|conflict| matches!(conflict, objects::MergeConflict::Taken { .. })).count();
        prop_assert_eq!(taken, decided, "each is reported");
    }
}
