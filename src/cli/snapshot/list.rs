//! Lists the objects of a cluster that affect placement, as close to one moment as an API server
//! allows.

use crate::connect::error_message;
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimTemplate, ResourceSlice};
use k8s_openapi::api::scheduling::v1::PriorityClass;
use k8s_openapi::api::storage::v1::StorageClass;
use kube::core::ObjectList;
use kube::{Api, Client, Resource};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::fmt::Debug;
use switchyard_crds::gpu_topology::GPUTopology;
use switchyard_crds::labels::JOB_UID;
use switchyard_crds::{PlacementSlice, TrainJob};
use switchyard_ledger::offline::KINDS;

/// Lists the objects that affect placement, in a fixed order and without irrelevant fields. `new`
/// is a job that is not in the cluster yet.
///
/// # Errors
/// The server refused a list: its kind and the server's message.
pub(crate) async fn take(client: &Client, new: Option<&TrainJob>) -> Result<Vec<Value>, String> {
    let mut items = Vec::new();
    macro_rules! list {
        ($($type:ty),*) => { $( items.extend(of_kind::<$type>(client).await?); )* };
    }
    list!(Node, Pod, TrainJob, GPUTopology, ResourceSlice, ResourceClaim, PriorityClass);
    // Only large jobs have them.
    if items.iter().any(|item| item.pointer("/status/placement/slices").is_some()) {
        list!(PlacementSlice);
    }
    take_storage(client, &mut items, new).await;
    let text = |item: &Value, path: &str| item.pointer(path).and_then(Value::as_str).unwrap_or_default().to_string();
    items.sort_by_cached_key(|item| {
        let kind = KINDS.iter().position(|kind| item["kind"] == *kind);
        (kind, text(item, "/metadata/namespace"), text(item, "/metadata/name"))
    });
    Ok(items)
}

/// Adds the claims that jobs name, and the objects that restrict where these can be used. Without
/// permission to list them, volumes do not restrict nodes here.
async fn take_storage(client: &Client, items: &mut Vec<Value>, new: Option<&TrainJob>) {
    let names = |item: &Value, field: &str| {
        let spec = if item["kind"] == "Pod" { &item["spec"] } else { &item["spec"]["template"]["spec"] };
        spec[field].as_array().is_some_and(|named| !named.is_empty())
    };
    let new = serde_json::to_value(new).unwrap_or_default();
    let of_jobs = |field: &str| {
        let is_ours = |item: &&Value| item["kind"] == "TrainJob" || item["metadata"]["labels"][JOB_UID].is_string();
        items.iter().filter(is_ours).chain([&new]).any(|item| names(item, field))
    };
    let (volumes, claims) = (of_jobs("volumes"), of_jobs("resourceClaims"));
    macro_rules! list {
        ($wanted:expr, $($type:ty),*) => { if $wanted { $(
            match of_kind::<$type>(client).await {
                Ok(found) => items.extend(found),
                Err(error) => anstream::eprintln!("warning: {error}; where the volumes of pods can be used is not known"),
            }
        )* } };
    }
    list!(volumes, PersistentVolumeClaim, PersistentVolume, StorageClass);
    list!(claims, ResourceClaimTemplate);
}

/// The agent's report on one node; empty if there is none.
///
/// # Errors
/// The server's message.
pub(crate) async fn report(client: &Client, node: &str) -> Result<Vec<Value>, String> {
    let found = Api::<GPUTopology>::all(client.clone()).get_opt(node).await;
    let found = found.map_err(|error| format!("cannot get GPUTopology {node}: {}", error_message(&error)))?;
    found.into_iter().map(typed).collect()
}

async fn of_kind<K>(client: &Client) -> Result<Vec<Value>, String>
where
    K: Resource<DynamicType = ()> + DeserializeOwned + Serialize + Clone + Debug,
{
    let kind = K::kind(&());
    let api = Api::<K>::all(client.clone());
    let list: ObjectList<K> = api
        .list(&Default::default())
        .await
        .map_err(|error| format!("cannot list {kind} objects: {}", error_message(&error)))?;
    list.items.into_iter().map(typed).collect()
}

/// An object with its kind, without irrelevant fields.
fn typed<K: Resource<DynamicType = ()> + Serialize>(object: K) -> Result<Value, String> {
    let kind = K::kind(&());
    let mut value = serde_json::to_value(object).map_err(|error| format!("{kind}: {error}"))?;
    (value["apiVersion"], value["kind"]) = (json!(K::api_version(&())), json!(kind));
    strip(&mut value);
    Ok(value)
}

/// Whether an object is a pod that our chart created.
pub(super) fn is_our_pod(item: &Value) -> bool {
    item["kind"] == "Pod" && item["metadata"]["labels"]["app.kubernetes.io/name"] == "switchyard"
}

/// Removes irrelevant and confidential fields: environments of pods, images, annotations.
fn strip(object: &mut Value) {
    if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
        metadata
            .retain(|key, _| !matches!(key.as_str(), "managedFields" | "annotations" | "generateName" | "selfLink"));
    }
    if object["kind"] == "Node"
        && let Some(status) = object.get_mut("status").and_then(Value::as_object_mut)
    {
        status.retain(|key, _| matches!(key.as_str(), "allocatable" | "capacity" | "conditions"));
    }
    if object["kind"] == "StorageClass"
        && let Some(fields) = object.as_object_mut()
    {
        // These can name secrets.
        fields.retain(|key, _| !matches!(key.as_str(), "parameters" | "mountOptions"));
    }
    if object["kind"] == "PersistentVolume"
        && let Some(spec) = object.get_mut("spec").and_then(Value::as_object_mut)
    {
        // A volume's source can name servers and secrets.
        let decides = ["storageClassName", "accessModes", "capacity", "volumeMode", "nodeAffinity", "claimRef"];
        spec.retain(|key, _| decides.contains(&key.as_str()));
    }
    let is_ours = is_our_pod(object);
    let pod = match object["kind"].as_str() {
        Some("Pod") => object.get_mut("spec"),
        Some("TrainJob") => {
            // The user's program arguments can be secret.
            if let Some(trainer) = object.pointer_mut("/spec/trainer").and_then(Value::as_object_mut) {
                trainer.retain(|key, _| !matches!(key.as_str(), "env" | "command" | "args"));
            }
            object.pointer_mut("/spec/template/spec")
        }
        _ => None,
    };
    if let Some(spec) = pod.and_then(Value::as_object_mut) {
        // Only claims affect placement; other volumes can name servers and secrets.
        if let Some(volumes) = spec.get_mut("volumes").and_then(Value::as_array_mut) {
            volumes.retain(|volume| volume.get("persistentVolumeClaim").is_some());
        }
        for list in ["containers", "initContainers"] {
            let containers = spec.get_mut(list).and_then(Value::as_array_mut);
            for container in containers.into_iter().flatten().filter_map(Value::as_object_mut) {
                // Our own arguments are the controller's settings.
                container.retain(|key, _| {
                    matches!(key.as_str(), "name" | "resources" | "restartPolicy" | "image") || is_ours && key == "args"
                });
            }
        }
    }
}
