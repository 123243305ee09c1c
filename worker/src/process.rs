//! What a rank does to its own process before anything else: cores, parent, signals.

use crate::comm::{Aborter, Cause};
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, OnceLock};
use switchyard_worker_contract::exit::Exit;
use switchyard_worker_contract::{CpuList, env};

/// Pins this process to the CPUs of `SWITCHYARD_CPUS`. Threads started later inherit it.
///
/// # Errors
/// The variable is not a CPU list, or the kernel refuses it.
pub fn pin() -> Result<(), String> {
    let Some(text) = variable(env::CPUS) else { return Ok(()) };
    let list: CpuList = text.parse().map_err(|error| format!("{}: {error}", env::CPUS))?;
    run_on(&list).map_err(|error| format!("{}: {error}", env::CPUS))
}

/// Pins this thread to some CPUs; an empty list changes nothing. Threads started later inherit it.
///
/// # Errors
/// The kernel refuses them.
pub fn run_on(list: &CpuList) -> Result<(), String> {
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

/// The CPUs that this process may run on; empty if the kernel does not say.
pub fn allowed() -> CpuList {
    let set = sched_getaffinity(None).unwrap_or_default();
    CpuList::new((0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).map(|cpu| cpu as u32))
}

/// Compute threads: the number in the configuration; if that is 0, the number from the launcher; otherwise all CPUs.
///
/// # Errors
/// The variable is not a number.
pub fn threads(configured: u32) -> Result<u32, String> {
    if configured > 0 {
        return Ok(configured);
    }
    let Some(text) = variable(env::CPU_THREADS) else { return Ok((allowed().len() as u32).max(1)) };
    let number = text.parse::<u32>().ok().filter(|threads| *threads > 0);
    number.ok_or_else(|| format!("{}: got `{text}`; expected a number from 1 up", env::CPU_THREADS))
}

/// Makes the kernel end this process together with its launcher, and checks once that the launcher still exists.
///
/// # Errors
/// The launcher is already gone.
pub fn follow_parent() -> Result<(), String> {
    let Some(text) = variable(env::PARENT_PID) else { return Ok(()) };
    let parent = text.parse::<i32>().ok().and_then(Pid::from_raw);
    let Some(parent) = parent else {
        return Err(format!("{}: got `{text}`; expected a process id", env::PARENT_PID));
    };
    // SIGKILL: without the launcher there is nobody to report to.
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|error| format!("cannot follow the launcher: {error}"))?;
    if getppid() == Some(parent) { Ok(()) } else { Err(format!("the launcher (pid {text}) is gone")) }
}

/// Signals that this process has received.
#[derive(Default)]
pub struct Stopping {
    /// Of any rank of this process: one ends the group.
    aborter: OnceLock<Aborter>,
    signal: AtomicI32,
}

impl Stopping {
    /// A rank of this process has joined its group.
    pub fn joined(&self, aborter: Aborter) {
        let _ = self.aborter.set(aborter);
    }

    /// The signal that asked to stop, or 0.
    pub fn signal(&self) -> &AtomicI32 {
        &self.signal
    }
}

/// Ends the group when this process is asked to stop; before the group exists, ends the process. `saves`: the first
/// signal is only recorded, so that the ranks save and stop by themselves.
///
/// # Errors
/// Signals cannot be handled.
pub fn stop_on_signal(rank: u32, saves: bool) -> std::io::Result<Arc<Stopping>> {
    let stopping: Arc<Stopping> = Arc::default();
    let shared = Arc::clone(&stopping);
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
    Ok(stopping)
}

/// Ends this process at once. What is registered for its end does not run: that of a library whose GPU hangs may wait for
/// the GPU. Nothing that was written is lost, since standard output is flushed by each event.
#[allow(unsafe_code)]
pub fn end(exit: Exit) -> ! {
    unsafe extern "C" {
        fn _exit(code: i32) -> !;
    }
    // SAFETY: takes a number, and does not return.
    unsafe { _exit(i32::from(exit.code())) }
}

/// A variable of the environment that is set and not empty.
pub fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}
