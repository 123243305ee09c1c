//! Resource amounts as Kubernetes writes and counts them: CPUs, bytes, devices.

use std::fmt;
use std::sync::Arc;

/// Resource of which every pod takes one. It limits the number of pods on a node.
pub const PODS: &str = "pods";

/// Amounts by resource name, in thousandths of the resource's unit (cores, bytes, devices). A
/// missing name means zero.
///
/// Sorted by name. A node has about five names, mostly of different lengths. Comparing them one by
/// one is several times faster than a tree lookup, and every plan reads several amounts of every
/// node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Resources(Vec<(Arc<str>, i64)>);

impl Resources {
    /// Names with an amount.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(name, _)| &**name)
    }

    /// An amount in thousandths; 0 if absent.
    pub fn get(&self, name: &str) -> i64 {
        self.0.iter().find(|(known, _)| **known == *name).map_or(0, |(_, amount)| *amount)
    }

    /// Returns the amount of a resource, inserting zero if it is absent.
    fn entry(&mut self, name: &Arc<str>) -> &mut i64 {
        let place = self.0.binary_search_by(|(known, _)| known.cmp(name)).unwrap_or_else(|place| {
            self.0.insert(place, (Arc::clone(name), 0));
            place
        });
        &mut self.0[place].1
    }

    /// Removes one resource.
    pub fn without(mut self, name: &str) -> Resources {
        self.0.retain(|(known, _)| **known != *name);
        self
    }

    /// Parses Kubernetes quantities by name. An invalid quantity counts as zero; the API server
    /// accepts none.
    pub fn read<'a>(quantities: impl IntoIterator<Item = (&'a str, &'a str)>) -> Resources {
        let mut read = Resources::default();
        for (name, text) in quantities {
            *read.entry(&name.into()) = thousandths(text);
        }
        read
    }

    /// Adds the pod slot that a pod takes on its node.
    pub fn with_one_pod(mut self) -> Resources {
        *self.entry(&PODS.into()) = 1000;
        self
    }

    /// Sum, name by name.
    pub fn plus(&self, other: &Resources) -> Resources {
        self.merge(other, i64::saturating_add)
    }

    /// Difference, name by name. It is negative where the pods of a node request more than the node
    /// has.
    pub fn less(&self, other: &Resources) -> Resources {
        self.merge(other, i64::saturating_sub)
    }

    /// Maximum, name by name.
    pub fn max(&self, other: &Resources) -> Resources {
        self.merge(other, i64::max)
    }

    /// The amounts of `other`, and these for names that it lacks.
    pub fn overridden_by(&self, other: &Resources) -> Resources {
        self.merge(other, |_, amount| amount)
    }

    fn merge(&self, other: &Resources, operation: fn(i64, i64) -> i64) -> Resources {
        let mut result = self.clone();
        for (name, amount) in &other.0 {
            let before = result.entry(name);
            *before = operation(*before, *amount);
        }
        result
    }

    /// Formats an amount the way users write it.
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
    /// Omits the pod slot, because every pod takes exactly one.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts: Vec<String> = self
            .0
            .iter()
            .filter(|(name, _)| **name != *PODS)
            .map(|(name, amount)| format!("{name} {}", Resources::amount(name, *amount)))
            .collect();
        f.write_str(if parts.is_empty() { "one pod" } else { "" })?;
        f.write_str(&parts.join(", "))
    }
}

fn thousandths(text: &str) -> i64 {
    // Rounds up, as Kubernetes does; a float holds every whole number up to 9e15 exactly, and `as`
    // saturates.
    parse_quantity(text).map_or(0, |value| (value * 1000.0).ceil() as i64)
}

/// Parses a Kubernetes quantity
/// (<https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/>).
pub fn parse_quantity(text: &str) -> Option<f64> {
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
    use super::*;

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

    #[test]
    fn subtraction_undoes_addition() {
        let [a, b] = ["1", "3"].map(|cpu| Resources::read([("cpu", cpu)]));
        assert_eq!(a.plus(&b).less(&b), a);
        assert_eq!(a.less(&b).get("cpu"), -2000);
    }
}
