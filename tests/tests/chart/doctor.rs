//! `switchyard doctor cluster` on a real API server: faults that an administrator could cause. Each
//! is reported with a fix, and applying the fix clears it.

use crate::chart::policies::{TIMEOUT, findings};
use crate::chart::server::must;
use anyhow::{Context, Result, ensure};
use k8s_openapi::api::rbac::v1::PolicyRule;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use switchyard_tests::chart::{objects, render};
use switchyard_tests::{ControlPlane, Options, SYSTEM, chart_rules, until};

/// An installation whose controllers and agents do not run, because there are no nodes. Its tests
/// take turns, since each causes its own faults.
fn plane() -> MutexGuard<'static, ControlPlane> {
    static PLANE: OnceLock<Mutex<ControlPlane>> = OnceLock::new();
    let plane = PLANE.get_or_init(|| Mutex::new(start().unwrap_or_else(|error| panic!("{error:#}"))));
    plane.lock().unwrap_or_else(PoisonError::into_inner)
}

fn start() -> Result<ControlPlane> {
    let plane = ControlPlane::start(&Options::default())?;
    plane.install_crds_now()?;
    must(&plane, &["create", "namespace", SYSTEM], "")?;
    install(&plane)?;
    // Written by the DaemonSet controller in a real cluster.
    let counts = json!({"status": {"desiredNumberScheduled": 1, "currentNumberScheduled": 1, "numberReady": 1,
        "updatedNumberScheduled": 1, "numberMisscheduled": 0}});
    let patch =
        ["patch", "daemonset", "switchyard-node-agent", "-n", SYSTEM, "--subresource=status", "--type=merge", "-p"];
    must(&plane, &[&patch[..], &[&counts.to_string()]].concat(), "")?;
    Ok(plane)
}

fn install(plane: &ControlPlane) -> Result<()> {
    must(
        plane,
        &["apply", "--server-side", "--force-conflicts", "-f", "-"],
        &render(&["--set", "crds.enabled=false"])?,
    )?;
    Ok(())
}

/// Summary and fix of the finding that contains this text.
fn found(plane: &ControlPlane, fragment: &str) -> Result<Option<(String, String)>> {
    let text = |found: &Value, field: &str| found[field].as_str().unwrap_or_default().to_string();
    let all = findings(plane)?;
    let found = all.iter().find(|found| text(found, "what").contains(fragment));
    Ok(found.map(|found| (text(found, "what"), text(found, "fix"))))
}

/// Waits for a finding: the API server applies changed roles and labels with a delay.
fn expect_finding(plane: &ControlPlane, fragment: &str, fix: &str) -> Result<String> {
    let mut finding = None;
    until(fragment, TIMEOUT, || {
        finding = found(plane, fragment)?;
        Ok(finding.is_some())
    })
    .with_context(|| format!("{:#?}", findings(plane)))?;
    let (what, found) = finding.context("invariant: it was found")?;
    ensure!(found.contains(fix), "{what}: {found}");
    Ok(what)
}

fn expect_no_finding(plane: &ControlPlane, fragment: &str) -> Result<()> {
    until(&format!("without `{fragment}`"), TIMEOUT, || Ok(found(plane, fragment)?.is_none()))
        .with_context(|| format!("{:#?}", findings(plane)))?;
    Ok(())
}

/// Formats rules as `verb resource`, like the finding.
fn named(rules: &[PolicyRule]) -> BTreeSet<String> {
    let granted_by_name = |rule: &&PolicyRule| {
        // Rights on policies are granted by object name, and the doctor checks them separately.
        rule.api_groups.iter().flatten().all(|group| group != "admissionregistration.k8s.io")
    };
    let name = |rule: &PolicyRule| {
        let resource = rule.resources.iter().flatten().next().cloned().unwrap_or_default();
        let within = if resource == "leases" { format!(" in {SYSTEM}") } else { String::new() };
        format!("{} {resource}{within}", rule.verbs.concat())
    };
    rules.iter().filter(granted_by_name).map(name).collect()
}

/// With an emptied role, the finding must list exactly the rights that the chart grants.
#[test]
fn missing_rights_are_named() -> Result<()> {
    let plane = plane();
    expect_no_finding(&plane, "system:serviceaccount:")?;
    let no_rules = r#"{"rules": []}"#;
    for name in ["clusterrole/switchyard-controller", "clusterrole/switchyard-node-agent"] {
        must(&plane, &["patch", name, "--type=merge", "-p", no_rules], "")?;
    }
    must(&plane, &["patch", "role/switchyard-controller-election", "-n", SYSTEM, "--type=merge", "-p", no_rules], "")?;
    // The three changes do not take effect at the same time.
    let lacks = |account: &str, expected: &BTreeSet<String>| -> Result<()> {
        let fragment = format!("system:serviceaccount:{SYSTEM}:{account} cannot ");
        let mut rights = BTreeSet::new();
        until("all rights", TIMEOUT, || {
            let Some((what, fix)) = found(&plane, &fragment)? else { return Ok(false) };
            ensure!(fix.contains("helm upgrade"), "{what}: {fix}");
            let (_, list) = what.split_once(" cannot ").context("rights")?;
            rights = list.split(", ").map(str::to_string).collect();
            Ok(rights == *expected)
        })
        .with_context(|| format!("{account} lacks {rights:?}, expected {expected:?}"))?;
        Ok(())
    };
    lacks("switchyard-controller", &named(&chart_rules()?))?;
    let agents = objects(&render(&["--show-only", "templates/node-agent/rbac.yaml"])?)?;
    let rules = agents.iter().filter_map(|object| object["rules"].as_array()).flatten();
    let expected: BTreeSet<String> = rules
        .flat_map(|rule| {
            let words = |field: &str| rule[field].as_array().into_iter().flatten().filter_map(Value::as_str);
            let resources: Vec<&str> = words("resources").collect();
            words("verbs").flat_map(move |verb| resources.clone().into_iter().map(move |it| format!("{verb} {it}")))
        })
        .collect();
    lacks("switchyard-node-agent", &expected)?;
    install(&plane)?;
    expect_no_finding(&plane, "system:serviceaccount:")
}

#[test]
fn installation_faults_are_found_with_their_fixes() -> Result<()> {
    let plane = plane();
    let quiet =
        ["no report of", "older than half an hour", "Pod Security forbids", "no pod behind", "no ResourceSlice"];
    for fragment in quiet {
        ensure!(found(&plane, fragment)?.is_none(), "{fragment}: {:#?}", findings(&plane)?);
    }
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "gpu-1"}});
    must(&plane, &["create", "-f", "-"], &node.to_string())?;
    let gpus = json!({"status": {"allocatable": {"nvidia.com/gpu": "8"}, "capacity": {"nvidia.com/gpu": "8"}}});
    let status = ["--subresource=status", "--type=merge", "-p"];
    must(&plane, &[&["patch", "node", "gpu-1"][..], &status, &[&gpus.to_string()]].concat(), "")?;
    expect_finding(&plane, "no report of node gpu-1, which has GPUs", "nodeAgent.nodeSelector")?;
    let report = json!({"apiVersion": "training.switchyard.dev/v1alpha1", "kind": "GPUTopology", "metadata": {"name": "gpu-1"}, "spec": {}});
    must(&plane, &["create", "-f", "-"], &report.to_string())?;
    let old = json!({"status": {"observedTime": "2026-01-01T00:00:00Z", "agentVersion": "0.0.1"}});
    must(&plane, &[&["patch", "gputopology", "gpu-1"][..], &status, &[&old.to_string()]].concat(), "")?;
    expect_finding(&plane, "the reports of node gpu-1 are older than half an hour", "component=node-agent")?;
    expect_finding(&plane, "the agents of node gpu-1 are of another version", "rollout")?;
    ensure!(found(&plane, "no report of")?.is_none(), "there is one");
    // A namespace that refuses the next agent pod, while the existing ones keep running.
    let level = "pod-security.kubernetes.io/enforce=restricted";
    must(&plane, &["label", "namespace", SYSTEM, level], "")?;
    expect_finding(&plane, "Pod Security forbids", "enforce=privileged")?;
    // A webhook whose Service has no ready endpoints.
    let service = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "hooks", "namespace": "default"},
        "spec": {"ports": [{"port": 443}]}});
    must(&plane, &["create", "-f", "-"], &service.to_string())?;
    let rule = json!({"apiGroups": ["training.switchyard.dev"], "apiVersions": ["*"], "operations": ["CREATE"], "resources": ["trainjobs"]});
    let hook = json!({"name": "jobs.example.com", "rules": [rule], "failurePolicy": "Fail", "sideEffects": "None",
        "admissionReviewVersions": ["v1"], "clientConfig": {"service": {"name": "hooks", "namespace": "default"}}});
    let hooks = json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": "hooks"}, "webhooks": [hook]});
    must(&plane, &["create", "-f", "-"], &hooks.to_string())?;
    expect_finding(&plane, "jobs.example.com (Service default/hooks) must answer", "delete its webhook configuration")?;
    // A DeviceClass whose driver offers no devices.
    let class = json!({"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": "gpu.nvidia.com"}, "spec": {}});
    must(&plane, &["create", "-f", "-"], &class.to_string())?;
    expect_finding(&plane, "driver gpu.nvidia.com offers no ResourceSlice", "pods of the driver")?;
    // A chart of another version.
    must(
        &plane,
        &[
            "label",
            "--overwrite",
            "deployment",
            "switchyard-controller",
            "-n",
            SYSTEM,
            "helm.sh/chart=switchyard-0.0.1",
        ],
        "",
    )?;
    expect_finding(&plane, "the chart of release switchyard: version 0.0.1", "upgrade the older one")?;
    Ok(())
}

/// A reader without rights gets a list of the skipped checks.
#[test]
fn skipped_checks_are_listed() -> Result<()> {
    let plane = plane();
    let kubeconfig = switchyard_tests::account(&plane, "reader", &[])?;
    let arguments = ["doctor", "cluster", "--kubeconfig", &kubeconfig.display().to_string()].map(str::to_string);
    let program = switchyard_tests::programs().join("switchyard");
    let ended = switchyard_tests::Program::new(&program, plane.folder(), arguments).run(switchyard_tests::TIMEOUT);
    for fragment in ["cannot list deployments", "cannot list nodes", "look with the kubeconfig of an administrator"] {
        ensure!(
            ended.code == Some(1) && ended.stdout.contains(fragment),
            "{fragment}: {}{}",
            ended.stdout,
            ended.stderr
        );
    }
    ensure!(!ended.stdout.contains("Status {") && !ended.stdout.contains("Some("), "{}", ended.stdout);
    Ok(())
}
