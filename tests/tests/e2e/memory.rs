//! A container that runs out of memory during training: the job resumes from its checkpoint, and
//! every command names the cause.

use crate::e2e::faults::{Expectation, State, checkpointed, engine_pids};
use crate::e2e::{Cluster, JOBS, TEAM, message, stage};
use anyhow::{Context, Result, ensure};
use serde_json::json;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use switchyard_tests::until;

const JOB: &str = "hungry";
/// The job's message about it.
const WORDS: &str = "the container ran out of memory (OOMKilled)";

/// The job recovers once and fails the second time.
pub(crate) fn out_of_memory(cluster: &Cluster) -> Result<()> {
    let mut job = checkpointed(JOB)?;
    job["spec"]["trainer"]["resourcesPerNode"]["limits"]["memory"] = "512Mi".into();
    job["spec"]["failurePolicy"] = json!({"maxRestarts": 0, "maxInfrastructureRestarts": 1});
    cluster.apply(TEAM, &job)?;
    let mut state = State::new(JOB);
    state.next(cluster, "the job with little memory starts", Expectation::Restarts)?;

    let first = state.pod(1);
    starve(cluster, &first)?;
    state.next(cluster, "a container ran out of memory", Expectation::Restarts)?;
    let restarts = cluster.job(TEAM, JOB)?["status"]["restarts"].clone();
    ensure!(restarts["infrastructure"] == 1 && restarts["application"].as_u64().unwrap_or(0) == 0, "{restarts}");
    let events =
        format!("kubectl --namespace {TEAM} get events.events.k8s.io --field-selector regarding.name={JOB} -o json");
    let output = cluster.sh(&events)?;
    ensure!(output.contains(&format!("pod {first}")) && output.contains(WORDS), "{output}");

    explained(cluster, &first)?;

    starve(cluster, &state.pod(1))?;
    let job = cluster.wait_job(TEAM, JOB, "given up", |job| stage(job) == "Failed")?;
    ensure!(
        message(&job).contains(&format!("pod {}", state.pod(1))) && message(&job).contains(WORDS),
        "{}",
        message(&job)
    );
    explained(cluster, &state.pod(1))?;
    cluster.sh(&format!("kubectl --namespace {TEAM} delete {JOBS} {JOB}"))?;
    Ok(())
}

/// The pod state and the attempt's first error both name the cause.
fn explained(cluster: &Cluster, pod: &str) -> Result<()> {
    for (command, words) in [("status", "exit 5 OOMKilled"), ("doctor", "out-of-memory on attempt-")] {
        let output = cluster.sh(&format!("switchyard {command} {JOB} --namespace {TEAM} || true"))?;
        ensure!(
            output.lines().any(|line| line.contains(pod) && line.contains(words)),
            "switchyard {command}: {output}"
        );
    }
    Ok(())
}

/// A process that uses up the memory of a control group, and dies when dropped.
struct MemoryHog(Child);

impl MemoryHog {
    fn start(group: &Path) -> Result<MemoryHog> {
        let script = "echo $$ > $0/cgroup.procs && exec tail /dev/zero";
        Ok(MemoryHog(Command::new("/bin/sh").args(["-c", script]).arg(group).spawn()?))
    }
}

impl Drop for MemoryHog {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs a pod's container out of memory, and makes the kernel kill its last rank.
fn starve(cluster: &Cluster, pod: &str) -> Result<()> {
    let rank =
        engine_pids(cluster, TEAM, pod)?.into_iter().max().with_context(|| format!("{pod} has no process of ours"))?;
    // proc(5): 1000 is killed first. Protecting the eater instead would need a capability that root
    // in a container lacks.
    fs::write(format!("/proc/{rank}/oom_score_adj"), "1000")?;
    let group = memory_group(rank)?;
    let _hog = MemoryHog::start(&group)?;
    // A zombie no longer has an executable.
    let is_killed = || Ok(Path::new(&format!("/proc/{rank}/exe")).read_link().is_err());
    until(&format!("killed in {}", group.display()), crate::e2e::TIMEOUT, is_killed).map(drop)
}

/// The control group that limits a process's memory.
fn memory_group(pid: i32) -> Result<PathBuf> {
    let table = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
    // cgroups(7): number, controllers, path. Version 2 has number 0 and lists no controllers.
    let mut groups = table.lines().filter_map(|line| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        let root = match controllers {
            "memory" => "/sys/fs/cgroup/memory",
            "" => "/sys/fs/cgroup",
            _ => return None,
        };
        Some(Path::new(root).join(path.trim_start_matches('/')))
    });
    groups.find(|group| group.join("cgroup.procs").is_file()).with_context(|| format!("no group of memory in {table}"))
}
