//! Nodes that are NotReady, nodes that do not report, and nodes that stop reporting together.

use super::Scene;
use anyhow::{Result, ensure};
use jiff::SignedDuration;
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::Patch;
use serde_json::json;
use switchyard_crds::TrainJob;
use switchyard_tests::{
    ControlPlane, ControllerOptions, Jobs, Kubelet, KubeletOptions, Scene as Folder, TIMEOUT, condition_of, merge,
    start_controller, template_on,
};

/// Regression: a NotReady node was considered lost after 5 s, so a network rollout across the nodes
/// restarted every job.
#[tokio::test]
async fn a_not_ready_node_keeps_its_jobs() -> Result<()> {
    let scene = Scene::new("unready", 3).await?;
    let nodes = scene.kubelet.nodes();
    for (name, node) in [("keeps", &nodes[0]), ("loses", &nodes[1])] {
        let mut job = scene.job(name, 1, "run", json!({}));
        merge(&mut job["spec"], json!({"template": template_on(std::slice::from_ref(node))}));
        scene.jobs.create(job).await?;
        scene.jobs.wait_stage(name, "Running").await?;
    }
    scene.kubelet.unready_node(&nodes[0]).await?;
    // This node was lost later and its job has restarted, so the other node's grace period has
    // passed too.
    scene.kubelet.lose_node(&nodes[1]).await?;
    let is_restarted = |job: &TrainJob| job.status.as_ref().is_some_and(|status| status.attempt == Some(2));
    scene.jobs.wait("loses", "in another attempt", is_restarted).await?;
    let kept = scene.jobs.api().get("keeps").await?.status.unwrap();
    assert_eq!((kept.attempt, kept.restarts.unwrap().total), (Some(1), 0));
    Ok(())
}

/// Regression: when kubelets could not reach the API server for 40 s, every job in the cluster
/// restarted.
#[tokio::test]
async fn a_mass_node_outage_ends_nothing_until_confirmed() -> Result<()> {
    let plane = ControlPlane::shared();
    let namespace = plane.namespace("brake").await?;
    let kubelet = Kubelet::start(plane.config().await?, KubeletOptions::new(&namespace, 4)).await?;
    // The nodes of other tests also count as part of the fleet.
    let arguments = ["--node-grace-seconds", "30", "--fleet-brake-percent", "1"].map(String::from).to_vec();
    let options = ControllerOptions { namespace: Some(namespace.clone()), arguments, ..ControllerOptions::default() };
    let controller = start_controller(plane, &namespace, &options)?;
    let scene = Scene { jobs: Jobs::new(plane.client().await?, &namespace), kubelet, controller };
    scene.create("a", 3, "run", json!({})).await?;
    let placed = scene.jobs.wait_stage("a", "Running").await?.status.unwrap().placement.unwrap();
    for node in &placed.nodes {
        scene.kubelet.lose_node(&node.node_name).await?;
    }
    let braked = scene.jobs.wait("a", "braked", |job| {
        condition_of(job, "Succeeded")
            .is_some_and(|c| c.reason == "Running" && c.message.contains("nodes stopped reporting within a minute"))
    });
    assert_eq!(braked.await?.status.unwrap().attempt, Some(1));
    let lost = placed.nodes[1].node_name.clone();
    // With NoExecute, Kubernetes would also delete the pods, and the order of the two events would
    // be random.
    let taint = json!({"spec": {"taints": [{"key": "node.kubernetes.io/out-of-service", "value": "nodeshutdown", "effect": "NoSchedule"}]}});
    Api::<Node>::all(scene.jobs.client.clone()).patch(&lost, &Default::default(), &Patch::Merge(taint)).await?;
    let is_restarted = |job: &TrainJob| job.status.as_ref().is_some_and(|status| status.attempt == Some(2));
    scene.jobs.wait("a", "in attempt 2", is_restarted).await?;
    let note = &scene.jobs.events("a", "Restarting").await?[0];
    assert!(note.contains(&lost) && note.contains("an administrator took it out of service"), "{note}");
    Ok(())
}

/// Regression: a drain starts with a cordon, and was refused for as long as the job ran.
#[tokio::test]
async fn a_job_leaves_a_cordoned_node_or_reports_the_waiting_drain() -> Result<()> {
    let scene = Scene::new("cordon", 3).await?;
    let mut left = String::new();
    for (name, disruption) in [("stays", "Protect"), ("leaves", "Checkpoint")] {
        scene.create(name, 1, "run", json!({"gangPolicy": {"disruption": disruption}})).await?;
        let running = scene.jobs.wait_stage(name, "Running").await?;
        left = running.status.unwrap().placement.unwrap().nodes[0].node_name.clone();
        let cordon = Patch::Merge(json!({"spec": {"unschedulable": true}}));
        Api::<Node>::all(scene.jobs.client.clone()).patch(&left, &Default::default(), &cordon).await?;
    }
    let restarted = scene.jobs.wait("leaves", "elsewhere", |job| {
        let status = job.status.as_ref();
        status.is_some_and(|status| status.attempt == Some(2))
            && condition_of(job, "Placed").is_some_and(|c| c.status == "True")
    });
    let restarted = restarted.await?.status.unwrap();
    assert_eq!(restarted.restarts.unwrap().preemption, 1);
    assert_ne!(restarted.placement.unwrap().nodes[0].node_name, left);
    let note = &scene.jobs.events("stays", "NodeCordoned").await?[0];
    assert!(note.contains("a drain waits until the job ends"), "{note}");
    assert_eq!(scene.jobs.api().get("stays").await?.status.unwrap().attempt, Some(1));
    Ok(())
}

/// Regression: one job after another was placed on the same bad node.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_fails_three_jobs_in_an_hour_is_avoided() -> Result<()> {
    let scene = Scene::new("incidents", 2).await?;
    let nodes = scene.kubelet.nodes();
    let api = Api::<Node>::all(scene.jobs.client.clone());
    let taint = async |taints: serde_json::Value| -> Result<()> {
        let patch = Patch::Merge(json!({"spec": {"taints": taints}}));
        api.patch(&nodes[0], &Default::default(), &patch).await?;
        Ok(())
    };
    let lost = json!([{"key": "node.kubernetes.io/out-of-service", "value": "nodeshutdown", "effect": "NoSchedule"}]);
    let used = |job: &TrainJob| job.status.as_ref().unwrap().placement.as_ref().unwrap().nodes[0].node_name.clone();
    let only_there = |name: &str| {
        let mut job = scene.job(name, 1, "run", json!({}));
        merge(&mut job["spec"], json!({"template": template_on(&nodes[..1])}));
        scene.jobs.create(job)
    };
    let waits = |words: &'static str| {
        move |job: &TrainJob| {
            condition_of(job, "Succeeded").is_some_and(|c| c.reason == "Queued" && c.message.contains(words))
        }
    };
    for round in 0..3 {
        let name = format!("a{round}");
        only_there(&name).await?;
        scene.jobs.wait_stage(&name, "Running").await?;
        scene.kubelet.unready_node(&nodes[0]).await?;
        taint(lost.clone()).await?;
        let lost = scene.jobs.wait(&name, "without a node", waits("cannot be used: not ready")).await?;
        // Failures within two minutes of each other count once; these happened further apart.
        let mut failures = lost.status.unwrap().node_failures;
        ensure!(failures.len() == 1, "{failures:?}");
        failures[0].last_time.0 += SignedDuration::from_mins(10 * round);
        let later = Patch::Merge(json!({"status": {"nodeFailures": failures}}));
        scene.jobs.api().patch_status(&name, &Default::default(), &later).await?;
        scene.jobs.api().delete(&name, &Default::default()).await?;
        scene.jobs.wait_gone(&name).await?;
        taint(json!([])).await?;
        scene.kubelet.recover_node(&nodes[0]).await?;
    }
    only_there("waits").await?;
    scene.jobs.wait("waits", "reported", waits("it ended attempts 3 times within an hour")).await?;
    scene.create("fourth", 1, "run", json!({})).await?;
    let fourth = scene.jobs.wait_stage("fourth", "Running").await?;
    assert_eq!((used(&fourth), fourth.status.unwrap().attempt), (nodes[1].clone(), Some(1)));
    let config = ControlPlane::shared().kubeconfig("admin").display().to_string();
    let explain = ["explain", "fourth", "--namespace", &scene.jobs.namespace, "--kubeconfig", &config];
    let explained = Folder::new().switchyard(explain).start().wait(TIMEOUT);
    let why = format!("1 node is avoided: {} (it ended attempts 3 times within an hour, last with", nodes[0]);
    ensure!(explained.code == Some(0) && explained.stdout.contains(&why), "{}{}", explained.stdout, explained.stderr);
    Ok(())
}

/// Regression: a GPU had fallen off the bus. Ten attempts went to the same node within minutes, and
/// so did the next job.
#[tokio::test]
async fn a_node_that_refuses_pods_is_avoided_across_leaders() -> Result<()> {
    let mut scene = Scene::new("refuses", 2).await?;
    let used = |job: &TrainJob| job.status.as_ref().unwrap().placement.as_ref().unwrap().nodes[0].node_name.clone();
    scene.create("first", 1, "run", json!({})).await?;
    let ill = used(&scene.jobs.wait_stage("first", "Running").await?);
    let why = "Allocate failed due to no healthy devices present";
    let refused = json!({"status": {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": why}});
    scene.jobs.pods_api().patch_status("first-1-0", &Default::default(), &Patch::Merge(refused)).await?;
    let is_restarted = |job: &TrainJob| {
        let is_running = condition_of(job, "Succeeded").is_some_and(|c| c.reason == "Running");
        is_running && job.status.as_ref().is_some_and(|status| status.attempt == Some(2))
    };
    let first = scene.jobs.wait("first", "running elsewhere", is_restarted).await?;
    assert_ne!(used(&first), ill);
    let known = &first.status.as_ref().unwrap().node_failures;
    assert_eq!(known.iter().map(|failure| &failure.node_name).collect::<Vec<_>>(), [&ill]);
    let namespace = scene.jobs.namespace.clone();
    let options = ControllerOptions { namespace: Some(namespace.clone()), ..ControllerOptions::default() };
    scene.controller = start_controller(ControlPlane::shared(), &namespace, &options)?;
    scene.create("second", 1, "run", json!({})).await?;
    let second = scene.jobs.wait_stage("second", "Running").await?;
    assert_eq!((used(&second), second.status.unwrap().attempt), (used(&first), Some(1)));
    let config = ControlPlane::shared().kubeconfig("admin").display().to_string();
    let explain = ["explain", "second", "--namespace", &namespace, "--kubeconfig", &config];
    let explained = Folder::new().switchyard(explain).start().wait(TIMEOUT);
    let why = format!("{ill}: a pod of another job could not start there at ");
    ensure!(explained.code == Some(0) && explained.stdout.contains(&why), "{}{}", explained.stdout, explained.stderr);
    Ok(())
}
