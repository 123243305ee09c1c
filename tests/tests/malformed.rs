//! TrainJobs that bypassed validation: stored by an older version, or while validation was
//! disabled.

use anyhow::{Context, Result, ensure};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::Api;
use kube::api::{DynamicObject, GroupVersionKind, Patch, PatchParams};
use kube::core::ApiResource;
use serde_json::{Value, json};
use switchyard_tests::{
    ControlPlane, ControllerOptions, Jobs, Kubelet, KubeletOptions, Options, TIMEOUT, found_async, plain_job,
    start_controller, until_async,
};

/// Maximum attempts to write a status within the duration of a test. The backoff starts at 50 ms
/// and doubles up to 5 s.
const TRIES: usize = 12;

fn with(name: &str, pointer: &str, value: Value) -> Value {
    let mut job = plain_job(name, 1, "run");
    let (parent, field) = pointer.rsplit_once('/').unwrap();
    job.pointer_mut(parent).unwrap()[field] = value;
    job
}

/// Jobs that cannot run, with a word from the expected reason.
fn unusable_jobs() -> Vec<(Value, &'static str)> {
    let mut without_spec = plain_job("no-spec", 1, "run");
    without_spec.as_object_mut().unwrap().remove("spec");
    let mut begun = with("nodes-begun", "/spec/trainer/numNodes", 1_000_000.into());
    begun["status"] = json!({"attempt": 1});
    vec![
        (without_spec, "spec"),
        (begun, "numNodes"),
        (with("spec-text", "/spec", "text".into()), "text"),
        // The server applies its defaults: framework Switchyard lacks an engine.
        (with("spec-null", "/spec/trainer", Value::Null), "engine"),
        (with("nodes-text", "/spec/trainer/numNodes", "two".into()), "two"),
        (with("nodes-negative", "/spec/trainer/numNodes", (-3).into()), "numNodes"),
        (with("nodes-zero", "/spec/trainer/numNodes", 0.into()), "numNodes"),
        (with("nodes-huge", "/spec/trainer/numNodes", (1_u64 << 40).into()), "1099511627776"),
        (with("nodes-many", "/spec/trainer/numNodes", 1_000_000.into()), "numNodes"),
        (with("word", "/spec/topologyPolicy", json!({"mode": "Sometimes"})), "Sometimes"),
        (with("framework", "/spec/trainer/framework", "TensorFlow1".into()), "TensorFlow1"),
        (with("engine", "/spec/trainer/framework", "Switchyard".into()), "engine"),
        (with("amount", "/spec/trainer/resourcesPerNode/limits/cpu", "a lot".into()), "a lot"),
        (with("template", "/spec/template/spec", json!({"containers": "none"})), "none"),
        (with("large", "/spec/trainer/args", json!(["x".repeat(300_000)])), "expected at most 262144"),
        (with("status-text", "/status", json!({"attempt": "two"})), "two"),
        (with("name-that-is-much-too-long-for-the-names-of-all-its-pods", "/spec/suspend", false.into()), "name"),
    ]
}

/// A job started by a newer version, which this version cannot read.
fn begun() -> Value {
    let condition = |kind: &str, state: &str, reason: &str| {
        json!({"type": kind, "status": state, "reason": reason, "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z"})
    };
    let mut job = with("spec-future", "/spec/trainer/framework", "Sixth".into());
    let conditions = [condition("Succeeded", "Unknown", "Running"), condition("Placed", "True", "Placed")];
    job["status"] = json!({"attempt": 1, "conditions": conditions});
    job
}

/// Harmless leftovers of other versions.
fn valid_jobs() -> Vec<Value> {
    let workers: Vec<Value> = (0..5000).map(|rank| json!({"rank": rank, "state": "Training", "host": "h"})).collect();
    vec![
        plain_job("plain", 1, "run"),
        with("status-old", "/status", json!({"phase": "Training", "workers": workers, "observedGeneration": 1})),
        with("status-future", "/status", json!({"attempt": 1, "deviceAllocation": "Telepathy"})),
        with("status-negative", "/status", json!({"attempt": -5, "restarts": {"application": -1, "total": -7}})),
        with("spec-old", "/spec/cleanPodPolicy", "Running".into()),
    ]
}

/// The TrainJob CRD with a schema that accepts anything.
fn loosened() -> Result<Value> {
    let crds = switchyard_crds::generate::crds();
    let crd = crds.iter().find(|(file, _)| *file == "trainjobs.yaml").context("the CRD")?;
    let mut crd = serde_json::to_value(&crd.1)?;
    let version = &mut crd["spec"]["versions"][0];
    version["schema"] = json!({"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}});
    for field in ["subresources", "additionalPrinterColumns", "selectableFields"] {
        version.as_object_mut().unwrap().remove(field);
    }
    Ok(crd)
}

/// Stores jobs that the real CRD would refuse.
async fn store(plane: &ControlPlane, namespace: &str, jobs: &[Value]) -> Result<()> {
    let client = plane.client().await?;
    let crds = Api::<CustomResourceDefinition>::all(client.clone());
    let name = "trainjobs.training.switchyard.dev";
    crds.patch(name, &PatchParams::apply("loose").force(), &Patch::Apply(loosened()?)).await?;
    let established = kube::runtime::conditions::is_crd_established();
    tokio::time::timeout(TIMEOUT, kube::runtime::wait::await_condition(crds.clone(), name, established)).await??;
    let kind = GroupVersionKind::gvk("training.switchyard.dev", "v1alpha1", "TrainJob");
    let resource = ApiResource::from_gvk_with_plural(&kind, "trainjobs");
    let api = Api::<DynamicObject>::namespaced_with(client, namespace, &resource);
    for job in jobs {
        let made = api.create(&Default::default(), &serde_json::from_value(job.clone())?).await;
        made.with_context(|| format!("storing {}", job["metadata"]["name"]))?;
    }
    // Apply the real CRD as the manager `loose` too, because a field stays until the manager that
    // owns it drops it.
    let strict = PatchParams::apply("loose").force();
    let crd = switchyard_crds::generate::crds().into_iter().find(|(file, _)| *file == "trainjobs.yaml");
    crds.patch(name, &strict, &Patch::Apply(&crd.context("the CRD")?.1)).await?;
    plane.install_crds().await?;
    // The new schema is in force once it refuses this job.
    let refused = with("probe", "/spec/trainer/numNodes", "two".into());
    let is_in_force = async || {
        let made = api.create(&Default::default(), &serde_json::from_value(refused.clone())?).await;
        if made.is_ok() {
            api.delete("probe", &Default::default()).await?;
        }
        Ok(made.is_err())
    };
    until_async("refused by the real CRD", TIMEOUT, is_in_force).await.map(drop)
}

/// The message of the `Failed` condition, or the controller's log about this job.
fn reason(plane: &ControlPlane, jobs: &Jobs, name: &str, log: &str) -> Option<String> {
    let path = "jsonpath={.status.conditions[?(@.type==\"Failed\")].message}";
    let reported =
        plane.kubectl(&["get", "trainjobs.training.switchyard.dev", name, "-n", &jobs.namespace, "-o", path]);
    let log_prefix = format!("job={}/{name} ", jobs.namespace);
    match reported.stdout.trim() {
        // The API server accepts no status for it. The line before contains the reason why it
        // cannot be read.
        "" => {
            let lines: Vec<&str> = log.lines().filter(|line| line.contains(&log_prefix)).collect();
            lines.iter().any(|line| line.contains("cannot write the status")).then(|| lines[0].to_string())
        }
        text => Some(text.to_string()),
    }
}

#[tokio::test]
async fn unusable_stored_jobs_are_reported_and_block_nothing() -> Result<()> {
    let options = Options { controller_manager: true, scheduler: true, audit: true, ..Options::default() };
    let plane = ControlPlane::start(&options)?;
    let namespace = plane.namespace("stored").await?;
    let all: Vec<Value> =
        unusable_jobs().into_iter().map(|(job, _)| job).chain(valid_jobs()).chain([begun()]).collect();
    store(&plane, &namespace, &all).await?;
    let _kubelet = Kubelet::start(plane.config().await?, KubeletOptions::new("stored", 4)).await?;
    let mut controller = start_controller(&plane, "stored", &ControllerOptions::default())?;
    let jobs = Jobs::new(plane.client().await?, &namespace);
    for job in valid_jobs() {
        jobs.wait_stage(job["metadata"]["name"].as_str().unwrap(), "Running")
            .await
            .with_context(|| controller.tail())?;
    }
    let mut faults = Vec::new();
    for (job, word) in unusable_jobs() {
        let name = job["metadata"]["name"].as_str().unwrap();
        let reported = found_async("reported", TIMEOUT, async || {
            let log = std::fs::read_to_string(&controller.log)?;
            Ok(reason(&plane, &jobs, name, &log))
        });
        let reported = reported.await.with_context(|| format!("{name}\n{}", controller.tail()))?;
        println!("{name}: {reported}");
        if !reported.contains(word) || reported.contains('\n') {
            faults.push(format!("{name}: expected a sentence with `{word}`: {reported}"));
        }
        let is_about_job = |entry: &&Value| entry.pointer("/objectRef/name").is_some_and(|found| found == name);
        let tries = plane.audit_entries().iter().filter(is_about_job).count();
        if tries > TRIES {
            faults.push(format!("{name}: {tries} writes"));
        }
    }
    ensure!(faults.is_empty(), "{}", faults.join("\n"));
    let name = "spec-future";
    let reported = found_async("reported as unreadable", TIMEOUT, async || {
        let path = "jsonpath={range .status.conditions[*]}{.type}={.status} {end}";
        let reported = plane
            .kubectl(&["get", "trainjobs.training.switchyard.dev", name, "-n", &jobs.namespace, "-o", path])
            .stdout;
        Ok(Some(reported).filter(|reported| reported.contains("Readable=")))
    });
    let reported = reported.await.with_context(|| format!("{name}\n{}", controller.tail()))?;
    assert_eq!(reported.trim(), "Succeeded=Unknown Placed=True Readable=False", "it keeps its stage");
    let notes = jobs.events(name, "Unreadable").await?;
    assert!(notes.iter().any(|note| note.contains("Sixth")), "{notes:?}");
    // A job created later is handled normally.
    jobs.create(plain_job("later", 1, "succeed-after=0.1s")).await?;
    jobs.wait_stage("later", "Complete").await?;
    controller.ensure_running()?;
    let log = std::fs::read_to_string(&controller.log)?;
    ensure!(!log.contains("panicked"), "{log}");
    Ok(())
}
