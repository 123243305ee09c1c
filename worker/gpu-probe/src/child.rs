//! Runs a part in its own process, which may crash or hang.

use crate::outcome::Outcome;
use crate::scratch;
use rustix::process::{Pid, Signal, kill_process_group};
use std::ffi::OsString;
use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// Runs one part of this program, with the arguments of this process.
pub(crate) fn run(part: &str, limit: Duration) -> Outcome {
    let program = match std::env::current_exe() {
        Ok(program) => program,
        Err(error) => return Outcome::failed("current_exe", error.to_string()),
    };
    let given = std::env::args_os().skip(1);
    let mut command = Command::new(program);
    command.args(given.chain(["--part".into(), OsString::from(part)]));
    within(command, limit)
}

/// The outcome that a command prints on its last line, or how it failed.
fn within(mut command: Command, limit: Duration) -> Outcome {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // A group of its own: the worker and PyTorch end with it.
    let mut child = match command.process_group(0).spawn() {
        Ok(child) => child,
        Err(error) => return Outcome::failed("spawn", error.to_string()),
    };
    let output = child.stdout.take().map(collect);
    let errors = child.stderr.take().map(collect);
    let status = wait(&mut child, limit);
    scratch::remove_of(child.id());
    // A grandchild may hold the pipes open; what has arrived until then is enough.
    let text = |pipe: Option<Receiver<Vec<u8>>>| {
        let wait = Duration::from_secs(1);
        let chunks =
            pipe.map(|pipe| std::iter::from_fn(move || pipe.recv_timeout(wait).ok()).flatten().collect::<Vec<u8>>());
        String::from_utf8_lossy(&chunks.unwrap_or_default()).into_owned()
    };
    let (output, errors) = (text(output), text(errors));
    match status {
        Ok(Some(status)) => {
            let line = output.lines().rev().find_map(|line| serde_json::from_str(line).ok());
            line.unwrap_or_else(|| ended(status, &errors))
        }
        Ok(None) => Outcome::failed("time limit", format!("not done after {} s: ended", limit.as_secs_f64())),
        Err(error) => Outcome::failed("wait", error.to_string()),
    }
}

/// Reads a pipe to its end on a thread, so that a part with much output does not block.
fn collect(mut pipe: impl Read + Send + 'static) -> Receiver<Vec<u8>> {
    let (send, receive) = channel();
    std::thread::spawn(move || {
        let mut chunk = [0; 4096];
        while let Ok(bytes @ 1..) = pipe.read(&mut chunk) {
            if send.send(chunk[..bytes].to_vec()).is_err() {
                return;
            }
        }
    });
    receive
}

/// How the process ended; `None` if it was killed at the limit.
fn wait(child: &mut Child, limit: Duration) -> std::io::Result<Option<ExitStatus>> {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if start.elapsed() > limit {
            kill_process_group(Pid::from_child(child), Signal::KILL)?;
            // A process that waits for a device inside the kernel cannot even be killed: it is not waited for.
            std::thread::sleep(Duration::from_millis(100));
            child.try_wait()?;
            return Ok(None);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A process that ended without an outcome.
fn ended(status: ExitStatus, errors: &str) -> Outcome {
    let last: Vec<&str> = errors.lines().rev().filter(|line| !line.trim().is_empty()).take(5).collect();
    let last = last.into_iter().rev().collect::<Vec<_>>().join("; ");
    let (call, code) = match (status.signal(), status.code()) {
        (Some(signal), _) => ("signal", Some(signal)),
        (None, code) => ("exit status", code),
    };
    Outcome::Failed { call: call.to_string(), code: code.map(i64::from), text: last, figures: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, limit: u64) -> Outcome {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        within(command, Duration::from_millis(limit))
    }

    #[test]
    fn the_last_outcome_of_a_noisy_part_counts() {
        let outcome = shell(r#"echo library speaks; echo '{"status":"Ok","figures":{"a":1}}'; echo bye"#, 5000);
        assert_eq!(outcome, Outcome::Ok { figures: serde_json::json!({"a": 1}) });
    }

    #[test]
    fn a_part_that_hangs_is_ended() {
        let start = Instant::now();
        let outcome = shell("sleep 60", 200);
        assert!(matches!(&outcome, Outcome::Failed { call, .. } if call == "time limit"), "{outcome:?}");
        assert!(start.elapsed() < Duration::from_secs(10));
    }

    #[test]
    fn what_it_started_ends_with_it() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("pid");
        shell(&format!("sleep 600 & echo $! > {}; wait", file.display()), 2000);
        let pid = std::fs::read_to_string(file).unwrap();
        let state = || std::fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
        // It is gone, or a zombie that nobody has asked for yet.
        let is_over = || state().is_empty() || state().contains(") Z ");
        while !is_over() {
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn a_part_that_crashes_says_by_what() {
        let outcome = shell("echo broken library >&2; kill -SEGV $$", 5000);
        assert_eq!(
            outcome,
            Outcome::Failed { call: "signal".into(), code: Some(11), text: "broken library".into(), figures: None }
        );
        let outcome = shell("exit 3", 5000);
        assert_eq!(
            outcome,
            Outcome::Failed { call: "exit status".into(), code: Some(3), text: String::new(), figures: None }
        );
    }
}
