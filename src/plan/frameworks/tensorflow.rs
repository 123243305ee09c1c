//! TensorFlow: `TF_CONFIG` for `tf.distribute.MultiWorkerMirroredStrategy`. One worker per node
//! drives all GPUs of its pod. Worker 0 is the chief if there is no other.

use super::{Entry, GangPod, set};
use serde_json::json;

pub(super) fn environment(pod: &GangPod<'_>) -> Vec<Entry> {
    let workers: Vec<String> = (0..pod.nodes()).map(|rank| format!("{}:{}", pod.host(rank), pod.port())).collect();
    let config = json!({"cluster": {"worker": workers}, "task": {"type": "worker", "index": pod.node_rank}});
    vec![set("TF_CONFIG", config, "one worker per node, in the order of the placement")]
}
