//! Process set-up of a rank: CPU pinning, parent death signal, signal handling.

use crate::comm::{Aborter, Cause};
use rustix::process::{Pid, Resource, Rlimit, Signal, getppid, getrlimit, set_parent_process_death_signal, setrlimit};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, OnceLock};
use switchyard_worker_contract::exit::Exit;
use switchyard_worker_contract::{CpuList, env};

/// Pins this process to the CPUs in `SWITCHYARD_CPUS`. Threads started later inherit the pinning.
///
/// # Errors
/// The variable is not a CPU list, or the kernel rejects it.
pub fn pin() -> Result<(), String> {
    let Some(text) = variable(env::CPUS) else { return Ok(()) };
    let list: CpuList = text.parse().map_err(|error| format!("{}: {error}", env::CPUS))?;
    pin_thread(&list).map_err(|error| format!("{}: {error}", env::CPUS))
}

/// Pins this thread to CPUs; an empty list changes nothing. Threads started later inherit the
/// pinning.
///
/// # Errors
/// The kernel rejects the list.
pub fn pin_thread(list: &CpuList) -> Result<(), String> {
    if list.is_empty() {
        return Ok(());
    }
    let mut set = CpuSet::new();
    for cpu in list.iter() {
        let index = cpu as usize;
        if index >= CpuSet::MAX_CPU {
            return Err(format!("got CPU {cpu}; expected less than {}", CpuSet::MAX_CPU));
        }
        set.set(index);
    }
    sched_setaffinity(None, &set).map_err(|error| format!("cannot run on CPUs {list}: {error}"))
}

/// CPUs this process can run on; empty if the kernel does not report them.
pub fn allowed_cpus() -> CpuList {
    let set = sched_getaffinity(None).unwrap_or_default();
    CpuList::new((0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).map(|cpu| cpu as u32))
}

/// Compute threads: the configured number; if that is 0, the launcher's; otherwise one per CPU.
///
/// # Errors
/// The variable is not a number.
pub fn threads(configured: u32) -> Result<u32, String> {
    if configured > 0 {
        return Ok(configured);
    }
    let Some(text) = variable(env::CPU_THREADS) else { return Ok((allowed_cpus().len() as u32).max(1)) };
    let number = text.parse::<u32>().ok().filter(|threads| *threads > 0);
    number.ok_or_else(|| format!("{}: got `{text}`; expected a number from 1 up", env::CPU_THREADS))
}

/// Makes the kernel kill this process when its launcher dies, and checks once that the launcher
/// still exists.
///
/// # Errors
/// The launcher has already exited.
pub fn die_with_parent() -> Result<(), String> {
    let Some(text) = variable(env::PARENT_PID) else { return Ok(()) };
    let parent = text.parse::<i32>().ok().and_then(Pid::from_raw);
    let Some(parent) = parent else {
        return Err(format!("{}: got `{text}`; expected a process id", env::PARENT_PID));
    };
    // SIGKILL, because without the launcher no process is left to report to.
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|error| format!("cannot follow the launcher: {error}"))?;
    if getppid() == Some(parent) { Ok(()) } else { Err(format!("the launcher (pid {text}) is gone")) }
}

/// Stop signals of this process.
#[derive(Default)]
pub struct StopSignals {
    /// Of any rank in this process: aborting one ends the group.
    aborter: OnceLock<Aborter>,
    signal: AtomicI32,
}

impl StopSignals {
    /// Sets the aborter once a rank of this process has joined its group.
    pub fn set_aborter(&self, aborter: Aborter) {
        let _ = self.aborter.set(aborter);
    }

    /// The received stop signal, or 0.
    pub fn signal(&self) -> &AtomicI32 {
        &self.signal
    }
}

/// Aborts the group on SIGINT or SIGTERM; before the group exists, exits the process. `saves`: the
/// first signal is only recorded, so that the ranks save a checkpoint and stop by themselves.
///
/// # Errors
/// The signal handler cannot be installed.
pub fn stop_on_signal(rank: u32, saves: bool) -> std::io::Result<Arc<StopSignals>> {
    let stop_signals: Arc<StopSignals> = Arc::default();
    let shared = Arc::clone(&stop_signals);
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        for signal in signals.forever() {
            let first = shared.signal.swap(signal, Ordering::Relaxed) == 0;
            match shared.aborter.get() {
                Some(_) if saves && first => {}
                Some(aborter) => aborter.abort(Cause::stopped(rank, signal)),
                None => {
                    let exit = if signal == SIGINT { Exit::Interrupted } else { Exit::Terminated };
                    std::process::exit(i32::from(exit.code()));
                }
            }
        }
    })?;
    Ok(stop_signals)
}

/// Ends this process at once, without running exit handlers: those of a library whose GPU hangs may
/// wait for the GPU. No output is lost, because each event flushes standard output.
#[allow(unsafe_code)]
pub fn exit_now(exit: Exit) -> ! {
    unsafe extern "C" {
        fn _exit(code: i32) -> !;
    }
    // SAFETY: takes an integer and does not return.
    unsafe { _exit(i32::from(exit.code())) }
}

/// Raises the soft limit of open files to the hard limit. Rank 0 holds a connection of every rank,
/// and the default of 1,024 is only for programs that use `select`.
pub fn raise_open_files() {
    let limit = getrlimit(Resource::Nofile);
    // Every process may do this. If it fails all the same, the old limit stays, and an error that
    // follows from it names it.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// Adds the limit to the text of an error that it has caused (EMFILE); the system's text lacks it.
pub(crate) fn with_open_files(text: String) -> String {
    if !text.contains("(os error 24)") {
        return text;
    }
    let limit = getrlimit(Resource::Nofile).current.map_or("unlimited".to_owned(), |limit| limit.to_string());
    format!("{text}; the limit of this process is {limit} (`ulimit -Hn`, or LimitNOFILE of the container runtime)")
}

/// An environment variable that is set and not empty.
pub fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soft_limit_of_open_files_becomes_the_hard_limit() {
        let limit = getrlimit(Resource::Nofile);
        let lower = limit.maximum.map_or(4096, |maximum| maximum - 1);
        setrlimit(Resource::Nofile, Rlimit { current: Some(lower), ..limit }).unwrap();
        raise_open_files();
        assert_eq!(getrlimit(Resource::Nofile).current, limit.maximum);
        let text = with_open_files(std::io::Error::from(rustix::io::Errno::MFILE).to_string());
        assert!(text.starts_with("Too many open files (os error 24); the limit of this process is "), "{text}");
        assert_eq!(with_open_files("broken pipe (os error 32)".into()), "broken pipe (os error 32)");
    }
}
