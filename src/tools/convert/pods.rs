//! Parts shared by all kinds: metadata, the pod template, the run policy.

use super::reader::{Reader, words};
use super::{ConvertError, advice};
use serde_json::{Map, Value, json};
use switchyard_crds::labels;
use switchyard_crds::names::{LAST_APPLIED, TRAINER};
use switchyard_fabric::lint::Cursor;

/// Longest name of a TrainJob.
const LONGEST_NAME: usize = 50;
/// Most restarts that a TrainJob can have.
const MAX_RESTARTS: u64 = 1000;
/// Exit codes after which the training operator does not restart with `restartPolicy: ExitCode`.
const PERMANENT: std::ops::RangeInclusive<i32> = 1..=127;

/// The TrainJob being built: the blocks of its spec.
#[derive(Default)]
pub(super) struct Draft {
    pub spec: Map<String, Value>,
    pub trainer: Map<String, Value>,
    pub failure_policy: Map<String, Value>,
    /// The pod template.
    pub template: Map<String, Value>,
}

impl Draft {
    pub(super) fn job(mut self, metadata: Value) -> Value {
        self.spec.insert("trainer".into(), self.trainer.into());
        for (name, block) in [("failurePolicy", self.failure_policy), ("template", self.template)] {
            if !block.is_empty() {
                self.spec.insert(name.into(), block.into());
            }
        }
        json!({"apiVersion": labels::API_VERSION, "kind": "TrainJob", "metadata": metadata, "spec": self.spec})
    }

    /// The training container, which is created if missing.
    pub(super) fn container(&mut self) -> &mut Value {
        let spec = self.template.entry("spec").or_insert_with(|| json!({}));
        if spec["containers"].as_array().is_none_or(Vec::is_empty) {
            spec["containers"] = json!([{"name": TRAINER}]);
        }
        let containers = spec["containers"].as_array_mut().map(Vec::as_mut_slice).unwrap_or_default();
        let at = containers.iter().position(|container| container["name"] == TRAINER).unwrap_or_default();
        &mut containers[at]
    }
}

/// Name, labels and annotations.
pub(super) fn metadata<'a>(top: &Cursor<'a>, reader: &mut Reader<'a>) -> Value {
    let mut metadata = json!({});
    let Some(theirs) = top.get("metadata") else {
        metadata["name"] = "converted".into();
        return metadata;
    };
    for key in ["namespace", "labels", "annotations"] {
        if let Some(value) = reader.take(&theirs, key) {
            metadata[key] = value;
        }
    }
    // kubectl would mistake its copy of the old manifest for ours.
    if let Some(field) = theirs.at(&["annotations", LAST_APPLIED]) {
        reader.note(&field, "of the old object");
        metadata["annotations"].as_object_mut().map(|annotations| annotations.remove(LAST_APPLIED));
    }
    let requested = theirs.get("name").or_else(|| theirs.get("generateName"));
    let name = name_of(requested.as_ref().and_then(|field| field.value.as_str()).unwrap_or("converted"));
    if let Some(field) = theirs.get("name") {
        if field.value == name.as_str() {
            reader.done(&field);
        } else {
            reader.note(&field, format!("names of TrainJobs are shorter and simpler: it is called {name}"));
        }
    }
    metadata["name"] = name.into();
    metadata
}

/// The nearest valid TrainJob name.
fn name_of(text: &str) -> String {
    let simple = |c: char| if c.is_ascii_lowercase() || c.is_ascii_digit() { c } else { '-' };
    let name: String = text.to_ascii_lowercase().chars().map(simple).collect();
    let name: String = name.trim_start_matches(|c: char| !c.is_ascii_lowercase()).chars().take(LONGEST_NAME).collect();
    let name = name.trim_end_matches('-');
    if name.is_empty() { "converted".into() } else { name.into() }
}

/// The template of the training pods. The container gets our name; its image, command and arguments
/// move to `trainer`.
pub(super) fn template<'a>(
    role: &Cursor<'a>,
    usual: &str,
    reader: &mut Reader<'a>,
    draft: &mut Draft,
) -> Result<(), ConvertError> {
    let Some(template) = role.get("template") else {
        return Err(unusable(role, "template", "a template of pods"));
    };
    for key in ["metadata", "spec"] {
        let Some(part) = template.get(key) else { continue };
        let mut taken = Map::new();
        for (name, _) in part.fields() {
            // Known to have no counterpart, such as a node name: the final walk reports it.
            let is_kept = name == "name" || advice::of(name).is_none() && name != "restartPolicy";
            if let Some(value) = is_kept.then(|| reader.take(&part, name)).flatten() {
                taken.insert(name.into(), value);
            }
        }
        if !taken.is_empty() {
            draft.template.insert(key.into(), taken.into());
        }
    }
    if let Some(policy) = template.at(&["spec", "restartPolicy"]) {
        if policy.value == "Never" {
            reader.done(&policy);
        } else {
            reader
                .note(&policy, "containers of a rank are not restarted: failurePolicy.maxRestarts restarts the group");
        }
    }
    name_trainer(&template, usual, draft)?;
    claims(&template, reader);
    if let Some(spec) = template.get("spec") {
        foreign_labels(&spec, reader);
    }
    Ok(())
}

/// Devices that pods get by a claim of their own stay in the template, but count for nothing.
fn claims<'a>(template: &Cursor<'a>, reader: &mut Reader<'a>) {
    if let Some(claims) = template.at(&["spec", "resourceClaims"]) {
        let what = "kept, but the placement does not see devices of these claims: request GPUs as nvidia.com/gpu in \
                    spec.trainer.resourcesPerNode.limits, and the controller makes the claims itself";
        reader.note(&claims, what);
    }
}

/// Prefixes of labels that other operators put on their pods.
const FOREIGN: [&str; 5] =
    ["training.kubeflow.org/", "trainer.kubeflow.org/", "jobset.sigs.k8s.io/", "volcano.sh/", "batch.kubernetes.io/"];

/// Selectors that name labels of another operator's pods match no pod of a TrainJob.
fn foreign_labels<'a>(at: &Cursor<'a>, reader: &mut Reader<'a>) {
    let is_foreign = |name: &str| FOREIGN.iter().any(|prefix| name.starts_with(prefix));
    for (key, field) in at.fields() {
        let by_label = field.fields().iter().any(|(name, _)| is_foreign(name));
        let by_expression = field.items().iter().any(|item| item.text("key").is_some_and(is_foreign));
        if key == "matchLabels" && by_label || key == "matchExpressions" && by_expression {
            let what = "kept, but no pod of a TrainJob has these labels, so the rule matches nothing; a TrainJob has one pod on a node anyway";
            reader.note(&field, what);
        } else {
            foreign_labels(&field, reader);
        }
    }
    at.items().iter().for_each(|item| foreign_labels(item, reader));
}

fn name_trainer(template: &Cursor<'_>, usual: &str, draft: &mut Draft) -> Result<(), ConvertError> {
    let none = || unusable(template, "spec.containers", "a container that trains");
    let containers = draft.template.get_mut("spec").and_then(|spec| spec.get_mut("containers"));
    let containers = containers.and_then(Value::as_array_mut).ok_or_else(none)?;
    let named = |name: &str| containers.iter().position(|container| container["name"] == name);
    let at = named(usual).or_else(|| named(TRAINER)).unwrap_or_default();
    if named(TRAINER).is_some_and(|other| other != at) {
        return Err(ConvertError::Unusable {
            field: format!("{}.spec.containers", template.path),
            got: format!("a container `{TRAINER}` next to the training container"),
            expected: "another name: the training container is called `trainer`",
        });
    }
    let trainer = containers.get_mut(at).and_then(Value::as_object_mut).ok_or_else(none)?;
    trainer.insert("name".into(), TRAINER.into());
    for key in ["image", "command", "args"] {
        if let Some(value) = trainer.remove(key) {
            draft.trainer.insert(key.into(), value);
        }
    }
    // Put the trainer first: if a template has no container with this name, its first one is used.
    containers.swap(0, at);
    Ok(())
}

pub(super) fn unusable(at: &Cursor<'_>, key: &str, expected: &'static str) -> ConvertError {
    let found = at.get(key);
    let got = found.map_or_else(|| "nothing".to_owned(), |field| words(field.value));
    ConvertError::Unusable { field: at.path.key(key).to_string(), got, expected }
}

/// A number of at least 1.
pub(super) fn number<'a>(at: &Cursor<'a>, key: &str, reader: &mut Reader<'a>) -> Option<u64> {
    let count = at.number(key).filter(|count| *count > 0)?;
    reader.take(at, key);
    Some(count)
}

/// The pods of a role, which a TrainJob cannot do without: a placeholder that is still to be
/// replaced would become some other number.
pub(super) fn pod_count<'a>(
    role: &Cursor<'a>,
    key: &str,
    reader: &mut Reader<'a>,
) -> Result<Option<u64>, ConvertError> {
    match number(role, key, reader) {
        None if role.text(key).is_some() => Err(unusable(role, key, "a number of pods")),
        count => Ok(count),
    }
}

/// Processes per node: a keyword or a number.
pub(super) fn processes<'a>(at: &Cursor<'a>, key: &str, reader: &mut Reader<'a>, draft: &mut Draft) {
    let Some(field) = at.get(key) else { return };
    if let Some(count) = number(at, key, reader) {
        draft.trainer.insert("numProcPerNode".into(), count.into());
        return;
    }
    match field.value.as_str() {
        // This is the default of a TrainJob.
        Some("auto" | "gpu") => reader.done(&field),
        _ => reader
            .note(&field, "set spec.trainer.numProcPerNode: without it there is one process for each GPU, else one"),
    }
}

/// `runPolicy`, and the fields that older versions have next to it.
pub(super) fn run_policy<'a>(spec: &Cursor<'a>, reader: &mut Reader<'a>, draft: &mut Draft) {
    for policy in spec.get("runPolicy").iter().chain([spec]) {
        for key in ["suspend", "activeDeadlineSeconds", "ttlSecondsAfterFinished"] {
            if let Some(value) = reader.take(policy, key) {
                draft.spec.insert(key.into(), value);
            }
        }
        managed_by(policy, reader, draft);
        if let Some(limit) = policy.get("backoffLimit") {
            restarts(&limit, reader, draft);
        }
        let Some(gang) = policy.get("schedulingPolicy") else { continue };
        if let Some(seconds) = gang.number("scheduleTimeoutSeconds").filter(|seconds| (1..=86_400).contains(seconds)) {
            reader.take(&gang, "scheduleTimeoutSeconds");
            draft.spec.insert("gangPolicy".into(), json!({"scheduleTimeoutSeconds": seconds}));
        }
        if let Some(class) = gang.get("priorityClass") {
            let spec = draft.template.entry("spec").or_insert_with(|| json!({}));
            if spec.get("priorityClassName").is_none_or(|known| known == class.value) {
                spec["priorityClassName"] = class.value.clone();
                reader.done(&class);
            } else {
                reader.note(&class, "the priorityClassName of the template is taken");
            }
        }
    }
}

/// Maximum restarts of the group, from the first field that sets them.
pub(super) fn restarts(field: &Cursor<'_>, reader: &mut Reader<'_>, draft: &mut Draft) {
    match field.value.as_u64() {
        Some(_) if draft.failure_policy.contains_key("maxRestarts") => {
            reader.note(field, "another field sets failurePolicy.maxRestarts already");
        }
        Some(count) if count <= MAX_RESTARTS => {
            draft.failure_policy.insert("maxRestarts".into(), count.into());
            reader.done(field);
        }
        _ => reader.note(field, "failurePolicy.maxRestarts is at most 1000: set it"),
    }
}

pub(super) fn managed_by<'a>(at: &Cursor<'a>, reader: &mut Reader<'a>, draft: &mut Draft) {
    let Some(field) = at.get("managedBy") else { return };
    if field.value == "kueue.x-k8s.io/multikueue" {
        reader.done(&field);
        draft.spec.insert("managedBy".into(), field.value.clone());
    } else {
        reader.note(&field, "the default is Switchyard's own controller");
    }
}

/// The restart policy of a role.
pub(super) fn restart_policy<'a>(role: &Cursor<'a>, reader: &mut Reader<'a>, draft: &mut Draft) {
    let Some(field) = role.get("restartPolicy") else { return };
    match field.value.as_str() {
        Some("Never") => reader.done(&field),
        Some("ExitCode") => {
            let codes: Vec<i32> = PERMANENT.collect();
            let rule = json!({"action": "FailTrainJob", "onExitCodes": {"operator": "In", "values": codes}});
            draft.failure_policy.insert("rules".into(), json!([rule]));
            reader.done(&field);
        }
        _ => {
            let what = "a pod is not restarted alone: the whole group restarts, up to failurePolicy.maxRestarts times";
            reader.note(&field, what);
        }
    }
}
