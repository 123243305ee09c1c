//! The peer: training-operator v1.8.1 with PyTorchJobs, on a control plane like ours.
//!
//! It requires a webhook configuration and a Secret before it starts its controllers. The webhook
//! is removed once it has started, because the benchmark does not measure it. Its pods are not
//! gang-scheduled, so only creation and deletion are compared.

use crate::{COUNT, LIMIT, since};
use anyhow::{Context, Result, bail};
use futures::StreamExt;
use k8s_openapi::api::core::v1::{Namespace, Secret};
use kube::api::{ApiResource, DynamicObject, GroupVersionKind, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, Instant};
use switchyard_tests::{ControlPlane, Daemon, Kubelet, KubeletOptions, Options, PodTracker, programs_of};

const USER: &str = "training-operator";
/// controller-runtime's certificate folder, hard-coded in the peer.
const CERTIFICATES: &str = "/tmp/k8s-webhook-server/serving-certs";
const WEBHOOK: &str = "validator.training-operator.kubeflow.org";

pub(crate) async fn measure(raised: bool) -> Result<Value> {
    let folder = programs_of(&["training-operator"])?.remove(0);
    let options = Options { controller_manager: true, scheduler: true, audit: true, ..Options::default() };
    let plane = ControlPlane::start(&options)?;
    let client = plane.client().await?;
    prepare(&plane, &client, &folder).await?;
    let namespace = plane.namespace("scale").await?;
    let _kubelet = Kubelet::start(plane.config().await?, KubeletOptions::new("node", COUNT)).await?;
    let seen = PodTracker::watch(client.clone(), &namespace);
    // One flag sets its limits. The client's limit of 20 requests per second is hard-coded.
    let mut arguments = vec!["--enable-scheme=pytorchjob".to_string(), "--metrics-bind-address=0".into()];
    arguments.extend([
        "--health-probe-bind-address=0".into(),
        "--webhook-server-port=0".into(),
        "--zap-log-level=error".into(),
    ]);
    if raised {
        arguments.push("--controller-threads=100".into());
    }
    let environment = [("KUBECONFIG", plane.kubeconfig(USER).display().to_string())];
    let log = plane.folder().join("training-operator.log");
    let mut operator = Daemon::start(&folder.join("training-operator"), &arguments, &environment, &log)?;
    certify(&client, &mut operator).await?;
    let kind = GroupVersionKind::gvk("kubeflow.org", "v1", "PyTorchJob");
    let jobs: Api<DynamicObject> =
        Api::namespaced_with(client.clone(), &namespace, &ApiResource::from_gvk_with_plural(&kind, "pytorchjobs"));
    let mut result = json!({"version": "v1.8.1", "arguments": arguments, "limitsRaised": raised});
    result["a"] = a(&plane, &jobs, &seen, &operator).await?;
    let start = Instant::now();
    jobs.delete("a", &Default::default()).await?;
    seen.until("F gone", 0, |_, _| true).await?;
    result["f"] = json!({"gone": since(start)});
    result["cpuSeconds"] = operator.usage().cpu_seconds.into();
    result["rssMiB"] = (operator.usage().rss_bytes >> 20).into();
    result["apiServerCpuSeconds"] = plane.api_server().map_or(0.0, |server| server.usage().cpu_seconds).into();
    result["b"] = b(&plane, &jobs, &seen).await?;
    drop(operator);
    let _ = std::fs::remove_dir_all(CERTIFICATES);
    println!("peer{}: {result}", if raised { ", limits raised" } else { "" });
    Ok(result)
}

async fn prepare(plane: &ControlPlane, client: &Client, folder: &Path) -> Result<()> {
    for entry in std::fs::read_dir(folder.join("data"))? {
        let path = entry?.path();
        if path.file_name().is_some_and(|name| name != "kustomization.yaml")
            && path.extension().is_some_and(|e| e == "yaml")
        {
            let file = path.display().to_string();
            let applied = plane.kubectl(&["apply", "--server-side", "-f", &file]);
            if applied.code != Some(0) {
                bail!("{file}: {}", applied.stderr);
            }
        }
    }
    let namespace: Namespace = serde_json::from_value(json!({"metadata": {"name": "kubeflow"}}))?;
    Api::all(client.clone()).create(&PostParams::default(), &namespace).await?;
    let secret: Secret = serde_json::from_value(json!({"metadata": {"name": "training-operator-webhook-cert"}}))?;
    Api::namespaced(client.clone(), "kubeflow").create(&PostParams::default(), &secret).await?;
    let webhook = json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration", "metadata": {"name": WEBHOOK},
        "webhooks": [],
    });
    webhooks(client).patch(WEBHOOK, &PatchParams::apply("bench"), &Patch::Apply(webhook)).await?;
    Ok(())
}

fn webhooks(client: &Client) -> Api<DynamicObject> {
    let kind = GroupVersionKind::gvk("admissionregistration.k8s.io", "v1", "ValidatingWebhookConfiguration");
    Api::all_with(client.clone(), &ApiResource::from_gvk_with_plural(&kind, "validatingwebhookconfigurations"))
}

/// Copies the operator's generated certificate to the folder it watches, as the kubelet would by
/// mounting the Secret.
async fn certify(client: &Client, operator: &mut Daemon) -> Result<()> {
    let secrets = Api::<Secret>::namespaced(client.clone(), "kubeflow");
    let deadline = Instant::now() + LIMIT;
    loop {
        operator.ensure_running()?;
        let data = secrets.get("training-operator-webhook-cert").await?.data.unwrap_or_default();
        if data.contains_key("tls.crt") {
            std::fs::create_dir_all(CERTIFICATES)?;
            for (name, bytes) in data {
                std::fs::write(Path::new(CERTIFICATES).join(name), bytes.0)?;
            }
            break;
        }
        if Instant::now() > deadline {
            bail!("the peer made no certificate\n{}", operator.tail());
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    tokio::time::sleep(Duration::from_secs(5)).await;
    webhooks(client).delete(WEBHOOK, &Default::default()).await.context("the webhook is gone already")?;
    Ok(())
}

fn job(name: &str, workers: usize) -> Result<DynamicObject> {
    let template = json!({"spec": {"containers": [{
        "name": "pytorch", "image": "bench/none:1", "resources": {"limits": {"cpu": "100m", "memory": "64Mi"}},
    }]}});
    let mut replicas = json!({"Master": {"replicas": 1, "restartPolicy": "Never", "template": template}});
    if workers > 1 {
        replicas["Worker"] = json!({"replicas": workers - 1, "restartPolicy": "Never", "template": template});
    }
    let job = json!({
        "apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": name}, "spec": {"pytorchReplicaSpecs": replicas},
    });
    Ok(serde_json::from_value(job)?)
}

async fn a(plane: &ControlPlane, jobs: &Api<DynamicObject>, seen: &PodTracker, operator: &Daemon) -> Result<Value> {
    let (before, cpu, start) =
        (plane.write_counts(USER).values().sum::<u64>(), operator.usage().cpu_seconds, Instant::now());
    jobs.create(&PostParams::default(), &job("a", COUNT)?).await?;
    seen.until("A created", COUNT, |_, _| true).await?;
    let created = since(start);
    // Each pod gets a Service, so the job is complete when both sets exist.
    let wanted = 2 * COUNT as u64;
    while plane.write_counts(USER).values().sum::<u64>() - before < wanted && start.elapsed() < LIMIT {
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    let writes = plane.write_counts(USER).values().sum::<u64>() - before;
    Ok(json!({
        "created": created, "allWrites": since(start), "writesPerPod": writes as f64 / COUNT as f64,
        "cpuSeconds": operator.usage().cpu_seconds - cpu,
    }))
}

async fn b(plane: &ControlPlane, jobs: &Api<DynamicObject>, seen: &PodTracker) -> Result<Value> {
    let (before, start) = (plane.write_counts(USER).values().sum::<u64>(), Instant::now());
    let objects: Vec<DynamicObject> = (0..COUNT).map(|number| job(&format!("b-{number}"), 1)).collect::<Result<_>>()?;
    let params = PostParams::default();
    let mut made = futures::stream::iter(objects.iter().map(|job| jobs.create(&params, job))).buffer_unordered(16);
    while let Some(result) = made.next().await {
        result?;
    }
    seen.until("B created", COUNT, |name, _| name.starts_with("b-")).await?;
    let created = since(start);
    tokio::time::sleep(Duration::from_secs(10)).await;
    let writes = plane.write_counts(USER).values().sum::<u64>() - before;
    Ok(json!({"created": created, "writesPerJob": writes as f64 / COUNT as f64}))
}
