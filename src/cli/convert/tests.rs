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
