//! One attempt: starts the processes of a plan, listens to them, and ends them all when one fails or a stop is asked for.

use super::progress::{Fold, Interval};
use super::run_dir::{LogFile, RunDir, RunDirError};
use super::worker::Worker;
use super::{Observer, Update};
use crate::plan::restart::Ending;
use crate::plan::{Plan, ProcessSpec};
use jiff::Timestamp;
use rustix::process::{Pid, Signal};
use std::collections::VecDeque;
use std::io;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;
use switchyard_worker_contract::env;
use switchyard_worker_contract::event::{Event, Failure, Finished, Ready};
use switchyard_worker_contract::exit::Exit;
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::time::Instant;

/// After the first failure the other ranks have this long to stop by themselves, with the root cause in their logs.
const GRACE_AFTER_FAILURE: Duration = Duration::from_millis(1200);

/// After a stop was asked for the ranks have this long to finish their step.
const GRACE_AFTER_STOP: Duration = Duration::from_secs(4);

/// Lines of a rank's log that an error shows.
const TAIL_LINES: usize = 5;

/// Longest line taken from a rank; the rest of a longer one is cut.
const LONGEST_LINE: usize = 64 * 1024;

/// The first failure of an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RootCause {
    /// The rank that failed first.
    pub rank: u32,
    /// Its process.
    pub pid: u32,
    /// What happened.
    pub cause: String,
    /// What it, or its peers, were doing; empty when not known.
    pub during: String,
    /// Exit code of that rank; `None` when a signal ended it.
    pub code: Option<i32>,
    /// Its log.
    pub log: RankLog,
    /// Ranks that stopped because of it.
    pub others: Vec<u32>,
}

/// The end of a rank's log.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RankLog {
    /// Where it lies.
    pub path: String,
    /// The last lines.
    pub tail: Vec<String>,
}

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

/// Something that a rank did.
enum Message {
    Event(u32, Event),
    Text(u32, String),
    LogFailed(RunDirError),
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

struct Rank {
    pid: u32,
    child: Child,
    ended: Option<ExitStatus>,
    /// Ended by us after the grace: not a cause.
    killed: bool,
    failure: Option<Failure>,
    ready: Option<Ready>,
    finished: Option<Finished>,
    tail: VecDeque<String>,
    log_path: String,
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
    let mut group = Group { ranks: Vec::new(), events: run_dir.open_log("events.jsonl")?, attempt: plan.attempt };
    let mut listener = Some(OwnedFd::from(listener));
    for process in plan.processes() {
        // Rank 0 gets the listening socket as its standard input: the port cannot be lost to another program in between.
        let stdin = listener.take().map_or_else(Stdio::null, Stdio::from);
        let name = format!("logs/attempt-{}/rank-{}.log", plan.attempt, process.rank);
        let started = run_dir.open_log(&name).map_err(AttemptError::from);
        match started.and_then(|log| start(process, worker, stdin, log, &sender)) {
            Ok(rank) => group.ranks.push(rank),
            Err(error) => {
                group.kill_all();
                group.reap().await;
                return Err(error);
            }
        }
    }
    drop(sender);
    group.watch(plan, receiver, signals, observer).await
}

fn start(
    process: &ProcessSpec,
    worker: &Worker,
    stdin: Stdio,
    log: LogFile,
    sender: &Sender<Message>,
) -> Result<Rank, AttemptError> {
    let mut command = Command::new(&worker.path);
    command.args(&process.argv[1..]);
    for name in env::ALL.iter().filter(|name| !env::USER_SETTABLE.contains(name)) {
        command.env_remove(name);
    }
    command.envs(process.env.iter().map(|entry| (&entry.name, &entry.value)));
    command.env(env::PARENT_PID, std::process::id().to_string());
    // A group of its own, so that Ctrl-C in a terminal reaches the launcher only, which then stops all ranks in order.
    command.process_group(0).kill_on_drop(true);
    command.stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|source| AttemptError::Start {
        rank: process.rank,
        program: worker.path.display().to_string(),
        source,
    })?;
    let log_path = log.path().display().to_string();
    let log = std::rc::Rc::new(std::cell::RefCell::new(log));
    if let Some(stdout) = child.stdout.take() {
        listen(process.rank, stdout, true, log.clone(), sender.clone());
    }
    if let Some(stderr) = child.stderr.take() {
        listen(process.rank, stderr, false, log, sender.clone());
    }
    Ok(Rank {
        pid: child.id().unwrap_or_default(),
        child,
        ended: None,
        killed: false,
        failure: None,
        ready: None,
        finished: None,
        tail: VecDeque::new(),
        log_path,
    })
}

/// Reads one stream of a rank to its end: events become messages, everything else goes to the log.
fn listen(
    rank: u32,
    stream: impl AsyncRead + Unpin + 'static,
    events: bool,
    log: std::rc::Rc<std::cell::RefCell<LogFile>>,
    sender: Sender<Message>,
) {
    tokio::task::spawn_local(async move {
        let mut reader = BufReader::new(stream);
        let mut line = Vec::new();
        loop {
            line.clear();
            match read_line(&mut reader, &mut line).await {
                Ok(true) => {}
                Ok(false) | Err(_) => return,
            }
            let text = String::from_utf8_lossy(&line).trim_end().to_string();
            let message = match serde_json::from_str::<Event>(&text) {
                Ok(event) if events => Message::Event(rank, event),
                _ => match log.borrow_mut().line(&text) {
                    Ok(()) => Message::Text(rank, text),
                    Err(error) => Message::LogFailed(error),
                },
            };
            if sender.send(message).await.is_err() {
                return;
            }
        }
    });
}

/// Reads up to a line feed; keeps at most [`LONGEST_LINE`] bytes of it. `false` at the end of the stream.
async fn read_line(reader: &mut (impl tokio::io::AsyncBufRead + Unpin), line: &mut Vec<u8>) -> io::Result<bool> {
    loop {
        let chunk = reader.fill_buf().await?;
        if chunk.is_empty() {
            return Ok(!line.is_empty());
        }
        let end = chunk.iter().position(|byte| *byte == b'\n');
        let taken = end.map_or(chunk.len(), |end| end + 1);
        let room = LONGEST_LINE.saturating_sub(line.len());
        line.extend_from_slice(&chunk[..taken.min(room)]);
        reader.consume(taken);
        if end.is_some() {
            return Ok(true);
        }
    }
}

/// The processes of an attempt.
struct Group {
    ranks: Vec<Rank>,
    events: LogFile,
    attempt: u32,
}

impl Group {
    async fn watch(
        mut self,
        plan: &Plan,
        mut messages: Receiver<Message>,
        signals: &mut Signals,
        observer: &mut dyn Observer,
    ) -> Result<Ended, AttemptError> {
        let mut fold = Fold::new(plan.world());
        let mut interval = None;
        let mut first_failed: Option<u32> = None;
        let mut log_failed: Option<RunDirError> = None;
        let mut stopped: Option<Exit> = None;
        let mut kill_at: Option<Instant> = None;
        let mut ready_at: Option<Instant> = None;
        let mut listening = true;
        while self.running() > 0 || listening {
            tokio::select! {
                message = messages.recv(), if listening => match message {
                    None => listening = false,
                    Some(Message::Text(rank, text)) => self.remember(rank, text),
                    Some(Message::LogFailed(error)) => {
                        if log_failed.is_none() {
                            log_failed = Some(error);
                            self.kill_all();
                        }
                    }
                    Some(Message::Event(rank, event)) => {
                        if let Err(error) = self.record(rank, &event) {
                            if log_failed.is_none() {
                                log_failed = Some(error);
                                self.kill_all();
                            }
                        }
                        match event {
                            Event::Ready(ready) => {
                                self.rank(rank).ready = Some(ready);
                                let all: Option<Vec<Ready>> = self.ranks.iter().map(|rank| rank.ready.clone()).collect();
                                if let Some(all) = all {
                                    ready_at = Some(Instant::now());
                                    observer.observe(Update::Ready { attempt: self.attempt, plan, ranks: &all });
                                }
                            }
                            Event::Progress(progress) => {
                                if let Some(folded) = fold.progress(progress, Timestamp::now()) {
                                    observer.observe(Update::Progress(&folded));
                                    interval = Some(folded);
                                }
                            }
                            Event::Evaluation { step, loss } => {
                                fold.evaluation(loss);
                                observer.observe(Update::Evaluation { step, loss });
                            }
                            Event::Finished(finished) => self.rank(rank).finished = Some(finished),
                            Event::Failed(failure) => {
                                first_failed.get_or_insert(rank);
                                kill_at.get_or_insert(Instant::now() + GRACE_AFTER_FAILURE);
                                self.rank(rank).failure = Some(failure);
                            }
                        }
                    }
                },
                (rank, status) = next_exit(&mut self.ranks) => {
                    self.ranks[rank].ended = Some(status);
                    if !status.success() {
                        first_failed.get_or_insert(rank as u32);
                        kill_at.get_or_insert(Instant::now() + GRACE_AFTER_FAILURE);
                    }
                    if self.running() == 0 {
                        // What is still in the pipes arrives within this time; a stray process that keeps one open does not hold us.
                        kill_at = Some(Instant::now() + Duration::from_secs(1));
                    }
                },
                (exit, signal) = signals.next() => {
                    if stopped.is_some() {
                        self.kill_all();
                    } else {
                        stopped = Some(exit);
                        observer.observe(Update::Stopping { signal });
                        self.signal_all(Signal::TERM);
                        kill_at = Some(Instant::now() + GRACE_AFTER_STOP);
                    }
                },
                () = sleep_until(kill_at), if kill_at.is_some() => {
                    kill_at = None;
                    if self.running() == 0 {
                        listening = false;
                    }
                    self.kill_all();
                },
            }
        }
        if let Some(error) = log_failed {
            return Err(error.into());
        }
        let finished = self.ranks[0].finished.clone();
        let done =
            self.ranks.iter().all(|rank| rank.ended.is_some_and(|status| status.success()) && rank.finished.is_some());
        let (ending, cause) = match (done, stopped) {
            (true, _) => (Ending::Done, None),
            (false, Some(exit)) => (Ending::Stopped(exit), None),
            (false, None) => {
                let cause = self.root_cause(first_failed);
                (Ending::Failed(cause.code), Some(cause))
            }
        };
        let seconds = ready_at.map_or(0.0, |at| at.elapsed().as_secs_f64());
        Ok(Ended { ending, cause, finished, interval, seconds })
    }

    fn rank(&mut self, rank: u32) -> &mut Rank {
        &mut self.ranks[rank as usize]
    }

    fn running(&self) -> usize {
        self.ranks.iter().filter(|rank| rank.ended.is_none()).count()
    }

    fn remember(&mut self, rank: u32, text: String) {
        let tail = &mut self.rank(rank).tail;
        tail.push_back(text);
        if tail.len() > TAIL_LINES {
            tail.pop_front();
        }
    }

    fn record(&mut self, rank: u32, event: &Event) -> Result<(), RunDirError> {
        let line = serde_json::json!({"time": Timestamp::now(), "attempt": self.attempt, "rank": rank, "event": event});
        self.events.line(&line.to_string())
    }

    fn signal_all(&self, signal: Signal) {
        for rank in self.ranks.iter().filter(|rank| rank.ended.is_none()) {
            if let Some(pid) = i32::try_from(rank.pid).ok().and_then(Pid::from_raw) {
                // The process is our child and not yet waited for, so the number cannot belong to another.
                let _ = rustix::process::kill_process(pid, signal);
            }
        }
    }

    fn kill_all(&mut self) {
        self.signal_all(Signal::KILL);
        for rank in self.ranks.iter_mut().filter(|rank| rank.ended.is_none()) {
            rank.killed = true;
        }
    }

    async fn reap(&mut self) {
        for rank in &mut self.ranks {
            rank.ended = rank.child.wait().await.ok();
        }
    }

    /// The first failure: a rank that ended by itself and does not blame another one; else the rank that its peers blame.
    fn root_cause(&self, first_failed: Option<u32>) -> RootCause {
        let blames_another =
            |rank: &Rank| rank.ended.and_then(|status| status.code()) == Some(i32::from(Exit::PeerFailure.code()));
        let own = |index: usize| {
            let rank = &self.ranks[index];
            !rank.killed && !blames_another(rank) && rank.ended.is_some_and(|status| !status.success())
        };
        let first = first_failed.map(|rank| rank as usize).filter(|rank| own(*rank));
        let blamed = self.ranks.iter().filter_map(|rank| rank.failure.as_ref()).next();
        let origin = first
            .or_else(|| blamed.map(|failure| failure.origin_rank as usize).filter(|rank| *rank < self.ranks.len()))
            .or_else(|| (0..self.ranks.len()).find(|rank| own(*rank)))
            .or(first_failed.map(|rank| rank as usize))
            .unwrap_or(0);
        let rank = &self.ranks[origin];
        let told = rank.failure.as_ref().or(blamed);
        let (code, ended) = match rank.ended {
            Some(status) if !rank.killed => (status.code(), describe(status)),
            _ => (Some(i32::from(Exit::OwnFailure.code())), "did not answer and was ended".to_string()),
        };
        let cause = match told {
            Some(failure) if rank.ended.is_some_and(|status| status.signal().is_some()) && !rank.killed => {
                let _ = failure;
                ended
            }
            Some(failure) => format!("{} ({ended})", failure.cause),
            None => ended,
        };
        RootCause {
            rank: origin as u32,
            pid: rank.pid,
            cause,
            during: told.map(|failure| failure.during.clone()).unwrap_or_default(),
            code,
            log: RankLog { path: rank.log_path.clone(), tail: rank.tail.iter().cloned().collect() },
            others: (0..self.ranks.len() as u32).filter(|other| *other != origin as u32).collect(),
        }
    }
}

/// The next process that ends. Pending for ever when none is left.
async fn next_exit(ranks: &mut [Rank]) -> (usize, ExitStatus) {
    let waiting: Vec<_> = ranks
        .iter_mut()
        .enumerate()
        .filter(|(_, rank)| rank.ended.is_none())
        .map(|(index, rank)| Box::pin(async move { (index, rank.child.wait().await) }))
        .collect();
    if waiting.is_empty() {
        return std::future::pending().await;
    }
    let mut waiting = waiting;
    std::future::poll_fn(move |context| {
        for future in &mut waiting {
            if let std::task::Poll::Ready((index, result)) = future.as_mut().poll(context) {
                // Waiting fails only for a process that was waited for already; it has ended either way.
                return std::task::Poll::Ready((index, result.unwrap_or_else(|_| ExitStatus::from_raw(1 << 8))));
            }
        }
        std::task::Poll::Pending
    })
    .await
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// How a process ended, in words.
fn describe(status: ExitStatus) -> String {
    if let Some(signal) = status.signal() {
        let name =
            rustix::process::Signal::from_named_raw(signal).map_or_else(String::new, |named| format!(" ({named:?})"));
        return format!("killed by signal {signal}{name}");
    }
    let code = status.code().unwrap_or_default();
    match Exit::from_code(code) {
        Some(exit) => format!("exit code {code}: {}", exit.meaning()),
        None => format!("exit code {code}"),
    }
}
