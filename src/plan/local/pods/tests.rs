//! Pods of other frameworks as processes of one machine.

use super::*;
use crate::job::tests::job;
use k8s_openapi::api::core::v1::Container;
use serde_json::{Value, json};
use switchyard_crds::gpu_topology::{GPUTopologySpec, GPUTopologyStatus, Gpu, Link, LinkKind, LinkVia};
use switchyard_crds::names::TRAINER;
use switchyard_worker_contract::pod::RENDEZVOUS_PORT;

fn machine(gpus: u32) -> GPUTopology {
    let uuid = |index: u32| format!("GPU-{index}");
    let gpu = |index: u32| Gpu { index, uuid: uuid(index), ..Gpu::default() };
    // NVLink joins 0 with 3 and 1 with 2.
    let link = |a: u32, b: u32| Link {
        a: uuid(a),
        b: uuid(b),
        kind: LinkKind::NVLink,
        count: Some(4),
        via: Some(LinkVia::Direct),
        megabytes_per_second: Some(100_000),
        path_class: None,
    };
    let mut machine = GPUTopology::new("box", GPUTopologySpec {});
    let links = if gpus == 4 { vec![link(0, 3), link(1, 2)] } else { Vec::new() };
    machine.status = Some(GPUTopologyStatus { gpus: (0..gpus).map(gpu).collect(), links, ..Default::default() });
    machine
}

fn address(node_rank: u32) -> Address {
    Address { host: format!("127.3.0.{}", node_rank + 1), port: RENDEZVOUS_PORT }
}

fn plan_on(job: &TrainJob, gpus: u32) -> Result<PodPlan, String> {
    let addresses: Vec<Address> = (0..16).map(address).collect();
    let machine = machine(gpus);
    let snapshot = PodSnapshot { job, machine: &machine, attempt: 2, addresses: &addresses, visible: None };
    plan_pods(&snapshot).map_err(|refusal| refusal.to_string())
}

/// A job of another framework with these fields of its specification.
fn of(framework: &str, spec: Value) -> TrainJob {
    let mut all = json!({"trainer": {"framework": framework, "image": "image"}, "engine": null});
    for (name, value) in spec.as_object().unwrap() {
        match value {
            Value::Object(fields) if name == "trainer" => {
                all["trainer"].as_object_mut().unwrap().extend(fields.clone())
            }
            _ => all[name] = value.clone(),
        }
    }
    job("gang", all)
}

fn role(name: &str, replicas: u32) -> Value {
    json!({"name": name, "replicas": replicas, "command": [name]})
}

/// Variables of a container in a cluster, with the names of pods replaced by addresses.
fn in_cluster(container: &Container, job: &TrainJob, pods: u32, own: u32) -> BTreeMap<String, String> {
    let host = |rank: u32| address(rank).host;
    let namespace = job.metadata.namespace.as_deref().unwrap_or_default();
    let mut known: BTreeMap<String, String> = BTreeMap::new();
    for entry in container.env.iter().flatten() {
        let value = match &entry.value {
            Some(value) => value.clone(),
            None => host(own),
        };
        let value = known.iter().fold(value, |text, (name, value)| text.replace(&format!("$({name})"), value));
        let name = |rank: u32| format!("gang-2-{rank}.gang.{namespace}.svc");
        let value = (0..pods).fold(value, |text, rank| text.replace(&name(rank), &host(rank)));
        known.insert(entry.name.clone(), value);
    }
    known
}

#[test]
fn pods_have_the_variables_that_they_have_in_a_cluster() {
    let with_ps = |first: &str| json!({"roles": [role(first, 2), role("ps", 2)], "successPolicy": {"role": first}});
    let alike = |nodes: u32| json!({"trainer": {"numNodes": nodes, "numProcPerNode": 1, "command": ["train"]}});
    let mut jobs = Vec::new();
    for framework in ["Torch", "Paddle", "JAX", "TensorFlow", "Plain"] {
        jobs.extend([of(framework, alike(2)), of(framework, with_ps("worker"))]);
    }
    let env =
        json!([{"name": "MASTER_ADDR", "value": "elsewhere"}, {"name": "SECOND", "value": "$(MASTER_ADDR)-$$(A)"}]);
    jobs.push(of("Torch", json!({"trainer": {"numNodes": 2, "command": ["train"], "env": env}})));
    for job in jobs {
        let valid = validate(&job).unwrap();
        let plan = plan_on(&job, 0).unwrap();
        assert_eq!(plan.pods.len(), valid.request.nodes as usize);
        for (rank, planned) in (0..).zip(&plan.pods) {
            let pod = objects::pod(&job, &valid, &objects::Defaults::default(), 2, rank);
            let containers = pod.spec.unwrap().containers;
            let trainer = containers.iter().find(|container| container.name == TRAINER).unwrap();
            let mut expected = in_cluster(trainer, &job, valid.request.nodes, rank);
            // Interfaces of the pod's own network.
            expected.retain(|name, _| !name.ends_with("_SOCKET_IFNAME"));
            // The kubelet's escape.
            expected.values_mut().for_each(|value| *value = value.replace("$$", "$"));
            assert_eq!(planned.env, expected, "{}", planned.name);
        }
    }
}

#[test]
fn pods_listen_on_different_ports() {
    let addresses: Vec<Address> =
        (0..4).map(|rank| Address { host: "127.0.0.1".into(), port: 31_000 + rank }).collect();
    let job =
        of("TensorFlow", json!({"roles": [role("worker", 2), role("ps", 2)], "successPolicy": {"role": "worker"}}));
    let machine = machine(0);
    let snapshot = PodSnapshot { job: &job, machine: &machine, attempt: 1, addresses: &addresses, visible: None };
    let plan = plan_pods(&snapshot).unwrap();
    let names: Vec<&str> = plan.pods.iter().map(|pod| pod.name.as_str()).collect();
    assert_eq!(names, ["worker-0", "worker-1", "ps-0", "ps-1"]);
    let config: Value = serde_json::from_str(&plan.pods[3].env["TF_CONFIG"]).unwrap();
    assert_eq!(
        config,
        json!({
            "cluster": {"worker": ["127.0.0.1:31000", "127.0.0.1:31001"], "ps": ["127.0.0.1:31002", "127.0.0.1:31003"]},
            "task": {"type": "ps", "index": 1},
        })
    );
}

#[test]
fn commands_are_expanded_as_by_a_kubelet() {
    let known = BTreeMap::from([("A".to_owned(), "1".to_owned()), ("B".to_owned(), "$(A)".to_owned())]);
    for (text, expected) in [
        ("$(A)-$(B)", "1-$(A)"),
        ("$$(A)", "$(A)"),
        ("$(C) $A", "$(C) $A"),
        ("100$", "100$"),
        ("$(A", "$(A"),
        ("$$$(A)", "$1"),
    ] {
        assert_eq!(expand(text, &known), expected, "{text}");
    }
}

#[test]
fn what_needs_a_cluster_is_refused_or_named() {
    let no_command = of("Plain", json!({"roles": [{"name": "a", "replicas": 3}]}));
    assert_eq!(
        plan_on(&no_command, 0).unwrap_err(),
        "spec.roles[a].command: got nothing; expected a command: the image's own needs a container runtime, which \
         `switchyard run` does not use"
    );
    let error = plan_on(&of("MPI", json!({"trainer": {"command": ["mpirun"]}})), 0).unwrap_err();
    assert!(error.starts_with("spec.trainer.framework: got MPI; expected another framework: "), "{error}");
    let error = plan_on(&of("Plain", json!({"trainer": {"command": ["a"]}, "suspend": true})), 0).unwrap_err();
    assert!(error.starts_with("spec.suspend: got true"), "{error}");
    let container = json!({
        "name": "trainer",
        "env": [
            {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "secret", "key": "key"}}},
            {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        ],
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    });
    let spec = json!({"containers": [container], "volumes": [{"name": "data", "emptyDir": {}}]});
    let job = of("Plain", json!({"trainer": {"command": ["a", "$(NAME)"]}, "template": {"spec": spec}}));
    let plan = plan_on(&job, 0).unwrap();
    assert_eq!(plan.pods[0].argv, ["a", "gang-2-0"]);
    assert_eq!(
        plan.warnings,
        [
            "commands run with the programs and files of this machine, not in image",
            "KEY has its value from the cluster: here from the environment of this command",
            "volumes of spec.template are not mounted",
        ]
    );
}

#[test]
fn pods_share_the_gpus_of_the_machine() {
    let gpus = |name: &str, replicas: u32, gpus: u32| {
        let limits = json!({"limits": {"nvidia.com/gpu": gpus}});
        json!({"name": name, "replicas": replicas, "command": ["a"], "resourcesPerNode": limits})
    };
    let visible = |roles: Value| {
        let plan = plan_on(&of("Plain", json!({"roles": roles})), 4)?;
        Ok::<_, String>(plan.pods.iter().map(|pod| pod.env.get(VISIBLE).cloned()).collect::<Vec<_>>())
    };
    let text = |value: &str| Some(value.to_owned());
    let pairs = visible(json!([gpus("learner", 1, 2), gpus("actor", 2, 1), role("eval", 1)])).unwrap();
    assert_eq!(pairs, [text("GPU-1,GPU-2"), text("GPU-0"), text("GPU-3"), text("")]);
    assert_eq!(visible(json!([role("a", 2)])).unwrap(), [None, None]);
    assert_eq!(
        visible(json!([gpus("learner", 1, 2), gpus("actor", 3, 1)])).unwrap_err(),
        "spec.roles[actor].resourcesPerNode.limits.nvidia.com/gpu: got 1; expected at most 0, the whole and healthy GPUs \
         of this machine that the pods before this one leave"
    );
}

/// A chief, two workers and an evaluator without which the job continues.
fn roles() -> PodPlan {
    let eval = json!({"name": "eval", "command": ["eval"], "onFailure": "Ignore"});
    let spec = json!({"roles": [role("chief", 1), role("worker", 2), eval], "successPolicy": {"role": "chief"}});
    plan_on(&of("Plain", spec), 0).unwrap()
}

#[test]
fn the_awaited_role_completes_the_job() {
    use PodState::{Failed, Running, Succeeded};
    let plan = roles();
    for (states, failed, verdict) in [
        ([Running, Running, Running, Running], &[][..], Verdict::Continue),
        ([Running, Succeeded, Succeeded, Succeeded], &[], Verdict::Continue),
        ([Succeeded, Running, Running, Running], &[], Verdict::Complete),
        ([Succeeded, Failed, Running, Running], &[1], Verdict::Complete),
        ([Running, Running, Running, Failed], &[3], Verdict::Continue),
        ([Running, Running, Failed, Failed], &[3, 2], Verdict::FailsSoon(2)),
        ([Failed, Running, Running, Running], &[0], Verdict::Failed(0)),
        ([Failed, Running, Failed, Running], &[2, 0], Verdict::FailsSoon(2)),
        ([Failed, Failed, Failed, Failed], &[2, 3, 0, 1], Verdict::Failed(2)),
    ] {
        assert_eq!(plan.judge(&states, failed), verdict, "{states:?}");
    }
    let alike = plan_on(&of("Plain", json!({"trainer": {"numNodes": 2, "command": ["a"]}})), 0).unwrap();
    assert_eq!(alike.judge(&[Succeeded, Running], &[]), Verdict::Continue);
    assert_eq!(alike.judge(&[Succeeded, Succeeded], &[]), Verdict::Complete);
    assert_eq!(alike.judge(&[Running, Failed], &[1]), Verdict::Failed(1));
}

#[test]
fn pods_are_counted_by_role() {
    use PodState::{Failed, Running, Stopped, Succeeded};
    let (all, by_role) = roles().counts(&[Succeeded, Running, Stopped, Failed]);
    let of = |counts: &NodeCounts| [counts.desired, counts.active, counts.succeeded, counts.failed];
    assert_eq!(of(&all), [4, 1, 1, 1]);
    let by_role: Vec<_> = by_role.iter().map(|role| (role.name.as_str(), of(&role.counts))).collect();
    assert_eq!(by_role, [("chief", [1, 0, 1, 0]), ("worker", [2, 1, 0, 0]), ("eval", [1, 0, 0, 1])]);
}
