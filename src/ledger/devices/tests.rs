//! What drivers and claims say, in orders that watches show them in.
#![allow(clippy::unwrap_used)]

use super::*;
use serde_json::json;

const DRIVER: &str = "gpu.nvidia.com";

/// A slice of a node with one GPU.
fn slice(name: &str, pool: &str, node: &str) -> ResourceSlice {
    let device = json!({"name": "gpu-0", "attributes": {"uuid": {"string": format!("GPU-{node}")}}});
    serde_json::from_value(json!({"metadata": {"name": name}, "spec": {
        "driver": DRIVER, "nodeName": node, "devices": [device],
        "pool": {"name": pool, "generation": 1, "resourceSliceCount": 1},
    }}))
    .unwrap()
}

/// A claim that got the GPUs of these pools.
fn claim(pools: &[&str]) -> ResourceClaim {
    let result = |pool: &&str| json!({"request": "gpus", "driver": DRIVER, "pool": pool, "device": "gpu-0"});
    let results: Vec<_> = pools.iter().map(result).collect();
    serde_json::from_value(json!({
        "metadata": {"name": "c", "uid": "c"}, "spec": {"devices": {}},
        "status": {"allocation": {"devices": {"results": results}}},
    }))
    .unwrap()
}

/// A watch shows the last of several changes only: freed and allocated again elsewhere may be one change.
#[test]
fn a_claim_that_moved_is_not_looked_for_in_its_old_pool() {
    let (mut devices, mut usage) = (Devices::default(), Usage::default());
    for node in ["a", "b"] {
        devices.apply_slice(&slice(node, node, node), DRIVER, &mut usage);
    }
    devices.apply_claim(&claim(&["a"]), &mut usage);
    assert_eq!(devices.allocated("c"), Some(vec!["GPU-a".to_string()]));
    devices.apply_claim(&claim(&["b"]), &mut usage);
    assert_eq!(devices.allocated("c"), Some(vec!["GPU-b".to_string()]));
    devices.delete_claim("c", &mut usage);
    assert_eq!(devices.allocated("c"), None);
    devices.apply_slice(&slice("a", "a", "a"), DRIVER, &mut usage);
    assert!(devices.by_pool.is_empty() && devices.claims.is_empty());
}

/// A driver that starts again publishes its GPUs under another name, before or after the old slice goes.
#[test]
fn a_slice_that_goes_takes_only_what_it_offers_itself() {
    let (mut devices, mut usage) = (Devices::default(), Usage::default());
    devices.apply_slice(&slice("old", "a", "a"), DRIVER, &mut usage);
    devices.apply_slice(&slice("new", "a", "a"), DRIVER, &mut usage);
    devices.delete_slice("old", &mut usage);
    devices.apply_claim(&claim(&["a"]), &mut usage);
    assert_eq!(devices.allocated("c"), Some(vec!["GPU-a".to_string()]));
}
