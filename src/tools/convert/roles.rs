//! Replicas of a job of another operator as roles of one TrainJob, if their pods are not alike.
//!
//! All roles share the pod template of one of them. Image, command, arguments, variables, limits,
//! node labels and tolerations are taken for each role; any other difference is noted.

use super::pods::{self, Draft};
use super::reader::Reader;
use super::{ConvertError, advice};
use serde_json::{Map, Value, json};
use switchyard_crds::names::GPU_RESOURCE;
use switchyard_fabric::lint::Cursor;

/// Replicas of the other job, and the role that they become.
pub(super) struct Source<'a> {
    /// Name of the role.
    pub name: &'static str,
    pub replicas: Cursor<'a>,
    /// Whether its command is the program's. Workers of an MPIJob start an ssh server instead.
    pub runs_program: bool,
}

const SHARED: &str = "roles share one pod template: another role's value is taken";

/// Converts replicas to roles. The first one's template is shared; its container is named `usual`
/// unless there is no such container.
pub(super) fn convert<'a>(
    sources: &[Source<'a>],
    usual: &str,
    reader: &mut Reader<'a>,
    draft: &mut Draft,
) -> Result<(), ConvertError> {
    let Some(main) = sources.first() else { return Ok(()) };
    pods::template(&main.replicas, usual, reader, draft)?;
    let mut roles = Vec::new();
    for source in sources {
        roles.push(role(source, usual, reader)?);
    }
    for source in sources.iter().skip(1) {
        note_differences(&source.replicas, &main.replicas, reader);
    }
    // What each role has of its own must not be in the shared template too.
    for key in ["command", "args"] {
        draft.trainer.remove(key);
    }
    let image = draft.trainer.get("image").cloned();
    for role in &mut roles {
        if role.get("image") == image.as_ref() {
            role.remove("image");
        }
    }
    if let Some(container) = draft.container().as_object_mut() {
        if let Some(resources) = container.get_mut("resources").and_then(Value::as_object_mut) {
            resources.retain(|key, _| key != "limits" && key != "requests");
        }
        container.retain(|key, value| key != "resources" || value != &json!({}));
        if let Some(env) = container.get_mut("env").and_then(Value::as_array_mut) {
            env.retain(|entry| !is_plain(entry));
        }
        if container.get("env").is_some_and(|env| env == &json!([])) {
            container.remove("env");
        }
    }
    if let Some(spec) = draft.template.get_mut("spec").and_then(Value::as_object_mut) {
        spec.remove("nodeSelector");
        spec.remove("tolerations");
        if spec.get("containers").is_some_and(|all| all == &json!([{"name": switchyard_crds::names::TRAINER}])) {
            spec.remove("containers");
        }
    }
    draft.template.retain(|_, block| block != &json!({}));
    draft.spec.insert("roles".into(), roles.into_iter().map(Value::Object).collect());
    Ok(())
}

/// Whether pods of one rendezvous become two roles: they differ in what a role has of its own, and
/// at most one of them requests GPUs, as the rendezvous of roles demands.
pub(super) fn are_needed(one: &Source<'_>, other: &Source<'_>, usual: &str) -> bool {
    let [one, other] = [one, other].map(|source| own(source, usual));
    let requests_gpus = |own: &Value| own["limits"].get(GPU_RESOURCE).is_some_and(|count| count != 0);
    one != other && !(requests_gpus(&one) && requests_gpus(&other))
}

/// What a role takes from the replicas.
fn own(source: &Source<'_>, usual: &str) -> Value {
    let container = container(&source.replicas, usual).map_or(&Value::Null, |container| container.value);
    let spec = source.replicas.at(&["template", "spec"]).map_or(&Value::Null, |spec| spec.value);
    let resources = &container["resources"];
    let limits = resources.get("limits").unwrap_or(&resources["requests"]);
    let program = ["command", "args"].map(|key| source.runs_program.then(|| &container[key]));
    let env: Vec<&Value> = container["env"].as_array().into_iter().flatten().filter(|entry| is_plain(entry)).collect();
    json!({
        "image": container["image"], "program": program, "env": env, "limits": limits,
        "nodes": [spec["nodeSelector"], spec["tolerations"]],
    })
}

/// A variable with a value, as opposed to one from elsewhere.
fn is_plain(entry: &Value) -> bool {
    entry["name"].is_string() && entry["value"].is_string() && entry.get("valueFrom").is_none()
}

/// The container that runs the program.
fn container<'a>(replicas: &Cursor<'a>, usual: &str) -> Option<Cursor<'a>> {
    let containers = replicas.at(&["template", "spec"])?.list("containers");
    let named = containers.iter().position(|container| container.text("name") == Some(usual)).unwrap_or_default();
    containers.into_iter().nth(named)
}

fn role<'a>(source: &Source<'a>, usual: &str, reader: &mut Reader<'a>) -> Result<Map<String, Value>, ConvertError> {
    let mut role = Map::new();
    role.insert("name".into(), source.name.into());
    let replicas = pods::pod_count(&source.replicas, "replicas", reader)?.unwrap_or(1);
    role.insert("replicas".into(), replicas.into());
    let container = container(&source.replicas, usual);
    let container = container.ok_or_else(|| pods::unusable(&source.replicas, "template", "a template of pods"))?;
    container.get("name").iter().for_each(|name| reader.done(name));
    for key in ["image", "command", "args"] {
        if !source.runs_program && key != "image" {
            if let Some(field) = container.get(key) {
                reader.note(&field, "workers start no ssh server: each pod but the first runs the daemon of mpirun");
            }
        } else if let Some(value) = reader.take(&container, key) {
            role.insert(key.into(), value);
        }
    }
    let mut env = Vec::new();
    for entry in container.list("env") {
        if is_plain(entry.value) {
            reader.done(&entry);
            env.push(entry.value.clone());
        }
    }
    if !env.is_empty() {
        role.insert("env".into(), env.into());
    }
    if let Some(resources) = container.get("resources") {
        let [limits, requests] = ["limits", "requests"].map(|key| resources.get(key));
        if let Some(limits) = limits.as_ref().or(requests.as_ref()) {
            reader.done(limits);
            role.insert("resourcesPerNode".into(), json!({"limits": limits.value}));
        }
        if let (Some(limits), Some(requests)) = (&limits, &requests) {
            if limits.value == requests.value {
                reader.done(requests);
            } else {
                reader.note(requests, "a role has limits only, and they are its requests");
            }
        }
    }
    if let Some(spec) = source.replicas.at(&["template", "spec"]) {
        for key in ["nodeSelector", "tolerations"] {
            if let Some(value) = reader.take(&spec, key) {
                role.insert(key.into(), value);
            }
        }
    }
    Ok(role)
}

/// Notes what differs from the replicas whose template is shared.
fn note_differences<'a>(other: &Cursor<'a>, main: &Cursor<'a>, reader: &mut Reader<'a>) {
    for (key, field) in other.fields() {
        match (main.get(key), field.value) {
            _ if reader.is_done(&field) || advice::of(key).is_some() => {}
            (Some(known), value) if known.value == value => reader.done(&field),
            (Some(known), Value::Object(_)) => note_differences(&field, &known, reader),
            (Some(known), Value::Array(_)) => {
                for (position, item) in field.items().iter().enumerate() {
                    match known.items().get(position) {
                        _ if reader.is_done(item) => {}
                        Some(known) if known.value == item.value => reader.done(item),
                        Some(known) if item.value.is_object() => note_differences(item, known, reader),
                        _ => note_rest(item, reader),
                    }
                }
            }
            _ => note_rest(&field, reader),
        }
    }
}

/// Notes a field that the shared template does not have: as a whole, or what its role does not have
/// either.
fn note_rest<'a>(field: &Cursor<'a>, reader: &mut Reader<'a>) {
    let fields = field.fields().into_iter().map(|(_, field)| field);
    let parts: Vec<Cursor<'a>> = fields.chain(field.items()).collect();
    if reader.is_done(field) || field.value.is_null() {
        return;
    }
    if parts.iter().any(|part| has_done(part, reader)) {
        parts.iter().for_each(|part| note_rest(part, reader));
    } else {
        reader.note(field, SHARED);
    }
}

/// Whether the field, or anything in it, is converted or noted.
fn has_done<'a>(field: &Cursor<'a>, reader: &Reader<'a>) -> bool {
    let mut parts = field.fields().into_iter().map(|(_, field)| field).chain(field.items());
    reader.is_done(field) || parts.any(|part| has_done(&part, reader))
}
