//! The controller and `switchyard doctor cluster` report chart admission policies that are not in
//! force or that refuse unrelated pods.

use crate::chart::server::get;
use crate::chart::{MONITORING, files};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use switchyard_crds::labels;
pub(crate) use switchyard_tests::TIMEOUT;
use switchyard_tests::chart::{objects, policy_arguments, render};
use switchyard_tests::{
    ControlPlane, ControllerOptions, Daemon, Program, SYSTEM, agent_plane, http_address, page, programs,
    start_controller,
};

fn until(what: &str, controller: &Daemon, is: impl Fn() -> Result<bool>) -> Result<()> {
    switchyard_tests::until(what, TIMEOUT, is).with_context(|| controller.tail())?;
    Ok(())
}

/// With every values set, the controller gets the names of exactly the rendered policies, and may
/// read only those.
#[test]
fn the_controller_knows_the_policies_of_its_release() -> Result<()> {
    let mut counts = Vec::new();
    for (name, path, _) in files("values") {
        let arguments = [&["--values", path.to_str().unwrap()][..], &MONITORING].concat();
        let rendered = objects(&render(&arguments)?)?;
        let names = |kind: &str| -> Vec<&str> {
            let rendered_names = rendered.iter().filter(|object| object["kind"] == kind);
            let mut names: Vec<&str> =
                rendered_names.filter_map(|object| object["metadata"]["name"].as_str()).collect();
            names.sort_unstable();
            names
        };
        let policies = names("ValidatingAdmissionPolicy");
        assert_eq!(names("ValidatingAdmissionPolicyBinding"), policies, "{name}");
        let mut passed = policy_arguments(&rendered);
        passed.sort();
        let expected: Vec<String> = policies.iter().map(|policy| format!("--admission-policy={policy}")).collect();
        assert_eq!(passed, expected, "{name}");
        let rules = rendered.iter().filter_map(|object| object["rules"].as_array()).flatten();
        let mut readable: Vec<&str> = rules
            .filter(|rule| rule["apiGroups"][0] == "admissionregistration.k8s.io")
            .flat_map(|rule| rule["resourceNames"].as_array().into_iter().flatten().filter_map(Value::as_str))
            .collect();
        readable.sort_unstable();
        let has_roles = rendered.iter().any(|object| object["kind"] == "ClusterRole");
        assert_eq!(readable, if has_roles { policies.clone() } else { Vec::new() }, "{name}");
        counts.push(policies.len());
    }
    assert!(counts.contains(&8) && counts.contains(&0), "{counts:?}");
    Ok(())
}

/// The policy that is broken so that it locks the cluster.
const LOCK: &str = "switchyard-controller-pods";

fn change(plane: &ControlPlane, kind: &str, name: &str, patch: &str) -> Result<()> {
    let changed = plane.kubectl(&["patch", kind, name, "--type=merge", "-p", patch]);
    ensure!(changed.code == Some(0), "{}", changed.stderr);
    Ok(())
}

/// Findings of `switchyard doctor cluster`, which exits with 1 if there are any.
pub(crate) fn findings(plane: &ControlPlane) -> Result<Vec<Value>> {
    let kubeconfig = plane.kubeconfig("admin").display().to_string();
    let arguments = ["doctor", "cluster", "--kubeconfig", &kubeconfig, "-o", "json"];
    let ended = Program::new(&programs().join("switchyard"), plane.folder(), arguments).run(TIMEOUT);
    let report: Value = serde_json::from_str(&ended.stdout).with_context(|| ended.stderr.clone())?;
    let findings = report["findings"].as_array().cloned().context("no findings")?;
    assert_eq!(ended.code, Some(i32::from(!findings.is_empty())), "{report}");
    Ok(findings)
}

#[test]
fn an_inactive_policy_is_reported_until_it_is_active() -> Result<()> {
    let plane = agent_plane(&[])?;
    let (policy, binding) = ("validatingadmissionpolicy", "validatingadmissionpolicybinding");
    for (kind, name) in [(policy, "switchyard-trainjobs-secrets"), (binding, "switchyard-children")] {
        let deleted = plane.kubectl(&["delete", kind, name]);
        ensure!(deleted.code == Some(0), "{}", deleted.stderr);
    }
    // A toothless policy, and one that locks the whole cluster: a missing parameter fails before
    // the match conditions are evaluated.
    let toothless = r#"{"spec": {"validations": [{"expression": "true"}]}}"#;
    change(&plane, policy, "switchyard-controller", toothless)?;
    let (kind, reference) = (
        r#"{"spec": {"paramKind": {"apiVersion": "v1", "kind": "ConfigMap"}}}"#,
        r#"{"spec": {"paramRef": {"name": "missing", "namespace": "default", "parameterNotFoundAction": "Deny"}}}"#,
    );
    change(&plane, policy, LOCK, kind)?;
    change(&plane, binding, LOCK, reference)?;
    let to_audit = r#"{"spec": {"validationActions": ["Audit"]}}"#;
    change(&plane, binding, "switchyard-trainjobs", to_audit)?;
    let mut arguments = policy_arguments(&objects(&render(&[])?)?);
    arguments.extend(["--leader-elect".into(), "Enabled".into()]);
    let options = ControllerOptions {
        kubeconfig: Some(plane.controller_kubeconfig()?),
        arguments,
        ..ControllerOptions::default()
    };
    let controller = start_controller(&plane, "policies", &options)?;
    let log = || std::fs::read_to_string(&controller.log).context("the log");
    let metric = |metric: &str, name: &str| -> Result<Option<String>> {
        let begin = format!("switchyard_policy_{metric}{{policy=\"switchyard-{name}\"}} ");
        let page = http_address(&controller).and_then(|address| page(address, "/metrics")).unwrap_or_default();
        Ok(page.lines().find_map(|line| line.strip_prefix(&begin)).map(str::to_string))
    };
    let missing = |name: &str| metric("missing", name);
    until("reported", &controller, || Ok(log()?.contains("PolicyMissing") && missing("node-agent")?.is_some()))?;
    for (name, expected) in [
        ("trainjobs", "1"),
        ("trainjobs-secrets", "1"),
        ("trainjobs-configmaps", "0"),
        ("trainjobs-persistentvolumeclaims", "0"),
        ("children", "1"),
        ("node-agent", "0"),
    ] {
        assert_eq!(missing(name)?.as_deref(), Some(expected), "{name}");
    }
    let locked = || Ok(metric("refuses_foreign", "controller-pods")?.as_deref() == Some("1"));
    until("reporting the lock", &controller, locked)?;
    let lock = findings(&plane)?
        .into_iter()
        .find(|found| found["what"].to_string().contains("refuses pods that are not ours"));
    let fix = lock.context("the doctor does not report the lock")?["fix"].to_string();
    assert!(fix.contains("kubectl delete validatingadmissionpolicybinding switchyard-controller-pods"), "{fix}");
    change(&plane, policy, LOCK, r#"{"spec": {"paramKind": null}}"#)?;
    change(&plane, binding, LOCK, r#"{"spec": {"paramRef": null}}"#)?;
    until("free", &controller, || Ok(!locked()?))?;
    until("tried", &controller, || Ok(missing("controller")?.as_deref() == Some("1")))?;
    let logged = log()?;
    for words in [
        "switchyard-controller-pods: refuses pods that are not ours",
        "switchyard-controller: does not refuse a pod of the controller that belongs to no TrainJob",
        "switchyard-trainjobs: its binding does not deny",
        "switchyard-trainjobs-secrets: the ValidatingAdmissionPolicy does not exist",
        "switchyard-children: no ValidatingAdmissionPolicyBinding has its name",
    ] {
        assert!(logged.contains(words), "{words}: {logged}");
    }
    let applied =
        plane.kubectl_with(&["apply", "-f", "-"], &render(&["--set", "crds.enabled=false,controller.replicas=0"])?);
    ensure!(applied.code == Some(0), "{}", applied.stderr);
    until("in force", &controller, || Ok(log()?.contains("the admission policies are in force")))?;
    for name in ["trainjobs", "trainjobs-secrets", "children", "controller"] {
        assert_eq!(missing(name)?.as_deref(), Some("0"), "{name}");
    }
    let report = || {
        Ok(get(&plane, &["lease", labels::LEASE, "-n", SYSTEM])?["metadata"]["annotations"][labels::LEADER_POLICIES]
            == "ok")
    };
    until("in the Lease", &controller, report)?;
    // The only remaining findings concern this control plane's lack of controller pods and nodes.
    let checks: Vec<Value> = findings(&plane)?.into_iter().map(|found| found["check"].clone()).collect();
    assert_eq!(checks, ["controller", "agents"]);
    Ok(())
}
