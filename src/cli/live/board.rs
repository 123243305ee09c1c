//! Renders the `status` screen. Pure.

use super::{controller, figures, ranks, stage};
use crate::snapshot::name_of;
use crate::text::{Screen, columns};
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::runtime::watcher::Event;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use switchyard_core::units::{counted, duration, rank_list};
use switchyard_crds::conditions::Stage;
use switchyard_crds::names::TRAINER;
use switchyard_crds::{PlacementSlice, PlacementSliceSpec, TrainJob, TrainJobStatus, conditions};
use switchyard_plan::cluster::containers::{InitContainer, InitState};
use switchyard_plan::cluster::view::{Phase, PodView};
use switchyard_plan::resources::gigabytes_per_second;
use switchyard_plan::{kueue, slices};
use switchyard_worker_contract::exit::Exit;

/// The state shown on the screen.
#[derive(Default)]
pub(super) struct Board {
    /// By namespace and name.
    pub jobs: BTreeMap<String, TrainJob>,
    /// Pods by attempt and node rank, if there is only one job.
    pub pods: BTreeMap<(u32, u32), PodView>,
    /// Placement slices by name, if there is only one job.
    pub slices: BTreeMap<String, PlacementSliceSpec>,
    /// Leases of controllers, by namespace.
    pub leases: BTreeMap<String, Lease>,
    /// Whether only one job is shown.
    pub only: bool,
    /// Whether names include their namespaces.
    pub all_namespaces: bool,
}

/// Indexes the Leases of controllers by namespace.
pub(super) fn by_namespace(leases: Vec<Lease>) -> BTreeMap<String, Lease> {
    leases.into_iter().map(|lease| (lease.namespace().unwrap_or_default(), lease)).collect()
}

impl Board {
    /// Applies an event of a job; returns the name of a deleted one.
    pub(super) fn job(&mut self, event: Event<TrainJob>) -> Option<String> {
        match event {
            Event::Apply(job) | Event::InitApply(job) => {
                self.jobs.insert(name_of(&job), job);
                self.join();
                None
            }
            Event::Delete(job) => self.jobs.remove(&name_of(&job)).map(|job| name_of(&job)),
            Event::Init | Event::InitDone => None,
        }
    }

    /// Applies an event of a slice.
    pub(super) fn slice(&mut self, event: Event<PlacementSlice>) {
        match event {
            Event::Apply(slice) | Event::InitApply(slice) => {
                self.slices.insert(slice.name_any(), slice.spec);
                self.join();
            }
            Event::Delete(slice) => drop(self.slices.remove(&slice.name_any())),
            Event::Init | Event::InitDone => {}
        }
    }

    /// Completes the job's placement from its slices, once all of them are known.
    fn join(&mut self) {
        for job in self.jobs.values_mut() {
            let nodes = slices::of(job).and_then(|named| slices::join(named, &self.slices));
            if let Some(nodes) = nodes {
                slices::set_nodes(job, nodes);
            }
        }
    }

    /// Why no controller keeps the statuses up to date; `None` if one does or if that is unknown.
    pub(super) fn outdated(&self, now: Timestamp) -> Option<String> {
        controller::absence(self.leases.values(), now)
    }

    /// Applies an event of a pod.
    pub(super) fn pod(&mut self, event: Event<Pod>) {
        match event {
            Event::Apply(pod) | Event::InitApply(pod) => {
                let pod = PodView::of(&pod);
                self.pods.insert((pod.attempt, pod.node_rank), pod);
            }
            Event::Delete(pod) => {
                let pod = PodView::of(&pod);
                let position = (pod.attempt, pod.node_rank);
                // A successor can exist already.
                if self.pods.get(&position).is_some_and(|known| known.uid == pod.uid) {
                    self.pods.remove(&position);
                }
            }
            Event::Init | Event::InitDone => {}
        }
    }
}

/// Exit code of a finished job; `None` if it has not finished.
pub(super) fn ended(job: &TrainJob) -> Option<Exit> {
    let status = job.status.as_ref()?;
    match (status.is(conditions::COMPLETE), status.is(conditions::FAILED)) {
        (true, _) => Some(Exit::Done),
        (_, true) => Some(Exit::OwnFailure),
        _ => None,
    }
}

/// The state of a job as a log line, with everything that can change.
pub(super) fn state(job: &TrainJob) -> String {
    let mut text = stage(job).to_owned();
    let Some(status) = &job.status else { return text };
    if let Some(ready) = &status.ready {
        text.push_str(&format!(" ready={ready}"));
    }
    if let Some(attempt) = status.attempt {
        text.push_str(&format!(" attempt={attempt}"));
    }
    if let Some(figures) = &status.trainer_status {
        text.push_str(&format!(" step={}/{}", figures.step, figures.total_steps));
        if let Some(loss) = &figures.loss {
            text.push_str(&format!(" loss={loss}"));
        }
        if let Some(seconds) = figures.estimated_remaining_seconds.filter(|_| figures::are_current(job)) {
            text.push_str(&format!(" eta={}", duration(seconds as f64)));
        }
    }
    let failed = status.condition(conditions::FAILED).filter(|failed| failed.status == "True");
    if let Some(reason) = failed.or_else(|| waits(status).next()).map(|condition| &condition.reason) {
        text.push_str(&format!(" reason={reason}"));
    }
    text
}

type Condition = k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

/// Conditions that block the job.
fn waits(status: &TrainJobStatus) -> impl Iterator<Item = &Condition> {
    let kinds = [conditions::PLACED, conditions::FABRIC_READY].into_iter();
    kinds.filter_map(|kind| status.condition(kind)).filter(|condition| condition.status == "False")
}

/// Conditions that affect a running or starting job: stalled or slow ranks, GPUs that need
/// attention.
fn remarks(status: &TrainJobStatus) -> impl Iterator<Item = &Condition> {
    let of = |kind: &str, state: &str| status.condition(kind).filter(|condition| condition.status == state);
    let is_still =
        |condition: &&Condition| [conditions::HUNG, conditions::NO_PROGRESS].contains(&condition.reason.as_str());
    let still = of(conditions::PROGRESSING, "False").filter(is_still);
    still.into_iter().chain(of(conditions::STRAGGLER, "True")).chain(of(conditions::GPU_TROUBLE, "True"))
}

/// The note below a job: why it waits or failed, or its figures with their age.
fn note(job: &TrainJob, now: Timestamp) -> Option<String> {
    let status = job.status.as_ref()?;
    if let Some(failed) = status.condition(conditions::FAILED).filter(|failed| failed.status == "True") {
        return Some(failed.message.clone());
    }
    // While pods start, the figures are from the previous attempt.
    let is_training = waits(status).next().is_none() && stage(job) != Stage::Starting.reason();
    if let Some(figures) = status.trainer_status.as_ref().filter(|_| is_training) {
        let mut text = format!("step {}/{}", figures.step, figures.total_steps);
        if let Some(loss) = &figures.loss {
            text.push_str(&format!(", loss {loss}"));
        }
        if let Some(loss) = &figures.validation_loss {
            text.push_str(&format!(" (val {loss})"));
        }
        if let (Some(rate), Some(unit)) = (&figures.throughput, figures.throughput_unit) {
            let unit = json!(unit).as_str().unwrap_or_default().to_lowercase();
            text.push_str(&format!(", {rate} {unit}/s"));
        }
        if let Some(input) = &figures.input_wait_percent {
            text.push_str(&format!(", input wait {input} %"));
        }
        if let Some(exposed) = &figures.exposed_communication_percent {
            text.push_str(&format!(", exposed all-reduce {exposed} %"));
        }
        if let Some(age) = super::figures::age(job, now) {
            text.push_str(&format!("; figures are {} old", duration(age)));
        }
        text.push_str(&remarks(status).map(|remark| format!("; {}", remark.message)).collect::<String>());
        // `2 of 2 nodes train; node n1 is cordoned`.
        let summary = status.condition(conditions::SUCCEEDED).filter(|_| ended(job).is_none());
        if let Some((_, remark)) = summary.and_then(|summary| summary.message.split_once("; ")) {
            text.push_str(&format!("; {remark}"));
        }
        return Some(text);
    }
    let summary = status.condition(conditions::SUCCEEDED);
    // While pods are being created, only the summary condition has the API server's errors.
    let making =
        summary.filter(|_| [Stage::Placing, Stage::Restarting].iter().any(|making| stage(job) == making.reason()));
    let messages = making.into_iter().chain(waits(status)).chain(summary);
    messages.map(|condition| condition.message.clone()).find(|message| !message.is_empty())
}

/// Nodes and predicted bandwidth.
fn topology(job: &TrainJob) -> Option<String> {
    let placement = job.status.as_ref()?.placement.as_ref()?;
    let nodes = counted(placement.node_count() as u64, "node");
    let rate = placement.predicted_bus_bandwidth.as_ref().and_then(gigabytes_per_second);
    Some(rate.map_or_else(|| nodes.clone(), |rate| format!("{nodes}, {rate} GB/s")))
}

/// The screen: a line per job, followed by what it waits for or its figures. A single job is shown
/// with its pods.
pub(super) fn table(board: &Board, now: Timestamp, width: usize) -> String {
    if board.jobs.is_empty() {
        return "no TrainJob\n".into();
    }
    let head = ["NAME", "STAGE", "READY", "RESTARTS", "PROGRESS", "AGE", "QUEUE", "TOPOLOGY", "ETA"];
    let outdated = board.outdated(now);
    let name = |full, job| if board.all_namespaces { full } else { job_name(job) };
    let rows = board.jobs.iter().map(|(full, job)| row(name(full, job), job, now, outdated.is_none()));
    let table = narrow(std::iter::once(head.map(String::from).to_vec()).chain(rows).collect(), width);
    let mut lines = table.lines();
    let mut text = Screen::new(width);
    outdated.iter().for_each(|why| text.paragraph("warning", why));
    lines.next().into_iter().for_each(|head| text.line(head));
    for (line, job) in lines.zip(board.jobs.values()) {
        text.line(line);
        if let Some(note) = note(job, now) {
            text.paragraph("", &note);
        }
        if board.only && !board.pods.is_empty() {
            text.line("");
            pods(job, board, now, width).lines().for_each(|line| text.line(line));
        }
    }
    text.into_text()
}

fn job_name(job: &TrainJob) -> &str {
    job.metadata.name.as_deref().unwrap_or_default()
}

/// The cells of a job. `is_kept` is whether a controller keeps its status up to date.
fn row(name: &str, job: &TrainJob, now: Timestamp, is_kept: bool) -> Vec<String> {
    let status = job.status.as_ref();
    let restarts = status.and_then(|status| status.restarts.clone()).unwrap_or_default();
    let age = job.metadata.creation_timestamp.as_ref().map(|time| now.duration_since(time.0).as_secs_f64());
    let remaining = figures::remaining(job, now).filter(|_| is_kept);
    let cells = [
        Some(name.to_owned()),
        Some(stage(job).to_owned()),
        // A finished job has no ready nodes, and `0/2` would look like a failure.
        status.filter(|_| ended(job).is_none()).and_then(|status| status.ready.clone()),
        Some(format!("{}/{}/{}", restarts.application, restarts.infrastructure, restarts.preemption)),
        figures::progress(job, now),
        age.map(duration),
        kueue::queue(job).map(str::to_owned),
        topology(job),
        remaining.map(duration),
    ];
    cells.map(|cell| cell.unwrap_or_else(|| "-".into())).to_vec()
}

/// Fits a table into a width: drops empty columns first, then the last ones, but never name and
/// stage.
fn narrow(mut rows: Vec<Vec<String>>, width: usize) -> String {
    let is_empty = |rows: &[Vec<String>], at: usize| rows[1..].iter().all(|row| row[at] == "-");
    loop {
        let text = columns(&rows);
        let count = rows[0].len();
        if count <= 2 || text.lines().all(|line| line.chars().count() <= width) {
            return text;
        }
        let goes = (2..count).rev().find(|at| is_empty(&rows, *at)).unwrap_or(count - 1);
        rows.iter_mut().for_each(|row| drop(row.remove(goes)));
    }
}

/// The pods of a job, with the reason if one does not run.
fn pods(job: &TrainJob, board: &Board, now: Timestamp, width: usize) -> String {
    let ranks = ranks(job);
    let placed = job.status.as_ref().and_then(|status| status.placement.as_ref());
    let mut rows = vec![["RANKS", "POD", "STATE", "NODE", "GPUS"].map(String::from).to_vec()];
    for pod in board.pods.values() {
        let own = ranks.get(pod.node_rank as usize);
        let gpus = placed.and_then(|placed| {
            let first = own?.0;
            placed.nodes.iter().find(|node| node.first_rank.unsigned_abs() == first)
        });
        let gpus = gpus.map(|node| node.gpus.len()).filter(|count| *count > 0);
        rows.push(vec![
            own.map_or_else(|| "-".into(), |(first, count)| rank_list(*first..first + count)),
            pod.name.clone(),
            pod_state(pod, now),
            pod.node.clone().unwrap_or_else(|| "-".into()),
            gpus.map_or_else(|| "-".into(), |count| count.to_string()),
        ]);
    }
    narrow(rows, width)
}

/// The state of a pod, with the reason if it does not run.
pub(super) fn pod_state(pod: &PodView, now: Timestamp) -> String {
    let reason = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    if pod.deleting {
        return "Terminating".into();
    }
    // The trainer's own exit counts, because the phase only follows once the kubelet reports all
    // containers as ended.
    if pod.has_succeeded() {
        return "Succeeded".into();
    }
    if pod.has_failed() {
        let ended = pod.end().map(|(container, ended)| {
            let who = if container == TRAINER { String::new() } else { format!("init container {container}, ") };
            format!("{who}exit {} {}", ended.code, ended.reason).trim().to_owned()
        });
        let why = pod.reason.as_ref().and_then(|(why, _)| reason(why)).or(ended);
        return why.map_or_else(|| "Failed".into(), |why| format!("Failed: {why}"));
    }
    match pod.phase {
        Phase::Pending if pod.waits_for_kueue() => "Gated by Kueue".into(),
        Phase::Pending if pod.other_gate.is_some() => "Gated by others".into(),
        Phase::Pending if pod.gated => "Gated".into(),
        Phase::Pending => {
            if let Some(init) = &pod.init {
                return format!("Pending: init container {}{}", init.name, runs_for(init, now));
            }
            let waiting = pod.waiting.as_ref().and_then(|waiting| reason(&waiting.reason));
            let why = pod.unschedulable.as_ref().map(|_| "Unschedulable".to_owned()).or(waiting);
            why.map_or_else(|| "Pending".into(), |why| format!("Pending: {why}"))
        }
        Phase::Unknown => "Unknown".into(),
        _ => {
            let state = if pod.ready { "Ready" } else { "Running" };
            let stopped = pod.sidecars.iter().map(|sidecar| format!(", {} {}", sidecar.name, sidecar.description));
            format!("{state}{}", stopped.collect::<String>())
        }
    }
}

/// ` for 3m07s`; empty if unknown.
fn runs_for(init: &InitContainer, now: Timestamp) -> String {
    match init.state {
        InitState::Running { since: Some(since) } => {
            format!(" for {}", duration(now.duration_since(since).as_secs().max(0) as f64))
        }
        _ => String::new(),
    }
}

/// A job as data: name and complete status.
pub(super) fn body(job: &TrainJob) -> Value {
    json!({"name": job.name_any(), "namespace": job.namespace(), "stage": stage(job), "status": job.status})
}

/// The screen as data.
pub(super) fn bodies(board: &Board, now: Timestamp) -> Value {
    let mut all = bodies_of_jobs(board, now);
    board.outdated(now).into_iter().for_each(|why| all["outdated"] = why.into());
    all
}

fn bodies_of_jobs(board: &Board, now: Timestamp) -> Value {
    match board.jobs.values().next().filter(|_| board.only) {
        Some(job) => {
            let mut all = body(job);
            let pods = board.pods.values().map(|pod| {
                json!({
                    "name": pod.name, "attempt": pod.attempt, "nodeRank": pod.node_rank, "node": pod.node,
                    "state": pod_state(pod, now),
                })
            });
            all["pods"] = pods.collect();
            all
        }
        None => json!({"jobs": board.jobs.values().map(body).collect::<Vec<_>>()}),
    }
}
