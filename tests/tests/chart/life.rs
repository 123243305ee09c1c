//! The chart's lifecycle on a real cluster with a running job: installed next to Kubeflow's
//! TrainJob, upgraded, rolled back, uninstalled, reinstalled.

use crate::chart::server::get;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use switchyard_tests::chart::{RELEASE, chart};
use switchyard_tests::{
    ControlPlane, ControllerOptions, Jobs, Kubelet, KubeletOptions, Options, SYSTEM, plain_job, programs_of,
    start_controller, template_on,
};

/// Upper bound for the release Secret, in bytes: a quarter of the Secret size limit.
const MAX_RELEASE_BYTES: usize = 250_000;
/// Keeps the controller's pods unscheduled, because this test runs the controller as a process.
const ASIDE: [&str; 4] = ["--set", "controller.nodeSelector.nowhere=here", "--set", "nodeAgent.gpuNodesOnly=true"];

/// Makes a copy of the chart as its next version, with another image and one more CRD column.
fn next_version(folder: &Path) -> Result<()> {
    fn copy(from: &Path, to: &Path) -> Result<()> {
        fs::create_dir_all(to)?;
        for entry in fs::read_dir(from)? {
            let path = entry?.path();
            let target = to.join(path.file_name().context("a name")?);
            if path.is_dir() { copy(&path, &target)? } else { fs::write(target, fs::read(path)?)? }
        }
        Ok(())
    }
    copy(&chart(), folder)?;
    let change = |file: &str, from: &str, to: &str| -> Result<()> {
        let path = folder.join(file);
        let text = fs::read_to_string(&path)?;
        ensure!(text.contains(from), "{file}: no `{from}`");
        Ok(fs::write(path, text.replacen(from, to, 1))?)
    };
    let version = env!("CARGO_PKG_VERSION");
    change("Chart.yaml", &format!("version: {version}"), "version: 99.0.0")?;
    change("Chart.yaml", &format!("appVersion: \"{version}\""), "appVersion: \"99.0.0\"")?;
    let column = "  - additionalPrinterColumns:\n";
    change(
        "templates/crds/trainjobs.yaml",
        column,
        &format!("{column}    - {{name: Next, type: string, jsonPath: .metadata.uid}}\n"),
    )
}

struct Cluster {
    plane: ControlPlane,
    jobs: Jobs,
}

impl Cluster {
    fn helm(&self, arguments: &[&str]) -> Result<String> {
        let ended = self.plane.helm(&[arguments, &["--namespace", SYSTEM]].concat());
        ensure!(ended.code == Some(0), "helm {arguments:?}: {}", ended.stderr);
        Ok(ended.stdout + &ended.stderr)
    }

    /// State that chart operations must not change: the job's version and its pods.
    async fn job(&self) -> Result<(String, Vec<String>)> {
        let job = self.jobs.api().get("a").await?;
        let pods = self.jobs.pods().await?;
        let uids = pods.into_iter().filter_map(|pod| pod.metadata.uid).collect();
        Ok((job.metadata.resource_version.unwrap_or_default(), uids))
    }

    fn image(&self) -> Result<Value> {
        let deployment = get(&self.plane, &["deployment", "switchyard-controller", "-n", SYSTEM])?;
        Ok(deployment["spec"]["template"]["spec"]["containers"][0]["image"].clone())
    }

    fn has_next_column(&self) -> Result<bool> {
        let crd = get(&self.plane, &["crd", "trainjobs.training.switchyard.dev"])?;
        let columns = crd["spec"]["versions"][0]["additionalPrinterColumns"].as_array().cloned().unwrap_or_default();
        Ok(columns.iter().any(|column| column["name"] == "Next"))
    }

    /// Objects of the release as `kind/name`, without pods and objects that controllers create.
    fn objects(&self) -> Result<Vec<String>> {
        let kinds = "deployments,daemonsets,services,serviceaccounts,configmaps,poddisruptionbudgets,roles,rolebindings,clusterroles,\
                     clusterrolebindings,validatingadmissionpolicies,validatingadmissionpolicybindings,customresourcedefinitions";
        let selector = format!("app.kubernetes.io/instance={RELEASE}");
        let ended = self.plane.kubectl(&["get", kinds, "-A", "-l", &selector, "-o", "name"]);
        ensure!(ended.code == Some(0), "{}", ended.stderr);
        Ok(ended.stdout.lines().map(str::to_string).collect())
    }
}

#[tokio::test]
async fn a_job_keeps_running_through_every_chart_operation() -> Result<()> {
    let plane = ControlPlane::start(&Options { controller_manager: true, scheduler: true, ..Options::default() })?;
    let kubeflow = programs_of(&["kubeflow-trainer"])?.remove(0).join("data/trainer.kubeflow.org_trainjobs.yaml");
    let applied = plane.kubectl(&["apply", "--server-side", "-f", &kubeflow.display().to_string()]);
    ensure!(applied.code == Some(0), "{}", applied.stderr);
    let namespace = plane.namespace("life").await?;
    let jobs = Jobs::new(plane.client().await?, &namespace);
    let cluster = Cluster { plane, jobs };
    let plane = &cluster.plane;

    // Install next to Kubeflow's CRD.
    let output = cluster.helm(&[&["install", RELEASE, ".", "--create-namespace"][..], &ASIDE].concat())?;
    assert!(output.contains("This cluster also has Kubeflow's TrainJob"), "{output}");
    let both = [
        "wait",
        "--for=condition=Established",
        "--timeout=600s",
        "crd/trainjobs.training.switchyard.dev",
        "crd/trainjobs.trainer.kubeflow.org",
    ];
    assert_eq!(plane.kubectl(&both).code, Some(0));
    let releases = get(plane, &["secrets", "-n", SYSTEM, "-l", "owner=helm"])?;
    let bytes = releases["items"][0]["data"]["release"].as_str().context("a release")?.len() / 4 * 3;
    println!("release: {bytes} bytes in its Secret");
    assert!(bytes > 10_000 && bytes <= MAX_RELEASE_BYTES, "{bytes} bytes; expected at most {MAX_RELEASE_BYTES}");

    // Run a job with a controller that has the installed rights.
    let kubelet = Kubelet::start(plane.config().await?, KubeletOptions::new("life", 2)).await?;
    let options =
        ControllerOptions { kubeconfig: Some(plane.controller_kubeconfig()?), ..ControllerOptions::default() };
    let mut controller = start_controller(plane, "life", &options)?;
    let mut job = plain_job("a", 2, "run");
    job["spec"]["template"]["spec"] = template_on(&kubelet.nodes())["spec"].clone();
    cluster.jobs.create(job).await?;
    cluster.jobs.wait_stage("a", "Running").await.with_context(|| controller.tail())?;
    let before = cluster.job().await?;
    assert_eq!(before.1.len(), 2);

    // Upgrade to a version with another CRD.
    let next = plane.folder().join("next");
    next_version(&next)?;
    let next = next.display().to_string();
    let installed = cluster.image()?;
    assert!(!cluster.has_next_column()?);
    cluster.helm(&[&["upgrade", RELEASE, &next, "--set", "metrics.interval=10s"][..], &ASIDE].concat())?;
    assert_eq!(cluster.image()?, "switchyard-controller:99.0.0");
    assert!(cluster.has_next_column()?);
    assert_eq!(cluster.job().await?, before, "after the upgrade");

    // Both ways keep the values of the release.
    for flag in ["--reuse-values", "--reset-then-reuse-values"] {
        cluster.helm(&["upgrade", RELEASE, &next, flag, "--set", "controller.concurrentReconciles=8"])?;
        let values = cluster.helm(&["get", "values", RELEASE])?;
        assert!(values.contains("interval: 10s") && values.contains("concurrentReconciles: 8"), "{flag}: {values}");
        assert_eq!(cluster.job().await?, before, "after {flag}");
    }

    // Roll back to the first revision.
    cluster.helm(&["rollback", RELEASE, "1"])?;
    assert_eq!(cluster.image()?, installed);
    assert!(!cluster.has_next_column()?);
    assert_eq!(cluster.job().await?, before, "after the rollback");

    // Disable the CRDs. They stay in the cluster.
    cluster.helm(&["upgrade", RELEASE, ".", "--reuse-values", "--set", "crds.enabled=false"])?;
    assert_eq!(cluster.job().await?, before, "without the CRDs");
    cluster.helm(&["upgrade", RELEASE, ".", "--reuse-values", "--set", "crds.enabled=true"])?;
    assert_eq!(cluster.job().await?, before, "with the CRDs again");
    controller.ensure_running()?;

    // Uninstall. Helm lists the objects that it keeps.
    assert!(cluster.objects()?.len() > 20);
    let output = cluster.helm(&["uninstall", RELEASE])?;
    assert!(
        output.contains("kept due to the resource policy") && output.contains("trainjobs.training.switchyard.dev"),
        "{output}"
    );
    let mut left = cluster.objects()?;
    left.sort();
    let crd = |name: &str| format!("customresourcedefinition.apiextensions.k8s.io/{name}.training.switchyard.dev");
    assert_eq!(left, [crd("gputopologies"), crd("placementslices"), crd("trainjobs")]);
    assert_eq!(cluster.job().await?.1, before.1, "after the end");

    // Reinstall onto the remaining objects.
    cluster.helm(&[&["install", RELEASE, "."][..], &ASIDE].concat())?;
    assert_eq!(cluster.job().await?.1, before.1, "after another beginning");
    Ok(())
}

/// The chart takes over CRDs that were applied without helm only on request.
#[tokio::test]
async fn existing_crds_are_adopted_on_request() -> Result<()> {
    let plane = ControlPlane::start(&Options::default())?;
    plane.install_crds().await?;
    let job = json!({"apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "metadata": {"name": "a", "namespace": "default"},
        "spec": {"trainer": {"framework": "Plain", "image": "image", "command": ["train"]}}});
    let made = plane.kubectl_with(&["create", "-f", "-"], &job.to_string());
    ensure!(made.code == Some(0), "{}", made.stderr);
    let version = || {
        get(&plane, &["trainjobs.training.switchyard.dev", "a"]).map(|job| job["metadata"]["resourceVersion"].clone())
    };
    let before = version()?;
    let install = ["install", RELEASE, ".", "--namespace", SYSTEM, "--create-namespace"];
    let refused = plane.helm(&install);
    assert!(refused.code != Some(0) && refused.stderr.contains("invalid ownership metadata"), "{}", refused.stderr);
    let taken = plane.helm(&[&install[..], &["--take-ownership"]].concat());
    ensure!(taken.code == Some(0), "{}", taken.stderr);
    assert_eq!(version()?, before);
    Ok(())
}
