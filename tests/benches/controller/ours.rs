//! Scenarios with our controller.

use crate::{COUNT, LIMIT, since};
use anyhow::{Result, bail};
use futures::StreamExt;
use kube::api::{ListParams, PostParams};
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use switchyard_crds::TrainJob;
use switchyard_tests::{
    Command, ControlPlane, ControllerOptions, Daemon, Jobs, Kubelet, KubeletOptions, Options, PodTracker, plain_job,
    stage_of, start_controller,
};

/// The controller's user in the audit log.
const USER: &str = "switchyard-controller";

struct Bench {
    plane: ControlPlane,
    jobs: Jobs,
    seen: PodTracker,
    kubelet: Kubelet,
    controller: Daemon,
}

fn start(plane: &ControlPlane) -> Result<Daemon> {
    start_controller(plane, "controller", &ControllerOptions::default())
}

pub(crate) async fn measure() -> Result<Value> {
    let options = Options { controller_manager: true, scheduler: true, audit: true, ..Options::default() };
    let plane = ControlPlane::start(&options)?;
    plane.install_crds().await?;
    let namespace = plane.namespace("scale").await?;
    let jobs = Jobs::new(plane.client().await?, &namespace);
    let kubelet = Kubelet::start(plane.config().await?, KubeletOptions::new("node", COUNT)).await?;
    let seen = PodTracker::watch(plane.client().await?, &namespace);
    let controller = start(&plane)?;
    let mut bench = Bench { plane, jobs, seen, kubelet, controller };
    tokio::time::sleep(Duration::from_secs(2)).await;
    let mut result = json!({"a": bench.a().await?});
    result["d"] = bench.d().await?;
    result["e"] = bench.e().await?;
    result["f"] = bench.f().await?;
    result["cpuSeconds"] = bench.controller.usage().cpu_seconds.into();
    result["apiServerCpuSeconds"] = bench.plane.api_server().map_or(0.0, |server| server.usage().cpu_seconds).into();
    result["apiServerRssMiB"] = bench.plane.api_server().map_or(0, |server| server.usage().rss_bytes >> 20).into();
    result["b"] = bench.b().await?;
    result["g"] = bench.g().await?;
    result["h"] = bench.h().await?;
    Ok(result)
}

impl Bench {
    fn writes(&self) -> u64 {
        self.plane.write_counts(USER).values().sum()
    }

    async fn a(&self) -> Result<Value> {
        let before = self.plane.write_counts(USER);
        let start = Instant::now();
        self.jobs.create(plain_job("a", COUNT as u32, "run")).await?;
        self.seen.until("A created", COUNT, |_, _| true).await?;
        let created = since(start);
        self.seen.until("A lifted", COUNT, |_, pod| !pod.gated).await?;
        let lifted = since(start);
        self.seen.until("A running", COUNT, |_, pod| pod.running).await?;
        let running = since(start);
        self.stage("a", "Running", 1).await?;
        let status = since(start);
        let mut writes = self.plane.write_counts(USER);
        for (what, count) in before {
            *writes.entry(what).or_default() -= count;
        }
        let of_pods: u64 = writes.iter().filter(|(what, _)| what.ends_with(" pods")).map(|(_, count)| count).sum();
        println!(
            "A: created {created:.2} s, lifted {lifted:.2} s, running {running:.2} s, status {status:.2} s; {writes:?}"
        );
        Ok(json!({
            "created": created, "lifted": lifted, "running": running, "statusRunning": status, "statusAfterLast": status - running,
            "writesPerPod": of_pods as f64 / COUNT as f64, "writes": writes,
        }))
    }

    async fn stage(&self, name: &str, stage: &str, attempt: i32) -> Result<()> {
        let deadline = Instant::now() + LIMIT;
        loop {
            let job = self.jobs.api().get(name).await?;
            if stage_of(&job) == Some(stage)
                && job.status.as_ref().is_some_and(|status| status.attempt == Some(attempt))
            {
                return Ok(());
            }
            if Instant::now() > deadline {
                bail!("{name} is not {stage}: {:?}", job.status);
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn d(&self) -> Result<Value> {
        self.jobs.api().delete("a", &Default::default()).await?;
        self.seen.until("gone", 0, |_, _| true).await?;
        let mut job = plain_job("d", COUNT as u32, "run");
        job["spec"]["failurePolicy"] = json!({"maxRestarts": 3});
        self.jobs.create(job).await?;
        self.stage("d", "Running", 1).await?;
        let start = Instant::now();
        self.kubelet.send(&self.jobs.namespace, "d-1-500", Command::Exit(5, String::new()))?;
        self.seen.until("D created", COUNT, |name, _| name.starts_with("d-2-")).await?;
        let created = since(start);
        self.stage("d", "Running", 2).await?;
        let running = since(start);
        println!("D: next gang complete {created:.2} s, running {running:.2} s");
        Ok(json!({"created": created, "running": running}))
    }

    async fn e(&self) -> Result<Value> {
        let start = Instant::now();
        self.jobs.patch("d", json!({"spec": {"suspend": true}})).await?;
        self.seen.until("E gone", 0, |_, pod| pod.running).await?;
        let suspended = since(start);
        self.seen.until("E all gone", 0, |_, _| true).await?;
        let start = Instant::now();
        self.jobs.patch("d", json!({"spec": {"suspend": false}})).await?;
        self.seen.until("E created", COUNT, |name, _| name.starts_with("d-3-")).await?;
        let resumed = since(start);
        self.stage("d", "Running", 3).await?;
        println!("E: suspended {suspended:.2} s, resumed {resumed:.2} s, running {:.2} s", since(start));
        Ok(json!({"suspended": suspended, "resumed": resumed, "running": since(start)}))
    }

    async fn f(&self) -> Result<Value> {
        let start = Instant::now();
        self.jobs.api().delete("d", &Default::default()).await?;
        self.seen.until("F gone", 0, |_, _| true).await?;
        println!("F: deleted {:.2} s", since(start));
        Ok(json!({"gone": since(start)}))
    }

    async fn create_all(&self, prefix: &str, policy: &str) -> Result<()> {
        let api = self.jobs.api();
        let jobs = (0..COUNT).map(|number| plain_job(&format!("{prefix}-{number}"), 1, policy));
        let jobs: Vec<TrainJob> = jobs.map(serde_json::from_value).collect::<Result<_, _>>()?;
        let params = PostParams::default();
        let mut created = futures::stream::iter(jobs.iter().map(|job| api.create(&params, job))).buffer_unordered(16);
        while let Some(result) = created.next().await {
            result?;
        }
        Ok(())
    }

    async fn staged(&self, prefix: &str, stage: &str, count: usize) -> Result<()> {
        let deadline = Instant::now() + LIMIT;
        loop {
            let jobs = self.jobs.api().list(&ListParams::default()).await?.items;
            let there = |job: &&TrainJob| {
                stage_of(job) == Some(stage) && job.metadata.name.as_ref().is_some_and(|name| name.starts_with(prefix))
            };
            let seen = jobs.iter().filter(there).count();
            if seen == count {
                return Ok(());
            }
            if Instant::now() > deadline {
                bail!("{seen} of {count} jobs are {stage}");
            }
            tokio::time::sleep(Duration::from_millis(250)).await;
        }
    }

    async fn b(&self) -> Result<Value> {
        let before = self.writes();
        let start = Instant::now();
        self.create_all("b", "run").await?;
        let submitted = since(start);
        self.seen.until("B created", COUNT, |name, _| name.starts_with("b-")).await?;
        let created = since(start);
        self.staged("b-", "Running", COUNT).await?;
        let running = since(start);
        tokio::time::sleep(Duration::from_secs(1)).await;
        let writes = self.writes() - before;
        println!("B: submitted {submitted:.2} s, created {created:.2} s, running {running:.2} s, {writes} writes");
        Ok(json!({
            "submitted": submitted, "created": created, "running": running, "writesPerJob": writes as f64 / COUNT as f64,
        }))
    }

    /// The controller dies, and a pod ends while it is down.
    async fn g(&mut self) -> Result<Value> {
        self.controller.kill();
        self.kubelet.send(&self.jobs.namespace, "b-500-1-0", Command::Exit(0, String::new()))?;
        tokio::time::sleep(Duration::from_secs(1)).await;
        let before = self.writes();
        let begin = Instant::now();
        self.controller = start(&self.plane)?;
        self.stage("b-500", "Complete", 1).await?;
        let first = since(begin);
        tokio::time::sleep(Duration::from_secs(10)).await;
        // The expected writes are the status, the event and the released budget of the finished
        // job.
        let wrong = self.writes() - before - 3;
        println!("G: first right action {first:.2} s, wrong writes {wrong}");
        Ok(json!({"firstAction": first, "wrongWrites": wrong}))
    }

    async fn h(&self) -> Result<Value> {
        self.create_all("h", "succeed-after=0s").await?;
        self.staged("h-", "Complete", COUNT).await?;
        tokio::time::sleep(Duration::from_secs(15)).await;
        let (writes, usage, start) = (self.writes(), self.controller.usage(), Instant::now());
        tokio::time::sleep(Duration::from_secs(60)).await;
        let after = self.controller.usage();
        let percent = 100.0 * (after.cpu_seconds - usage.cpu_seconds) / start.elapsed().as_secs_f64();
        let writes = self.writes() - writes;
        println!("H: {writes} writes, {percent:.2} % of a core, {} MiB", after.rss_bytes >> 20);
        Ok(json!({"writes": writes, "cpuPercent": percent, "rssMiB": after.rss_bytes >> 20}))
    }
}
