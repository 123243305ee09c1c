//! The agent's loops: one scans the machine, one queries the kubelet, one keeps the object on the
//! API server up to date.
//!
//! ```text
//! period, GPU events ─> scan (thread) ─> MachineState ─┐
//!                                                      ├─> draft ─> write, only on change
//! period ───────────> kubelet (socket) ─> Kubelet ─────┘
//! ```
//!
//! Each loop keeps only its latest state, so a slow or unreachable source never delays newer facts.

use crate::metrics::Metrics;
use crate::pages::Health;
use crate::pause::Backoff;
use crate::pod_resources;
use crate::ports::Ports;
use crate::report::{Kubelet, MachineState, draft};
use crate::scan::{ScanFault, ScanSource, Scanner};
use crate::write::{WriteOutcome, Writer};
use jiff::Timestamp;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use switchyard_crds::gpu_topology::SourceState;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, sleep_until};
use tracing::{info, warn};

/// Shortest time between scans triggered by GPU events, for a GPU that reports one error after
/// another.
const EVENT_INTERVAL: Duration = Duration::from_secs(2);
/// Pause before subscribing to NVML events again, without NVML or while a driver restarts.
const EVENTS_RETRY: Duration = Duration::from_secs(60);

pub(crate) struct Agent {
    /// Time between two scans.
    pub period: Duration,
    /// Time after which a scan counts as hung.
    pub scan_timeout: Duration,
    pub source: ScanSource,
    /// `None` if the kubelet is not queried.
    pub pod_resources: Option<PathBuf>,
    pub metrics: Arc<Metrics>,
    pub health: Arc<Health>,
}

impl Agent {
    /// Reports until it is dropped.
    ///
    /// # Errors
    /// The thread that scans the machine cannot be started, or is gone.
    pub async fn run(&self, writer: Writer, gpu_events: bool) -> Result<(), String> {
        let source = self.source.clone();
        let scanner =
            Scanner::start(move || source.scan()).map_err(|error| format!("cannot start a thread: {error}"))?;
        let event = Arc::new(Notify::new());
        if gpu_events {
            self.watch_gpus(Arc::clone(&event)).map_err(|error| format!("cannot start a thread: {error}"))?;
        }
        let (machine, machines) = watch::channel(MachineState::default());
        let (kubelet, kubelets) = watch::channel(None);
        tokio::select! {
            () = self.write(writer, machines, kubelets) => Err("the loops ended".into()),
            () = self.query_kubelet(&kubelet) => Err("the loops ended".into()),
            () = self.scan_machine(scanner, &machine, &event) => Err("the thread that scans the machine is gone".into()),
        }
    }

    /// One scan and one query of the kubelet, without a cluster.
    ///
    /// # Errors
    /// The machine cannot be described.
    pub async fn once(&self) -> Result<(MachineState, Kubelet), String> {
        let source = self.source.clone();
        let mut scanner =
            Scanner::start(move || source.scan()).map_err(|error| format!("cannot start a thread: {error}"))?;
        let scan = scanner.scan(self.scan_timeout).await.map_err(|fault| match fault {
            ScanFault::Failed(why) => why,
            ScanFault::Hangs(timeout) => {
                format!("the scan of the machine has not ended after {} s", timeout.as_secs())
            }
            ScanFault::Gone => "the thread that scans the machine is gone".into(),
        })?;
        Ok((MachineState { last: Some(Arc::new(scan)), fault: None }, self.kubelet().await))
    }

    /// Triggers a scan when a GPU reports something. The thread may hang in the driver, and ends
    /// with the process.
    fn watch_gpus(&self, event: Arc<Notify>) -> std::io::Result<()> {
        let library = self.source.roots.nvml_library.clone();
        let metrics = Arc::clone(&self.metrics);
        std::thread::Builder::new().name("gpu-events".into()).spawn(move || {
            loop {
                let begin = Instant::now();
                let why = switchyard_node_agent::events::watch(library.as_deref(), |xid| {
                    metrics.gpu_event();
                    info!(xid, "a GPU reported an event");
                    event.notify_one();
                });
                tracing::debug!(why, "no events from GPUs");
                // A driver that disappeared is worth a scan; one that was never there is not.
                if begin.elapsed() > EVENT_INTERVAL {
                    event.notify_one();
                }
                std::thread::sleep(EVENTS_RETRY);
            }
        })?;
        Ok(())
    }

    async fn scan_machine(&self, mut scanner: Scanner, machine: &watch::Sender<MachineState>, event: &Notify) {
        let mut ports = Ports::default();
        let mut period = interval(self.period);
        period.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = period.tick() => {}
                () = event.notified() => {}
            }
            match scanner.scan(self.scan_timeout).await {
                Ok(mut scan) => {
                    ports.update(std::mem::take(&mut scan.ports), Timestamp::now());
                    ports.add_to(&mut scan.facts);
                    let whole = scan.facts.sources.iter().all(|source| source.state == SourceState::Complete);
                    self.metrics.scanned(if whole { "complete" } else { "partial" }, Some(&scan));
                    self.health.scanned(None);
                    machine.send_replace(MachineState { last: Some(Arc::new(scan)), fault: None });
                }
                Err(ScanFault::Gone) => return,
                Err(fault) => {
                    let hangs = matches!(fault, ScanFault::Hangs(_));
                    self.metrics.scanned(if hangs { "hangs" } else { "failed" }, None);
                    let first = machine.borrow().fault.as_ref() != Some(&fault);
                    if first {
                        warn!(?fault, "the machine cannot be described");
                    }
                    self.health.scanned(hangs.then(|| "a scan of the machine hangs".to_owned()));
                    machine.send_modify(|machine| machine.fault = Some(fault));
                }
            }
            sleep(EVENT_INTERVAL.min(self.period)).await;
        }
    }

    async fn kubelet(&self) -> Kubelet {
        let Some(socket) = &self.pod_resources else { return Kubelet::Disabled };
        match pod_resources::query(socket, || self.metrics.pod_resources_failed()).await {
            Ok(resources) => Kubelet::Known(Arc::new(resources)),
            Err(why) => Kubelet::Unknown(why),
        }
    }

    async fn query_kubelet(&self, kubelet: &watch::Sender<Option<Kubelet>>) {
        let mut period = interval(self.period);
        period.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            period.tick().await;
            let known = self.kubelet().await;
            if let (Kubelet::Unknown(why), Some(Kubelet::Known(_)) | None) = (&known, &*kubelet.borrow()) {
                warn!(why, "the kubelet does not report who uses devices");
            }
            kubelet.send_replace(Some(known));
        }
    }

    async fn write(
        &self,
        mut writer: Writer,
        mut machines: watch::Receiver<MachineState>,
        mut kubelets: watch::Receiver<Option<Kubelet>>,
    ) {
        // Wait for both, so that the first report is complete. Each has its own deadline.
        let known = |machine: &MachineState| machine.last.is_some() || machine.fault.is_some();
        if machines.wait_for(known).await.is_err() || kubelets.wait_for(Option::is_some).await.is_err() {
            return;
        }
        let mut backoff = Backoff::default();
        loop {
            let draft = {
                let kubelet = kubelets.borrow_and_update().clone().unwrap_or(Kubelet::Disabled);
                draft(&machines.borrow_and_update(), &kubelet)
            };
            match writer.sync(&draft).await {
                Ok(written) => {
                    backoff.reset();
                    self.health.in_sync(writer.observed());
                    match written {
                        WriteOutcome::Nothing => {}
                        WriteOutcome::Renewal => self.metrics.wrote("renewal"),
                        WriteOutcome::Facts(changed) => {
                            self.metrics.wrote("facts");
                            info!(changed = changed.join(","), "reported");
                        }
                    }
                    let renew_at = writer.renew_at().unwrap_or_else(|| Instant::now() + self.period);
                    tokio::select! {
                        changed = machines.changed() => if changed.is_err() { return },
                        changed = kubelets.changed() => if changed.is_err() { return },
                        () = sleep_until(renew_at) => {}
                    }
                }
                Err(error) => {
                    let pause = backoff.next();
                    self.metrics.write_failed(error.reason());
                    warn!(%error, pause = ?pause, "the report is not written");
                    self.health.not_written(format!("the report is not written: {error}"));
                    sleep(pause).await;
                }
            }
        }
    }
}
