//! Long-running processes of others: started by a thread that lives as long as this process, ended with it.

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

type Order = (Command, mpsc::Sender<std::io::Result<Child>>);

/// The kernel ends a child when the *thread* that started it ends, and threads of tests end early. So one thread starts them all.
fn starter() -> &'static Mutex<mpsc::Sender<Order>> {
    static STARTER: OnceLock<Mutex<mpsc::Sender<Order>>> = OnceLock::new();
    STARTER.get_or_init(|| {
        let (orders, received) = mpsc::channel::<Order>();
        std::thread::spawn(move || {
            for (mut command, answer) in received {
                let _ = answer.send(command.spawn());
            }
        });
        Mutex::new(orders)
    })
}

/// A process with a log, ended on drop.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    /// Its standard output and error.
    pub log: PathBuf,
    name: String,
}

impl Daemon {
    /// Starts a program; the kernel kills it when this process ends, however it ends.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(program: &Path, arguments: &[String], environment: &[(&str, String)], log: &Path) -> Result<Daemon> {
        let output = File::options().create(true).append(true).open(log).with_context(|| log.display().to_string())?;
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--"]).arg(program).args(arguments);
        command.envs(environment.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let (answer, answered) = mpsc::channel();
        let orders = starter().lock().unwrap_or_else(PoisonError::into_inner).clone();
        orders.send((command, answer)).ok().context("the starting thread is gone")?;
        let child = answered.recv()?.with_context(|| format!("cannot start {name} (setpriv is part of util-linux)"))?;
        Ok(Daemon { child, log: log.to_path_buf(), name })
    }

    /// Process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Fails with the end of its log if it has ended.
    ///
    /// # Errors
    /// It has ended.
    pub fn must_run(&mut self) -> Result<()> {
        let Some(status) = self.child.try_wait()? else { return Ok(()) };
        bail!("{} ended: {status}\n{}", self.name, self.tail());
    }

    /// The end of its log.
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

    /// Kills it and waits for its end.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Waits for its end by itself. Answers its exit code, or `None` when a signal ended it or it still runs.
    pub fn wait(&mut self, patience: Duration) -> Option<i32> {
        let give_up = std::time::Instant::now() + patience;
        while std::time::Instant::now() < give_up {
            match self.child.try_wait() {
                Ok(Some(status)) => return status.code(),
                _ => std::thread::sleep(Duration::from_millis(10)),
            }
        }
        None
    }

    /// CPU seconds and resident memory in bytes, so far and now.
    pub fn usage(&self) -> Usage {
        Usage::of(self.pid())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.kill();
    }
}

/// What a process uses.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Usage {
    /// CPU time so far, seconds.
    pub cpu_seconds: f64,
    /// Resident memory, bytes.
    pub rss_bytes: u64,
}

impl Usage {
    /// Reads `/proc/PID`; zero when it is gone.
    pub fn of(pid: u32) -> Usage {
        let read = |name: &str| std::fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default();
        let stat = read("stat");
        // After the name in parentheses, which may contain anything; fields 14 and 15 of proc(5), in ticks of 10 ms.
        let fields: Vec<u64> = stat
            .rsplit_once(')')
            .map(|(_, rest)| rest.split_whitespace().map(|field| field.parse().unwrap_or(0)).collect())
            .unwrap_or_default();
        let ticks = fields.get(11).unwrap_or(&0) + fields.get(12).unwrap_or(&0);
        let pages: u64 = read("statm").split_whitespace().nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0);
        Usage {
            cpu_seconds: ticks as f64 / rustix::param::clock_ticks_per_second() as f64,
            rss_bytes: pages * rustix::param::page_size() as u64,
        }
    }
}
