//! A TrainJob that really trains: the pods' commands run as processes, the figures come from their log.

use anyhow::Result;
use serde_json::json;
use switchyard_tests::{
    ControlPlane, ControllerOptions, Jobs, Kubelet, KubeletOptions, Policy, Scene as Folder, condition_of,
    start_controller, template_on, worker_folder,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_pods_train_a_model() -> Result<()> {
    let folder = Folder::new();
    folder.write_text("data/text.txt", 64);
    let plane = ControlPlane::shared();
    let namespace = plane.namespace("train").await?;
    let mut options = KubeletOptions::new(&namespace, 2);
    (options.policy, options.programs) = (Policy::Worker, Some(worker_folder().to_path_buf()));
    let kubelet = Kubelet::start(plane.config().await?, options).await?;
    let own = ControllerOptions { namespace: Some(namespace.clone()), ..ControllerOptions::default() };
    let _controller = start_controller(plane, &namespace, &own)?;
    let jobs = Jobs::new(plane.client().await?, &namespace);
    let job = |name: &str, path: &str, steps: u32| {
        json!({
            "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "metadata": {"name": name},
            "spec": {
                "trainer": {"numNodes": 2, "cpuThreads": 1, "resourcesPerNode": {"limits": {"cpu": "1"}}},
                "template": template_on(&kubelet.nodes()),
                "engine": {
                    "model": {"type": "GPT", "gpt": {"layers": 1, "hiddenSize": 32, "heads": 2, "contextLength": 32}},
                    "data": {"path": path}, "batchSizePerProcess": 4, "steps": steps, "evaluation": {"batches": 2},
                },
            },
        })
    };
    // It would train for hours: also on a fast machine, the controller has read figures and suspended it long before the end.
    jobs.create(job("gpt", &folder.join("data").display().to_string(), 100_000_000)).await?;
    let seen = jobs.wait("gpt", "training with figures", |job| {
        job.status.as_ref().and_then(|status| status.trainer_status.as_ref()).is_some_and(|figures| figures.step > 0)
    });
    let figures = seen.await?.status.unwrap().trainer_status.unwrap();
    assert!(figures.total_steps == 100_000_000 && figures.loss.is_some(), "{figures:?}");
    jobs.patch("gpt", json!({"spec": {"suspend": true}})).await?;
    jobs.wait_pods("gone", |pods| pods.is_empty()).await?;
    jobs.api().delete("gpt", &Default::default()).await?;
    jobs.create(job("short", &folder.join("data").display().to_string(), 40)).await?;
    let done = jobs.wait_stage("short", "Complete").await?;
    let figures = done.status.unwrap().trainer_status.unwrap();
    assert_eq!((figures.step, figures.progress_percentage), (40, 100));
    let model = kubelet.pod_folder(&namespace, "short-1-0").unwrap().join("volumes/switchyard-run/model.safetensors");
    assert!(model.is_file(), "{}", model.display());
    // The root cause of a failure reaches the status through the termination message.
    jobs.create(job("nothing", "/no/such/data", 40)).await?;
    let failed = jobs.wait_stage("nothing", "Failed").await?;
    let condition = condition_of(&failed, "Failed").unwrap();
    assert!(condition.reason == "PermanentFailure" && condition.message.contains("/no/such/data"), "{condition:?}");
    Ok(())
}
