//! The controller says which admission policies of the chart are not in force.

use crate::chart::{MONITORING, files};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::time::{Duration, Instant};
use switchyard_tests::chart::{objects, policy_arguments, render};
use switchyard_tests::{ControllerOptions, Daemon, agent_plane, page, pages_of, start_controller};

const PATIENCE: Duration = Duration::from_secs(90);

fn until(what: &str, controller: &Daemon, is: impl Fn() -> Result<bool>) -> Result<()> {
    let give_up = Instant::now() + PATIENCE;
    while !is()? {
        ensure!(Instant::now() < give_up, "not {what} after {} s: {}", PATIENCE.as_secs(), controller.tail());
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

/// With each set of values the controller gets the names of the policies that this set has, and may read these and no others.
#[test]
fn the_controller_knows_the_policies_of_its_release() -> Result<()> {
    let mut counts = Vec::new();
    for (name, path, _) in files("values") {
        let arguments = [&["--values", path.to_str().unwrap()][..], &MONITORING].concat();
        let rendered = objects(&render(&arguments)?)?;
        let names = |kind: &str| -> Vec<&str> {
            let of_kind = rendered.iter().filter(|object| object["kind"] == kind);
            let mut names: Vec<&str> = of_kind.filter_map(|object| object["metadata"]["name"].as_str()).collect();
            names.sort_unstable();
            names
        };
        let policies = names("ValidatingAdmissionPolicy");
        assert_eq!(names("ValidatingAdmissionPolicyBinding"), policies, "{name}");
        let mut told = policy_arguments(&rendered);
        told.sort();
        let expected: Vec<String> = policies.iter().map(|policy| format!("--admission-policy={policy}")).collect();
        assert_eq!(told, expected, "{name}");
        let rules = rendered.iter().filter_map(|object| object["rules"].as_array()).flatten();
        let mut may: Vec<&str> = rules
            .filter(|rule| rule["apiGroups"][0] == "admissionregistration.k8s.io")
            .flat_map(|rule| rule["resourceNames"].as_array().into_iter().flatten().filter_map(Value::as_str))
            .collect();
        may.sort_unstable();
        let has_roles = rendered.iter().any(|object| object["kind"] == "ClusterRole");
        assert_eq!(may, if has_roles { policies.clone() } else { Vec::new() }, "{name}");
        counts.push(policies.len());
    }
    assert!(counts.contains(&8) && counts.contains(&0), "{counts:?}");
    Ok(())
}

#[test]
fn a_policy_that_is_not_in_force_is_told_until_it_is() -> Result<()> {
    let plane = agent_plane()?;
    let (policy, binding) = ("validatingadmissionpolicy", "validatingadmissionpolicybinding");
    for (kind, name) in [(policy, "switchyard-trainjobs-secrets"), (binding, "switchyard-children")] {
        let gone = plane.kubectl(&["delete", kind, name]);
        ensure!(gone.code == Some(0), "{}", gone.stderr);
    }
    let to_audit = r#"{"spec": {"validationActions": ["Audit"]}}"#;
    let changed = plane.kubectl(&["patch", binding, "switchyard-trainjobs", "--type=merge", "-p", to_audit]);
    ensure!(changed.code == Some(0), "{}", changed.stderr);
    let options = ControllerOptions {
        kubeconfig: Some(plane.controller_kubeconfig()?),
        arguments: policy_arguments(&objects(&render(&[])?)?),
        ..ControllerOptions::default()
    };
    let controller = start_controller(&plane, "policies", &options)?;
    let log = || std::fs::read_to_string(&controller.log).context("the log");
    let missing = |name: &str| -> Result<Option<String>> {
        let begin = format!("switchyard_policy_missing{{policy=\"switchyard-{name}\"}} ");
        let page = pages_of(&controller).and_then(|address| page(address, "/metrics")).unwrap_or_default();
        Ok(page.lines().find_map(|line| line.strip_prefix(&begin)).map(str::to_string))
    };
    until("told", &controller, || Ok(log()?.contains("PolicyMissing") && missing("node-agent")?.is_some()))?;
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
    let told = log()?;
    for words in [
        "switchyard-trainjobs: its binding does not deny",
        "switchyard-trainjobs-secrets: there is no such ValidatingAdmissionPolicy",
        "switchyard-children: it has no ValidatingAdmissionPolicyBinding of its name",
    ] {
        assert!(told.contains(words), "{words}: {told}");
    }
    let applied =
        plane.kubectl_with(&["apply", "-f", "-"], &render(&["--set", "crds.enabled=false,controller.replicas=0"])?);
    ensure!(applied.code == Some(0), "{}", applied.stderr);
    until("in force", &controller, || Ok(log()?.contains("the admission policies are in force")))?;
    for name in ["trainjobs", "trainjobs-secrets", "children"] {
        assert_eq!(missing(name)?.as_deref(), Some("0"), "{name}");
    }
    Ok(())
}
