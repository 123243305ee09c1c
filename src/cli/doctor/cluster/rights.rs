//! Permissions of the controller and the agents, and which of them their accounts lack. The chart
//! grants them (`charts/switchyard/templates/controller/rbac.yaml`, `node-agent/rbac.yaml`);
//! `tests/tests/chart/doctor.rs` compares this list with the chart.

use crate::connect::error_message;
use futures::future::join_all;
use k8s_openapi::api::authorization::v1::ResourceAttributes;
use k8s_openapi::api::core::v1::PodSpec;
use kube::Client;
use std::collections::BTreeMap;
use switchyard_crds::labels::LEASE;
use switchyard_service::may;

/// API group, resource with subresource, and verbs.
type Permissions = (&'static str, &'static str, &'static [&'static str]);

const OURS: &str = "training.switchyard.dev";

/// In all namespaces, even if the release watches only some.
const CLUSTER_PERMISSIONS: [Permissions; 9] = [
    ("", "nodes", &["get", "list", "watch"]),
    (OURS, "gputopologies", &["list", "watch"]),
    ("resource.k8s.io", "resourceslices", &["list", "watch"]),
    ("resource.k8s.io", "devicetaintrules", &["list", "watch"]),
    ("resource.k8s.io", "deviceclasses", &["list", "watch"]),
    ("", "persistentvolumes", &["get", "list"]),
    ("storage.k8s.io", "storageclasses", &["get"]),
    ("", "pods", &["list", "watch"]),
    ("resource.k8s.io", "resourceclaims", &["list", "watch"]),
];

/// In the namespaces that the release watches.
const JOB_PERMISSIONS: [Permissions; 15] = [
    (OURS, "trainjobs", &["get", "list", "watch", "delete"]),
    (OURS, "trainjobs/status", &["patch", "update"]),
    (OURS, "trainjobs/finalizers", &["update"]),
    (OURS, "placementslices", &["get", "list", "watch", "create", "patch", "delete"]),
    ("", "pods", &["get", "create", "patch", "delete"]),
    ("", "pods/log", &["get"]),
    ("resource.k8s.io", "resourceclaims", &["get", "create", "patch", "delete"]),
    ("resource.k8s.io", "resourceclaimtemplates", &["get"]),
    ("", "persistentvolumeclaims", &["get"]),
    ("", "services", &["get", "list", "watch", "create", "patch"]),
    ("", "configmaps", &["get", "list", "watch", "create", "patch", "delete"]),
    ("policy", "poddisruptionbudgets", &["get", "list", "watch", "create", "patch", "delete"]),
    ("networking.k8s.io", "networkpolicies", &["get", "list", "watch", "create", "patch"]),
    ("", "secrets", &["create"]),
    ("events.k8s.io", "events", &["create", "list", "patch"]),
];

/// Needed with a ProvisioningRequest class.
const AUTOSCALING_PERMISSIONS: [Permissions; 2] = [
    ("autoscaling.x-k8s.io", "provisioningrequests", &["get", "list", "watch", "create", "patch", "delete"]),
    ("", "podtemplates", &["get", "list", "watch", "create", "patch", "delete"]),
];

/// In the namespace of the release.
const ELECTION_PERMISSIONS: [Permissions; 1] = [("coordination.k8s.io", "leases", &["get", "update", "create"])];

const AGENT_PERMISSIONS: [Permissions; 3] = [
    (OURS, "gputopologies", &["get", "create", "patch"]),
    (OURS, "gputopologies/status", &["patch"]),
    ("", "nodes", &["get"]),
];

/// Missing permissions of an account, each as `verb resource`, or why the API server did not list
/// them.
pub(super) type MissingPermissions = Result<Vec<String>, String>;

/// The accounts of a release and where they act.
pub(super) struct Accounts<'a> {
    /// The namespace of the release.
    pub place: &'a str,
    pub controller: Option<&'a PodSpec>,
    /// `None` if the release has no agents.
    pub agents: Option<&'a PodSpec>,
    /// Namespaces that the controller watches; empty for all.
    pub watched: Vec<&'a str>,
    /// Whether the controller creates ProvisioningRequests.
    pub is_autoscaling: bool,
}

/// Missing permissions of a release's accounts, by `system:serviceaccount:NAMESPACE:NAME`.
pub(super) async fn missing_permissions(
    client: &Client,
    accounts: &Accounts<'_>,
) -> BTreeMap<String, MissingPermissions> {
    let Accounts { place, controller, agents, watched, is_autoscaling } = accounts;
    let account = |spec: &PodSpec| {
        let name = spec.service_account_name.as_deref().unwrap_or("default");
        format!("system:serviceaccount:{place}:{name}")
    };
    let watched = if watched.is_empty() { &[""][..] } else { watched };
    let scaling = if *is_autoscaling { &AUTOSCALING_PERMISSIONS[..] } else { &[] };
    let mut asked: Vec<(String, ResourceAttributes)> = Vec::new();
    let mut ask = |account: &str, namespace: &str, rights: &[Permissions]| {
        for (group, resource, verbs) in rights {
            asked.extend(verbs.iter().map(|verb| (account.to_string(), attributes(namespace, group, resource, verb))));
        }
    };
    if let Some(controller) = controller.map(account) {
        ask(&controller, "", &CLUSTER_PERMISSIONS);
        for namespace in watched {
            ask(&controller, namespace, &JOB_PERMISSIONS);
            ask(&controller, namespace, scaling);
        }
        ask(&controller, place, &ELECTION_PERMISSIONS);
    }
    if let Some(agents) = agents.map(account) {
        ask(&agents, "", &AGENT_PERMISSIONS);
    }
    let mut missing_permissions: BTreeMap<String, MissingPermissions> = BTreeMap::new();
    let answers = join_all(asked.into_iter().map(async |(account, right)| {
        let answer = may(client, &account, &right).await.map_err(|error| error_message(&error));
        (account, right, answer)
    }));
    for (account, right, answer) in answers.await {
        let found = missing_permissions.entry(account).or_insert_with(|| Ok(Vec::new()));
        match (answer, &mut *found) {
            (Ok(false), Ok(missing)) => missing.push(name(&right)),
            (Err(why), _) => *found = Err(why),
            _ => {}
        }
    }
    missing_permissions
}

fn attributes(namespace: &str, group: &str, resource: &str, verb: &str) -> ResourceAttributes {
    let (resource, part) = resource.split_once('/').map_or((resource, None), |(resource, part)| (resource, Some(part)));
    ResourceAttributes {
        namespace: Some(namespace.to_string()).filter(|namespace| !namespace.is_empty()),
        group: Some(group.to_string()),
        resource: Some(resource.to_string()),
        subresource: part.map(str::to_string),
        verb: Some(verb.to_string()),
        // The chart grants access to this Lease only, except for its creation.
        name: (resource == "leases" && verb != "create").then(|| LEASE.to_string()),
        ..ResourceAttributes::default()
    }
}

/// `create pods`, `get pods/log in team`.
fn name(right: &ResourceAttributes) -> String {
    let text = |part: &Option<String>| part.clone().unwrap_or_default();
    let part = right.subresource.as_ref().map_or_else(String::new, |part| format!("/{part}"));
    let within = right.namespace.as_ref().map_or_else(String::new, |namespace| format!(" in {namespace}"));
    format!("{} {}{part}{within}", text(&right.verb), text(&right.resource))
}
