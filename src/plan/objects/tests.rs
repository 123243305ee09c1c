//! Golden objects: the objects created in a cluster, reviewed as YAML in `snapshots/`.

mod kueue;

use super::*;
use crate::eligible::NodeRules;
use crate::{resources, validate};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use proptest::prelude::*;
use serde_json::Value;
use switchyard_crds::{DeviceAllocation, FabricResource, FabricStatus, NodeShape, PlacedNode, TrainJobStatus};

fn job(name: &str, spec: Value) -> (TrainJob, ValidJob) {
    let document = json!({
        "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "metadata": {"name": name}, "spec": spec,
    });
    let mut job = switchyard_crds::validate::train_job(&document).unwrap_or_else(|faults| panic!("{faults:?}"));
    job.metadata.namespace = Some("team".into());
    job.metadata.uid = Some("5d3f8a52-4a44-4d2a-9d0e-0123456789ab".into());
    let valid = validate(&job).unwrap_or_else(|faults| panic!("{faults:?}"));
    (job, valid)
}

fn engine() -> Value {
    json!({"model": {"type": "GPT", "gpt": {"layers": 1, "hiddenSize": 8, "heads": 2, "contextLength": 4}}, "data": {"path": "/data"}, "steps": 9})
}

fn defaults() -> Defaults {
    Defaults { worker_image: "switchyard-worker:1".into(), ..Defaults::default() }
}

/// All objects of one attempt, with only the first of the pods.
fn all(job: &(TrainJob, ValidJob)) -> Vec<Value> {
    let mut objects = shared(&job.0, &job.1);
    objects.extend(config_map(&job.0, &job.1, 1).map(Object::ConfigMap));
    objects.push(Object::Pod(Box::new(pod(&job.0, &job.1, &defaults(), 1, 0))));
    objects.iter().map(|object| json!({"kind": object.kind(), "object": object.content()})).collect()
}

#[test]
fn one_engine_pod() {
    insta::assert_yaml_snapshot!(all(&job("one", json!({"engine": engine()}))));
}

#[test]
fn two_engine_nodes_with_every_option() {
    let spec = json!({"trainer": {"numNodes": 2, "numProcPerNode": 4, "resourcesPerNode": {"limits": {"cpu": "8", "memory": "16Gi"}}}, "engine": engine()});
    insta::assert_yaml_snapshot!(all(&job("two", spec)));
}

#[test]
fn plain_framework_pod() {
    let trainer =
        json!({"framework": "Plain", "image": "torch:2", "command": ["python"], "args": ["train.py"], "numNodes": 2});
    let job = job("torch", json!({"trainer": trainer}));
    insta::assert_yaml_snapshot!(pod(&job.0, &job.1, &defaults(), 3, 1));
}

#[test]
fn a_template_is_merged_by_name() {
    let template = json!({
        "metadata": {"labels": {"team": "vision", "training.switchyard.dev/rank": "7"}, "annotations": {"note": "kept"}},
        "spec": {
            "restartPolicy": "OnFailure", "hostname": "mine", "priorityClassName": "high",
            "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}, {"name": "switchyard-run", "persistentVolumeClaim": {"claimName": "models"}}],
            "schedulingGates": [{"name": "example.com/mine"}],
            "containers": [
                {"name": "trainer", "image": "mine:1", "command": ["sh"], "env": [{"name": "SWITCHYARD_JOB", "value": "x"}, {"name": "MINE", "value": "1"}],
                 "volumeMounts": [{"name": "data", "mountPath": "/data"}], "securityContext": {"runAsUser": 1000}},
                {"name": "side", "image": "side:1"},
            ],
        },
    });
    let job =
        job("merge", json!({"trainer": {"numNodes": 2, "image": "ours:1"}, "template": template, "engine": engine()}));
    insta::assert_yaml_snapshot!(pod(&job.0, &job.1, &defaults(), 1, 1));
    let conflicts: Vec<String> = conflicts(&job.0, &job.1, &defaults()).iter().map(ToString::to_string).collect();
    insta::assert_yaml_snapshot!(conflicts);
}

/// Regression test: after 300 s Kubernetes evicted pods that were still training, regardless of the
/// controller's grace period, mass outage detection and the ranks' progress.
#[test]
fn a_pod_tolerates_an_unreachable_node_unless_its_template_sets_a_limit() {
    let key = |name: &str| format!("node.kubernetes.io/{name}");
    let ours = |name: &str| json!({"key": key(name), "operator": "Exists", "effect": "NoExecute"});
    let seconds =
        |name: &str| json!({"key": key(name), "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60});
    let all = json!({"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60});
    let gpu = json!({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"});
    let new = json!({"key": key("not-ready"), "operator": "Exists", "effect": "NoSchedule"});
    for (template, expected) in [
        (json!([]), json!([ours("not-ready"), ours("unreachable")])),
        (json!([gpu]), json!([gpu, ours("not-ready"), ours("unreachable")])),
        (json!([new]), json!([new, ours("not-ready"), ours("unreachable")])),
        (json!([seconds("unreachable")]), json!([seconds("unreachable"), ours("not-ready")])),
        (json!([all]), json!([all])),
    ] {
        let job = torch("t", json!({"containers": [], "tolerations": template}));
        let pod = pod(&job.0, &job.1, &defaults(), 1, 0);
        assert_eq!(serde_json::to_value(pod.spec.unwrap().tolerations).unwrap(), expected);
    }
}

/// Regression test: the engine assumed 30 s, so a shorter period of the template killed the save.
#[test]
fn the_engine_gets_the_grace_period_of_its_template() {
    for (seconds, expected) in [(None, None), (Some(30), None), (Some(10), Some("10")), (Some(600), Some("600"))] {
        let template = json!({"spec": {"containers": [], "terminationGracePeriodSeconds": seconds}});
        let job = job("grace", json!({"template": template, "engine": engine()}));
        let pod = pod(&job.0, &job.1, &defaults(), 1, 0);
        let given = pod.spec.unwrap().containers[0].env.clone().unwrap();
        let value = given
            .into_iter()
            .find(|entry| entry.name == switchyard_worker_contract::env::GRACE_SECONDS)
            .and_then(|entry| entry.value);
        assert_eq!(value.as_deref(), expected);
    }
}

fn on(node: &str) -> PlacedNode {
    PlacedNode { node_name: node.into(), ..PlacedNode::default() }
}

#[test]
fn gpus_by_claim_with_nearby_cores() {
    let limits = json!({"limits": {"nvidia.com/gpu": 2, "cpu": 8}});
    let mut job = job("gpus", json!({"trainer": {"framework": "Plain", "image": "i", "resourcesPerNode": limits}}));
    job.0.status.get_or_insert_default().device_allocation = Some(DeviceAllocation::Claims);
    let placed = PlacedNode {
        gpus: vec!["GPU-a".into(), "GPU-b".into()],
        shape: NodeShape { cpus: vec!["0-3".into(), "4-7".into()], ..Default::default() },
        ..on("node-7")
    };
    let made = pod(&job.0, &job.1, &defaults(), 1, 0);
    insta::assert_yaml_snapshot!(made);
    insta::assert_yaml_snapshot!(claim(&job.0, &job.1, &defaults(), 1, 0, &placed));
    assert_eq!(placement_patch(&rules(&made), &placed, None)["metadata"]["annotations"][labels::RANK_CPUS], "0-3;4-7");
}

fn rules(pod: &Pod) -> NodeRules {
    NodeRules::of(pod.spec.as_ref().unwrap())
}

#[test]
fn lifting_a_gate_pins_every_affinity_term() {
    let free = job("free", json!({"engine": engine()}));
    insta::assert_yaml_snapshot!(placement_patch(
        &rules(&pod(&free.0, &free.1, &defaults(), 1, 0)),
        &on("node-7"),
        None
    ));
    let terms = json!([
        {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]},
        {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["node-1"]}]},
    ]);
    let affinity =
        json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}});
    let bound = job("bound", json!({"template": {"spec": {"affinity": affinity}}, "engine": engine()}));
    let patch = placement_patch(&rules(&pod(&bound.0, &bound.1, &defaults(), 1, 0)), &on("node-7"), None);
    let fields = "/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms";
    let terms = patch.pointer(fields).unwrap().as_array().unwrap();
    assert!(
        terms.iter().all(|term| term["matchFields"]
            .as_array()
            .unwrap()
            .iter()
            .any(|field| field["values"] == json!(["node-7"])))
    );
    assert_eq!((terms.len(), &terms[0]["matchExpressions"][0]["key"]), (2, &json!("zone")));
}

#[test]
fn merge_conflicts_name_their_field() {
    let template = json!({"spec": {"nodeName": "n", "initContainers": [{"name": "trainer", "image": "i"}],
        "containers": [{"name": "side"}, {"name": "side", "image": "i"}], "volumes": [{"name": "v"}, {"name": "v"}]}});
    let document = json!({
        "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "metadata": {"name": "a"},
        "spec": {"trainer": {"framework": "Plain"}, "template": template},
    });
    let job = switchyard_crds::validate::train_job(&document).unwrap();
    let text: Vec<String> = faults(&job).iter().map(ToString::to_string).collect();
    insta::assert_yaml_snapshot!(text);
}

/// A job of the engine with checkpoints on the volume `ckpt`, and these mounts of the template's
/// trainer.
fn saved(path: &str, volumes: Value, mounts: Value) -> TrainJob {
    let document = json!({
        "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "metadata": {"name": "saved"},
        "spec": {
            "checkpoint": {"volumeName": "ckpt", "path": path}, "engine": engine(),
            "template": {"spec": {"volumes": volumes, "containers": [{"name": "trainer", "volumeMounts": mounts}]}},
        },
    });
    switchyard_crds::validate::train_job(&document).unwrap_or_else(|faults| panic!("{faults:?}"))
}

#[test]
fn the_checkpoint_volume_is_mounted() {
    let volumes = || json!([{"name": "ckpt", "emptyDir": {}}, {"name": "other", "emptyDir": {}}]);
    let mounts_of = |job: &TrainJob| {
        let valid = validate(job).unwrap_or_else(|faults| panic!("{faults:?}"));
        let spec = pod(job, &valid, &defaults(), 1, 0).spec.unwrap();
        let mounts = spec.containers[0].volume_mounts.clone().unwrap_or_default();
        let at = mounts.into_iter().filter(|mount| mount.mount_path.trim_end_matches('/') == "/ckpt");
        let at: Vec<_> = at.map(|mount| (mount.name, mount.sub_path, mount.read_only)).collect();
        (at, conflicts(job, &valid, &defaults()).len())
    };
    let ours = ("ckpt".to_string(), None, Some(false));
    assert_eq!(mounts_of(&saved("/ckpt/", volumes(), json!([]))), (vec![ours.clone()], 0));
    let other = json!([{"name": "other", "mountPath": "/ckpt"}]);
    assert_eq!(
        mounts_of(&saved("/ckpt", volumes(), other)),
        (vec![ours], 1),
        "our mount wins and the conflict is reported"
    );
    let part = json!([{"name": "ckpt", "mountPath": "/ckpt", "subPath": "a"}]);
    let theirs = ("ckpt".to_string(), Some("a".to_string()), None);
    assert_eq!(
        mounts_of(&saved("/ckpt", volumes(), part)),
        (vec![theirs], 0),
        "a part of the volume is the user's choice"
    );
}

#[test]
fn a_missing_checkpoint_volume_is_rejected() {
    let text = |path: &str, volumes: Value| {
        faults(&saved(path, volumes, json!([]))).iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
    };
    let volumes = || json!([{"name": "ckpt", "emptyDir": {}}]);
    assert_eq!(text("/ckpt", volumes()), "");
    assert_eq!(
        text("/ckpt", json!([{"name": "a", "emptyDir": {}}, {"name": "b", "emptyDir": {}}])),
        "spec.checkpoint.volumeName: got `ckpt`; expected a volume of spec.template.spec.volumes: a, b"
    );
    for path in ["/", "/etc/switchyard", "/var/lib/switchyard/"] {
        assert!(text(path, volumes()).starts_with("spec.checkpoint.path: got `"), "{path}");
    }
}

#[test]
fn a_process_has_the_threads_of_all_its_ranks() {
    let mut engine = engine();
    engine["executionMode"] = "SingleProcess".into();
    let job = job("single", json!({"trainer": {"numProcPerNode": 4, "cpuThreads": 2}, "engine": engine}));
    let map = config_map(&job.0, &job.1, 1).unwrap();
    let text = &map.data.unwrap()[CONFIG_FILE];
    assert!(text.contains("\"cpuThreads\": 8") && text.contains("\"devicesPerProcess\": 4"), "{text}");
}

#[test]
fn our_own_objects_cover_themselves() {
    let job = job("two", json!({"trainer": {"numNodes": 2}, "engine": engine()}));
    for object in shared(&job.0, &job.1) {
        let mut stored = object.content();
        stored["status"] = json!({"added": "by the server"});
        let view = crate::cluster::view::ObjectView {
            uid: String::new(),
            owned: true,
            deleting: false,
            content: observed_content(&stored),
        };
        assert!(view.covers(&object.content()), "{}", object.kind());
        let mut changed = view.clone();
        changed.content["metadata"]["labels"] = json!({});
        assert!(!changed.covers(&object.content()), "{}: the labels are gone", object.kind());
    }
}

proptest! {
    // Each case walks the whole schema.
    #![proptest_config(ProptestConfig::with_cases(12))]
    /// Pod names are host names: at most 63 characters.
    #[test]
    fn names_stay_within_their_limits(name in "[a-z][-a-z0-9]{0,48}[a-z0-9]", attempt in 1_u32..100_000, rank in 0_u32..1024) {
        let spec = json!({"trainer": {"numNodes": 1024}, "engine": engine()});
        let job = job(&name, spec);
        let pod = pod(&job.0, &job.1, &defaults(), attempt, rank);
        prop_assert!(pod.metadata.name.unwrap().len() <= 63);
        for object in shared(&job.0, &job.1) {
            prop_assert!(object.name().len() <= 63, "{}", object.name());
        }
        let labels = pod.metadata.labels.unwrap();
        prop_assert!(labels.values().all(|value| value.len() <= 63));
    }
}

fn torch(name: &str, template: Value) -> (TrainJob, ValidJob) {
    let limits = json!({"limits": {"nvidia.com/gpu": 8, "cpu": 8}});
    let trainer = json!({"framework": "Torch", "image": "i", "numNodes": 2, "resourcesPerNode": limits});
    job(name, json!({"trainer": trainer, "template": {"spec": template}}))
}

#[test]
fn host_network_jobs_get_distinct_ports() {
    let port = |pod: &Pod| {
        let trainer = &pod.spec.as_ref().unwrap().containers[0];
        let env = trainer.env.as_ref().unwrap().iter();
        let of_env: Vec<String> =
            env.filter(|entry| entry.name == "MASTER_PORT").filter_map(|entry| entry.value.clone()).collect();
        let declared = trainer.ports.as_ref().map(|ports| ports[0].host_port.unwrap());
        (of_env[0].parse::<i32>().unwrap(), declared)
    };
    let (mut job, valid) = torch("a", json!({"hostNetwork": true}));
    let (first, declared) = port(&pod(&job, &valid, &defaults(), 1, 0));
    assert!(declared == Some(first) && (29400..30000).contains(&first), "{first} {declared:?}");
    assert_eq!(port(&pod(&job, &valid, &defaults(), 1, 1)).0, first, "all nodes of an attempt know the same");
    assert_ne!(port(&pod(&job, &valid, &defaults(), 2, 0)).0, first, "the next attempt looks elsewhere");
    job.metadata.uid = Some("9d3f8a52-4a44-4d2a-9d0e-0123456789ab".into());
    assert_ne!(port(&pod(&job, &valid, &defaults(), 1, 0)).0, first, "another job");
    let (plain, valid) = torch("a", json!({}));
    assert_eq!(port(&pod(&plain, &valid, &defaults(), 7, 0)), (29400, None));
}

#[test]
fn profile_pod_settings_reach_the_pods() {
    let (mut job, valid) = torch("a", json!({}));
    let size = |pod: &Pod| {
        let volumes = pod.spec.as_ref().unwrap().volumes.clone().unwrap();
        let shm = volumes.into_iter().find(|volume| volume.name == "switchyard-shm").unwrap();
        shm.empty_dir.unwrap().size_limit.unwrap().0
    };
    let networks = |pod: &Pod| pod.metadata.annotations.as_ref().unwrap().get("k8s.v1.cni.cncf.io/networks").cloned();
    let made = pod(&job, &valid, &defaults(), 1, 0);
    assert_eq!((size(&made).as_str(), networks(&made)), ("16Gi", None));
    // The built-in profile that was found for the nodes.
    job.status.get_or_insert_default().fabric.get_or_insert_default().profile = Some("gcp-rdma".into());
    assert_eq!(size(&pod(&job, &valid, &defaults(), 1, 0)), "250Gi");
    // The administrator's profile takes precedence.
    let own =
        "name: own\nextends: roce\nsharedMemory: 20Gi\npodInterface: net0\nnetworks: fabric/rail-0, fabric/rail-1\n";
    let own = Defaults { fabric_profile: Some(Profile::parse(own).unwrap()), ..defaults() };
    let made = pod(&job, &valid, &own, 1, 0);
    assert_eq!((size(&made).as_str(), networks(&made).as_deref()), ("20Gi", Some("fabric/rail-0, fabric/rail-1")));
    let env = made.spec.as_ref().unwrap().containers[0].env.clone().unwrap();
    let gloo = env.into_iter().find(|entry| entry.name == "GLOO_SOCKET_IFNAME").unwrap();
    assert_eq!(gloo.value.as_deref(), Some("net0"));
    // The user's annotation takes precedence over both.
    let template = job.spec.template.get_or_insert_default().metadata.get_or_insert_default();
    template.annotations.get_or_insert_default().insert("k8s.v1.cni.cncf.io/networks".into(), "mine".into());
    assert_eq!(networks(&pod(&job, &valid, &own, 1, 0)).as_deref(), Some("mine"));
    let wrong = Profile::parse("name: own\ntransport: Socket\nnetworks: \"a;b\"\n").unwrap_err().to_string();
    assert!(wrong.starts_with("networks: got `a;b`"), "{wrong}");
}

/// The planner reads requests from the manifest without building a pod, so both must agree.
#[test]
fn requests_in_the_manifest_equal_requests_of_the_pods() {
    let gpus_of = |count: u32| json!({"limits": {"cpu": "4", "memory": "8Gi", "nvidia.com/gpu": count}});
    let trainer = |resources: Value| json!({"name": "trainer", "resources": resources});
    let side =
        json!({"name": "side", "image": "i", "restartPolicy": "Always", "resources": {"requests": {"cpu": "250m"}}});
    let init = json!({"name": "init", "image": "i", "resources": {"requests": {"cpu": "9", "memory": "1Gi"}}});
    let templates = [
        json!({}),
        json!({"containers": [trainer(json!({"limits": {"cpu": "1", "nvidia.com/gpu": 1}}))]}),
        json!({"containers": [trainer(json!({"requests": {"cpu": "500m", "rdma/shared": "2"}}))], "initContainers": [side, init]}),
        json!({"containers": [{"name": "log", "image": "i", "resources": {"limits": {"cpu": "1"}}}], "overhead": {"memory": "64Mi"}}),
    ];
    let fabric = FabricStatus {
        resources: vec![FabricResource {
            name: "rdma/shared".into(),
            quantity: Quantity("1".into()),
            reason: "test".into(),
        }],
        ..FabricStatus::default()
    };
    let mut cases = 0;
    for (template, framework) in templates.iter().flat_map(|template| [(template, "Torch"), (template, "Plain")]) {
        for (allocation, fabric) in [
            (None, None),
            (Some(DeviceAllocation::DevicePlugin), Some(fabric.clone())),
            (Some(DeviceAllocation::Claims), Some(fabric.clone())),
        ] {
            let spec = json!({
                "template": {"spec": template},
                "trainer": {"framework": framework, "image": "i", "numNodes": 2, "resourcesPerNode": gpus_of(2)},
            });
            let (mut job, _) = job("asks", spec);
            job.status = Some(TrainJobStatus { device_allocation: allocation, fabric, ..TrainJobStatus::default() });
            let valid = validate(&job).unwrap_or_else(|faults| panic!("{faults:?}"));
            let made = pod(&job, &valid, &Defaults::default(), 1, 0).spec.unwrap();
            assert_eq!(
                valid.pod.requests(job.status.as_ref()),
                resources::pod_requests(&made),
                "{:?}",
                job.spec.template
            );
            assert_eq!(valid.pod.gpus, crate::job::gpus(&job));
            cases += 1;
        }
    }
    assert_eq!(cases, 24);
}

/// NCCL in our own engine needs the same devices, shared memory and settings as in any other
/// program.
#[test]
fn the_engine_on_gpus_gets_the_same_fabric_as_other_frameworks() {
    let made = |framework: &str, gpus: u32| {
        let mut limits = json!({"cpu": "8", "memory": "64Gi"});
        if gpus > 0 {
            limits["nvidia.com/gpu"] = gpus.into();
        }
        let trainer =
            json!({"framework": framework, "image": "i", "numNodes": 2, "resourcesPerNode": {"limits": limits}});
        let mut spec = json!({"trainer": trainer});
        if framework == "Switchyard" {
            spec["engine"] = engine();
        } else {
            spec["trainer"]["command"] = json!(["train"]);
        }
        let (mut job, valid) = job("a", spec);
        let fabric = json!({"resources": [{"name": "rdma/shared", "quantity": "1", "reason": "r"}]});
        job.status.get_or_insert_default().fabric = Some(serde_json::from_value(fabric).unwrap());
        let pod = pod(&job, &valid, &defaults(), 1, 0).spec.unwrap();
        let trainer = pod.containers.into_iter().find(|container| container.name == "trainer").unwrap();
        let mounts = trainer.volume_mounts.unwrap_or_default();
        let mut paths: Vec<String> = mounts.into_iter().map(|mount| mount.mount_path).collect();
        paths.retain(|path| path == "/dev/shm" || path.starts_with("/etc/switchyard/fabric"));
        let file = trainer.env.into_iter().flatten().find(|entry| entry.name == "NCCL_CONF_FILE");
        let limits = trainer.resources.and_then(|resources| resources.limits).unwrap_or_default();
        (
            paths,
            file.and_then(|entry| entry.value),
            limits.contains_key("rdma/shared"),
            fabric_configs(&job, &valid, 1).len(),
        )
    };
    let theirs = made("Torch", 8);
    assert_eq!(theirs.0, ["/dev/shm", "/etc/switchyard/fabric"]);
    assert_eq!(theirs.1.as_deref(), Some("/etc/switchyard/fabric/nccl.conf"));
    assert!(theirs.2 && theirs.3 == 1, "{theirs:?}");
    assert_eq!(made("Switchyard", 8), theirs);
    let on_cpus = made("Switchyard", 0);
    assert_eq!((on_cpus.0.len(), on_cpus.1, on_cpus.3), (0, None, 0));
}

#[test]
fn a_provisioning_request_has_the_admitted_scheduling_fields() {
    let template = json!({"spec": {
        "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {"matchLabels": {"a": "b"}}}],
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}, {"name": "key", "secret": {"secretName": "mine"}}],
        "containers": [{"name": "trainer", "env": [{"name": "TOKEN", "value": "x"}], "ports": [{"containerPort": 1, "hostPort": 1}, {"containerPort": 2}],
            "volumeMounts": [{"name": "data", "mountPath": "/data"}]}],
    }});
    let trainer = json!({"framework": "Plain", "image": "torch:2", "numNodes": 3, "resourcesPerNode": {"limits": {"nvidia.com/gpu": 8, "cpu": "2"}}});
    let job = job("short", json!({"trainer": trainer, "template": template}));
    let mut made = pod(&job.0, &job.1, &defaults(), 2, 0);
    let spec = made.spec.as_mut().unwrap();
    spec.tolerations = Some(vec![serde_json::from_value(json!({"key": "gpu", "operator": "Exists"})).unwrap()]);
    spec.node_selector = Some([("pool".to_string(), "a".to_string())].into());
    let requests = [("cpu", "2100m"), ("memory", "1Gi"), ("nvidia.com/gpu", "8"), ("pods", "1")];
    let requests = requests.map(|(name, amount)| (name.to_string(), Quantity(amount.into())));
    let requests = resources::of_quantities(&requests.into());
    let admitted = crate::cluster::admitted::Admitted::new(requests, [std::sync::Arc::new(rules(&made))]);
    let class = "check-capacity.autoscaling.x-k8s.io";
    let asked = provisioning(&job.0, &job.1, &defaults(), 2, &admitted, class);
    let asked: Vec<Value> =
        asked.iter().map(|object| json!({"kind": object.kind(), "object": object.content()})).collect();
    let text = serde_json::to_string(&asked).unwrap();
    for private in ["TOKEN", "mine", "schedulingGates", "env"] {
        assert!(!text.contains(private), "{private}: {text}");
    }
    insta::assert_yaml_snapshot!(asked);
}

/// Finding 15: each tenant had to add the pull secret of the administrator's registry to each
/// template.
#[test]
fn only_the_worker_image_is_pulled_with_the_operators_secrets() {
    let defaults = Defaults { image_pull_secrets: vec!["registry".into()], ..defaults() };
    let secrets = |spec: Value| {
        let job = job("a", spec);
        let secrets = pod(&job.0, &job.1, &defaults, 1, 0).spec.unwrap().image_pull_secrets;
        secrets.unwrap_or_default().into_iter().map(|secret| secret.name).collect::<Vec<_>>()
    };
    assert_eq!(secrets(json!({"engine": engine()})), ["registry"]);
    assert!(secrets(json!({"trainer": {"framework": "Plain", "image": "torch:2"}})).is_empty());
    let own = json!({"spec": {"imagePullSecrets": [{"name": "own"}], "containers": []}});
    assert_eq!(secrets(json!({"engine": engine(), "template": own})), ["own"]);
}
