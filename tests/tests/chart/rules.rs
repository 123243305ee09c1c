//! Invariants of the rendered objects for all values sets.

use crate::chart::{MONITORING, files};
use anyhow::Result;
use serde_json::Value;
use std::path::PathBuf;
use std::sync::OnceLock;
use switchyard_tests::chart::{objects, render};

/// The objects of every set of values, rendered once.
fn renderings() -> &'static [(String, Vec<Value>)] {
    static RENDERINGS: OnceLock<Vec<(String, Vec<Value>)>> = OnceLock::new();
    RENDERINGS.get_or_init(|| {
        let rendered = |(name, path, _): (String, PathBuf, _)| -> Result<_> {
            let arguments =
                [&["--set", "crds.enabled=false", "--values", path.to_str().unwrap()][..], &MONITORING].concat();
            Ok((name, objects(&render(&arguments)?)?))
        };
        files("values").into_iter().map(rendered).collect::<Result<_>>().unwrap_or_else(|error| panic!("{error:#}"))
    })
}

/// Faults in the rules of a role: a wildcard, read access to Secrets, write access to Nodes.
fn faults_of(role: &Value) -> Vec<String> {
    let words = |value: &Value| -> Vec<String> {
        value.as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_string).collect()
    };
    let mut faults = Vec::new();
    for rule in role["rules"].as_array().into_iter().flatten() {
        let (groups, resources, verbs) = (words(&rule["apiGroups"]), words(&rule["resources"]), words(&rule["verbs"]));
        let paths = words(&rule["nonResourceURLs"]);
        // A rule covers either resources in groups or URL paths.
        let lists = if paths.is_empty() { vec![&groups, &resources, &verbs] } else { vec![&paths, &verbs] };
        if lists.iter().any(|words| words.is_empty() || words.iter().any(|word| word.contains('*'))) {
            faults.push(format!("a wildcard: {rule}"));
        }
        let may = |resource: &str, allowed: &[&str]| {
            !resources.iter().any(|found| found == resource)
                || verbs.iter().all(|verb| allowed.contains(&verb.as_str()))
        };
        if !may("secrets", &["create"]) {
            faults.push(format!("more than to create Secrets: {rule}"));
        }
        if !may("nodes", &["get", "list", "watch"]) {
            faults.push(format!("Nodes are written: {rule}"));
        }
        if !may("gputopologies", &["get", "list", "watch", "create", "patch"]) {
            faults.push(format!("GPUTopologies are deleted: {rule}"));
        }
    }
    faults
}

#[test]
fn no_role_has_a_wildcard_or_reads_secrets() -> Result<()> {
    let mut roles = 0;
    for (name, objects) in renderings() {
        for role in objects.iter().filter(|object| matches!(object["kind"].as_str(), Some("Role" | "ClusterRole"))) {
            roles += 1;
            let faults = faults_of(role);
            assert!(faults.is_empty(), "{name}: {}: {faults:?}", role["metadata"]["name"]);
        }
    }
    assert!(roles > 30, "{roles}");
    for faulty in [
        r#"{"rules": [{"apiGroups": [""], "resources": ["*"], "verbs": ["get"]}]}"#,
        r#"{"rules": [{"nonResourceURLs": ["/*"], "verbs": ["get"]}]}"#,
        r#"{"rules": [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["create", "get"]}]}"#,
        r#"{"rules": [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["patch"]}]}"#,
        r#"{"rules": [{"apiGroups": ["training.switchyard.dev"], "resources": ["gputopologies"], "verbs": ["delete"]}]}"#,
    ] {
        assert_eq!(faults_of(&serde_json::from_str(faulty)?).len(), 1, "{faulty}");
    }
    Ok(())
}

/// Selectors are immutable, so the API server would refuse an upgrade with other labels.
#[test]
fn selectors_contain_only_constants() -> Result<()> {
    for (name, objects) in renderings() {
        for object in
            objects.iter().filter(|object| matches!(object["kind"].as_str(), Some("Deployment" | "DaemonSet")))
        {
            let selector = object["spec"]["selector"]["matchLabels"].as_object().unwrap();
            let keys: Vec<&String> = selector.keys().collect();
            let expected = ["app.kubernetes.io/component", "app.kubernetes.io/instance", "app.kubernetes.io/name"];
            assert_eq!(keys, expected, "{name}");
            let labels = &object["spec"]["template"]["metadata"]["labels"];
            assert!(selector.iter().all(|(key, value)| labels[key] == *value), "{name}: {labels}");
        }
    }
    Ok(())
}

/// Node folders are mounted read-only, and no container is privileged.
#[test]
fn agents_have_minimal_read_only_access_to_their_node() -> Result<()> {
    let allowed = [
        "/sys",
        "/proc",
        "/dev",
        "/var/lib/kubelet/pod-resources",
        "/var/lib/kubelet/config.yaml",
        "/run/nvidia/driver",
    ];
    for (name, objects) in renderings() {
        for agent in objects.iter().filter(|object| object["kind"] == "DaemonSet") {
            let pod = &agent["spec"]["template"]["spec"];
            let container = &pod["containers"][0];
            for volume in pod["volumes"].as_array().unwrap() {
                let Some(path) = volume["hostPath"]["path"].as_str() else { continue };
                assert!(allowed.contains(&path) || path.starts_with("/var/lib/scene"), "{name}: {path}");
                let mounts = container["volumeMounts"].as_array().unwrap();
                let mount = mounts.iter().find(|mount| mount["name"] == volume["name"]).unwrap();
                assert_eq!(mount["readOnly"], true, "{name}: {path}");
            }
            let security = &container["securityContext"];
            assert_eq!(security["privileged"], false, "{name}");
            assert_eq!(security["capabilities"]["drop"], serde_json::json!(["ALL"]), "{name}");
            // Reading the ACS registers is opt-in and needs this capability.
            let added = if name == "gpu-nodes" { serde_json::json!(["SYS_ADMIN"]) } else { Value::Null };
            assert_eq!(security["capabilities"]["add"], added, "{name}");
            assert_eq!(security["readOnlyRootFilesystem"], true, "{name}");
        }
    }
    Ok(())
}

/// User values win, and each name appears once, because server-side apply refuses duplicates.
#[test]
fn environment_variables_are_merged_by_name() -> Result<()> {
    let (_, objects) = renderings().iter().find(|(name, _)| name == "everywhere").unwrap();
    let env = |kind: &str| {
        let object = objects.iter().find(|object| object["kind"] == kind).unwrap();
        object["spec"]["template"]["spec"]["containers"][0]["env"].as_array().unwrap().clone()
    };
    for kind in ["Deployment", "DaemonSet"] {
        let mut names: Vec<String> =
            env(kind).iter().map(|entry| entry["name"].as_str().unwrap().to_string()).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count, "{kind}");
    }
    let fixed =
        |kind: &str, name: &str| env(kind).iter().any(|entry| entry["name"] == name && entry["value"] == "fixed");
    assert!(fixed("Deployment", "POD_NAME") && fixed("DaemonSet", "NODE_NAME"));
    Ok(())
}

/// A digest takes precedence over a tag, and the registry prefix applies to every image.
#[test]
fn images_are_found_without_the_internet() -> Result<()> {
    let (_, objects) = renderings().iter().find(|(name, _)| name == "private-registry").unwrap();
    let mut found = Vec::new();
    for object in objects {
        let container = &object["spec"]["template"]["spec"]["containers"][0];
        found.extend(container["image"].as_str().map(str::to_string));
        let arguments = container["args"].as_array().into_iter().flatten();
        found.extend(
            arguments.filter_map(|argument| argument.as_str()?.strip_prefix("--worker-image=")).map(str::to_string),
        );
    }
    assert_eq!(found.len(), 3, "{found:?}");
    for image in found {
        assert!(image.starts_with("registry.example.com/ml/") && image.contains("@sha256:"), "{image}");
    }
    Ok(())
}
