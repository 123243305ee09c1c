//! Another controller that immediately reverts our controller's writes, and users who edit or
//! delete its objects. Every controller write is counted in the API server's audit log.

use anyhow::{Context, Result, ensure};
use futures::TryStreamExt;
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Service};
use k8s_openapi::jiff::Timestamp;
use kube::api::Patch;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use switchyard_crds::TrainJob;
use switchyard_tests::{
    ControlPlane, ControllerOptions, Jobs, Kubelet, KubeletOptions, Options, TIMEOUT, condition_of, plain_job,
    reports_fight, start_controller, until_async,
};

/// Maximum number of writes in a fight until the backoff reaches 5 s: five or six, after 1, 2, 4
/// and 5 s, and as many status updates that report the fight, one per stage in which the reverts
/// leave the job. Without backoff there would be hundreds.
const MAX_WRITES: usize = 12;

fn job(name: &str, engine: bool) -> Value {
    let mut job = plain_job(name, 2, "run");
    if engine {
        job["spec"]["trainer"] = json!({"numNodes": 2, "resourcesPerNode": {"limits": {"cpu": "100m"}}});
        job["spec"]["engine"] = json!({
            "model": {"type": "GPT", "gpt": {"layers": 1, "hiddenSize": 32, "heads": 2, "contextLength": 32}},
            "data": {"path": "/data"}, "steps": 3,
        });
    }
    job
}

/// Another controller that applies `undo` to every version of an object.
fn fight<K, F>(api: Api<K>, name: &str, undo: impl Fn(Api<K>, K) -> F + Send + 'static) -> tokio::task::JoinHandle<()>
where
    K: kube::Resource<DynamicType = ()> + serde::de::DeserializeOwned + Clone + std::fmt::Debug + Send + 'static,
    F: Future<Output = ()> + Send,
{
    let config = watcher::Config::default().fields(&format!("metadata.name={name}"));
    tokio::spawn(async move {
        let mut changes = Box::pin(watcher(api.clone(), config).default_backoff().applied_objects());
        while let Ok(Some(object)) = changes.try_next().await {
            undo(api.clone(), object).await;
        }
    })
}

/// Times of the controller's accepted writes to an object, in order. Excludes writes refused by the
/// resource version after a concurrent write: nothing reverts those, so the next write does not
/// wait for them.
fn writes(plane: &ControlPlane, resource: &str, name: &str, subresource: &str) -> Vec<Timestamp> {
    let field = |entry: &Value, path: &str| entry.pointer(path).and_then(Value::as_str).unwrap_or_default().to_string();
    let is_it = |entry: &&Value| {
        field(entry, "/user/username") == "switchyard-controller"
            && field(entry, "/objectRef/resource") == resource
            && field(entry, "/objectRef/name") == name
            && field(entry, "/objectRef/subresource") == subresource
            && field(entry, "/verb") != "delete"
            && entry.pointer("/responseStatus/code").and_then(Value::as_u64).is_some_and(|code| code < 300)
    };
    let audit_entries = plane.audit_entries();
    audit_entries
        .iter()
        .filter(is_it)
        .filter_map(|entry| field(entry, "/requestReceivedTimestamp").parse().ok())
        .collect()
}

/// Whether the writes of a fight have slowed down to one per 5 s. On a loaded machine, a delay of
/// one write shortens the following pause.
fn slowed_down(times: &[Timestamp]) -> bool {
    let pauses: Vec<f64> = times.windows(2).map(|pair| pair[1].duration_since(pair[0]).as_secs_f64()).collect();
    pauses.last().is_some_and(|last| *last >= 4.2) && pauses.iter().filter(|pause| **pause >= 1.7).count() >= 3
}

#[tokio::test]
async fn a_write_fight_is_throttled_and_reported() -> Result<()> {
    let options = Options { controller_manager: true, scheduler: true, audit: true, ..Options::default() };
    let plane = ControlPlane::start(&options)?;
    plane.install_crds().await?;
    let namespace = plane.namespace("fight").await?;
    let _kubelet = Kubelet::start(plane.config().await?, KubeletOptions::new("fight", 4)).await?;
    let mut controller = start_controller(&plane, "fight", &ControllerOptions::default())?;
    let client = plane.client().await?;
    let jobs = Jobs::new(client.clone(), &namespace);
    let all = ["service", "config", "status", "label"];
    for name in all {
        jobs.create(job(name, name == "config")).await?;
    }
    for name in all {
        jobs.wait_stage(name, "Running").await.with_context(|| controller.tail())?;
    }
    let services = Api::<Service>::namespaced(client.clone(), &namespace);
    let configs = Api::<ConfigMap>::namespaced(client.clone(), &namespace);
    // The ConfigMap is immutable, so its data can only be changed by deleting it.
    let theirs = Patch::Merge(json!({"data": {"engine.json": "{}"}}));
    let refused = configs.patch("config-1", &Default::default(), &theirs).await;
    ensure!(refused.is_err_and(|error| error.to_string().contains("immutable")));
    let fights = [
        fight(services.clone(), "service", |api, service| async move {
            let theirs = json!({"spec": {"selector": {"training.switchyard.dev/job-uid": "theirs"}}});
            if service.spec.and_then(|spec| spec.selector).is_some_and(|s| s.values().all(|uid| uid != "theirs")) {
                let _ = api.patch("service", &Default::default(), &Patch::Merge(theirs)).await;
            }
        }),
        fight(configs, "config-1", |api, _| async move {
            let _ = api.delete("config-1", &Default::default()).await;
        }),
        fight(jobs.api(), "status", |api: Api<TrainJob>, job| async move {
            let theirs = json!([{"type": "Succeeded", "status": "Unknown", "reason": "Theirs", "message": "ours", "lastTransitionTime": "2026-01-01T00:00:00Z"}]);
            if condition_of(&job, "Succeeded").is_some_and(|condition| condition.reason != "Theirs") {
                let patch = json!({"status": {"conditions": theirs}});
                let _ = api.patch_status("status", &Default::default(), &Patch::Merge(patch)).await;
            }
        }),
        fight(jobs.pods_api(), "label-1-0", |api: Api<Pod>, pod| async move {
            if pod.labels().get("training.switchyard.dev/attempt").is_some_and(|attempt| attempt != "7") {
                let patch = json!({"metadata": {"labels": {"training.switchyard.dev/attempt": "7"}}});
                let _ = api.patch("label-1-0", &Default::default(), &Patch::Merge(patch)).await;
            }
        }),
    ];
    let of = |what: &str| match what {
        "service" => writes(&plane, "services", "service", ""),
        "config" => writes(&plane, "configmaps", "config-1", ""),
        _ => writes(&plane, "trainjobs", "status", "status"),
    };
    let before: Vec<usize> = all[..3].iter().map(|what| of(what).len()).collect();
    for (what, before) in all[..3].iter().zip(&before) {
        let fought = || of(what).split_off(*before);
        let has_slowed_down = async || {
            ensure!(fought().len() <= MAX_WRITES, "too many writes");
            Ok(slowed_down(&fought()))
        };
        until_async("pausing for 5 s", TIMEOUT, has_slowed_down)
            .await
            .with_context(|| format!("{what}: {:?}\n{}", fought(), controller.tail()))?;
        println!("{what}: {:?}", fought());
    }
    for (name, expected) in [("service", "Service service"), ("config", "ConfigMap config-1")] {
        let job = jobs.wait(name, "reported", reports_fight).await?;
        let message = &condition_of(&job, "Succeeded").unwrap().message;
        ensure!(message.contains(expected), "{message}");
    }
    fights.iter().for_each(tokio::task::JoinHandle::abort);
    // The controller does not fight over pod labels, because the pod's name identifies it. No
    // restart was counted either.
    let pod = jobs.pods_api().get("label-1-0").await?;
    ensure!(pod.labels().get("training.switchyard.dev/attempt").is_some_and(|attempt| attempt == "7"));
    for name in all {
        let job = jobs.wait_stage(name, "Running").await?;
        let status = job.status.as_ref().unwrap();
        ensure!(status.attempt == Some(1) && status.restarts.as_ref().unwrap().total == 0, "{name}: {status:?}");
    }
    let right = |service: Option<&Service>| {
        let selector = service.and_then(|service| service.spec.as_ref()?.selector.clone()).unwrap_or_default();
        selector.values().any(|uid| uid != "theirs")
    };
    tokio::time::timeout(TIMEOUT, kube::runtime::wait::await_condition(services, "service", right)).await??;
    controller.ensure_running()?;
    ensure!(!std::fs::read_to_string(&controller.log)?.contains("panicked"), "{}", controller.tail());
    Ok(())
}
