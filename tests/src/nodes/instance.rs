//! Identity of a cluster of real nodes: a number that no other running cluster has, and the names
//! derived from it.
//!
//! The owner holds a lock on its number, which the kernel releases however the owner ends.
//! Therefore an unlocked number has no owner, and everything that carries it can be removed.

use super::cgroups;
use crate::{TIMEOUT, until};
use anyhow::{Context, Result, bail};
use std::fs::{self, File, TryLockError};
use std::net::Ipv4Addr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Folder of all clusters on this machine. It is fixed, so that a later cluster finds the leftovers
/// of a killed one.
const BASE: &str = "/var/lib/switchyard-nodes";
/// Maximum number of concurrent clusters; each has a /16 of addresses.
const MAX_CLUSTERS: u8 = 16;
/// Second byte of cluster 0's addresses.
const FIRST_NETWORK: u8 = 224;

/// A cluster number, locked until drop, which also removes everything that carries it.
#[derive(Debug)]
pub(super) struct Instance {
    number: u8,
    _lock: File,
}

impl Instance {
    /// Removes leftovers of killed owners, and locks the lowest number whose addresses are free.
    ///
    /// # Errors
    /// All numbers are taken, or a leftover cannot be removed.
    pub(super) fn take() -> Result<Instance> {
        clean_all()?;
        for number in 0..MAX_CLUSTERS {
            if let Some(lock) = lock(number)? {
                let instance = Instance { number, _lock: lock };
                // Another route uses these addresses. Dropping the value releases the number.
                if routes(number)?.is_empty() {
                    fs::create_dir_all(instance.folder())?;
                    return Ok(instance);
                }
            }
        }
        bail!(
            "{MAX_CLUSTERS} clusters of real nodes run here, or their addresses (10.{FIRST_NETWORK}.0.0 on) are taken"
        )
    }

    /// Cluster number.
    pub(super) fn number(&self) -> u8 {
        self.number
    }

    /// Folder of the cluster's files.
    pub(super) fn folder(&self) -> PathBuf {
        folder(self.number)
    }

    /// Name of the cluster's cgroups.
    pub(super) fn group(&self) -> String {
        name(self.number)
    }

    /// Name of the cluster's network interface on this machine.
    pub(super) fn interface(&self) -> String {
        interface(self.number)
    }

    /// Returns an address of the cluster, given its last two bytes.
    pub(super) fn address(&self, third: u8, fourth: u8) -> Ipv4Addr {
        Ipv4Addr::new(10, FIRST_NETWORK + self.number, third, fourth)
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        if let Err(error) = clean(self.number) {
            eprintln!("{}: {error:#}", name(self.number));
        }
    }
}

fn name(number: u8) -> String {
    format!("switchyard-nodes-{number}")
}

fn folder(number: u8) -> PathBuf {
    Path::new(BASE).join(number.to_string())
}

fn interface(number: u8) -> String {
    format!("switchyard{number}")
}

fn lock_file(number: u8) -> PathBuf {
    Path::new(BASE).join(format!("{number}.lock"))
}

/// Locks a number, unless another process holds it.
fn lock(number: u8) -> Result<Option<File>> {
    let path = lock_file(number);
    fs::create_dir_all(BASE).with_context(|| BASE.to_string())?;
    loop {
        let file = File::options().create(true).append(true).open(&path).with_context(|| path.display().to_string())?;
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(error)) => return Err(error).with_context(|| path.display().to_string()),
            // The last owner removed the file between the two calls.
            Ok(()) if file.metadata()?.nlink() == 0 => {}
            Ok(()) => return Ok(Some(file)),
        }
    }
}

/// Removes leftovers of killed owners, but nothing of running clusters. Returns the names of the
/// cleaned clusters.
///
/// # Errors
/// A leftover cannot be removed.
pub fn clean_all() -> Result<Vec<String>> {
    let mut cleaned = Vec::new();
    for number in 0..MAX_CLUSTERS {
        let exists = lock_file(number).exists() || folder(number).exists();
        if (exists || !cgroups::folders(&name(number))?.is_empty())
            && let Some(_lock) = lock(number)?
        {
            clean(number)?;
            cleaned.push(name(number));
        }
    }
    Ok(cleaned)
}

/// Removes everything that carries a number. The caller must hold its lock.
fn clean(number: u8) -> Result<()> {
    // Processes started by the owner end with it; processes of pods end with their node's init.
    cgroups::remove(&name(number), TIMEOUT)?;
    let is_clean = || Ok(processes(number).is_empty() && existing_interface(number).is_none());
    if let Err(error) = until("clean", TIMEOUT, is_clean) {
        return Err(error.context(leftovers_of(number)?.join("; ")));
    }
    let path = folder(number);
    match fs::remove_dir_all(&path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(error).with_context(|| path.display().to_string());
        }
        _ => {}
    }
    fs::remove_file(lock_file(number))?;
    // Fails if another cluster exists.
    let _ = fs::remove_dir(BASE);
    Ok(())
}

/// Lists everything on this machine that carries a number: processes, interfaces, routes, mounts,
/// cgroups and files.
///
/// # Errors
/// The system cannot be inspected.
pub fn leftovers_of(number: u8) -> Result<Vec<String>> {
    let mut found = processes(number);
    found.extend(existing_interface(number));
    found.extend(routes(number)?);
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let own = folder(number).display().to_string();
    found.extend(mounts.lines().filter(|line| line.contains(&own)).map(|line| format!("mount {line}")));
    found.extend(cgroups::folders(&name(number))?.iter().map(|path| format!("cgroup {}", path.display())));
    let files = [folder(number), lock_file(number)];
    found.extend(files.iter().filter(|path| path.exists()).map(|path| format!("file {}", path.display())));
    Ok(found)
}

/// Processes in the cluster's cgroups, or with its folder in their command line.
fn processes(number: u8) -> Vec<String> {
    let (own, group) = (format!("{}/", folder(number).display()), format!("/{}/", name(number)));
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let read =
            |name: &str| String::from_utf8_lossy(&fs::read(entry.path().join(name)).unwrap_or_default()).into_owned();
        let command = read("cmdline").replace('\0', " ");
        // Zombies have an empty command line.
        let is_ours = command.contains(&own) || read("cgroup").contains(&group);
        if pid != std::process::id() && is_ours && !command.is_empty() {
            found.push(format!("process {pid} {}", command.trim_end()));
        }
    }
    found
}

/// Name of the cluster's interface, if it exists.
fn existing_interface(number: u8) -> Option<String> {
    let name = interface(number);
    Path::new("/sys/class/net").join(&name).exists().then(|| format!("interface {name}"))
}

fn routes(number: u8) -> Result<Vec<String>> {
    let range = format!("10.{}.0.0/16", FIRST_NETWORK + number);
    let output =
        Command::new("ip").args(["-4", "route", "show", "root", &range]).output().context("cannot start ip")?;
    Ok(String::from_utf8_lossy(&output.stdout).lines().map(|line| format!("route {line}")).collect())
}
