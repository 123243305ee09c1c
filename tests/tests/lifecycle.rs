//! Job lifecycles with the real controller against a real API server, scheduler and controller
//! manager.

mod admitted;
mod blockers;
mod clock;
mod constraints;
mod drains;
mod ends;
mod failures;
mod forged;
mod hostile;
mod kueue;
mod large;
mod nodes;
mod objects;
mod provisioning;
mod tampered;
mod training;
mod verdicts;
mod watching;

use anyhow::Result;
use kube::ResourceExt;
use serde_json::{Value, json};
use switchyard_crds::TrainJob;
use switchyard_tests::{
    Command, ControlPlane, ControllerOptions, Daemon, Jobs, Kubelet, KubeletOptions, condition_of, merge,
    start_controller, template_on,
};

/// Whether the stage message of a job contains this text.
fn message_contains(fragment: &str) -> impl Fn(&TrainJob) -> bool {
    move |job| condition_of(job, "Succeeded").is_some_and(|condition| condition.message.contains(fragment))
}

/// A namespace with its own controller and dedicated nodes.
struct Scene {
    jobs: Jobs,
    kubelet: Kubelet,
    controller: Daemon,
}

impl Scene {
    async fn new(prefix: &str, nodes: usize) -> Result<Scene> {
        Scene::with(prefix, nodes, Vec::new()).await
    }

    /// Starts the controller with additional environment variables.
    async fn with(prefix: &str, nodes: usize, environment: Vec<(&'static str, String)>) -> Result<Scene> {
        Scene::started(prefix, nodes, ControllerOptions { environment, ..ControllerOptions::default() }).await
    }

    /// Starts the controller with these options.
    async fn started(prefix: &str, nodes: usize, options: ControllerOptions) -> Result<Scene> {
        let plane = ControlPlane::shared();
        let namespace = plane.namespace(prefix).await?;
        let kubelet = Kubelet::start(plane.config().await?, KubeletOptions::new(&namespace, nodes)).await?;
        let options = ControllerOptions { namespace: Some(namespace.clone()), ..options };
        let controller = start_controller(plane, &namespace, &options)?;
        Ok(Scene { jobs: Jobs::new(plane.client().await?, &namespace), kubelet, controller })
    }

    /// A job with a plain program that is pinned to this test's nodes.
    fn job(&self, name: &str, nodes: u32, policy: &str, spec: Value) -> Value {
        let mut job = switchyard_tests::plain_job(name, nodes, policy);
        merge(&mut job["spec"], spec);
        merge(&mut job["spec"], json!({"template": template_on(&self.kubelet.nodes())}));
        job
    }

    async fn create(&self, name: &str, nodes: u32, policy: &str, spec: Value) -> Result<()> {
        self.jobs.create(self.job(name, nodes, policy, spec)).await?;
        Ok(())
    }

    fn send(&self, pod: &str, command: Command) -> Result<()> {
        self.kubelet.send(&self.jobs.namespace, pod, command)
    }

    /// Lets all pods complete successfully.
    async fn finish(&self) -> Result<()> {
        for pod in self.jobs.pods().await? {
            let _ = self.send(&pod.name_any(), Command::Exit(0, String::new()));
        }
        Ok(())
    }

    /// Checks the log for panics: after one, the controller continues with the other jobs.
    fn never_panicked(&self) -> Result<()> {
        let log = std::fs::read_to_string(&self.controller.log)?;
        anyhow::ensure!(!log.contains("panicked"), "{}", self.controller.tail());
        Ok(())
    }

    async fn names(&self) -> Result<Vec<String>> {
        Ok(self.jobs.pods().await?.iter().map(ResourceExt::name_any).collect())
    }
}
