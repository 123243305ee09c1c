//! The pod's processes, each with one or more ranks: starts, reads, reaps and ends them.

use super::cores::CpuShare;
use super::output::Output;
use super::settings::Settings;
use super::verdict::RankStatus;
use rustix::process::{Pid, Signal, WaitOptions};
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use switchyard_worker_contract::event::Failure;
use switchyard_worker_contract::{env, nccl};

/// Longest line read from a rank; the rest of a longer one is dropped.
const LONGEST_LINE: u64 = 64 * 1024;

/// Time limit for the remaining processes to disappear at the end.
const SWEEP_TIMEOUT: Duration = Duration::from_secs(2);

pub(super) enum Message {
    /// A signal was received.
    Signal(i32),
    /// A rank in the process with this index reported a failure.
    Failed(usize, Failure),
    /// An output stream of a process ended.
    Closed,
}

/// The pod's output, shared by the threads that read the ranks.
pub(super) type Log = Arc<Mutex<Output<io::Stdout, io::Stderr>>>;

/// A process and the status of each of its ranks, which end together.
pub(super) struct Process {
    pid: Pid,
    ended: Option<ExitStatus>,
    pub ranks: Vec<RankStatus>,
}

impl Process {
    /// Starts a process. Its output goes to `log`, and failures of its ranks become messages.
    pub fn start(
        settings: &Settings,
        index: u32,
        stdin: Stdio,
        share: &CpuShare,
        log: &Log,
        sender: &Sender<Message>,
    ) -> io::Result<Process> {
        let local_rank = index * settings.devices;
        let rank = settings.first_rank() + local_rank;
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("train");
        command.env(env::LOCAL_RANK, local_rank.to_string());
        command.env(env::CPU_THREADS, share.threads.to_string());
        command.env(env::PARENT_PID, std::process::id().to_string());
        // The controller compares the channels with its forecast.
        command.envs(nccl::log_variables(|name| std::env::var_os(name).is_some()));
        match &share.cpus {
            Some(cpus) => command.env(env::CPUS, cpus.to_string()),
            None => command.env_remove(env::CPUS),
        };
        if let Some(single_node) = &settings.single_node {
            command.env(env::RENDEZVOUS, &single_node.rendezvous);
            if let Some(path) = single_node.key_path() {
                command.env(env::KEY_FILE, path);
            }
        }
        // Its own process group, so that its descendants can be killed with it.
        command.process_group(0).stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn()?;
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| io::Error::other("the process has no id"))?;
        if let Some(stdout) = child.stdout.take() {
            let (log, failures) = (Arc::clone(log), sender.clone());
            read_lines(format!("out-{rank}"), stdout, sender.clone(), move |line| {
                let failure = lock(&log).stdout(rank, line, Instant::now());
                // The receiver is gone only when the supervisor is about to exit.
                failure.into_iter().for_each(|failure| drop(failures.send(Message::Failed(index as usize, failure))));
            })?;
        }
        if let Some(stderr) = child.stderr.take() {
            let log = Arc::clone(log);
            read_lines(format!("err-{rank}"), stderr, sender.clone(), move |line| {
                lock(&log).stderr(rank, line, Instant::now());
            })?;
        }
        // Reaped by process id, together with all other children.
        drop(child);
        let ranks = (rank..rank + settings.devices).map(|rank| RankStatus { rank, ..RankStatus::default() }).collect();
        Ok(Process { pid, ended: None, ranks })
    }

    pub fn is_running(&self) -> bool {
        self.ended.is_none()
    }

    /// Records the exit status for all its ranks.
    fn set_ended(&mut self, status: ExitStatus) {
        self.ended = Some(status);
        self.ranks.iter_mut().for_each(|rank| rank.ended = Some(status));
    }

    pub fn failed(&self) -> bool {
        self.ended.is_some_and(|status| !status.success())
    }

    /// Records a failure reported by one of its ranks.
    pub fn record_failure(&mut self, failure: Failure) {
        let own = self.ranks.iter().position(|rank| rank.rank == failure.rank).unwrap_or(0);
        self.ranks[own].failure = Some(failure);
    }

    /// The rank that failed if the process failed by itself: the one that reports its own failure,
    /// otherwise the first.
    pub fn failed_rank(&self) -> u32 {
        let own = |rank: &&RankStatus| rank.failure.as_ref().is_some_and(|failure| failure.origin_rank == rank.rank);
        self.ranks.iter().find(own).unwrap_or(&self.ranks[0]).rank
    }

    /// Sends a signal, unless the process has ended.
    pub fn signal(&self, signal: Signal) {
        if self.is_running() {
            // An unreaped child of ours, so the process id cannot have been reused.
            let _ = rustix::process::kill_process(self.pid, signal);
        }
    }

    /// Kills the process and its descendants, unless it has ended.
    pub fn kill(&mut self) {
        if self.is_running() {
            self.ranks.iter_mut().for_each(|rank| rank.killed = true);
            let _ = rustix::process::kill_process_group(self.pid, Signal::KILL);
        }
    }
}

/// Locks even if a reader panicked while holding the lock.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reads a stream line by line on its own thread.
fn read_lines(
    name: String,
    stream: impl Read + Send + 'static,
    sender: Sender<Message>,
    mut each: impl FnMut(&str) + Send + 'static,
) -> io::Result<()> {
    let read = move || {
        let mut reader = BufReader::new(stream);
        let mut line = Vec::new();
        while let Ok(true) = read_line(&mut reader, &mut line) {
            each(String::from_utf8_lossy(&line).trim_end());
        }
        let _ = sender.send(Message::Closed);
    };
    std::thread::Builder::new().name(name).spawn(read).map(drop)
}

/// Reads up to a line feed and keeps at most [`LONGEST_LINE`] bytes. Returns `false` at the end of
/// the stream.
fn read_line(reader: &mut impl BufRead, line: &mut Vec<u8>) -> io::Result<bool> {
    line.clear();
    let kept = reader.by_ref().take(LONGEST_LINE).read_until(b'\n', line)?;
    if kept as u64 == LONGEST_LINE && line.last() != Some(&b'\n') {
        reader.skip_until(b'\n')?;
    }
    Ok(kept > 0)
}

/// Reaps every child that has ended, including orphans. Records how the pod's own processes ended,
/// and returns their indices.
pub(super) fn reap(processes: &mut [Process]) -> Vec<usize> {
    let mut ended = Vec::new();
    while let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) {
        if let Some(index) = processes.iter().position(|process| process.pid == pid && process.is_running()) {
            processes[index].set_ended(ExitStatus::from_raw(status.as_raw()));
            ended.push(index);
        }
    }
    ended
}

/// Kills and reaps all remaining descendants, however far they have detached.
pub(super) fn sweep(processes: &mut [Process]) {
    let deadline = Instant::now() + SWEEP_TIMEOUT;
    loop {
        reap(processes);
        let left = children();
        if left.is_empty() || Instant::now() >= deadline {
            return;
        }
        for pid in left {
            let _ = rustix::process::kill_process(pid, Signal::KILL);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// The children of this process, including our processes that are not reaped yet.
fn children() -> Vec<Pid> {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let texts = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
    let numbers: Vec<i32> =
        texts.flat_map(|text| text.split_whitespace().flat_map(str::parse).collect::<Vec<_>>()).collect();
    numbers.into_iter().filter_map(Pid::from_raw).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_are_truncated_and_the_next_line_is_complete() {
        let long = "x".repeat(LONGEST_LINE as usize + 10);
        let text = format!("{long}\nshort\n\nlast");
        let mut reader = BufReader::new(text.as_bytes());
        let (mut line, mut lengths) = (Vec::new(), Vec::new());
        while read_line(&mut reader, &mut line).unwrap() {
            lengths.push(line.len());
        }
        assert_eq!(lengths, [LONGEST_LINE as usize, 6, 1, 4]);
    }
}
