//! Pods of other tenants are admitted after any sequence of chart operations.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::admissionregistration::v1::ValidatingAdmissionPolicy;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{ListParams, PostParams};
use kube::runtime::wait::await_condition;
use kube::{Api, Client};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::Duration;
use switchyard_crds::labels;
use switchyard_tests::chart::RELEASE;
use switchyard_tests::{ControlPlane, Options, SYSTEM, TIMEOUT, refusal, until_async};

/// The namespace of the foreign objects.
const FOREIGN: &str = "default";
/// The namespace of the second release.
const SECOND: &str = "second";
/// Installs neither pods nor CRDs, because only the API server's refusals matter.
const LEAN: [&str; 4] = ["--set", "controller.replicas=0", "--set", "crds.enabled=false"];

/// A chart operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    Install,
    Upgrade,
    Uninstall,
    /// Uninstalls and reinstalls immediately, before the API server has noticed.
    Reinstall,
    PoliciesOff,
    PoliciesOn,
    NamespaceDeleted,
    SecondRelease,
}

use Step::{Install, NamespaceDeleted, PoliciesOff, PoliciesOn, Reinstall, SecondRelease, Uninstall, Upgrade};

const STEPS: [Step; 8] =
    [Install, Upgrade, Uninstall, Reinstall, PoliciesOff, PoliciesOn, NamespaceDeleted, SecondRelease];

/// Objects in the API server: `policies` is `None` without the first release, and otherwise says
/// whether it has policies; `second` says whether the second release is installed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct State {
    policies: Option<bool>,
    second: bool,
}

impl State {
    /// The next state; `None` if helm refuses without writing, or writes no change.
    fn after(self, step: Step) -> Option<State> {
        let to = |policies| Some(State { policies, ..self });
        match (step, self.policies) {
            (Install, None) => to(Some(true)),
            (Upgrade, Some(_)) => Some(self),
            (Uninstall | NamespaceDeleted, Some(_)) => to(None),
            (Reinstall, Some(true)) => Some(self),
            (PoliciesOff, Some(true)) => to(Some(false)),
            (PoliciesOn, Some(false)) => to(Some(true)),
            (SecondRelease, _) if !self.second => Some(State { second: true, ..self }),
            _ => None,
        }
    }
}

/// Every state-changing step from every state with one release, and the second release alongside
/// each state of the first.
///
/// This walk covers all sequences of the eight steps, of any length. An API server's reply depends
/// only on the stored objects, because the test also checks that no policy has a parameter.
/// Parameter informers are the only other state of policies. So the reply after a sequence equals
/// the reply after its last step from the preceding state, and the walk contains every such pair.
/// It omits steps that change no object (helm refuses, or nothing to do), and a reinstallation
/// without policies, which is an uninstallation plus an installation. With two releases, the server
/// evaluates each release's policies independently and refuses if either refuses.
const WALK: [Step; 19] = [
    Install,
    NamespaceDeleted,
    Install,
    Upgrade,
    Reinstall,
    Uninstall,
    Install,
    PoliciesOff,
    Upgrade,
    PoliciesOn,
    PoliciesOff,
    Uninstall,
    Install,
    PoliciesOff,
    NamespaceDeleted,
    SecondRelease,
    Install,
    PoliciesOff,
    Uninstall,
];

const PRISTINE: State = State { policies: None, second: false };

#[test]
fn the_walk_takes_every_step_from_every_state_of_one_release() {
    let mut state = PRISTINE;
    let mut taken = BTreeSet::new();
    let mut seen = BTreeSet::from([state]);
    for step in WALK {
        taken.insert((state, step));
        state = state.after(step).unwrap_or_else(|| panic!("{step:?} does nothing in {state:?}"));
        seen.insert(state);
    }
    for (state, step) in seen.iter().flat_map(|state| STEPS.map(|step| (*state, step))) {
        let counts = !state.second && (step != SecondRelease || state.policies.is_none());
        assert!(!counts || state.after(step).is_none() || taken.contains(&(state, step)), "{step:?} in {state:?}");
    }
    assert_eq!(seen.len(), 6, "{seen:?}");
}

struct Cluster {
    plane: ControlPlane,
    admin: Client,
}

impl Cluster {
    async fn start() -> Result<Cluster> {
        let plane = ControlPlane::start(&Options { controller_manager: true, ..Options::default() })?;
        plane.install_crds().await?;
        let admin = plane.client().await?;
        let cluster = Cluster { plane, admin };
        cluster.namespace(SECOND)?;
        let accounts = Api::<k8s_openapi::api::core::v1::ServiceAccount>::namespaced(cluster.admin.clone(), FOREIGN);
        let exists = await_condition(accounts, "default", |account: Option<&_>| account.is_some());
        tokio::time::timeout(TIMEOUT, exists).await.context("no default service account")??;
        Ok(cluster)
    }

    fn namespace(&self, name: &str) -> Result<()> {
        let made = self.plane.kubectl(&["create", "namespace", name]);
        ensure!(made.code == Some(0) || made.stderr.contains("AlreadyExists"), "{}", made.stderr);
        Ok(())
    }

    fn helm(&self, arguments: &[&str]) -> Result<()> {
        let ended = self.plane.helm(&[arguments, &["--namespace", SYSTEM]].concat());
        ensure!(ended.code == Some(0), "helm {arguments:?}: {}", ended.stderr);
        Ok(())
    }

    fn take(&self, step: Step, before: State) -> Result<()> {
        let install = [&["install", RELEASE, "."][..], &LEAN].concat();
        // Two releases must not share a namespace.
        let first = format!("controller.namespaces={}", if before.second { r#"["first"]"# } else { "[]" });
        let install = || {
            self.namespace(SYSTEM)?;
            self.helm(&[&install[..], &["--set-json", &first]].concat())
        };
        let upgrade = |set: &str| self.helm(&["upgrade", RELEASE, ".", "--reuse-values", "--set", set]);
        match step {
            Install => install(),
            Upgrade => upgrade("admissionPolicy.allow.hostIPC=upgraded"),
            Uninstall => self.helm(&["uninstall", RELEASE]),
            Reinstall => self.helm(&["uninstall", RELEASE]).and_then(|()| install()),
            PoliciesOff => upgrade("admissionPolicy.enabled=false"),
            PoliciesOn => upgrade("admissionPolicy.enabled=true"),
            NamespaceDeleted => {
                let deleted = self.plane.kubectl(&["delete", "namespace", SYSTEM]);
                ensure!(deleted.code == Some(0), "{}", deleted.stderr);
                Ok(())
            }
            SecondRelease => {
                let other = ["install", "other", ".", "--namespace", SECOND, "--set", "controller.namespaces={second}"];
                let ended = self.plane.helm(&[&other[..], &LEAN].concat());
                ensure!(ended.code == Some(0), "{}", ended.stderr);
                Ok(())
            }
        }
    }

    /// Waits until the API server refuses (or accepts) one object for each policy of the first
    /// release that could refuse pods or jobs of other tenants. The server reloads changed policies
    /// once a second.
    async fn settle(&self, policies: bool) -> Result<()> {
        let namespace = "first";
        self.namespace(namespace)?;
        let forged = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "forged", "labels": {labels::JOB_UID: "1"}}});
        let owner =
            json!({"apiVersion": labels::API_VERSION, "kind": "TrainJob", "name": "a", "uid": "1", "controller": true});
        let ungated = json!({"apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": "a-1-0", "labels": {labels::JOB_UID: "1"}, "ownerReferences": [owner]},
            "spec": {"containers": [{"name": "trainer", "image": "image"}]}});
        let job = json!({"apiVersion": labels::API_VERSION, "kind": "TrainJob", "metadata": {"name": "a"},
            "spec": {"trainer": {"framework": "Plain", "image": "image", "command": ["train"]},
                "template": {"spec": {"hostNetwork": true}}}});
        let controller = format!("system:serviceaccount:{SYSTEM}:switchyard-controller");
        let mut seen = None;
        let are_expected = async || {
            let answers = [
                refusal(&self.admin, None, namespace, &forged).await?,
                refusal(&self.admin, Some(&controller), namespace, &ungated).await?,
                refusal(&self.admin, None, namespace, &job).await?,
            ];
            let is_policy_error =
                |answer: &Option<String>| answer.as_deref().is_some_and(|words| words.contains("'switchyard-"));
            let are_expected = answers.iter().all(|answer| is_policy_error(answer) == policies);
            seen = Some(answers);
            Ok(are_expected)
        };
        let settled = until_async("answered as expected", TIMEOUT, are_expected).await;
        settled.map(drop).with_context(|| format!("policies: {policies}, but {seen:?}"))
    }

    /// Creates a pod, and a Deployment whose pod another controller creates.
    async fn foreign_objects_are_made(&self, name: &str) -> Result<()> {
        let pods = Api::<Pod>::namespaced(self.admin.clone(), FOREIGN);
        let pod = json!({"metadata": {"name": name}, "spec": foreign()});
        pods.create(&PostParams::default(), &serde_json::from_value(pod)?).await.context("a foreign pod")?;
        let deployments = Api::<Deployment>::namespaced(self.admin.clone(), FOREIGN);
        let chosen = json!({"app": name});
        let deployment = json!({"metadata": {"name": name}, "spec": {"selector": {"matchLabels": chosen},
            "template": {"metadata": {"labels": chosen}, "spec": foreign()}}});
        let made = deployments.create(&PostParams::default(), &serde_json::from_value(deployment)?).await;
        made.context("a foreign Deployment")?;
        let has_pod = |it: Option<&Deployment>| it.and_then(|it| it.status.as_ref()?.replicas) == Some(1);
        let made = await_condition(deployments, name, has_pod);
        tokio::time::timeout(TIMEOUT, made).await.context("a foreign Deployment gets no pod")??;
        Ok(())
    }

    async fn no_policy_has_a_parameter(&self) -> Result<()> {
        let policies = Api::<ValidatingAdmissionPolicy>::all(self.admin.clone()).list(&ListParams::default()).await?;
        ensure!(!policies.items.is_empty(), "no policies");
        let with = policies.iter().find(|policy| policy.spec.as_ref().is_some_and(|spec| spec.param_kind.is_some()));
        ensure!(with.is_none(), "the API server has another memory than its objects: {with:?}");
        Ok(())
    }
}

fn foreign() -> Value {
    json!({"containers": [{"name": "a", "image": "image"}]})
}

/// Checks ten times a second that a foreign pod would be admitted, also while helm runs. The API
/// server reloads changed policies once a second.
async fn watch_foreign_pods(client: Client) -> Result<()> {
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "meanwhile"}, "spec": foreign()});
    loop {
        let refused = refusal(&client, None, FOREIGN, &pod).await?;
        ensure!(refused.is_none(), "a foreign pod is refused meanwhile: {refused:?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

async fn walk(cluster: &Cluster) -> Result<()> {
    let mut state = PRISTINE;
    for (number, step) in WALK.into_iter().enumerate() {
        let location = || format!("step {number}, {step:?} in {state:?}");
        cluster.take(step, state).with_context(location)?;
        let next = state.after(step).context("a step that does nothing")?;
        cluster.settle(next.policies == Some(true)).await.with_context(location)?;
        cluster.foreign_objects_are_made(&format!("foreign-{number}")).await.with_context(location)?;
        println!("{}", location());
        state = next;
    }
    cluster.no_policy_has_a_parameter().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn foreign_pods_are_created_whatever_happens_to_the_chart() -> Result<()> {
    let cluster = Cluster::start().await?;
    let meanwhile = tokio::spawn(watch_foreign_pods(cluster.admin.clone()));
    tokio::select! {
        walked = walk(&cluster) => walked,
        refused = meanwhile => refused?,
    }
}
