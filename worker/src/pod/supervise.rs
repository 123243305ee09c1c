//! Supervises a pod's processes: start, watch, end.

use super::cores;
use super::output::Output;
use super::ranks::{Log, Message, Process, reap, sweep};
use super::settings::Settings;
use super::verdict::{RankStatus, verdict};
use crate::comm::GroupConfig;
use crate::process::variable;
use rustix::process::{Signal, getpid, set_child_subreaper};
use signal_hook::consts::{SIGCHLD, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::io;
use std::os::fd::OwnedFd;
use std::process::Stdio;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use switchyard_worker_contract::env;
use switchyard_worker_contract::exit::Exit;
use switchyard_worker_contract::termination::Termination;

/// Part of the pod's grace period in which the supervisor ends ranks that are still saving, and
/// reports.
const GRACE_TO_REPORT: Duration = Duration::from_secs(5);

/// Time limit for the pipes to drain after the last rank has ended.
const GRACE_FOR_PIPES: Duration = Duration::from_secs(1);

/// Grace period for the ranks, from the pod's in seconds.
fn grace_after_stop(pod_seconds: Option<&str>) -> Duration {
    let seconds = pod_seconds.and_then(|text| text.parse().ok()).unwrap_or(env::DEFAULT_GRACE_SECONDS.into());
    Duration::from_secs(seconds).saturating_sub(GRACE_TO_REPORT).max(Duration::from_secs(1))
}

/// Starts the processes, and returns when all have ended and no descendants remain.
///
/// # Errors
/// Signals cannot be handled, or a process cannot be started; in that case none is left running.
pub(super) fn supervise(mut settings: Settings) -> io::Result<Termination> {
    set_child_subreaper(Some(getpid()))?;
    let (sender, receiver) = channel();
    listen_to_signals(sender.clone())?;
    let mut listener = settings.single_node.as_mut().and_then(|single_node| single_node.listener.take());
    let rank_count = settings.group.procs_per_node;
    let output = Output::new(io::stdout(), io::stderr(), settings.has_rank_zero().then_some(rank_count));
    let log: Log = Arc::new(Mutex::new(output));
    let grace = settings.group.peer_timeout.min(GroupConfig::PEER_TIMEOUT);
    let mut pod = Pod {
        processes: Vec::new(),
        open: 0,
        first: None,
        stopped: None,
        grace,
        grace_after_stop: grace_after_stop(variable(env::GRACE_SECONDS).as_deref()),
        kill_at: None,
    };
    for (index, share) in
        (0u32..).zip(cores::divide(&cores::cores(), crate::cgroup::cpus().unwrap_or(0), settings.processes()))
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
    // A reader blocked on writing its line holds the log lock forever; the pod ends regardless.
    let summary = log.try_lock().ok().and_then(|mut log| log.finish(Instant::now()));
    let ranks: Vec<RankStatus> = pod.processes.into_iter().flat_map(|process| process.ranks).collect();
    let first = pod.first.and_then(|rank| ranks.iter().position(|status| status.rank == rank));
    let failure = verdict(&ranks, first, pod.stopped);
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

/// The processes and the events so far.
struct Pod {
    processes: Vec<Process>,
    /// Open output streams of processes.
    open: usize,
    /// The rank whose failure was reported first.
    first: Option<u32>,
    /// The stop request, if it came before any failure.
    stopped: Option<Exit>,
    /// How long the other ranks have to end by themselves, with the root cause in the log, after
    /// the first failure: the peer timeout, but at most its default, because a longer wait gains
    /// nothing.
    grace: Duration,
    /// When to kill the remaining processes, or give up on pipes that stay open.
    kill_at: Option<Instant>,
    /// Grace period for the ranks after a stop request, in which they save.
    grace_after_stop: Duration,
}

impl Pod {
    /// Returns when every process has ended and all output is read.
    fn watch(&mut self, messages: &Receiver<Message>) {
        // Processes that ended before the signal handler was installed cause no signal.
        self.on_exits();
        while self.running() > 0 || self.open > 0 {
            let timeout = self.kill_at.map(|at| at.saturating_duration_since(Instant::now()));
            // Without a deadline, use a long timeout: the signal thread keeps the channel open.
            match messages.recv_timeout(timeout.unwrap_or(Duration::from_secs(3600))) {
                Ok(Message::Signal(SIGCHLD)) => self.on_exits(),
                Ok(Message::Signal(signal)) => self.on_signal(signal),
                Ok(Message::Failed(index, failure)) => {
                    let rank = failure.rank;
                    self.processes[index].record_failure(failure);
                    self.on_failure(rank);
                }
                Ok(Message::Closed) => self.open -= 1,
                Err(RecvTimeoutError::Timeout) if timeout.is_none() => {}
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
            // A stray process that keeps a pipe open must not hold up the pod.
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
        self.kill_at.get_or_insert(Instant::now() + self.grace);
    }

    fn on_signal(&mut self, signal: i32) {
        if self.stopped.is_some() {
            return self.kill_all();
        }
        // After a failure the ranks are already ending, and its cause is more useful than the stop.
        if self.first.is_none() {
            self.stopped = Some(if signal == SIGINT { Exit::Interrupted } else { Exit::Terminated });
            self.kill_at = Some(Instant::now() + self.grace_after_stop);
        }
        let signal = if signal == SIGINT { Signal::INT } else { Signal::TERM };
        self.processes.iter().for_each(|process| process.signal(signal));
    }

    fn running(&self) -> usize {
        self.processes.iter().filter(|process| process.is_running()).count()
    }

    fn kill_all(&mut self) {
        self.processes.iter_mut().for_each(Process::kill);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_have_the_grace_period_of_the_pod_to_save() {
        for (pod, ranks) in [(None, 25), (Some("30"), 25), (Some("300"), 295), (Some("2"), 1), (Some("x"), 25)] {
            assert_eq!(grace_after_stop(pod), Duration::from_secs(ranks), "{pod:?}");
        }
    }
}
