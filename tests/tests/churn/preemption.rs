//! Churn of jobs that preempt each other by the queue policy.

use super::script::Event;
use super::{Churn, violations_of};
use anyhow::{Result, ensure};
use jiff::SignedDuration;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::Duration;
use switchyard_plan::cluster::queue_policy::{PolicySettings, QueuePolicy};
use switchyard_tests::chaos::{self, report, size};
use switchyard_tests::history::{History, Recorder, excessive_preemptions, policy_preemptions, starved_head};
use switchyard_tests::{ControllerOptions, Jobs, Random, mutants_program, plain_job, start_controller};

const NODES: usize = 6;
/// Twice as many jobs as can run.
const JOBS: usize = 12;
/// Seconds; far less than the default, so that a run takes a minute.
const QUANTUM: i64 = 2;
const MAX_PREEMPTIONS: i32 = 2;

fn policy() -> PolicySettings {
    PolicySettings {
        policy: QueuePolicy::LeastAttainedService,
        thresholds: vec![SignedDuration::from_secs(QUANTUM)],
        quantum: SignedDuration::from_secs(QUANTUM),
        max_preemptions: MAX_PREEMPTIONS,
        max_preemptions_per_day: MAX_PREEMPTIONS,
        overhead: SignedDuration::ZERO,
    }
}

fn options() -> ControllerOptions {
    let arguments = [
        "--queue-policy=LeastAttainedService".into(),
        format!("--queue-threshold-seconds={QUANTUM}"),
        format!("--queue-quantum-seconds={QUANTUM}"),
        format!("--max-preemptions={MAX_PREEMPTIONS}"),
        format!("--max-preemptions-per-day={MAX_PREEMPTIONS}"),
        "--preemption-seconds=0".into(),
    ];
    ControllerOptions { arguments: arguments.to_vec(), ..ControllerOptions::default() }
}

/// A job of one to three nodes that runs until it is stopped, and loses at most a second of work.
fn job(number: usize, random: &Random) -> Value {
    let mut job = plain_job(&format!("j{number:02}"), 1 + random.below(3) as u32, "run");
    job["spec"]["trainer"]["resourcesPerNode"]["limits"]["cpu"] = "900m".into();
    job["spec"]["checkpoint"] = json!({"path": "/c", "periodSeconds": 1, "onSuspend": "Discard"});
    job
}

/// Jobs that arrive within some seconds.
fn preemption_script(seed: u64) -> Vec<(Duration, Event)> {
    let random = Random::new(seed);
    let create = |number| {
        let wait = Duration::from_millis(random.below(500) as u64);
        (wait, Event::Create(Box::new(job(number, &random))))
    };
    (0..JOBS).map(create).collect()
}

fn violations(history: &History) -> Vec<String> {
    let excessive = excessive_preemptions(history, &policy()).into_iter().map(|violation| violation.to_string());
    violations_of(history).into_iter().chain(excessive).collect()
}

/// G11: the queue policy preempts no job too soon or too often, starves none that it could start,
/// and promises no node twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn preemptions_keep_their_bounds() -> Result<()> {
    let churn = Churn::start(NODES).await?;
    let mut controller = start_controller(&churn.plane, "controller", &options())?;
    let first = chaos::seed().unwrap_or(20261128);
    let seeds = if chaos::seed().is_some() { 1 } else { size(1, 10) };
    let quiet = Duration::from_secs(size(5, 60) as u64);
    let mut runs = Vec::new();
    for seed in first..first + seeds as u64 {
        let (mut run, history) = churn.play(seed, preemption_script(seed), quiet).await?;
        let mut found = violations(&history);
        found.extend(starved_head(&history, &policy()));
        churn.ensure_clean(seed, &history, &found)?;
        let preemptions = policy_preemptions(&history);
        ensure!(preemptions >= 3, "seed {seed}: {preemptions} preemptions show nothing");
        run["preemptions"] = preemptions.into();
        println!("{run}");
        runs.push(run);
        controller.ensure_running()?;
    }
    report("g11-preemptions", &json!({"nodes": NODES, "jobs": JOBS, "seeds": seeds, "runs": runs, "violations": 0}))
}

/// Plays the script with a mutant until an oracle finds a violation.
async fn caught(mutant: &str) -> Result<BTreeSet<String>> {
    let churn = Churn::start(NODES).await?;
    let environment = vec![("SWITCHYARD_MUTANT", mutant.to_owned())];
    let program = Some(mutants_program().to_path_buf());
    let _controller = start_controller(&churn.plane, mutant, &ControllerOptions { program, environment, ..options() })?;
    let jobs = Jobs::new(churn.plane.client().await?, &churn.plane.namespace("mutant").await?);
    let recorder = Recorder::start(churn.plane.client().await?).await?;
    for (wait, event) in preemption_script(20261128) {
        tokio::time::sleep(wait).await;
        churn.apply(&jobs, &event).await?;
    }
    super::settle(&jobs, &recorder).await?;
    let history = recorder.history().await?;
    let mut found = violations(&history);
    found.extend(starved_head(&history, &policy()));
    Ok(found.into_iter().collect())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn excessive_preemptions_and_starved_jobs_are_detected() -> Result<()> {
    for (mutant, expected) in [
        ("preempts-too-soon", "is preempted after"),
        ("preempts-too-often", "times; allowed are 2"),
        ("preempts-nobody", "waits for"),
    ] {
        let found = caught(mutant).await?;
        ensure!(found.iter().any(|violation| violation.contains(expected)), "{mutant}: {found:?}");
    }
    Ok(())
}
