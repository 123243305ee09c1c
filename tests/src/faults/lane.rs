//! A lane is a namespace with a fault proxy and, behind it, a controller that is restarted after a
//! fault kills it. Scenarios drive a job to a final state, which must be the same with and without
//! faults.

use super::view::View;
use super::{Fault, Plan, Proxy};
use crate::{
    Command, ControlPlane, ControllerOptions, Daemon, Jobs, Kubelet, TIMEOUT, chaos, plain_job, stage_of,
    start_controller, template_on,
};
use anyhow::{Context, Result, bail};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use serde_json::{Value, json};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use switchyard_crds::TrainJob;

/// A state that has not changed for this long, without faults, is final.
const SETTLE: Duration = Duration::from_secs(2);
/// The expected state must persist for this long.
const STEADY: Duration = Duration::from_millis(250);

/// Longest time between two checks that the controller runs.
const POLL: Duration = Duration::from_millis(50);

/// Pods of a job. Three suffice for a gang that lacks its first, a middle or its last pod.
fn pods() -> u32 {
    if chaos::is_full() { 5 } else { 3 }
}

/// User actions and node events in the life of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scenario {
    /// The job is created and runs.
    Create,
    /// All pods succeed.
    Finish,
    /// A pod fails and the gang restarts.
    Restart,
    /// A pod is evicted and the gang restarts, charged to a different budget.
    Evict,
    /// The restart budget is exhausted.
    Fail,
    /// Suspended while running.
    Suspend,
    /// Suspended, then resumed.
    Resume,
    /// Deleted while running.
    Delete,
}

impl Scenario {
    /// All scenarios.
    pub const ALL: [Scenario; 8] = [
        Scenario::Create,
        Scenario::Finish,
        Scenario::Restart,
        Scenario::Evict,
        Scenario::Fail,
        Scenario::Suspend,
        Scenario::Resume,
        Scenario::Delete,
    ];

    fn job(self, name: &str, nodes: &[String]) -> Value {
        let mut job = plain_job(name, pods(), "run");
        job["spec"]["template"]["spec"] = template_on(nodes)["spec"].take();
        job["spec"]["failurePolicy"] = json!({"maxRestarts": if self == Scenario::Fail { 0 } else { 1 }});
        job
    }
}

/// A namespace with a proxy and a controller.
pub struct Lane<'a> {
    plane: &'a ControlPlane,
    kubelet: &'a Kubelet,
    /// The lane's jobs, accessed without the proxy.
    pub jobs: Jobs,
    view: View,
    /// Proxy between the controller and the API server.
    pub proxy: Proxy,
    controller: Mutex<Daemon>,
    options: ControllerOptions,
    /// Timeout of one scenario step, including controller restarts on a loaded machine. It also
    /// limits the wait for the final state after the last step.
    pub timeout: Duration,
}

impl<'a> Lane<'a> {
    /// Creates a lane. The controller starts with these options, in the lane's namespace and behind
    /// its proxy.
    ///
    /// # Errors
    /// A component does not start.
    pub async fn new(
        plane: &'a ControlPlane,
        kubelet: &'a Kubelet,
        name: &str,
        mut options: ControllerOptions,
    ) -> Result<Lane<'a>> {
        let namespace = plane.namespace(name).await?;
        let proxy = Proxy::start(plane, &namespace).await?;
        proxy.set_namespace(&namespace);
        proxy.expire_watches(4);
        let jobs = Jobs::new(plane.client().await?, &namespace);
        let view = View::start(&jobs.client, &namespace).await?;
        options.environment.extend([("POD_NAMESPACE", namespace.clone()), ("POD_NAME", "first".into())]);
        options.kubeconfig = Some(proxy.kubeconfig());
        options.namespace = Some(namespace);
        let controller = Mutex::new(Lane::start(plane, &proxy, &options)?);
        Ok(Lane { plane, kubelet, jobs, view, proxy, controller, options, timeout: TIMEOUT })
    }

    fn start(plane: &ControlPlane, proxy: &Proxy, options: &ControllerOptions) -> Result<Daemon> {
        let daemon = start_controller(plane, options.namespace.as_deref().unwrap_or_default(), options)?;
        proxy.set_target(daemon.pid());
        Ok(daemon)
    }

    /// Process ID of the controller.
    pub fn pid(&self) -> u32 {
        self.controller().pid()
    }

    fn controller(&self) -> MutexGuard<'_, Daemon> {
        self.controller.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Restarts the controller if a fault has killed it. Fails if it ended by itself.
    fn supervise(&self) -> Result<()> {
        let mut controller = self.controller();
        if self.proxy.has_killed() {
            controller.kill();
            self.proxy.set(Plan::Quiet);
            *controller = Lane::start(self.plane, &self.proxy, &self.options)?;
            return Ok(());
        }
        let runs = controller.ensure_running();
        // The fault may have killed it between the two checks.
        if runs.is_err() && self.proxy.has_killed() { Ok(()) } else { runs.context("the controller ended") }
    }

    /// Kills and restarts the controller.
    ///
    /// # Errors
    /// The controller does not start.
    pub fn restart(&self) -> Result<()> {
        let mut controller = self.controller();
        controller.kill();
        *controller = Lane::start(self.plane, &self.proxy, &self.options)?;
        Ok(())
    }

    /// Number of panics in the controller's log so far.
    pub fn panics(&self) -> usize {
        std::fs::read_to_string(&self.controller().log).unwrap_or_default().matches("panicked at").count()
    }

    async fn until(
        &self,
        what: &str,
        name: &str,
        condition: impl Fn(Option<&TrainJob>, &[Arc<Pod>]) -> bool,
    ) -> Result<()> {
        let deadline = Instant::now() + self.timeout;
        loop {
            self.supervise()?;
            let (job, pods) = (self.view.job(name), self.view.pods(name));
            if condition(job.as_deref(), &pods) {
                return Ok(());
            }
            if Instant::now() > deadline {
                let status = job.map(|job| serde_json::to_string(&job.status).unwrap_or_default());
                let pods: Vec<String> = pods.iter().map(|pod| pod.name_any()).collect();
                bail!("{name}: not {what} after {} s; pods {pods:?}; status {status:?}", self.timeout.as_secs());
            }
            self.view.changed(POLL).await;
        }
    }

    async fn running(&self, name: &str, attempt: i32) -> Result<()> {
        self.until(&format!("running in attempt {attempt}"), name, |job, _| {
            job.is_some_and(|job| {
                stage_of(job) == Some("Running") && job.status.as_ref().is_some_and(|s| s.attempt == Some(attempt))
            })
        })
        .await
    }

    async fn stage(&self, name: &str, stage: &str) -> Result<()> {
        self.until(stage, name, |job, _| job.is_some_and(|job| stage_of(job) == Some(stage))).await
    }

    fn send(&self, pod: &str, command: Command) -> Result<()> {
        self.kubelet.send(&self.jobs.namespace, pod, command)
    }

    /// Runs a scenario under a fault plan.
    ///
    /// # Errors
    /// A step is not reached in time.
    pub async fn play(&self, scenario: Scenario, name: &str, plan: Plan) -> Result<()> {
        self.proxy.set(plan);
        self.jobs.create(scenario.job(name, &self.kubelet.nodes())).await?;
        self.running(name, 1).await?;
        match scenario {
            Scenario::Create => {}
            Scenario::Finish => {
                for rank in 0..pods() {
                    self.send(&format!("{name}-1-{rank}"), Command::Exit(0, String::new()))?;
                }
                self.stage(name, "Complete").await?;
            }
            Scenario::Restart => {
                self.send(&format!("{name}-1-1"), Command::Exit(5, String::new()))?;
                self.running(name, 2).await?;
            }
            Scenario::Evict => {
                self.send(&format!("{name}-1-1"), Command::Evict)?;
                self.running(name, 2).await?;
            }
            Scenario::Fail => {
                self.send(&format!("{name}-1-1"), Command::Exit(5, String::new()))?;
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

    /// Returns the state after it has stopped changing, or the last one at the timeout.
    ///
    /// # Errors
    /// The controller ended.
    pub async fn settled_state(&self, name: &str) -> Result<Value> {
        let mut last = (self.state(name)?, Instant::now());
        let deadline = Instant::now() + self.timeout;
        loop {
            self.supervise()?;
            let now = self.state(name)?;
            if now != last.0 {
                last = (now, Instant::now());
            } else if last.1.elapsed() >= SETTLE || Instant::now() > deadline {
                return Ok(last.0);
            }
            self.view.changed(POLL).await;
        }
    }

    /// Waits until the job reaches the expected final state and stays there.
    ///
    /// # Errors
    /// The job reached a different state; the error contains both.
    pub async fn expect_state(&self, name: &str, expected: &Value) -> Result<()> {
        let deadline = Instant::now() + self.timeout;
        let mut since = None;
        loop {
            self.supervise()?;
            let state = self.state(name)?;
            if state == *expected {
                if since.get_or_insert_with(Instant::now).elapsed() >= STEADY {
                    return Ok(());
                }
            } else if Instant::now() > deadline {
                bail!("another final state after {} s:\n{state:#}\nexpected:\n{expected:#}", self.timeout.as_secs());
            } else {
                since = None;
            }
            self.view.changed(POLL).await;
        }
    }

    /// Returns everything about a job that must not depend on faults: no times, UIDs or messages,
    /// and with the name masked.
    fn state(&self, name: &str) -> Result<Value> {
        let job = self.view.job(name);
        let objects = job.as_ref().map(|_| self.view.other_objects(name)).unwrap_or_default();
        let mut pods: Vec<String> = self
            .view
            .pods(name)
            .iter()
            .map(|pod| {
                let phase = pod.status.as_ref().and_then(|status| status.phase.clone()).unwrap_or_default();
                let gates = pod.spec.as_ref().and_then(|spec| spec.scheduling_gates.as_ref()).map_or(0, Vec::len);
                let deleting = if pod.metadata.deletion_timestamp.is_some() { " deleting" } else { "" };
                format!("{} {phase} {gates} gates{deleting}", pod.name_any())
            })
            .collect();
        pods.sort();
        let status = job.as_ref().and_then(|job| job.status.as_ref());
        let state = status.map(|status| {
            // Omit the times of recent restarts.
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
                "placed": status.placement.as_ref().map(|placement| placement.nodes.len()),
                "completed": status.completion_time.is_some(),
            })
        });
        let text = json!({"status": state, "pods": pods, "objects": objects}).to_string();
        Ok(serde_json::from_str(&text.replace(name, "JOB"))?)
    }

    /// Deletes the scenario's job.
    ///
    /// # Errors
    /// The job or its pods still exist after the timeout.
    pub async fn clean_up(&self, name: &str) -> Result<()> {
        self.proxy.set(Plan::Quiet);
        if self.jobs.api().get_opt(name).await?.is_some() {
            self.jobs.api().delete(name, &Default::default()).await?;
        }
        self.until("gone", name, |job, pods| job.is_none() && pods.is_empty()).await
    }

    /// Runs a scenario with a fault and compares its final state to a run without it. Returns
    /// whether the fault was injected.
    ///
    /// # Errors
    /// The final states differ; the error contains the writes so far.
    pub async fn run_point(&self, point: &FaultPoint, name: &str, expected: &Value) -> Result<bool> {
        let plan = Plan::AtWrite(point.write, point.fault.clone());
        let before = self.proxy.faults();
        let result = self.play(point.scenario, name, plan).await;
        let ended = match result {
            Ok(()) => self.expect_state(name, expected).await,
            Err(error) => Err(error),
        };
        let injected = self.proxy.faults() > before;
        let log = self.proxy.log();
        let cleared = self.clean_up(name).await;
        ended.and(cleared).with_context(|| {
            format!("{point:?}; the controller's log: {}; writes: {log:#?}", self.controller().log.display())
        })?;
        Ok(injected)
    }
}

/// A scenario with a fault at one write.
#[derive(Debug, Clone, PartialEq)]
pub struct FaultPoint {
    /// Scenario to run.
    pub scenario: Scenario,
    /// Number of the write, starting from 1.
    pub write: u64,
    /// Fault to inject.
    pub fault: Fault,
}
