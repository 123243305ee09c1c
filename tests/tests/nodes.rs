//! Real nodes: pods that reach each other, links with configured speeds, devices by claim and by
//! count, and no leftovers.
//!
//! Needs root, namespaces and cgroups: `cargo xtask cluster check` lists what a machine lacks.
//! `cargo xtask test` then skips these tests, except in CI.

mod agent;
mod command;
mod devices;
mod pods;

use anyhow::{Result, bail, ensure};
use serde_json::{Value, json};
use switchyard_tests::TIMEOUT;
use switchyard_tests::nodes::{Nodes, NodesOptions, TOOLS, missing};

/// Starts a cluster and prints its startup times.
fn cluster(nodes: u8) -> Result<Nodes> {
    if let Some(what) = missing()? {
        bail!("{what}");
    }
    Nodes::start(&NodesOptions::new(nodes), |part, time| println!("{part}: {:.1} s", time.as_secs_f64()))
}

/// Runs kubectl, which must succeed.
fn kubectl(nodes: &Nodes, arguments: &[&str]) -> Result<String> {
    let ended = nodes.plane.kubectl(arguments);
    ensure!(ended.code == Some(0), "kubectl {}: {}{}", arguments.join(" "), ended.stdout, ended.stderr);
    Ok(ended.stdout)
}

fn apply(nodes: &Nodes, object: &Value) -> Result<()> {
    let ended = nodes.plane.kubectl_with(&["apply", "-f", "-"], &object.to_string());
    ensure!(ended.code == Some(0), "{}", ended.stderr);
    Ok(())
}

/// A busybox pod on this node, or on any.
fn pod(name: &str, node: Option<&str>, script: &str) -> Value {
    let mut pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": name}},
        "spec": {"restartPolicy": "Never", "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "main", "image": TOOLS, "command": ["sh", "-c", script]}]},
    });
    if let Some(node) = node {
        pod["spec"]["nodeName"] = node.into();
    }
    pod
}

fn wait_phase(nodes: &Nodes, pod: &str, phase: &str) -> Result<()> {
    until(&format!("{pod} {phase}"), || {
        Ok(kubectl(nodes, &["get", "pod", pod, "-o", "jsonpath={.status.phase}"])? == phase)
    })
    .or_else(|error| bail!("{error:#}\n{}", nodes.plane.kubectl(&["describe", "pod", pod]).stdout))
}

fn until(what: &str, is: impl Fn() -> Result<bool>) -> Result<()> {
    switchyard_tests::until(what, TIMEOUT, is).map(drop)
}

fn inside(nodes: &Nodes, pod: &str, script: &str) -> Result<String> {
    kubectl(nodes, &["exec", pod, "--", "sh", "-c", script])
}
