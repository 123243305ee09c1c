//! Limits the size of a manifest. Every pod repeats most of it, so a manifest of one megabyte for
//! thousands of nodes would fill etcd, and hundreds of them would fill the controller's memory, for
//! all namespaces.

use super::{Invalid, count, pods};
use switchyard_crds::{MAX_NODES, TrainJob};

/// Maximum size of a job's spec as JSON, in bytes.
const MAX_SPEC_BYTES: u64 = 256 << 10;
/// Maximum size of the spec repeated in all pods of a job, in bytes. etcd holds 2 GiB by default.
const MAX_POD_BYTES: u64 = 256 << 20;

/// Fault of a job that is too large.
pub fn too_large(job: &TrainJob) -> Option<Invalid> {
    // Serializing a spec cannot fail.
    let bytes = serde_json::to_vec(&job.spec).map_or(u64::MAX, |json| json.len() as u64);
    if bytes > MAX_SPEC_BYTES {
        let expected = format!("at most {MAX_SPEC_BYTES}: put files and scripts into ConfigMaps or images");
        return Some(Invalid { field: "spec".into(), got: format!("{bytes} bytes"), expected });
    }
    // A number that is out of range is reported as a different fault.
    let nodes = u64::from(count(pods(job).min(MAX_NODES)));
    let repeated = bytes.saturating_mul(nodes);
    (repeated > MAX_POD_BYTES).then(|| Invalid {
        field: "spec".into(),
        got: format!("{bytes} bytes, which each of {nodes} pods repeats: {repeated} bytes"),
        expected: format!("at most {MAX_POD_BYTES} bytes in all pods"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use switchyard_crds::validate as schema;

    fn fault(nodes: u32, value: usize) -> Option<String> {
        let env = json!([{"name": "A", "value": "x".repeat(value)}]);
        let trainer = json!({"framework": "Plain", "image": "i", "numNodes": nodes, "env": env});
        let document = json!({
            "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "metadata": {"name": "a"}, "spec": {"trainer": trainer},
        });
        let job: TrainJob =
            serde_json::from_value(document.clone()).unwrap_or_else(|_| schema::train_job(&document).unwrap());
        too_large(&job).map(|fault| fault.to_string())
    }

    #[test]
    fn the_spec_size_is_bounded_alone_and_over_all_pods() {
        assert_eq!(fault(1, 250_000), None);
        assert_eq!(fault(4096, 60_000), None);
        let alone = fault(1, 300_000).unwrap();
        assert!(alone.starts_with("spec: got 300") && alone.contains("expected at most 262144"), "{alone}");
        let many = fault(4096, 100_000).unwrap();
        assert!(many.contains("which each of 4096 pods repeats") && many.contains("at most 268435456 bytes"), "{many}");
    }
}
