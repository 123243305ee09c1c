//! Conversion of manifests of each kind, and the guarantee that nothing is dropped silently.

use super::*;
use proptest::prelude::*;
use serde_json::json;
use switchyard_plan as plan;

fn pytorch() -> Value {
    let pod = |extra: Value| {
        let mut container = json!({"name": "pytorch", "image": "registry/gpt:1", "command": ["torchrun", "train.py"], "args": ["--steps=9"],
            "env": [{"name": "A", "value": "1"}], "resources": {"limits": {"nvidia.com/gpu": 8}}, "volumeMounts": [{"name": "data", "mountPath": "/data"}]});
        container.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        json!({"metadata": {"annotations": {"sidecar.istio.io/inject": "false"}}, "spec": {
            "containers": [container, {"name": "side", "image": "side:1"}], "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "d"}}],
            "nodeSelector": {"gpu": "h100"}, "hostname": "mine", "restartPolicy": "Never"}})
    };
    json!({
        "apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob",
        "metadata": {"name": "GPT.large", "namespace": "team", "labels": {"kueue.x-k8s.io/queue-name": "q"}, "uid": "u-1"},
        "spec": {
            "nprocPerNode": "auto",
            "runPolicy": {"backoffLimit": 3, "cleanPodPolicy": "None", "ttlSecondsAfterFinished": 60, "suspend": true,
                "schedulingPolicy": {"minAvailable": 4, "priorityClass": "high", "scheduleTimeoutSeconds": 120}},
            "elasticPolicy": {"minReplicas": 2, "maxReplicas": 8, "rdzvBackend": "c10d"},
            "pytorchReplicaSpecs": {
                "Master": {"replicas": 1, "restartPolicy": "ExitCode", "template": pod(json!({"env": [{"name": "A", "value": "2"}]}))},
                "Worker": {"replicas": 3, "restartPolicy": "ExitCode", "template": pod(json!({}))},
            },
        },
        "status": {"conditions": [{"type": "Running"}]},
    })
}

fn paddle() -> Value {
    json!({
        "apiVersion": "kubeflow.org/v1", "kind": "PaddleJob", "metadata": {"name": "resnet"},
        "spec": {"paddleReplicaSpecs": {"Worker": {"replicas": 2, "restartPolicy": "OnFailure", "template": {"spec": {"containers": [
            {"name": "paddle", "image": "paddle:3", "command": ["python"], "args": ["-m", "paddle.distributed.launch", "run.py"], "ports": [{"containerPort": 37777}]}]}}}}},
    })
}

fn mpi() -> Value {
    json!({
        "apiVersion": "kubeflow.org/v2beta1", "kind": "MPIJob", "metadata": {"name": "pi"},
        "spec": {
            "slotsPerWorker": 2, "sshAuthMountPath": "/root-of-mpi/.ssh", "mpiImplementation": "OpenMPI", "runPolicy": {"activeDeadlineSeconds": 600},
            "mpiReplicaSpecs": {
                "Launcher": {"replicas": 1, "template": {"spec": {"containers": [{"name": "launcher", "image": "pi:1",
                    "command": ["mpirun"], "args": ["-n", "4", "--hostfile", "/etc/mpi/hostfile", "/opt/pi"], "env": [{"name": "OMPI_MCA_btl", "value": "tcp,self"}], "resources": {"limits": {"cpu": 1}}}]}}},
                "Worker": {"replicas": 2, "template": {"spec": {"containers": [{"name": "worker", "image": "pi:1", "command": ["/usr/sbin/sshd"], "resources": {"limits": {"cpu": 4}}}]}}},
            },
        },
    })
}

fn kubeflow() -> Value {
    json!({
        "apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": {"name": "llm", "generateName": "llm-"},
        "spec": {
            "runtimeRef": {"name": "torch-distributed", "kind": "ClusterTrainingRuntime"},
            "initializer": {"dataset": {"storageUri": "hf://data"}},
            "trainer": {"numNodes": 4, "numProcPerNode": "gpu", "command": ["torchrun", "train.py"], "env": [{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
                "resourcesPerNode": {"requests": {"cpu": 4}, "limits": {"nvidia.com/gpu": 8}}},
            "labels": {"team": "a"}, "managedBy": "trainer.kubeflow.org/trainjob-controller",
            "podTemplateOverrides": [
                {"targetJobs": [{"name": "node"}], "spec": {"nodeSelector": {"gpu": "h100"}, "containers": [{"name": "node", "env": [{"name": "TOKEN", "value": "other"}, {"name": "B", "value": "b"}]}]}},
                {"targetJobs": [{"name": "dataset-initializer"}], "spec": {"serviceAccountName": "fetcher"}},
            ],
            "runtimePatches": [{"manager": "kueue", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": {
                "metadata": {"labels": {"queue": "q"}}, "spec": {"tolerations": [{"key": "gpu", "operator": "Exists"}]}}}}}]}}}}],
        },
    })
}

fn tensorflow() -> Value {
    let pod = |command: &str, limits: Value, extra: Value| {
        let mut spec = json!({"containers": [{"name": "tensorflow", "image": "tf:2", "command": ["python", command], "env": [{"name": "A", "value": command}],
            "resources": {"limits": limits}, "volumeMounts": [{"name": "data", "mountPath": "/data"}]}], "volumes": [{"name": "data", "emptyDir": {}}]});
        spec.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        json!({"spec": spec})
    };
    json!({
        "apiVersion": "kubeflow.org/v1", "kind": "TFJob", "metadata": {"name": "ps"},
        "spec": {
            "runPolicy": {"backoffLimit": 2},
            "tfReplicaSpecs": {
                "PS": {"replicas": 2, "template": pod("server.py", json!({"cpu": 4}), json!({"volumes": [{"name": "data", "hostPath": {"path": "/x"}}]}))},
                "Chief": {"template": pod("train.py", json!({"cpu": 2}), json!({}))},
                "Worker": {"replicas": 4, "restartPolicy": "Never", "template": pod("server.py", json!({"nvidia.com/gpu": 8}), json!({"nodeSelector": {"gpu": "h100"}}))},
            },
        },
    })
}

/// A PyTorchJob whose master has no GPU and runs another program.
fn pytorch_master() -> Value {
    let mut job = pytorch();
    let master = &mut job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"];
    master["nodeSelector"] = json!({"pool": "cpu"});
    master["containers"][0]["command"] = json!(["python", "coordinate.py"]);
    master["containers"][0]["resources"] = json!({"limits": {"cpu": 4}});
    job["spec"]["nprocPerNode"] = json!(2);
    job
}

fn paddle_servers() -> Value {
    let replicas = |limits: Value| {
        let container = json!({"name": "paddle", "image": "paddle:3", "command": ["python", "ps.py"], "resources": {"requests": limits}});
        json!({"replicas": 2, "template": {"spec": {"containers": [container]}}})
    };
    json!({
        "apiVersion": "batch.paddlepaddle.org/v1", "kind": "PaddleJob", "metadata": {"name": "wide-and-deep"},
        "spec": {"withGloo": 1, "intranet": "Service", "cleanPodPolicy": "OnCompletion", "worker": replicas(json!({"cpu": 4})), "ps": replicas(json!({"cpu": 2}))},
    })
}

/// Two roles with GPUs cannot join one rendezvous: the difference is noted.
#[test]
fn a_master_with_gpus_is_a_node_like_the_others() {
    let mut job = pytorch_master();
    job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]["resources"]["limits"] =
        json!({"nvidia.com/gpu": 8});
    let converted = convert(&job, &[]).unwrap();
    is_valid(&converted.job).unwrap();
    assert_eq!(converted.job["spec"]["trainer"]["numNodes"], 4);
    let notes = described(&converted.notes);
    assert!(notes.iter().any(|note| note.contains("coordinate.py")), "{notes:?}");
}

#[test]
fn a_paddle_job_of_trainers_has_no_roles() {
    let mut job = paddle_servers();
    job["spec"].as_object_mut().unwrap().remove("ps");
    let converted = convert(&job, &[]).unwrap();
    is_valid(&converted.job).unwrap();
    assert_eq!(
        (&converted.job["spec"]["roles"], &converted.job["spec"]["trainer"]["numNodes"]),
        (&Value::Null, &json!(2))
    );
    job["spec"].as_object_mut().unwrap().remove("worker");
    let error = convert(&job, &[]).unwrap_err().to_string();
    assert_eq!(error, "spec.worker: got nothing; expected the trainers of a PaddleJob");
}

/// Only workers need no roles.
#[test]
fn a_tf_job_of_workers_has_no_roles() {
    let mut job = tensorflow();
    let all = job["spec"]["tfReplicaSpecs"].as_object_mut().unwrap();
    all.retain(|name, _| name == "Worker");
    let converted = convert(&job, &[]).unwrap();
    is_valid(&converted.job).unwrap();
    assert_eq!(
        (&converted.job["spec"]["roles"], &converted.job["spec"]["trainer"]["numNodes"]),
        (&Value::Null, &json!(4))
    );
}

fn documents() -> [(&'static str, Value); 7] {
    [
        ("pytorch", pytorch()),
        ("pytorch-master", pytorch_master()),
        ("paddle-servers", paddle_servers()),
        ("paddle", paddle()),
        ("mpi", mpi()),
        ("kubeflow", kubeflow()),
        ("tensorflow", tensorflow()),
    ]
}

fn described(notes: &[Note]) -> Vec<String> {
    notes.iter().map(|note| format!("{}: {} -> {}", note.path, note.value, note.what)).collect()
}

/// Whether a cluster would accept the job.
fn is_valid(job: &Value) -> Result<(), String> {
    let job = switchyard_crds::validate::train_job(job).map_err(|faults| format!("{faults:?}\n{job}"))?;
    plan::validate(&job).map(drop).map_err(|faults| format!("{faults:?}"))
}

#[test]
fn each_kind_becomes_a_valid_train_job() {
    for (name, document) in documents() {
        let converted = convert(&document, &[]).unwrap_or_else(|error| panic!("{name}: {error}"));
        is_valid(&converted.job).unwrap_or_else(|fault| panic!("{name}: {fault}"));
        insta::assert_yaml_snapshot!(name, json!({"job": converted.job, "notes": described(&converted.notes)}));
    }
}

#[test]
fn documents_without_training_pods_are_rejected() {
    let text = |document: Value| convert(&document, &[]).unwrap_err().to_string();
    let kind = |api: &str, kind: &str| json!({"apiVersion": api, "kind": kind, "spec": {}});
    assert!(text(kind("v1", "Pod")).starts_with("got Pod of v1; expected a PyTorchJob, TFJob"));
    assert!(text(json!(3)).starts_with("got a document without a kind"));
    assert!(text(kind(labels::API_VERSION, "TrainJob")).starts_with("got a TrainJob that is Switchyard's already"));
    assert!(text(kind("kubeflow.org/v1", "PyTorchJob")).starts_with("spec.pytorchReplicaSpecs: got nothing"));
    assert!(text(kind("kubeflow.org/v2beta1", "MPIJob")).starts_with("spec.mpiReplicaSpecs: got nothing"));
    let two = json!({"containers": [{"name": "pytorch", "image": "i"}, {"name": "trainer", "image": "i"}]});
    let mut job = pytorch();
    job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"] = two;
    assert!(text(job).contains("got a container `trainer` next to the training container"));
}

#[test]
fn names_are_adapted() {
    let long = "x".repeat(80);
    for (name, expected) in
        [("GPT.large", "gpt-large"), ("0-a-", "a"), (long.as_str(), &long[..50]), ("---", "converted")]
    {
        let mut job = paddle();
        job["metadata"]["name"] = name.into();
        let converted = convert(&job, &[]).unwrap();
        assert_eq!(converted.job["metadata"]["name"], expected);
        assert!(converted.notes.iter().any(|note| note.path == "metadata.name"), "{name}");
    }
}

/// Found by the property test below: the whole target was mistaken for its name.
#[test]
fn a_field_next_to_a_targets_name_is_noted() {
    let mut job = kubeflow();
    job["spec"]["podTemplateOverrides"][0]["targetJobs"][0]["madeUp"] = "x".into();
    let notes = convert(&job, &[]).unwrap().notes;
    assert!(notes.iter().any(|note| note.path == "spec.podTemplateOverrides[0].targetJobs[0].madeUp"), "{notes:?}");
}

/// Found by the property test below: the launcher's variables replaced a value that is not a list.
#[test]
fn worker_variables_that_are_not_a_list_stay() {
    let mut job = mpi();
    job["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["env"] = "x".into();
    let converted = convert(&job, &[]).unwrap();
    assert!(converted.job.to_string().contains(r#""env":"x""#), "{}", converted.job);
}

#[test]
fn a_launcher_that_runs_as_worker_is_a_node() {
    let mut job = mpi();
    job["spec"]["runLauncherAsWorker"] = true.into();
    let roles = convert(&job, &[]).unwrap().job["spec"]["roles"].clone();
    assert_eq!((&roles[0]["name"], &roles[0]["resourcesPerNode"]["limits"]["cpu"]), (&json!("head"), &json!(1)));
    assert_eq!(
        (&roles[1]["name"], &roles[1]["replicas"], &roles[1]["command"]),
        (&json!("worker"), &json!(2), &Value::Null)
    );
    let worker = job["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0].clone();
    let launcher =
        job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0].as_object_mut().unwrap();
    launcher.insert("resources".into(), worker["resources"].clone());
    launcher.remove("env");
    assert_eq!(convert(&job, &[]).unwrap().job["spec"]["trainer"]["numNodes"], 3, "pods that are alike");
}

/// Collects pointers to all objects of a document.
fn objects(value: &Value, at: String, found: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            found.push(at.clone());
            fields.iter().for_each(|(key, value)| {
                let key = key.replace('~', "~0").replace('/', "~1");
                objects(value, format!("{at}/{key}"), found);
            });
        }
        Value::Array(items) => {
            items.iter().enumerate().for_each(|(index, value)| objects(value, format!("{at}/{index}"), found));
        }
        _ => {}
    }
}

/// Whether the field at a pointer is covered by a note.
fn covers(note: &Note, pointer: &str, key: &str) -> bool {
    let mut path = Cursor::new(&Value::Null).path;
    let parts = pointer.split('/').skip(1).map(|part| part.replace("~1", "/").replace("~0", "~"));
    let mut prefixes = vec![];
    for part in parts.chain([key.to_string()]) {
        path = part.parse().map_or_else(|_| path.key(&part), |index| path.index(index));
        prefixes.push(path.to_string());
    }
    prefixes.contains(&note.path)
}

proptest! {
    /// An unknown field anywhere in a document is in the TrainJob or in a note, even if its name is
    /// known elsewhere.
    #[test]
    fn nothing_is_dropped_silently(
        document in 0..7_usize,
        places in prop::collection::vec((0..1000_usize, prop::sample::select(vec![
            "madeUp", "cleanPodPolicy", "hostname", "queue", "tolerations", "suspend", "replicas", "template", "restartPolicy", "args", "metrics",
            "resources", "numNodes", "name", "nodeName", "env", "spec", "managedBy", "backoffLimit", "serviceAccountName",
        ])), 1..5),
    ) {
        let (_, mut document) = documents()[document].clone();
        let mut all = Vec::new();
        objects(&document, String::new(), &mut all);
        let mut planted = Vec::new();
        for (number, (place, key)) in places.into_iter().enumerate() {
            let pointer = all[place % all.len()].clone();
            let marker = format!("marker-{number}");
            if let Some(Value::Object(object)) = document.pointer_mut(&pointer) && !object.contains_key(key) {
                object.insert(key.into(), marker.clone().into());
                planted.push((pointer, key, marker));
            }
        }
        // Rejecting the input is not silent.
        if let Ok(converted) = convert(&document, &[]) {
            let text = converted.job.to_string();
            for (pointer, key, marker) in planted {
                let is_told = converted.notes.iter().any(|note| covers(note, &pointer, key));
                prop_assert!(text.contains(&marker) || is_told, "{pointer}/{key} is gone: {text}\n{:#?}", converted.notes);
            }
        }
    }
}

#[test]
fn every_leaf_is_converted_or_noted() {
    // Fields that change their form, with the new form.
    let converted_path = |path: &str| {
        ["kind", "apiVersion"].contains(&path)
            || ["nprocPerNode", "numProcPerNode", "replicas", "restartPolicy", "mpiImplementation"]
                .iter()
                .any(|key| path.ends_with(key))
            || path.ends_with("containers[0].name")
            || path.contains("targetJobs")
            || path.contains("replicatedJobs[0].name")
    };
    fn leaves(at: &Cursor<'_>, found: &mut Vec<(String, Value)>) {
        match at.value {
            Value::Object(_) => at.fields().iter().for_each(|(_, field)| leaves(field, found)),
            Value::Array(_) => at.items().iter().for_each(|item| leaves(item, found)),
            value => found.push((at.path.to_string(), value.clone())),
        }
    }
    for (name, document) in documents() {
        let converted = convert(&document, &[]).unwrap();
        let (mut theirs, mut ours) = (Vec::new(), Vec::new());
        leaves(&Cursor::new(&document), &mut theirs);
        leaves(&Cursor::new(&converted.job), &mut ours);
        for (path, value) in theirs {
            let is_told = converted.notes.iter().any(|note| {
                path.strip_prefix(&note.path).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
            });
            let is_carried = ours.iter().any(|(_, our)| *our == value);
            assert!(is_told || is_carried || converted_path(&path), "{name}: {path}: {value} is gone");
        }
    }
}
