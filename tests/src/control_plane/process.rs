//! Long-running third-party processes. A thread that lives as long as this process starts them, and
//! they end with it.

use crate::until;
use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;
use switchyard_worker_contract::process_stat::ProcessStat;

type SpawnRequest = (Command, mpsc::Sender<std::io::Result<Child>>);

/// The kernel kills a child when the *thread* that started it ends, and test threads end early.
/// Therefore a single thread starts all children.
fn spawner() -> &'static Mutex<mpsc::Sender<SpawnRequest>> {
    static SPAWNER: OnceLock<Mutex<mpsc::Sender<SpawnRequest>>> = OnceLock::new();
    SPAWNER.get_or_init(|| {
        let (requests, received) = mpsc::channel::<SpawnRequest>();
        std::thread::spawn(move || {
            for (mut command, reply) in received {
                let _ = reply.send(command.spawn());
            }
        });
        Mutex::new(requests)
    })
}

/// A logged process, killed on drop.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    /// Log file with standard output and error.
    pub log: PathBuf,
    name: String,
}

impl Daemon {
    /// Starts a program. The kernel kills it when this process ends for any reason.
    ///
    /// # Errors
    /// The program cannot be started.
    pub fn start(program: &Path, arguments: &[String], environment: &[(&str, String)], log: &Path) -> Result<Daemon> {
        let output = File::options().create(true).append(true).open(log).with_context(|| log.display().to_string())?;
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--"]).arg(program).args(arguments);
        command.envs(environment.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let (reply, replies) = mpsc::channel();
        let requests = spawner().lock().unwrap_or_else(PoisonError::into_inner).clone();
        requests.send((command, reply)).ok().context("the spawning thread has ended")?;
        let child = replies.recv()?.with_context(|| format!("cannot start {name} (setpriv is part of util-linux)"))?;
        Ok(Daemon { child, log: log.to_path_buf(), name })
    }

    /// Process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Checks that the process is still running.
    ///
    /// # Errors
    /// It has ended; the error contains the end of its log.
    pub fn ensure_running(&mut self) -> Result<()> {
        let Some(status) = self.child.try_wait()? else { return Ok(()) };
        bail!("{} ended: {status}\n{}", self.name, self.tail());
    }

    /// Waits until `condition` holds while the process runs.
    ///
    /// # Errors
    /// The process has ended, or `condition` failed or did not hold in time. The error contains the
    /// end of the log.
    pub fn until(&mut self, what: &str, timeout: Duration, condition: impl Fn() -> Result<bool>) -> Result<()> {
        let seen = until(what, timeout, || {
            self.ensure_running()?;
            condition()
        });
        seen.with_context(|| self.tail()).map(drop)
    }

    /// Returns the end of the log.
    pub fn tail(&self) -> String {
        let text = std::fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text[text.len().saturating_sub(4000)..]).into_owned();
        format!("{}:\n{text}", self.log.display())
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        if let Some(pid) = i32::try_from(self.pid()).ok().and_then(Pid::from_raw) {
            let _ = kill_process(pid, signal);
        }
    }

    /// Kills the process and waits until it has ended.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Waits until the process exits. Returns its exit code, or `None` if a signal ended it or it
    /// is still running after this time.
    pub fn wait(&mut self, timeout: Duration) -> Option<i32> {
        let deadline = std::time::Instant::now() + timeout;
        while std::time::Instant::now() < deadline {
            match self.child.try_wait() {
                Ok(Some(status)) => return status.code(),
                _ => std::thread::sleep(Duration::from_millis(10)),
            }
        }
        None
    }

    /// CPU seconds so far and current resident memory in bytes.
    pub fn usage(&self) -> Usage {
        Usage::of(self.pid())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Resource usage of a process.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Usage {
    /// CPU time so far, seconds.
    pub cpu_seconds: f64,
    /// Resident memory, bytes.
    pub rss_bytes: u64,
}

impl Usage {
    /// Reads `/proc/PID`; zero if the process has ended.
    pub fn of(pid: u32) -> Usage {
        let read = |name: &str| std::fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default();
        let ticks = ProcessStat::parse(&read("stat")).and_then(|stat| stat.cpu_ticks()).unwrap_or(0);
        let pages: u64 = read("statm").split_whitespace().nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0);
        Usage {
            cpu_seconds: ticks as f64 / rustix::param::clock_ticks_per_second() as f64,
            rss_bytes: pages * rustix::param::page_size() as u64,
        }
    }
}
