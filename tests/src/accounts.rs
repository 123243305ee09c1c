//! Service accounts with all or some of the chart's RBAC rights.

use crate::ControlPlane;
use crate::chart::{objects, render};
use anyhow::{Result, ensure};
use k8s_openapi::api::rbac::v1::PolicyRule;
use serde_json::{Value, json};
use std::path::PathBuf;

/// The operator's namespace.
pub const SYSTEM: &str = "switchyard-system";

/// Returns every rule that the chart grants the controller, split into one verb on one resource
/// each.
///
/// # Errors
/// The chart does not render.
pub fn chart_rules() -> Result<Vec<PolicyRule>> {
    chart_rules_with(&[])
}

/// Like [`chart_rules`], with additional `--set` values.
///
/// # Errors
/// The chart does not render.
pub fn chart_rules_with(values: &[&str]) -> Result<Vec<PolicyRule>> {
    let arguments = [&["--show-only", "templates/controller/rbac.yaml"], values].concat();
    let documents = objects(&render(&arguments)?)?;
    let mut all = Vec::new();
    for rule in documents.iter().filter_map(|document| document["rules"].as_array()).flatten() {
        let rule: PolicyRule = serde_json::from_value(rule.clone())?;
        for resource in rule.resources.iter().flatten() {
            let one = |verb: &String| PolicyRule {
                resources: Some(vec![resource.clone()]),
                verbs: vec![verb.clone()],
                ..rule.clone()
            };
            all.extend(rule.verbs.iter().map(one));
        }
    }
    Ok(all)
}

/// Returns a ClusterRole with these rules.
pub fn role(name: &str, rules: &[PolicyRule]) -> Value {
    json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": name}, "rules": rules})
}

/// Creates the operator's namespace and, in it, a service account bound to a ClusterRole of the
/// same name with these rules. Returns the path of its kubeconfig.
///
/// # Errors
/// The API server rejects an object.
pub fn account(plane: &ControlPlane, name: &str, rules: &[PolicyRule]) -> Result<PathBuf> {
    let binding = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": SYSTEM}]});
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SYSTEM}});
    let account =
        json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name, "namespace": SYSTEM}});
    let items = [namespace, account, role(name, rules), binding];
    let made = plane
        .kubectl_with(&["apply", "-f", "-"], &json!({"apiVersion": "v1", "kind": "List", "items": items}).to_string());
    ensure!(made.code == Some(0), "{}", made.stderr);
    let token = plane.kubectl(&["create", "token", name, "-n", SYSTEM]);
    ensure!(token.code == Some(0), "{}", token.stderr);
    let admin = std::fs::read_to_string(plane.kubeconfig("admin"))?;
    let kubeconfig = plane.folder().join(format!("{name}.kubeconfig"));
    std::fs::write(&kubeconfig, admin.replace("token-admin", token.stdout.trim()))?;
    Ok(kubeconfig)
}
