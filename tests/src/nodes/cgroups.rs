//! Creates and removes cgroups: the same path in every v1 hierarchy, or in the v2 hierarchy.

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Returns the mount points of the hierarchies.
///
/// # Errors
/// The mount table cannot be read.
pub(super) fn hierarchies() -> Result<Vec<PathBuf>> {
    let table = fs::read_to_string("/proc/self/mountinfo").context("/proc/self/mountinfo")?;
    // proc(5): the mount point is the fifth field, the type the first one after the dash.
    let mounted = table.lines().filter_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        let point = left.split(' ').nth(4)?;
        right.starts_with("cgroup").then(|| PathBuf::from(point))
    });
    let mut found: Vec<PathBuf> = mounted.collect();
    found.sort();
    found.dedup();
    Ok(found)
}

/// Creates a group in all hierarchies, prepared for child groups that contain processes.
///
/// # Errors
/// The kernel refuses.
pub(super) fn make(group: &str) -> Result<()> {
    for root in hierarchies()? {
        let mut folder = root.clone();
        for part in Path::new(group) {
            // v2: a group has only the controllers that its parent delegates. Write them one by
            // one, because a write either enables all of them or none (cgroups(7)).
            if let Ok(controllers) = fs::read_to_string(folder.join("cgroup.controllers")) {
                for controller in controllers.split_whitespace() {
                    let _ = fs::write(folder.join("cgroup.subtree_control"), format!("+{controller}"));
                }
            }
            let above = folder.clone();
            folder.push(part);
            match fs::create_dir(&folder) {
                Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                    return Err(error).with_context(|| folder.display().to_string());
                }
                _ => {}
            }
            // v1: a new cpuset is empty, and no process can run in it (cpuset(7)).
            for file in ["cpuset.cpus", "cpuset.mems"] {
                let own = fs::read_to_string(folder.join(file));
                if own.is_ok_and(|text| text.trim().is_empty())
                    && let Ok(text) = fs::read_to_string(above.join(file))
                {
                    let _ = fs::write(folder.join(file), text);
                }
            }
        }
    }
    Ok(())
}

/// Returns the files through which a process joins a group.
///
/// # Errors
/// See [`hierarchies`].
pub(super) fn entries(group: &str) -> Result<Vec<PathBuf>> {
    Ok(hierarchies()?.into_iter().map(|root| root.join(group).join("cgroup.procs")).collect())
}

/// Returns the existing folders of a group.
///
/// # Errors
/// See [`hierarchies`].
pub(super) fn folders(group: &str) -> Result<Vec<PathBuf>> {
    Ok(hierarchies()?.into_iter().map(|root| root.join(group)).filter(|folder| folder.is_dir()).collect())
}

/// Kills all processes in a group and its descendants, and removes the groups.
///
/// # Errors
/// A group still exists after `timeout`.
pub(super) fn remove(group: &str, timeout: Duration) -> Result<()> {
    let deadline = Instant::now() + timeout;
    loop {
        let mut error = None;
        for folder in folders(group)? {
            error = error.or(remove_folder(&folder).err());
        }
        let Some(error) = error else { return Ok(()) };
        ensure!(Instant::now() < deadline, "{error:#}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn remove_folder(folder: &Path) -> Result<()> {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_folder(&entry.path())?;
        }
    }
    let processes = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
    for pid in processes.lines().filter_map(|line| Pid::from_raw(line.parse().ok()?)) {
        let _ = kill_process(pid, Signal::KILL);
    }
    match fs::remove_dir(folder) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error).with_context(|| folder.display().to_string()),
        _ => Ok(()),
    }
}
