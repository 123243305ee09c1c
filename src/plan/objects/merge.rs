//! Merges the user's template with Switchyard's settings: which value wins, with an explanation,
//! and settings that cannot be merged.

use super::Defaults;
use super::builder::PodBuilder;
use super::pod::{CONFIG, KEY, mounted};
use crate::frameworks::{self, Entry, Source};
use crate::job::{GangPod, Invalid, Role, ValidJob, field_of, trainer};
use std::collections::BTreeSet;
use std::ops::Range;
use switchyard_crds::names::TRAINER;
use switchyard_crds::{Framework, TrainJob, labels};
use switchyard_worker_contract::pod as paths;

/// A field that both the user and Switchyard set.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MergeConflict {
    /// A template setting that is ignored.
    #[error("{field}: {theirs} is ignored; {ours}")]
    NotTaken {
        /// Path of the field.
        field: String,
        /// The template's value.
        theirs: String,
        /// The value used instead, and why.
        ours: String,
    },
    /// A framework variable that the user overrides.
    #[error("{field}: the value is taken; Switchyard would set it: {consequence}")]
    Taken {
        /// Path of the field.
        field: String,
        /// Consequence for the job.
        consequence: &'static str,
    },
}

/// Every ignored template setting, and every framework variable that the user overrides.
pub fn conflicts(job: &TrainJob, valid: &ValidJob, defaults: &Defaults) -> Vec<MergeConflict> {
    if valid.roles.is_empty() {
        return conflicts_of(job, valid, defaults, 0..valid.request.nodes);
    }
    let of_role = |role: &Role| {
        let found = conflicts_of(&role.job, valid, defaults, role.node_ranks());
        found.into_iter().map(|conflict| conflict.in_role(&role.name)).collect::<Vec<_>>()
    };
    let mut all: Vec<MergeConflict> = Vec::new();
    for conflict in valid.roles.iter().flat_map(of_role) {
        // The template is the same for all roles.
        if !all.contains(&conflict) {
            all.push(conflict);
        }
    }
    all
}

impl MergeConflict {
    /// The conflict of a role's own job, as a conflict of the whole job.
    fn in_role(self, role: &str) -> MergeConflict {
        match self {
            MergeConflict::NotTaken { field, theirs, ours } => {
                MergeConflict::NotTaken { field: field_of(role, &field), theirs, ours }
            }
            MergeConflict::Taken { field, consequence } => {
                MergeConflict::Taken { field: field_of(role, &field), consequence }
            }
        }
    }
}

/// Conflicts of pods with the same template. `job` is the job that their role would be alone, and
/// `ranks` are their node ranks.
fn conflicts_of(job: &TrainJob, valid: &ValidJob, defaults: &Defaults, ranks: Range<u32>) -> Vec<MergeConflict> {
    let mut found = taken_variables(job, valid, &ranks);
    let Some(template) = &job.spec.template else { return found };
    let mut conflict = |field: String, theirs: String, ours: &str| {
        found.push(MergeConflict::NotTaken { field: format!("spec.template.{field}"), theirs, ours: ours.to_string() });
    };
    let own_prefix = labels::GROUP;
    for label in template.metadata.iter().flat_map(|meta| meta.labels.iter().flatten()) {
        if label.0.starts_with(own_prefix) {
            conflict(
                format!("metadata.labels[{}]", label.0),
                format!("`{}`", label.1),
                "labels with this prefix are Switchyard's",
            );
        }
    }
    let Some(spec) = &template.spec else { return found };
    if let Some(policy) = spec.restart_policy.as_ref().filter(|policy| *policy != "Never") {
        conflict(
            "spec.restartPolicy".into(),
            policy.clone(),
            "Never: a rank cannot restart alone, the whole group restarts",
        );
    }
    if valid.request.nodes > 1 {
        for (field, value) in [("hostname", &spec.hostname), ("subdomain", &spec.subdomain)] {
            if let Some(value) = value {
                conflict(
                    format!("spec.{field}"),
                    format!("`{value}`"),
                    "the name of the pod, by which ranks find rank 0",
                );
            }
        }
    }
    let is_ours = job.spec.trainer.framework == Framework::Switchyard;
    if is_ours || frameworks::uses_mpirun(job) {
        for volume in spec.volumes.iter().flatten() {
            if [CONFIG, KEY].contains(&volume.name.as_str()) {
                conflict(format!("spec.volumes[{}]", volume.name), "the volume".into(), "the name is Switchyard's");
            }
        }
    }
    let Some(trainer) = trainer(spec) else { return found };
    let at = |field: &str| format!("spec.containers[{TRAINER}].{field}");
    if let (Some(theirs), Some(ours)) = (&trainer.image, &job.spec.trainer.image)
        && theirs != ours
    {
        conflict(at("image"), format!("`{theirs}`"), "spec.trainer.image is taken");
    }
    let has = |list: &Option<Vec<String>>| list.as_ref().is_some_and(|list| !list.is_empty());
    if is_ours {
        for (field, list) in [("command", &trainer.command), ("args", &trainer.args)] {
            if has(list) {
                conflict(at(field), "it".into(), "framework Switchyard starts the worker");
            }
        }
        for mount in trainer.volume_mounts.iter().flatten() {
            let path = mount.mount_path.trim_end_matches('/');
            if [paths::CONFIG_DIR, paths::KEY_DIR].contains(&path) {
                conflict(at(&format!("volumeMounts[{path}]")), "the mount".into(), "Switchyard mounts its own there");
            }
            if job.spec.checkpoint.as_ref().and_then(mounted).is_some_and(|(name, at)| at == path && name != mount.name)
            {
                conflict(
                    at(&format!("volumeMounts[{path}]")),
                    "the mount".into(),
                    "spec.checkpoint.volumeName is mounted there",
                );
            }
        }
    }
    if let Some(path) = trainer.termination_message_path.as_ref().filter(|path| *path != paths::TERMINATION_LOG) {
        conflict(
            at("terminationMessagePath"),
            format!("`{path}`"),
            "the cause of a failure is read from the default path",
        );
    }
    let builder = PodBuilder { pod: GangPod::new(job, valid, 1, ranks.start), defaults };
    let ours: BTreeSet<String> = builder.environment().into_iter().map(|entry| entry.name).collect();
    let users: BTreeSet<&str> = job.spec.trainer.env.iter().map(|entry| entry.name.as_str()).collect();
    for entry in trainer.env.iter().flatten() {
        if ours.contains(&entry.name) {
            conflict(
                at(&format!("env[{}]", entry.name)),
                "the value".into(),
                "Switchyard sets it: it identifies the rank",
            );
        } else if users.contains(entry.name.as_str()) {
            conflict(at(&format!("env[{}]", entry.name)), "the value".into(), "spec.trainer.env is taken");
        }
    }
    found
}

/// Variables of the framework's launcher that the user sets.
fn taken_variables(job: &TrainJob, valid: &ValidJob, ranks: &Range<u32>) -> Vec<MergeConflict> {
    let environment = |node_rank| frameworks::environment(&GangPod::new(job, valid, 1, node_rank));
    let (first, last) = (environment(ranks.start), environment(ranks.end.saturating_sub(1)));
    let consequence = |name: &str| {
        let source_in =
            |entries: &[Entry]| entries.iter().find(|entry| entry.name == name).map(|entry| entry.source.clone());
        let sources = (source_in(&first), source_in(&last));
        match sources {
            (None, None) => None,
            (first, last) if ranks.len() > 1 && (first != last || matches!(first, Some(Source::Field(_)))) => {
                Some("it differs from node to node, and with a single value the nodes cannot find each other")
            }
            _ => Some("keeping it correct is now up to you"),
        }
    };
    let trainer_env = job.spec.trainer.env.iter().map(|entry| ("spec.trainer", &entry.name));
    let spec = job.spec.template.as_ref().and_then(|template| template.spec.as_ref());
    let template_env = spec.and_then(trainer).and_then(|trainer| trainer.env.as_ref()).into_iter().flatten();
    let template_env = template_env.map(|entry| ("spec.template.spec.containers[trainer]", &entry.name));
    trainer_env
        .chain(template_env)
        .filter_map(|(at, name)| {
            let consequence = consequence(name)?;
            Some(MergeConflict::Taken { field: format!("{at}.env[{name}]"), consequence })
        })
        .collect()
}

/// Template settings that would make the merged pod invalid for any API server.
pub fn faults(job: &TrainJob) -> Vec<Invalid> {
    let mut found = Vec::new();
    let mut fault = |field: String, got: String, expected: &str| {
        found.push(Invalid { field, got, expected: expected.to_string() });
    };
    let spec = job.spec.template.as_ref().and_then(|template| template.spec.clone()).unwrap_or_default();
    let image = trainer(&spec).and_then(|trainer| trainer.image.as_ref()).or(job.spec.trainer.image.as_ref());
    if job.spec.trainer.framework != Framework::Switchyard && image.is_none() {
        let field = "spec.trainer.image".to_string();
        let expected = format!("an image: with framework {:?} there is no default", job.spec.trainer.framework);
        fault(field, "nothing".into(), &expected);
    }
    let init = spec.init_containers.as_deref().unwrap_or_default();
    if init.iter().any(|container| container.name == TRAINER) {
        let field = format!("spec.template.spec.initContainers[{TRAINER}]");
        fault(
            field,
            format!("an init container `{TRAINER}`"),
            "another name: it is reserved for the training container",
        );
    }
    for container in spec.containers.iter().filter(|container| container.name != TRAINER).chain(init) {
        if container.image.is_none() {
            let field = format!("spec.template.spec.containers[{}].image", container.name);
            fault(field, "nothing".into(), "an image");
        }
    }
    for (list, names) in [
        ("containers", spec.containers.iter().map(|container| container.name.clone()).collect::<Vec<_>>()),
        ("initContainers", init.iter().map(|container| container.name.clone()).collect()),
        ("volumes", spec.volumes.iter().flatten().map(|volume| volume.name.clone()).collect()),
    ] {
        let mut seen = BTreeSet::new();
        for name in names.iter().filter(|name| !seen.insert(name.as_str())) {
            fault(format!("spec.template.spec.{list}"), format!("`{name}` twice"), "names that occur once");
        }
    }
    if let Some((name, path)) = job.spec.checkpoint.as_ref().and_then(mounted) {
        let volumes: Vec<&str> = spec.volumes.iter().flatten().map(|volume| volume.name.as_str()).collect();
        if !volumes.contains(&name) || [CONFIG, KEY].contains(&name) {
            let known = if volumes.is_empty() { "it has none".to_string() } else { volumes.join(", ") };
            fault(
                "spec.checkpoint.volumeName".into(),
                format!("`{name}`"),
                &format!("a volume of spec.template.spec.volumes: {known}"),
            );
        }
        if ["", paths::CONFIG_DIR, paths::KEY_DIR, paths::RUN_DIR].contains(&path) {
            let got = format!("`{path}`");
            fault("spec.checkpoint.path".into(), got, "a directory that Switchyard does not use");
        }
    }
    if spec.node_name.is_some() {
        let field = "spec.template.spec.nodeName".to_string();
        fault(field, "a node".into(), "nothing: a pod with a node cannot be gated; use nodeSelector or nodeAffinity");
    }
    found
}
