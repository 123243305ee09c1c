//! Labels and annotations for Kueue.

use super::{defaults, engine, job, pod};
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;
use switchyard_crds::DeviceAllocation;

#[test]
fn the_pods_of_an_attempt_are_one_group_with_one_role() {
    for framework in ["Switchyard", "Plain", "Torch", "MPI", "JAX", "TensorFlow", "Paddle"] {
        let is_ours = framework == "Switchyard";
        let limits = if is_ours { json!({"cpu": "8"}) } else { json!({"cpu": "8", "nvidia.com/gpu": 4}) };
        let mut spec = json!({
            "trainer": {"framework": framework, "image": "i", "numNodes": 3, "resourcesPerNode": {"limits": limits}},
            "template": {"spec": {"hostNetwork": true}},
        });
        if is_ours {
            spec["engine"] = engine();
        } else {
            spec["trainer"]["command"] = json!(["train"]);
        }
        let (mut job, valid) = job("a-job-with-a-name-that-is-as-long-as-names-may-be1", spec);
        let labels =
            [("kueue.x-k8s.io/queue-name", "team-a"), ("kueue.x-k8s.io/priority-class", "high"), ("mine", "1")];
        job.metadata.labels = Some(labels.map(|(name, value)| (name.into(), value.into())).into());
        for way in [DeviceAllocation::DevicePlugin, DeviceAllocation::Claims] {
            job.status.get_or_insert_default().device_allocation = Some(way);
            let pods: Vec<Pod> = (0..3).map(|rank| pod(&job, &valid, &defaults(), 7, rank)).collect();
            for pod in &pods {
                let label = |name: &str| pod.metadata.labels.as_ref().unwrap().get(name).map(String::as_str);
                assert_eq!(label("kueue.x-k8s.io/queue-name"), Some("team-a"));
                assert_eq!(label("kueue.x-k8s.io/priority-class"), Some("high"));
                assert_eq!(label("mine"), None, "only what is Kueue's");
                let group = label("kueue.x-k8s.io/pod-group-name").unwrap();
                assert_eq!(group, "a-job-with-a-name-that-is-as-long-as-nam-5d3f8a52-7");
                let annotations = pod.metadata.annotations.as_ref().unwrap();
                assert_eq!(annotations["kueue.x-k8s.io/pod-group-total-count"], "3");
                assert_eq!(annotations["kueue.x-k8s.io/retriable-in-group"], "false");
                assert_eq!(annotations["kueue.x-k8s.io/role-hash"], "main");
            }
        }
    }
}

#[test]
fn a_job_without_a_queue_has_no_kueue_labels() {
    let (job, valid) = job("a", json!({"trainer": {"framework": "Plain", "image": "i", "numNodes": 2}}));
    let text = serde_json::to_string(&pod(&job, &valid, &defaults(), 1, 0)).unwrap();
    assert!(!text.contains("kueue"), "{text}");
}
