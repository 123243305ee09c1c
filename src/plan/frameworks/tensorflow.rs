//! TensorFlow: `TF_CONFIG` for `tf.distribute`. One task per pod drives all GPUs of its pod. In a
//! job without roles all pods are workers, and worker 0 is the chief.

use super::{Entry, GangPod, set};
use serde_json::{Map, json};

/// Roles that are task types of the cluster. Only they are listed: an evaluator is no part of it
/// (tf.estimator.train_and_evaluate; kubeflow/training-operator pkg/controller.v1/tensorflow).
const CLUSTER: [&str; 3] = ["chief", "worker", "ps"];
/// Task type of a pod that only evaluates.
const EVALUATOR: &str = "evaluator";

pub(super) fn environment(pod: &GangPod<'_>) -> Vec<Entry> {
    let workers: Vec<String> = (0..pod.nodes()).map(|rank| pod.address(rank)).collect();
    let config = json!({"cluster": {"worker": workers}, "task": {"type": "worker", "index": pod.node_rank}});
    vec![set("TF_CONFIG", config, "one worker per node, in the order of the placement")]
}

/// The variable in a job with roles. Pods of other roles do not have it.
pub(super) fn of_roles(pod: &GangPod<'_>) -> Vec<Entry> {
    let own = pod.role().filter(|role| CLUSTER.contains(&role.name.as_str()) || role.name == EVALUATOR);
    let Some(own) = own else { return Vec::new() };
    let listed = pod.valid.roles.iter().filter(|role| CLUSTER.contains(&role.name.as_str()));
    let cluster: Map<_, _> = listed
        .map(|role| {
            let hosts: Vec<String> = role.node_ranks().map(|rank| pod.address(rank)).collect();
            (role.name.clone(), hosts.into())
        })
        .collect();
    let task = json!({"type": own.name, "index": pod.node_rank - own.first_node});
    vec![set("TF_CONFIG", json!({"cluster": cluster, "task": task}), "task types are the names of the roles")]
}
