//! Runs a job from its plan to its end, across attempts.

use super::attempt::{self, AttemptResult, Signals};
use super::cause::RootCause;
use super::error::AttemptError;
use super::inspect::{InspectError, inspect};
use super::progress::Interval;
use super::run_dir::{RunDir, RunDirError};
use super::worker::{Worker, WorkerNotFound};
use super::{Observer, Update};
use jiff::Timestamp;
use std::io;
use std::net::{IpAddr, Ipv4Addr, TcpListener, ToSocketAddrs};
use std::time::{Duration, Instant};
use switchyard_crds::conditions::{self, Stage};
use switchyard_crds::gpu_topology::GPUTopology;
use switchyard_crds::{NodeCounts, Restarts, RoleCounts, TrainJob};
use switchyard_plan::local::{
    Devices, Hosts, LocalPlan, LocalSnapshot, Next, Observed, Planned, PlannedNode, Progress, Refusal, RunEnd, next,
    plan, status,
};
use switchyard_plan::status::Ending;
use switchyard_worker_contract::event::{Inspection, Summary};
use switchyard_worker_contract::exit::Exit;

/// Shortest interval between status files that only have new figures, because a rank that reports
/// every step must not wait for the disk.
const FIGURES_INTERVAL: Duration = Duration::from_secs(1);

/// How a job ended.
#[derive(Debug)]
pub struct Outcome {
    /// Exit code of the command.
    pub exit: Exit,
    /// The job with its final status.
    pub job: TrainJob,
    /// The root cause, if the job was given up.
    pub cause: Option<RootCause>,
}

/// Why a job did not start or could not be supervised.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The job has no plan.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The worker rejected the data or the model.
    #[error(transparent)]
    Inspect(#[from] InspectError),
    /// The worker is not installed.
    #[error(transparent)]
    Worker(#[from] WorkerNotFound),
    /// The run directory cannot be used.
    #[error(transparent)]
    RunDir(#[from] RunDirError),
    /// An attempt could not be run.
    #[error(transparent)]
    Attempt(#[from] AttemptError),
    /// The job needs more memory than is available.
    #[error(
        "not placeable: {job}: {processes} need {total}, {limit_name} is {limit}; smallest change that fits: a smaller batchSizePerProcess, fewer ranks, or a higher limit"
    )]
    Memory {
        job: String,
        /// The ranks and dedicated parameter servers, with the memory of each.
        processes: String,
        total: String,
        /// The name of the limit.
        limit_name: &'static str,
        /// The limit, and the usable share of it.
        limit: String,
    },
    /// Rank 0 cannot listen.
    #[error("cannot listen on {address}: {source}")]
    Listen { address: String, source: io::Error },
    /// The other machines cannot reach rank 0.
    #[error(
        "--hosts: {name} is {address} on this machine, where {other} cannot connect to it; use its address in the network"
    )]
    Loopback { name: String, address: IpAddr, other: String },
    /// The machine does not have the program of a pod.
    #[error(
        "{field}: got `{program}`; expected a program of this machine, on the PATH or as a file: `switchyard run` starts no containers, so nothing of the image {image} is there"
    )]
    NoProgram { field: String, program: String, image: String },
    /// Other programs use the ports that pods would listen on.
    #[error("{found} ports are free from {first} to {}; expected {count}, one for each pod", end - 1)]
    Ports { found: usize, count: u32, first: u16, end: u16 },
    /// A stop was requested before anything started.
    #[error("stopped by {1} before the start")]
    Stopped(Exit, &'static str),
}

impl RunError {
    /// The exit code for this error.
    pub fn exit(&self) -> Exit {
        match self {
            RunError::Refused(Refusal::Invalid(_)) | RunError::Loopback { .. } | RunError::NoProgram { .. } => {
                Exit::Usage
            }
            // The user chose this directory, so the command line is at fault; later failures are
            // the machine's.
            RunError::RunDir(
                RunDirError::Create { .. } | RunDirError::NotEmpty { .. } | RunDirError::NotText { .. },
            ) => Exit::Usage,
            RunError::Refused(Refusal::NotPlaceable { .. }) | RunError::Memory { .. } => Exit::NotPlaceable,
            RunError::Inspect(error) => error.exit(),
            RunError::Stopped(exit, _) => *exit,
            RunError::Refused(Refusal::Topology(_))
            | RunError::Worker(_)
            | RunError::RunDir(_)
            | RunError::Attempt(_)
            | RunError::Ports { .. }
            | RunError::Listen { .. } => Exit::Unexpected,
        }
    }
}

/// A run on several machines.
#[derive(Debug, Clone)]
pub struct Machines {
    pub hosts: Hosts,
    /// Port on which rank 0 listens.
    pub port: u16,
    /// The secret that all machines share.
    pub token: [u8; 32],
}

impl Machines {
    fn rendezvous(&self) -> String {
        format!("{}:{}", self.hosts.names.first().map_or("", String::as_str), self.port)
    }
}

/// Runs a valid job on this machine until it ends, or this machine's part of it.
///
/// # Errors
/// The job cannot start, or its processes cannot be supervised; in that case none is left running.
pub async fn run(
    job: TrainJob,
    devices: Devices<'_>,
    machine: &GPUTopology,
    machines: Option<&Machines>,
    run_dir: &RunDir,
    worker: &Worker,
    observer: &mut dyn Observer,
) -> Result<Outcome, RunError> {
    let mut signals = Signals::listen()?;
    let nodes = std::slice::from_ref(machine);
    let hosts = machines.map(|machines| &machines.hosts);
    let plan_attempt = |attempt: u32, rendezvous: &str| {
        plan(&LocalSnapshot { job: &job, nodes, attempt, rendezvous, run_dir: run_dir.text(), devices, hosts })
    };
    // Only the rendezvous address is unknown before the attempt.
    let first = plan_attempt(1, "127.0.0.1:0")?;
    // Before the run directory exists, so that a wrong address or a port in use leaves nothing.
    let mut socket = Some(listen(machines)?);
    let inspection = tokio::select! {
        found = inspect(worker, &first) => found?,
        (exit, signal) = signals.next() => return Err(RunError::Stopped(exit, signal)),
    };
    check_memory(&first, &inspection, machine)?;
    run_dir.create()?;
    // Drop the status of an earlier run.
    let mut run = Run::new(TrainJob { status: None, ..job.clone() }, run_dir);
    let engine = serde_json::to_string_pretty(&first.engine).expect("invariant: an engine configuration serialises");
    run_dir.replace("engine.json", &engine)?;
    // The report reads these facts from before the start.
    run_dir.replace("inspection.json", &serde_json::to_string_pretty(&inspection).unwrap_or_default())?;
    run_dir.replace("machine.json", &serde_json::to_string_pretty(machine).unwrap_or_default())?;
    observer.observe(Update::Starting { plan: &first, inspection: &inspection, run_dir })?;
    let mut attempt = 1;
    loop {
        let (listener, rendezvous) = match socket.take() {
            Some(bound) => bound,
            None => listen(machines)?,
        };
        let plan = plan_attempt(attempt, &rendezvous)?;
        run_dir.replace("plan.yaml", &serde_saphyr::to_string(&plan).unwrap_or_default())?;
        run_dir.write_key(attempt, machines.map(|machines| machines.token))?;
        let message = format!("attempt {attempt}: {} processes start", plan.processes().count() + plan.servers.len());
        run.write(Progress::Stage(Stage::Starting, message), &plan)?;
        let mut recorder = Recorder { run: &mut run, plan: &plan, observer, written: None };
        let ended = attempt::run(&plan, worker, listener, run_dir, &mut signals, &mut recorder).await;
        run_dir.remove_key(attempt);
        let ended = match ended {
            Ok(ended) => ended,
            Err(error) => {
                // The disk may be the cause: try to write the status, but return the original
                // error.
                let failed = Ending::failed(conditions::INFRASTRUCTURE_FAILURE, error.to_string());
                let _ = run.write(Progress::Ended(failed), &plan);
                return Err(error.into());
            }
        };
        if let Some(interval) = &ended.interval {
            run.figures = Some((interval.figures, interval.at));
        }
        if let Some(cause) = &ended.cause {
            observer.observe(Update::Failed { attempt, cause })?;
        }
        match next(ended.end, &job.spec.failure_policy, &run.restarts) {
            Next::Restart(restarts) => {
                run.restarts = restarts;
                let cause = ended.cause.as_ref().map(summary).unwrap_or_default();
                run.record(Progress::Stage(Stage::Restarting, cause), &plan, observer)?;
                attempt += 1;
                observer.observe(Update::Restarting {
                    attempt,
                    saved: Some(plan.engine.checkpoint.is_some()),
                    restarts: run.restarts.total.unsigned_abs(),
                    max_restarts: plan.max_restarts,
                })?;
            }
            Next::End(end) => return run.end(end, ended, &plan, &inspection, observer),
        }
    }
}

/// The socket of rank 0, if it is on this machine, and its address.
fn listen(machines: Option<&Machines>) -> Result<(Option<TcpListener>, String), RunError> {
    let address = match machines {
        Some(machines) if machines.hosts.node_rank > 0 => return Ok((None, machines.rendezvous())),
        Some(machines) => machines.rendezvous(),
        None => format!("{}:0", Ipv4Addr::LOCALHOST),
    };
    let failed = |source| RunError::Listen { address: address.clone(), source };
    let listener = TcpListener::bind(&address).map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    let Some(machines) = machines else { return Ok((Some(listener), bound.to_string())) };
    // Debian maps the name of a machine to 127.0.1.1 in its own /etc/hosts.
    let is_loopback = |name: &&String| {
        (name.as_str(), 0).to_socket_addrs().is_ok_and(|mut found| found.all(|found| found.ip().is_loopback()))
    };
    let [name, others @ ..] = machines.hosts.names.as_slice() else { return Ok((Some(listener), address)) };
    match others.iter().find(|other| bound.ip().is_loopback() && !is_loopback(other)) {
        Some(other) => Err(RunError::Loopback { name: name.clone(), address: bound.ip(), other: other.clone() }),
        None => Ok((Some(listener), address)),
    }
}

/// The state of a job across its attempts, and its status in the run directory.
pub(super) struct Run<'a> {
    pub job: TrainJob,
    start: Timestamp,
    run_dir: &'a RunDir,
    pub restarts: Restarts,
    figures: Option<(Summary, Timestamp)>,
    /// Pods by state, of the job and of each role, with another framework.
    pub pods: Option<(NodeCounts, Vec<RoleCounts>)>,
    /// Whether the run directory could not be written and the observer knows it.
    is_unrecorded: bool,
}

impl<'a> Run<'a> {
    pub(super) fn new(job: TrainJob, run_dir: &'a RunDir) -> Run<'a> {
        let (start, restarts) = (Timestamp::now(), Restarts::default());
        Run { job, start, run_dir, restarts, figures: None, pods: None, is_unrecorded: false }
    }

    /// Writes the status, unless the run directory cannot be written any more: that is reported
    /// once, and does not end the run.
    pub(super) fn record(
        &mut self,
        progress: Progress,
        plan: &dyn Planned,
        observer: &mut dyn Observer,
    ) -> Result<(), RunDirError> {
        match self.write(progress, plan) {
            Err(error) if !std::mem::replace(&mut self.is_unrecorded, true) => {
                observer.observe(Update::Unrecorded(&error))
            }
            _ => Ok(()),
        }
    }

    /// Writes the current status of `plan`'s attempt.
    pub(super) fn write(&mut self, progress: Progress, plan: &dyn Planned) -> Result<(), RunDirError> {
        let (restarts, start, figures) = (&self.restarts, self.start, self.figures);
        let observed = Observed { progress, plan, pods: self.pods.clone(), restarts, start, figures };
        self.job.status = Some(status(&self.job, observed, Timestamp::now()));
        self.run_dir.replace("status.yaml", &serde_saphyr::to_string(&self.job).unwrap_or_default())
    }

    fn end(
        mut self,
        end: RunEnd,
        ended: AttemptResult,
        plan: &LocalPlan,
        inspection: &Inspection,
        observer: &mut dyn Observer,
    ) -> Result<Outcome, RunError> {
        let (progress, exit) = match &end {
            RunEnd::Complete => {
                let steps = ended.finished.as_ref().map_or(0, |finished| finished.step);
                (Progress::Ended(Ending::complete(format!("{steps} steps done"))), Exit::Done)
            }
            RunEnd::Stopped(exit) => (Progress::Stopped(format!("{} before the end", exit.meaning())), *exit),
            RunEnd::GivenUp(exit, why) => {
                let cause = ended.cause.as_ref().map(summary).unwrap_or_default();
                (Progress::Ended(Ending::failed(why.reason(), format!("{cause}; {why}"))), *exit)
            }
        };
        if let (RunEnd::Complete, Some(report)) = (end, &ended.finished) {
            if let Some((figures, _)) = &mut self.figures {
                figures.step = report.step;
                figures.loss = report.last_loss.unwrap_or(figures.loss);
                figures.validation_loss = report.validation_loss;
                figures.accuracy = report.accuracy;
                figures.remaining_seconds = Some(0.0);
            }
            let items = report.step.saturating_sub(ended.resumed_step) as f64 * inspection.items_per_step as f64;
            let items_per_second = if ended.seconds > 0.0 { items / ended.seconds } else { 0.0 };
            observer.observe(Update::Finished {
                report,
                inspection,
                seconds: ended.seconds,
                items_per_second,
                figures: self.figures.as_ref().map(|(figures, _)| figures),
            })?;
        }
        self.record(progress, plan, observer)?;
        Ok(Outcome { exit, job: self.job, cause: ended.cause })
    }
}

/// Writes the status, and passes updates on to the observer.
struct Recorder<'a, 'b> {
    run: &'a mut Run<'b>,
    plan: &'a LocalPlan,
    observer: &'a mut dyn Observer,
    /// Time of the last status write that only had new figures.
    written: Option<Instant>,
}

impl Observer for Recorder<'_, '_> {
    fn observe(&mut self, update: Update<'_>) -> Result<(), RunDirError> {
        let attempt = self.plan.attempt;
        let message = match &update {
            Update::Ready { ranks, .. } => Some(format!("attempt {attempt}: {} ranks train", ranks.len())),
            Update::Progress(interval) => {
                self.run.figures = Some((interval.figures, interval.at));
                if self.written.is_some_and(|at| at.elapsed() < FIGURES_INTERVAL) {
                    return self.observer.observe(update);
                }
                self.written = Some(Instant::now());
                Some(step_of(attempt, interval))
            }
            Update::Standstill(interval) => {
                self.run.figures = Some((interval.figures, interval.at));
                Some(step_of(attempt, interval))
            }
            _ => None,
        };
        if matches!(update, Update::Unrecorded(_)) && std::mem::replace(&mut self.run.is_unrecorded, true) {
            return Ok(());
        }
        if let Some(message) = message {
            self.run.record(Progress::Stage(Stage::Running, message), self.plan, self.observer)?;
        }
        self.observer.observe(update)
    }
}

fn step_of(attempt: u32, interval: &Interval) -> String {
    format!("attempt {attempt}: step {} of {}", interval.figures.step, interval.figures.total_steps)
}

/// Summarises a failure in one line.
fn summary(cause: &RootCause) -> String {
    format!("{} ({}): {}", cause.name(), cause.place(), cause.cause)
}

/// Compares the memory that the ranks will allocate with the job's limit and the machine's memory.
fn check_memory(plan: &LocalPlan, inspection: &Inspection, machine: &GPUTopology) -> Result<(), RunError> {
    let of_node = |node: &PlannedNode| node.processes.iter().map(|process| u64::from(process.ranks)).sum::<u64>();
    let per_node = plan.nodes.iter().map(of_node).max().unwrap_or(1);
    let fraction = plan.engine.memory.fraction;
    let servers = plan.servers.len() as u64;
    let of_server = inspection.server_memory_bytes.unwrap_or(0);
    let bounds = [
        ("resourcesPerNode.limits.memory", plan.memory_limit_bytes, per_node, 0),
        (
            "the memory of this machine",
            machine.status.as_ref().and_then(|status| status.memory_bytes),
            plan.ranks().len() as u64,
            servers,
        ),
    ];
    for (limit_name, limit, ranks, servers) in bounds {
        let total = inspection.memory.total().saturating_mul(ranks);
        let total = total.saturating_add(of_server.saturating_mul(servers));
        if let Some(limit) = limit.filter(|limit| total as f64 > *limit as f64 * fraction) {
            let mebibytes = |bytes: u64| format!("{:.0} MiB", bytes as f64 / f64::from(1 << 20));
            let mut processes = format!("{ranks} ranks of {}", mebibytes(inspection.memory.total()));
            if servers > 0 {
                processes += &format!(" and {servers} parameter servers of {}", mebibytes(of_server));
            }
            return Err(RunError::Memory {
                job: plan.job.clone(),
                processes,
                total: mebibytes(total),
                limit_name,
                limit: format!(
                    "{}, of which {:.0} % may be used (engine.memory.fraction)",
                    mebibytes(limit),
                    100.0 * fraction
                ),
            });
        }
    }
    Ok(())
}
