//! Conversion, rejection, and the notes on standard error.

use super::*;

const PYTORCH: &str = "apiVersion: kubeflow.org/v1\nkind: PyTorchJob\nmetadata: {name: a}\nspec:\n  pytorchReplicaSpecs:\n    Worker:\n      replicas: 2\n      restartPolicy: OnFailure\n      template: {spec: {containers: [{name: pytorch, image: i, command: [torchrun, train.py]}]}}\n";

#[test]
fn documents_are_converted_and_others_skipped() {
    let other = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\n";
    let file =
        read("f.yaml", &format!("{PYTORCH}---\n{other}---\n{PYTORCH}")).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!((file.jobs.len(), file.skipped.as_slice()), (2, ["ConfigMap of v1".to_string()].as_slice()));
    let text = notes(&file);
    assert!(
        text.starts_with("a: 1 field to look at\n  spec.pytorchReplicaSpecs.Worker.restartPolicy: OnFailure\n"),
        "{text}"
    );
    assert!(text.ends_with("1 document skipped: ConfigMap of v1\n"), "{text}");
}

#[test]
fn lists_are_converted_item_by_item() {
    let indented: String = PYTORCH.lines().map(|line| format!("    {line}\n")).collect();
    let list = format!("apiVersion: v1\nkind: List\nitems:\n  -\n{indented}");
    assert_eq!(read("f.yaml", &list).unwrap_or_else(|error| panic!("{error}")).jobs.len(), 1);
}

#[test]
fn unconvertible_documents_are_rejected_with_a_reason() {
    for (text, expected) in [
        ("", "no document"),
        ("kind: Pod\napiVersion: v1\n", "got Pod of v1; expected a PyTorchJob"),
        ("apiVersion: kubeflow.org/v1\nkind: PyTorchJob\nspec: {}\n", "spec.pytorchReplicaSpecs: got nothing"),
        (": {", "not valid YAML"),
    ] {
        let error = read("f.yaml", text).err().unwrap().message;
        assert!(error.contains(expected) && error.contains("f.yaml"), "{text:?}: {error}");
    }
    let without = PYTORCH.replace("image: i, ", "");
    let error = read("f.yaml", &without).err().unwrap().message;
    assert!(error.contains("spec.trainer.image: got nothing; expected an image"), "{error}");
}

/// Manifests of users: what is listed, or the error.
#[test]
fn manifests_from_the_field_are_converted_with_their_notes() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/field");
    let read = |name: &str| read(name, &std::fs::read_to_string(format!("{folder}/{name}.txt")).unwrap());
    for (name, words) in [
        ("convert-gpu-by-claim", "the placement does not see devices of these claims"),
        ("convert-hostfile-in-script", "/etc/switchyard/hostfile"),
        ("convert-operator-labels", "no pod of a TrainJob has these labels"),
        ("convert-runtime-in-same-file", "are taken from the runtime in this file"),
        ("pass-convert-elastic", "spec.elasticPolicy.metrics"),
        ("pass-convert-paddle-args", "restartPolicy: OnFailure"),
        ("pass-convert-mpi-nccl-tests", "spec.runPolicy.cleanPodPolicy: Running"),
        ("pass-convert-runtime-patches", "metadata.labels.team: ml-platform"),
    ] {
        let file = read(name).unwrap_or_else(|error| panic!("{name}: {error}"));
        let said = notes(&file);
        assert!(said.contains(words), "{name}: {said}");
    }
    let file = read("convert-runtime-in-same-file").unwrap_or_else(|error| panic!("{error}"));
    let trainer = &file.jobs[0].job["spec"]["trainer"];
    assert_eq!((&trainer["image"], &trainer["numNodes"]), (&"example/torch:2".into(), &2.into()), "{trainer:#}");
    assert!(file.skipped.is_empty(), "{:?}", file.skipped);
    let patched = read("pass-convert-runtime-patches").unwrap_or_else(|error| panic!("{error}"));
    let pod = &patched.jobs[0].job["spec"]["template"]["spec"];
    assert_eq!(
        (&pod["serviceAccountName"], &pod["nodeSelector"]["node-type"]),
        (&"training-sa".into(), &"training".into())
    );
    let workers = read("pass-convert-tfjob").unwrap_or_else(|error| panic!("{error}"));
    let trainer = &workers.jobs[0].job["spec"]["trainer"];
    assert_eq!((&trainer["framework"], &trainer["numNodes"]), (&"TensorFlow".into(), &2.into()), "{trainer:#}");
    let tests = read("pass-convert-mpi-nccl-tests").unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(tests.jobs[0].job["spec"]["activeDeadlineSeconds"], 666);
    // Pods that differ are roles.
    for (name, expected) in [
        ("pass-convert-pytorch-cpu-master", ["master 1 Join 1", "worker 3 Join 1"].as_slice()),
        ("pass-convert-paddle-operator-ps", &["worker 2", "ps 2"]),
        ("pass-convert-tfjob-evaluator", &["worker 2", "chief 1", "ps 1", "evaluator 1"]),
        ("pass-convert-mpi-launcher-computes", &["head 1 Join 8", "worker 2 Join 8"]),
    ] {
        let file = read(name).unwrap_or_else(|error| panic!("{name}: {error}"));
        let spec = &file.jobs[0].job["spec"];
        let role = |role: &Value| {
            let words = ["name", "replicas", "rendezvous", "numProcPerNode"].map(|key| match &role[key] {
                Value::String(text) => text.clone(),
                Value::Null => String::new(),
                other => other.to_string(),
            });
            words.join(" ").trim().to_string()
        };
        let roles: Vec<String> = spec["roles"].as_array().into_iter().flatten().map(role).collect();
        assert_eq!(roles, expected, "{name}: {spec:#}");
        let lost = notes(&file).lines().filter(|line| line.contains("alike")).count();
        assert_eq!(lost, 0, "{name}: {}", notes(&file));
    }
    let awaited = |name: &str| {
        read(name).unwrap_or_else(|error| panic!("{error}")).jobs[0].job["spec"]["successPolicy"]["role"].clone()
    };
    assert_eq!(awaited("pass-convert-tfjob-evaluator"), "worker", "successPolicy: AllWorkers");
    assert_eq!(awaited("pass-convert-paddle-operator-ps"), "worker", "servers never end");
    assert_eq!(awaited("pass-convert-mpi-launcher-computes"), "head");
    for (name, words) in [
        ("convert-helm-template", "it is a template: render it first"),
        ("convert-unset-placeholders", "Worker.replicas: got ${NUM_WORKERS}; expected a number of pods"),
        ("pass-convert-volcano-job", "got Job of batch.volcano.sh/v1alpha1; expected a PyTorchJob"),
    ] {
        let error = read(name).err().unwrap().message;
        assert!(error.contains(words), "{name}: {error}");
    }
    let error = read("convert-duplicate-key").err().unwrap().message;
    assert!(error.contains("`restartPolicy` appears twice (lines 8 and 9)"), "{error}");
    assert!(!error.contains("DuplicateKeyPolicy"), "{error}");
}
