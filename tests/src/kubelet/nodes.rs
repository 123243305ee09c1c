//! Node objects.

use super::Shared;
use anyhow::Result;
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::Node;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Creates all nodes, in the Ready state.
pub(super) async fn register(shared: &Shared) -> Result<()> {
    let width = shared.options.nodes.max(1).to_string().len();
    let names = (0..shared.options.nodes).map(|number| format!("{}-{number:0width$}", shared.options.prefix));
    let names: Vec<String> = names.collect();
    shared.state().nodes.extend(names.iter().cloned());
    if shared.options.selector.is_some() {
        return Ok(());
    }
    futures::stream::iter(names.into_iter().map(Ok))
        .try_for_each_concurrent(super::MAX_WRITES, |name| async move { create_node(shared, &name).await })
        .await?;
    // New nodes are tainted until the controller manager sees that they are Ready. Without a
    // controller manager, nothing else removes the taint.
    let api = Api::<Node>::all(shared.client.clone());
    let tainted =
        |node: &Node| node.spec.as_ref().is_some_and(|spec| spec.taints.as_ref().is_some_and(|t| !t.is_empty()));
    let stream = futures::stream::iter(api.list(&Default::default()).await?.items.into_iter().filter(tainted));
    stream
        .for_each_concurrent(super::MAX_WRITES, |node| {
            let api = api.clone();
            async move {
                let name = node.metadata.name.unwrap_or_default();
                let _ =
                    api.patch(&name, &PatchParams::default(), &Patch::Merge(json!({"spec": {"taints": null}}))).await;
            }
        })
        .await;
    Ok(())
}

/// Creates one node, in the Ready state.
pub(super) async fn create_node(shared: &Shared, name: &str) -> Result<()> {
    let api = Api::<Node>::all(shared.client.clone());
    let node: Node = serde_json::from_value(json!({
        "metadata": {"name": name, "labels": {
            "kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64",
        }},
    }))?;
    match api.create(&PostParams::default(), &node).await {
        Err(kube::Error::Api(status)) if status.code == 409 => {}
        other => drop(other?),
    }
    let capacity: BTreeMap<&str, &str> =
        shared.options.capacity.iter().map(|(name, amount)| (name.as_str(), amount.as_str())).collect();
    let port = shared.state().port;
    let status = json!({"status": {
        "capacity": capacity, "allocatable": capacity,
        "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}, {"type": "Hostname", "address": name}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
        "conditions": conditions("True"),
    }});
    api.patch_status(name, &PatchParams::default(), &Patch::Merge(status)).await?;
    Ok(())
}

fn conditions(status: &str) -> Value {
    let now = k8s_openapi::jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    let reason = match status {
        "True" => "KubeletReady",
        "False" => "KubeletNotReady",
        _ => "NodeStatusUnknown",
    };
    json!([{"type": "Ready", "status": status, "reason": reason, "message": "bench", "lastHeartbeatTime": now, "lastTransitionTime": now}])
}

/// Sets the `Ready` condition, like a kubelet, or like the node lifecycle controller for a node
/// that has stopped reporting.
pub(super) async fn set_ready(client: &Client, node: &str, status: &str) -> Result<()> {
    let patch = json!({"status": {"conditions": conditions(status)}});
    Api::<Node>::all(client.clone()).patch_status(node, &PatchParams::default(), &Patch::Strategic(patch)).await?;
    Ok(())
}
