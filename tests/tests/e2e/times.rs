//! User-visible latencies, and resource usage of the idle system. `cargo xtask bench cluster`
//! repeats the measurements and keeps the result.

use crate::e2e::faults::{kill_rank, processes_of_pod};
use crate::e2e::{Cluster, JOBS, TEAM, example};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::fs;
use std::time::{Duration, Instant};
use switchyard_tests::chaos;

/// Goals: medians of ten, seconds; MiB.
const GOALS: [(&str, f64); 3] =
    [("applyToFirstStepSeconds", 5.0), ("killToStepSeconds", 6.0), ("idleMebibytes", 120.0)];

#[test]
fn user_visible_delays() -> Result<()> {
    let cluster = Cluster::start(2)?;
    cluster.install()?;
    cluster.team(TEAM)?;
    cluster.sh(&format!("kubectl --namespace {TEAM} create configmap text --from-file=docs"))?;
    let mebibytes = idle(&cluster)?;
    let repeats = chaos::size(1, 10);
    let (mut first, mut repeated) = (Vec::new(), Vec::new());
    for round in 0..repeats {
        let name = format!("job-{round}");
        let mut job = example("gpt-cluster.yaml")?;
        job["metadata"]["name"] = name.clone().into();
        job["spec"]["engine"]["steps"] = 100_000_000.into();
        let begin = Instant::now();
        cluster.apply(TEAM, &job)?;
        first.push(steps(&cluster, &name, 1, begin)?);
        let begin = Instant::now();
        kill_rank(&cluster, TEAM, &format!("{name}-1-1"))?;
        repeated.push(steps(&cluster, &name, 2, begin)?);
        cluster.sh(&format!("kubectl --namespace {TEAM} delete {JOBS} {name}"))?;
        cluster.no_pods()?;
    }
    let result = json!({
        "repeats": repeats, "goals": GOALS.into_iter().collect::<std::collections::BTreeMap<_, _>>(),
        "applyToFirstStepSeconds": spread(first), "killToStepSeconds": spread(repeated), "idleMebibytes": mebibytes,
        "command": "cargo xtask bench cluster", "machine": machine()?,
    });
    chaos::report("cluster", &result)
}

/// Waits until rank 0 of an attempt has reported steps; returns the seconds since `begin`.
pub(crate) fn steps(cluster: &Cluster, name: &str, attempt: u32, begin: Instant) -> Result<f64> {
    let pod = format!("{name}-{attempt}-0");
    loop {
        let log = cluster.nodes.plane.kubectl(&["--namespace", TEAM, "logs", &pod]);
        if log.stdout.contains("\"event\":\"progress\"") {
            return Ok(begin.elapsed().as_secs_f64());
        }
        ensure!(begin.elapsed() < crate::e2e::TIMEOUT, "{pod} does no step: {}{}", log.stdout, log.stderr);
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Minimum, median and maximum, rounded to hundredths.
pub(crate) fn spread(mut seconds: Vec<f64>) -> Value {
    seconds.sort_by(f64::total_cmp);
    let middle = (seconds[(seconds.len() - 1) / 2] + seconds[seconds.len() / 2]) / 2.0;
    json!({"least": rounded(seconds[0]), "median": rounded(middle), "most": rounded(seconds[seconds.len() - 1])})
}

/// Rounds to hundredths.
pub(crate) fn rounded(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

/// Memory of controllers and agents during an idle minute, in which they write only their Lease.
fn idle(cluster: &Cluster) -> Result<f64> {
    let versions = || -> Result<Vec<String>> {
        let list: Value =
            serde_json::from_str(&cluster.sh("kubectl get gputopologies.training.switchyard.dev -o json")?)?;
        let items = list["items"].as_array().cloned().unwrap_or_default();
        Ok(items.iter().map(|item| item["metadata"]["resourceVersion"].to_string()).collect())
    };
    cluster.until("all agents report", || Ok(versions()?.len() == cluster.nodes.names().len()))?;
    // An agent's second scan may correct its first report.
    cluster.until("no agent writes without changes", || {
        let before = versions()?;
        std::thread::sleep(Duration::from_secs(chaos::size(10, 60) as u64));
        Ok(versions()? == before)
    })?;
    let pods: Value = serde_json::from_str(&cluster.sh("kubectl --namespace switchyard-system get pods -o json")?)?;
    let mut kibibytes = 0;
    for pod in pods["items"].as_array().context("pods")? {
        for process in processes_of_pod(pod["metadata"]["uid"].as_str().context("a UID")?)? {
            let status = fs::read_to_string(process.join("status")).unwrap_or_default();
            let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
            kibibytes += line.trim().trim_end_matches(" kB").parse::<u64>().unwrap_or(0);
        }
    }
    ensure!(kibibytes > 0, "no process of ours");
    Ok((kibibytes as f64 / 102.4).round() / 10.0)
}

pub(crate) fn machine() -> Result<String> {
    let text = fs::read_to_string("/proc/cpuinfo")?;
    let model = text.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or_default();
    Ok(format!("{} x {}", std::thread::available_parallelism()?, model.trim_matches([' ', '\t', ':'])))
}
