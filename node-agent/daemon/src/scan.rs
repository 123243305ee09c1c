//! Scans the machine on a separate thread, because a driver call can hang forever and cannot be
//! interrupted.

use crate::kubelet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use switchyard_crds::gpu_topology::GPUTopologyStatus;
use switchyard_node_agent::counters::{self, GpuCounters, PortCounters};
use switchyard_node_agent::{Roots, describe, host, pci};
use tokio::sync::mpsc;

/// Where every container has its own devices and shared memory.
const DEV: &str = "/dev";

/// Result of a scan.
#[derive(Debug, Clone, Default)]
pub(crate) struct Scan {
    /// The facts about the machine, without conditions and uses.
    pub facts: GPUTopologyStatus,
    /// GPU counters, which change all the time.
    pub counters: Vec<GpuCounters>,
    /// RDMA port counters.
    pub ports: Vec<PortCounters>,
    /// NVIDIA GPUs on the PCI bus; `None` if the bus cannot be read.
    pub pci_gpus: Option<u32>,
    pub took: Duration,
}

/// What to scan.
#[derive(Debug, Clone)]
pub(crate) struct ScanSource {
    pub roots: Roots,
    /// The kubelet's configuration file; `None` to skip its policies.
    pub kubelet_config: Option<PathBuf>,
}

impl ScanSource {
    /// Scans once.
    ///
    /// # Errors
    /// The machine cannot be described at all.
    pub fn scan(&self) -> Result<Scan, String> {
        let start = Instant::now();
        let topology = describe(&self.roots, jiff::Timestamp::now()).map_err(|error| error.to_string())?;
        let mut facts = topology.status.unwrap_or_default();
        // In a pod the host's /dev, including its shared memory, is mounted elsewhere. /dev/shm
        // there is the container's own.
        if self.roots.dev != Path::new(DEV)
            && let Some(host) = &mut facts.host
        {
            host.shared_memory_bytes = host::shared_memory(&Path::new(DEV).join("shm")).ok();
        }
        if let Some(path) = &self.kubelet_config {
            kubelet::add_policies(&mut facts, path);
        }
        let counters = counters::read(self.roots.nvml_library.as_deref());
        let pci_gpus = pci::count_nvidia_gpus(&self.roots.sysfs).ok().and_then(|count| count.try_into().ok());
        let ports = counters::read_ports(&self.roots.sysfs);
        Ok(Scan { facts, counters, ports, pci_gpus, took: start.elapsed() })
    }
}

/// Why there is no current scan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ScanFault {
    Failed(String),
    /// The scan did not end within this time.
    Hangs(Duration),
    /// The thread has ended, which is a bug and a reason to restart.
    Gone,
}

/// The scanning thread. It ends when this value is dropped, or with the process if it hangs.
#[derive(Debug)]
pub(crate) struct Scanner {
    orders: std::sync::mpsc::Sender<()>,
    results: mpsc::UnboundedReceiver<Result<Scan, String>>,
    /// A scan was requested and has not returned yet.
    busy: bool,
}

impl Scanner {
    /// Starts the thread, which calls `look` once per request.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(scan: impl Fn() -> Result<Scan, String> + Send + 'static) -> std::io::Result<Scanner> {
        let (orders, received) = std::sync::mpsc::channel();
        let (done, results) = mpsc::unbounded_channel();
        std::thread::Builder::new()
            .name("scan".into())
            .spawn(move || while received.recv().is_ok() && done.send(scan()).is_ok() {})?;
        Ok(Scanner { orders, results, busy: false })
    }

    /// Returns a scan started after this call, or the one in progress: scans never overlap.
    ///
    /// # Errors
    /// No result arrived in time, or the thread has ended.
    pub async fn scan(&mut self, timeout: Duration) -> Result<Scan, ScanFault> {
        if !self.busy {
            self.orders.send(()).map_err(|_| ScanFault::Gone)?;
            self.busy = true;
        }
        let result = tokio::time::timeout(timeout, self.results.recv()).await;
        let result = result.map_err(|_| ScanFault::Hangs(timeout))?.ok_or(ScanFault::Gone)?;
        self.busy = false;
        result.map_err(ScanFault::Failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, channel};

    fn scanner() -> (Scanner, std::sync::mpsc::Sender<Result<Scan, String>>) {
        let (answer, answers) = channel();
        let scan = move || -> Result<Scan, String> {
            let answers: &Receiver<Result<Scan, String>> = &answers;
            answers.recv().map_err(|_| "no more".to_string())?
        };
        (Scanner::start(scan).unwrap(), answer)
    }

    #[tokio::test]
    async fn a_hanging_scan_is_reported_and_used_when_it_ends() {
        let (mut scanner, answer) = scanner();
        let short = Duration::from_millis(20);
        for _ in 0..2 {
            assert_eq!(scanner.scan(short).await.unwrap_err(), ScanFault::Hangs(short));
        }
        answer.send(Ok(Scan { pci_gpus: Some(3), ..Scan::default() })).unwrap();
        let long = Duration::from_secs(30);
        assert_eq!(scanner.scan(long).await.unwrap().pci_gpus, Some(3), "one order, not three");
        answer.send(Err("no sysfs".into())).unwrap();
        assert_eq!(scanner.scan(long).await.unwrap_err(), ScanFault::Failed("no sysfs".into()));
        assert_eq!(scanner.scan(short).await.unwrap_err(), ScanFault::Hangs(short), "nothing was left over");
    }

    #[tokio::test]
    async fn a_dead_thread_is_reported() {
        let mut scanner = Scanner::start(|| panic!("planted")).unwrap();
        assert_eq!(scanner.scan(Duration::from_secs(30)).await.unwrap_err(), ScanFault::Gone);
        assert_eq!(scanner.scan(Duration::from_secs(30)).await.unwrap_err(), ScanFault::Gone);
    }
}
