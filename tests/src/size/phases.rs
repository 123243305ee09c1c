//! Phases of the benchmark.

use super::objects::foreign_pod;
use super::{Bench, LIMIT, OTHERS, USER, candidate, mib, seconds, synced};
use crate::{Command, PodTracker, until_async};
use anyhow::{Context, Result, ensure};
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::{Api, ResourceExt};
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use switchyard_crds::{PlacementSlice, TrainJob};

/// Concurrent calls.
const CALLS: usize = 16;
/// Nodes of a job whose time is measured.
const PROBE_NODES: usize = 4;
/// Name prefixes of queued and running jobs.
const WAITING: &str = "w-";
const RUNNING: &str = "r-";

impl Bench {
    /// Measures the time from apply to placement, for consecutive jobs that find free nodes.
    pub(super) async fn probes(&mut self, prefix: &str) -> Result<Value> {
        let mut times = Vec::new();
        for number in 0..self.scale.probes {
            let name = format!("{prefix}-{number}");
            let job = self.job(&name, PROBE_NODES, "free", "run");
            let begin = Instant::now();
            self.jobs.create(job).await?;
            self.tracker.until("placed", &name, 1, |job| job.placed.is_some()).await?;
            let placed = self.tracker.with(|jobs| jobs.get(&name).and_then(|job| job.placed));
            times.push(placed.context("it was just placed")?.duration_since(begin));
            self.jobs.api().delete(&name, &DeleteParams::default()).await?;
            self.jobs.wait_gone(&name).await?;
        }
        self.pods_gone(prefix).await?;
        Ok(percentiles(times))
    }

    /// Waits until no pod with this name prefix is left.
    async fn pods_gone(&self, prefix: &str) -> Result<()> {
        let are_gone = async || {
            let pods = self.jobs.pods_api().list_metadata(&ListParams::default()).await?.items;
            Ok(!pods.iter().any(|pod| pod.name_any().starts_with(prefix)))
        };
        until_async(&format!("rid of the pods of {prefix}"), LIMIT, are_gone).await.map(drop)
    }

    /// Measures the large gang: the time until its gates are lifted, and the size of its objects.
    pub(super) async fn gang(&mut self) -> Result<Value> {
        let nodes = self.scale.gang;
        let pods = PodTracker::watch(self.jobs.client.clone(), &self.jobs.namespace);
        let mut job = self.job("gang", nodes, "free", "run");
        job["spec"]["trainer"]["framework"] = "Torch".into();
        let (before, cpu) = (self.total_writes(), self.cpu_seconds());
        let begin = Instant::now();
        self.jobs.create(job).await?;
        pods.until("created", nodes, |_, _| true).await?;
        let created = begin.elapsed();
        pods.until("lifted", nodes, |_, pod| !pod.gated).await?;
        let lifted = begin.elapsed();
        let used: BTreeMap<&str, f64> = self
            .cpu_seconds()
            .into_iter()
            .map(|(name, now)| (name, round(now - cpu.get(name).unwrap_or(&0.0))))
            .collect();
        self.tracker.until("running", "gang", 1, |job| job.stage == "Running").await?;
        let running = begin.elapsed();
        let placed = self.tracker.with(|jobs| jobs.get("gang").and_then(|job| job.placed)).context("no placement")?;
        let job = self.jobs.api().get("gang").await?;
        let slices = Api::<PlacementSlice>::namespaced(self.jobs.client.clone(), &self.jobs.namespace);
        let slices = slices.list(&ListParams::default()).await?.items;
        let configs = Api::<ConfigMap>::namespaced(self.jobs.client.clone(), &self.jobs.namespace);
        let mut configs = configs.list(&ListParams::default()).await?.items;
        configs.retain(|config| config.name_any().starts_with("gang"));
        let placed_nodes: usize = slices.iter().map(|slice| slice.spec.nodes.len()).sum();
        let result = json!({
            "nodes": nodes, "gpus": nodes * 8, "createdSeconds": seconds(created), "placedSeconds": seconds(placed.duration_since(begin)),
            "liftedSeconds": seconds(lifted), "runningSeconds": seconds(running), "trainJobKiB": kib(&job)?,
            "slices": slices.len(), "nodesInSlices": placed_nodes, "largestSliceKiB": largest(&slices)?,
            "configMaps": configs.len(), "largestConfigMapKiB": largest(&configs)?,
            "writes": self.total_writes() - before, "rssMiB": mib(&self.controller), "cpuSecondsUntilLifted": used,
        });
        let begin = Instant::now();
        self.jobs.api().delete("gang", &DeleteParams::default()).await?;
        pods.until("gone", 0, |_, _| true).await?;
        let mut result = result;
        result["goneSeconds"] = seconds(begin.elapsed()).into();
        Ok(result)
    }

    /// CPU seconds used by the control plane and our controller so far.
    fn cpu_seconds(&self) -> BTreeMap<&'static str, f64> {
        let mut seconds = self.plane.cpu_seconds();
        seconds.insert("switchyard", self.controller.usage().cpu_seconds);
        seconds
    }

    /// Creates the running jobs.
    pub(super) async fn run_all(&mut self) -> Result<Value> {
        let begin = Instant::now();
        let jobs = (0..self.scale.running).map(|number| self.job(&format!("{RUNNING}{number}"), 1, "queue", "run"));
        self.create_all(jobs.collect()).await?;
        self.tracker.until("running", RUNNING, self.scale.running, |job| job.stage == "Running").await?;
        Ok(
            json!({"jobs": self.scale.running, "runningSeconds": seconds(begin.elapsed()), "rssMiB": mib(&self.controller)}),
        )
    }

    /// Creates the queued jobs, with one to four nodes each, in a pool without free nodes.
    pub(super) async fn queue_up(&mut self) -> Result<Value> {
        let begin = Instant::now();
        let jobs = (0..self.scale.waiting)
            .map(|number| self.job(&format!("{WAITING}{number}"), 1 + number % 4, "queue", "run"));
        self.create_all(jobs.collect()).await?;
        self.tracker.until("queued", WAITING, self.scale.waiting, |job| job.stage == "Queued").await?;
        Ok(
            json!({"jobs": self.scale.waiting, "queuedSeconds": seconds(begin.elapsed()), "rssMiB": mib(&self.controller)}),
        )
    }

    async fn create_all(&self, jobs: Vec<Value>) -> Result<()> {
        let jobs: Vec<TrainJob> = jobs.into_iter().map(serde_json::from_value).collect::<Result<_, _>>()?;
        let (api, params) = (self.jobs.api(), PostParams::default());
        futures::stream::iter(jobs.iter().map(|job| api.create(&params, job)))
            .buffer_unordered(CALLS)
            .try_for_each(|_| async { Ok(()) })
            .await?;
        Ok(())
    }

    /// Counts the controller's writes so far by object name. Audit entries of events have no name.
    fn writes(&self) -> BTreeMap<String, usize> {
        let mut writes = BTreeMap::new();
        for entry in self.plane.audit_entries() {
            let text = |path: &str| entry.pointer(path).and_then(Value::as_str).unwrap_or_default();
            if text("/user/username") == USER && text("/objectRef/resource") != "leases" {
                *writes.entry(text("/objectRef/name").to_string()).or_default() += 1;
            }
        }
        writes
    }

    fn total_writes(&self) -> usize {
        self.writes().values().sum()
    }

    /// Counts writes while nothing happens.
    pub(super) async fn quiet(&mut self) -> Result<Value> {
        let (before, cpu, begin) = (self.total_writes(), self.controller.usage().cpu_seconds, Instant::now());
        tokio::time::sleep(Duration::from_secs(self.scale.seconds)).await;
        let passed = begin.elapsed().as_secs_f64();
        let writes = self.total_writes() - before;
        let percent = 100.0 * (self.controller.usage().cpu_seconds - cpu) / passed;
        Ok(json!({"seconds": passed.round(), "writes": writes, "writesPerSecond": round(writes as f64 / passed),
            "cpuPercent": round(percent), "rssMiB": mib(&self.controller)}))
    }

    /// Every second, a job ends and another arrives, and foreign pods leave and arrive on all
    /// pools.
    pub(super) async fn churn(&mut self) -> Result<Value> {
        let others = Api::<Pod>::namespaced(self.jobs.client.clone(), OTHERS);
        let (before, cpu) = (self.writes(), self.controller.usage().cpu_seconds);
        let (begin, mut rounds, mut foreign) = (Instant::now(), 0, 0);
        let end = begin + Duration::from_secs(self.scale.seconds);
        let stride = (self.scale.others / 10).max(1);
        while Instant::now() < end && rounds < self.scale.running {
            let next = Instant::now() + Duration::from_secs(1);
            self.kubelet.send(
                &self.jobs.namespace,
                &format!("{RUNNING}{rounds}-1-0"),
                Command::Exit(0, String::new()),
            )?;
            self.jobs.create(self.job(&format!("c-{rounds}"), 1, "queue", "run")).await?;
            for place in 0..10.min(self.scale.others) {
                let number = (place * stride + rounds) % self.scale.others;
                let (old, new) = (format!("other-{number}"), format!("again-{rounds}-{place}"));
                // Already replaced in an earlier round; small clusters have few foreign pods.
                if others.delete(&old, &DeleteParams::default().grace_period(0)).await.is_err() {
                    continue;
                }
                let mut pod = foreign_pod(&self.scale, number, &new);
                for field in ["uid", "creationTimestamp"] {
                    pod["metadata"].as_object_mut().map(|metadata| metadata.remove(field));
                }
                let pod: Pod = serde_json::from_value(pod)?;
                others.create(&PostParams::default(), &pod).await?;
                foreign += 2;
            }
            rounds += 1;
            tokio::time::sleep_until(next.into()).await;
        }
        let passed = begin.elapsed().as_secs_f64();
        self.tracker.until("ended", RUNNING, rounds, |job| job.stage == "Complete").await?;
        let cpu = self.controller.usage().cpu_seconds - cpu;
        // Count only jobs that stay queued, because placements are not part of this measurement.
        let waiting: Vec<String> = self.tracker.with(|jobs| {
            let waiting = jobs.iter().filter(|(name, job)| name.starts_with(WAITING) && job.placed.is_none());
            waiting.map(|(name, _)| name.clone()).collect()
        });
        let is_waiting = |name: &str| waiting.iter().any(|job| name == job || name.starts_with(&format!("{job}-")));
        let after = self.writes().into_iter().filter(|(name, _)| is_waiting(name));
        let writes: usize = after.map(|(name, count)| count - before.get(&name).copied().unwrap_or(0)).sum();
        let placed = self.scale.waiting - waiting.len();
        Ok(
            json!({"seconds": passed.round(), "jobsEnded": rounds, "jobsCame": rounds, "podsOfOthersChanged": foreign, "placed": placed, "stillWaiting": waiting.len(),
            "writesOfWaiting": writes, "writesOfWaitingPerSecond": round(writes as f64 / passed),
            "cpuPercent": round(100.0 * cpu / passed), "rssMiB": mib(&self.controller)}),
        )
    }

    /// Kills the leader while another controller is on standby, and applies a job at that moment.
    pub(super) async fn failover(&mut self) -> Result<Value> {
        let mut second = candidate(&self.plane, "second", &self.scale)?;
        synced(&mut second)?;
        let rss = mib(&second);
        self.controller.kill();
        let begin = Instant::now();
        self.jobs.create(self.job("after", PROBE_NODES, "free", "run")).await?;
        let deadline = begin + LIMIT;
        let pod = self.jobs.pods_api();
        while pod.get_opt("after-1-0").await?.is_none() {
            ensure!(Instant::now() < deadline, "no controller took over: {}", second.tail());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let first = begin.elapsed();
        self.tracker.until("placed", "after", 1, |job| job.placed.is_some()).await?;
        let placed = begin.elapsed();
        self.controller = second;
        Ok(json!({"firstActionSeconds": seconds(first), "placedSeconds": seconds(placed), "standbyRssMiB": rss}))
    }
}

fn round(number: f64) -> f64 {
    (number * 100.0).round() / 100.0
}

/// Size as JSON, which is how etcd stores custom resources.
fn kib(object: &impl Serialize) -> Result<f64> {
    Ok(round(serde_json::to_vec(object)?.len() as f64 / 1024.0))
}

fn largest(objects: &[impl Serialize]) -> Result<f64> {
    let sizes = objects.iter().map(kib).collect::<Result<Vec<f64>>>()?;
    Ok(sizes.into_iter().fold(0.0, f64::max))
}

fn percentiles(mut times: Vec<Duration>) -> Value {
    times.sort();
    let at =
        |share: usize| times.get((times.len() * share).div_ceil(100).saturating_sub(1)).copied().unwrap_or_default();
    json!({"jobs": times.len(), "p50Seconds": seconds(at(50)), "p99Seconds": seconds(at(99)), "longestSeconds": seconds(at(100))})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_match_the_measurements() {
        let found = percentiles((1..=200).rev().map(Duration::from_millis).collect());
        assert_eq!(found, json!({"jobs": 200, "p50Seconds": 0.1, "p99Seconds": 0.198, "longestSeconds": 0.2}));
        assert_eq!(percentiles(vec![Duration::from_secs(3)])["p50Seconds"], 3.0);
    }
}
