//! Amounts of resources as Kubernetes counts them: what a pod asks for, what a node has.

use crate::topology::rates::gigabytes;
use k8s_openapi::api::core::v1::{Container, PodSpec, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use std::collections::BTreeMap;
use std::fmt;

/// Resource of which every pod takes one: nodes bound the number of their pods.
const PODS: &str = "pods";

/// Amounts by resource name, in thousandths of the resource's unit (cores, bytes, devices). A name that is absent has none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Resources(BTreeMap<String, i64>);

impl Resources {
    /// The names that have an amount.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// An amount, thousandths.
    pub fn get(&self, name: &str) -> i64 {
        self.0.get(name).copied().unwrap_or(0)
    }

    /// The same without one of them.
    pub fn without(mut self, name: &str) -> Resources {
        self.0.remove(name);
        self
    }

    /// Reads quantities; what is no quantity counts as none, since the API server accepts no such thing.
    pub fn of_quantities(quantities: &BTreeMap<String, Quantity>) -> Resources {
        Resources(quantities.iter().map(|(name, quantity)| (name.clone(), thousandths(&quantity.0))).collect())
    }

    /// What the scheduler counts for a pod: all containers together, or the largest init container if that is more, and the
    /// overhead; init containers that keep running count with the containers
    /// (<https://kubernetes.io/docs/concepts/workloads/pods/sidecar-containers/#resource-sharing-within-containers>).
    pub fn of_pod(spec: &PodSpec) -> Resources {
        let mut steady = Resources::default();
        let mut peak = Resources::default();
        for container in spec.init_containers.iter().flatten() {
            let amount = of_container(container);
            if container.restart_policy.as_deref() == Some("Always") {
                steady = steady.plus(&amount);
                peak = peak.max(&steady);
            } else {
                peak = peak.max(&steady.plus(&amount));
            }
        }
        for container in &spec.containers {
            steady = steady.plus(&of_container(container));
        }
        let mut sum = steady.max(&peak);
        if let Some(overhead) = &spec.overhead {
            sum = sum.plus(&Resources::of_quantities(overhead));
        }
        sum.0.insert(PODS.to_string(), 1000);
        sum
    }

    /// The sum.
    pub fn plus(&self, other: &Resources) -> Resources {
        self.merge(other, i64::saturating_add)
    }

    /// The difference; it may be negative, where a node has less than its pods ask for.
    pub fn less(&self, other: &Resources) -> Resources {
        self.merge(other, i64::saturating_sub)
    }

    fn max(&self, other: &Resources) -> Resources {
        self.merge(other, i64::max)
    }

    fn merge(&self, other: &Resources, operation: fn(i64, i64) -> i64) -> Resources {
        let mut result = self.clone();
        for (name, amount) in &other.0 {
            let before = result.0.entry(name.clone()).or_insert(0);
            *before = operation(*before, *amount);
        }
        result
    }

    /// An amount as people write it.
    pub fn amount(name: &str, thousandths: i64) -> String {
        let whole = thousandths / 1000;
        if name.contains("memory") || name.contains("storage") || name.starts_with("hugepages") {
            let mib = whole >> 20;
            return if mib >= 1024 && mib % 1024 == 0 { format!("{}Gi", mib / 1024) } else { format!("{mib}Mi") };
        }
        if thousandths % 1000 == 0 { whole.to_string() } else { format!("{thousandths}m") }
    }
}

impl fmt::Display for Resources {
    /// Without the one pod that every pod is.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts: Vec<String> = self
            .0
            .iter()
            .filter(|(name, _)| *name != PODS)
            .map(|(name, amount)| format!("{name} {}", Resources::amount(name, *amount)))
            .collect();
        f.write_str(if parts.is_empty() { "one pod" } else { "" })?;
        f.write_str(&parts.join(", "))
    }
}

/// Requests; a limit without a request counts as one, as the API server makes it one.
fn of_container(container: &Container) -> Resources {
    let ResourceRequirements { limits, requests, .. } = container.resources.clone().unwrap_or_default();
    let mut amounts = limits.unwrap_or_default();
    amounts.extend(requests.unwrap_or_default());
    Resources::of_quantities(&amounts)
}

fn thousandths(text: &str) -> i64 {
    // Up, as Kubernetes rounds; a float holds every whole number up to 9e15 exactly, and `as` saturates.
    parse_quantity(text).map_or(0, |value| (value * 1000.0).ceil() as i64)
}

/// A rate as a Kubernetes quantity, bytes per second; `None`: it is none.
pub fn bytes_per_second(rate: &Quantity) -> Option<f64> {
    parse_quantity(&rate.0)
}

/// The same in gigabytes per second, as people write them.
pub fn gigabytes_per_second(rate: &Quantity) -> Option<String> {
    bytes_per_second(rate).map(|rate| gigabytes((rate / 1e6) as u32))
}

/// The value of a Kubernetes quantity (<https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/>).
pub(crate) fn parse_quantity(text: &str) -> Option<f64> {
    let suffixes: [(&str, f64); 15] = [
        ("Ki", 1024.0),
        ("Mi", 1024.0_f64.powi(2)),
        ("Gi", 1024.0_f64.powi(3)),
        ("Ti", 1024.0_f64.powi(4)),
        ("Pi", 1024.0_f64.powi(5)),
        ("Ei", 1024.0_f64.powi(6)),
        ("n", 1e-9),
        ("u", 1e-6),
        ("m", 1e-3),
        ("k", 1e3),
        ("M", 1e6),
        ("G", 1e9),
        ("T", 1e12),
        ("P", 1e15),
        ("E", 1e18),
    ];
    let (number, factor) = suffixes
        .iter()
        .find_map(|(suffix, factor)| text.strip_suffix(suffix).map(|number| (number, *factor)))
        .unwrap_or((text, 1.0));
    let value = number.parse::<f64>().ok()? * factor;
    value.is_finite().then_some(value)
}

#[cfg(test)]
mod tests {
    use super::{Resources, parse_quantity};
    use k8s_openapi::api::core::v1::PodSpec;
    use serde_json::{Value, json};

    #[test]
    fn quantities() {
        for (text, value) in
            [("2", 2.0), ("500m", 0.5), ("4Gi", 4294967296.0), ("1.5k", 1500.0), ("1e3", 1000.0), ("2E", 2e18)]
        {
            assert_eq!(parse_quantity(text), Some(value), "{text}");
        }
        for text in ["", "Gi", "4GiB", "nan", "inf"] {
            assert_eq!(parse_quantity(text), None, "{text}");
        }
    }

    fn of(spec: Value) -> Resources {
        Resources::of_pod(&serde_json::from_value::<PodSpec>(spec).unwrap())
    }

    #[test]
    fn a_pod_asks_for_what_its_containers_ask_for_together_or_the_largest_init_container() {
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

    #[test]
    fn sums_and_differences_go_back() {
        let [a, b] =
            ["1", "3"].map(|cpu| of(json!({"containers": [{"name": "a", "resources": {"limits": {"cpu": cpu}}}]})));
        assert_eq!(a.plus(&b).less(&b), a);
        assert_eq!(a.less(&b).get("cpu"), -2000);
    }
}
