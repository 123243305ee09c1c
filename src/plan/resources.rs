//! Resource amounts of pods and nodes, read from Kubernetes objects.

use k8s_openapi::api::core::v1::{Container, ContainerStatus, Pod, PodSpec, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use std::collections::BTreeMap;
use switchyard_core::quantity::{Resources, parse_quantity};
use switchyard_core::rates::gigabytes;

/// Parses a map of quantities.
pub fn of_quantities(quantities: &BTreeMap<String, Quantity>) -> Resources {
    Resources::read(quantities.iter().map(|(name, quantity)| (name.as_str(), quantity.0.as_str())))
}

/// Resources that the scheduler counts for a pod: the sum of all containers, or the largest init
/// container if that is more, or what the pod as a whole requests, plus the overhead. Init
/// containers that keep running (sidecars) count as containers
/// (<https://kubernetes.io/docs/concepts/workloads/pods/sidecar-containers/#resource-sharing-within-containers>).
pub fn pod_requests(spec: &PodSpec) -> Resources {
    sum(spec, container_requests)
}

/// As [`pod_requests`], for an existing pod: a container that is being resized in place holds the
/// larger of its old and new requests.
pub fn held_by(pod: &Pod) -> Resources {
    let Some(spec) = &pod.spec else { return Resources::default() };
    let statuses = pod.status.iter().flat_map(|status| {
        [&status.init_container_statuses, &status.container_statuses].into_iter().flatten().flatten()
    });
    let statuses: BTreeMap<&str, &ContainerStatus> = statuses.map(|status| (status.name.as_str(), status)).collect();
    sum(spec, |container| {
        let requests = container_requests(container);
        let Some(status) = statuses.get(container.name.as_str()) else { return requests };
        let actual = status.resources.as_ref().and_then(|resources| resources.requests.as_ref());
        [actual, status.allocated_resources.as_ref()]
            .into_iter()
            .flatten()
            .fold(requests, |most, amounts| most.max(&of_quantities(amounts)))
    })
}

fn sum(spec: &PodSpec, requests_of: impl Fn(&Container) -> Resources) -> Resources {
    let mut steady = Resources::default();
    let mut peak = Resources::default();
    for container in spec.init_containers.iter().flatten() {
        let amount = requests_of(container);
        if container.restart_policy.as_deref() == Some("Always") {
            steady = steady.plus(&amount);
            peak = peak.max(&steady);
        } else {
            peak = peak.max(&steady.plus(&amount));
        }
    }
    for container in &spec.containers {
        steady = steady.plus(&requests_of(container));
    }
    let mut sum = steady.max(&peak);
    if let Some(whole) = &spec.resources {
        let limits = whole.limits.iter().flatten().filter(|(name, _)| sum.get(name) == 0);
        let mut amounts: BTreeMap<String, Quantity> =
            limits.map(|(name, amount)| (name.clone(), amount.clone())).collect();
        amounts.extend(whole.requests.clone().unwrap_or_default());
        sum = sum.overridden_by(&of_quantities(&amounts));
    }
    if let Some(overhead) = &spec.overhead {
        sum = sum.plus(&of_quantities(overhead));
    }
    sum.with_one_pod()
}

/// Requests of a container. A limit without a request counts as a request, because the API server
/// defaults it.
fn container_requests(container: &Container) -> Resources {
    let ResourceRequirements { limits, requests, .. } = container.resources.clone().unwrap_or_default();
    let mut amounts = limits.unwrap_or_default();
    amounts.extend(requests.unwrap_or_default());
    of_quantities(&amounts)
}

/// A rate in bytes per second from a Kubernetes quantity, `None` if it cannot be parsed.
pub fn bytes_per_second(rate: &Quantity) -> Option<f64> {
    parse_quantity(&rate.0)
}

/// A rate formatted in gigabytes per second.
pub fn gigabytes_per_second(rate: &Quantity) -> Option<String> {
    bytes_per_second(rate).map(|rate| gigabytes((rate / 1e6) as u32))
}

#[cfg(test)]
mod tests {
    use super::{held_by, pod_requests};
    use k8s_openapi::api::core::v1::{Pod, PodSpec};
    use serde_json::{Value, json};
    use switchyard_core::quantity::Resources;

    fn of(spec: Value) -> Resources {
        pod_requests(&serde_json::from_value::<PodSpec>(spec).unwrap())
    }

    #[test]
    fn a_pod_requests_the_sum_of_its_containers_or_its_largest_init_container() {
        let container = |name: &str, cpu: &str| json!({"name": name, "resources": {"requests": {"cpu": cpu}}});
        let mut sidecar = container("side", "250m");
        sidecar["restartPolicy"] = "Always".into();
        let pod = of(json!({
            "initContainers": [sidecar, container("init", "4")],
            "containers": [container("a", "1"), {"name": "b", "resources": {"limits": {"cpu": "500m", "memory": "1Gi"}}}],
            "overhead": {"memory": "64Mi"},
        }));
        assert_eq!(pod.get("cpu"), 4250, "sidecar and init container are more than the 1750m of the containers");
        assert_eq!(pod.get("memory"), (1088 << 20) * 1000);
        assert_eq!(pod.get("pods"), 1000);
        assert_eq!(pod.to_string(), "cpu 4250m, memory 1088Mi");
        assert_eq!(of(json!({"containers": [container("a", "2")]})).to_string(), "cpu 2");
        assert_eq!(of(json!({"containers": []})).to_string(), "one pod");
    }

    /// The scheduler counts them since Kubernetes 1.34, so a node with room for the containers
    /// alone would be refused.
    #[test]
    fn requests_of_the_whole_pod_replace_those_of_its_containers() {
        let containers = json!([{"name": "a", "resources": {"requests": {"cpu": "1", "nvidia.com/gpu": "2"}}}]);
        let pod = of(json!({
            "containers": containers, "overhead": {"cpu": "500m"},
            "resources": {"requests": {"cpu": "4"}, "limits": {"cpu": "8", "memory": "2Gi"}},
        }));
        assert_eq!(pod.get("cpu"), 4500);
        assert_eq!(pod.get("memory"), (2048 << 20) * 1000, "no container requests memory: the limit counts");
        assert_eq!(pod.get("nvidia.com/gpu"), 2000);
        let limited = of(json!({"containers": containers, "resources": {"limits": {"cpu": "8"}}}));
        assert_eq!(limited.get("cpu"), 1000, "the containers' requests count, and not the limit");
    }

    #[test]
    fn a_container_that_is_resized_holds_the_larger_of_both_requests() {
        let pod = |requested: &str, actual: &str, allocated: &str| {
            let pod: Pod = serde_json::from_value(json!({
                "spec": {"containers": [{"name": "a", "resources": {"requests": {"cpu": requested}}}]},
                "status": {"containerStatuses": [{
                    "name": "a", "image": "", "imageID": "", "ready": true, "restartCount": 0,
                    "resources": {"requests": {"cpu": actual}}, "allocatedResources": {"cpu": allocated},
                }]},
            }))
            .unwrap();
            held_by(&pod).get("cpu")
        };
        assert_eq!(pod("4", "1", "1"), 4000, "it grows once there is room");
        assert_eq!(pod("1", "4", "4"), 4000, "it has not shrunk yet");
        assert_eq!(pod("1", "1", "2"), 2000);
        assert_eq!(pod("2", "2", "2"), 2000);
        assert_eq!(held_by(&Pod::default()), Resources::default());
    }
}
