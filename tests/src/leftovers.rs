//! Finds leftovers of a run: processes, and the sockets and shared memory that they keep alive.
//!
//! Abstract sockets, memfds and mappings end with the last process that holds them. Therefore every
//! leftover belongs to a process, identified by the test's folder in its environment or command
//! line.

use crate::program::MARK;
use rustix::process::{Pid, Signal, kill_process};
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Prefix of the names of our abstract sockets and memfds.
const PREFIX: &str = "switchyard-";

/// A process that should have ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leftover {
    /// Process ID.
    pub pid: u32,
    /// Command line.
    pub command: String,
    /// Our sockets and shared memory that the process holds.
    pub held_resources: Vec<String>,
}

impl Leftover {
    /// Kills the process.
    pub fn kill(&self) {
        if let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) {
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}

/// Returns live processes of the test with this folder. Zombies, which only wait for their parent,
/// are not included.
pub fn leftovers(folder: &Path) -> Vec<Leftover> {
    let mark = [MARK.as_bytes(), b"=", folder.as_os_str().as_bytes()].concat();
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        // Unreadable if it has ended or belongs to another user; then it is not ours.
        let read = |name: &str| fs::read(entry.path().join(name)).unwrap_or_default();
        let (environment, command) = (read("environ"), read("cmdline"));
        let is_marked = environment.split(|byte| *byte == 0).any(|variable| variable == mark);
        if pid == std::process::id() || !(is_marked || contains(&command, folder.as_os_str().as_bytes())) {
            continue;
        }
        let command = String::from_utf8_lossy(&command).replace('\0', " ").trim_end().to_string();
        found.push(Leftover { pid, command, held_resources: held_resources(&entry.path()) });
    }
    found
}

/// Our sockets and memfds held by a process.
fn held_resources(process: &Path) -> Vec<String> {
    let mut found = BTreeSet::new();
    let sockets = fs::read_to_string(process.join("net/unix")).unwrap_or_default();
    for descriptor in fs::read_dir(process.join("fd")).into_iter().flatten().flatten() {
        let Ok(target) = fs::read_link(descriptor.path()) else { continue };
        let target = target.display().to_string();
        if let Some(inode) = target.strip_prefix("socket:[").and_then(|rest| rest.strip_suffix(']')) {
            found.extend(socket_name(&sockets, inode));
        } else if target.contains(&format!("memfd:{PREFIX}")) {
            found.insert(target);
        }
    }
    found.extend(mappings(&fs::read_to_string(process.join("maps")).unwrap_or_default()));
    found.into_iter().collect()
}

/// Our memfds in the text of `/proc/PID/maps`.
fn mappings(table: &str) -> Vec<String> {
    let mapped = table.lines().filter_map(|line| line.split_once("/memfd:"));
    mapped.filter(|(_, name)| name.starts_with(PREFIX)).map(|(_, name)| format!("mapping of {name}")).collect()
}

/// Finds the name of our abstract socket with this inode in the text of `/proc/net/unix`.
fn socket_name(table: &str, inode: &str) -> Option<String> {
    table.lines().find_map(|line| {
        let columns: Vec<&str> = line.split_whitespace().collect();
        let name = columns.get(7)?.strip_prefix('@')?;
        (columns.get(6) == Some(&inode) && name.starts_with(PREFIX)).then(|| format!("socket @{name}"))
    })
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|window| window == part)
}

#[cfg(test)]
mod tests {
    use super::{held_resources, mappings};
    use rustix::fs::MemfdFlags;
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixListener};
    use std::path::Path;

    #[test]
    fn sockets_and_shared_memory_are_found() {
        let name = format!("switchyard-leftover-{}", std::process::id());
        assert_eq!(held_resources(Path::new("/proc/self")), Vec::<String>::new());
        let _socket = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        let _memory = rustix::fs::memfd_create("switchyard-buckets", MemfdFlags::CLOEXEC).unwrap();
        let found = held_resources(Path::new("/proc/self"));
        assert!(found.contains(&format!("socket @{name}")), "{found:?}");
        assert!(found.iter().any(|held| held.contains("memfd:switchyard-buckets")), "{found:?}");
    }

    #[test]
    fn our_mappings_are_found() {
        let table = "7f00-7f10 rw-s 00000000 00:01 5 /memfd:switchyard-buckets (deleted)\n7f20-7f30 rw-s 00000000 00:01 6 /memfd:other\n";
        assert_eq!(mappings(table), ["mapping of switchyard-buckets (deleted)"]);
    }
}
