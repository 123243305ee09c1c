//! TrainJob of Kubeflow Trainer: a trainer on top of a runtime that is defined elsewhere, and
//! patches of its pods.

use super::ConvertError;
use super::pods::{self, Draft};
use super::reader::Reader;
use serde_json::{Value, json};
use switchyard_crds::names::TRAINER;
use switchyard_fabric::lint::Cursor;

/// Framework by a substring of the runtime's name; the first match counts. DeepSpeed and MLX
/// runtimes are started by mpirun.
const RUNTIMES: [(&str, &str); 8] = [
    ("deepspeed", "MPI"),
    ("mlx", "MPI"),
    ("mpi", "MPI"),
    ("torch", "Torch"),
    ("jax", "JAX"),
    ("tensorflow", "TensorFlow"),
    ("paddle", "Paddle"),
    ("horovod", "Horovod"),
];
/// The runtime's replicated job whose pods train, and its container.
const NODE: &str = "node";
/// The label of a runtime that names its framework.
const FRAMEWORK: &str = "trainer.kubeflow.org/framework";

pub(super) fn convert<'a>(
    top: &Cursor<'a>,
    others: &[Value],
    reader: &mut Reader<'a>,
    draft: &mut Draft,
) -> Result<(), ConvertError> {
    let Some(spec) = top.get("spec") else { return Err(pods::unusable(top, "spec", "a runtimeRef and a trainer")) };
    let name = spec.at(&["runtimeRef", "name"]);
    let name = name.as_ref().and_then(|field| field.value.as_str()).unwrap_or_default();
    let runtime = others.iter().find(|other| is_runtime(other, name));
    // The label of a runtime says its framework; else the name has to.
    let label = runtime.and_then(|runtime| runtime["metadata"]["labels"][FRAMEWORK].as_str()).unwrap_or(name);
    let known = RUNTIMES.iter().find(|(word, _)| label.contains(word));
    draft.trainer.insert("framework".into(), known.map_or("Plain", |(_, framework)| framework).into());
    let trainer = spec.get("trainer");
    if let Some(trainer) = &trainer {
        for key in ["image", "command", "args"] {
            if let Some(value) = reader.take(trainer, key) {
                draft.trainer.insert(key.into(), value);
            }
        }
        if let Some(nodes) = pods::pod_count(trainer, "numNodes", reader)? {
            draft.trainer.insert("numNodes".into(), nodes.into());
        }
        pods::processes(trainer, "numProcPerNode", reader, draft);
        // Put values from other sources, and requests that differ from limits, into the template.
        for (theirs, ours) in [("env", "env"), ("resourcesPerNode", "resources")] {
            if let Some(value) = reader.take(trainer, theirs) {
                draft.container()[ours] = value;
            }
        }
    }
    if let Some(runtime) = runtime {
        inherit(runtime, draft);
    }
    if let Some(field) = spec.get("runtimeRef") {
        let framework = known.map_or("Plain, as the name is unknown", |(_, framework)| framework);
        let image = if draft.trainer.contains_key("image") {
            ""
        } else {
            "; spec.trainer.image is to be set: it is the runtime's"
        };
        let rest = match runtime {
            Some(_) => {
                "its image, command, nodes and pods are taken from the runtime in this file where the job has none"
            }
            None => "other settings of the runtime are not in this file",
        };
        reader.note(&field, format!("a TrainJob has no runtime: spec.trainer.framework is {framework}{image}; {rest}"));
    }
    if !draft.trainer.contains_key("image") {
        let stem = if name.is_empty() { "runtime" } else { name };
        draft.trainer.insert("image".into(), format!("replace-with-the-image-of/{stem}").into());
    }
    for key in ["labels", "annotations"] {
        if let Some(value) = reader.take(&spec, key) {
            let meta = draft.template.entry("metadata").or_insert_with(|| json!({}));
            meta[key] = value;
        }
    }
    for key in ["suspend", "activeDeadlineSeconds", "ttlSecondsAfterFinished"] {
        if let Some(value) = reader.take(&spec, key) {
            draft.spec.insert(key.into(), value);
        }
    }
    pods::managed_by(&spec, reader, draft);
    for key in ["podTemplateOverrides", "podSpecOverrides"] {
        spec.list(key).iter().for_each(|entry| overrides(entry, reader, draft));
    }
    for patch in spec.list("runtimePatches") {
        let jobs = patch.at(&["trainingRuntimeSpec", "template", "spec"]).map(|spec| spec.list("replicatedJobs"));
        for job in jobs.unwrap_or_default().iter().filter(|job| job.text("name") == Some(NODE)) {
            job.get("name").iter().for_each(|name| reader.done(name));
            if let Some(pod) = job.at(&["template", "spec", "template"]) {
                pod_template(&pod, reader, draft);
            }
        }
    }
    Ok(())
}

/// Whether a document is the runtime of this name.
fn is_runtime(document: &Value, name: &str) -> bool {
    let kind = document["kind"].as_str().unwrap_or_default();
    ["ClusterTrainingRuntime", "TrainingRuntime"].contains(&kind) && document["metadata"]["name"] == name
}

/// Takes from a runtime what the job itself does not say.
fn inherit(runtime: &Value, draft: &mut Draft) {
    let spec = &runtime["spec"];
    if let Some(nodes) = spec["mlPolicy"]["numNodes"].as_u64() {
        draft.trainer.entry("numNodes").or_insert(nodes.into());
    }
    let jobs = spec["template"]["spec"]["replicatedJobs"].as_array().into_iter().flatten();
    for pod in jobs.filter(|job| job["name"] == NODE).map(|job| &job["template"]["spec"]["template"]) {
        let containers = pod["spec"]["containers"].as_array().into_iter().flatten();
        let trains = |container: &&Value| container["name"] == NODE || container["name"] == TRAINER;
        for (key, value) in containers.filter(trains).filter_map(Value::as_object).flatten() {
            match key.as_str() {
                "name" => {}
                "image" | "command" | "args" => drop(draft.trainer.entry(key).or_insert(value.clone())),
                _ => {
                    let ours = &mut draft.container()[key];
                    if ours.is_null() {
                        *ours = value.clone();
                    }
                }
            }
        }
        for (block, fields) in [("metadata", &pod["metadata"]), ("spec", &pod["spec"])] {
            for (key, value) in fields.as_object().into_iter().flatten() {
                // Pods of a TrainJob are never restarted alone.
                if key == "containers" || key == "restartPolicy" || super::advice::of(key).is_some() {
                    continue;
                }
                let ours = &mut draft.template.entry(block).or_insert_with(|| json!({}))[key];
                if ours.is_null() {
                    *ours = value.clone();
                }
            }
        }
    }
}

/// An override of the training pods.
fn overrides<'a>(entry: &Cursor<'a>, reader: &mut Reader<'a>, draft: &mut Draft) {
    let targets = entry.list("targetJobs");
    if !targets.iter().any(|target| target.text("name") == Some(NODE)) {
        return reader.note(entry, "for pods that a TrainJob does not have");
    }
    for name in targets.iter().filter_map(|target| target.get("name")) {
        if name.value == NODE {
            reader.done(&name);
        } else {
            reader.note(&name, "a TrainJob has one kind of pod");
        }
    }
    pod_template(entry, reader, draft);
}

/// Merges metadata and spec of pods; of two values for one field the first wins.
fn pod_template<'a>(pod: &Cursor<'a>, reader: &mut Reader<'a>, draft: &mut Draft) {
    if let Some(metadata) = pod.get("metadata") {
        let ours = draft.template.entry("metadata").or_insert_with(|| json!({}));
        for (block, fields) in metadata.fields() {
            if ours.get(block).is_some_and(|known| !known.is_object() && !known.is_null()) {
                continue;
            }
            for (key, field) in fields.fields() {
                set_once(&mut ours[block][key], &field, reader);
            }
        }
    }
    let Some(spec) = pod.get("spec") else { return };
    for (key, field) in spec.fields() {
        if key == "containers" {
            field.items().iter().for_each(|container| merge_container(container, reader, draft));
        } else if super::advice::of(key).is_none() {
            let ours = draft.template.entry("spec").or_insert_with(|| json!({}));
            set_once(&mut ours[key], &field, reader);
        }
    }
}

fn merge_container<'a>(container: &Cursor<'a>, reader: &mut Reader<'a>, draft: &mut Draft) {
    let Some(name) = container.get("name").filter(|name| name.value == NODE || name.value == TRAINER) else { return };
    reader.done(&name);
    for (key, field) in container.fields().into_iter().filter(|(key, _)| *key != "name") {
        let ours = &mut draft.container()[key];
        match ours.as_array_mut() {
            Some(list) => {
                for item in field.items() {
                    let is_known = |known: &Value| known["name"] == item.value["name"] && key == "env";
                    if list.iter().any(is_known) {
                        reader.note(&item, "spec.trainer.env of the old job is taken");
                    } else {
                        list.push(item.value.clone());
                        reader.done(&item);
                    }
                }
            }
            None => set_once(ours, &field, reader),
        }
    }
}

fn set_once(ours: &mut Value, field: &Cursor<'_>, reader: &mut Reader<'_>) {
    if ours.is_null() || *ours == *field.value {
        *ours = field.value.clone();
        reader.done(field);
    } else {
        reader.note(field, "another entry sets it already, and that is taken");
    }
}
