//! Churn: jobs are created, deleted, suspended and fail; nodes are cordoned, lost and replaced.
//! Every revision is recorded and checked afterwards.
//!
//! Control plane, scheduler, controller manager and controller are real. A seed determines the
//! events. To replay a failure: `SWITCHYARD_SEED=... cargo test -p switchyard-tests --test plane
//! churn::`.

mod gpus;
mod preemption;
mod script;

use anyhow::{Context, Result, bail, ensure};
use futures::TryStreamExt;
use k8s_openapi::api::core::v1::{LimitRange, Node};
use kube::api::{DeleteParams, Patch};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Config, ResourceExt};
use script::{BLOCK, Event, script};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};
use switchyard_crds::TrainJob;
use switchyard_crds::conditions::Stage;
use switchyard_tests::chaos::{self, report, size};
use switchyard_tests::faults::Proxy;
use switchyard_tests::history::{Change, Fact, History, JobFact, ORACLES, Recorder, late_messages, status_writes};
use switchyard_tests::{
    ControlPlane, ControllerOptions, Jobs, Kubelet, KubeletOptions, Options, merge, plain_job, reports_fight, stage_of,
    start_controller, worker_folder,
};

const NODES: usize = 200;
/// Concurrent calls.
const CALLS: usize = 16;
/// Quiet period after which all deferred writes (status figures, 10 s) have been made.
const QUIET_PERIOD: Duration = Duration::from_secs(12);
/// Timeout that covers all backoffs between attempts, which add up to minutes, and the orphans of
/// deleted nodes.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(900);

struct Churn {
    plane: ControlPlane,
    kubelet: Kubelet,
    nodes: Vec<String>,
    /// Machine types of the nodes, if they have GPUs.
    machines: Option<gpus::Machines>,
}

impl Churn {
    /// Starts with this many single-core nodes.
    async fn start(nodes: usize) -> Result<Churn> {
        let options = Options { controller_manager: true, scheduler: true, audit: true, ..Options::default() };
        let plane = ControlPlane::start(&options)?;
        plane.install_crds().await?;
        let mut options = KubeletOptions::new("churn", nodes);
        options.capacity = [("cpu", "1"), ("memory", "1Gi"), ("pods", "3")].map(|(a, b)| (a.into(), b.into())).into();
        options.programs = Some(worker_folder().to_path_buf());
        let kubelet = Kubelet::start(plane.config().await?, options).await?;
        let nodes = kubelet.nodes();
        Ok(Churn { plane, kubelet, nodes, machines: None })
    }

    /// The controller's writes so far, by kind.
    fn writes(&self) -> BTreeMap<String, u64> {
        self.plane.write_counts("switchyard-controller")
    }

    /// Applies an event; returns whether it had an effect.
    async fn apply(&self, jobs: &Jobs, event: &Event) -> Result<bool> {
        match event {
            Event::Create(job) => drop(jobs.create((**job).clone()).await?),
            Event::Suspend(job, suspend) => {
                return done(jobs.patch(job, json!({"spec": {"suspend": suspend}})).await);
            }
            Event::Delete(job) => {
                return done(jobs.api().delete(job, &DeleteParams::default()).await.map_err(Into::into));
            }
            Event::Command(job, rank, command) => {
                let Some(pod) = pod_of(jobs, job, *rank).await? else { return Ok(false) };
                return Ok(self.kubelet.send(&jobs.namespace, &pod, command.clone()).is_ok());
            }
            Event::DeletePod(job, rank) => {
                let Some(pod) = pod_of(jobs, job, *rank).await? else { return Ok(false) };
                let deleted = jobs.pods_api().delete(&pod, &DeleteParams::default()).await;
                return done(deleted.map_err(Into::into));
            }
            Event::Cordon(block, cordon) => {
                let nodes = &self.nodes[block * BLOCK..(block + 1) * BLOCK];
                self.cordon(jobs, nodes, *cordon).await?;
            }
            Event::Lose(node) => self.kubelet.lose_node(&self.nodes[*node]).await?,
            Event::Unready(node) => self.kubelet.unready_node(&self.nodes[*node]).await?,
            Event::Recover(node) => self.kubelet.recover_node(&self.nodes[*node]).await?,
            Event::DeleteNode(node) => self.kubelet.delete_node(&self.nodes[*node]).await?,
            Event::RegisterNode(node) => self.register(&self.nodes[*node]).await?,
            Event::Report(node, ailment) => match &self.machines {
                Some(machines) => machines.report(&self.nodes[*node], *ailment).await?,
                None => return Ok(false),
            },
        }
        Ok(true)
    }

    /// Registers a node with its labels.
    async fn register(&self, node: &str) -> Result<()> {
        self.kubelet.register_node(node).await?;
        match &self.machines {
            Some(machines) => machines.label(node).await,
            None => Ok(()),
        }
    }

    async fn cordon(&self, jobs: &Jobs, nodes: &[String], cordon: bool) -> Result<()> {
        let api = Api::<Node>::all(jobs.client.clone());
        let patch = Patch::Merge(json!({"spec": {"unschedulable": cordon}}));
        for node in nodes {
            // The node may have been deleted concurrently.
            done(api.patch(node, &Default::default(), &patch).await.map_err(Into::into))?;
        }
        Ok(())
    }

    /// Restores and uncordons all nodes.
    async fn restore_all(&self, jobs: &Jobs) -> Result<()> {
        let calls = futures::stream::iter(self.nodes.iter().map(Ok));
        calls
            .try_for_each_concurrent(CALLS, |node| async move {
                self.register(node).await?;
                self.cordon(jobs, std::slice::from_ref(node), false).await
            })
            .await
    }

    /// Runs one seed from the first event to the verdict.
    async fn play(&self, seed: u64, script: Vec<(Duration, Event)>, quiet: Duration) -> Result<(Value, History)> {
        let jobs = Jobs::new(self.plane.client().await?, &self.plane.namespace("churn").await?);
        if self.machines.is_none() {
            // Admission adds to pods. The GPU churn recomputes placements from the manifests alone,
            // so there it must not.
            let limits = json!([{"type": "Container", "defaultRequest": {"cpu": "50m"}, "default": {"cpu": "50m"}}]);
            let range = serde_json::from_value(json!({"metadata": {"name": "sidecars"}, "spec": {"limits": limits}}))?;
            Api::<LimitRange>::namespaced(jobs.client.clone(), &jobs.namespace)
                .create(&Default::default(), &range)
                .await?;
        }
        let recorder = Recorder::start(self.plane.client().await?).await?;
        let performed = self.perform(&jobs, script).await?;
        let (mut run, history) = self.judge(seed, &jobs, &recorder, quiet).await?;
        merge(&mut run, performed);
        Ok((run, history))
    }

    /// Applies the events, and counts those with an effect.
    async fn perform(&self, jobs: &Jobs, script: Vec<(Duration, Event)>) -> Result<Value> {
        let (mut counts, mut idle) = (BTreeMap::<&str, u64>::new(), 0_u64);
        let events = script.len();
        for (number, (wait, event)) in script.into_iter().enumerate() {
            tokio::time::sleep(wait).await;
            let did = self.apply(jobs, &event).await.with_context(|| format!("event {number}: {event:?}"))?;
            *counts.entry(event.kind()).or_default() += u64::from(did);
            idle += u64::from(!did);
        }
        Ok(json!({"events": events, "happened": counts, "withoutEffect": idle}))
    }

    /// Restores all nodes, waits until all jobs are at rest, and judges the history.
    async fn judge(&self, seed: u64, jobs: &Jobs, recorder: &Recorder, quiet: Duration) -> Result<(Value, History)> {
        self.restore_all(jobs).await?;
        let settling = Instant::now();
        let seen = settle(jobs, recorder).await?;
        let settled = settling.elapsed().as_secs();
        let before = self.writes();
        tokio::time::sleep(quiet).await;
        let after = self.writes();
        // Entries of the audit log are in the history that is fetched afterwards.
        let history = recorder.history().await?;
        let late = only_late_messages(&history, seen, &before, &after)
            .with_context(|| format!("seed {seed}: writes in {} s of quiet", quiet.as_secs()))?;
        let stages = stages(jobs).await?;
        let violations = violations_of(&history);
        self.ensure_clean(seed, &history, &violations)?;
        clear(jobs).await?;
        let writes = status_writes(&history);
        let job_facts = || history.changes().iter().filter_map(job_of);
        let attempts: BTreeSet<_> = job_facts().map(|(uid, job)| (uid, job.attempt())).collect();
        let queued = |job: &JobFact| job.stage() == Stage::Queued.reason();
        let waited: BTreeSet<_> = job_facts().filter(|(_, job)| queued(job)).map(|(uid, _)| uid).collect();
        ensure!(!waited.is_empty(), "seed {seed}: no job waited for room; use more jobs or fewer nodes");
        let run = json!({
            "seed": seed, "changes": history.changes().len(),
            "attempts": attempts.len(), "waitedForRoom": waited.len(), "settledAfterSeconds": settled, "atTheEnd": stages, "watchesResumed": recorder.resumed(),
            "status": {"writes": writes.writes, "telling": writes.informative, "longestBurst": writes.longest_burst},
            "quietSeconds": quiet.as_secs(), "writesInQuiet": late, "violations": violations.len(),
        });
        Ok((run, history))
    }

    /// Prints every violation with the last changes of its object, and saves the history.
    fn ensure_clean(&self, seed: u64, history: &History, violations: &[String]) -> Result<()> {
        if violations.is_empty() {
            return Ok(());
        }
        let file = self.plane.folder().join(format!("history-{seed}.txt"));
        let lines: Vec<String> = history.changes().iter().map(|change| format!("{change:?}")).collect();
        std::fs::write(&file, lines.join("\n"))?;
        // Panic, because that keeps the control plane's folder.
        panic!("seed {seed}: {} violations; {}\n{}", violations.len(), file.display(), violations.join("\n"));
    }
}

/// Treats a missing or concurrently changed object as no effect.
fn done<T>(result: Result<T>) -> Result<bool> {
    match result {
        Ok(_) => Ok(true),
        Err(error) => match error.downcast_ref::<kube::Error>() {
            Some(kube::Error::Api(status)) if [404, 409].contains(&status.code) => Ok(false),
            _ => Err(error),
        },
    }
}

/// Pod name of a rank in the current attempt, if the job has an attempt.
async fn pod_of(jobs: &Jobs, job: &str, rank: usize) -> Result<Option<String>> {
    let job = jobs.api().get_opt(job).await?;
    let attempt = job.as_ref().and_then(|job| job.status.as_ref()?.attempt);
    Ok(job.zip(attempt).map(|(job, attempt)| format!("{}-{attempt}-{rank}", job.name_any())))
}

fn job_of(change: &Change) -> Option<(&str, &JobFact)> {
    match &change.fact {
        Fact::Job(job) => Some((&change.uid, job)),
        _ => None,
    }
}

/// Whether a job no longer changes by itself: it is finished, or it runs until it is stopped.
fn is_settled(job: &TrainJob) -> bool {
    let stage = stage_of(job).unwrap_or_default();
    let is_over = [Stage::Complete, Stage::Failed].iter().any(|over| over.reason() == stage);
    let stays = [Stage::Running, Stage::Queued, Stage::Suspended].iter().any(|stays| stays.reason() == stage);
    // The status reports repeatedly deleted pods until a minute has passed without a fight.
    !reports_fight(job) && stays || (is_over && job.spec.ttl_seconds_after_finished.is_none())
}

/// Waits until all jobs are at rest and nothing has changed for a while; returns the number of
/// changes up to then.
async fn settle(jobs: &Jobs, recorder: &Recorder) -> Result<usize> {
    let deadline = Instant::now() + SETTLE_TIMEOUT;
    let (mut changes, mut since) = (0, Instant::now());
    loop {
        if recorder.changes() != changes {
            (changes, since) = (recorder.changes(), Instant::now());
        }
        if since.elapsed() > QUIET_PERIOD {
            let list = jobs.api().list(&Default::default()).await?.items;
            let unsettled: Vec<&TrainJob> = list.iter().filter(|job| !is_settled(job)).collect();
            if unsettled.is_empty() {
                return Ok(changes);
            }
            if Instant::now() > deadline {
                let first = serde_json::to_string_pretty(&unsettled[0].status)?;
                let names: Vec<String> = unsettled.iter().map(|job| job.name_any()).collect();
                bail!("stuck after {} s: {names:?}; the first one: {first}", SETTLE_TIMEOUT.as_secs());
            }
        } else if Instant::now() > deadline {
            bail!("still changing after {} s: {changes} changes", SETTLE_TIMEOUT.as_secs());
        }
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
}

/// Checks that since the change `seen`, the only writes were late status messages of queued jobs;
/// returns their number.
fn only_late_messages(
    history: &History,
    seen: usize,
    before: &BTreeMap<String, u64>,
    after: &BTreeMap<String, u64>,
) -> Result<u64> {
    let late = late_messages(history, seen);
    let other = history.changes().iter().skip(seen).find(|change| !late.contains(change));
    if let Some(change) = other {
        bail!("{}", format!("{change:?}").chars().take(6000).collect::<String>());
    }
    let sum = |writes: &BTreeMap<String, u64>| writes.values().sum::<u64>();
    let writes = sum(after) - sum(before);
    // A write without a change creates no revision.
    ensure!(writes <= late.len() as u64, "{before:?} became {after:?} with {} changes", late.len());
    Ok(writes)
}

async fn stages(jobs: &Jobs) -> Result<BTreeMap<String, u64>> {
    let mut stages = BTreeMap::new();
    for job in jobs.api().list(&Default::default()).await?.items {
        *stages.entry(stage_of(&job).unwrap_or_default().to_string()).or_default() += 1;
    }
    Ok(stages)
}

/// All violations, one line each.
fn violations_of(history: &History) -> Vec<String> {
    let all = ORACLES.iter().flat_map(|(name, oracle)| {
        oracle(history).into_iter().map(|violation| format!("{name}: {violation}")).collect::<Vec<_>>()
    });
    all.collect()
}

/// Removes all jobs and pods before the next seed.
async fn clear(jobs: &Jobs) -> Result<()> {
    jobs.api().delete_collection(&DeleteParams::default(), &Default::default()).await?;
    jobs.wait_pods("gone", <[_]>::is_empty).await?;
    Ok(())
}

/// A recording through watches that are cut, losing one event each time, must equal a recording
/// through intact watches.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_recording_has_no_gap_when_its_watches_are_cut() -> Result<()> {
    let plane = ControlPlane::start(&Options::default())?;
    plane.install_crds().await?;
    let jobs = Jobs::new(plane.client().await?, &plane.namespace("cut").await?);
    let proxy = Proxy::start(&plane, "cut").await?;
    proxy.set_events(Duration::ZERO, 4);
    let through = Kubeconfig::read_from(proxy.kubeconfig())?;
    let through = Config::from_custom_kubeconfig(through, &KubeConfigOptions::default()).await?;
    let whole = Recorder::start(plane.client().await?).await?;
    let cut = Recorder::start(through.try_into()?).await?;
    let kubelet = Kubelet::start(plane.config().await?, KubeletOptions::new("cut", 3)).await?;
    for round in 0..10 {
        let name = format!("a{round}");
        jobs.create(plain_job(&name, 1, "run")).await?;
        kubelet.lose_node(&kubelet.nodes()[round % 3]).await?;
        jobs.patch(&name, json!({"spec": {"suspend": true}})).await?;
        kubelet.delete_node(&kubelet.nodes()[round % 3]).await?;
        kubelet.register_node(&kubelet.nodes()[round % 3]).await?;
        jobs.api().delete(&name, &DeleteParams::default()).await?;
    }
    // Ordered changes may still be written between the fetches of the two histories.
    drop(kubelet);
    let mut before = 0;
    loop {
        let (whole, through) = (whole.history().await?, cut.history().await?);
        if whole.changes() != through.changes() && through.changes().len() > before {
            before = through.changes().len();
            continue;
        }
        ensure!(cut.resumed() >= 10, "{} watches were resumed", cut.resumed());
        ensure!(whole.changes().len() >= 60, "{} changes", whole.changes().len());
        assert_eq!(whole.changes(), through.changes());
        return Ok(());
    }
}

/// G7: the invariants hold at every revision under random job and node events.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_jobs_and_nodes_break_no_invariant() -> Result<()> {
    let churn = Churn::start(NODES).await?;
    let mut controller = start_controller(&churn.plane, "controller", &ControllerOptions::default())?;
    let first = chaos::seed().unwrap_or(20261121);
    let (seeds, events) = (if chaos::seed().is_some() { 1 } else { size(1, 5) }, size(300, 2000));
    let quiet = Duration::from_secs(size(10, 60) as u64);
    let mut runs = Vec::new();
    for seed in first..first + seeds as u64 {
        let (run, _) =
            churn.play(seed, script(seed, events, NODES), quiet).await.with_context(|| format!("seed {seed}"))?;
        println!("{run}");
        runs.push(run);
        controller.ensure_running()?;
    }
    report("g7-churn", &json!({"nodes": NODES, "seeds": seeds, "runs": runs, "violations": 0}))
}
