//! A pod under construction, and helpers for its parts: volumes, mounts, variables.

use super::Defaults;
use crate::job::GangPod;
use k8s_openapi::api::core::v1::{Container, EnvVar, PodSpec, Volume, VolumeMount};
use serde_json::json;

/// A pod under construction, with the operator's settings.
pub(super) struct PodBuilder<'a> {
    pub pod: GangPod<'a>,
    pub defaults: &'a Defaults,
}

/// Mounts a volume, replacing other mounts of this path.
pub(super) fn mount(container: &mut Container, volume: &str, path: &str, read_only: bool) {
    let mounts = container.volume_mounts.get_or_insert_default();
    mounts.retain(|mount| mount.mount_path.trim_end_matches('/') != path);
    let (name, mount_path) = (volume.to_string(), path.to_string());
    mounts.push(VolumeMount { name, mount_path, read_only: Some(read_only), ..VolumeMount::default() });
}

/// Adds volumes, replacing volumes of the same names.
pub(super) fn add_volumes(spec: &mut PodSpec, mut ours: Vec<Volume>) {
    if !ours.is_empty() {
        let volumes = spec.volumes.get_or_insert_default();
        volumes.retain(|volume| !ours.iter().any(|our| our.name == volume.name));
        volumes.append(&mut ours);
    }
}

/// A variable that takes its value from an annotation: placement is decided after the pod is
/// created, when only annotations can still change.
pub(super) fn from_annotation(name: &str, annotation: &str) -> EnvVar {
    let field_path = format!("metadata.annotations['{annotation}']");
    let source = json!({"name": name, "valueFrom": {"fieldRef": {"fieldPath": field_path}}});
    serde_json::from_value(source).expect("invariant: an environment variable")
}

pub(super) fn mounts(container: &Container, path: &str) -> bool {
    container.volume_mounts.iter().flatten().any(|mount| mount.mount_path.trim_end_matches('/') == path)
}
