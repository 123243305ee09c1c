//! One process of an attempt, with one rank or several: starts it, reads its output, and waits for
//! its exit.

use super::cause::{Observations, RankLog};
use super::error::AttemptError;
use super::run_dir::{LogFile, RunDir, RunDirError};
use super::worker::Worker;
use rustix::process::{Pid, Signal};
use std::cell::RefCell;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::rc::Rc;
use switchyard_plan::local::{PlannedPod, ProcessSpec};
use switchyard_worker_contract::env;
use switchyard_worker_contract::event::{Event, Failure, Finished, Ready};
use switchyard_worker_contract::nccl::{self, Channels};
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::mpsc::Sender;

/// Log lines shown in an error.
const TAIL_LINES: usize = 5;

/// Longest line read from a process; the rest is dropped.
const LONGEST_LINE: usize = 64 * 1024;

/// A message from a process, with the process's index in the plan.
pub(super) enum Message {
    /// An event line.
    Event(usize, Box<Event>),
    /// Any other line, already written to the log.
    Text(usize, String),
    /// Its log could not be written.
    LogFailed(RunDirError),
}

/// Events received from a rank.
#[derive(Default)]
pub(super) struct RankEvents {
    pub ready: Option<Ready>,
    pub finished: Option<Finished>,
    pub failure: Option<Failure>,
}

/// A process and the observations of it.
pub(super) struct Process {
    child: Child,
    pub observed: Observations,
    /// Its lowest rank.
    pub first_rank: u32,
    /// Events by rank, in rank order.
    pub ranks: Vec<RankEvents>,
    /// What NCCL logged about its channels.
    pub channels: Channels,
}

impl Process {
    /// The state of the rank that an event names, or of the first rank if the event names none of
    /// this process.
    pub fn rank_of(&mut self, event: &Event) -> &mut RankEvents {
        let index = event.rank().and_then(|rank| rank.checked_sub(self.first_rank)).unwrap_or(0) as usize;
        let index = if index < self.ranks.len() { index } else { 0 };
        &mut self.ranks[index]
    }

    /// Observations of each rank; all of them end with the process.
    pub fn rank_observations(&self) -> impl Iterator<Item = Observations> {
        self.ranks.iter().map(|rank| Observations { failure: rank.failure.clone(), ..self.observed.clone() })
    }

    /// The rank that failed, if the process ended by itself: the rank that reported a failure,
    /// otherwise the first.
    pub fn failed_rank(&self) -> u32 {
        let own = |rank: &RankEvents| rank.failure.as_ref().is_some_and(|failure| failure.origin_rank == failure.rank);
        self.first_rank + self.ranks.iter().position(own).unwrap_or(0) as u32
    }

    /// Sends a signal, unless the process has ended.
    pub fn signal(&self, signal: Signal) {
        if let Some(pid) = self.running_pid() {
            let _ = rustix::process::kill_process(pid, signal);
        }
    }

    /// Sends a signal to the process and its descendants, unless the process has ended.
    pub fn signal_group(&self, signal: Signal) {
        if let Some(pid) = self.running_pid() {
            let _ = rustix::process::kill_process_group(pid, signal);
        }
    }

    /// The process is our child and has not been waited for, so the pid cannot have been reused.
    fn running_pid(&self) -> Option<Pid> {
        let pid = i32::try_from(self.observed.pid).ok().and_then(Pid::from_raw);
        pid.filter(|_| self.observed.ended.is_none())
    }

    pub async fn reap(&mut self) {
        self.observed.ended = self.child.wait().await.ok();
    }

    /// Handles a line of the log, and keeps it if it is one of the last.
    pub fn remember(&mut self, text: String) {
        self.channels.line(&text);
        let tail = &mut self.observed.log.tail;
        tail.push(text);
        if tail.len() > TAIL_LINES {
            tail.remove(0);
        }
    }
}

/// Starts a process of the plan, the `index`-th of its attempt, with a log called `name`. Its
/// output arrives as messages.
///
/// # Errors
/// Its log cannot be opened, or the process cannot be started.
pub(super) fn start(
    process: &ProcessSpec,
    (index, name): (usize, &str),
    attempt: u32,
    worker: &Worker,
    stdin: Stdio,
    run_dir: &RunDir,
    sender: &Sender<Message>,
) -> Result<Process, AttemptError> {
    let mut command = command(&worker.path);
    command.args(&process.argv[1..]).stdin(stdin);
    command.envs(process.env.iter().map(|entry| (&entry.name, &entry.value)));
    let is_set = |name: &str| std::env::var_os(name).is_some() || process.env.iter().any(|entry| entry.name == name);
    command.envs(nccl::log_variables(is_set));
    let own = Own { index, name, first_rank: process.rank, ranks: process.ranks, has_events: true };
    spawn(command, &own, &worker.path, attempt, run_dir, sender)
}

/// Starts the process of a pod. Its output arrives as messages.
///
/// # Errors
/// Its log cannot be opened, or the process cannot be started.
pub(super) fn start_pod(
    pod: &PlannedPod,
    index: usize,
    attempt: u32,
    launcher: &Path,
    run_dir: &RunDir,
    sender: &Sender<Message>,
) -> Result<Process, AttemptError> {
    let mut command = command(launcher);
    command.arg("__exec").args(&pod.argv).stdin(Stdio::null());
    command.envs(&pod.env);
    let own = Own { index, name: &pod.name, first_rank: pod.first_rank, ranks: 1, has_events: false };
    spawn(command, &own, launcher, attempt, run_dir, sender)
}

/// A program that ends with this one, without the variables of another rank.
fn command(program: &Path) -> Command {
    let mut command = Command::new(program);
    for name in env::ALL.iter().filter(|name| !env::USER_SETTABLE.contains(name)) {
        command.env_remove(name);
    }
    command.env(env::PARENT_PID, std::process::id().to_string());
    command
}

/// Identity of a process among those of its attempt.
struct Own<'a> {
    index: usize,
    /// Of its log.
    name: &'a str,
    first_rank: u32,
    ranks: u32,
    /// Whether it prints events.
    has_events: bool,
}

fn spawn(
    mut command: Command,
    own: &Own<'_>,
    program: &Path,
    attempt: u32,
    run_dir: &RunDir,
    sender: &Sender<Message>,
) -> Result<Process, AttemptError> {
    let name = format!("logs/attempt-{attempt}/{}.log", own.name);
    let log = Rc::new(RefCell::new(run_dir.open_log(&name)?));
    // Use a separate process group, so that Ctrl-C in a terminal reaches only the launcher, which
    // then stops all ranks in order.
    command.process_group(0).kill_on_drop(true);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|source| AttemptError::Start {
        rank: own.first_rank,
        program: program.display().to_string(),
        source,
    })?;
    if let Some(stdout) = child.stdout.take() {
        listen(own.index, stdout, own.has_events, Rc::clone(&log), sender.clone());
    }
    if let Some(stderr) = child.stderr.take() {
        listen(own.index, stderr, false, log, sender.clone());
    }
    let log = RankLog { path: format!("{}/{name}", run_dir.short()), tail: Vec::new() };
    let observed = Observations { pid: child.id().unwrap_or_default(), log, ..Observations::default() };
    let ranks = (0..own.ranks).map(|_| RankEvents::default()).collect();
    Ok(Process { child, observed, first_rank: own.first_rank, ranks, channels: Channels::default() })
}

/// Reads one output stream of a process to its end: events become messages, all other lines go to
/// the log.
fn listen(
    index: usize,
    stream: impl AsyncRead + Unpin + 'static,
    events: bool,
    log: Rc<RefCell<LogFile>>,
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
            let (message, written) = match serde_json::from_str::<Event>(&text) {
                Ok(event) if events => (Message::Event(index, Box::new(event)), Ok(())),
                _ => {
                    let written = log.borrow_mut().line(&text);
                    (Message::Text(index, text), written)
                }
            };
            for message in written.err().map(Message::LogFailed).into_iter().chain([message]) {
                if sender.send(message).await.is_err() {
                    return;
                }
            }
        }
    });
}

/// Reads up to a line feed and keeps at most [`LONGEST_LINE`] bytes. Returns `false` at the end of
/// the stream.
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

/// Waits for the next process to exit. Never resolves if none is left.
pub(super) async fn next_exit(processes: &mut [Process]) -> (usize, ExitStatus) {
    let waiting: Vec<_> = processes
        .iter_mut()
        .enumerate()
        .filter(|(_, process)| process.observed.ended.is_none())
        .map(|(index, process)| Box::pin(async move { (index, process.child.wait().await) }))
        .collect();
    if waiting.is_empty() {
        return std::future::pending().await;
    }
    let mut waiting = waiting;
    std::future::poll_fn(move |context| {
        for future in &mut waiting {
            if let std::task::Poll::Ready((index, result)) = future.as_mut().poll(context) {
                // Waiting fails only for a process that was already reaped, which has ended as
                // well.
                return std::task::Poll::Ready((index, result.unwrap_or_else(|_| ExitStatus::from_raw(1 << 8))));
            }
        }
        std::task::Poll::Pending
    })
    .await
}
