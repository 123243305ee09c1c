//! Slices, claims and taint rules, in the orders in which watches can report them.
#![allow(clippy::unwrap_used)]

use super::*;
use k8s_openapi::api::resource::v1::DeviceSelector;
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

/// A claim to which the GPUs of these pools are allocated.
fn claim(pools: &[&str]) -> ResourceClaim {
    let result = |pool: &&str| json!({"request": "gpus", "driver": DRIVER, "pool": pool, "device": "gpu-0"});
    let results: Vec<_> = pools.iter().map(result).collect();
    serde_json::from_value(json!({
        "metadata": {"name": "c", "uid": "c"}, "spec": {"devices": {}},
        "status": {"allocation": {"devices": {"results": results}}},
    }))
    .unwrap()
}

/// A watch can merge several changes into one, such as a deallocation and a new allocation
/// elsewhere.
#[test]
fn a_moved_claim_is_removed_from_its_old_pool() {
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

/// A restarted driver publishes its GPUs in a new slice, before or after the old one is deleted.
#[test]
fn deleting_a_slice_removes_only_its_own_devices() {
    let (mut devices, mut usage) = (Devices::default(), Usage::default());
    devices.apply_slice(&slice("old", "a", "a"), DRIVER, &mut usage);
    devices.apply_slice(&slice("new", "a", "a"), DRIVER, &mut usage);
    devices.delete_slice("old", &mut usage);
    devices.apply_claim(&claim(&["a"]), &mut usage);
    assert_eq!(devices.allocated("c"), Some(vec!["GPU-a".to_string()]));
}

/// Regression test: a gang was placed on a GPU whose partition was in use. The scheduler refused
/// the GPU, and the gang was placed there again after 10 s.
#[test]
fn a_partition_in_use_blocks_only_its_gpu() {
    let (mut devices, mut usage) = (Devices::default(), Usage::default());
    let device = |name: &str, uuid: &str, set: &str| {
        let counters = json!([{"counterSet": set, "counters": {"memory": {"value": "10Gi"}}}]);
        json!({"name": name, "attributes": {"uuid": {"string": uuid}}, "consumesCounters": counters})
    };
    let mut offered = slice("s", "pool", "n");
    offered.spec.devices = serde_json::from_value(json!([
        device("gpu-0", "GPU-0", "gpu-0-counters"),
        device("gpu-0-part-0", "MIG-0", "gpu-0-counters"),
        device("gpu-0-part-1", "MIG-1", "gpu-0-counters"),
        device("gpu-1", "GPU-1", "gpu-1-counters"),
    ]))
    .unwrap();
    devices.apply_slice(&offered, DRIVER, &mut usage);
    let allocated = |device: &str| {
        let result = json!({"request": "gpus", "driver": DRIVER, "pool": "pool", "device": device});
        let mut claim = claim(&[]);
        claim.status = serde_json::from_value(json!({"allocation": {"devices": {"results": [result]}}})).unwrap();
        claim
    };
    let taken = |usage: &Usage| usage.share(&taker("c")).map(|share| share.gpus.clone()).unwrap_or_default();
    devices.apply_claim(&allocated("gpu-0-part-0"), &mut usage);
    assert_eq!(taken(&usage), ["MIG-0", "GPU-0", "MIG-1"]);
    assert_eq!(devices.allocated("c"), Some(vec!["MIG-0".to_string()]), "the pod has only its partition");
    devices.apply_claim(&allocated("gpu-1"), &mut usage);
    assert_eq!(taken(&usage), ["GPU-1"]);
}

/// A device tainted by a driver or an administrator is not offered until the taint is removed.
#[test]
fn a_device_with_a_blocking_taint_is_not_offered() {
    for (effect, is_offered) in [("NoSchedule", false), ("NoExecute", false), ("None", true)] {
        let (mut devices, mut usage) = (Devices::default(), Usage::default());
        let mut tainted = slice("s", "pool", "n");
        let taint = json!([{"key": "example.com/ill", "effect": effect}]);
        tainted.spec.devices.as_mut().unwrap()[0].taints = serde_json::from_value(taint).unwrap();
        let offered = |usage: &Usage| usage.offered("n").map(Iterator::count);
        devices.apply_slice(&tainted, DRIVER, &mut usage);
        assert_eq!(offered(&usage), Some(usize::from(is_offered)), "{effect}: still by claims");
        devices.apply_slice(&slice("s", "pool", "n"), DRIVER, &mut usage);
        assert_eq!(offered(&usage), Some(1), "{effect}");
        devices.delete_slice("s", &mut usage);
        assert_eq!(offered(&usage), None, "{effect}");
    }
}

/// Regression test: a gang was placed on devices that a rule taints. The scheduler refused them,
/// and the gang was placed there again after 10 s.
#[test]
fn a_device_tainted_by_a_rule_is_not_offered_in_either_order() {
    let cel = |rest: &str| json!({"cel": {"expression": format!("device.attributes['{DRIVER}'].{rest}")}});
    let of_b: Vec<DeviceSelector> = serde_json::from_value(json!([cel("uuid == 'GPU-b'")])).unwrap();
    let rule = |selector: serde_json::Value, effect: &str| {
        DeviceRule::of(&json!({"deviceSelector": selector, "taint": {"key": "k", "effect": effect}}))
    };
    for (selector, effect, nodes) in [
        (json!({}), "NoSchedule", &["a", "b"][..]),
        (json!({"pool": "a"}), "NoExecute", &["a"]),
        (json!({"driver": DRIVER, "pool": "b", "device": "gpu-0"}), "NoSchedule", &["b"]),
        (json!({"device": "gpu-1"}), "NoSchedule", &[]),
        (json!({"driver": "other"}), "NoSchedule", &[]),
        (json!({"pool": "a"}), "None", &[]),
        (json!({"selectors": [cel("uuid == 'GPU-b'")]}), "NoSchedule", &["b"]),
        (json!({"pool": "a", "selectors": [cel("uuid == 'GPU-b'")]}), "NoSchedule", &[]),
        (json!({"selectors": [cel("uuid != 'GPU-b'"), cel("uuid != 'GPU-a'")]}), "NoSchedule", &[]),
        // A selector that is not evaluated taints all devices that the other fields select.
        (json!({"pool": "b", "selectors": [cel("uuid + 'x' == ''")]}), "NoSchedule", &["b"]),
        (json!({"deviceClassName": "of-b"}), "NoSchedule", &["b"]),
        (json!({"deviceClassName": "missing"}), "NoSchedule", &[]),
        (serde_json::Value::Null, "NoSchedule", &[]),
    ] {
        let (mut devices, mut usage) = (Devices::default(), Usage::default());
        let parsed = rule(selector.clone(), effect).unwrap();
        let set = |devices: &mut Devices, usage: &mut Usage, rule: &Option<DeviceRule>| {
            devices.set_rule("r", rule.clone(), usage).into_iter().collect::<Vec<_>>()
        };
        devices.set_class("of-b", Some(Selector::all(&of_b)), &mut usage);
        devices.apply_slice(&slice("a", "a", "a"), DRIVER, &mut usage);
        devices.apply_slice(&slice("b", "b", "b"), DRIVER, &mut usage);
        assert_eq!(set(&mut devices, &mut usage, &parsed), nodes, "{selector} {effect}");
        assert_eq!(set(&mut devices, &mut usage, &parsed), [""; 0], "unchanged");
        // A restarted driver publishes its slice while the rule applies.
        devices.apply_slice(&slice("c", "a", "a"), DRIVER, &mut usage);
        assert_eq!(usage.offered("a").unwrap().count() == 0, nodes.contains(&"a"), "{selector} {effect}");
        let mut freed = set(&mut devices, &mut usage, &None);
        freed.dedup();
        assert_eq!(freed, nodes, "{selector} {effect}");
    }
    assert!(DeviceRule::of(&json!({"taint": 7})).is_err());
}

/// A class and a rule that names it can be created in either order, and the class can change.
#[test]
fn a_rule_follows_its_device_class() {
    let (mut devices, mut usage) = (Devices::default(), Usage::default());
    let class = |expression: &str| {
        let selectors = json!([{"cel": {"expression": expression}}]);
        Some(Selector::all(&serde_json::from_value::<Vec<DeviceSelector>>(selectors).unwrap()))
    };
    devices.set_class("gpus", class("true"), &mut usage);
    let spec = json!({"deviceSelector": {"deviceClassName": "gpus"}, "taint": {"key": "k", "effect": "NoSchedule"}});
    devices.set_rule("r", DeviceRule::of(&spec).unwrap(), &mut usage);
    devices.apply_slice(&slice("a", "a", "a"), DRIVER, &mut usage);
    let mut set = |class: Option<Vec<Selector>>| {
        let nodes = devices.set_class("gpus", class, &mut usage);
        (nodes.len(), usage.offered("a").map(Iterator::count))
    };
    assert_eq!(set(class("true")), (0, Some(0)), "unchanged");
    assert_eq!(set(class("device.driver == 'other'")), (1, Some(1)));
    assert_eq!(set(class("device.driver == 'gpu.nvidia.com'")), (1, Some(0)));
    assert_eq!(set(None), (1, Some(1)));
}
