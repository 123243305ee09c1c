//! The life of a pod's processes: start, watch, end.

use super::cores;
use super::output::Output;
use super::ranks::{Log, Message, Process, reap, sweep};
use super::settings::Settings;
use super::verdict::{Seen, verdict};
use crate::comm::GroupConfig;
use rustix::process::{Signal, getpid, set_child_subreaper};
use signal_hook::consts::{SIGCHLD, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::io;
use std::os::fd::OwnedFd;
use std::process::Stdio;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use switchyard_worker_contract::exit::Exit;
use switchyard_worker_contract::termination::Termination;

/// Time for the ranks after a stop was requested. Kubernetes waits 30 s by default before it kills the pod.
const GRACE_AFTER_STOP: Duration = Duration::from_secs(25);

/// Time for the pipes to drain after the last rank has ended.
const GRACE_FOR_PIPES: Duration = Duration::from_secs(1);

/// Starts the processes, and returns when all have ended and nothing of them is left.
///
/// # Errors
/// Signals cannot be handled, or a process cannot be started; in that case none is left running.
pub(super) fn supervise(mut settings: Settings) -> io::Result<Termination> {
    set_child_subreaper(Some(getpid()))?;
    let (sender, receiver) = channel();
    listen_to_signals(sender.clone())?;
    let mut listener = settings.alone.as_mut().and_then(|alone| alone.listener.take());
    let ranks = settings.group.procs_per_node;
    let output = Output::new(io::stdout(), io::stderr(), settings.leads().then_some(ranks));
    let log: Log = Arc::new(Mutex::new(output));
    let silence = settings.group.peer_timeout.min(GroupConfig::PEER_TIMEOUT);
    let mut pod = Pod { processes: Vec::new(), open: 0, first: None, stopped: None, silence, kill_at: None };
    for (index, share) in
        (0u32..).zip(cores::shares(&cores::cores(), crate::cgroup::cpus().unwrap_or(0), settings.processes()))
    {
        let stdin = listener.take().map_or_else(Stdio::null, |listener| Stdio::from(OwnedFd::from(listener)));
        match Process::start(&settings, index, stdin, &share, &log, &sender) {
            Ok(process) => pod.processes.push(process),
            Err(error) => {
                sweep(&mut pod.processes);
                let rank = settings.first_rank() + index * settings.devices;
                return Err(io::Error::other(format!("cannot start rank {rank}: {error}")));
            }
        }
    }
    pod.open = 2 * pod.processes.len();
    pod.watch(&receiver);
    sweep(&mut pod.processes);
    // A reader that cannot write its line holds the log forever: the pod ends regardless.
    let summary = log.try_lock().ok().and_then(|mut log| log.finish(Instant::now()));
    let seen: Vec<Seen> = pod.processes.into_iter().flat_map(|process| process.seen).collect();
    let first = pod.first.and_then(|rank| seen.iter().position(|seen| seen.rank == rank));
    let failure = verdict(&seen, first, pod.stopped);
    Ok(Termination { exit_code: failure.as_ref().map_or(0, |failure| failure.exit_code), summary, failure })
}

fn listen_to_signals(sender: Sender<Message>) -> io::Result<()> {
    let mut signals = Signals::new([SIGCHLD, SIGINT, SIGTERM])?;
    let forward = move || {
        for signal in signals.forever() {
            if sender.send(Message::Signal(signal)).is_err() {
                return;
            }
        }
    };
    std::thread::Builder::new().name("signals".into()).spawn(forward).map(drop)
}

/// The processes and what has happened so far.
struct Pod {
    processes: Vec<Process>,
    /// Open streams of processes.
    open: usize,
    /// The rank whose failure was reported first.
    first: Option<u32>,
    /// The stop that was requested before any failure.
    stopped: Option<Exit>,
    /// Time for the other ranks to end by themselves after the first failure, with the root cause in the log: as long as
    /// peers wait for a silent rank, but not longer than they do by default, since there is nothing left to wait for.
    silence: Duration,
    /// When to kill what still runs, or give up on pipes that stay open.
    kill_at: Option<Instant>,
}

impl Pod {
    /// Returns when every process has ended and everything that they printed is read.
    fn watch(&mut self, messages: &Receiver<Message>) {
        // For processes that ended before signals were handled there is no signal.
        self.on_exits();
        while self.running() > 0 || self.open > 0 {
            let patience = self.kill_at.map(|at| at.saturating_duration_since(Instant::now()));
            // Without a deadline, a long timeout: the signal thread keeps the channel open.
            match messages.recv_timeout(patience.unwrap_or(Duration::from_secs(3600))) {
                Ok(Message::Signal(SIGCHLD)) => self.on_exits(),
                Ok(Message::Signal(signal)) => self.on_signal(signal),
                Ok(Message::Failed(index, failure)) => {
                    let rank = failure.rank;
                    self.processes[index].told(failure);
                    self.on_failure(rank);
                }
                Ok(Message::Closed) => self.open -= 1,
                Err(RecvTimeoutError::Timeout) if patience.is_none() => {}
                Err(_) => {
                    self.kill_at = None;
                    if self.running() == 0 {
                        return;
                    }
                    self.kill_all();
                }
            }
        }
    }

    fn on_exits(&mut self) {
        let ended = reap(&mut self.processes);
        if !ended.is_empty() && self.running() == 0 {
            // A stray process that keeps a pipe open does not hold up the pod.
            self.kill_at = Some(Instant::now() + GRACE_FOR_PIPES);
        }
        for index in ended {
            if self.processes[index].failed() {
                self.on_failure(self.processes[index].failed_rank());
            }
        }
    }

    fn on_failure(&mut self, rank: u32) {
        self.first.get_or_insert(rank);
        self.kill_at.get_or_insert(Instant::now() + self.silence);
    }

    fn on_signal(&mut self, signal: i32) {
        if self.stopped.is_some() {
            return self.kill_all();
        }
        // After a failure the ranks are already ending; its cause says more than that the rest was stopped as well.
        if self.first.is_none() {
            self.stopped = Some(if signal == SIGINT { Exit::Interrupted } else { Exit::Terminated });
            self.kill_at = Some(Instant::now() + GRACE_AFTER_STOP);
        }
        let signal = if signal == SIGINT { Signal::INT } else { Signal::TERM };
        self.processes.iter().for_each(|process| process.signal(signal));
    }

    fn running(&self) -> usize {
        self.processes.iter().filter(|process| process.runs()).count()
    }

    fn kill_all(&mut self) {
        self.processes.iter_mut().for_each(Process::kill);
    }
}
