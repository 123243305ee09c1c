//! Processes, each with one or more ranks: started, read, reaped, ended.

use super::cores::Share;
use super::output::Output;
use super::settings::Settings;
use super::verdict::Seen;
use rustix::process::{Pid, Signal, WaitOptions};
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use switchyard_worker_contract::env;
use switchyard_worker_contract::event::Failure;

/// Longest line taken from a rank; the rest of a longer one is cut.
const LONGEST_LINE: u64 = 64 * 1024;

/// Time for the remaining processes to disappear at the end.
const SWEEP: Duration = Duration::from_secs(2);

/// Something that happened to this pod.
pub(super) enum Message {
    /// A signal came.
    Signal(i32),
    /// A rank of the process with this index reported a failure.
    Failed(usize, Failure),
    /// A stream of a rank ended.
    Closed,
}

/// The streams of the pod, shared by the threads that read the ranks.
pub(super) type Log = Arc<Mutex<Output<io::Stdout, io::Stderr>>>;

/// A process, and the state of each of its ranks, which end together.
pub(super) struct Process {
    pid: Pid,
    ended: Option<ExitStatus>,
    pub seen: Vec<Seen>,
}

impl Process {
    /// Starts a process. What it prints goes to `log`, and the failures of its ranks become messages.
    pub fn start(
        settings: &Settings,
        index: u32,
        stdin: Stdio,
        share: &Share,
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
        match &share.cpus {
            Some(cpus) => command.env(env::CPUS, cpus.to_string()),
            None => command.env_remove(env::CPUS),
        };
        if let Some(alone) = &settings.alone {
            command.env(env::RENDEZVOUS, &alone.rendezvous);
            if let Some(path) = alone.key_path() {
                command.env(env::KEY_FILE, path);
            }
        }
        // A process group of its own, so that everything that it starts can be ended with it.
        command.process_group(0).stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn()?;
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| io::Error::other("the process has no id"))?;
        if let Some(stdout) = child.stdout.take() {
            let (log, told) = (Arc::clone(log), sender.clone());
            listen(format!("out-{rank}"), stdout, sender.clone(), move |line| {
                let failure = lock(&log).stdout(rank, line, Instant::now());
                // There is no receiver only when the supervisor is about to end.
                failure.into_iter().for_each(|failure| drop(told.send(Message::Failed(index as usize, failure))));
            })?;
        }
        if let Some(stderr) = child.stderr.take() {
            let log = Arc::clone(log);
            listen(format!("err-{rank}"), stderr, sender.clone(), move |line| {
                lock(&log).stderr(rank, line, Instant::now());
            })?;
        }
        // It is reaped with all others, by its process id.
        drop(child);
        let seen = (rank..rank + settings.devices).map(|rank| Seen { rank, ..Seen::default() }).collect();
        Ok(Process { pid, ended: None, seen })
    }

    /// Whether it is still running.
    pub fn runs(&self) -> bool {
        self.ended.is_none()
    }

    /// Records how it ended, for all its ranks.
    fn end(&mut self, status: ExitStatus) {
        self.ended = Some(status);
        self.seen.iter_mut().for_each(|seen| seen.ended = Some(status));
    }

    /// Whether it ended with an error.
    pub fn failed(&self) -> bool {
        self.ended.is_some_and(|status| !status.success())
    }

    /// Records a failure that one of its ranks reported.
    pub fn told(&mut self, failure: Failure) {
        let own = self.seen.iter().position(|seen| seen.rank == failure.rank).unwrap_or(0);
        self.seen[own].failure = Some(failure);
    }

    /// The rank that failed, if the process failed by itself: the one that says so, otherwise the first.
    pub fn failed_rank(&self) -> u32 {
        let own = |seen: &&Seen| seen.failure.as_ref().is_some_and(|failure| failure.origin_rank == seen.rank);
        self.seen.iter().find(own).unwrap_or(&self.seen[0]).rank
    }

    /// Asks it to stop, unless it has ended.
    pub fn signal(&self, signal: Signal) {
        if self.runs() {
            // Our child and not yet reaped, so the number cannot belong to another.
            let _ = rustix::process::kill_process(self.pid, signal);
        }
    }

    /// Ends it and everything that it has started, unless it has ended.
    pub fn kill(&mut self) {
        if self.runs() {
            self.seen.iter_mut().for_each(|seen| seen.killed = true);
            let _ = rustix::process::kill_process_group(self.pid, Signal::KILL);
        }
    }
}

/// Locks even if a reader panicked while it held the lock.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reads a stream line by line on a thread of its own.
fn listen(
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

/// Reads up to a line feed; keeps at most [`LONGEST_LINE`] bytes of it. `false` at the end of the stream.
fn read_line(reader: &mut impl BufRead, line: &mut Vec<u8>) -> io::Result<bool> {
    line.clear();
    let kept = reader.by_ref().take(LONGEST_LINE).read_until(b'\n', line)?;
    if kept as u64 == LONGEST_LINE && line.last() != Some(&b'\n') {
        reader.skip_until(b'\n')?;
    }
    Ok(kept > 0)
}

/// Reaps every child that has ended, including orphans. Records how the pod's own processes ended, and returns their
/// indices.
pub(super) fn reap(processes: &mut [Process]) -> Vec<usize> {
    let mut ended = Vec::new();
    while let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) {
        if let Some(index) = processes.iter().position(|process| process.pid == pid && process.runs()) {
            processes[index].end(ExitStatus::from_raw(status.as_raw()));
            ended.push(index);
        }
    }
    ended
}

/// Ends and reaps whatever is left of what was started here, however far it has detached from its parent.
pub(super) fn sweep(processes: &mut [Process]) {
    let deadline = Instant::now() + SWEEP;
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

/// The children of this process, including processes of ours that were not reaped.
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
    fn lines_are_cut_and_the_next_one_is_whole() {
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
