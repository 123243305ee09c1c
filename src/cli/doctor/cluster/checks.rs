//! The checks: one function each, from what was seen to findings.

use super::Finding;
use super::seen::{Release, Seen, instance};
use k8s_openapi::api::apps::v1::DaemonSet;
use kube::ResourceExt;
use std::collections::BTreeSet;
use switchyard_crds::generate;
use switchyard_crds::labels::{LEADER_POLICIES, LEADER_VERSION, LEASE};
use switchyard_plan::policies::{Probe, denier, fault};

const UPGRADE: &str = "helm upgrade with the chart of this version puts it back (docs/install.md)";
/// A Lease that was not renewed for this many times its duration has no holder that lives.
const PATIENCE: i64 = 3;

/// All findings, the gravest check first.
pub(super) fn all(seen: &Seen) -> Vec<Finding> {
    let checks: [fn(&Seen) -> Vec<Finding>; 10] =
        [foreign_pods, policies, leftovers, crds, releases, leader, agents, versions, webhooks, devices];
    let mut findings: Vec<Finding> = checks.iter().flat_map(|check| check(seen)).collect();
    let unread: BTreeSet<&(String, String)> = seen.unread.iter().collect();
    findings.extend(unread.into_iter().map(|(what, why)| {
        Finding::new("rights", format!("cannot {what}: {why}"), "look with the kubeconfig of an administrator")
    }));
    findings
}

fn each<'a>(seen: &'a Seen, check: impl Fn(&'a Release) -> Vec<Finding>) -> Vec<Finding> {
    seen.releases.iter().flat_map(check).collect()
}

/// No policy of ours refuses what is not ours.
fn foreign_pods(seen: &Seen) -> Vec<Finding> {
    let names: Vec<String> = seen.policies.iter().map(ResourceExt::name_any).collect();
    let off = "kubectl delete validatingadmissionpolicybinding";
    let mut findings = each(seen, |release| {
        let answer = release.foreign.as_deref().map_or(Ok(()), Err);
        let found = Probe::Foreign.judge(&names, answer).into_iter();
        found
            .map(|found| {
                let fix = format!("{off} {}; then helm upgrade with the chart of this version", found.policy);
                Finding::new("policies", format!("{} {}", found.policy, found.fault), fix)
            })
            .collect()
    });
    for policy in
        seen.policies.iter().filter(|policy| policy.spec.as_ref().is_some_and(|spec| spec.param_kind.is_some()))
    {
        let name = policy.name_any();
        let what = format!(
            "{name} needs a parameter object: while that is missing, nobody can create what the policy is about"
        );
        let both = "kubectl delete validatingadmissionpolicies,validatingadmissionpolicybindings";
        let fix = format!("{both} {name}; then helm upgrade with the chart of this version");
        findings.push(Finding::new("policies", what, fix));
    }
    findings
}

/// The policies of each release are there, and refuse.
fn policies(seen: &Seen) -> Vec<Finding> {
    each(seen, |release| {
        let names: Vec<String> = release.arguments("--admission-policy").into_iter().map(str::to_string).collect();
        if names.is_empty() {
            let what = format!(
                "release {} has none: whoever may create TrainJobs may do all that pods can do",
                release.name()
            );
            return vec![Finding::new("policies", what, "helm upgrade with admissionPolicy.enabled=true")];
        }
        let missing = names.iter().filter_map(|name| {
            let policy = seen.policies.iter().find(|policy| policy.name_any() == *name);
            let binding = seen.bindings.iter().find(|binding| binding.name_any() == *name);
            fault(policy, binding).map(|fault| Finding::new("policies", format!("{name}: {fault}"), UPGRADE))
        });
        let mut findings: Vec<Finding> = missing.collect();
        // The rest shows only where the objects are there.
        if findings.is_empty() {
            findings.extend(refusals(release, &names));
        }
        findings
    })
}

/// What the policies must refuse is refused, by them.
fn refusals(release: &Release, names: &[String]) -> Vec<Finding> {
    let tried = [
        (&release.forged, "-children", "a pod with the label of a job"),
        (&release.job, "-trainjobs", "a TrainJob with a capability that is not allowed"),
    ];
    let faults = tried.into_iter().filter_map(|(answer, end, what)| {
        let policy = names.iter().find(|name| name.ends_with(end))?;
        match answer {
            None => Some(Finding::new("policies", format!("{policy} does not refuse {what}"), UPGRADE)),
            Some(words) if denier(words).is_some_and(|by| names.iter().any(|name| name == by)) => None,
            Some(words) => Some(Finding::new(
                "policies",
                format!("{policy} cannot be tried with {what}: {words}"),
                "look with the kubeconfig of an administrator, or remove what refuses it",
            )),
        }
    });
    faults.collect()
}

/// Policies without a release, and releases that share namespaces.
fn leftovers(seen: &Seen) -> Vec<Finding> {
    let living: BTreeSet<&str> = seen.releases.iter().map(Release::name).collect();
    let dead: BTreeSet<&str> = seen.policies.iter().map(|policy| instance(policy.labels())).collect();
    let mut findings: Vec<Finding> = dead.difference(&living).map(|name| Finding::new(
        "policies",
        format!("those of release {name} are left, which has no controller any more: they refuse the pods of other releases"),
        format!("kubectl delete validatingadmissionpolicies,validatingadmissionpolicybindings,clusterroles,clusterrolebindings,flowschemas -l app.kubernetes.io/part-of=switchyard,app.kubernetes.io/instance={name}"),
    )).collect();
    for (at, first) in seen.releases.iter().enumerate() {
        for second in &seen.releases[at + 1..] {
            let (a, b) = (first.arguments("--watch-namespace"), second.arguments("--watch-namespace"));
            if a.is_empty() || b.is_empty() || a.iter().any(|namespace| b.contains(namespace)) {
                let what = format!(
                    "{} in {} and {} in {} share namespaces: each refuses the pods of the other",
                    first.name(),
                    first.place(),
                    second.name(),
                    second.place()
                );
                findings.push(Finding::new(
                    "releases",
                    what,
                    "set controller.namespaces in both, with no namespace in common",
                ));
            }
        }
    }
    findings
}

/// The definitions are there, and those of this program.
fn crds(seen: &Seen) -> Vec<Finding> {
    let fix = "helm upgrade with crds.enabled=true, or switchyard crd | kubectl apply --server-side -f -";
    let fault =
        |ours: &k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition| {
            let name = ours.name_any();
            let Some(found) = seen.crds.get(&name) else { return Some(format!("{name} is missing")) };
            let conditions = found.status.as_ref().and_then(|status| status.conditions.as_ref());
            if !conditions.into_iter().flatten().any(|it| it.type_ == "Established" && it.status == "True") {
                return Some(format!("{name} is not served"));
            }
            let differs = ours.spec.versions.iter().any(|version| {
                let found = found.spec.versions.iter().find(|found| found.name == version.name);
                found.is_none_or(|found| found.schema != version.schema)
            });
            differs.then(|| format!("{name} is not that of this program ({})", env!("CARGO_PKG_VERSION")))
        };
    let faults = generate::crds().into_iter().filter_map(|(_, crd)| fault(&crd));
    faults.map(|what| Finding::new("crds", what, fix)).collect()
}

/// There is a controller, and it runs.
fn releases(seen: &Seen) -> Vec<Finding> {
    let is_unread = seen.unread.iter().any(|(what, _)| what.contains("deployments"));
    if seen.releases.is_empty() && !is_unread {
        let fix = "helm install switchyard charts/switchyard --namespace switchyard-system (docs/install.md)";
        return vec![Finding::new("controller", "there is no Deployment of one: Switchyard is not installed", fix)];
    }
    each(seen, |release| {
        let (name, place) = (release.controller.name_any(), release.place());
        let wanted = release.controller.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1);
        let ready = release.controller.status.as_ref().and_then(|status| status.ready_replicas).unwrap_or(0);
        if wanted == 0 {
            let what = format!("{name} has 0 replicas: nothing is started, restarted or ended");
            return vec![Finding::new("controller", what, "helm upgrade with controller.replicas=2")];
        }
        if ready < wanted {
            let what = format!("{name}: {ready} of {wanted} pods are ready");
            return vec![Finding::new(
                "controller",
                what,
                format!("kubectl -n {place} describe pods -l app.kubernetes.io/component=controller says why"),
            )];
        }
        Vec::new()
    })
}

/// One controller leads, renews its Lease, and is content with the policies.
fn leader(seen: &Seen) -> Vec<Finding> {
    each(seen, |release| {
        let place = release.place();
        if release.arguments("--leader-elect") == ["Disabled"] {
            return Vec::new();
        }
        let fix = format!("kubectl -n {place} logs -l app.kubernetes.io/component=controller says why");
        let one = |what: String| vec![Finding::new("leader", what, fix.clone())];
        let Some(lease) = &release.lease else { return one(format!("there is no Lease {place}/{LEASE}")) };
        let spec = lease.spec.clone().unwrap_or_default();
        let Some(holder) = spec.holder_identity.filter(|holder| !holder.is_empty()) else {
            return one(format!("nobody holds the Lease {place}/{LEASE}"));
        };
        let lasts = i64::from(spec.lease_duration_seconds.unwrap_or(10));
        let age = spec.renew_time.map(|time| seen.now.duration_since(time.0).as_secs());
        if age.is_none_or(|age| age > PATIENCE * lasts) {
            let age = age.map_or("ever".into(), |age| format!("for {age} s"));
            return one(format!("{holder} has not renewed the Lease {place}/{LEASE} {age}"));
        }
        let said = lease.annotations().get(LEADER_POLICIES).filter(|said| *said != "ok");
        said.into_iter().map(|said| Finding::new("policies", format!("{holder} found: {said}"), UPGRADE)).collect()
    })
}

/// Every node that should have an agent has one.
fn agents(seen: &Seen) -> Vec<Finding> {
    each(seen, |release| release.agents.as_ref().map(|agents| agent_faults(release, agents)).unwrap_or_default())
}

fn agent_faults(release: &Release, agents: &DaemonSet) -> Vec<Finding> {
    let (name, place) = (agents.name_any(), release.place());
    let status = agents.status.clone().unwrap_or_default();
    let (wanted, there, ready) =
        (status.desired_number_scheduled, status.current_number_scheduled, status.number_ready);
    if wanted == 0 {
        let fix = "see nodeAgent.nodeSelector and nodeAgent.gpuNodesOnly, or set nodeAgent.enabled=false";
        return vec![Finding::new("agents", format!("{name}: its selector finds no node"), fix)];
    }
    if ready >= wanted {
        return Vec::new();
    }
    let level = release.namespace.as_ref().and_then(|it| it.labels().get("pod-security.kubernetes.io/enforce"));
    let warned = |words: &str| release.warnings.iter().any(|warning| warning.contains(words));
    let privileged =
        format!("kubectl label --overwrite namespace {place} pod-security.kubernetes.io/enforce=privileged");
    let (why, fix) = if there < wanted && warned("insufficient quota to match these scopes") {
        let why = "this cluster (GKE does) takes the priority class of the agents only in a namespace with a ResourceQuota for it";
        (format!("; {why}"), "helm upgrade with nodeAgent.resourceQuota.enabled=true".into())
    } else if there < wanted && (warned("violates PodSecurity") || level.is_some_and(|level| level != "privileged")) {
        ("; Pod Security forbids folders and the network of the node".into(), privileged)
    } else {
        let last = release.warnings.last().map_or(String::new(), |last| format!("; {last}"));
        (last, format!("kubectl -n {place} describe daemonset,pods -l app.kubernetes.io/component=node-agent says why"))
    };
    vec![Finding::new("agents", format!("{name}: {ready} of {wanted} are ready, {there} exist{why}"), fix)]
}

/// Controller, leader, agents and this program have one version.
fn versions(seen: &Seen) -> Vec<Finding> {
    let ours = env!("CARGO_PKG_VERSION");
    let label = "app.kubernetes.io/version";
    each(seen, |release| {
        let controller = release.controller.labels().get(label).map(String::as_str);
        let agents = release.agents.as_ref().and_then(|agents| agents.labels().get(label)).map(String::as_str);
        let leader =
            release.lease.as_ref().and_then(|lease| lease.annotations().get(LEADER_VERSION)).map(String::as_str);
        let all = [("the controller", controller), ("the leader", leader), ("the agents", agents)];
        let others = all
            .into_iter()
            .filter_map(|(who, version)| version.filter(|version| *version != ours).map(|version| (who, version)));
        others
            .map(|(who, version)| {
                Finding::new(
                    "versions",
                    format!("{who} of release {}: version {version}; this program: {ours}", release.name()),
                    "upgrade the older one: programs, images and chart are released together",
                )
            })
            .collect()
    })
}

/// No webhook that is gone keeps pods from being created.
fn webhooks(seen: &Seen) -> Vec<Finding> {
    let found = seen.dead_webhooks.iter().map(|name| {
        let what = format!("{name} must answer before a pod is created, and its Service does not exist");
        Finding::new("webhooks", what, "install what it belongs to again, or delete its webhook configuration")
    });
    found.collect()
}

/// Where a driver offers GPUs, the device class of the claims exists.
fn devices(seen: &Seen) -> Vec<Finding> {
    each(seen, |release| {
        let offers =
            release.arguments("--gpu-driver").into_iter().find(|driver| seen.drivers.iter().any(|it| it == driver));
        let lacks = release
            .arguments("--gpu-device-class")
            .into_iter()
            .find(|class| !seen.device_classes.iter().any(|it| it == class));
        let found = offers.zip(lacks).map(|(driver, class)| {
            let what = format!("driver {driver} offers GPUs, but there is no DeviceClass {class}, which claims name");
            Finding::new("devices", what, "set dra.deviceClass to that of the driver, or create it")
        });
        found.into_iter().collect()
    })
}
