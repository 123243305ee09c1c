//! Processes that SIGKILL does not end: a thread in an uninterruptible system call, as on a dead
//! NFS mount, or in a frozen cgroup.

use std::fs;
use std::path::Path;
use switchyard_worker_contract::process_stat::ProcessStat;

/// A process that is still there some time after SIGKILL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Survivor {
    /// Its first rank.
    pub rank: u32,
    /// Its name: `rank 1`.
    pub name: String,
    pub pid: u32,
    /// The thread that keeps it, the thread's state and the kernel function that it waits in.
    pub state: String,
}

impl Survivor {
    pub(super) fn of(rank: u32, name: String, pid: u32) -> Survivor {
        let process = Path::new("/proc").join(pid.to_string());
        Survivor { rank, name, pid, state: describe(&process, is_frozen(&process)) }
    }
}

/// Whether the version 1 freezer stops a process. Unlike version 2, it also holds back SIGKILL.
fn is_frozen(process: &Path) -> bool {
    let groups = fs::read_to_string(process.join("cgroup")).unwrap_or_default();
    let group = groups.lines().find_map(|line| line.split_once(":freezer:").map(|(_, path)| path.to_owned()));
    let state = group.map(|path| format!("/sys/fs/cgroup/freezer{path}/freezer.state"));
    state.and_then(|file| fs::read_to_string(file).ok()).is_some_and(|state| state.trim() == "FROZEN")
}

/// Describes the thread that keeps a process; `process` is its directory in `/proc`.
fn describe(process: &Path, is_frozen: bool) -> String {
    let tasks = fs::read_dir(process.join("task")).into_iter().flatten().flatten();
    // SIGKILL has ended all other threads. A main thread that has ended stays as a zombie.
    let threads: Vec<Thread> = tasks.filter_map(|task| Thread::read(&task.path())).collect();
    let alive = |thread: &&Thread| !matches!(thread.state, 'Z' | 'X');
    let stuck = threads.iter().filter(alive).max_by_key(|thread| thread.state == 'D');
    stuck.map_or_else(|| "its memory is being released".to_owned(), |thread| thread.text(is_frozen))
}

struct Thread {
    name: String,
    /// The letter in `/proc/PID/stat`.
    state: char,
    /// Kernel function that it waits in; `None` if unknown.
    waits_in: Option<String>,
}

impl Thread {
    fn read(task: &Path) -> Option<Thread> {
        let text = fs::read_to_string(task.join("stat")).ok()?;
        let ProcessStat { name, state, .. } = ProcessStat::parse(&text)?;
        let function = fs::read_to_string(task.join("wchan")).ok().filter(|name| !name.is_empty() && name != "0");
        Some(Thread { name: name.to_owned(), state, waits_in: function })
    }

    fn text(&self, is_frozen: bool) -> String {
        let state = match self.state {
            _ if is_frozen => "frozen with its cgroup",
            'D' => "in uninterruptible sleep",
            _ => "still running",
        };
        let function = self.waits_in.as_ref().map_or_else(String::new, |name| format!(" in {name}"));
        format!("thread `{}` is {state} (state {}{function})", self.name, self.state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process directory with threads: name, state, kernel function.
    fn process(threads: &[(&str, char, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (id, (name, state, function)) in threads.iter().enumerate() {
            let task = folder.path().join(format!("task/{id}"));
            fs::create_dir_all(&task).unwrap();
            fs::write(task.join("stat"), format!("{id} ({name}) {state} 1 1 1 0 -1")).unwrap();
            fs::write(task.join("wchan"), function).unwrap();
        }
        folder
    }

    #[test]
    fn the_thread_that_keeps_a_killed_process_is_named() {
        for (threads, is_frozen, expected) in [
            (
                &[("worker", 'Z', "0"), ("a) (b", 'R', ""), ("reader", 'D', "rpc_wait_bit")][..],
                false,
                "thread `reader` is in uninterruptible sleep (state D in rpc_wait_bit)",
            ),
            (&[("w", 'D', "futex_wait")], true, "thread `w` is frozen with its cgroup (state D in futex_wait)"),
            (&[("w", 'D', "0")], false, "thread `w` is in uninterruptible sleep (state D)"),
            (&[("w", 'Z', "0")], false, "its memory is being released"),
            (&[], false, "its memory is being released"),
        ] {
            assert_eq!(describe(process(threads).path(), is_frozen), expected);
        }
        assert!(!is_frozen(Path::new("/proc/self")));
    }
}
