//! A controller that lost rights: it names each as verb and resource in one sentence, does not
//! retry in a hot loop, and recovers by itself once the right is back. The rights are the chart's.

mod namespaced;

use anyhow::{Context, Result, ensure};
use futures::future::try_join_all;
use k8s_openapi::api::rbac::v1::PolicyRule;
use kube::api::Patch;
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;
use switchyard_tests::{
    Command, ControlPlane, ControllerOptions, Daemon, Jobs, Kubelet, KubeletOptions, Options, SYSTEM, TIMEOUT, account,
    chart_rules, plain_job, role, stage_of, start_controller, template_on, until_async,
};

/// Resource and verb, as the API server names them.
type Right = (&'static str, &'static str);

/// Rights that no case removes, with the reason.
const KEPT: [(Right, &str); 25] = [
    (("trainjobs/status", "patch"), "for jobs that cannot be read: tests/malformed.rs"),
    (("trainjobs/finalizers", "update"), "needed for an admission plugin that is off here"),
    (("pods", "get"), "needed when the reply to a create was lost: tests/faults.rs"),
    (("nodes", "get"), "needed before a node counts as lost: tests/lifecycle/nodes.rs"),
    (("devicetaintrules", "list"), "where the cluster has the kind: tests/devices/claims.rs"),
    (("devicetaintrules", "watch"), "where the cluster has the kind: tests/devices/claims.rs"),
    (("deviceclasses", "list"), "where rules select devices by class: tests/devices/claims.rs"),
    (("deviceclasses", "watch"), "where rules select devices by class: tests/devices/claims.rs"),
    (("resourceclaims", "get"), "needed when the reply to a create was lost"),
    (("resourceclaims", "create"), "for jobs with GPUs: tests/devices.rs"),
    (("resourceclaims", "patch"), "needed when our labels were removed from a claim"),
    (("resourceclaims", "delete"), "for jobs with GPUs: tests/devices.rs"),
    (("resourceclaimtemplates", "get"), "for jobs whose pods name one: tests/lifecycle/blockers.rs"),
    (("placementslices", "get"), "for jobs of more than 128 nodes: tests/lifecycle/large.rs"),
    (("placementslices", "create"), "for jobs of more than 128 nodes: tests/lifecycle/large.rs"),
    (("placementslices", "patch"), "needed when our labels were removed from a slice"),
    (("placementslices", "delete"), "for jobs of more than 128 nodes that restart: plan's tests/large.rs"),
    (("events", "patch"), "needed when an event repeats within minutes"),
    (("events", "list"), "needed when a pod does not start: tests/lifecycle/blockers.rs"),
    (("persistentvolumeclaims", "get"), "for jobs with volumes: tests/lifecycle/constraints.rs"),
    (("persistentvolumes", "get"), "for jobs with volumes: tests/lifecycle/constraints.rs"),
    (("persistentvolumes", "list"), "for jobs with volumes: tests/lifecycle/constraints.rs"),
    (("storageclasses", "get"), "for jobs with volumes: tests/lifecycle/constraints.rs"),
    (("validatingadmissionpolicies", "get"), "needed with the policy names from the chart: tests/chart.rs"),
    (("validatingadmissionpolicybindings", "get"), "needed with the policy names from the chart: tests/chart.rs"),
];

struct Case {
    name: &'static str,
    lost: &'static [Right],
    scenario: Scenario,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Scenario {
    /// A job is created and runs.
    Run,
    /// A job loses a pod, ends, and is deleted when its TTL expires; a user deletes another one.
    End,
    /// Another user removes our labels from the job's objects.
    Repair,
}

const CASES: [Case; 6] = [
    Case {
        name: "list",
        lost: &[
            ("trainjobs", "list"),
            ("placementslices", "list"),
            ("pods", "list"),
            ("nodes", "list"),
            ("gputopologies", "list"),
            ("resourceslices", "list"),
            ("resourceclaims", "list"),
            ("services", "list"),
            ("configmaps", "list"),
            ("poddisruptionbudgets", "list"),
            ("networkpolicies", "list"),
        ],
        scenario: Scenario::Run,
    },
    Case {
        name: "watch",
        lost: &[
            ("trainjobs", "watch"),
            ("placementslices", "watch"),
            ("pods", "watch"),
            ("nodes", "watch"),
            ("gputopologies", "watch"),
            ("resourceslices", "watch"),
            ("resourceclaims", "watch"),
            ("services", "watch"),
            ("configmaps", "watch"),
            ("poddisruptionbudgets", "watch"),
            ("networkpolicies", "watch"),
        ],
        scenario: Scenario::Run,
    },
    Case {
        name: "create",
        lost: &[
            ("trainjobs/status", "update"),
            ("events", "create"),
            ("services", "create"),
            ("configmaps", "create"),
            ("poddisruptionbudgets", "create"),
            ("networkpolicies", "create"),
            ("secrets", "create"),
            ("pods", "create"),
            ("pods", "patch"),
            ("pods/log", "get"),
        ],
        scenario: Scenario::Run,
    },
    Case {
        name: "delete",
        lost: &[
            ("pods", "delete"),
            ("configmaps", "delete"),
            ("poddisruptionbudgets", "delete"),
            ("trainjobs", "delete"),
            ("trainjobs", "get"),
        ],
        scenario: Scenario::End,
    },
    Case {
        name: "repair",
        lost: &[
            ("services", "get"),
            ("services", "patch"),
            ("configmaps", "get"),
            ("configmaps", "patch"),
            ("poddisruptionbudgets", "get"),
            ("poddisruptionbudgets", "patch"),
            ("networkpolicies", "get"),
            ("networkpolicies", "patch"),
        ],
        scenario: Scenario::Repair,
    },
    Case {
        name: "lease",
        lost: &[("leases", "get"), ("leases", "create"), ("leases", "update")],
        scenario: Scenario::Run,
    },
];

fn is(rule: &PolicyRule, right: &Right) -> bool {
    rule.resources.as_deref() == Some(&[right.0.to_string()]) && rule.verbs == [right.1]
}

/// A controller with its own set of rights.
struct Actor<'a> {
    plane: &'a ControlPlane,
    case: &'a Case,
    jobs: Jobs,
    kubelet: Arc<Kubelet>,
    controller: Daemon,
    lost: BTreeSet<Right>,
    started: Instant,
}

impl<'a> Actor<'a> {
    async fn start(plane: &'a ControlPlane, case: &'a Case) -> Result<Actor<'a>> {
        let user = format!("lost-{}", case.name);
        let lost: BTreeSet<Right> = case.lost.iter().copied().collect();
        let kubeconfig = account(plane, &user, &without(&lost)?)?;
        let namespace = plane.namespace(case.name).await?;
        let kubelet = Arc::new(Kubelet::start(plane.config().await?, KubeletOptions::new(&namespace, 2)).await?);
        let elects = case.name == "lease";
        let arguments: &[&str] = if elects { &["--leader-elect", "Enabled", "--namespace", SYSTEM] } else { &[] };
        let arguments = arguments.iter().map(ToString::to_string).collect();
        let (kubeconfig, watched) = (Some(kubeconfig), Some(namespace.clone()));
        let options = ControllerOptions { kubeconfig, arguments, namespace: watched, ..ControllerOptions::default() };
        let controller = start_controller(plane, &user, &options)?;
        let jobs = Jobs::new(plane.client().await?, &namespace);
        Ok(Actor { plane, case, jobs, kubelet, controller, lost, started: Instant::now() })
    }

    /// Creates a two-node engine job, which needs every kind of object.
    async fn create(&self, name: &str, spec: Value) -> Result<()> {
        let mut job = plain_job(name, 2, "run");
        job["spec"]["trainer"] = json!({"numNodes": 2, "resourcesPerNode": {"limits": {"cpu": "100m"}}});
        job["spec"]["engine"] = json!({
            "model": {"type": "GPT", "gpt": {"layers": 1, "hiddenSize": 32, "heads": 2, "contextLength": 32}},
            "data": {"path": "/data"}, "steps": 3,
        });
        job["spec"]["template"]["spec"] = template_on(&self.kubelet.nodes())["spec"].clone();
        for (key, value) in spec.as_object().unwrap() {
            job["spec"][key] = value.clone();
        }
        self.jobs.create(job).await?;
        Ok(())
    }

    /// Restores each right after the controller has named it, until `done` holds and all are
    /// restored.
    async fn restore_rights(&mut self, done: impl AsyncFn(&Jobs) -> Result<bool>) -> Result<()> {
        let is_over = async || {
            self.controller.ensure_running()?;
            // The log quotes errors, some of them twice.
            let log = std::fs::read_to_string(&self.controller.log)?.replace('\\', "");
            ensure!(!log.contains("panicked"), "{log}");
            let is_named = |right: &&Right| log.contains(&format!("cannot {} resource \"{}\"", right.1, right.0));
            let named: Vec<Right> = self.lost.iter().filter(is_named).copied().collect();
            for right in named {
                self.lost.remove(&right);
                let role = Patch::Apply(role(&format!("lost-{}", self.case.name), &without(&self.lost)?));
                let api = Api::<k8s_openapi::api::rbac::v1::ClusterRole>::all(self.jobs.client.clone());
                let params = kube::api::PatchParams::apply("test").force();
                api.patch(&format!("lost-{}", self.case.name), &params, &role).await?;
            }
            // Call it in every round, because it can also drive the test forward.
            let is_done = done(&self.jobs).await?;
            Ok(self.lost.is_empty() && is_done)
        };
        let ended = until_async("done, with all lost rights named", TIMEOUT, is_over).await;
        let fault = || format!("{}: not named: {:?}\n{}", self.case.name, self.lost, self.controller.tail());
        ended.map(drop).with_context(fault)
    }

    async fn play(mut self) -> Result<()> {
        let runs =
            async |jobs: &Jobs| Ok(jobs.api().get_opt("a").await?.is_some_and(|job| stage_of(&job) == Some("Running")));
        match self.case.scenario {
            Scenario::Run => {
                self.create("a", json!({})).await?;
                self.restore_rights(runs).await?;
            }
            Scenario::End => {
                self.create("a", json!({"ttlSecondsAfterFinished": 1, "failurePolicy": {"maxRestarts": 1}})).await?;
                self.create("b", json!({})).await?;
                self.jobs.wait_stage("a", "Running").await?;
                self.jobs.wait_stage("b", "Running").await?;
                self.jobs.api().delete("b", &Default::default()).await?;
                self.kubelet.send(&self.jobs.namespace, "a-1-1", Command::Exit(5, String::new()))?;
                let kubelet = Arc::clone(&self.kubelet);
                let ended = async move |jobs: &Jobs| {
                    for pod in
                        jobs.pods().await?.iter().map(ResourceExt::name_any).filter(|name| name.starts_with("a-2"))
                    {
                        let _ = kubelet.send(&jobs.namespace, &pod, Command::Exit(0, String::new()));
                    }
                    Ok(jobs.api().get_opt("a").await?.is_none())
                };
                self.restore_rights(ended).await?;
            }
            Scenario::Repair => {
                self.create("a", json!({})).await?;
                self.jobs.wait_stage("a", "Running").await?;
                let name = ["service/a", "networkpolicy/a", "poddisruptionbudget/a", "configmap/a-1"];
                let namespace = self.jobs.namespace.clone();
                for object in name {
                    let ended =
                        self.plane.kubectl(&["label", object, "-n", &namespace, "training.switchyard.dev/job-uid-"]);
                    ensure!(ended.code == Some(0), "{}", ended.stderr);
                }
                let plane = self.plane;
                let whole = async move |jobs: &Jobs| {
                    let kinds = "services,networkpolicies,poddisruptionbudgets,configmaps";
                    let labelled =
                        ["get", kinds, "-n", &jobs.namespace, "-l", "training.switchyard.dev/job-uid", "-o", "name"];
                    Ok(plane.kubectl(&labelled).stdout.lines().count() == 4)
                };
                self.restore_rights(whole).await?;
            }
        }
        self.ensure_backoff()
    }

    /// Checks the calls that were refused for missing rights, by verb and resource: fast at first,
    /// then one attempt per 5 s.
    fn ensure_backoff(&self) -> Result<()> {
        let user = format!("system:serviceaccount:{SYSTEM}:lost-{}", self.case.name);
        let mut refused: BTreeMap<String, u64> = BTreeMap::new();
        for entry in self.plane.audit_entries() {
            let field = |path: &str| entry.pointer(path).and_then(Value::as_str).unwrap_or_default();
            if field("/user/username") == user && entry.pointer("/responseStatus/code") == Some(&403.into()) {
                *refused.entry(format!("{} {}", field("/verb"), field("/objectRef/resource"))).or_default() += 1;
            }
        }
        println!("{} in {} s: {refused:?}", self.case.name, self.started.elapsed().as_secs());
        // Two pods are created concurrently, and the Lease is read every 2 s.
        let max = 2 * (12 + self.started.elapsed().as_secs() / 4);
        ensure!(refused.values().all(|count| *count <= max), "{}: more than {max}: {refused:?}", self.case.name);
        ensure!(!refused.is_empty(), "{}: nothing was refused", self.case.name);
        Ok(())
    }
}

/// The chart's rights without these.
fn without(lost: &BTreeSet<Right>) -> Result<Vec<PolicyRule>> {
    Ok(chart_rules()?.into_iter().filter(|rule| !lost.iter().any(|right| is(rule, right))).collect())
}

#[tokio::test]
async fn a_lost_right_is_named_and_its_return_is_detected() -> Result<()> {
    // Without a garbage collector, the pods of a deleted job always remain, so that the controller
    // looks for the job.
    let options = Options { scheduler: true, audit: true, ..Options::default() };
    let plane = ControlPlane::start(&options)?;
    plane.install_crds().await?;
    let mut actors = Vec::new();
    for case in &CASES {
        actors.push(Actor::start(&plane, case).await.context(case.name)?);
    }
    try_join_all(actors.into_iter().map(Actor::play)).await?;
    Ok(())
}

/// A right that is added to the chart needs a case or an exemption.
#[test]
fn every_right_of_the_chart_has_a_case_or_an_exemption() -> Result<()> {
    let rules = chart_rules()?;
    let cases = CASES.iter().flat_map(|case| case.lost).chain(KEPT.iter().map(|(right, _)| right));
    let known: Vec<&Right> = cases.collect();
    for rule in &rules {
        ensure!(known.iter().any(|right| is(rule, right)), "no case takes this right away: {rule:?}");
    }
    for right in known {
        ensure!(rules.iter().any(|rule| is(rule, right)), "the chart does not give this right: {right:?}");
    }
    Ok(())
}
