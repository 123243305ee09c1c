//! Two releases of the chart in one cluster, each with its own namespace of jobs.

use anyhow::{Context, Result, ensure};
use switchyard_tests::chart::RELEASE;
use switchyard_tests::{
    ControlPlane, ControllerOptions, Daemon, Jobs, Kubelet, KubeletOptions, Options, SYSTEM, condition_of, plain_job,
    start_controller,
};

/// A release: its name, its namespace, and the account of its controller.
struct Release {
    name: &'static str,
    namespace: String,
    account: &'static str,
}

impl Release {
    /// Installs the chart for the jobs of one namespace, and starts a controller with the rights
    /// that it grants.
    fn start(&self, plane: &ControlPlane, jobs: &str, more: &[&str]) -> Result<Daemon> {
        let scope = format!("controller.namespaces={{{jobs}}}");
        // This test runs the controllers as processes.
        let install = ["install", self.name, ".", "--namespace", &self.namespace, "--set", "controller.replicas=0"];
        let ended = plane.helm(&[&install[..], &["--set", &scope], more].concat());
        ensure!(ended.code == Some(0), "{}: {}", self.name, ended.stderr);
        let options = ControllerOptions {
            namespace: Some(jobs.to_owned()),
            kubeconfig: Some(plane.account_kubeconfig(&self.namespace, self.account)?),
            ..ControllerOptions::default()
        };
        start_controller(plane, self.name, &options)
    }
}

/// Scene S14: the policies of one release refused the pods of the other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_releases_run_one_job_each() -> Result<()> {
    let options = Options { controller_manager: true, scheduler: true, ..Options::default() };
    let plane = ControlPlane::start(&options)?;
    let made = plane.kubectl(&["create", "namespace", SYSTEM]);
    ensure!(made.code == Some(0), "{}", made.stderr);
    let namespaces = [plane.namespace("research").await?, plane.namespace("teaching").await?];
    let releases = [
        Release { name: RELEASE, namespace: SYSTEM.to_owned(), account: "switchyard-controller" },
        Release {
            name: "other",
            namespace: plane.namespace("other-system").await?,
            account: "other-switchyard-controller",
        },
    ];
    let without_shared_parts = ["--set", "crds.enabled=false,nodeAgent.enabled=false"];
    let mut controllers = [
        releases[0].start(&plane, &namespaces[0], &["--set", "nodeAgent.gpuNodesOnly=true"])?,
        releases[1].start(&plane, &namespaces[1], &without_shared_parts)?,
    ];
    let _kubelet = Kubelet::start(plane.config().await?, KubeletOptions::new("releases", 4)).await?;
    let client = plane.client().await?;
    let jobs = namespaces.each_ref().map(|namespace| Jobs::new(client.clone(), namespace));
    // Both at once, and under one name.
    for jobs in &jobs {
        jobs.create(plain_job("same", 2, "succeed-after=1s")).await?;
    }
    for (jobs, controller) in jobs.iter().zip(&mut controllers) {
        let job = jobs.wait_stage("same", "Complete").await.with_context(|| controller.tail())?;
        let status = job.status.as_ref().context("a status")?;
        assert_eq!(status.attempt, Some(1), "{}: {status:#?}", jobs.namespace);
        let succeeded = condition_of(&job, "Succeeded").context("a condition")?;
        assert_eq!(succeeded.status, "True", "{succeeded:?}");
        controller.ensure_running()?;
        let log = std::fs::read_to_string(&controller.log)?;
        ensure!(!log.contains("denied request") && !log.contains("forbidden"), "{log}");
    }
    // Neither controller could write anything of the other release.
    for (number, release) in releases.iter().enumerate() {
        let user = format!("system:serviceaccount:{}:{}", release.namespace, release.account);
        let may_create = |namespace: &str| {
            plane.kubectl(&["auth", "can-i", "create", "pods", "--as", &user, "--namespace", namespace]).stdout
        };
        assert_eq!(may_create(&namespaces[number]).trim(), "yes", "{user}");
        assert_eq!(may_create(&namespaces[1 - number]).trim(), "no", "{user}");
    }
    Ok(())
}
