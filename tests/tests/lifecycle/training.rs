//! A TrainJob that really trains: the pods' commands run as processes, and the figures come from
//! their logs.

use anyhow::Result;
use serde_json::{Value, json};
use switchyard_crds::{MeasuredVerdict, ObservedVerdict, TrainJob, Transport};
use switchyard_tests::{
    ControlPlane, ControllerOptions, Daemon, Jobs, Kubelet, KubeletOptions, Policy, Scene as Folder, condition_of,
    start_controller, template_on, worker_folder,
};

/// A namespace with nodes whose pods run our worker, a controller, and training text.
pub(super) struct Training {
    pub folder: Folder,
    pub namespace: String,
    pub kubelet: Kubelet,
    pub jobs: Jobs,
    _controller: Daemon,
}

impl Training {
    pub async fn new(prefix: &str) -> Result<Training> {
        Training::on(prefix, 2).await
    }

    /// Starts this many nodes.
    pub async fn on(prefix: &str, nodes: usize) -> Result<Training> {
        let folder = Folder::new();
        folder.write_text("data/text.txt", 64);
        let plane = ControlPlane::shared();
        let namespace = plane.namespace(prefix).await?;
        let mut options = KubeletOptions::new(&namespace, nodes);
        (options.policy, options.programs) = (Policy::Worker, Some(worker_folder().to_path_buf()));
        let kubelet = Kubelet::start(plane.config().await?, options).await?;
        let own = ControllerOptions { namespace: Some(namespace.clone()), ..ControllerOptions::default() };
        let _controller = start_controller(plane, &namespace, &own)?;
        let jobs = Jobs::new(plane.client().await?, &namespace);
        Ok(Training { folder, namespace, kubelet, jobs, _controller })
    }

    pub fn job(&self, name: &str, path: &str, steps: u32) -> Value {
        json!({
            "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "metadata": {"name": name},
            "spec": {
                "trainer": {"numNodes": 2, "cpuThreads": 1, "resourcesPerNode": {"limits": {"cpu": "1"}}},
                "template": template_on(&self.kubelet.nodes()),
                "engine": {
                    "model": {"type": "GPT", "gpt": {"layers": 1, "hiddenSize": 32, "heads": 2, "contextLength": 32}},
                    "data": {"path": path}, "batchSizePerProcess": 4, "steps": steps, "evaluation": {"batches": 2},
                },
            },
        })
    }

    /// The folder with the training text.
    pub fn data(&self) -> String {
        self.folder.join("data").display().to_string()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_pods_train_a_model() -> Result<()> {
    let scene = Training::new("train").await?;
    let jobs = &scene.jobs;
    // Would train for hours. Even on a fast machine, the controller reads figures and suspends it
    // long before the end.
    let mut job = scene.job("gpt", &scene.data(), 100_000_000);
    job["spec"]["fabric"] = json!({"preflight": {"minBusBandwidth": "1k"}});
    jobs.create(job).await?;
    let seen = jobs.wait("gpt", "training with figures", |job| {
        job.status.as_ref().and_then(|status| status.trainer_status.as_ref()).is_some_and(|figures| figures.step > 0)
    });
    let figures = seen.await?.status.unwrap().trainer_status.unwrap();
    assert!(figures.total_steps == 100_000_000 && figures.loss.is_some(), "{figures:?}");
    // Transport and measured bandwidth, as reported by the ranks.
    let is_reported = |job: &TrainJob| {
        let fabric = job.status.as_ref().and_then(|status| status.fabric.as_ref());
        fabric.is_some_and(|fabric| fabric.observed.is_some() && fabric.measured.is_some())
    };
    let fabric = jobs.wait("gpt", "with the ranks' links reported", is_reported).await?.status.unwrap().fabric.unwrap();
    let (seen, measured) = (fabric.observed.unwrap(), fabric.measured.unwrap());
    // These pods are processes on one machine.
    assert_eq!(
        (seen.verdict, seen.transport),
        (ObservedVerdict::AsForecast, Some(Transport::SharedMemory)),
        "{seen:?}"
    );
    assert!(seen.message.contains("rank 0 shares memory with rank 1"), "{seen:?}");
    assert!(measured.verdict == MeasuredVerdict::Passed && measured.message.contains("over 2 ranks"), "{measured:?}");
    jobs.patch("gpt", json!({"spec": {"suspend": true}})).await?;
    jobs.wait_pods("gone", |pods| pods.is_empty()).await?;
    jobs.api().delete("gpt", &Default::default()).await?;
    jobs.create(scene.job("short", &scene.data(), 40)).await?;
    let done = jobs.wait_stage("short", "Complete").await?;
    let figures = done.status.unwrap().trainer_status.unwrap();
    assert_eq!((figures.step, figures.progress_percentage), (40, 100));
    let model = scene
        .kubelet
        .pod_folder(&scene.namespace, "short-1-0")
        .unwrap()
        .join("volumes/switchyard-run/model.safetensors");
    assert!(model.is_file(), "{}", model.display());
    // The root cause of a failure reaches the status through the termination message.
    jobs.create(scene.job("nothing", "/no/such/data", 40)).await?;
    let failed = jobs.wait_stage("nothing", "Failed").await?;
    let condition = condition_of(&failed, "Failed").unwrap();
    assert!(condition.reason == "PermanentFailure" && condition.message.contains("/no/such/data"), "{condition:?}");
    // More than any network provides: the ranks measure the bandwidth and refuse to start.
    let mut demanding = scene.job("slow", &scene.data(), 40);
    demanding["spec"]["fabric"] = json!({"preflight": {"mode": "Enforce", "minBusBandwidth": "1000T"}});
    jobs.create(demanding).await?;
    let failed = jobs.wait_stage("slow", "Failed").await?;
    let condition = condition_of(&failed, "Failed").unwrap();
    let expected = ["minBusBandwidth: got", "expected 1000000.000 GB/s", "no single link is slower"];
    assert!(expected.iter().all(|text| condition.message.contains(text)), "{condition:?}");
    assert_eq!(condition.reason, "PermanentFailure");
    Ok(())
}
