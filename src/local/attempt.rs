//! Runs one attempt: starts the processes of a plan, reads their events, and stops all of them when
//! one fails or a stop is requested.

#[cfg(test)]
mod tests;

use super::cause::{RootCause, root_cause};
use super::error::AttemptError;
use super::process::{Message, Process, RankEvents, next_exit, start};
use super::progress::Interval;
use super::run_dir::{LogFile, RunDir, RunDirError};
use super::survivor::Survivor;
use super::worker::Worker;
use super::{Observer, Update};
use jiff::Timestamp;
use rustix::process::Signal;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;
use switchyard_plan::local::{AttemptEnd, LocalPlan};
use switchyard_worker_contract::env::DEFAULT_GRACE_SECONDS;
use switchyard_worker_contract::event::{Event, Finished, Ready, member_name};
use switchyard_worker_contract::exit::Exit;
use switchyard_worker_contract::fold::Fold;
use tokio::sync::mpsc::{Receiver, channel};
use tokio::time::Instant;

/// Time for the other ranks to stop by themselves after the first failure, with the root cause in
/// their logs.
const GRACE_AFTER_FAILURE: Duration = Duration::from_millis(1200);

/// Time for the ranks to finish their step after a stop request.
const GRACE_AFTER_STOP: Duration = Duration::from_secs(4);

/// Time to save a checkpoint after a stop request, unless the job's template sets another; the same
/// as in a pod.
const GRACE_TO_SAVE: Duration = Duration::from_secs(DEFAULT_GRACE_SECONDS as u64);

/// Time from SIGKILL until the processes that it has not ended are reported.
const GRACE_AFTER_KILL: Duration = Duration::from_secs(1);

/// Time for the reported processes to end. The kernel needs seconds to release the memory of a
/// large process.
pub(super) const GRACE_FOR_SURVIVORS: Duration = Duration::from_secs(10);

/// Time for the pipes to drain after the last process has ended.
pub(super) const GRACE_FOR_PIPES: Duration = Duration::from_secs(1);

/// The outcome of an attempt.
#[derive(Debug)]
pub(super) struct AttemptResult {
    pub end: AttemptEnd,
    pub cause: Option<RootCause>,
    pub finished: Option<Finished>,
    pub interval: Option<Interval>,
    /// Seconds from ready to the end of the attempt.
    pub seconds: f64,
    /// Steps already done by the checkpoint that the attempt resumed from.
    pub resumed_step: u64,
}

/// Termination signals sent to this process.
pub(super) struct Signals {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
}

impl Signals {
    pub(super) fn listen() -> Result<Self, AttemptError> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Signals {
            interrupt: signal(SignalKind::interrupt()).map_err(AttemptError::Signals)?,
            terminate: signal(SignalKind::terminate()).map_err(AttemptError::Signals)?,
        })
    }

    /// Waits for the next stop request.
    pub(super) async fn next(&mut self) -> (Exit, &'static str) {
        tokio::select! {
            _ = self.interrupt.recv() => (Exit::Interrupted, "SIGINT"),
            _ = self.terminate.recv() => (Exit::Terminated, "SIGTERM"),
        }
    }
}

/// Starts every process of `plan` and waits until all have ended. Rank 0 inherits `listener`,
/// unless it is on another machine.
pub(super) async fn run(
    plan: &LocalPlan,
    worker: &Worker,
    listener: Option<TcpListener>,
    run_dir: &RunDir,
    signals: &mut Signals,
    observer: &mut dyn Observer,
) -> Result<AttemptResult, AttemptError> {
    let (sender, receiver) = channel(1024);
    let mut group = Group {
        plan,
        processes: Vec::new(),
        events: run_dir.open_log("events.jsonl")?,
        fold: Fold::new(plan.ranks()),
        interval: None,
        first_failed: None,
        stopped: None,
        ready_at: None,
        deadline: None,
    };
    let mut listener = listener.map(OwnedFd::from);
    for (index, process) in plan.processes().chain(&plan.servers).enumerate() {
        // Pass the bound socket to rank 0 as standard input, so that no other program can take the
        // port in the meantime.
        let stdin = listener.take().map_or_else(Stdio::null, Stdio::from);
        let name = member_name(process.rank, plan.world()).replace("parameter ", "").replace(' ', "-");
        match start(process, (index, &name), plan.attempt, worker, stdin, run_dir, &sender) {
            Ok(process) => group.processes.push(process),
            Err(error) => {
                group.kill_all();
                group.reap().await;
                return Err(error);
            }
        }
    }
    drop(sender);
    group.watch(receiver, signals, observer).await;
    Ok(group.ended())
}

/// The processes of an attempt and its state.
struct Group<'a> {
    plan: &'a LocalPlan,
    processes: Vec<Process>,
    events: LogFile,
    fold: Fold,
    interval: Option<Interval>,
    /// Index of the process that failed first.
    first_failed: Option<usize>,
    stopped: Option<Exit>,
    ready_at: Option<Instant>,
    deadline: Option<(Instant, Overdue)>,
}

/// Response to a deadline that passes before all processes have ended and closed their pipes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Overdue {
    Kill,
    /// Report the processes that SIGKILL has not ended.
    Report,
    /// End the attempt without the remaining processes and output.
    GiveUp,
}

/// Reports that the run is no longer recorded. Its ranks keep training, because their checkpoints
/// can be on another disk, and a full one can be freed.
pub(super) fn report_unrecorded(error: &RunDirError, observer: &mut dyn Observer) {
    // The observer fails only when it writes, which it does not do for this update.
    let _ = observer.observe(Update::Unrecorded(error));
}

/// Sends an update to the observer. Reports if the observer cannot write it.
pub(super) fn notify(observer: &mut dyn Observer, update: Update<'_>) {
    if let Err(error) = observer.observe(update) {
        report_unrecorded(&error, observer);
    }
}

impl Group<'_> {
    /// Waits until every process has ended and all their output is read, or until SIGKILL has had
    /// no effect for a while.
    async fn watch(&mut self, mut messages: Receiver<Message>, signals: &mut Signals, observer: &mut dyn Observer) {
        let mut listening = true;
        while self.running() > 0 || listening {
            let deadline = self.deadline;
            tokio::select! {
                message = messages.recv(), if listening => match message {
                    Some(message) => self.on_message(message, observer),
                    None => listening = false,
                },
                (index, status) = next_exit(&mut self.processes) => self.on_exit(index, status),
                (exit, signal) = signals.next() => {
                    if self.running() > 0 && matches!(self.deadline, Some((_, Overdue::GiveUp))) {
                        return;
                    }
                    self.on_signal(exit, signal, observer);
                },
                overdue = passed(deadline) => match overdue {
                    Overdue::Kill => self.kill_all(),
                    Overdue::Report => self.report_survivors(observer),
                    Overdue::GiveUp => return,
                },
            }
        }
    }

    fn on_message(&mut self, message: Message, observer: &mut dyn Observer) {
        let (index, mut event) = match message {
            Message::Text(index, text) => return self.processes[index].remember(text),
            Message::LogFailed(error) => return report_unrecorded(&error, observer),
            Message::Event(index, event) => (index, *event),
        };
        if let Event::Ready(ready) = &mut event {
            self.processes[index].channels.complete(ready);
        }
        if let Err(error) = self.record(event.rank().unwrap_or(self.processes[index].first_rank), &event) {
            report_unrecorded(&error, observer);
        }
        let own = self.processes[index].rank_of(&event);
        match event {
            Event::Ready(ready) => {
                own.ready = Some(ready);
                let all: Option<Vec<Ready>> = self.rank_events().map(|rank| rank.ready.clone()).collect();
                if let Some(ranks) = all {
                    self.ready_at = Some(Instant::now());
                    let update = Update::Ready { attempt: self.plan.attempt, plan: self.plan, ranks: &ranks };
                    notify(observer, update);
                }
            }
            Event::Progress(progress) => {
                if let Some(folded) = self.fold.progress(progress) {
                    let interval = Interval::new(folded, Timestamp::now());
                    notify(observer, Update::Progress(&interval));
                    self.interval = Some(interval);
                }
            }
            Event::Evaluation { step, loss, accuracy } => {
                self.fold.evaluation(loss, accuracy);
                notify(observer, Update::Evaluation { step, loss, accuracy });
            }
            Event::Standstill { stuck } => {
                self.fold.standstill(stuck);
                if let Some(mut interval) = self.interval.take() {
                    (interval.figures.stuck, interval.at) = (stuck, Timestamp::now());
                    notify(observer, Update::Standstill(&interval));
                    self.interval = Some(interval);
                }
            }
            Event::GpuTrouble { gpu } => {
                self.fold.gpu_trouble(gpu);
                if let Some(interval) = &mut self.interval {
                    interval.figures.gpu = gpu;
                }
                notify(observer, Update::GpuTrouble(gpu));
            }
            Event::Checkpoint(report) => notify(observer, Update::Checkpoint(&report)),
            // Only a pod's supervisor prints summaries. Measurements and GPU problems go to the
            // run's log, and the end of the run reports what is missing.
            Event::Summary(_) | Event::Measured(_) | Event::Gpu(_) => {}
            Event::Finished(finished) => own.finished = Some(finished),
            Event::Failed(failure) => {
                own.failure = Some(failure);
                self.on_failure(index);
            }
        }
    }

    fn on_exit(&mut self, index: usize, status: ExitStatus) {
        self.processes[index].observed.ended = Some(status);
        if !status.success() {
            self.on_failure(index);
        }
        if self.running() == 0 {
            // Bounds the wait for a stray process that keeps a pipe open.
            self.deadline = Some((Instant::now() + GRACE_FOR_PIPES, Overdue::GiveUp));
        }
    }

    fn on_failure(&mut self, index: usize) {
        self.first_failed.get_or_insert(index);
        self.deadline.get_or_insert((Instant::now() + GRACE_AFTER_FAILURE, Overdue::Kill));
    }

    fn on_signal(&mut self, exit: Exit, signal: &str, observer: &mut dyn Observer) {
        if self.stopped.is_some() {
            return self.kill_all();
        }
        self.stopped = Some(exit);
        let saves = self.plan.engine.checkpoint.as_ref().is_some_and(|checkpoint| checkpoint.on_suspend);
        notify(observer, Update::Stopping { signal, saves });
        self.signal_all(Signal::TERM);
        let to_save = self.plan.grace_seconds.map_or(GRACE_TO_SAVE, |seconds| Duration::from_secs(seconds.into()));
        if self.deadline.is_none_or(|(_, overdue)| overdue == Overdue::Kill) {
            let grace = if saves { to_save } else { GRACE_AFTER_STOP };
            self.deadline = Some((Instant::now() + grace, Overdue::Kill));
        }
    }

    fn report_survivors(&mut self, observer: &mut dyn Observer) {
        self.deadline = Some((Instant::now() + GRACE_FOR_SURVIVORS, Overdue::GiveUp));
        let (cause, processes) = (self.cause(), self.survivors());
        let seconds = GRACE_FOR_SURVIVORS.as_secs();
        notify(observer, Update::Surviving { cause: cause.as_ref(), processes: &processes, seconds });
    }

    fn survivors(&self) -> Vec<Survivor> {
        let running = self.processes.iter().filter(|process| process.observed.ended.is_none());
        running
            .map(|process| {
                Survivor::of(
                    process.first_rank,
                    member_name(process.first_rank, self.plan.world()),
                    process.observed.pid,
                )
            })
            .collect()
    }

    /// The root cause as far as it is known; `None` if a stop was requested.
    fn cause(&self) -> Option<RootCause> {
        if self.stopped.is_some() {
            return None;
        }
        let observed: Vec<_> = self.processes.iter().flat_map(Process::rank_observations).collect();
        let first_rank = self.plan.ranks().start;
        let first_failed = self.first_failed.map(|index| (self.processes[index].failed_rank() - first_rank) as usize);
        let mut cause = root_cause(first_rank, &observed.iter().collect::<Vec<_>>(), first_failed);
        // The plan has no servers in a run on several machines.
        if !self.plan.servers.is_empty() {
            cause.server = cause.rank.checked_sub(self.plan.world());
            cause.others.retain(|rank| *rank < self.plan.world());
        }
        Some(cause)
    }

    /// The stop request that all ranks here followed although this machine received none.
    fn stopped_elsewhere(&self) -> Option<Exit> {
        self.plan.hosts.as_ref()?;
        let exit = |process: &Process| Exit::from_code(process.observed.ended?.code()?);
        let first = self.processes.first().and_then(exit)?;
        let is_stop = matches!(first, Exit::Interrupted | Exit::Terminated);
        (is_stop && self.processes.iter().all(|process| exit(process) == Some(first))).then_some(first)
    }

    /// Returns the outcome of the attempt, after [`Group::watch`].
    fn ended(mut self) -> AttemptResult {
        self.stopped = self.stopped.or_else(|| self.stopped_elsewhere());
        let ended_well = |process: &Process| process.observed.ended.is_some_and(|status| status.success());
        let all_done = self.processes.iter().all(ended_well) && self.rank_events().all(|rank| rank.finished.is_some());
        let cause = if all_done { None } else { self.cause() };
        let end = match (&cause, self.stopped) {
            (Some(_), _) if self.running() > 0 => AttemptEnd::Unkillable,
            (Some(cause), _) => AttemptEnd::Failed(cause.code),
            (None, Some(exit)) if !all_done => AttemptEnd::Stopped(exit),
            (None, _) => AttemptEnd::Done,
        };
        let seconds = self.ready_at.map_or(0.0, |at| at.elapsed().as_secs_f64());
        let first = self.processes.into_iter().next().and_then(|process| process.ranks.into_iter().next());
        let (ready, finished) = first.map_or((None, None), |rank| (rank.ready, rank.finished));
        let resumed_step = ready.and_then(|ready| ready.resumed_step).unwrap_or(0);
        AttemptResult { end, cause, finished, interval: self.interval, seconds, resumed_step }
    }

    /// Events of the ranks; parameter servers report only failures.
    fn rank_events(&self) -> impl Iterator<Item = &RankEvents> {
        self.processes.iter().flat_map(|process| &process.ranks).take(self.plan.ranks().len())
    }

    fn running(&self) -> usize {
        self.processes.iter().filter(|process| process.observed.ended.is_none()).count()
    }

    fn record(&mut self, rank: u32, event: &Event) -> Result<(), RunDirError> {
        let attempt = self.plan.attempt;
        let line = serde_json::json!({"time": Timestamp::now(), "attempt": attempt, "rank": rank, "event": event});
        self.events.line(&line.to_string())
    }

    fn signal_all(&self, signal: Signal) {
        self.processes.iter().for_each(|process| process.signal(signal));
    }

    fn kill_all(&mut self) {
        self.signal_all(Signal::KILL);
        if self.running() > 0 {
            self.deadline = Some((Instant::now() + GRACE_AFTER_KILL, Overdue::Report));
        }
        for process in self.processes.iter_mut().filter(|process| process.observed.ended.is_none()) {
            process.observed.killed = true;
        }
    }

    async fn reap(&mut self) {
        for process in &mut self.processes {
            process.reap().await;
        }
    }
}

/// Waits until a deadline has passed. Never resolves without one.
async fn passed(deadline: Option<(Instant, Overdue)>) -> Overdue {
    let Some((at, overdue)) = deadline else { return std::future::pending().await };
    tokio::time::sleep_until(at).await;
    overdue
}
