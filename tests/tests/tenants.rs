//! Tenants against each other's jobs: forged objects in another namespace and in the same one, with
//! and without the chart's policies.
//!
//! The rows are in `tenants/forgeries.yaml`; docs/security.md lists them. A controller with
//! the chart's account and rights runs for all namespaces.

mod hostile;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::{Api, ResourceExt};
use serde::Deserialize;
use serde_json::{Value, json};
use switchyard_crds::{TrainJobStatus, labels};
use switchyard_tests::chart::render;
use switchyard_tests::{
    ControlPlane, ControllerOptions, Daemon, Ended, Jobs, Kubelet, KubeletOptions, Options, TIMEOUT, plain_job,
    start_controller, template_on, until,
};

/// The layer that refuses the forgery; `Nobody` if it is accepted but has no effect.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum By {
    Policies,
    Rights,
    Nobody,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    title: String,
    who: String,
    by: By,
    answer: String,
    /// `TEAM` for the job's namespace; absent for the other one.
    place: Option<String>,
    object: Option<Value>,
    ask: Option<Vec<String>>,
}

impl Row {
    /// Describes how the API server's reply deviates from the expected one.
    fn fault(&self, has_policies: bool, accepted: bool, response: &str) -> Option<String> {
        let is_refused = self.by == By::Rights || (self.by == By::Policies && has_policies);
        match (is_refused, accepted) {
            (true, true) => Some(format!("{}: accepted; expected {:?}", self.title, self.answer)),
            (false, false) => Some(format!("{}: refused: {response}", self.title)),
            (true, false) if !response.contains(&self.answer) => {
                Some(format!("{}: expected {:?}, got {response}", self.title, self.answer))
            }
            _ => None,
        }
    }
}

fn rows() -> Vec<Row> {
    serde_saphyr::from_str(include_str!("tenants/forgeries.yaml")).unwrap()
}

/// A job under attack, and its controller.
struct Scene {
    plane: ControlPlane,
    jobs: Jobs,
    kubelet: Kubelet,
    controller: Daemon,
}

/// State that must not change: attempt, restarts, and the pods with their UIDs.
#[derive(Debug, PartialEq)]
struct Untouched {
    attempt: Option<i32>,
    restarts: i32,
    pods: Vec<(String, Option<String>)>,
}

impl Scene {
    /// Starts a job under attack on three nodes.
    async fn new() -> Result<Scene> {
        let scene = Scene::start(KubeletOptions::new("n", 3)).await?;
        scene.grant("colleague", &scene.jobs.namespace, "edit")?;
        scene.run("victim", 2).await?;
        Ok(scene)
    }

    async fn start(nodes: KubeletOptions) -> Result<Scene> {
        let options = Options { controller_manager: true, scheduler: true, ..Options::default() };
        let plane = ControlPlane::start(&options)?;
        plane.install_crds().await?;
        plane.apply_chart(&["--set", "admissionPolicy.enabled=false"])?;
        let team = plane.namespace("team").await?;
        let kubelet = Kubelet::start(plane.config().await?, nodes).await?;
        let kubeconfig = Some(plane.controller_kubeconfig()?);
        let options = ControllerOptions { kubeconfig, ..ControllerOptions::default() };
        let controller = start_controller(&plane, "tenants", &options)?;
        let jobs = Jobs::new(plane.client().await?, &team);
        Ok(Scene { plane, jobs, kubelet, controller })
    }

    /// Grants a user a role in a namespace.
    fn grant(&self, who: &str, namespace: &str, role: &str) -> Result<()> {
        let (name, user) = (format!("{who}-{role}"), format!("--user={who}"));
        let role = format!("--clusterrole={role}");
        self.must(&["create", "rolebinding", &name, &role, &user, "-n", namespace])
    }

    fn must(&self, arguments: &[&str]) -> Result<()> {
        let ended = self.plane.kubectl(arguments);
        ensure!(ended.code == Some(0), "kubectl {arguments:?}: {}", ended.stderr);
        Ok(())
    }

    async fn run(&self, name: &str, nodes: u32) -> Result<()> {
        let mut job = plain_job(name, nodes, "run");
        job["spec"]["template"]["spec"] = template_on(&self.kubelet.nodes())["spec"].clone();
        self.jobs.create(job).await?;
        self.jobs.wait_stage(name, "Running").await.with_context(|| self.controller.tail())?;
        Ok(())
    }

    async fn victim(&self) -> Result<Untouched> {
        let status: TrainJobStatus = self.jobs.api().get("victim").await?.status.context("no status")?;
        let pods = self.jobs.pods().await?.into_iter().filter(|pod| pod.name_any().starts_with("victim-"));
        let pods = pods.map(|pod: Pod| (pod.name_any(), pod.uid())).collect();
        Ok(Untouched { attempt: status.attempt, restarts: status.restarts.map_or(0, |restarts| restarts.total), pods })
    }

    fn try_row(&self, row: &Row, evil: &str, uid: &str, round: &str) -> Ended {
        let part = uid.replace('-', "")[..8].to_string();
        let fill = |text: &str| text.replace("UID", uid).replace("PART", &part).replace("ROUND", round);
        let namespace = if row.place.is_some() { &self.jobs.namespace } else { evil };
        let mut arguments = vec!["--as".to_string(), row.who.clone(), "-n".into(), namespace.to_string()];
        match (&row.ask, &row.object) {
            (Some(ask), _) => arguments.extend(ask.iter().map(|word| fill(word))),
            (None, _) => arguments.extend(["create", "-f", "-"].map(String::from)),
        }
        let input = row.object.as_ref().map(|object| fill(&object.to_string())).unwrap_or_default();
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        self.plane.kubectl_with(&arguments, &input)
    }

    /// Tries all rows from another namespace, and waits until the controller has seen them.
    async fn try_all(&self, has_policies: bool) -> Result<Vec<String>> {
        let evil = self.plane.namespace("evil").await?;
        self.grant("mallory", &evil, "edit")?;
        self.grant("mallory", &evil, "careless")?;
        let uid = self.jobs.api().get("victim").await?.uid().context("a UID")?;
        let mut faults = Vec::new();
        for row in rows() {
            let ended = self.try_row(&row, &evil, &uid, if has_policies { "2" } else { "1" });
            faults.extend(row.fault(has_policies, ended.code == Some(0), &ended.stderr));
        }
        // Once the controller has handled a later job, it has also handled the earlier events of
        // its watch.
        self.run("later", 1).await?;
        self.jobs.api().delete("later", &Default::default()).await?;
        self.jobs.wait_gone("later").await?;
        Ok(faults)
    }

    /// Installs the policies and waits, because a policy takes effect with a delay.
    fn turn_policies_on(&self) -> Result<()> {
        let text = render(&["--set", "crds.enabled=false,controller.replicas=0"])?;
        let ended = self.plane.kubectl_with(&["apply", "-f", "-"], &text);
        ensure!(ended.code == Some(0), "{}", ended.stderr);
        let probe = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "probe", "namespace": "default",
            "labels": {labels::JOB_UID: "1"}}});
        let refused = || {
            Ok(self.plane.kubectl_with(&["create", "--dry-run=server", "-f", "-"], &probe.to_string()).code != Some(0))
        };
        until("refused by the policies", TIMEOUT, refused).map(drop)
    }
}

const CARELESS: &str = r#"{"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "careless"}, "rules": [
    {"apiGroups": ["training.switchyard.dev"], "resources": ["placementslices", "trainjobs/status"], "verbs": ["create", "update", "patch"]}]}"#;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_forgery_affects_another_tenants_job() -> Result<()> {
    let scene = Scene::new().await?;
    let made = scene.plane.kubectl_with(&["create", "-f", "-"], CARELESS);
    ensure!(made.code == Some(0), "{}", made.stderr);
    let before = scene.victim().await?;
    assert_eq!((before.attempt, before.pods.len()), (Some(1), 2));
    for has_policies in [false, true] {
        if has_policies {
            scene.turn_policies_on()?;
        }
        let faults = scene.try_all(has_policies).await?;
        assert!(faults.is_empty(), "policies: {has_policies}\n{}", faults.join("\n"));
        assert_eq!(scene.victim().await?, before, "policies: {has_policies}\n{}", scene.controller.tail());
        // The controller restores fields that a colleague removed.
        let policies = Api::<NetworkPolicy>::namespaced(scene.jobs.client.clone(), &scene.jobs.namespace);
        let is_whole =
            |policy: Option<&NetworkPolicy>| policy.is_some_and(|p| p.labels().contains_key(labels::JOB_UID));
        let whole = kube::runtime::wait::await_condition(policies, "victim", is_whole);
        tokio::time::timeout(TIMEOUT, whole).await.context("the NetworkPolicy's label was not restored")??;
    }
    let log = std::fs::read_to_string(&scene.controller.log)?;
    assert!(!log.contains("panicked"), "{}", scene.controller.tail());
    Ok(())
}

#[test]
fn forty_forgeries_exist() {
    assert!(rows().len() >= 40, "{} rows", rows().len());
}

#[test]
fn a_different_answer_is_detected() {
    let rows = rows();
    let of = |by: By| rows.iter().find(|row| row.by == by).unwrap();
    let policies = of(By::Policies);
    assert!(policies.fault(true, true, "").is_some_and(|fault| fault.contains("accepted; expected")));
    assert!(policies.fault(true, false, "for some other reason").is_some_and(|fault| fault.contains("got for some")));
    assert!(policies.fault(false, false, "no").is_some_and(|fault| fault.contains("refused: no")));
    assert!(of(By::Rights).fault(false, true, "").is_some());
    assert!(of(By::Nobody).fault(true, false, "").is_some());
    assert_eq!(policies.fault(true, false, &policies.answer), None);
}
