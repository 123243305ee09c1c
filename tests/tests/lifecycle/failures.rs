//! Failures: which restart budget they are charged to, and the job's next stage.

use super::{Scene, message_contains};
use anyhow::Result;
use k8s_openapi::api::core::v1::Namespace;
use kube::api::Patch;
use kube::{Api, ResourceExt};
use serde_json::json;
use switchyard_crds::TrainJob;
use switchyard_tests::{Command, ControlPlane, Scene as Folder, TIMEOUT, condition_of, stage_of};

fn in_attempt(attempt: i32) -> impl Fn(&TrainJob) -> bool {
    move |job| {
        stage_of(job) == Some("Running") && job.status.as_ref().is_some_and(|status| status.attempt == Some(attempt))
    }
}

#[tokio::test]
async fn the_whole_gang_restarts_until_the_budget_is_used_up() -> Result<()> {
    let scene = Scene::new("restart", 2).await?;
    scene.create("a", 2, "run", json!({"failurePolicy": {"maxRestarts": 1}})).await?;
    scene.jobs.wait_stage("a", "Running").await?;
    scene.send("a-1-1", Command::Exit(9, "boom".into()))?;
    let second = scene.jobs.wait("a", "in attempt 2", in_attempt(2)).await?;
    let restarts = second.status.unwrap().restarts.unwrap();
    assert_eq!((restarts.application, restarts.infrastructure, restarts.total), (1, 0, 1));
    let names = scene.names().await?;
    assert!(names.contains(&"a-1-1".to_string()), "the failed pod is kept for its log: {names:?}");
    let note = &scene.jobs.events("a", "Restarting").await?[0];
    assert!(note.contains("pod a-1-1") && note.contains("exit code 9: boom"), "{note}");
    scene.send("a-2-0", Command::Exit(3, String::new()))?;
    let failed = scene.jobs.wait_stage("a", "Failed").await?;
    let condition = condition_of(&failed, "Failed").unwrap();
    assert_eq!(condition.reason, "ApplicationFailure");
    assert!(condition.message.contains("1 of 1 restarts used (failurePolicy.maxRestarts)"), "{}", condition.message);
    scene
        .jobs
        .wait_pods("with only ended ones", |pods| {
            pods.iter().all(|pod| {
                pod.status.as_ref().is_some_and(|s| matches!(s.phase.as_deref(), Some("Failed" | "Succeeded")))
            })
        })
        .await?;
    Ok(())
}

/// Regression: kubectl showed `Restarting (x2): attempt 2 starts`, which hid the third attempt.
#[tokio::test]
async fn each_restart_has_its_own_event() -> Result<()> {
    let scene = Scene::new("each-restart", 1).await?;
    scene.create("a", 1, "run", json!({"failurePolicy": {"maxRestarts": 2}})).await?;
    for attempt in [1, 2] {
        scene.jobs.wait("a", "in its attempt", in_attempt(attempt)).await?;
        scene.send(&format!("a-{attempt}-0"), Command::Exit(9, "boom".into()))?;
    }
    scene.jobs.wait("a", "in attempt 3", in_attempt(3)).await?;
    let notes = scene.jobs.events("a", "Restarting").await?;
    for attempt in ["attempt 2 starts", "attempt 3 starts"] {
        assert!(notes.iter().any(|note| note.contains(attempt)), "{attempt}: {notes:?}");
    }
    Ok(())
}

#[tokio::test]
async fn evictions_and_preemptions_have_separate_budgets() -> Result<()> {
    let scene = Scene::new("classes", 2).await?;
    scene.create("a", 2, "run", json!({"failurePolicy": {"maxPreemptionRestarts": 0}})).await?;
    scene.jobs.wait_stage("a", "Running").await?;
    scene.send("a-1-0", Command::Evict)?;
    let second = scene.jobs.wait("a", "in attempt 2", in_attempt(2)).await?;
    let restarts = second.status.unwrap().restarts.unwrap();
    assert_eq!((restarts.application, restarts.infrastructure, restarts.preemption), (0, 1, 0));
    scene.send("a-2-1", Command::Preempt)?;
    let failed = scene.jobs.wait_stage("a", "Failed").await?;
    assert_eq!(condition_of(&failed, "Failed").map(|c| c.reason.as_str()), Some("Preempted"));
    Ok(())
}

#[tokio::test]
async fn rules_take_precedence_over_budgets() -> Result<()> {
    let scene = Scene::new("rules", 1).await?;
    let rules = json!({"failurePolicy": {"maxRestarts": 5, "rules": [
        {"action": "RestartTrainJobAndIgnoreMaxRestarts", "onExitCodes": {"operator": "In", "values": [77]}},
        {"action": "FailTrainJob", "onExitCodes": {"operator": "In", "values": [42]}},
    ]}});
    scene.create("a", 1, "run", rules).await?;
    scene.jobs.wait_stage("a", "Running").await?;
    scene.send("a-1-0", Command::Exit(77, String::new()))?;
    let second = scene.jobs.wait("a", "in attempt 2", in_attempt(2)).await?;
    let restarts = second.status.unwrap().restarts.unwrap();
    assert_eq!((restarts.application, restarts.total), (0, 1));
    scene.send("a-2-0", Command::Exit(42, String::new()))?;
    let failed = scene.jobs.wait_stage("a", "Failed").await?;
    let condition = condition_of(&failed, "Failed").unwrap();
    assert!(condition.reason == "FailurePolicy" && condition.message.contains("rules[1]"), "{condition:?}");
    Ok(())
}

#[tokio::test]
async fn out_of_memory_is_reported_and_charged_to_the_infrastructure() -> Result<()> {
    let scene = Scene::new("oom", 1).await?;
    scene.create("a", 1, "oom", json!({"failurePolicy": {"maxInfrastructureRestarts": 0}})).await?;
    let failed = scene.jobs.wait_stage("a", "Failed").await?;
    let condition = condition_of(&failed, "Failed").unwrap();
    assert_eq!(condition.reason, "InfrastructureFailure");
    assert!(condition.message.contains("OOMKilled"), "{}", condition.message);
    Ok(())
}

/// A small version of G6: a lost node's pod stays `Terminating`, and the next attempt starts
/// elsewhere.
#[tokio::test]
async fn a_lost_node_does_not_hold_the_job() -> Result<()> {
    let scene = Scene::new("lost", 3).await?;
    scene.create("a", 2, "run", json!({})).await?;
    scene.jobs.wait_stage("a", "Running").await?;
    let lost = scene.kubelet.nodes()[1].clone();
    scene.kubelet.lose_node(&lost).await?;
    let second = scene.jobs.wait("a", "in attempt 2", in_attempt(2)).await?;
    let status = second.status.unwrap();
    assert_eq!(status.restarts.unwrap().infrastructure, 1);
    let nodes: Vec<String> = status.placement.unwrap().nodes.into_iter().map(|node| node.node_name).collect();
    assert!(!nodes.contains(&lost), "{nodes:?}");
    let names = scene.names().await?;
    assert!(names.contains(&"a-1-1".to_string()), "the zombie is still there: {names:?}");
    scene.kubelet.recover_node(&lost).await?;
    scene.jobs.wait_pods("without the zombie", |pods| pods.iter().all(|pod| pod.name_any() != "a-1-1")).await?;
    Ok(())
}

#[tokio::test]
async fn a_gang_waits_for_room_and_is_then_placed() -> Result<()> {
    let scene = Scene::new("room", 2).await?;
    let all = json!({"trainer": {"resourcesPerNode": {"limits": {"cpu": "8", "memory": "1Gi"}}}});
    scene.create("first", 2, "run", all.clone()).await?;
    scene.jobs.wait_stage("first", "Running").await?;
    scene.create("second", 2, "run", all).await?;
    let waits = scene.jobs.wait_stage("second", "Queued").await?;
    let placed = condition_of(&waits, "Placed").unwrap();
    assert!(
        placed.reason == "NoRoom" && placed.message.contains("0 of 2 needed nodes have room for cpu 8"),
        "{placed:?}"
    );
    let gated = scene.jobs.pods().await?;
    assert!(
        gated.iter().filter(|pod| pod.name_any().starts_with("second")).all(|pod| pod
            .spec
            .as_ref()
            .unwrap()
            .node_name
            .is_none())
    );
    scene.finish().await?;
    scene.jobs.wait_stage("first", "Complete").await?;
    scene.jobs.wait_stage("second", "Running").await?;
    Ok(())
}

/// The scheduler enforces constraints that our planner does not model, such as anti-affinity. The
/// controller then rolls back the whole gang.
#[tokio::test]
async fn a_partly_bound_gang_is_rolled_back() -> Result<()> {
    let scene = Scene::new("rollback", 2).await?;
    let anti = json!({"requiredDuringSchedulingIgnoredDuringExecution": [
        {"labelSelector": {"matchLabels": {"keep": "away"}}, "topologyKey": "kubernetes.io/hostname"}]});
    let stranger = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "stranger", "labels": {"keep": "away"}},
        "spec": {"nodeSelector": {"kubernetes.io/hostname": scene.kubelet.nodes()[1]}, "containers": [{"name": "a", "image": "none"}]}});
    let pods = scene.jobs.pods_api();
    pods.create(&Default::default(), &serde_json::from_value(stranger)?).await?;
    scene.jobs.wait_pods("bound", |pods| pods.iter().all(|pod| pod.spec.as_ref().unwrap().node_name.is_some())).await?;
    scene
        .create(
            "a",
            2,
            "run",
            json!({
                // A scheduler on a busy machine needs several seconds.
                "gangPolicy": {"scheduleTimeoutSeconds": 10},
                "template": {"spec": {"affinity": {"podAntiAffinity": anti}}},
            }),
        )
        .await?;
    let back = scene
        .jobs
        .wait("a", "rolled back", |job| condition_of(job, "Placed").is_some_and(|c| c.reason == "ScheduleTimeout"))
        .await?;
    let message = &condition_of(&back, "Placed").unwrap().message;
    assert!(message.contains("1 of 2 pods not scheduled within 10 s: pod a-1-1"), "{message}");
    assert_eq!(back.status.unwrap().restarts.unwrap().total, 0);
    scene
        .jobs
        .wait_pods("without the first attempt", |pods| pods.iter().all(|pod| !pod.name_any().starts_with("a-1-")))
        .await?;
    pods.delete("stranger", &Default::default()).await?;
    scene.jobs.wait("a", "running", |job| stage_of(job) == Some("Running")).await?;
    Ok(())
}

#[tokio::test]
async fn a_missing_image_is_reported_while_it_is_retried() -> Result<()> {
    let scene = Scene::new("image", 1).await?;
    scene.create("a", 1, "image=missing", json!({})).await?;
    let starting = scene
        .jobs
        .wait("a", "starting with a reason", |job| {
            condition_of(job, "Succeeded")
                .is_some_and(|c| c.reason == "Starting" && c.message.contains("no such image"))
        })
        .await?;
    scene.jobs.verdict("an image that does not exist", "starts, cause named", "a")?;
    assert_eq!(starting.status.unwrap().attempt, Some(1));
    Ok(())
}

/// Regression: with `runAsNonRoot` set on every image, images that run as root (most of them) never
/// started.
#[tokio::test]
async fn a_root_image_runs_unless_forbidden_and_then_the_job_fails_at_once() -> Result<()> {
    let scene = Scene::new("root", 1).await?;
    scene.create("a", 1, "image=root", json!({})).await?;
    scene.jobs.wait_stage("a", "Running").await?;
    scene.jobs.verdict("an image that runs as root", "runs", "a")?;
    let template = json!({"template": {"spec": {"securityContext": {"runAsNonRoot": true}}}});
    scene.create("b", 1, "image=root", template).await?;
    let failed = scene.jobs.wait_stage("b", "Failed").await?;
    scene.jobs.verdict("an image that runs as root and may not", "failed, cause named", "b")?;
    let condition = condition_of(&failed, "Failed").unwrap();
    let attempt = failed.status.as_ref().unwrap().attempt;
    assert_eq!((condition.reason.as_str(), attempt), ("PermanentFailure", Some(1)));
    assert!(condition.message.contains("set spec.template.spec.securityContext.runAsUser"), "{}", condition.message);
    Ok(())
}

#[tokio::test]
async fn a_restricted_namespace_accepts_non_root_images() -> Result<()> {
    let scene = Scene::new("restricted", 2).await?;
    let namespaces = Api::<Namespace>::all(scene.jobs.client.clone());
    let label = json!({"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}});
    namespaces.patch(&scene.jobs.namespace, &Default::default(), &Patch::Merge(label)).await?;
    scene.create("a", 2, "run", json!({})).await?;
    let running = scene.jobs.wait_stage("a", "Running").await?;
    assert_eq!(running.status.unwrap().attempt, Some(1));
    for pod in scene.jobs.pods().await? {
        let context = pod.spec.as_ref().and_then(|spec| spec.security_context.as_ref()).unwrap();
        assert_eq!(context.run_as_non_root, Some(true));
    }
    scene.create("b", 1, "image=root", json!({})).await?;
    let failed = scene.jobs.wait_stage("b", "Failed").await?;
    scene.jobs.verdict(
        "an image that runs as root where the namespace enforces restricted",
        "failed, cause named",
        "b",
    )?;
    assert_eq!(condition_of(&failed, "Failed").map(|c| c.reason.as_str()), Some("PermanentFailure"));
    Ok(())
}

/// Regression: while an init container ran, the status said "0 of 1 pods run"; its failure was
/// charged to the infrastructure budget, and no message named it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_running_or_failed_init_container_is_named() -> Result<()> {
    let scene = Scene::new("init", 1).await?;
    let fetch = json!({"name": "fetch", "image": "none"});
    let spec = json!({"template": {"spec": {"initContainers": [fetch]}}, "failurePolicy": {"maxRestarts": 1}});
    scene.create("a", 1, "initialize", spec).await?;
    scene.jobs.wait("a", "initializing", message_contains("pod a-1-0 on node")).await?;
    let runs =
        scene.jobs.wait("a", "named", message_contains("init container fetch has been running since 20")).await?;
    assert_eq!(stage_of(&runs), Some("Starting"));
    let namespace = scene.jobs.namespace.clone();
    scene.kubelet.set_log(&namespace, "a-1-0/fetch", "20 % of the data\n");
    let config = ControlPlane::shared().kubeconfig("admin").display().to_string();
    let arguments = ["logs", "a", "--namespace", &namespace, "--kubeconfig", &config];
    let log = Folder::new().switchyard(arguments).start().wait(TIMEOUT);
    assert!(log.stdout.contains("20 % of the data"), "{}{}", log.stdout, log.stderr);
    scene.send("a-1-0", Command::ExitInit(3, "begins\nno such bucket".into()))?;
    let second = scene.jobs.wait("a", "in attempt 2", |job| job.status.as_ref().is_some_and(|s| s.attempt == Some(2)));
    let restarts = second.await?.status.unwrap().restarts.unwrap();
    assert_eq!((restarts.application, restarts.infrastructure), (1, 0));
    let words = "init container fetch failed with exit code 3: no such bucket";
    let notes = scene.jobs.events("a", "Restarting").await?;
    assert!(notes.iter().any(|note| note.contains(words)), "{notes:?}");
    scene.jobs.wait("a", "initializing again", message_contains("init container fetch has been running since")).await?;
    scene.send("a-2-0", Command::ExitInit(0, String::new()))?;
    scene.jobs.wait_stage("a", "Running").await?;
    Ok(())
}

/// Regression: the status showed the pods as not ready while they trained, and did not name the
/// failed sidecar.
#[tokio::test]
async fn a_failed_sidecar_is_named_while_the_trainer_runs() -> Result<()> {
    let scene = Scene::new("failing", 1).await?;
    let (proxy, mesh) = (
        json!({"name": "proxy", "image": "none"}),
        json!({"name": "mesh", "image": "none", "restartPolicy": "Always"}),
    );
    let spec = json!({"template": {"spec": {"containers": [proxy], "initContainers": [mesh]}}});
    for (name, code) in [("proxy", 1), ("mesh", 2)] {
        let job = format!("with-{name}");
        scene.create(&job, 1, "run", spec.clone()).await?;
        scene.jobs.wait_stage(&job, "Running").await?;
        scene.send(&format!("{job}-1-0"), Command::ExitSidecar(name.into(), code))?;
        let words = format!("sidecar {name} of pod {job}-1-0 ended with exit code {code}");
        let named = scene.jobs.wait(&job, &words, message_contains(&words)).await?;
        assert_eq!((stage_of(&named), named.status.as_ref().unwrap().ready.as_deref()), (Some("Running"), Some("1/1")));
        scene.send(&format!("{job}-1-0"), Command::Exit(0, String::new()))?;
        let done = scene.jobs.wait_stage(&job, "Complete").await?;
        assert_eq!(done.status.unwrap().attempt, Some(1));
    }
    Ok(())
}

/// Service mesh proxies and log shippers do not exit with the trainer.
#[tokio::test]
async fn a_job_ends_with_its_trainers_despite_running_sidecars() -> Result<()> {
    let scene = Scene::new("sidecar", 1).await?;
    let sidecar = json!({"template": {"spec": {"containers": [{"name": "proxy", "image": "none"}]}}});
    scene.create("good", 1, "run", sidecar.clone()).await?;
    scene.create("bad", 1, "run", sidecar).await?;
    for (name, code, stage) in [("good", 0, "Complete"), ("bad", 9, "Failed")] {
        scene.jobs.wait_stage(name, "Running").await?;
        scene.send(&format!("{name}-1-0"), Command::ExitTrainer(code))?;
        scene.jobs.wait_stage(name, stage).await?;
    }
    scene.jobs.wait_pods("deleted: their sidecars would run forever", <[_]>::is_empty).await?;
    Ok(())
}
