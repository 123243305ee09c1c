//! Prometheus metrics. Label values come from short lists or are PCI addresses of GPUs, so
//! cardinality stays low.

use crate::scan::Scan;
use jiff::Timestamp;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, text::encode};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};
use std::borrow::Cow;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};
use switchyard_crds::gpu_topology::GPUTopologyStatus;
use switchyard_node_agent::counters::GpuCounters;

type Labels<const N: usize = 1> = [(&'static str, Cow<'static, str>); N];

pub(crate) struct Metrics {
    registry: Registry,
    scans: Family<Labels, Counter>,
    scan: Histogram,
    gpu_events: Counter,
    writes: Family<Labels, Counter>,
    write_failures: Family<Labels, Counter>,
    requests: Family<Labels<3>, Counter>,
    pod_resources_failures: Counter,
    devices: Family<Labels, Gauge>,
    unhealthy: Family<Labels, Gauge>,
    report_age: Gauge<f64, AtomicU64>,
    counters: Arc<GpuErrors>,
}

impl Metrics {
    pub fn new() -> Metrics {
        let mut metrics = Metrics {
            registry: Registry::with_prefix("switchyard_agent"),
            scans: Family::default(),
            // From 1 ms to 33 s.
            scan: Histogram::new(exponential_buckets(0.001, 2.0, 16)),
            gpu_events: Counter::default(),
            writes: Family::default(),
            write_failures: Family::default(),
            requests: Family::default(),
            pod_resources_failures: Counter::default(),
            devices: Family::default(),
            unhealthy: Family::default(),
            report_age: Gauge::default(),
            counters: Arc::default(),
        };
        metrics.register();
        metrics
    }

    fn register(&mut self) {
        let registry = &mut self.registry;
        registry.register("scans", "Scans of the machine by outcome", self.scans.clone());
        registry.register_with_unit("scan", "Duration of a scan of the machine", Unit::Seconds, self.scan.clone());
        registry.register("gpu_events", "Events reported by GPUs", self.gpu_events.clone());
        registry.register("writes", "Writes of the report by what had changed", self.writes.clone());
        registry.register(
            "write_failures",
            "Reports that could not be written, by reason",
            self.write_failures.clone(),
        );
        registry.register(
            "api_requests",
            "Requests to the API server by verb, resource and status code; the code is `none` without a response",
            self.requests.clone(),
        );
        registry.register("pod_resources_failures", "Failed calls to the kubelet", self.pod_resources_failures.clone());
        registry.register("devices", "Devices in the report by kind", self.devices.clone());
        registry.register(
            "unhealthy_devices",
            "GPUs that are lost or need an action, and RDMA ports that are not active",
            self.unhealthy.clone(),
        );
        registry.register_with_unit(
            "report_age",
            "Age of the facts on the API server",
            Unit::Seconds,
            self.report_age.clone(),
        );
        registry.register_collector(Box::new(Arc::clone(&self.counters)));
    }

    /// Records a scan; `None` if it failed.
    pub fn scanned(&self, outcome: &'static str, scan: Option<&Scan>) {
        self.scans.get_or_create(&[("outcome", outcome.into())]).inc();
        let Some(scan) = scan else { return };
        self.scan.observe(scan.took.as_secs_f64());
        self.counters.0.lock().unwrap_or_else(PoisonError::into_inner).clone_from(&scan.counters);
        for DeviceHealth { kind, devices, unhealthy } in health(&scan.facts) {
            self.devices.get_or_create(&[("kind", kind.into())]).set(devices);
            self.unhealthy.get_or_create(&[("kind", kind.into())]).set(unhealthy);
        }
    }

    pub fn gpu_event(&self) {
        self.gpu_events.inc();
    }

    pub fn wrote(&self, what: &'static str) {
        self.writes.get_or_create(&[("what", what.into())]).inc();
    }

    pub fn write_failed(&self, reason: &'static str) {
        self.write_failures.get_or_create(&[("reason", reason.into())]).inc();
    }

    /// Records a request; `None` if it got no response.
    pub fn request(&self, verb: &'static str, resource: String, status: Option<u16>) {
        let code = status.map_or(Cow::Borrowed("none"), |status| status.to_string().into());
        self.requests.get_or_create(&[("verb", verb.into()), ("resource", resource.into()), ("code", code)]).inc();
    }

    pub fn pod_resources_failed(&self) {
        self.pod_resources_failures.inc();
    }

    /// All metrics in the Prometheus text format. `observed` is the time of the facts on the
    /// server.
    pub fn text(&self, observed: Option<Timestamp>) -> String {
        let age = observed.map_or(f64::NAN, |time| Timestamp::now().duration_since(time).as_secs_f64().max(0.0));
        self.report_age.set(age);
        let mut text = String::new();
        // Writing into a `String` cannot fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}

/// Number of devices of one kind, and how many of them are unhealthy.
struct DeviceHealth {
    kind: &'static str,
    devices: i64,
    unhealthy: i64,
}

fn health(facts: &GPUTopologyStatus) -> [DeviceHealth; 2] {
    let count = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
    let acts = |gpu: &&switchyard_crds::gpu_topology::Gpu| {
        gpu.health.as_ref().is_some_and(|health| health.recovery_action != "None")
    };
    let lost = i64::from(facts.gpu_count.unwrap_or(0)).saturating_sub(count(facts.gpus.len())).max(0);
    let down = facts.nics.iter().filter(|nic| nic.rdma_device.is_some() && nic.state.as_deref() != Some("Active"));
    let broken = count(facts.gpus.iter().filter(acts).count());
    [
        DeviceHealth { kind: "gpu", devices: count(facts.gpus.len()) + lost, unhealthy: broken + lost },
        DeviceHealth { kind: "nic", devices: count(facts.nics.len()), unhealthy: count(down.count()) },
    ]
}

/// The latest GPU counters.
#[derive(Debug, Default)]
struct GpuErrors(Mutex<Vec<GpuCounters>>);

impl Collector for GpuErrors {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let gpus = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut family = |name: &str, help: &str, value: &dyn Fn(&GpuCounters) -> Vec<(&'static str, u64)>| {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for gpu in gpus.iter() {
                for (kind, count) in value(gpu) {
                    let labels = [("gpu", gpu.bus_id.as_str()), ("kind", kind)];
                    ConstCounter::new(count).encode(family.encode_family(&labels)?)?;
                }
            }
            Ok(())
        };
        let known = |counts: [(&'static str, Option<u64>); 2]| {
            counts.into_iter().filter_map(|(kind, count)| Some((kind, count?))).collect()
        };
        family("gpu_ecc_errors", "Memory errors since the driver was loaded, by GPU and kind", &|gpu| {
            known([("corrected", gpu.corrected_ecc_errors), ("uncorrected", gpu.uncorrected_ecc_errors)])
        })?;
        family("gpu_pcie_errors", "Errors of the PCIe link since the driver was loaded, by GPU and kind", &|gpu| {
            known([("replay", gpu.pcie_replays), ("", None)])
        })?;
        family("gpu_nvlink_errors", "Errors over all NVLinks since the driver was loaded, by GPU and kind", &|gpu| {
            gpu.nvlink_errors.iter().map(|(kind, count)| (*kind, *count)).collect()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use switchyard_crds::gpu_topology::{Gpu, Nic};

    #[test]
    fn metrics_have_their_labels() {
        let metrics = Metrics::new();
        assert!(metrics.text(None).contains("switchyard_agent_report_age_seconds NaN"));
        let gpu = |action: &str| Gpu {
            health: serde_json::from_value(serde_json::json!({"recoveryAction": action})).unwrap(),
            ..Gpu::default()
        };
        let nic = |state: &str| Nic { rdma_device: Some("mlx5_0".into()), state: Some(state.into()), ..Nic::default() };
        let facts = GPUTopologyStatus {
            gpu_count: Some(4),
            gpus: vec![gpu("None"), gpu("GPUReset"), Gpu::default()],
            nics: vec![nic("Active"), nic("Down"), Nic::default()],
            ..GPUTopologyStatus::default()
        };
        let counters = GpuCounters {
            bus_id: "0000:1b:00.0".into(),
            corrected_ecc_errors: Some(5),
            pcie_replays: Some(6),
            nvlink_errors: [("crc_data", 7)].into(),
            ..GpuCounters::default()
        };
        metrics.scanned("complete", Some(&Scan { facts, counters: vec![counters], ..Scan::default() }));
        metrics.scanned("hangs", None);
        metrics.wrote("facts");
        metrics.write_failed("forbidden");
        metrics.pod_resources_failed();
        metrics.gpu_event();
        metrics.request("patch", "gputopologies/status".into(), Some(200));
        let text = metrics.text(Some(Timestamp::now()));
        for line in [
            "switchyard_agent_scans_total{outcome=\"complete\"} 1",
            "switchyard_agent_scans_total{outcome=\"hangs\"} 1",
            "switchyard_agent_scan_seconds_count 1",
            "switchyard_agent_writes_total{what=\"facts\"} 1",
            "switchyard_agent_write_failures_total{reason=\"forbidden\"} 1",
            "switchyard_agent_pod_resources_failures_total 1",
            "switchyard_agent_gpu_events_total 1",
            "switchyard_agent_api_requests_total{verb=\"patch\",resource=\"gputopologies/status\",code=\"200\"} 1",
            "switchyard_agent_devices{kind=\"gpu\"} 4",
            "switchyard_agent_unhealthy_devices{kind=\"gpu\"} 2",
            "switchyard_agent_devices{kind=\"nic\"} 3",
            "switchyard_agent_unhealthy_devices{kind=\"nic\"} 1",
            "switchyard_agent_gpu_ecc_errors_total{gpu=\"0000:1b:00.0\",kind=\"corrected\"} 5",
            "switchyard_agent_gpu_pcie_errors_total{gpu=\"0000:1b:00.0\",kind=\"replay\"} 6",
            "switchyard_agent_gpu_nvlink_errors_total{gpu=\"0000:1b:00.0\",kind=\"crc_data\"} 7",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is missing:\n{text}");
        }
        assert!(!text.contains("uncorrected"), "what a GPU does not count is absent");
    }
}
