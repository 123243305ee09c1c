//! A lane: a namespace with a proxy and a controller behind it, which is started again whenever a fault has killed it; and
//! scenarios, which drive a job to a final state that has to be the same with and without faults.

use super::{Fault, Plan, Proxy};
use crate::{
    Command, ControlPlane, ControllerOptions, Daemon, Jobs, Kubelet, PATIENCE, plain_job, stage_of, start_controller,
    template_on,
};
use anyhow::{Context, Result, bail};
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Service};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::ListParams;
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use switchyard_crds::{TrainJob, labels};

/// A state without faults that lasts this long is final.
const SETTLE: Duration = Duration::from_secs(2);
/// The expected state has to last this long.
const STEADY: Duration = Duration::from_millis(250);

/// How often a lane reads its job and what belongs to it: seven calls, for which the API server takes most of the CPU time.
const LOOK: Duration = Duration::from_millis(50);

/// What a user and the nodes do to a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scenario {
    /// Created, and runs.
    Create,
    /// All pods end well.
    Finish,
    /// A pod fails; the gang starts again.
    Restart,
    /// A pod is evicted; the gang starts again on another budget.
    Evict,
    /// The budget is used up.
    GiveUp,
    /// Suspended while it runs.
    Suspend,
    /// Suspended and resumed.
    Resume,
    /// Deleted while it runs.
    Delete,
}

impl Scenario {
    /// All of them.
    pub const ALL: [Scenario; 8] = [
        Scenario::Create,
        Scenario::Finish,
        Scenario::Restart,
        Scenario::Evict,
        Scenario::GiveUp,
        Scenario::Suspend,
        Scenario::Resume,
        Scenario::Delete,
    ];

    fn job(self, name: &str, nodes: &[String]) -> Value {
        let mut job = plain_job(name, 5, "run");
        job["spec"]["template"]["spec"] = template_on(nodes)["spec"].take();
        job["spec"]["failurePolicy"] = json!({"maxRestarts": if self == Scenario::GiveUp { 0 } else { 1 }});
        job
    }
}

/// A namespace, a proxy, a controller.
pub struct Lane<'a> {
    plane: &'a ControlPlane,
    kubelet: &'a Kubelet,
    /// The jobs of the lane, past the proxy.
    pub jobs: Jobs,
    /// Between the controller and the API server.
    pub proxy: Proxy,
    controller: Daemon,
    options: ControllerOptions,
    /// Time for one step of a scenario, restarts of the controller included, on a loaded machine; and to the final state after
    /// the last one.
    pub patience: Duration,
}

impl<'a> Lane<'a> {
    /// A new lane; its controller is started with these options, in the namespace of the lane and behind its proxy.
    ///
    /// # Errors
    /// A part does not start.
    pub async fn new(
        plane: &'a ControlPlane,
        kubelet: &'a Kubelet,
        name: &str,
        mut options: ControllerOptions,
    ) -> Result<Lane<'a>> {
        let namespace = plane.namespace(name).await?;
        let proxy = Proxy::start(plane, &namespace).await?;
        let jobs = Jobs::new(plane.client().await?, &namespace);
        options.environment.extend([("POD_NAMESPACE", namespace.clone()), ("POD_NAME", "first".into())]);
        options.kubeconfig = Some(proxy.kubeconfig());
        options.namespace = Some(namespace);
        let controller = Lane::start(plane, &proxy, &options)?;
        Ok(Lane { plane, kubelet, jobs, proxy, controller, options, patience: PATIENCE })
    }

    fn start(plane: &ControlPlane, proxy: &Proxy, options: &ControllerOptions) -> Result<Daemon> {
        let daemon = start_controller(plane, options.namespace.as_deref().unwrap_or_default(), options)?;
        proxy.set_target(daemon.pid());
        Ok(daemon)
    }

    /// Process ID of its controller.
    pub fn pid(&self) -> u32 {
        self.controller.pid()
    }

    /// Starts the controller again if a fault has killed it; fails if it ended by itself.
    fn tend(&mut self) -> Result<()> {
        if self.proxy.has_killed() {
            self.controller.kill();
            self.proxy.set(Plan::Quiet);
            self.controller = Lane::start(self.plane, &self.proxy, &self.options)?;
            return Ok(());
        }
        let runs = self.controller.must_run();
        // Killed between the two looks.
        if runs.is_err() && self.proxy.has_killed() { Ok(()) } else { runs.context("the controller ended") }
    }

    /// Ends the controller and starts it again.
    ///
    /// # Errors
    /// It does not start.
    pub fn start_again(&mut self) -> Result<()> {
        self.controller.kill();
        self.controller = Lane::start(self.plane, &self.proxy, &self.options)?;
        Ok(())
    }

    /// Panics in the controller's log so far.
    pub fn panics(&self) -> usize {
        std::fs::read_to_string(&self.controller.log).unwrap_or_default().matches("panicked at").count()
    }

    async fn until(&mut self, what: &str, name: &str, is: impl Fn(Option<&TrainJob>, &[Pod]) -> bool) -> Result<()> {
        let give_up = Instant::now() + self.patience;
        loop {
            self.tend()?;
            let job = self.jobs.api().get_opt(name).await?;
            let pods = self.pods(name).await?;
            if is(job.as_ref(), &pods) {
                return Ok(());
            }
            if Instant::now() > give_up {
                let status = job.map(|job| serde_json::to_string(&job.status).unwrap_or_default());
                let pods: Vec<String> = pods.iter().map(ResourceExt::name_any).collect();
                bail!("{name}: not {what} after {} s; pods {pods:?}; status {status:?}", self.patience.as_secs());
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    async fn running(&mut self, name: &str, attempt: i32) -> Result<()> {
        self.until(&format!("running in attempt {attempt}"), name, |job, _| {
            job.is_some_and(|job| {
                stage_of(job) == Some("Running") && job.status.as_ref().is_some_and(|s| s.attempt == Some(attempt))
            })
        })
        .await
    }

    async fn stage(&mut self, name: &str, stage: &str) -> Result<()> {
        self.until(stage, name, |job, _| job.is_some_and(|job| stage_of(job) == Some(stage))).await
    }

    fn order(&self, pod: &str, command: Command) -> Result<()> {
        self.kubelet.order(&self.jobs.namespace, pod, command)
    }

    async fn pods(&self, name: &str) -> Result<Vec<Pod>> {
        let of_job = ListParams::default().labels(&format!("{}={name}", labels::JOB_NAME));
        Ok(self.jobs.pods_api().list(&of_job).await?.items)
    }

    /// Plays a scenario under a plan of faults.
    ///
    /// # Errors
    /// A step does not come about.
    pub async fn play(&mut self, scenario: Scenario, name: &str, plan: Plan) -> Result<()> {
        self.proxy.set(plan);
        self.jobs.create(scenario.job(name, &self.kubelet.nodes())).await?;
        self.running(name, 1).await?;
        match scenario {
            Scenario::Create => {}
            Scenario::Finish => {
                for rank in 0..5 {
                    self.order(&format!("{name}-1-{rank}"), Command::Exit(0, String::new()))?;
                }
                self.stage(name, "Complete").await?;
            }
            Scenario::Restart => {
                self.order(&format!("{name}-1-1"), Command::Exit(5, String::new()))?;
                self.running(name, 2).await?;
            }
            Scenario::Evict => {
                self.order(&format!("{name}-1-1"), Command::Evict)?;
                self.running(name, 2).await?;
            }
            Scenario::GiveUp => {
                self.order(&format!("{name}-1-1"), Command::Exit(5, String::new()))?;
                self.stage(name, "Failed").await?;
            }
            Scenario::Suspend => {
                self.jobs.patch(name, json!({"spec": {"suspend": true}})).await?;
                self.stage(name, "Suspended").await?;
            }
            Scenario::Resume => {
                self.jobs.patch(name, json!({"spec": {"suspend": true}})).await?;
                self.until("suspended without pods", name, |job, pods| {
                    pods.is_empty() && job.is_some_and(|job| stage_of(job) == Some("Suspended"))
                })
                .await?;
                self.jobs.patch(name, json!({"spec": {"suspend": false}})).await?;
                self.running(name, 2).await?;
            }
            Scenario::Delete => {
                self.jobs.api().delete(name, &Default::default()).await?;
                self.until("gone", name, |job, pods| job.is_none() && pods.is_empty()).await?;
            }
        }
        Ok(())
    }

    /// The state once it does not change any more.
    ///
    /// # Errors
    /// The controller ended, or the API server does not answer.
    pub async fn settled(&mut self, name: &str) -> Result<Value> {
        let mut last = (self.state(name).await?, Instant::now());
        let give_up = Instant::now() + self.patience;
        loop {
            self.tend()?;
            let now = self.state(name).await?;
            if now != last.0 {
                last = (now, Instant::now());
            } else if last.1.elapsed() >= SETTLE || Instant::now() > give_up {
                return Ok(last.0);
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Waits for a final state that stays.
    ///
    /// # Errors
    /// Another one came about; both are in the error.
    pub async fn must_become(&mut self, name: &str, expected: &Value) -> Result<()> {
        let give_up = Instant::now() + self.patience;
        let mut since = None;
        loop {
            self.tend()?;
            let state = self.state(name).await?;
            if state == *expected {
                if since.get_or_insert_with(Instant::now).elapsed() >= STEADY {
                    return Ok(());
                }
            } else if Instant::now() > give_up {
                bail!("another final state after {} s:\n{state:#}\nexpected:\n{expected:#}", self.patience.as_secs());
            } else {
                since = None;
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Everything about a job that must not depend on faults: no times, no UIDs, no messages, the name masked.
    async fn state(&self, name: &str) -> Result<Value> {
        let (client, namespace) = (self.jobs.client.clone(), self.jobs.namespace.as_str());
        let of_job = ListParams::default().labels(&format!("{}={name}", labels::JOB_NAME));
        let mut objects: Vec<String> = Vec::new();
        macro_rules! list {
            ($type:ty) => {
                let api = Api::<$type>::namespaced(client.clone(), namespace);
                let names =
                    api.list(&of_job).await?.items.into_iter().filter(|o| o.metadata.deletion_timestamp.is_none());
                objects.extend(names.map(|object| format!("{} {}", stringify!($type), object.name_any())));
            };
        }
        let job = self.jobs.api().get_opt(name).await?;
        if job.is_some() {
            list!(Service);
            list!(ConfigMap);
            list!(PodDisruptionBudget);
            list!(NetworkPolicy);
        }
        objects.sort();
        let mut pods: Vec<String> = self
            .pods(name)
            .await?
            .iter()
            .map(|pod| {
                let phase = pod.status.as_ref().and_then(|status| status.phase.clone()).unwrap_or_default();
                let gates = pod.spec.as_ref().and_then(|spec| spec.scheduling_gates.as_ref()).map_or(0, Vec::len);
                let deleting = if pod.metadata.deletion_timestamp.is_some() { " deleting" } else { "" };
                format!("{} {phase} {gates} gates{deleting}", pod.name_any())
            })
            .collect();
        pods.sort();
        let status = job.and_then(|job| job.status);
        let state = status.map(|status| {
            // Without the times of the recent ones.
            let restarts = status.restarts.as_ref().map(|counted| {
                let recent = counted.recent.iter().map(|entry| [entry.infrastructure, entry.preemption]);
                let counts = [counted.application, counted.infrastructure, counted.preemption, counted.total];
                json!({"counts": counts, "recent": recent.collect::<Vec<_>>()})
            });
            let mut conditions: Vec<String> =
                status.conditions.iter().map(|c| format!("{}={} {}", c.type_, c.status, c.reason)).collect();
            conditions.sort();
            json!({
                "attempt": status.attempt, "restarts": restarts, "nodes": status.nodes, "conditions": conditions,
                "placed": status.placement.map(|placement| placement.nodes.len()),
                "completed": status.completion_time.is_some(),
            })
        });
        let text = json!({"status": state, "pods": pods, "objects": objects}).to_string();
        Ok(serde_json::from_str(&text.replace(name, "JOB"))?)
    }

    /// Removes what a scenario left.
    ///
    /// # Errors
    /// It does not go.
    pub async fn clear(&mut self, name: &str) -> Result<()> {
        self.proxy.set(Plan::Quiet);
        if self.jobs.api().get_opt(name).await?.is_some() {
            self.jobs.api().delete(name, &Default::default()).await?;
        }
        self.until("gone", name, |job, pods| job.is_none() && pods.is_empty()).await
    }

    /// Plays a scenario with a fault and compares its end with that without. Answers whether the fault came about.
    ///
    /// # Errors
    /// A violation, with the writes up to it.
    pub async fn point(&mut self, point: &Point, name: &str, expected: &Value) -> Result<bool> {
        let plan = Plan::AtWrite(point.write, point.fault.clone());
        let before = self.proxy.faults();
        let played = self.play(point.scenario, name, plan).await;
        let ended = match played {
            Ok(()) => self.must_become(name, expected).await,
            Err(error) => Err(error),
        };
        let came = self.proxy.faults() > before;
        let log = self.proxy.log();
        let cleared = self.clear(name).await;
        ended.and(cleared).with_context(|| {
            format!("{point:?}; the controller's log: {}; writes: {log:#?}", self.controller.log.display())
        })?;
        Ok(came)
    }
}

/// A scenario with a fault at one write.
#[derive(Debug, Clone, PartialEq)]
pub struct Point {
    /// The scenario.
    pub scenario: Scenario,
    /// The write, from 1.
    pub write: u64,
    /// The fault.
    pub fault: Fault,
}
