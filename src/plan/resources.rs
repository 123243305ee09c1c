//! Resource amounts of pods and nodes, read from Kubernetes objects.

use k8s_openapi::api::core::v1::{Container, PodSpec, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use std::collections::BTreeMap;
use switchyard_core::quantity::{Resources, parse_quantity};
use switchyard_core::rates::gigabytes;

/// Parses a map of quantities.
pub fn of_quantities(quantities: &BTreeMap<String, Quantity>) -> Resources {
    Resources::read(quantities.iter().map(|(name, quantity)| (name.as_str(), quantity.0.as_str())))
}

/// Resources that the scheduler counts for a pod: the sum of all containers, or the largest init
/// container if that is more, plus the overhead. Init containers that keep running (sidecars) count
/// as containers
/// (<https://kubernetes.io/docs/concepts/workloads/pods/sidecar-containers/#resource-sharing-within-containers>).
pub fn pod_requests(spec: &PodSpec) -> Resources {
    let mut steady = Resources::default();
    let mut peak = Resources::default();
    for container in spec.init_containers.iter().flatten() {
        let amount = container_requests(container);
        if container.restart_policy.as_deref() == Some("Always") {
            steady = steady.plus(&amount);
            peak = peak.max(&steady);
        } else {
            peak = peak.max(&steady.plus(&amount));
        }
    }
    for container in &spec.containers {
        steady = steady.plus(&container_requests(container));
    }
    let mut sum = steady.max(&peak);
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
    use super::pod_requests;
    use k8s_openapi::api::core::v1::PodSpec;
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
}
