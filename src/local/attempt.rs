//! One attempt: starts the processes of a plan, listens to them, and ends them all when one fails or a stop is asked for.

use super::cause::{RootCause, root_cause};
use super::progress::Interval;
use super::rank::{Message, Rank, next_exit, start};
use super::run_dir::{LogFile, RunDir, RunDirError};
use super::worker::Worker;
use super::{Observer, Update};
use crate::plan::Plan;
use crate::plan::restart::Ending;
use jiff::Timestamp;
use rustix::process::Signal;
use std::io;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;
use switchyard_worker_contract::event::{Event, Finished, Ready};
use switchyard_worker_contract::exit::Exit;
use switchyard_worker_contract::fold::Fold;
use tokio::sync::mpsc::{Receiver, channel};
use tokio::time::Instant;

/// After the first failure the other ranks have this long to stop by themselves, with the root cause in their logs.
const GRACE_AFTER_FAILURE: Duration = Duration::from_millis(1200);

/// After a stop was asked for the ranks have this long to finish their step.
const GRACE_AFTER_STOP: Duration = Duration::from_secs(4);

/// After the last process has ended its pipes have this long to run dry.
const GRACE_FOR_PIPES: Duration = Duration::from_secs(1);

/// What became of an attempt.
#[derive(Debug)]
pub(super) struct Ended {
    pub ending: Ending,
    pub cause: Option<RootCause>,
    pub finished: Option<Finished>,
    pub interval: Option<Interval>,
    /// Seconds from ready to the end.
    pub seconds: f64,
}

/// An attempt that could not be watched to its end.
#[derive(Debug, thiserror::Error)]
pub enum AttemptError {
    /// A process could not be started.
    #[error("cannot start {program} for rank {rank}: {source}")]
    Start {
        /// The rank.
        rank: u32,
        /// The program.
        program: String,
        /// Why.
        source: io::Error,
    },
    /// A log or event could not be written.
    #[error("{0}; all ranks were stopped")]
    Log(#[from] RunDirError),
    /// Signals cannot be listened to.
    #[error("cannot listen to signals: {0}")]
    Signals(io::Error),
}

/// Stop requests from outside.
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

    /// The next request to stop.
    pub(super) async fn next(&mut self) -> (Exit, &'static str) {
        tokio::select! {
            _ = self.interrupt.recv() => (Exit::Interrupted, "SIGINT"),
            _ = self.terminate.recv() => (Exit::Terminated, "SIGTERM"),
        }
    }
}

/// Starts every process of `plan` and stays until all have ended.
pub(super) async fn run(
    plan: &Plan,
    worker: &Worker,
    listener: TcpListener,
    run_dir: &RunDir,
    signals: &mut Signals,
    observer: &mut dyn Observer,
) -> Result<Ended, AttemptError> {
    let (sender, receiver) = channel(1024);
    let mut group = Group {
        plan,
        ranks: Vec::new(),
        events: run_dir.open_log("events.jsonl")?,
        fold: Fold::new(plan.world()),
        interval: None,
        first_failed: None,
        log_failed: None,
        stopped: None,
        ready_at: None,
        kill_at: None,
    };
    let mut listener = Some(OwnedFd::from(listener));
    for process in plan.processes() {
        // Rank 0 gets the listening socket as its standard input: the port cannot be lost to another program in between.
        let stdin = listener.take().map_or_else(Stdio::null, Stdio::from);
        match start(process, plan.attempt, worker, stdin, run_dir, &sender) {
            Ok(rank) => group.ranks.push(rank),
            Err(error) => {
                group.kill_all();
                group.reap().await;
                return Err(error);
            }
        }
    }
    drop(sender);
    group.watch(receiver, signals, observer).await;
    group.ended()
}

/// The processes of an attempt and what is known of it.
struct Group<'a> {
    plan: &'a Plan,
    ranks: Vec<Rank>,
    events: LogFile,
    fold: Fold,
    interval: Option<Interval>,
    first_failed: Option<usize>,
    log_failed: Option<RunDirError>,
    stopped: Option<Exit>,
    ready_at: Option<Instant>,
    /// When patience with what still runs, or with pipes that stay open, ends.
    kill_at: Option<Instant>,
}

impl Group<'_> {
    /// Stays until every process has ended and everything they printed is read.
    async fn watch(&mut self, mut messages: Receiver<Message>, signals: &mut Signals, observer: &mut dyn Observer) {
        let mut listening = true;
        while self.running() > 0 || listening {
            let patience = self.kill_at;
            tokio::select! {
                message = messages.recv(), if listening => match message {
                    Some(message) => self.on_message(message, observer),
                    None => listening = false,
                },
                (rank, status) = next_exit(&mut self.ranks) => self.on_exit(rank, status),
                (exit, signal) = signals.next() => self.on_signal(exit, signal, observer),
                () = sleep_until(patience), if patience.is_some() => {
                    self.kill_at = None;
                    listening &= self.running() > 0;
                    self.kill_all();
                },
            }
        }
    }

    fn on_message(&mut self, message: Message, observer: &mut dyn Observer) {
        let (rank, event) = match message {
            Message::Text(rank, text) => return self.ranks[rank as usize].remember(text),
            Message::LogFailed(error) => return self.give_up_on_log(error),
            Message::Event(rank, event) => (rank, event),
        };
        if let Err(error) = self.record(rank, &event) {
            self.give_up_on_log(error);
        }
        let own = &mut self.ranks[rank as usize];
        match event {
            Event::Ready(ready) => {
                own.ready = Some(ready);
                let all: Option<Vec<Ready>> = self.ranks.iter().map(|rank| rank.ready.clone()).collect();
                if let Some(ranks) = all {
                    self.ready_at = Some(Instant::now());
                    let update = Update::Ready { attempt: self.plan.attempt, plan: self.plan, ranks: &ranks };
                    self.tell(observer, update);
                }
            }
            Event::Progress(progress) => {
                if let Some(folded) = self.fold.progress(progress) {
                    let interval = Interval::new(folded, Timestamp::now());
                    self.tell(observer, Update::Progress(&interval));
                    self.interval = Some(interval);
                }
            }
            Event::Evaluation { step, loss } => {
                self.fold.evaluation(loss);
                self.tell(observer, Update::Evaluation { step, loss });
            }
            // Only a supervisor in a pod makes one.
            Event::Summary(_) => {}
            Event::Finished(finished) => own.finished = Some(finished),
            Event::Failed(failure) => {
                own.seen.failure = Some(failure);
                self.on_failure(rank as usize);
            }
        }
    }

    fn on_exit(&mut self, rank: usize, status: ExitStatus) {
        self.ranks[rank].seen.ended = Some(status);
        if !status.success() {
            self.on_failure(rank);
        }
        if self.running() == 0 {
            // What is still in the pipes arrives within this time; a stray process that keeps one open does not hold us.
            self.kill_at = Some(Instant::now() + GRACE_FOR_PIPES);
        }
    }

    fn on_failure(&mut self, rank: usize) {
        self.first_failed.get_or_insert(rank);
        self.kill_at.get_or_insert(Instant::now() + GRACE_AFTER_FAILURE);
    }

    fn on_signal(&mut self, exit: Exit, signal: &str, observer: &mut dyn Observer) {
        if self.stopped.is_some() {
            return self.kill_all();
        }
        self.stopped = Some(exit);
        self.tell(observer, Update::Stopping { signal });
        self.signal_all(Signal::TERM);
        self.kill_at = Some(Instant::now() + GRACE_AFTER_STOP);
    }

    fn tell(&mut self, observer: &mut dyn Observer, update: Update<'_>) {
        if let Err(error) = observer.observe(update) {
            self.give_up_on_log(error);
        }
    }

    /// A run that leaves no trace of what it does is not continued.
    fn give_up_on_log(&mut self, error: RunDirError) {
        if self.log_failed.is_none() {
            self.log_failed = Some(error);
            self.kill_all();
        }
    }

    /// What became of the attempt, once all processes have ended.
    fn ended(self) -> Result<Ended, AttemptError> {
        if let Some(error) = self.log_failed {
            return Err(error.into());
        }
        let finished = |rank: &Rank| rank.seen.ended.is_some_and(|status| status.success()) && rank.finished.is_some();
        let (ending, cause) = match (self.ranks.iter().all(finished), self.stopped) {
            (true, _) => (Ending::Done, None),
            (false, Some(exit)) => (Ending::Stopped(exit), None),
            (false, None) => {
                let seen: Vec<_> = self.ranks.iter().map(|rank| &rank.seen).collect();
                let cause = root_cause(&seen, self.first_failed);
                (Ending::Failed(cause.code), Some(cause))
            }
        };
        let seconds = self.ready_at.map_or(0.0, |at| at.elapsed().as_secs_f64());
        let finished = self.ranks.into_iter().next().and_then(|rank| rank.finished);
        Ok(Ended { ending, cause, finished, interval: self.interval, seconds })
    }

    fn running(&self) -> usize {
        self.ranks.iter().filter(|rank| rank.seen.ended.is_none()).count()
    }

    fn record(&mut self, rank: u32, event: &Event) -> Result<(), RunDirError> {
        let attempt = self.plan.attempt;
        let line = serde_json::json!({"time": Timestamp::now(), "attempt": attempt, "rank": rank, "event": event});
        self.events.line(&line.to_string())
    }

    fn signal_all(&self, signal: Signal) {
        self.ranks.iter().for_each(|rank| rank.signal(signal));
    }

    fn kill_all(&mut self) {
        self.signal_all(Signal::KILL);
        for rank in self.ranks.iter_mut().filter(|rank| rank.seen.ended.is_none()) {
            rank.seen.killed = true;
        }
    }

    async fn reap(&mut self) {
        for rank in &mut self.ranks {
            rank.reap().await;
        }
    }
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}
