//! Becomes the program of a pod.

use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};
use std::convert::Infallible;
use std::os::unix::process::CommandExt;
use std::process::Command;
use switchyard_worker_contract::env::PARENT_PID;

/// Replaces this process by the program in the first word, with the others as its arguments. The
/// kernel kills it when its launcher ends: programs of other frameworks do not request that
/// themselves.
///
/// # Errors
/// The launcher has ended, or the program cannot be started.
pub fn exec(words: &[String]) -> Result<Infallible, String> {
    let [program, arguments @ ..] = words else { return Err("got no program".into()) };
    let launcher = std::env::var(PARENT_PID).ok().and_then(|text| text.parse::<i32>().ok()).and_then(Pid::from_raw);
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|error| format!("cannot follow the launcher: {error}"))?;
    // It may have ended before that.
    if launcher.is_none() || getppid() != launcher {
        return Err(format!("{program}: not started, because its launcher is gone"));
    }
    let error = Command::new(program).args(arguments).env_remove(PARENT_PID).exec();
    Err(format!("cannot start {program}: {error}"))
}
