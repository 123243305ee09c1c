//! Which cluster of real nodes this is: a number that no living one has, and what is named after it.
//!
//! The owner holds the lock of its number, and the kernel takes it back however the owner ends. So a lock that can be had
//! belongs to nobody, and what still bears its number may be removed.

use super::cgroups;
use anyhow::{Context, Result, bail};
use std::fs::{self, File, TryLockError};
use std::net::Ipv4Addr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Folder of all clusters of this machine. Fixed, so that the next one finds what a killed one left.
const BASE: &str = "/var/lib/switchyard-nodes";
/// Clusters at a time; each has a /16 of addresses.
const NUMBERS: u8 = 16;
/// Second byte of the addresses of number 0.
const FIRST_NETWORK: u8 = 224;
/// For the kernel to end the processes of a killed owner, and to take their namespaces down.
const PATIENCE: Duration = Duration::from_secs(20);

/// A number, for as long as the value lives; then nothing bears it any more.
#[derive(Debug)]
pub(super) struct Instance {
    number: u8,
    _lock: File,
}

impl Instance {
    /// Removes what killed owners left, and takes the lowest number whose addresses are free.
    ///
    /// # Errors
    /// All are taken, or a leftover cannot be removed.
    pub(super) fn take() -> Result<Instance> {
        clean_all()?;
        for number in 0..NUMBERS {
            if let Some(lock) = lock(number)? {
                let instance = Instance { number, _lock: lock };
                // Somebody else's route into our addresses: dropping the value gives the number back.
                if routes(number)?.is_empty() {
                    fs::create_dir_all(instance.folder())?;
                    return Ok(instance);
                }
            }
        }
        bail!("{NUMBERS} clusters of real nodes run here, or their addresses (10.{FIRST_NETWORK}.0.0 on) are taken")
    }

    /// The number.
    pub(super) fn number(&self) -> u8 {
        self.number
    }

    /// Folder of its files.
    pub(super) fn folder(&self) -> PathBuf {
        folder(self.number)
    }

    /// Name of its cgroups.
    pub(super) fn group(&self) -> String {
        name(self.number)
    }

    /// Its interface on this machine.
    pub(super) fn interface(&self) -> String {
        interface(self.number)
    }

    /// An address of it by its last two bytes.
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

/// The lock of a number, if nobody has it.
fn lock(number: u8) -> Result<Option<File>> {
    let path = lock_file(number);
    fs::create_dir_all(BASE).with_context(|| BASE.to_string())?;
    loop {
        let file = File::options().create(true).append(true).open(&path).with_context(|| path.display().to_string())?;
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(error)) => return Err(error).with_context(|| path.display().to_string()),
            // Its last owner removed it between the two calls.
            Ok(()) if file.metadata()?.nlink() == 0 => {}
            Ok(()) => return Ok(Some(file)),
        }
    }
}

/// Removes what killed owners left, and nothing of a living one. Answers their names.
///
/// # Errors
/// Something cannot be removed.
pub fn clean_all() -> Result<Vec<String>> {
    let mut cleaned = Vec::new();
    if !Path::new(BASE).exists() {
        return Ok(cleaned);
    }
    for number in 0..NUMBERS {
        if (lock_file(number).exists() || folder(number).exists())
            && let Some(_lock) = lock(number)?
        {
            clean(number)?;
            cleaned.push(name(number));
        }
    }
    Ok(cleaned)
}

/// Removes everything of a number whose lock this process has.
fn clean(number: u8) -> Result<()> {
    // The processes that were started by the owner end with it; those of pods with the init of their node.
    let give_up = Instant::now() + PATIENCE;
    cgroups::remove(&name(number), PATIENCE)?;
    while !(processes(number).is_empty() && own_interface(number).is_none()) {
        if Instant::now() > give_up {
            bail!("still there after {} s: {}", PATIENCE.as_secs(), left(number)?.join("; "));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let path = folder(number);
    match fs::remove_dir_all(&path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(error).with_context(|| path.display().to_string());
        }
        _ => {}
    }
    fs::remove_file(lock_file(number))?;
    // Empty unless there is another cluster.
    let _ = fs::remove_dir(BASE);
    Ok(())
}

/// Everything on this machine that bears a number: processes, interfaces, routes, mounts, cgroups, files.
///
/// # Errors
/// The machine cannot be asked.
pub fn left(number: u8) -> Result<Vec<String>> {
    let mut found = processes(number);
    found.extend(own_interface(number));
    found.extend(routes(number)?);
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let own = folder(number).display().to_string();
    found.extend(mounts.lines().filter(|line| line.contains(&own)).map(|line| format!("mount {line}")));
    found.extend(cgroups::folders(&name(number))?.iter().map(|path| format!("cgroup {}", path.display())));
    let files = [folder(number), lock_file(number)];
    found.extend(files.iter().filter(|path| path.exists()).map(|path| format!("file {}", path.display())));
    Ok(found)
}

/// Processes in its cgroups, or with its folder in their command lines.
fn processes(number: u8) -> Vec<String> {
    let (own, group) = (format!("{}/", folder(number).display()), format!("/{}/", name(number)));
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let read =
            |name: &str| String::from_utf8_lossy(&fs::read(entry.path().join(name)).unwrap_or_default()).into_owned();
        let command = read("cmdline").replace('\0', " ");
        // A zombie has no command line.
        let is_ours = command.contains(&own) || read("cgroup").contains(&group);
        if pid != std::process::id() && is_ours && !command.is_empty() {
            found.push(format!("process {pid} {}", command.trim_end()));
        }
    }
    found
}

/// Its interface, if it is there.
fn own_interface(number: u8) -> Option<String> {
    let name = interface(number);
    Path::new("/sys/class/net").join(&name).exists().then(|| format!("interface {name}"))
}

fn routes(number: u8) -> Result<Vec<String>> {
    let range = format!("10.{}.0.0/16", FIRST_NETWORK + number);
    let output =
        Command::new("ip").args(["-4", "route", "show", "root", &range]).output().context("cannot start ip")?;
    Ok(String::from_utf8_lossy(&output.stdout).lines().map(|line| format!("route {line}")).collect())
}
