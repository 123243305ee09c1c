//! Exact GPUs against a real API server, scheduler and controller manager: the allocation must
//! equal the plan.
//!
//! The controller has exactly the chart's rights, so a missing right fails the test.

mod claims;
mod fabric;
mod plugin;
mod queue;
mod reports;

use anyhow::{Result, ensure};
use kube::ResourceExt;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::sync::OnceLock;
use switchyard_crds::gpu_topology::GPUTopology;
use switchyard_crds::{PlacementStatus, TrainJob};
use switchyard_tests::gpus::{GpuNodes, Machine, RESOURCE, gpu_job};
use switchyard_tests::{
    Command, ControlPlane, ControllerOptions, Daemon, Jobs, Kubelet, KubeletOptions, Options, account, chart_rules,
    merge, start_controller, template_on,
};

/// The rack label, one of the controller's topology levels.
const RACK: &str = "network.topology.nvidia.com/leaf";

/// How the nodes of a control plane assign GPUs to pods. A job's mechanism depends on all nodes of
/// the cluster, so each way has its own control plane.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Allocation {
    Claims,
    Plugin,
}

impl Allocation {
    fn plane(self) -> &'static (ControlPlane, PathBuf) {
        static PLANES: [OnceLock<(ControlPlane, PathBuf)>; 2] = [OnceLock::new(), OnceLock::new()];
        PLANES[self as usize].get_or_init(|| {
            let device_taints = self == Allocation::Claims;
            let options = Options { controller_manager: true, scheduler: true, device_taints, ..Options::default() };
            let start = || -> Result<_> {
                let plane = ControlPlane::start(&options)?;
                plane.install_crds_now()?;
                let kubeconfig = account(&plane, "devices", &chart_rules()?)?;
                Ok((plane, kubeconfig))
            };
            start().unwrap_or_else(|error| panic!("{error:#}"))
        })
    }
}

/// A namespace with its own controller and dedicated GPU nodes.
struct Scene {
    plane: &'static ControlPlane,
    jobs: Jobs,
    kubelet: Kubelet,
    gpus: GpuNodes,
    nodes: Vec<String>,
    reports: Vec<GPUTopology>,
    options: ControllerOptions,
    controller: Daemon,
}

impl Scene {
    /// Starts nodes of these machine types, each in a rack (empty: without a rack).
    async fn new(allocation: Allocation, prefix: &str, machines: &[(Machine, &str)]) -> Result<Scene> {
        Scene::with(allocation, prefix, machines, allocation.plane().1.clone()).await
    }

    /// The same, with this kubeconfig for the controller.
    async fn with(
        allocation: Allocation,
        prefix: &str,
        machines: &[(Machine, &str)],
        kubeconfig: PathBuf,
    ) -> Result<Scene> {
        let plane = &allocation.plane().0;
        let namespace = plane.namespace(prefix).await?;
        let mut options = KubeletOptions::new(&namespace, machines.len());
        if allocation == Allocation::Plugin {
            options.capacity.push((RESOURCE.into(), "8".into()));
        }
        let kubelet = Kubelet::start(plane.config().await?, options).await?;
        let gpus = GpuNodes::start(plane.client().await?).await?;
        let nodes = kubelet.nodes();
        let mut reports = Vec::new();
        for (node, (machine, rack)) in nodes.iter().zip(machines) {
            let report = machine.report(node);
            if !rack.is_empty() {
                gpus.label(node, &[(RACK, rack)]).await?;
            }
            gpus.report(&report).await?;
            if allocation == Allocation::Claims {
                gpus.offer(&report).await?;
            }
            reports.push(report);
        }
        let options = ControllerOptions {
            namespace: Some(namespace.clone()),
            kubeconfig: Some(kubeconfig),
            ..ControllerOptions::default()
        };
        let controller = start_controller(plane, &namespace, &options)?;
        let jobs = Jobs::new(plane.client().await?, &namespace);
        Ok(Scene { plane, jobs, kubelet, gpus, nodes, reports, options, controller })
    }

    /// Restarts the controller, so that it lists all existing objects before it sees the next job.
    fn restart(&mut self) -> Result<()> {
        self.controller.kill();
        self.controller = start_controller(self.plane, &self.jobs.namespace, &self.options)?;
        Ok(())
    }

    async fn create(&self, name: &str, nodes: u32, gpus: u32, policy: &str, spec: Value) -> Result<TrainJob> {
        let mut job = gpu_job(name, nodes, gpus, policy);
        merge(&mut job["spec"], json!({"template": template_on(&self.nodes)}));
        merge(&mut job["spec"], spec);
        self.jobs.create(job).await
    }

    /// Creates a job and waits until it runs.
    async fn run(&self, name: &str, nodes: u32, gpus: u32, spec: Value) -> Result<TrainJob> {
        self.create(name, nodes, gpus, "run", spec).await?;
        self.jobs.wait_stage(name, "Running").await
    }

    /// Lets all pods of a job complete successfully.
    async fn finish(&self, name: &str) -> Result<()> {
        for pod in self.jobs.pods().await?.iter().map(ResourceExt::name_any) {
            if pod.rsplitn(3, '-').nth(2) == Some(name) {
                let _ = self.kubelet.send(&self.jobs.namespace, &pod, Command::Exit(0, String::new()));
            }
        }
        self.jobs.wait_stage(name, "Complete").await?;
        Ok(())
    }

    /// Waits until the message of a job's `Placed` condition contains this text.
    async fn wait_message(&self, name: &str, text: &str) -> Result<TrainJob> {
        let is_reported = |job: &TrainJob| {
            switchyard_tests::condition_of(job, "Placed").is_some_and(|condition| condition.message.contains(text))
        };
        self.jobs.wait(name, text, is_reported).await
    }

    /// Checks that the controller never panicked and lacked no right.
    fn had_all_rights(&self) -> Result<()> {
        let log = std::fs::read_to_string(&self.controller.log)?;
        ensure!(!log.contains("panicked") && !log.contains("forbidden"), "{}", self.controller.tail());
        Ok(())
    }
}

fn placement(job: &TrainJob) -> &PlacementStatus {
    job.status.as_ref().unwrap().placement.as_ref().unwrap()
}

fn names(job: &TrainJob) -> Vec<&str> {
    placement(job).nodes.iter().map(|node| node.node_name.as_str()).collect()
}

fn h200() -> Machine {
    Machine::of("f04-h200")
}

async fn until(what: &str, is: impl AsyncFn() -> Result<bool>) -> Result<()> {
    switchyard_tests::until_async(what, switchyard_tests::TIMEOUT, is).await.map(drop)
}
