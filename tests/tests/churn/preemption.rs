//! Churn under a queue policy: jobs with checkpoints make way for older ones. Two of them train
//! with the real worker, so that their logs show from which step they resume.
//!
//! The policy is `Opportunistic`: under `LeastAttainedService` jobs change their level once a
//! minute.

use super::Churn;
use super::gpus;
use super::script::Event;
use anyhow::{Context, Result, ensure};
use jiff::SignedDuration;
use serde_json::{Value, json};
use std::time::Duration;
use switchyard_crds::TrainJob;
use switchyard_plan::cluster::queue_policy::{PolicySettings, QueuePolicy};
use switchyard_tests::chaos::{self, report, size};
use switchyard_tests::gpus::RESOURCE;
use switchyard_tests::history::{
    History, Recorder, excessive_preemptions, lost_steps, policy_preemptions, starved_head,
};
use switchyard_tests::{ControllerOptions, Jobs, POLICY, Random, Scene, TIMEOUT, found_async, merge, start_controller};

const NODES: usize = 8;
/// The first jobs that run, with their pods. Together they have all nodes. By name, they come after
/// the oldest job, in case all are created in the same second.
const FIRST: [(&str, usize); 4] = [("trains-0", 2), ("trains-1", 1), ("runs-2", 2), ("runs-3", 3)];
/// How many of them train.
const TRAINING: usize = 2;
/// The oldest job. It needs all nodes, and starts suspended.
const OLDEST: &str = "oldest";
/// Events between two changes of its suspension.
const PAUSE: usize = 10;
/// Longest delay between two events, milliseconds.
const LONGEST_WAIT: usize = 600;

fn policy() -> PolicySettings {
    PolicySettings {
        policy: QueuePolicy::Opportunistic,
        quantum: SignedDuration::from_secs(2),
        overhead: SignedDuration::ZERO,
        ..PolicySettings::default()
    }
}

fn options(policy: &PolicySettings) -> ControllerOptions {
    let settings = [
        ("queue-quantum-seconds", policy.quantum.as_secs()),
        ("max-preemptions", policy.max_preemptions.into()),
        ("max-preemptions-per-day", policy.max_preemptions_per_day.into()),
        ("preemption-seconds", policy.overhead.as_secs()),
    ];
    let mut arguments = vec![format!("--queue-policy={:?}", policy.policy)];
    arguments.extend(settings.map(|(name, value)| format!("--{name}={value}")));
    ControllerOptions { arguments, ..ControllerOptions::default() }
}

/// A job whose pods need whole nodes, and that loses nothing when it is preempted.
fn job(scene: &Scene, name: &str, pods: usize, behaviour: &str) -> Value {
    let trains = behaviour == "worker";
    let (path, data) = (scene.join(name), scene.join("data"));
    let mut job = json!({
        "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "metadata": {"name": name},
        "spec": {
            "trainer": {"numNodes": pods, "cpuThreads": 1, "resourcesPerNode": {"limits": {"cpu": "1"}}},
            // No other checkpoint is written.
            "checkpoint": {"path": path.display().to_string(), "periodSeconds": 0},
            "template": {"metadata": {"annotations": {POLICY: behaviour}}},
            "engine": {
                "model": {"type": "GPT", "gpt": {"layers": 1, "hiddenSize": 32, "heads": 2, "contextLength": 32}},
                "data": {"path": data.display().to_string()}, "batchSizePerProcess": 4, "steps": 100_000_000,
            },
        },
    });
    if !trains {
        merge(
            &mut job["spec"]["trainer"],
            json!({"numProcPerNode": 8, "resourcesPerNode": {"limits": {"cpu": "900m", RESOURCE: 8}}}),
        );
    }
    job
}

/// Jobs that arrive, end and are deleted, while the oldest one leaves and comes back. At the end it
/// is suspended.
fn script(scene: &Scene, seed: u64, events: usize) -> Vec<(Duration, Event)> {
    let random = Random::new(seed);
    let mut jobs: Vec<String> = Vec::new();
    let mut script = Vec::new();
    while script.len() < events {
        let (number, dice, which) = (script.len(), random.below(10), random.below(jobs.len().max(1)));
        let event = match (dice, jobs.get(which)) {
            _ if number.is_multiple_of(PAUSE) => Event::Suspend(OLDEST.into(), (number / PAUSE).is_multiple_of(2)),
            (0 | 1, Some(_)) => Event::Delete(jobs.remove(which)),
            _ => {
                let (name, behaviour) = (format!("j{number}"), *random.pick(&["run", "succeed-after=3s"]));
                jobs.push(name.clone());
                Event::Create(Box::new(job(scene, &name, 1 + random.below(4), behaviour)))
            }
        };
        script.push((Duration::from_millis(random.below(LONGEST_WAIT) as u64), event));
    }
    script.push((Duration::ZERO, Event::Suspend(OLDEST.into(), true)));
    script
}

fn suspended(mut job: Value) -> Value {
    job["spec"]["suspend"] = true.into();
    job
}

async fn resume(jobs: &Jobs, name: &str) -> Result<()> {
    jobs.patch(name, json!({"spec": {"suspend": false}})).await?;
    Ok(())
}

fn preemptions(job: &TrainJob) -> i32 {
    job.status.as_ref().and_then(|status| status.restarts.as_ref()).map_or(0, |restarts| restarts.preemption)
}

/// The log of rank 0 of a job's attempt, by the job's namespace and name.
fn log(churn: &Churn, job: &str, attempt: u32) -> String {
    let (namespace, name) = job.split_once('/').unwrap_or_default();
    churn.kubelet.log(namespace, &format!("{name}-{attempt}-0"))
}

/// Waits until a job trains in an attempt after this number of preemptions.
async fn trains(churn: &Churn, jobs: &Jobs, name: &str, preempted: i32) -> Result<()> {
    let full_name = format!("{}/{name}", jobs.namespace);
    let found = found_async("ready", TIMEOUT, async || {
        let job = jobs.api().get(name).await?;
        let last = job.status.as_ref().and_then(|status| status.attempt).unwrap_or(0).unsigned_abs();
        let mut logs = (1 + preempted.unsigned_abs()..=last).map(|attempt| log(churn, &full_name, attempt));
        Ok((preemptions(&job) >= preempted && logs.any(|log| log.contains("\"event\":\"ready\""))).then_some(()))
    });
    found.await.with_context(|| format!("{name} does not train after {preempted} preemptions"))
}

/// All violations of the oracles for preemptions, and how often a training job resumed.
fn violations(churn: &Churn, history: &History, policy: &PolicySettings) -> (usize, Vec<String>) {
    let mut found: Vec<String> = excessive_preemptions(history, policy).iter().map(ToString::to_string).collect();
    found.extend(starved_head(history, policy));
    let (resumed, lost) = lost_steps(history, |job, attempt| log(churn, job, attempt));
    found.extend(lost.iter().map(ToString::to_string));
    (resumed, found)
}

/// The oracles find violations in the same play when they judge it by stricter rules, or read logs
/// of attempts that all start from scratch.
fn ensure_oracles_can_fail(churn: &Churn, history: &History, policy: &PolicySettings) -> Result<()> {
    let preemptions = policy_preemptions(history);
    for (rule, stricter) in [
        ("quantum", PolicySettings { quantum: SignedDuration::from_hours(1), ..policy.clone() }),
        ("max_preemptions", PolicySettings { max_preemptions: 0, ..policy.clone() }),
        ("max_preemptions_per_day", PolicySettings { max_preemptions_per_day: 0, ..policy.clone() }),
    ] {
        let found = excessive_preemptions(history, &stricter).len();
        ensure!(found == preemptions, "{rule}: {found} of {preemptions} preemptions are excessive");
    }
    let from_scratch = |job: &str, attempt| log(churn, job, attempt).replace("\"resumedStep\"", "\"unknown\"");
    let (judged, lost) = lost_steps(history, from_scratch);
    ensure!(lost.len() == judged, "{} of {judged} jobs start from scratch", lost.len());
    // Every job that has run comes behind every job that has not.
    let by_service = PolicySettings {
        policy: QueuePolicy::LeastAttainedService,
        thresholds: vec![SignedDuration::from_nanos(1)],
        max_preemptions: i32::MAX,
        max_preemptions_per_day: i32::MAX,
        ..policy.clone()
    };
    ensure!(starved_head(history, &by_service).is_some(), "no job waits behind one that has run");
    Ok(())
}

/// G11: a queue policy preempts jobs as often and as soon as it may, starves no job, and costs a
/// job that saves no step.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn preempted_jobs_resume_and_break_no_invariant() -> Result<()> {
    let churn = gpus::start(NODES).await?;
    let policy = policy();
    let mut controller = start_controller(&churn.plane, "controller", &options(&policy))?;
    let first = chaos::seed().unwrap_or(20261128);
    let (seeds, events) = (if chaos::seed().is_some() { 1 } else { size(1, 3) }, size(30, 150));
    let quiet = Duration::from_secs(size(2, 60) as u64);
    let mut runs = Vec::new();
    for seed in first..first + seeds as u64 {
        let scene = Scene::new();
        scene.write_text("data/text.txt", 64);
        let jobs = Jobs::new(churn.plane.client().await?, &churn.plane.namespace("preempted").await?);
        let recorder = Recorder::start(churn.plane.client().await?).await?;
        jobs.create(suspended(job(&scene, OLDEST, NODES, "run"))).await?;
        for (number, (name, pods)) in FIRST.into_iter().enumerate() {
            jobs.create(job(&scene, name, pods, if number < TRAINING { "worker" } else { "run" })).await?;
        }
        for (name, _) in FIRST {
            jobs.wait_stage(name, "Running").await?;
        }
        for (name, _) in &FIRST[..TRAINING] {
            trains(&churn, &jobs, name, 0).await?;
        }
        resume(&jobs, OLDEST).await?;
        jobs.wait_stage(OLDEST, "Running").await?;
        let performed = churn.perform(&jobs, script(&scene, seed, events)).await?;
        for (name, _) in &FIRST[..TRAINING] {
            trains(&churn, &jobs, name, 1).await?;
            // Figures in the status of a job that trains would never rest.
            jobs.patch(name, json!({"spec": {"suspend": true}})).await?;
        }
        let (mut run, history) = churn.judge(seed, &jobs, &recorder, quiet).await?;
        merge(&mut run, performed);
        let (resumed, found) = violations(&churn, &history, &policy);
        churn.ensure_clean(seed, &history, &found)?;
        let preemptions = policy_preemptions(&history);
        merge(&mut run, json!({"preemptions": preemptions, "resumed": resumed}));
        println!("{run}");
        ensure!(preemptions >= FIRST.len() && resumed >= TRAINING, "seed {seed}: {run}");
        ensure_oracles_can_fail(&churn, &history, &policy)?;
        runs.push(run);
        controller.ensure_running()?;
    }
    report("g11-preemptions", &json!({"nodes": NODES, "seeds": seeds, "runs": runs, "violations": 0}))
}
