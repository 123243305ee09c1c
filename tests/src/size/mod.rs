//! A large cluster on this machine: a real API server with all nodes, reports and pods, a real
//! scheduler, and the controller under test.
//!
//! Objects that exist before the controller starts (nodes, their GPUTopologies, foreign pods) are
//! written to etcd ([`ControlPlane::store`]). The API server lists and watches them, so the
//! controller sees only real API responses. TrainJobs, their pods, and foreign pods that come and
//! go later are created through the API. Nodes run nothing ([`crate::Kubelet`]).
//!
//! There are three node pools: nodes with GPUs held by foreign pods, nodes for the queue, and free
//! nodes.

mod job_tracker;
mod objects;
mod phases;

use crate::{
    ControlPlane, ControllerOptions, Daemon, Jobs, Kubelet, KubeletOptions, Options, SYSTEM, cargo, gpus, http_address,
    merge, page, start_controller,
};
use anyhow::{Context, Result, bail, ensure};
use job_tracker::JobTracker;
use k8s_openapi::api::core::v1::Namespace;
use kube::Api;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use switchyard_crds::labels;

/// The controller's user name in the audit log.
const USER: &str = "switchyard-controller";
/// Namespace of foreign pods.
const OTHERS: &str = "others";
/// Prefix of node names.
const PREFIX: &str = "node";
/// Label for a node's pool.
const POOL: &str = "bench.switchyard.dev/pool";
/// Timeout of one phase.
const LIMIT: Duration = Duration::from_secs(600);

/// Size of the benchmark.
#[derive(Debug, Clone)]
pub struct Scale {
    /// Nodes, with 8 GPUs and a GPUTopology each.
    pub nodes: usize,
    /// Foreign pods, bound and running.
    pub others: usize,
    /// Running TrainJobs, with one node each.
    pub running: usize,
    /// Queued TrainJobs.
    pub waiting: usize,
    /// Nodes of the large gang.
    pub gang: usize,
    /// Jobs whose time from apply to placement is measured, with a free cluster and with the queue.
    pub probes: usize,
    /// Seconds during which writes are counted, once without changes and once with churn.
    pub seconds: u64,
    /// Controller binary to compare with, instead of this profile's.
    pub program: Option<PathBuf>,
}

impl Scale {
    fn free(&self) -> usize {
        self.gang.max(4) + 4
    }

    fn pool(&self, node: usize) -> &'static str {
        if node < self.running {
            "queue"
        } else if node < self.running + self.free() {
            "free"
        } else {
            "others"
        }
    }

    fn name(&self, node: usize) -> String {
        let width = self.nodes.to_string().len();
        format!("{PREFIX}-{node:0width$}")
    }
}

/// The cluster and its clients.
struct Bench {
    scale: Scale,
    jobs: Jobs,
    tracker: JobTracker,
    kubelet: Kubelet,
    controller: Daemon,
    plane: ControlPlane,
}

/// Measures all phases, and prints each result as soon as it is known.
///
/// # Errors
/// The cluster cannot be created, or a phase times out.
pub async fn measure(scale: &Scale) -> Result<Value> {
    ensure!(
        scale.nodes > scale.running + scale.free(),
        "--nodes {}: expected more than {}, for --running {} and a --gang of {}",
        scale.nodes,
        scale.running + scale.free(),
        scale.running,
        scale.gang
    );
    let begin = Instant::now();
    let mut result = json!({"nodes": scale.nodes, "otherPods": scale.others, "runningJobs": scale.running, "waitingJobs": scale.waiting});
    let (mut bench, sync) = Bench::start(scale).await?;
    result["sync"] = report(begin, "sync", sync);
    result["free"] = report(begin, "free cluster, apply to placed", bench.probes("free").await?);
    result["gang"] = report(begin, "gang", bench.gang().await?);
    result["running"] = report(begin, "running", bench.run_all().await?);
    result["queue"] = report(begin, "queue", bench.queue_up().await?);
    result["withQueue"] = report(begin, "with the queue, apply to placed", bench.probes("behind").await?);
    result["quiet"] = report(begin, "quiet", bench.quiet().await?);
    result["churn"] = report(begin, "churn", bench.churn().await?);
    result["passes"] = report(begin, "controller passes", bench.passes()?);
    result["failover"] = report(begin, "failover", bench.failover().await?);
    result["controlPlaneRssMiB"] = bench.plane.api_server().map_or(0, |server| server.usage().rss_bytes >> 20).into();
    result["seconds"] = seconds(begin.elapsed()).into();
    Ok(result)
}

/// Simulates 24 hours of 500 queued jobs. This is the controller's own unit test, which prints its
/// counts.
///
/// # Errors
/// The test fails.
pub fn day() -> Result<Value> {
    let test = "reconcile::tests::waiting::hundreds_of_queued_jobs_cost_at_most_one_write_per_second_and_no_memory";
    // Use the tests' profile, which is already built, because the run time does not matter.
    let mut command = cargo(&["test", "--quiet", "--workspace", "--lib", test, "--", "--nocapture"]);
    let output = command.env("SWITCHYARD_SIMULATED_HOURS", "24").output().context("cannot start cargo")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(output.status.success(), "{test}: {text}{}", String::from_utf8_lossy(&output.stderr));
    let line = text.lines().find_map(|line| line.strip_prefix("day: ")).with_context(|| format!("{test}: {text}"))?;
    Ok(serde_json::from_str(line)?)
}

fn report(begin: Instant, what: &str, value: Value) -> Value {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = load.split(' ').next().unwrap_or_default().to_string();
    println!("{:6.1} s, load {load}: {what}: {value}", begin.elapsed().as_secs_f64());
    merged(value, json!({"load": load}))
}

fn merged(mut value: Value, more: Value) -> Value {
    merge(&mut value, more);
    value
}

/// Rounds to milliseconds.
fn seconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 1000.0).round() / 1000.0
}

fn mib(controller: &Daemon) -> u64 {
    controller.usage().rss_bytes >> 20
}

/// Starts a controller with leader election.
fn candidate(plane: &ControlPlane, name: &str, scale: &Scale) -> Result<Daemon> {
    let arguments = ["--leader-elect", "Enabled", "--identity", name].map(String::from).to_vec();
    start_controller(
        plane,
        name,
        &ControllerOptions { arguments, program: scale.program.clone(), ..ControllerOptions::default() },
    )
}

/// Waits until a controller has listed all kinds.
fn synced(controller: &mut Daemon) -> Result<()> {
    let log = controller.log.clone();
    controller.until("listed", LIMIT, || Ok(std::fs::read_to_string(&log)?.contains("all kinds are listed")))
}

impl Bench {
    async fn start(scale: &Scale) -> Result<(Bench, Value)> {
        let options = Options { controller_manager: true, scheduler: true, audit: true, ..Options::default() };
        let plane = ControlPlane::start(&options)?;
        plane.install_crds().await?;
        let client = plane.client().await?;
        let namespaces = Api::<Namespace>::all(client.clone());
        for name in [OTHERS, SYSTEM] {
            let namespace = serde_json::from_value(json!({"metadata": {"name": name}}))?;
            namespaces.create(&Default::default(), &namespace).await?;
        }
        let namespace = plane.namespace("size").await?;
        let begin = Instant::now();
        let stored = plane.store(objects::all(scale)).await?;
        println!("{stored} objects stored in {:.1} s", begin.elapsed().as_secs_f64());
        // Start watching before jobs are created. The watch covers only our namespace.
        let tracker = JobTracker::watch(client.clone(), &namespace);
        let begin = Instant::now();
        let mut controller = candidate(&plane, "first", scale)?;
        tokio::time::sleep(Duration::from_millis(100)).await;
        let start = mib(&controller);
        synced(&mut controller)?;
        let listed = begin.elapsed();
        let sync = json!({"storedObjects": stored, "listedSeconds": seconds(listed), "rssMiBAtStart": start, "rssMiBAfterSync": mib(&controller)});
        let options =
            KubeletOptions { selector: Some(labels::JOB_UID.into()), ..KubeletOptions::new(PREFIX, scale.nodes) };
        let kubelet = Kubelet::start(plane.config().await?, options).await?;
        let jobs = Jobs::new(client, &namespace);
        Ok((Bench { scale: scale.clone(), jobs, tracker, kubelet, controller, plane }, sync))
    }

    /// Returns a job with all GPUs of `nodes` nodes in a pool.
    fn job(&self, name: &str, nodes: usize, pool: &str, policy: &str) -> Value {
        let job = gpus::gpu_job(name, u32::try_from(nodes).unwrap_or(u32::MAX), 8, policy);
        merged(job, json!({"spec": {"template": {"spec": {"nodeSelector": {POOL: pool}}}}}))
    }

    /// Returns statistics of reconcile and plan times, from the metrics' histogram buckets.
    fn passes(&self) -> Result<Value> {
        let address = http_address(&self.controller).context("the controller serves no pages")?;
        let text = page(address, "/metrics").context("no metrics")?;
        let mut passes = json!({"rssMiB": mib(&self.controller)});
        for name in ["reconcile", "plan"] {
            passes[name] = histogram(&text, &format!("switchyard_{name}_seconds"))?;
        }
        Ok(passes)
    }
}

/// Returns the count, the mean, and an upper bound on the maximum of a histogram.
fn histogram(text: &str, name: &str) -> Result<Value> {
    let number = |what: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name}_{what} ")));
        line.and_then(|number| number.trim().parse::<f64>().ok())
    };
    let (Some(count), Some(sum)) = (number("count"), number("sum")) else { bail!("no metric {name}") };
    let bucket = |line: &str| {
        let (bound, below) = line.strip_prefix(&format!("{name}_bucket{{le=\""))?.split_once("\"} ")?;
        Some((bound.to_string(), below.trim().parse::<f64>().ok()?))
    };
    let longest = text.lines().filter_map(bucket).find(|(_, below)| *below >= count).map(|(bound, _)| bound);
    Ok(
        json!({"count": count, "meanMilliseconds": (sum / count.max(1.0) * 1e5).round() / 100.0, "longestAtMostSeconds": longest}),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_duration_is_in_the_first_full_bucket() {
        let text = "a_seconds_sum 3.0\na_seconds_count 2\na_seconds_bucket{le=\"1.0\"} 1\na_seconds_bucket{le=\"4.0\"} 2\n\
                    a_seconds_bucket{le=\"+Inf\"} 2\n";
        let expected = json!({"count": 2.0, "meanMilliseconds": 1500.0, "longestAtMostSeconds": "4.0"});
        assert_eq!(histogram(text, "a_seconds").unwrap(), expected);
        assert!(histogram(text, "b_seconds").is_err());
    }

    #[test]
    fn every_node_is_in_one_pool() {
        let scale =
            Scale { nodes: 30, others: 0, running: 5, waiting: 0, gang: 10, probes: 0, seconds: 0, program: None };
        let count = |pool| (0..scale.nodes).filter(|node| scale.pool(*node) == pool).count();
        assert_eq!(["queue", "free", "others"].map(count), [5, 14, 11]);
    }
}
