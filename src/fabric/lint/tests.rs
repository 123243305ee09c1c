//! Each rule fires on one manifest and not on a similar valid one; all kinds of manifests parse;
//! nothing panics.

use super::*;
use crate::variables::nccl;
use proptest::prelude::*;
use serde_json::json;

/// Rule ids and severities of the findings.
fn found(document: &Value, options: Options) -> Vec<(&'static str, Severity)> {
    let findings = lint(document, options).into_iter().flat_map(|linted| linted.findings);
    findings.map(|finding| (finding.rule, finding.severity)).collect()
}

/// A PyTorchJob of four pods with eight GPUs each.
fn job(env: Value) -> Value {
    let container = json!({"name": "pytorch", "env": env, "resources": {"limits": {"nvidia.com/gpu": 8}}});
    json!({
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": "gpt"},
        "spec": {"pytorchReplicaSpecs": {"Worker": {"replicas": 4, "template": {"spec": {"containers": [container]}}}}},
    })
}

/// The same job with variables, `NAME=value` each.
fn with(variables: &[&str]) -> Value {
    let entry = |text: &&str| {
        let (name, value) = text.split_once('=').unwrap();
        json!({"name": name, "value": value})
    };
    job(variables.iter().map(entry).collect())
}

fn rules_for(variables: &[&str]) -> Vec<&'static str> {
    found(&with(variables), Options::default()).into_iter().map(|(rule, _)| rule).collect()
}

fn pod(container: Value) -> Value {
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": [container]}})
}

fn conf(text: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "data": {"nccl.conf": text, "other": "NCCL_FOO=1"}})
}

/// Rule, variables that trigger it, variables that do not.
const BY_VARIABLE: [(&str, &[&str], &[&str]); 42] = [
    ("debug-setting", &["NCCL_DEBUG=TRACE"], &["NCCL_DEBUG=WARN"]),
    ("debug-setting", &["NCCL_DEBUG=info"], &["NCCL_DEBUG=VERSION"]),
    ("debug-setting", &["CUDA_LAUNCH_BLOCKING=1"], &["CUDA_LAUNCH_BLOCKING=0"]),
    ("debug-setting", &["TORCH_DISTRIBUTED_DEBUG=DETAIL"], &["TORCH_DISTRIBUTED_DEBUG=OFF"]),
    ("debug-setting", &["NCCL_P2P_DISABLE=1"], &["NCCL_P2P_DISABLE=0"]),
    ("debug-setting", &["NCCL_SHM_DISABLE=1"], &["NCCL_SHM_DISABLE=0"]),
    ("debug-setting", &["NCCL_IB_DISABLE=1"], &["NCCL_IB_DISABLE=0"]),
    ("debug-setting", &["NCCL_PROTO=LL128"], &["NCCL_CROSS_NIC=1"]),
    ("debug-setting", &["TORCH_NCCL_ASYNC_ERROR_HANDLING=0"], &["TORCH_NCCL_ASYNC_ERROR_HANDLING=3"]),
    ("debug-section", &["NCCL_BUFFSIZE=8388608"], &["NCCL_SOCKET_FAMILY=AF_INET"]),
    ("prefix-match", &["NCCL_IB_HCA=mlx5_1"], &["NCCL_IB_HCA==mlx5_1"]),
    ("prefix-match", &["NCCL_IB_HCA=^mlx5_0,mlx5_12:1"], &["NCCL_IB_HCA=^=mlx5_12"]),
    ("prefix-match", &["NCCL_IB_HCA=mlx5_2:1"], &["NCCL_IB_HCA=mlx5"]),
    ("prefix-match", &["NCCL_SOCKET_IFNAME=eth1"], &["NCCL_SOCKET_IFNAME=eth0"]),
    ("interface", &["NCCL_SOCKET_IFNAME=lo"], &["NCCL_SOCKET_IFNAME==eth0"]),
    ("interface", &["GLOO_SOCKET_IFNAME=docker0"], &["GLOO_SOCKET_IFNAME=eth0"]),
    ("interface", &["NCCL_SOCKET_IFNAME=^docker"], &["NCCL_SOCKET_IFNAME=^lo,docker"]),
    ("interface", &["NCCL_SOCKET_IFNAME==eth0,flannel.1"], &["NCCL_SOCKET_IFNAME=eth"]),
    ("interface", &["NCCL_IB_HCA=eth0"], &["NCCL_IB_HCA=ibp12s0"]),
    ("vendor-profile", &["NCCL_FASTRAK_IFNAME=eth1"], &["NCCL_SOCKET_IFNAME=eth1"]),
    ("interface-form", &["GLOO_SOCKET_IFNAME==eth0"], &["TP_SOCKET_IFNAME=eth0"]),
    ("visible-devices", &["CUDA_VISIBLE_DEVICES=0,1"], &["CUDA_DEVICE_ORDER=PCI_BUS_ID"]),
    ("visible-devices", &["NVIDIA_VISIBLE_DEVICES=all"], &["NVIDIA_DRIVER_CAPABILITIES=all"]),
    ("launcher-owned", &["RANK=0"], &["RANKS=0"]),
    ("launcher-owned", &["LOCAL_RANK=0"], &["LOCALE=C"]),
    ("launcher-owned", &["MASTER_ADDR=10.0.0.1"], &["MASTER=x"]),
    ("launcher-owned", &["FLAGS_selected_gpus=0"], &["FLAGS_cudnn_deterministic=1"]),
    ("unknown-key", &["NCCL_SOKET_IFNAME=eth0"], &["NCCL_SOCKET_NTHREADS=4"]),
    ("unknown-key", &["nccl_debug=WARN"], &["NCCL_FASTRAK_CTRL_DEV=eth0"]),
    ("renamed-key", &["NCCL_IB_GDR_LEVEL=PXB"], &["NCCL_TOPO_FILE=/t.xml"]),
    ("renamed-key", &["NCCL_ASYNC_ERROR_HANDLING=1"], &["TORCH_NCCL_DUMP_ON_TIMEOUT=1"]),
    ("renamed-key", &["NCCL_MAX_NCHANNELS=8"], &["NCCL_MAX_CTAS=8"]),
    ("gid-index", &["NCCL_IB_GID_INDEX=3"], &["NCCL_IB_GID_INDEX=-1"]),
    ("contradiction", &["NCCL_NET=IB", "NCCL_IB_DISABLE=1"], &["NCCL_NET=IB", "NCCL_IB_DISABLE=0"]),
    ("contradiction", &["NCCL_NET=Socket", "NCCL_IB_TC=41"], &["NCCL_NET=IB", "NCCL_IB_TC=41"]),
    ("contradiction", &["NCCL_MIN_CTAS=9", "NCCL_MAX_CTAS=8"], &["NCCL_MIN_CTAS=8", "NCCL_MAX_CTAS=8"]),
    (
        "contradiction",
        &["NCCL_SOCKET_NTHREADS=16", "NCCL_NSOCKS_PERTHREAD=8"],
        &["NCCL_SOCKET_NTHREADS=16", "NCCL_NSOCKS_PERTHREAD=4"],
    ),
    ("contradiction", &["NCCL_DEBUG_FILE=/tmp/x"], &["NCCL_DEBUG_FILE=/tmp/x", "NCCL_DEBUG=WARN"]),
    ("value", &["NCCL_NTHREADS=100"], &["NCCL_NTHREADS=128"]),
    ("value", &["NCCL_IB_HCA=mlx5_0, mlx5_3"], &["NCCL_IB_HCA==mlx5_0,mlx5_3"]),
    ("duplicate-name", &["A=1", "A=2"], &["A=1", "B=1"]),
    ("duplicate-name", &["A=1", "A=1"], &["A=1", "a=1"]),
];

#[test]
fn every_variable_rule_fires_and_stays_silent() {
    for (rule, trips, rests) in BY_VARIABLE {
        assert!(rules_for(trips).contains(&rule), "{rule}: {trips:?} gives {:?}", rules_for(trips));
        assert!(!rules_for(rests).contains(&rule), "{rule}: {rests:?}");
    }
}

#[test]
fn every_rule_has_a_test() {
    // The command finds `duplicate-key`, since only the text has both.
    let others =
        ["process-count", "not-in-version", "not-text", "too-long", "conf-line", "host-access", "duplicate-key"];
    for rule in RULES {
        let tested = BY_VARIABLE.iter().any(|(id, _, _)| *id == rule.id) || others.contains(&rule.id);
        assert!(tested, "{}", rule.id);
    }
}

#[test]
fn processes_are_compared_with_gpus() {
    let of = |nproc: Value, command: &str, gpus: u64| {
        let mut document = job(json!([]));
        document["spec"]["nprocPerNode"] = nproc;
        let container = &mut document["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0];
        container["args"] = json!([command]);
        container["resources"]["limits"]["nvidia.com/gpu"] = json!(gpus);
        found(&document, Options::default())
    };
    let error = [("process-count", Severity::Error)];
    let warning = [("process-count", Severity::Warning)];
    assert_eq!(of(json!("8"), "", 4), error, "two ranks on a GPU");
    assert_eq!(of(json!("4"), "", 8), warning, "idle GPUs");
    assert_eq!(of(json!("gpu"), "", 0), error, "no GPU for a process");
    assert_eq!(of(json!("8"), "torchrun --nproc_per_node=4 t.py", 8), error, "field and command line");
    for (nproc, command) in [
        (json!("8"), ""),
        (json!("gpu"), ""),
        (json!("auto"), ""),
        (Value::Null, ""),
        (json!(8), "torchrun --nproc-per-node 8"),
    ] {
        assert_eq!(of(nproc.clone(), command, 8), [], "{nproc} {command}");
    }
}

#[test]
fn sidecars_need_no_gpu() {
    let mut document = job(json!([]));
    document["spec"]["nprocPerNode"] = json!("gpu");
    let containers = &mut document["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"];
    let side = json!({"name": "logs", "resources": {"limits": {"cpu": 1}}});
    containers.as_array_mut().unwrap().push(side);
    assert_eq!(found(&document, Options::default()), []);
}

#[test]
fn slots_of_an_mpi_job() {
    let document = |slots: Value| {
        let pod = json!({"spec": {"containers": [{"name": "w", "resources": {"limits": {"nvidia.com/gpu": "4"}}}]}});
        let launcher = json!({"spec": {"containers": [{"name": "l", "args": ["mpirun", "-x", "NCCL_P2P_DISABLE=1"]}]}});
        json!({"apiVersion": "kubeflow.org/v2beta1", "kind": "MPIJob", "spec": {"slotsPerWorker": slots,
            "mpiReplicaSpecs": {"Launcher": {"template": launcher}, "Worker": {"replicas": 2, "template": pod}}}})
    };
    let debug = ("debug-setting", Severity::Warning);
    assert_eq!(found(&document(json!(4)), Options::default()), [debug]);
    assert_eq!(found(&document(Value::Null), Options::default()), [debug, ("process-count", Severity::Warning)]);
    assert_eq!(found(&document(json!(8)), Options::default()), [debug, ("process-count", Severity::Error)]);
}

#[test]
fn nccl_version_selects_rules() {
    let at = |variable: &str, version: &str| {
        let options = Options { nccl: Some(version.parse().unwrap()) };
        found(&with(&[variable]), options).into_iter().map(|(rule, _)| rule).collect::<Vec<_>>()
    };
    assert_eq!(at("NCCL_IB_ADDR_RANGE=10.0.0.0/8", "2.20.5"), ["not-in-version"]);
    assert_eq!(at("NCCL_IB_ADDR_RANGE=10.0.0.0/8", "2.21"), [""; 0]);
    assert_eq!(at("NCCL_IB_GID_INDEX=3", "2.20.5"), [""; 0]);
    assert_eq!(at("NCCL_TREE_THRESHOLD=0", "2.30.7"), ["not-in-version"]);
    assert_eq!(at("NCCL_TREE_THRESHOLD=0", "2.4.8"), ["debug-section"; 0]);
    assert_eq!(at("NCCL_MAX_NCHANNELS=8", "2.16.2"), [""; 0], "not deprecated yet");
}

#[test]
fn values_that_are_not_strings() {
    for value in [json!(1), json!(true), json!(1.5), json!(["a"]), json!({})] {
        let rules = found(&job(json!([{"name": "NCCL_IB_DISABLE", "value": value}])), Options::default());
        assert_eq!(rules, [("not-text", Severity::Error)], "{value}");
    }
    let field =
        json!([{"name": "NCCL_HOSTID", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}, {"name": "X"}]);
    assert_eq!(found(&job(field), Options::default()), []);
}

#[test]
fn long_values_are_truncated_in_files_only() {
    let list = |length: usize| format!("NCCL_TOPO_FILE={}", "x".repeat(length));
    let of = |document: &Value| found(document, Options::default());
    assert_eq!(of(&with(&[&list(1024)])), [("too-long", Severity::Warning)]);
    assert_eq!(of(&with(&[&list(1023)])), []);
    assert_eq!(of(&conf(&list(1024))), [("too-long", Severity::Error)]);
    assert_eq!(of(&conf(&list(1023))), []);
}

#[test]
fn lines_of_nccl_conf() {
    let of = |text: &str| found(&conf(text), Options::default());
    assert_eq!(of("# a comment\n\nNCCL_DEBUG=WARN\nNCCL_SOCKET_IFNAME==eth0\n"), []);
    for bad in ["NCCL_DEBUG = WARN", "export NCCL_DEBUG=WARN", " # comment", "NCCL_DEBUG", "NCCL_DEBUG=\"WARN\""] {
        assert!(of(bad).contains(&("conf-line", Severity::Error)), "{bad}: {:?}", of(bad));
    }
    let finding = lint(&conf("export NCCL_DEBUG=WARN "), Options::default()).remove(0).findings.remove(0);
    assert_eq!(
        (finding.fix.as_str(), finding.field.to_string().as_str()),
        ("write NCCL_DEBUG=WARN", "data[\"nccl.conf\"]")
    );
}

#[test]
fn all_kinds_of_manifests_parse() {
    let bad = json!([{"name": "NCCL_DEBUG", "value": "TRACE"}]);
    let container = json!({"name": "trainer", "env": bad});
    let template = json!({"spec": {"containers": [container]}});
    let documents = [
        ("training.switchyard.dev/v1alpha1", "TrainJob", json!({"trainer": {"env": bad}}), "spec.trainer.env[0].value"),
        (
            "training.switchyard.dev/v1alpha1",
            "TrainJob",
            json!({"trainer": {"numNodes": 2}, "template": template}),
            "spec.template.spec.containers[0].env[0].value",
        ),
        ("trainer.kubeflow.org/v1alpha1", "TrainJob", json!({"trainer": {"env": bad}}), "spec.trainer.env[0].value"),
        (
            "trainer.kubeflow.org/v1alpha1",
            "TrainJob",
            json!({"podTemplateOverrides": [{"spec": {"containers": [container]}}]}),
            "spec.podTemplateOverrides[0].spec.containers[0].env[0].value",
        ),
        (
            "kubeflow.org/v1",
            "PaddleJob",
            json!({"paddleReplicaSpecs": {"Worker": {"template": template}}}),
            "spec.paddleReplicaSpecs.Worker.template.spec.containers[0].env[0].value",
        ),
        ("batch/v1", "Job", json!({"template": template}), "spec.template.spec.containers[0].env[0].value"),
        (
            "batch/v1",
            "CronJob",
            json!({"jobTemplate": {"spec": {"template": template}}}),
            "spec.jobTemplate.spec.template.spec.containers[0].env[0].value",
        ),
        (
            "jobset.x-k8s.io/v1alpha2",
            "JobSet",
            json!({"replicatedJobs": [{"template": {"spec": {"template": template}}}]}),
            "spec.replicatedJobs[0].template.spec.template.spec.containers[0].env[0].value",
        ),
        ("v1", "Pod", json!({"initContainers": [container], "containers": []}), "spec.initContainers[0].env[0].value"),
    ];
    for (version, kind, spec, field) in documents {
        let document = json!({"apiVersion": version, "kind": kind, "metadata": {"name": "x"}, "spec": spec});
        let linted = lint(&document, Options::default());
        let fields: Vec<String> =
            linted.iter().flat_map(|one| &one.findings).map(|one| one.field.to_string()).collect();
        assert_eq!(fields, [field], "{version} {kind}");
        let list = json!({"apiVersion": "v1", "kind": "List", "items": [document]});
        assert_eq!(lint(&list, Options::default())[0].findings[0].field.to_string(), format!("items[0].{field}"));
    }
    for other in
        [json!(null), json!({"kind": "Service", "spec": {"ports": []}}), json!({"kind": "ConfigMap", "data": {}})]
    {
        assert_eq!(lint(&other, Options::default()), [], "{other}");
    }
}

#[test]
fn trainer_settings_override_the_template() {
    let document = json!({
        "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob",
        "spec": {
            "trainer": {"numProcPerNode": 8, "resourcesPerNode": {"limits": {"nvidia.com/gpu": 4}}, "env": [{"name": "NCCL_NET", "value": "IB"}]},
            "template": {"spec": {"containers": [{"name": "side"}, {"name": "trainer", "env": [{"name": "NCCL_IB_DISABLE", "value": "1"}]}]}},
        },
    });
    let rules: Vec<_> = found(&document, Options::default()).into_iter().map(|(rule, _)| rule).collect();
    assert_eq!(rules, ["contradiction", "debug-setting", "process-count"]);
}

/// Variables that Switchyard sets for a framework. More severe if the value differs between nodes.
#[test]
fn switchyard_owns_framework_variables() {
    let severities = |framework: &str, nodes: u32, name: &str| {
        let trainer =
            json!({"framework": framework, "image": "i", "numNodes": nodes, "env": [{"name": name, "value": "1"}]});
        let job =
            json!({"apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "spec": {"trainer": trainer}});
        found(&job, Options::default())
    };
    let owned = "launcher-owned";
    assert_eq!(severities("Torch", 2, "PET_NODE_RANK"), [(owned, Severity::Error)]);
    assert_eq!(severities("Torch", 1, "PET_NODE_RANK"), [(owned, Severity::Warning)]);
    assert_eq!(severities("Torch", 2, "PET_NPROC_PER_NODE"), [(owned, Severity::Warning)]);
    assert_eq!(severities("JAX", 2, "JAX_PROCESS_ID"), [(owned, Severity::Error)]);
    assert_eq!(severities("Plain", 2, "PET_NODE_RANK"), []);
    assert_eq!(severities("Plain", 2, "LOCAL_RANK"), [(owned, Severity::Error)]);
}

/// Each role is linted with its own settings over the shared template.
#[test]
fn roles_are_linted_one_by_one() {
    let limits = |gpus: u32| json!({"limits": {"nvidia.com/gpu": gpus}});
    let job = |env: Value| {
        json!({
            "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "metadata": {"name": "j"},
            "spec": {
                "trainer": {"framework": "Torch", "image": "i"},
                "template": {"spec": {"containers": [{"name": "trainer", "env": [{"name": "NCCL_P2P_DISABLE", "value": "1"}]}]}},
                "roles": [
                    {"name": "trainer", "replicas": 2, "numProcPerNode": 9, "resourcesPerNode": limits(8)},
                    {"name": "eval", "numProcPerNode": 1, "resourcesPerNode": limits(1), "env": env},
                ],
            },
        })
    };
    let fields = |env: Value| {
        let linted = lint(&job(env), Options::default()).into_iter().flat_map(|linted| linted.findings);
        linted.map(|finding| (finding.rule, finding.field.to_string())).collect::<Vec<_>>()
    };
    let without = fields(json!([]));
    assert!(without.contains(&("process-count", "spec.roles[0].numProcPerNode".into())), "{without:?}");
    assert!(without.iter().all(|(_, field)| !field.starts_with("spec.roles[1]")), "{without:?}");
    let with = fields(json!([{"name": "PET_NODE_RANK", "value": "0"}]));
    assert!(with.contains(&("launcher-owned", "spec.roles[1].env[0].value".into())), "{with:?}");
}

#[test]
fn hiding_gpus_from_a_container_without_any_is_fine() {
    let of = |gpus: u64, value: &str| {
        let env = json!([{"name": "NVIDIA_VISIBLE_DEVICES", "value": value}]);
        found(&pod(json!({"env": env, "resources": {"limits": {"nvidia.com/gpu": gpus}}})), Options::default())
    };
    assert_eq!(of(0, "none"), []);
    assert_eq!(of(8, "none"), [("visible-devices", Severity::Error)]);
    assert_eq!(of(0, "all"), [("visible-devices", Severity::Error)]);
}

#[test]
fn findings_are_complete_and_their_rules_exist() {
    let all = BY_VARIABLE.iter().flat_map(|(_, trips, _)| lint(&with(trips), Options::default()));
    for finding in all.flat_map(|linted| linted.findings) {
        let rule = RULES.iter().find(|rule| rule.id == finding.rule).unwrap_or_else(|| panic!("{finding:?}"));
        assert!(rule.severity <= finding.severity, "{finding:?}");
        for words in [&finding.got, &finding.why, &finding.fix] {
            assert!(!words.is_empty() && !words.ends_with('.'), "{finding:?}");
        }
    }
}

#[test]
fn suggestions_are_existing_keys() {
    for (name, wanted) in [("NCCL_SOKET_IFNAME", "NCCL_SOCKET_IFNAME"), ("NCCL_IB_HCAS", "NCCL_IB_HCA")] {
        let finding = lint(&with(&[&format!("{name}=x")]), Options::default()).remove(0).findings.remove(0);
        assert!(finding.fix.contains(&format!("did you mean {wanted}?")), "{finding:?}");
        assert!(nccl::find(wanted).is_some());
    }
}

/// Any JSON, with keys and values that manifests use.
fn anything() -> impl Strategy<Value = Value> {
    let word = prop_oneof![
        proptest::sample::select(vec![
            "apiVersion",
            "kind",
            "spec",
            "trainer",
            "env",
            "name",
            "value",
            "template",
            "containers",
            "data",
            "items",
            "nccl.conf",
            "TrainJob",
            "PyTorchJob",
            "MPIJob",
            "Pod",
            "List",
            "ConfigMap",
            "pytorchReplicaSpecs",
            "Worker",
            "training.switchyard.dev/v1alpha1",
            "trainer.kubeflow.org/v1alpha1",
            "NCCL_IB_HCA",
            "NCCL_SOCKET_IFNAME",
            "CUDA_VISIBLE_DEVICES",
            "NCCL_IB_GID_INDEX",
            "resources",
            "limits",
            "nvidia.com/gpu",
            "command",
            "args",
        ])
        .prop_map(str::to_string),
        "\\PC{0,12}",
    ];
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        word.clone().prop_map(Value::from)
    ];
    leaf.prop_recursive(6, 64, 8, move |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            proptest::collection::btree_map(word.clone(), inner, 0..6).prop_map(|map| map.into_iter().collect()),
        ]
    })
}

proptest! {
    #[test]
    fn no_document_panics(document in anything()) {
        let _ = lint(&document, Options::default());
    }

    #[test]
    fn no_environment_panics(
        names in proptest::collection::vec(proptest::sample::select(nccl::keys().map(|key| key.name).collect::<Vec<_>>()), 0..6),
        values in proptest::collection::vec("[-=^,:0-9a-z \u{e9}]{0,12}|\\PC{0,8}", 6),
        script in "\\PC{0,60}|[A-Z_=;'\"$ #\n-]{0,60}",
    ) {
        let env: Value = names.iter().zip(&values).map(|(name, value)| json!({"name": name, "value": value})).collect();
        let mut document = job(env);
        document["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["args"] = json!([script]);
        let _ = lint(&document, Options { nccl: Some("2.18".parse().unwrap()) });
        let _ = lint(&conf(&script), Options::default());
    }
}

/// Regression: `plan` reported placeable, but the API server rejected the job.
#[test]
fn host_access_of_a_train_job_is_reported_by_field() {
    let spec = json!({
        "hostNetwork": true, "hostPID": false, "volumes": [{"name": "a", "hostPath": {"path": "/data"}}, {"name": "b", "emptyDir": {}}],
        "containers": [
            {"name": "trainer", "securityContext": {"privileged": true}},
            {"name": "side", "securityContext": {"privileged": false, "capabilities": {"add": ["IPC_LOCK"]}}},
        ],
    });
    let of = |version: &str| json!({"apiVersion": version, "kind": "TrainJob", "spec": {"template": {"spec": spec.clone()}}});
    let linted = lint(&of("training.switchyard.dev/v1alpha1"), Options::default());
    let findings = linted.iter().flat_map(|linted| &linted.findings).filter(|finding| finding.rule == "host-access");
    let mut said: Vec<(String, &str)> =
        findings.map(|finding| (finding.field.to_string(), finding.got.as_str())).collect();
    said.sort();
    let expected = [
        ("spec.template.spec.containers[0].securityContext.privileged", "privileged: true"),
        ("spec.template.spec.containers[1].securityContext.capabilities.add", "capabilities [\"IPC_LOCK\"]"),
        ("spec.template.spec.hostNetwork", "hostNetwork: true"),
        ("spec.template.spec.volumes[0].hostPath", "hostPath /data"),
    ];
    assert_eq!(said, expected.map(|(field, got)| (field.to_string(), got)));
}
