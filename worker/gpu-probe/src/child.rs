//! Runs a part in its own process, which may crash or hang.

use crate::outcome::Outcome;
use crate::scratch;
use rustix::process::{Pid, Signal, kill_process_group};
use std::ffi::OsString;
use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};
use switchyard_worker_contract::env;

/// The `call` of a part that was killed at its time limit.
pub(crate) const TIME_LIMIT: &str = "time limit";

/// Runs one part in a child process of this program, passing on this process's arguments. `cache`:
/// the folder for kernels.
pub(crate) fn run(part: &str, limit: Duration, cache: &Path) -> Outcome {
    let program = match std::env::current_exe() {
        Ok(program) => program,
        Err(error) => return Outcome::failed("current_exe", error.to_string()),
    };
    let given = std::env::args_os().skip(1);
    let mut command = Command::new(program);
    command.args(given.chain(["--part".into(), OsString::from(part)])).env(env::GPU_CACHE, cache);
    run_command(command, limit)
}

/// Runs a command; returns the outcome that it prints on its last line, or how it failed.
fn run_command(mut command: Command, limit: Duration) -> Outcome {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // Its own process group, so that the worker and PyTorch are killed with it.
    let mut child = match command.process_group(0).spawn() {
        Ok(child) => child,
        Err(error) => return Outcome::failed("spawn", error.to_string()),
    };
    let output = child.stdout.take().map(collect);
    let errors = child.stderr.take().map(collect);
    let status = wait(&mut child, limit);
    scratch::remove(child.id());
    // A grandchild may still hold the pipes open; use what has arrived so far.
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
            line.unwrap_or_else(|| crashed(status, &errors))
        }
        Ok(None) => Outcome::failed(TIME_LIMIT, format!("killed after {} s", limit.as_secs_f64())),
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

/// Waits for the process; `None` if it was killed at the time limit.
fn wait(child: &mut Child, limit: Duration) -> std::io::Result<Option<ExitStatus>> {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if start.elapsed() > limit {
            kill_process_group(Pid::from_child(child), Signal::KILL)?;
            // A process stuck on a device inside the kernel cannot even be killed, so do not wait
            // for it.
            std::thread::sleep(Duration::from_millis(100));
            child.try_wait()?;
            return Ok(None);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The outcome of a process that exited without reporting one.
fn crashed(status: ExitStatus, errors: &str) -> Outcome {
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
    use switchyard_worker_contract::process_stat::ProcessStat;

    fn shell(script: &str, limit: u64) -> Outcome {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        run_command(command, Duration::from_millis(limit))
    }

    #[test]
    fn takes_the_last_outcome_of_a_noisy_part() {
        let outcome = shell(r#"echo library output; echo '{"status":"Ok","figures":{"a":1}}'; echo bye"#, 600_000);
        assert_eq!(outcome, Outcome::Ok { figures: serde_json::json!({"a": 1}) });
    }

    #[test]
    fn a_hung_part_is_killed() {
        let outcome = shell("sleep 3600", 200);
        assert!(matches!(&outcome, Outcome::Failed { call, .. } if call == TIME_LIMIT), "{outcome:?}");
    }

    #[test]
    fn its_children_are_killed_too() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("pid");
        shell(&format!("sleep 600 & echo $! > {}; wait", file.display()), 2000);
        let pid = std::fs::read_to_string(file).unwrap();
        let stat = || std::fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
        // It is gone, or a zombie that has not been reaped yet.
        let is_dead = || ProcessStat::parse(&stat()).is_none_or(|stat| stat.has_ended());
        while !is_dead() {
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn a_crash_reports_signal_and_stderr() {
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
