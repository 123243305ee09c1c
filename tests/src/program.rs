//! Runs one of our programs with a deadline.

use rustix::process::{Pid, Signal, kill_process};
use std::fs::File;
use std::io::{Seek, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Environment variable that marks every process a test starts.
pub(crate) const MARK: &str = "SYTEST_SCENE";

/// A program to start.
#[derive(Debug)]
pub struct Program {
    command: Command,
    folder: PathBuf,
    input: Option<Vec<u8>>,
}

/// A running program.
#[derive(Debug)]
pub struct Running {
    child: Child,
    start: Instant,
    stdout: File,
    stderr: File,
    name: String,
}

/// A program that has ended.
#[derive(Debug, Clone)]
pub struct Ended {
    /// Exit code; `None` if a signal ended it.
    pub code: Option<i32>,
    /// Signal that ended it, if any.
    pub signal: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
    /// Duration from start to end.
    pub time: Duration,
}

impl Program {
    /// Creates a command that runs `program` with these arguments in `folder`.
    pub fn new<A: AsRef<str>>(program: &Path, folder: &Path, arguments: impl IntoIterator<Item = A>) -> Self {
        let mut command = Command::new(program);
        command.args(arguments.into_iter().map(|argument| argument.as_ref().to_string())).current_dir(folder);
        for (name, _) in std::env::vars_os() {
            // Settings of the test's environment must not affect the program.
            if name.to_string_lossy().starts_with("SWITCHYARD_") {
                command.env_remove(name);
            }
        }
        command.env("NO_COLOR", "1").env(MARK, folder);
        Program { command, folder: folder.to_path_buf(), input: None }
    }

    /// Sets an environment variable.
    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.command.env(name, value);
        self
    }

    /// Sets the program's standard input, which is empty by default.
    #[must_use]
    pub fn input(mut self, input: impl Into<Vec<u8>>) -> Self {
        self.input = Some(input.into());
        self
    }

    /// Starts the program.
    ///
    /// # Panics
    /// The program cannot be started.
    pub fn start(mut self) -> Running {
        // Files instead of pipes, because a process that outlives the program would keep a pipe
        // open and block the test.
        let file = || tempfile::tempfile().expect("a temporary file");
        let (stdout, stderr) = (file(), file());
        let copy = |file: &File| Stdio::from(file.try_clone().expect("a second descriptor"));
        let stdin = self.input.take().map_or_else(Stdio::null, |input| {
            let mut stdin = file();
            stdin.write_all(&input).and_then(|()| stdin.rewind()).expect("a temporary file takes the input");
            Stdio::from(stdin)
        });
        self.command.stdin(stdin).stdout(copy(&stdout)).stderr(copy(&stderr));
        let name = format!("{:?} in {}", self.command, self.folder.display());
        let child = self.command.spawn().unwrap_or_else(|error| panic!("cannot start {name}: {error}"));
        Running { child, start: Instant::now(), stdout, stderr, name }
    }

    /// Starts the program and waits until it ends.
    ///
    /// # Panics
    /// The program cannot be started, or does not end within `timeout`; then it is killed.
    pub fn run(self, timeout: Duration) -> Ended {
        self.start().wait(timeout)
    }
}

impl Running {
    /// Process ID.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal.
    ///
    /// # Panics
    /// The signal cannot be sent.
    pub fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.pid()).ok().and_then(Pid::from_raw).expect("invariant: a process id fits");
        kill_process(pid, signal).unwrap_or_else(|error| panic!("cannot signal {}: {error}", self.name));
    }

    /// Returns standard output and standard error so far.
    pub fn output(&self) -> (String, String) {
        (text(&self.stdout), text(&self.stderr))
    }

    /// Waits until the program has printed `word` on either stream.
    ///
    /// # Panics
    /// The program ends, or `timeout` passes, before that.
    pub fn wait_for(&mut self, word: &str, timeout: Duration) {
        let start = Instant::now();
        loop {
            let (stdout, stderr) = self.output();
            if stdout.contains(word) || stderr.contains(word) {
                return;
            }
            let ended = self.child.try_wait().is_ok_and(|status| status.is_some());
            if ended || start.elapsed() > timeout {
                let _ = self.child.kill();
                panic!("{}: no `{word}` within {timeout:?} (ended: {ended})\n{stdout}\n{stderr}", self.name);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits until the program ends.
    ///
    /// # Panics
    /// The program does not end within `timeout` from now; then it is killed.
    pub fn wait(mut self, timeout: Duration) -> Ended {
        let from = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("invariant: it is our child") {
                return self.ended(status);
            }
            if from.elapsed() > timeout {
                let _ = self.child.kill();
                let _ = self.child.wait();
                let (stdout, stderr) = self.output();
                panic!("{} did not end within {timeout:?}\nstdout: {stdout}\nstderr: {stderr}", self.name);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn ended(&self, status: ExitStatus) -> Ended {
        let (stdout, stderr) = self.output();
        Ended { code: status.code(), signal: status.signal(), stdout, stderr, time: self.start.elapsed() }
    }
}

/// Reads a file that the program is still writing. Reading at an offset leaves the shared file
/// position unchanged.
fn text(file: &File) -> String {
    use std::os::unix::fs::FileExt;
    let mut bytes = vec![0; file.metadata().map_or(0, |metadata| metadata.len() as usize)];
    let read = file.read_at(&mut bytes, 0).unwrap_or(0);
    String::from_utf8_lossy(&bytes[..read]).into_owned()
}
