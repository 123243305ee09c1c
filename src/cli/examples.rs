//! Plans of the manifests in `examples/`, as YAML in `snapshots/` for review.

use crate::{manifest, yaml};
use serde_json::json;
use std::path::{Path, PathBuf};
use switchyard_crds::gpu_topology::{Cpus, GPUTopology, GPUTopologySpec, GPUTopologyStatus, NumaNode};
use switchyard_plan::local::{Devices, LocalSnapshot, plan};
use switchyard_plan::objects;

/// A machine with four cores.
pub(super) fn machine() -> GPUTopology {
    let mut report = GPUTopology::new("four-cores", GPUTopologySpec {});
    let siblings = (0..4).map(|cpu| cpu.to_string()).collect();
    let cpus = Cpus { usable: Some("0-3".into()), siblings, ..Cpus::default() };
    let numa = NumaNode { id: 0, cpus: Some("0-3".into()), ..NumaNode::default() };
    report.status =
        Some(GPUTopologyStatus { cpus: Some(cpus), numa_nodes: vec![numa], ..GPUTopologyStatus::default() });
    report
}

fn examples() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples");
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.filter(|path| path.extension().is_some_and(|end| end == "yaml")).collect()
}

/// After an intended change: `INSTA_UPDATE=always cargo test -p switchyard --lib`, then review the
/// diff of `src/cli/snapshots`.
#[test]
fn every_example_has_its_plan() {
    let examples = examples();
    assert!(examples.len() >= 8, "{examples:?}");
    for path in examples {
        let job = manifest::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let nodes = [machine()];
        let snapshot = LocalSnapshot {
            job: &job,
            nodes: &nodes,
            attempt: 1,
            rendezvous: "ADDRESS:PORT",
            run_dir: "RUN_DIR",
            devices: Devices::default(),
            hosts: None,
        };
        let plan = plan(&snapshot).unwrap_or_else(|refusal| panic!("{}: {refusal}", path.display()));
        let processes: Vec<_> = plan
            .processes()
            .chain(&plan.servers)
            .map(|process| json!({"rank": process.rank, "ranks": process.ranks, "cpus": process.cpus, "threads": process.threads}))
            .collect();
        let mut settings = insta::Settings::clone_current();
        settings.set_omit_expression(true);
        settings.set_prepend_module_to_snapshot(false);
        let name = format!("example_{}", path.file_stem().unwrap_or_default().to_string_lossy());
        let shown = json!({"reason": plan.reason, "processes": processes, "engine": plan.engine});
        settings.bind(|| insta::assert_yaml_snapshot!(name, shown));
    }
}

/// The examples of other frameworks are valid, and each framework has one.
#[test]
fn every_other_framework_has_a_valid_example() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/other");
    for name in ["torch", "paddle", "horovod", "mpi", "jax", "tensorflow", "plain"] {
        let path = folder.join(name).with_extension("yaml");
        let job = manifest::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        switchyard_plan::validate(&job).unwrap_or_else(|faults| panic!("{name}: {faults:?}"));
        assert_eq!(format!("{:?}", job.spec.trainer.framework).to_lowercase(), name);
    }
}

/// The pods that each example with roles would have: the first pod of every role.
#[test]
fn every_example_with_roles_has_its_pods() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/roles");
    let mut count = 0;
    let paths = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    for path in paths.filter(|path| path.extension().is_some_and(|end| end == "yaml")) {
        let mut job = manifest::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        job.metadata.namespace = Some("team".into());
        let valid = switchyard_plan::validate(&job).unwrap_or_else(|faults| panic!("{}: {faults:?}", path.display()));
        let pods: Vec<_> = valid
            .roles
            .iter()
            .map(|role| {
                let pod = objects::pod(&job, &valid, &objects::Defaults::default(), 1, role.first_node);
                let spec = pod.spec.unwrap();
                let container = &spec.containers[0];
                json!({
                    "role": role.name, "pods": role.pods(), "name": pod.metadata.name, "labels": pod.metadata.labels,
                    "command": container.command, "env": container.env, "resources": container.resources,
                })
            })
            .collect();
        let mut settings = insta::Settings::clone_current();
        settings.set_omit_expression(true);
        settings.set_prepend_module_to_snapshot(false);
        let name = format!("roles_{}", path.file_stem().unwrap_or_default().to_string_lossy());
        let shown = json!({"hostfile": switchyard_plan::frameworks::hostfile(&job, &valid, 1), "pods": pods});
        settings.bind(|| insta::assert_yaml_snapshot!(name, shown));
        count += 1;
    }
    assert_eq!(count, 6);
}

/// The example of docs/frameworks.md.
#[test]
fn the_job_of_another_operator_is_converted() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/other/pytorchjob.yaml");
    let text = std::fs::read_to_string(path).unwrap();
    let document = yaml::documents("pytorchjob.yaml", &text).unwrap().remove(0).value.to_json();
    let converted = switchyard_tools::convert::convert(&document, &[]).unwrap();
    let job = switchyard_crds::validate::train_job(&converted.job).unwrap_or_else(|faults| panic!("{faults:?}"));
    let valid = switchyard_plan::validate(&job).unwrap_or_else(|faults| panic!("{faults:?}"));
    assert_eq!((valid.request.nodes, valid.request.processes_per_node, valid.max_restarts), (4, 8, 3));
    assert_eq!(converted.notes.len(), 3, "{:?}", converted.notes);
}
