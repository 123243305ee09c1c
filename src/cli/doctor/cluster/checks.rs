//! The checks: one function each, from observations to findings.

use super::Finding;
use super::observations::{Observations, Release, release_name};
use crate::live::holder;
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use std::collections::BTreeSet;
use switchyard_crds::conditions::{COMPLETE, FAILED, PODS_CREATED};
use switchyard_crds::generate;
use switchyard_crds::gpu_topology::GPUTopology;
use switchyard_crds::labels::{LEADER_CLOCK_SKEW, LEADER_POLICIES, LEADER_VERSION, LEASE};
use switchyard_crds::names::GPU_RESOURCE;
use switchyard_ledger::devices::{DeviceRule, Selector};
use switchyard_plan::cluster::clock::is_stale;
use switchyard_plan::policies::{Probe, denying_policy, fault};

const ADMINISTRATOR: &str = "look with the kubeconfig of an administrator";
/// Most nodes named in a finding.
const NAMED: usize = 4;
const UPGRADE: &str = "helm upgrade with the chart of this version puts it back (docs/install.md)";

/// All findings, most severe check first.
pub(super) fn all(observations: &Observations) -> Vec<Finding> {
    let checks: [fn(&Observations) -> Vec<Finding>; 15] = [
        foreign_pods,
        policies,
        leftovers,
        crds,
        releases,
        leader,
        rights,
        agents,
        reports,
        versions,
        webhooks,
        devices,
        slices,
        taint_rules,
        refused_jobs,
    ];
    let mut findings: Vec<Finding> = checks.iter().flat_map(|check| check(observations)).collect();
    let unread: BTreeSet<&(String, String)> = observations.unread.iter().collect();
    findings.extend(
        unread.into_iter().map(|(what, why)| Finding::new("rights", format!("cannot {what}: {why}"), ADMINISTRATOR)),
    );
    findings
}

fn each<'a>(observations: &'a Observations, check: impl Fn(&'a Release) -> Vec<Finding>) -> Vec<Finding> {
    observations.releases.iter().flat_map(check).collect()
}

/// Our admission policies do not refuse foreign pods.
fn foreign_pods(observations: &Observations) -> Vec<Finding> {
    let names: Vec<String> = observations.policies.iter().map(ResourceExt::name_any).collect();
    let off = "kubectl delete validatingadmissionpolicybinding";
    let mut findings = each(observations, |release| {
        let answer = release.foreign.as_deref().map_or(Ok(()), Err);
        let found = Probe::Foreign.evaluate(&names, answer).into_iter();
        found
            .map(|found| {
                let fix = format!("{off} {}; then helm upgrade with the chart of this version", found.policy);
                Finding::new("policies", format!("{} {}", found.policy, found.fault), fix)
            })
            .collect()
    });
    for policy in
        observations.policies.iter().filter(|policy| policy.spec.as_ref().is_some_and(|spec| spec.param_kind.is_some()))
    {
        let name = policy.name_any();
        let what = format!(
            "{name} needs a parameter object: while that is missing, objects that the policy covers cannot be created"
        );
        let both = "kubectl delete validatingadmissionpolicies,validatingadmissionpolicybindings";
        let fix = format!("{both} {name}; then helm upgrade with the chart of this version");
        findings.push(Finding::new("policies", what, fix));
    }
    findings
}

/// Every release has its policies, and they are enforced.
fn policies(observations: &Observations) -> Vec<Finding> {
    each(observations, |release| {
        let names: Vec<String> = release.arguments("--admission-policy").into_iter().map(str::to_string).collect();
        if names.is_empty() {
            let what = format!(
                "release {} has none: users who can create TrainJobs can do everything that pods can",
                release.name()
            );
            return vec![Finding::new("policies", what, "helm upgrade with admissionPolicy.enabled=true")];
        }
        let missing = names.iter().filter_map(|name| {
            let policy = observations.policies.iter().find(|policy| policy.name_any() == *name);
            let binding = observations.bindings.iter().find(|binding| binding.name_any() == *name);
            fault(policy, binding).map(|fault| Finding::new("policies", format!("{name}: {fault}"), UPGRADE))
        });
        let mut findings: Vec<Finding> = missing.collect();
        // The refusals only matter once the objects exist.
        if findings.is_empty() {
            findings.extend(refusals(release, &names));
        }
        findings
    })
}

/// The policies refuse what they must refuse.
fn refusals(release: &Release, names: &[String]) -> Vec<Finding> {
    let tried = [
        (&release.forged, "-children", "a pod with the label of a job"),
        (&release.job, "-trainjobs", "a TrainJob with a capability that is not allowed"),
    ];
    let faults = tried.into_iter().filter_map(|(answer, end, what)| {
        let policy = names.iter().find(|name| name.ends_with(end))?;
        match answer {
            None => Some(Finding::new("policies", format!("{policy} does not refuse {what}"), UPGRADE)),
            Some(words) if denying_policy(words).is_some_and(|by| names.iter().any(|name| name == by)) => None,
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
fn leftovers(observations: &Observations) -> Vec<Finding> {
    let living: BTreeSet<&str> = observations.releases.iter().map(Release::name).collect();
    let dead: BTreeSet<&str> = observations.policies.iter().map(|policy| release_name(policy.labels())).collect();
    let mut findings: Vec<Finding> = dead.difference(&living).map(|name| Finding::new(
        "policies",
        format!("release {name} has no controller any more, but its policies remain: they refuse the pods of other releases"),
        format!("kubectl delete validatingadmissionpolicies,validatingadmissionpolicybindings,clusterroles,clusterrolebindings,flowschemas -l app.kubernetes.io/part-of=switchyard,app.kubernetes.io/instance={name}"),
    )).collect();
    for (at, first) in observations.releases.iter().enumerate() {
        for second in &observations.releases[at + 1..] {
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

/// The CRDs exist and match this program.
fn crds(observations: &Observations) -> Vec<Finding> {
    let fix = "helm upgrade with crds.enabled=true, or switchyard crd | kubectl apply --server-side -f -";
    let fault =
        |ours: &k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition| {
            let name = ours.name_any();
            let Some(found) = observations.crds.get(&name) else { return Some(format!("{name} is missing")) };
            let conditions = found.status.as_ref().and_then(|status| status.conditions.as_ref());
            if !conditions.into_iter().flatten().any(|it| it.type_ == "Established" && it.status == "True") {
                return Some(format!("{name} is not served"));
            }
            let differs = ours.spec.versions.iter().any(|version| {
                let found = found.spec.versions.iter().find(|found| found.name == version.name);
                found.is_none_or(|found| found.schema != version.schema)
            });
            differs.then(|| format!("{name} does not match this program ({})", env!("CARGO_PKG_VERSION")))
        };
    let faults = generate::crds().into_iter().filter_map(|(_, crd)| fault(&crd));
    faults.map(|what| Finding::new("crds", what, fix)).collect()
}

/// A controller exists and runs.
fn releases(observations: &Observations) -> Vec<Finding> {
    let is_unread = observations.unread.iter().any(|(what, _)| what.contains("deployments"));
    if observations.releases.is_empty() && !is_unread {
        let fix = "helm install switchyard charts/switchyard --namespace switchyard-system (docs/install.md)";
        return vec![Finding::new("controller", "there is no Deployment of one: Switchyard is not installed", fix)];
    }
    each(observations, |release| {
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
                format!("kubectl -n {place} describe pods -l app.kubernetes.io/component=controller shows why"),
            )];
        }
        Vec::new()
    })
}

/// One controller leads, renews its Lease, and has no complaints about the policies.
fn leader(observations: &Observations) -> Vec<Finding> {
    each(observations, |release| {
        let place = release.place();
        if release.arguments("--leader-elect") == ["Disabled"] {
            return Vec::new();
        }
        let fix = format!("kubectl -n {place} logs -l app.kubernetes.io/component=controller shows why");
        let one = |what: String| vec![Finding::new("leader", what, fix.clone())];
        let Some(lease) = &release.lease else { return one(format!("there is no Lease {place}/{LEASE}")) };
        let holder = match holder(lease, observations.now) {
            Ok(holder) => holder,
            Err(why) => return one(why),
        };
        let annotations = lease.annotations();
        let said = annotations.get(LEADER_POLICIES).filter(|said| *said != "ok");
        let said = said.map(|said| Finding::new("policies", format!("{holder} found: {said}"), UPGRADE));
        let skew = annotations.get(LEADER_CLOCK_SKEW).map(|skew| {
            let what = format!("the clock of the node of {holder} is off by {skew} s against the API server's");
            Finding::new("clock", what, "synchronise the clock of that node (chrony, systemd-timesyncd)")
        });
        said.into_iter().chain(skew).collect()
    })
}

/// Every eligible node has an agent.
fn agents(observations: &Observations) -> Vec<Finding> {
    each(observations, |release| {
        release.agents.as_ref().map(|agents| agent_faults(release, agents)).unwrap_or_default()
    })
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
    // Running pods stay, even if their namespace would refuse them now; new ones are not created.
    let warnings = release.warnings.iter().filter(|_| there < wanted).chain(&release.agent_pod);
    let warned = |words: &str| warnings.clone().any(|warning| warning.contains(words));
    let (no_quota, no_folders) = (warned("insufficient quota to match these scopes"), warned("violates PodSecurity"));
    let updated = status.updated_number_scheduled.unwrap_or(wanted);
    if ready >= wanted && !no_quota && !no_folders {
        if updated < wanted {
            let what = format!("{name}: {updated} of {wanted} pods are of its current version");
            let fix = format!("kubectl -n {place} rollout status daemonset/{name} shows what it waits for");
            return vec![Finding::new("agents", what, fix)];
        }
        return Vec::new();
    }
    let privileged =
        format!("kubectl label --overwrite namespace {place} pod-security.kubernetes.io/enforce=privileged");
    let (why, fix) = if no_quota {
        let why = "this cluster (GKE does) takes the priority class of the agents only in a namespace with a ResourceQuota for it";
        (format!("; {why}"), "helm upgrade with nodeAgent.resourceQuota.enabled=true".into())
    } else if no_folders {
        ("; Pod Security forbids folders and the network of the node".into(), privileged)
    } else {
        let last = release.warnings.last().map_or(String::new(), |last| format!("; {last}"));
        (
            last,
            format!("kubectl -n {place} describe daemonset,pods -l app.kubernetes.io/component=node-agent shows why"),
        )
    };
    vec![Finding::new("agents", format!("{name}: {ready} of {wanted} are ready, {there} exist{why}"), fix)]
}

/// Chart, controller, leader, agents and this program have the same version.
fn versions(observations: &Observations) -> Vec<Finding> {
    let ours = env!("CARGO_PKG_VERSION");
    let there: BTreeSet<String> = observations.nodes.iter().map(ResourceExt::name_any).collect();
    let is_other = |report: &&GPUTopology| {
        let agent = report.status.as_ref().and_then(|status| status.agent_version.as_deref());
        there.contains(&report.name_any()) && agent.is_some_and(|version| version != ours)
    };
    let others: Vec<String> = observations.reports.iter().filter(is_other).map(ResourceExt::name_any).collect();
    let mut findings = Vec::new();
    if !others.is_empty() {
        let what = format!("the agents of {} are of another version than this program ({ours})", named(&others));
        findings.push(Finding::new(
            "versions",
            what,
            "wait until the rollout of the agents' DaemonSet is over, or upgrade the older one",
        ));
    }
    let label = "app.kubernetes.io/version";
    findings.extend(each(observations, |release| {
        let controller = release.controller.labels().get(label).map(String::as_str);
        let agents = release.agents.as_ref().and_then(|agents| agents.labels().get(label)).map(String::as_str);
        let leader =
            release.lease.as_ref().and_then(|lease| lease.annotations().get(LEADER_VERSION)).map(String::as_str);
        let chart =
            release.controller.labels().get("helm.sh/chart").and_then(|chart| chart.strip_prefix("switchyard-"));
        let all =
            [("the chart", chart), ("the controller", controller), ("the leader", leader), ("the agents", agents)];
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
    }));
    findings
}

/// No unavailable webhook blocks the creation of pods.
fn webhooks(observations: &Observations) -> Vec<Finding> {
    let found = observations.dead_webhooks.iter().map(|(name, why)| {
        let what = format!("{name} must answer before a pod or a TrainJob is created, and {why}");
        Finding::new("webhooks", what, "reinstall the component it belongs to, or delete its webhook configuration")
    });
    found.collect()
}

/// The service accounts have the permissions in the chart.
fn rights(observations: &Observations) -> Vec<Finding> {
    each(observations, |release| {
        let found = release.missing_permissions.iter().filter_map(|(account, missing)| match missing {
            Ok(missing) if missing.is_empty() => None,
            Ok(missing) => {
                let what = format!("{account} cannot {}", missing.join(", "));
                Some(Finding::new("rights", what, UPGRADE))
            }
            Err(why) => {
                let what = format!("cannot check the rights of {account}: {why}");
                Some(Finding::new("rights", what, ADMINISTRATOR))
            }
        });
        found.collect()
    })
}

/// GPU nodes have recent reports.
fn reports(observations: &Observations) -> Vec<Finding> {
    let Some(release) = observations.releases.iter().find(|release| release.agents.is_some()) else {
        return Vec::new();
    };
    let reported: BTreeSet<String> = observations.reports.iter().map(ResourceExt::name_any).collect();
    let has_gpus = |node: &&Node| {
        let offered = node.status.as_ref().and_then(|status| status.allocatable.as_ref()?.get(GPU_RESOURCE));
        offered.is_some_and(|count| count.0 != "0")
    };
    let silent: Vec<String> = observations.nodes.iter().filter(has_gpus).map(ResourceExt::name_any).collect();
    let silent: Vec<String> = silent.into_iter().filter(|node| !reported.contains(node)).collect();
    let mut findings = Vec::new();
    if !silent.is_empty() {
        let what =
            format!("no report of {}, which {} GPUs", named(&silent), if silent.len() == 1 { "has" } else { "have" });
        let fix =
            "see nodeAgent.nodeSelector, nodeAgent.gpuNodesOnly and nodeAgent.tolerations: an agent must run there";
        findings.push(Finding::new("reports", what, fix));
    }
    let there: BTreeSet<String> = observations.nodes.iter().map(ResourceExt::name_any).collect();
    let is_old = |report: &&GPUTopology| {
        let observed = report.status.as_ref().and_then(|status| status.observed_time.as_ref());
        there.contains(&report.name_any()) && observed.is_none_or(|at| is_stale(at.0, observations.now))
    };
    let old: Vec<String> = observations.reports.iter().filter(is_old).map(ResourceExt::name_any).collect();
    if !old.is_empty() {
        let what = format!("the reports of {} are older than half an hour: jobs do not go there", named(&old));
        let place = release.place();
        let fix = format!(
            "kubectl -n {place} logs -l app.kubernetes.io/component=node-agent shows why, unless the node is gone"
        );
        findings.push(Finding::new("reports", what, fix));
    }
    findings
}

/// `a, b, c and 5 more nodes`.
fn named(nodes: &[String]) -> String {
    let first = nodes[..nodes.len().min(NAMED)].join(", ");
    match nodes.len().saturating_sub(NAMED) {
        0 if nodes.len() == 1 => format!("node {first}"),
        0 => format!("nodes {first}"),
        more => format!("nodes {first} and {more} more"),
    }
}

/// If the device class of the claims exists, a driver offers devices.
fn slices(observations: &Observations) -> Vec<Finding> {
    each(observations, |release| {
        let class = release
            .arguments("--gpu-device-class")
            .into_iter()
            .find(|class| observations.device_classes.iter().any(|it| it.name_any() == **class));
        let silent = release
            .arguments("--gpu-driver")
            .into_iter()
            .find(|driver| observations.drivers.iter().all(|it| it != driver));
        let found = class.zip(silent).map(|(class, driver)| {
            let what = format!(
                "DeviceClass {class} exists, but driver {driver} offers no ResourceSlice: no GPU comes by claims"
            );
            Finding::new(
                "devices",
                what,
                "see the pods of the driver on the nodes with GPUs, or delete the DeviceClass",
            )
        });
        found.into_iter().collect()
    })
}

/// The controller evaluates every CEL selector of the rules that taint devices.
fn taint_rules(observations: &Observations) -> Vec<Finding> {
    let faults = observations.taint_rules.iter().flat_map(|rule| {
        let name = rule.name_any();
        let parsed = serde_json::to_value(&rule.spec).map_err(|error| error.to_string());
        let parsed = match parsed.and_then(|spec| DeviceRule::of(&spec)) {
            Ok(parsed) => parsed,
            Err(error) => return vec![format!("DeviceTaintRule {name} is ignored: {error}")],
        };
        let class = parsed.as_ref().and_then(DeviceRule::class);
        let class = class.and_then(|name| observations.device_classes.iter().find(|class| class.name_any() == name));
        let of_class = class.map(|class| Selector::all(class.spec.selectors.as_deref().unwrap_or_default()));
        let selectors = of_class.iter().flatten().chain(parsed.iter().flat_map(DeviceRule::selectors));
        let faults = selectors.filter_map(Selector::fault);
        faults
            .map(|fault| {
                format!("DeviceTaintRule {name} keeps jobs off all devices that its other fields select: {fault}")
            })
            .collect()
    });
    let fix = "select by driver, pool or device, or compare attributes without functions";
    faults.map(|what| Finding::new("devices", what, fix)).collect()
}

/// No job waits for pods that the Pod Security level of its namespace refuses.
fn refused_jobs(observations: &Observations) -> Vec<Finding> {
    let refused = observations.jobs.iter().filter_map(|job| {
        let status = job.status.as_ref().filter(|status| !status.is(COMPLETE) && !status.is(FAILED))?;
        let refused = status.condition(PODS_CREATED).filter(|it| it.message.contains("violates PodSecurity"))?;
        let namespace = job.namespace().unwrap_or_default();
        let what = format!("the pods of TrainJob {namespace}/{} are refused: {}", job.name_any(), refused.message);
        let fix = format!(
            "take what it names out of spec.template, or label namespace {namespace} with a lower pod-security.kubernetes.io/enforce"
        );
        Some(Finding::new("jobs", what, fix))
    });
    refused.collect()
}

/// If a driver offers GPUs, the device class of the claims exists.
fn devices(observations: &Observations) -> Vec<Finding> {
    each(observations, |release| {
        let offers = release
            .arguments("--gpu-driver")
            .into_iter()
            .find(|driver| observations.drivers.iter().any(|it| it == driver));
        let missing_class = release
            .arguments("--gpu-device-class")
            .into_iter()
            .find(|class| !observations.device_classes.iter().any(|it| it.name_any() == **class));
        let found = offers.zip(missing_class).map(|(driver, class)| {
            let what = format!("driver {driver} offers GPUs, but there is no DeviceClass {class}, which claims name");
            Finding::new("devices", what, "set dra.deviceClass to the driver's class, or create it")
        });
        found.into_iter().collect()
    })
}
