//! TrainJobs that bypassed validation: stored by an older version, or while validation was
//! disabled.

use anyhow::{Context, Result, ensure};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{DynamicObject, GroupVersionKind, Patch, PatchParams};
use kube::core::ApiResource;
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use switchyard_tests::{
    Command, ControlPlane, ControllerOptions, Jobs, Kubelet, KubeletOptions, Options, TIMEOUT, found_async, merge,
    plain_job, start_controller, until_async,
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

const CRD: &str = "trainjobs.training.switchyard.dev";

/// TrainJobs that can have any content.
async fn any_jobs(plane: &ControlPlane, namespace: &str) -> Result<Api<DynamicObject>> {
    let kind = GroupVersionKind::gvk("training.switchyard.dev", "v1alpha1", "TrainJob");
    let resource = ApiResource::from_gvk_with_plural(&kind, "trainjobs");
    Ok(Api::namespaced_with(plane.client().await?, namespace, &resource))
}

/// Applies the schema that accepts anything.
async fn loosen(plane: &ControlPlane) -> Result<()> {
    let crds = Api::<CustomResourceDefinition>::all(plane.client().await?);
    crds.patch(CRD, &PatchParams::apply("loose").force(), &Patch::Apply(loosened()?)).await?;
    let established = kube::runtime::conditions::is_crd_established();
    tokio::time::timeout(TIMEOUT, kube::runtime::wait::await_condition(crds, CRD, established)).await??;
    Ok(())
}

/// Applies the real CRD again.
async fn tighten(plane: &ControlPlane, api: &Api<DynamicObject>) -> Result<()> {
    let crds = Api::<CustomResourceDefinition>::all(plane.client().await?);
    // As the manager `loose` too, because a field stays until the manager that owns it drops it.
    let strict = PatchParams::apply("loose").force();
    let crd = switchyard_crds::generate::crds().into_iter().find(|(file, _)| *file == "trainjobs.yaml");
    crds.patch(CRD, &strict, &Patch::Apply(&crd.context("the CRD")?.1)).await?;
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

/// Stores jobs that the real CRD would refuse.
async fn store(plane: &ControlPlane, namespace: &str, jobs: &[Value]) -> Result<()> {
    let api = any_jobs(plane, namespace).await?;
    loosen(plane).await?;
    for job in jobs {
        let made = api.create(&Default::default(), &serde_json::from_value(job.clone())?).await;
        made.with_context(|| format!("storing {}", job["metadata"]["name"]))?;
    }
    tighten(plane, &api).await
}

/// Changes stored jobs as the real CRD would not allow. The schema is in force once it accepts the
/// changes.
async fn change(plane: &ControlPlane, api: &Api<DynamicObject>, changes: &[(&str, Value)]) -> Result<()> {
    loosen(plane).await?;
    for (name, change) in changes {
        let is_changed = async || {
            Ok(api.patch(name, &PatchParams::default(), &Patch::Merge(change)).await.is_ok_and(|job| {
                let mut merged = job.data.clone();
                merge(&mut merged, change.clone());
                merged == job.data
            }))
        };
        until_async(&format!("{name} changed"), TIMEOUT, is_changed).await?;
    }
    tighten(plane, api).await
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

/// The state of a condition of a job that may be unreadable.
fn state_of(job: &DynamicObject, kind: &str) -> Option<String> {
    let conditions = job.data.pointer("/status/conditions")?.as_array()?;
    let condition = conditions.iter().find(|condition| condition["type"] == kind)?;
    Some(condition["status"].as_str()?.to_owned())
}

/// Scene S11: after a rollback of the release, running jobs with values of the newer version
/// failed.
#[tokio::test]
async fn running_jobs_with_values_of_a_newer_version_keep_their_pods() -> Result<()> {
    let options = Options { controller_manager: true, scheduler: true, ..Options::default() };
    let plane = ControlPlane::start(&options)?;
    plane.install_crds().await?;
    let namespace = plane.namespace("newer").await?;
    let kubelet = Kubelet::start(plane.config().await?, KubeletOptions::new("newer", 4)).await?;
    let jobs = Jobs::new(plane.client().await?, &namespace);
    let newer = start_controller(&plane, "newer", &ControllerOptions::default())?;
    for name in ["spec", "status"] {
        jobs.create(plain_job(name, 2, "run")).await?;
        jobs.wait_stage(name, "Running").await.with_context(|| newer.tail())?;
    }
    let uids = async || -> Result<Vec<String>> {
        let pods = jobs.pods().await?;
        ensure!(pods.iter().all(|pod| pod.metadata.deletion_timestamp.is_none()), "a pod is being deleted");
        Ok(pods.iter().filter_map(ResourceExt::uid).collect())
    };
    let pods = uids().await?;
    assert_eq!(pods.len(), 4);
    drop(newer);

    let api = any_jobs(&plane, &namespace).await?;
    let newer_values = [
        ("spec", json!({"spec": {"trainer": {"framework": "Sixth"}}})),
        ("status", json!({"status": {"deviceAllocation": "Telepathy"}})),
    ];
    change(&plane, &api, &newer_values).await?;
    let mut older = start_controller(&plane, "older", &ControllerOptions::default())?;
    let is_reported = async || Ok(state_of(&api.get("spec").await?, "Readable").as_deref() == Some("False"));
    until_async("Readable=False", TIMEOUT, is_reported).await.with_context(|| older.tail())?;
    // A job created afterwards is complete: the controller has handled all others by then.
    jobs.create(plain_job("later", 1, "succeed-after=0.1s")).await?;
    let is_complete = async || Ok(state_of(&api.get("later").await?, "Succeeded").as_deref() == Some("True"));
    until_async("later complete", TIMEOUT, is_complete).await.with_context(|| older.tail())?;
    api.delete("later", &Default::default()).await?;
    let is_gone = async || Ok(jobs.pods().await?.len() == pods.len());
    until_async("the later job's pod gone", TIMEOUT, is_gone).await?;
    assert_eq!(uids().await?, pods, "the pods of jobs with values of a newer version");
    for name in ["spec", "status"] {
        let job = api.get(name).await?;
        assert_ne!(state_of(&job, "Failed").as_deref(), Some("True"), "{name}: {:#}", job.data["status"]);
        assert_eq!(state_of(&job, "Succeeded").as_deref(), Some("Unknown"), "{name}: {:#}", job.data["status"]);
    }

    // The newer version is back.
    change(&plane, &api, &[("spec", json!({"spec": {"trainer": {"framework": "Plain"}}}))]).await?;
    let is_readable = async || Ok(state_of(&api.get("spec").await?, "Readable").as_deref() != Some("False"));
    until_async("readable again", TIMEOUT, is_readable).await.with_context(|| older.tail())?;
    for pod in jobs.pods().await? {
        kubelet.send(&namespace, &pod.name_any(), Command::Exit(0, String::new()))?;
    }
    for name in ["spec", "status"] {
        let job = jobs.wait_stage(name, "Complete").await.with_context(|| older.tail())?;
        assert_eq!(job.status.and_then(|status| status.attempt), Some(1), "{name}");
    }
    older.ensure_running()
}
