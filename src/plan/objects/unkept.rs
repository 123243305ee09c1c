//! Files of a job that end with its pods, or that its containers lack.

use super::{Defaults, pod};
use crate::job::{Invalid, ValidJob, trainer};
use k8s_openapi::api::core::v1::{Container, PodSpec, Volume};
use std::path::Path;
use switchyard_crds::{Framework, TrainJob};
use switchyard_worker_contract::pod as paths;

/// What is at a path of the trainer container.
enum Storage<'a> {
    /// A volume that can outlive the pod.
    Lasting,
    /// A volume that ends with the pod, and its type.
    Temporary(&'a str, &'static str),
    /// A volume of objects that others write, such as a ConfigMap.
    ReadOnly,
    /// The file system of the container.
    Image,
}

/// Of a job of our engine: checkpoints and models that no volume keeps, and data that neither a
/// volume nor the user's image provides. The job is valid all the same.
pub fn unkept_files(job: &TrainJob, valid: &ValidJob) -> Vec<Invalid> {
    if job.spec.trainer.framework != Framework::Switchyard {
        return Vec::new();
    }
    let spec = pod(job, valid, &Defaults::default(), 1, 0).spec.unwrap_or_default();
    let Some(trainer) = trainer(&spec) else { return Vec::new() };
    let storage = |path: &str| storage(&spec, trainer, path);
    let mut found = Vec::new();
    let mut warn = |field: &str, got: String, expected: &str| {
        found.push(Invalid { field: field.into(), got, expected: expected.into() });
    };
    let mut keeps_checkpoints = false;
    if let Some(checkpoint) = &job.spec.checkpoint {
        let at = storage(&checkpoint.path);
        keeps_checkpoints = matches!(at, Storage::Lasting);
        if let Some(place) = at.ending() {
            let expected = "a volume that outlives the pod (spec.checkpoint.volumeName): checkpoints are lost with it";
            warn("spec.checkpoint.path", format!("`{}` {place}", checkpoint.path), expected);
        }
    }
    if let Some(place) = storage(paths::RUN_DIR).ending().filter(|_| !keeps_checkpoints) {
        let expected = "spec.checkpoint on a volume that outlives the pod, or this directory on one: the trained model \
                        is lost with it";
        warn("spec.template.spec.volumes", format!("`{}` {place}", paths::RUN_DIR), expected);
    }
    let data = job.spec.engine.as_ref().and_then(|engine| engine.data.path.as_deref());
    if let Some(path) = data {
        let has_image = trainer.image.as_deref() != Some(Defaults::default().worker_image.as_str());
        let is_filled = spec.init_containers.as_ref().is_some_and(|containers| !containers.is_empty());
        let expected = match storage(path) {
            Storage::Image if !has_image => "a volume mounted there, or spec.trainer.image with these files",
            Storage::Temporary(..) if !is_filled => "a volume with these files: this one is empty when the pod starts",
            _ => return found,
        };
        let place = storage(path).ending().unwrap_or_default();
        warn("spec.engine.data.path", format!("`{path}` {place}"), expected);
    }
    found
}

impl Storage<'_> {
    /// Where files end with the pod; `None` if they outlive it.
    fn ending(&self) -> Option<String> {
        match self {
            Storage::Lasting => None,
            Storage::Temporary(name, kind) => Some(format!("on volume {name}, {kind}")),
            Storage::ReadOnly => Some("on a volume that the pod cannot write".to_owned()),
            Storage::Image => Some("on no volume".to_owned()),
        }
    }
}

/// The storage of the innermost mount around a path.
fn storage<'a>(spec: &'a PodSpec, trainer: &Container, path: &str) -> Storage<'a> {
    let mounts = trainer.volume_mounts.iter().flatten();
    let covering = mounts.filter(|mount| Path::new(path).starts_with(&mount.mount_path));
    let innermost = covering.max_by_key(|mount| Path::new(&mount.mount_path).components().count());
    let volume = innermost.and_then(|mount| spec.volumes.iter().flatten().find(|volume| volume.name == mount.name));
    volume.map_or(Storage::Image, of_volume)
}

fn of_volume(volume: &Volume) -> Storage<'_> {
    let is_read_only = volume.config_map.is_some()
        || volume.secret.is_some()
        || volume.downward_api.is_some()
        || volume.projected.is_some()
        || volume.image.is_some();
    match volume {
        Volume { empty_dir: Some(_), .. } => Storage::Temporary(&volume.name, "an emptyDir"),
        Volume { ephemeral: Some(_), .. } => Storage::Temporary(&volume.name, "an ephemeral volume"),
        _ if is_read_only => Storage::ReadOnly,
        _ => Storage::Lasting,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::{Value, json};

    fn model() -> String {
        "spec.template.spec.volumes: got `/var/lib/switchyard` on volume switchyard-run, an emptyDir; expected \
         spec.checkpoint on a volume that outlives the pod, or this directory on one: the trained model is lost with it"
            .to_owned()
    }

    fn warnings(change: impl FnOnce(&mut Value)) -> Vec<String> {
        let model = json!({"type": "MLP", "mlp": {"hiddenSizes": [8]}});
        let claim = json!({"name": "store", "persistentVolumeClaim": {"claimName": "store"}});
        let mut job = json!({
            "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "metadata": {"name": "kept"},
            "spec": {
                "engine": {"model": model, "data": {"format": "CSV", "path": "/data/a.csv"}, "steps": 9},
                "template": {"spec": {
                    "volumes": [claim, {"name": "scratch", "emptyDir": {}}],
                    "containers": [{"name": "trainer", "volumeMounts": [{"name": "store", "mountPath": "/data"}]}],
                }},
            },
        });
        change(&mut job["spec"]);
        let job = switchyard_crds::validate::train_job(&job).unwrap_or_else(|faults| panic!("{faults:?}"));
        let valid = crate::validate(&job).unwrap_or_else(|faults| panic!("{faults:?}"));
        unkept_files(&job, &valid).iter().map(ToString::to_string).collect()
    }

    fn save(spec: &mut Value, volume: Option<&str>, path: &str) {
        spec["checkpoint"] = json!({"path": path});
        if let Some(volume) = volume {
            spec["checkpoint"]["volumeName"] = volume.into();
        }
    }

    /// Regression: the trained model was in an emptyDir, and nothing warned of it.
    #[test]
    fn checkpoints_and_models_that_end_with_the_pod_are_named() {
        assert_eq!(warnings(|_| {}), [model()], "without checkpoints");
        let lost = "a volume that outlives the pod (spec.checkpoint.volumeName): checkpoints are lost with it";
        let checkpoint = |place: &str| format!("spec.checkpoint.path: got {place}; expected {lost}");
        assert!(warnings(|spec| save(spec, Some("store"), "/ckpt")).is_empty());
        assert!(warnings(|spec| save(spec, None, "/data/ckpt")).is_empty(), "a directory of a mounted volume");
        let elsewhere = warnings(|spec| save(spec, None, "/database"));
        assert_eq!(elsewhere, [checkpoint("`/database` on no volume"), model()]);
        assert_eq!(warnings(|spec| save(spec, None, "ckpt"))[0], checkpoint("`ckpt` on no volume"));
        let scratch = warnings(|spec| save(spec, Some("scratch"), "/ckpt"));
        assert_eq!(scratch, [checkpoint("`/ckpt` on volume scratch, an emptyDir"), model()]);
        let kept = warnings(|spec| {
            let mounts = &mut spec["template"]["spec"]["containers"][0]["volumeMounts"];
            mounts.as_array_mut().unwrap().push(json!({"name": "store", "mountPath": "/var/lib/switchyard"}));
        });
        assert!(kept.is_empty(), "{kept:?}");
    }

    #[test]
    fn data_that_the_pod_lacks_are_named() {
        let missing = |image: Option<&str>| {
            warnings(|spec| {
                save(spec, Some("store"), "/ckpt");
                spec["engine"]["data"]["path"] = "/missing".into();
                if let Some(image) = image {
                    spec["trainer"] = json!({"image": image});
                }
            })
        };
        let expected = "a volume mounted there, or spec.trainer.image with these files";
        assert_eq!(missing(None), [format!("spec.engine.data.path: got `/missing` on no volume; expected {expected}")]);
        assert!(missing(Some("worker-with-data:1")).is_empty());
        let empty = |init_containers: Value| {
            warnings(|spec| {
                save(spec, Some("store"), "/ckpt");
                spec["template"]["spec"]["containers"][0]["volumeMounts"][0]["name"] = "scratch".into();
                spec["template"]["spec"]["initContainers"] = init_containers;
            })
        };
        let expected = "a volume with these files: this one is empty when the pod starts";
        let found =
            format!("spec.engine.data.path: got `/data/a.csv` on volume scratch, an emptyDir; expected {expected}");
        assert_eq!(empty(json!([])), [found]);
        assert!(empty(json!([{"name": "download", "image": "curl:8"}])).is_empty());
    }
}
