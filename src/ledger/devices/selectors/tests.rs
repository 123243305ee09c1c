//! Expressions with their results in Kubernetes.
#![allow(clippy::unwrap_used)]

use super::*;
use serde_json::json;

const DRIVER: &str = "gpu.nvidia.com";

fn facts() -> Facts {
    let device: Device = serde_json::from_value(json!({
        "name": "gpu-0",
        "attributes": {
            "uuid": {"string": "GPU-0"},
            "gpu.nvidia.com/productName": {"string": "NVIDIA H100"},
            "index": {"int": 3},
            "mig": {"bool": false},
            "driverVersion": {"version": "550.54.15+build"},
            "resource.kubernetes.io/pcieRoot": {"string": "pci0000:01"},
        },
        "capacity": {"memory": {"value": "80Gi"}},
    }))
    .unwrap();
    Facts::of(&device)
}

fn result(expression: &str) -> Result<bool, String> {
    let selector = Selector::new(expression);
    selector.fault().map_or_else(|| Ok(selector.matches(DRIVER, &facts())), Err)
}

#[test]
fn selectors_match_as_in_kubernetes() {
    let attributes = r#"device.attributes["gpu.nvidia.com"]"#;
    for (expression, expected) in [
        ("true", true),
        ("device.driver == 'gpu.nvidia.com'", true),
        ("device.driver != 'gpu.nvidia.com' || false", false),
        ("ATTRIBUTES.uuid == 'GPU-0'", true),
        ("ATTRIBUTES['uuid'] in ['GPU-1', 'GPU-0']", true),
        ("ATTRIBUTES.uuid in ['GPU-1']", false),
        ("ATTRIBUTES.productName.lowerAscii().matches('^.*h[12]00$')", true),
        ("ATTRIBUTES.productName.startsWith('NVIDIA') && !ATTRIBUTES.productName.endsWith('A100')", true),
        ("ATTRIBUTES.productName.contains('A100')", false),
        ("ATTRIBUTES.index > 2 && ATTRIBUTES.index <= 3", true),
        ("ATTRIBUTES.mig", false),
        ("ATTRIBUTES.mig ? false : true", true),
        ("device.attributes['resource.kubernetes.io'].pcieRoot == 'pci0000:01'", true),
        // Missing names and domains.
        ("has(ATTRIBUTES.model)", false),
        ("!has(device.attributes['example.com'].model)", true),
        ("'model' in ATTRIBUTES || 'uuid' in ATTRIBUTES", true),
        ("ATTRIBUTES.?model.orValue('none') == 'none'", true),
        ("ATTRIBUTES.?uuid.orValue('') == 'GPU-0'", true),
        ("device.attributes['example.com'].?model.hasValue()", false),
        // An error is no match, unless the other operand decides.
        ("ATTRIBUTES.model == 'x'", false),
        ("!(ATTRIBUTES.model == 'x')", false),
        ("ATTRIBUTES.model == 'x' || true", true),
        ("ATTRIBUTES.uuid > 2", false),
        ("ATTRIBUTES.uuid == 2", false),
        ("ATTRIBUTES.uuid != 2", true),
        ("ATTRIBUTES.uuid", false),
        // Quantities and versions.
        ("device.capacity['gpu.nvidia.com'].memory.compareTo(quantity('80Gi')) == 0", true),
        ("device.capacity['gpu.nvidia.com'].memory.isGreaterThan(quantity('80Gi'))", false),
        ("device.capacity['gpu.nvidia.com'].memory == quantity('81920Mi')", true),
        ("ATTRIBUTES.driverVersion.isLessThan(semver('550.60.0'))", true),
        ("ATTRIBUTES.driverVersion.compareTo(semver('550.54.15')) == 0", true),
        ("ATTRIBUTES.driverVersion == semver('550.54.15')", true),
    ] {
        let expression = expression.replace("ATTRIBUTES", attributes);
        assert_eq!(result(&expression), Ok(expected), "{expression}");
    }
}

#[test]
fn selectors_that_could_differ_from_kubernetes_are_not_evaluated() {
    for (expression, reason) in [
        ("cel.bind(a, device.attributes['d'], a.x)", "bind() is not evaluated"),
        ("device.attributes['d'].x.y", "only device.driver"),
        ("device.attributes.size() > 0", "size() is not evaluated"),
        ("device.attributes[device.driver].uuid == ''", "only device.driver"),
        ("device.allowMultipleAllocations", "only device.driver"),
        ("['a'].exists(x, x == 'a')", "macros other than has()"),
        ("device == device", "device is not evaluated as a whole"),
        ("semver('1.2.3+b').isLessThan(semver('1.2.4'))", "semver() is not evaluated"),
        ("1.5 < 2.0", "a literal"),
        ("device.attributes['d'].x + 1 > 2", "_+_() is not evaluated"),
        ("device.", "Syntax error"),
    ] {
        let fault = result(expression).unwrap_err();
        assert!(fault.starts_with(expression) && fault.contains(reason), "{expression}: {fault}");
        assert!(Selector::new(expression).matches(DRIVER, &facts()), "{expression}");
    }
}

/// Kubernetes evaluates no expression for such a device.
#[test]
fn a_device_with_an_unknown_attribute_type_matches_nothing() {
    for attribute in [json!({}), json!({"version": "five"})] {
        let device = json!({"name": "gpu-0", "attributes": {"a": attribute}});
        let facts = Facts::of(&serde_json::from_value(device).unwrap());
        assert!(!Selector::new("true").matches(DRIVER, &facts), "{attribute}");
    }
}
