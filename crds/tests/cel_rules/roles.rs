//! Rules of `spec.roles` and `spec.successPolicy`.

use super::{Case, base, read, validate};
use serde_json::{Value, json};

/// A job with these roles, which succeeds with the role `success`.
fn job(framework: &str, roles: Value, success: Option<&str>) -> Value {
    let mut job = base();
    job["spec"] = json!({"trainer": {"framework": framework, "image": "image"}, "roles": roles});
    if let Some(role) = success {
        job["spec"]["successPolicy"] = json!({"role": role});
    }
    job
}

fn set(mut job: Value, pointer: &str, value: Value) -> Value {
    let (parent, key) = pointer.rsplit_once('/').unwrap();
    job.pointer_mut(parent).unwrap()[key] = value;
    job
}

pub(super) fn cases() -> Vec<Case> {
    let two = || json!([{"name": "worker", "replicas": 2}, {"name": "eval", "near": "worker"}]);
    let near = |worker: Value, eval: &str| json!([{"name": "worker", "near": worker}, {"name": "eval", "near": eval}]);
    let ignored = |role: &str| {
        let mut roles = two();
        roles
            .as_array_mut()
            .unwrap()
            .iter_mut()
            .filter(|own| own["name"] == role)
            .for_each(|own| own["onFailure"] = json!("Ignore"));
        roles
    };
    let ps = || json!([{"name": "worker"}, {"name": "ps"}]);
    vec![
        ("roles are for other frameworks", job("Plain", two(), None), {
            let mut job = base();
            job["spec"]["roles"] = two();
            job
        }),
        (
            "with roles, pods are described in each role",
            job("Plain", two(), None),
            set(job("Plain", two(), None), "/spec/trainer/numNodes", json!(2)),
        ),
        ("near must name another role", job("Plain", two(), None), job("Plain", near(json!("eval"), "worker"), None)),
        ("successPolicy.role must name", job("Plain", two(), Some("worker")), job("Plain", two(), Some("chief"))),
        (
            "onFailure Ignore is for roles",
            job("Plain", ignored("eval"), Some("worker")),
            job("Plain", ignored("eval"), None),
        ),
        ("parameter servers never end", job("TensorFlow", ps(), Some("worker")), job("TensorFlow", ps(), Some("ps"))),
    ]
}

/// Every field that describes the pods of a job without roles.
#[test]
fn fields_of_a_single_role_are_rejected_with_roles() {
    let roles = || job("Plain", json!([{"name": "worker"}]), None);
    for (pointer, value) in [
        ("/spec/trainer/numProcPerNode", json!(1)),
        ("/spec/trainer/cpuThreads", json!(1)),
        ("/spec/trainer/resourcesPerNode", json!({"limits": {"cpu": "1"}})),
        ("/spec/trainer/command", json!(["python"])),
        ("/spec/trainer/args", json!(["train.py"])),
    ] {
        let errors = validate(&read(&set(roles(), pointer, value)), None).expect_err(pointer).to_string();
        assert!(errors.contains("with roles, pods are described in each role"), "{pointer}: {errors}");
    }
    for (pointer, value) in
        [("/spec/trainer/env", json!([{"name": "A"}])), ("/spec/template", json!({"spec": {"hostNetwork": true}}))]
    {
        assert!(validate(&read(&set(roles(), pointer, value)), None).is_ok(), "{pointer}");
    }
}

#[test]
fn near_is_unknown_cyclic_or_a_chain() {
    let near = |names: &[(&str, Option<&str>)]| {
        let roles = names.iter().map(|(name, near)| match near {
            Some(near) => json!({"name": name, "near": near}),
            None => json!({"name": name}),
        });
        validate(&read(&job("Plain", roles.collect::<Vec<Value>>().into(), None)), None)
    };
    assert!(near(&[("a", Some("b")), ("b", None), ("c", Some("b"))]).is_ok());
    for rejected in [
        &[("a", Some("a"))][..],
        &[("a", Some("z"))],
        &[("a", Some("b")), ("b", Some("a"))],
        &[("a", Some("b")), ("b", Some("c")), ("c", Some("a"))],
        &[("a", Some("b")), ("b", Some("c")), ("c", None)],
    ] {
        assert!(near(rejected).is_err(), "{rejected:?}");
    }
}

/// The schema rejects these before any rule.
#[test]
fn roles_need_distinct_names_and_replicas() {
    let faults = |roles: Value| match switchyard_crds::validate::train_job(&job("Plain", roles, None)) {
        Ok(_) => String::new(),
        Err(faults) => faults.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "),
    };
    assert_eq!(faults(json!([{"name": "worker"}, {"name": "eval", "replicas": 4096}])), "");
    for (roles, message) in [
        (json!([]), "spec.roles: too few items; got 0 items; expected at least 1"),
        (
            json!([{"name": "a"}, {"name": "a"}]),
            "spec.roles: the same item twice; got text \"a\" in items 0 and 1; expected every item once",
        ),
        (json!([{"name": "a", "replicas": 0}]), "spec.roles[0].replicas: out of range; got 0; expected"),
        (json!([{"replicas": 1}]), "spec.roles[0].name: missing"),
        (json!([{"name": "Worker"}]), "spec.roles[0].name: wrong form"),
        (json!([{"name": "a", "template": {}}]), "spec.roles[0].template: unknown field"),
        (
            json!((0..9).map(|number| json!({"name": format!("r{number}")})).collect::<Vec<_>>()),
            "spec.roles: too many items",
        ),
    ] {
        let found = faults(roles);
        assert!(found.starts_with(message), "expected `{message}`, got `{found}`");
    }
}
