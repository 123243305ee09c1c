//! An installation for selected namespaces: the controller works there under the chart's policies,
//! and can write nowhere else.

use super::*;
use switchyard_tests::chart::{objects, render};

const CONTROLLER: &str = "system:serviceaccount:switchyard-system:switchyard-controller";

#[tokio::test]
async fn a_two_namespace_controller_can_write_nowhere_else() -> Result<()> {
    let plane =
        ControlPlane::start(&Options { controller_manager: true, scheduler: true, audit: true, ..Options::default() })?;
    plane.install_crds().await?;
    let (first, second, other) =
        (plane.namespace("first").await?, plane.namespace("second").await?, plane.namespace("other").await?);
    let values = format!("controller.namespaces={{{first},{second}}}");
    plane.apply_chart(&["--set", &values])?;
    let kubelet = Arc::new(Kubelet::start(plane.config().await?, KubeletOptions::new("n", 2)).await?);
    let job = || {
        let mut job = plain_job("a", 2, "run");
        job["spec"]["template"]["spec"] = template_on(&kubelet.nodes())["spec"].clone();
        job
    };
    let outside = Jobs::new(plane.client().await?, &other);
    outside.create(job()).await?;

    let rendered = objects(&render(&["--set", &values])?)?;
    let deployment = rendered.iter().find(|object| object["kind"] == "Deployment").context("no Deployment")?;
    let given_arguments =
        deployment["spec"]["template"]["spec"]["containers"][0]["args"].as_array().context("no arguments")?;
    let arguments: Vec<String> = given_arguments
        .iter()
        .filter_map(Value::as_str)
        .filter(|argument| argument.starts_with("--watch-namespace="))
        .map(str::to_string)
        .collect();
    ensure!(arguments.len() == 2, "{given_arguments:?}");
    let kubeconfig = Some(plane.controller_kubeconfig()?);
    let options = ControllerOptions { kubeconfig, arguments, ..ControllerOptions::default() };
    let mut controller = start_controller(&plane, "namespaced", &options)?;
    for namespace in [&first, &second] {
        let jobs = Jobs::new(plane.client().await?, namespace);
        jobs.create(job()).await?;
        jobs.wait_stage("a", "Running").await.with_context(|| controller.tail())?;
        // The controller can also change and delete everything that it creates for a job.
        jobs.api().delete("a", &Default::default()).await?;
        jobs.wait_gone("a").await?;
    }
    controller.ensure_running()?;
    let job = outside.api().get("a").await?;
    ensure!(job.status.is_none(), "a job of another namespace: {:?}", job.status);
    let refused = plane.audit_entries().into_iter().find(|entry| {
        let field = |path: &str| entry.pointer(path).and_then(Value::as_str).unwrap_or_default();
        field("/user/username") == CONTROLLER && entry.pointer("/responseStatus/code") == Some(&403.into())
    });
    ensure!(refused.is_none(), "{refused:?}");
    for (namespace, verb, what, may) in [
        (&first, "create", "pods", "yes"),
        (&second, "get", "pods/log", "yes"),
        (&other, "list", "pods", "yes"),
        (&other, "create", "pods", "no"),
        (&other, "get", "pods/log", "no"),
        (&other, "create", "secrets", "no"),
        (&other, "list", "configmaps", "no"),
        (&other, "list", "trainjobs.training.switchyard.dev", "no"),
    ] {
        let ended = plane.kubectl(&["auth", "can-i", verb, what, "-n", namespace, "--as", CONTROLLER]);
        ensure!(ended.stdout.trim() == may, "{verb} {what} in {namespace}: {}{}", ended.stdout, ended.stderr);
    }
    Ok(())
}
