//! The lock of a checkpoint directory: two runs that save into one directory would overwrite each
//! other's shards.
//!
//! The lock is a file that names its owner. It is created exclusively, which is atomic on network
//! file systems too; `flock` is local to a machine on some of them. The owner writes it again every
//! [`RENEWAL`], and it expires after [`LEASE`] without that. Ages are differences between two times
//! of the file server, so the clocks of the machines do not matter.
//!
//! A lock is taken over at once if its owner is dead on this machine, if it has expired, or if it
//! belongs to an earlier attempt of the same job on another machine. An owner that finds another
//! one in its place stops saving.

use crate::error::CheckpointError;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use switchyard_worker_contract::process_stat::ProcessStat;

/// A lock that was not renewed for this long has expired.
pub const LEASE: Duration = Duration::from_secs(30);
/// Time between two renewals.
pub const RENEWAL: Duration = Duration::from_secs(5);
/// Time between two looks at a lock whose owner is on another machine.
const POLL: Duration = Duration::from_millis(500);

const FILE: &str = ".lock";

/// The process that holds a lock; the content of the file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Owner {
    job: String,
    attempt: u32,
    host: String,
    pid: u32,
    /// Start of the process in clock ticks after boot: numbers of processes are reused.
    started: u64,
    /// The boot and the PID namespace in which `pid` is a process.
    processes: String,
    /// Seconds since 1970, by the owner's clock.
    since: u64,
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Owner { job, attempt, host, pid, since, .. } = self;
        let seconds = now().saturating_sub(*since);
        write!(f, "attempt {attempt} of job `{job}` (host {host}, pid {pid}, for {seconds} s)")
    }
}

impl Owner {
    fn this_process(job: &str, attempt: u32) -> Owner {
        let pid = std::process::id();
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let namespace = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
        Owner {
            job: job.to_owned(),
            attempt,
            host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            pid,
            started: start_of(pid).unwrap_or_default(),
            processes: format!("{} {}", boot.trim(), namespace.display()),
            since: now(),
        }
    }

    /// Whether the process still runs; `None` if that cannot be seen from `viewer`.
    fn is_alive(&self, viewer: &Owner) -> Option<bool> {
        (self.processes == viewer.processes).then(|| start_of(self.pid) == Some(self.started))
    }

    /// Whether `next` replaces this owner without waiting.
    fn gives_way_to(&self, next: &Owner) -> bool {
        match self.is_alive(next) {
            Some(alive) => !alive,
            None => self.job == next.job && self.attempt < next.attempt,
        }
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// Start of a process in clock ticks after boot; `None` if it has ended.
fn start_of(pid: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let stat = ProcessStat::parse(&text)?;
    stat.start_ticks().filter(|_| !stat.has_ended())
}

/// A held lock. Dropping it releases it.
#[derive(Debug)]
pub struct Lock {
    file: PathBuf,
    text: String,
    /// The owner that has taken over.
    successor: Arc<OnceLock<String>>,
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Lock {
    /// Locks a directory for an attempt of a job, and creates the directory if it is missing. Waits
    /// while it is unknown whether the owner on another machine is alive, at most about [`LEASE`];
    /// `waiting` is called with a description before each wait.
    ///
    /// # Errors
    /// Another run holds the lock ([`CheckpointError::Locked`]), or the file system fails.
    pub fn acquire(
        directory: &Path,
        job: &str,
        attempt: u32,
        mut waiting: impl FnMut(&str),
    ) -> Result<Lock, CheckpointError> {
        fs::create_dir_all(directory).map_err(CheckpointError::io("create it", directory))?;
        let (file, owner) = (directory.join(FILE), Owner::this_process(job, attempt));
        let text = serde_json::to_string(&owner).expect("invariant: an owner serialises");
        let mut renewed = None;
        loop {
            match create(&file, &text) {
                Ok(open) => return Lock::hold(file, text, open, RENEWAL),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(CheckpointError::io("create it", &file)(error)),
            }
            let found = Found::read(&file).map_err(CheckpointError::io("read it", &file))?;
            let Some(found) = found else { continue };
            let is_past = found.owner.as_ref().is_some_and(|found| found.gives_way_to(&owner));
            if is_past || found.age(&file).map_err(CheckpointError::io("read its age", &file))? >= LEASE {
                take_over(&file, &found).map_err(CheckpointError::io("take it over", &file))?;
                continue;
            }
            let is_alive = found.owner.as_ref().is_some_and(|found| found.is_alive(&owner) == Some(true));
            if is_alive || renewed.is_some_and(|at| at != found.renewed) {
                return Err(CheckpointError::Locked { file, owner: found.name() });
            }
            renewed = Some(found.renewed);
            waiting(&format!("{}: in use by {}; waiting for a sign of it", file.display(), found.name()));
            std::thread::sleep(POLL);
        }
    }

    fn hold(file: PathBuf, text: String, open: File, pause: Duration) -> Result<Lock, CheckpointError> {
        let (stop, stopped) = channel();
        let successor = Arc::default();
        let thread = {
            let (file, text, successor) = (file.clone(), text.clone(), Arc::clone(&successor));
            let renewal = move || renew(&file, &text, open, &successor, (&stopped, pause));
            std::thread::Builder::new().name("lock".into()).spawn(renewal)
        };
        let thread = thread.map_err(CheckpointError::io("start the thread that renews it", &file))?;
        Ok(Lock { file, text, successor, stop: Some(stop), thread: Some(thread) })
    }

    /// The content of the file, which other machines see if they share the directory.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Whether a directory holds the lock with this text. Looks at the directory first: a network
    /// file system then asks its server, where it would otherwise answer from a cache.
    pub fn is_in(directory: &Path, text: &str) -> bool {
        let listed = fs::read_dir(directory).is_ok_and(|entries| entries.count() > 0);
        listed && fs::read_to_string(directory.join(FILE)).is_ok_and(|found| found == text)
    }

    /// Fails if another run has taken over, for example because this process was suspended for
    /// longer than [`LEASE`].
    ///
    /// # Errors
    /// [`CheckpointError::Locked`] with the new owner.
    pub fn check(&self) -> Result<(), CheckpointError> {
        match self.successor.get() {
            Some(owner) => Err(CheckpointError::Locked { file: self.file.clone(), owner: owner.clone() }),
            None => Ok(()),
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        if fs::read_to_string(&self.file).is_ok_and(|text| text == self.text) {
            // If this fails, the lock expires.
            let _ = fs::remove_file(&self.file);
        }
    }
}

/// Creates the file exclusively.
fn create(file: &Path, text: &str) -> io::Result<File> {
    let mut open = OpenOptions::new().write(true).create_new(true).open(file)?;
    let written = open.write_all(text.as_bytes()).and_then(|()| open.sync_all());
    written.inspect_err(|_| drop(fs::remove_file(file)))?;
    Ok(open)
}

/// Writes the file again after every pause, until `stopped` closes or another owner is in it.
fn renew(
    file: &Path,
    text: &str,
    mut open: File,
    successor: &OnceLock<String>,
    (stopped, pause): (&Receiver<()>, Duration),
) {
    while stopped.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
        match Found::read(file) {
            Ok(Some(found)) if found.text == text => {
                // A handle of a file that was moved away cannot touch the next owner's lock.
                let _ = open.write_all_at(text.as_bytes(), 0).and_then(|()| open.sync_data());
            }
            Ok(Some(found)) => return drop(successor.set(found.name())),
            // The directory was removed, perhaps with all checkpoints.
            Ok(None) => open = create(file, text).unwrap_or(open),
            // The file system fails at the moment.
            Err(_) => {}
        }
    }
}

/// An existing lock file.
struct Found {
    text: String,
    /// `None` while its owner is writing it, or if it died while doing so.
    owner: Option<Owner>,
    /// Its last renewal, by the file server's clock.
    renewed: SystemTime,
}

impl Found {
    /// Reads a lock file; `None` if there is none.
    fn read(file: &Path) -> io::Result<Option<Found>> {
        let read = || -> io::Result<Found> {
            let open = File::open(file)?;
            let text = io::read_to_string(&open)?;
            let owner = serde_json::from_str(&text).ok();
            Ok(Found { owner, text, renewed: open.metadata()?.modified()? })
        };
        match read() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            found => found.map(Some),
        }
    }

    fn name(&self) -> String {
        self.owner.as_ref().map_or_else(|| "an unknown process".to_owned(), ToString::to_string)
    }

    /// Time since the last renewal, by the file server's clock, which a new file shows.
    fn age(&self, file: &Path) -> io::Result<Duration> {
        let probe = own_name(file, "time");
        let modified = || {
            let mut open = File::create(&probe)?;
            open.write_all(b"time")?;
            open.sync_all()?;
            open.metadata()?.modified()
        };
        let modified = modified();
        let _ = fs::remove_file(&probe);
        Ok(modified?.duration_since(self.renewed).unwrap_or_default())
    }
}

/// A name next to the lock that no other process uses.
fn own_name(file: &Path, kind: &str) -> PathBuf {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    file.with_file_name(format!("{FILE}.{kind}.{host}.{}", std::process::id()))
}

/// Removes the lock that was found, but no other: a third process may have replaced it meanwhile.
fn take_over(file: &Path, found: &Found) -> io::Result<()> {
    let aside = own_name(file, "old");
    match fs::rename(file, &aside) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        renamed => renamed?,
    }
    if fs::read_to_string(&aside)? != found.text {
        // Unlike a rename, a link cannot replace a file. If it fails, that owner notices its loss.
        let _ = fs::hard_link(&aside, file);
    }
    fs::remove_file(&aside)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command};

    const JOB: &str = "gpt";

    fn acquire(directory: &Path, attempt: u32) -> Result<Lock, CheckpointError> {
        Lock::acquire(directory, JOB, attempt, |text| panic!("{text}"))
    }

    /// Writes the lock of another process that was renewed `age` ago.
    fn leave(directory: &Path, change: impl FnOnce(&mut Owner), age: Duration) {
        let mut owner = Owner::this_process(JOB, 1);
        change(&mut owner);
        // A renewal that reads half a lock would not find its owner.
        let whole = directory.join("whole");
        let file = File::create(&whole).unwrap();
        (&file).write_all(&serde_json::to_vec(&owner).unwrap()).unwrap();
        file.set_modified(SystemTime::now() - age).unwrap();
        fs::rename(whole, directory.join(FILE)).unwrap();
    }

    fn elsewhere(owner: &mut Owner) {
        (owner.host, owner.processes) = ("node-b".into(), "another boot".into());
    }

    /// A process that lives until it is killed.
    fn process() -> Child {
        Command::new("sleep").arg("1000").spawn().unwrap()
    }

    fn is_empty(directory: &Path) -> bool {
        fs::read_dir(directory).unwrap().next().is_none()
    }

    #[test]
    fn a_second_run_is_refused_and_the_owner_named() {
        let folder = tempfile::tempdir().unwrap();
        let directory = folder.path().join("new/checkpoints");
        let first = acquire(&directory, 3).unwrap();
        for attempt in [1, 3, 4] {
            let text = acquire(&directory, attempt).unwrap_err().to_string();
            let pid = std::process::id();
            for words in
                [".lock: in use by attempt 3 of job `gpt` (host ", &format!(", pid {pid}, for "), "set another"]
            {
                assert!(text.contains(words), "{words}: {text}");
            }
        }
        first.check().unwrap();
        drop(first);
        assert!(is_empty(&directory));
        drop(acquire(&directory, 1).unwrap());
    }

    #[test]
    fn the_lock_of_a_dead_process_is_taken_over_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let mut child = process();
        let pid = child.id();
        let started = start_of(pid).unwrap();
        leave(folder.path(), |owner| (owner.pid, owner.started) = (pid, started), Duration::ZERO);
        assert!(acquire(folder.path(), 1).is_err(), "it lives");
        child.kill().unwrap();
        // Not yet waited for: a zombie does not save.
        while start_of(pid).is_some() {
            std::thread::yield_now();
        }
        drop(acquire(folder.path(), 1).unwrap());
        child.wait().unwrap();
        // Another process has its number.
        leave(folder.path(), |owner| owner.started += 1, Duration::ZERO);
        drop(acquire(folder.path(), 1).unwrap());
        assert!(is_empty(folder.path()));
    }

    #[test]
    fn a_later_attempt_of_the_job_takes_over_at_once_from_another_machine() {
        let folder = tempfile::tempdir().unwrap();
        leave(folder.path(), elsewhere, Duration::ZERO);
        drop(acquire(folder.path(), 2).unwrap());
        assert!(is_empty(folder.path()));
    }

    #[test]
    fn an_expired_lock_is_taken_over_and_one_that_is_renewed_is_not() {
        let folder = tempfile::tempdir().unwrap();
        leave(folder.path(), elsewhere, 2 * LEASE);
        drop(acquire(folder.path(), 1).unwrap());
        // A lock that its owner never finished to write expires as well.
        File::create(folder.path().join(FILE)).unwrap().set_modified(SystemTime::now() - LEASE).unwrap();
        drop(acquire(folder.path(), 1).unwrap());
        leave(folder.path(), elsewhere, LEASE / 2);
        let renewal = |text: &str| {
            assert!(text.contains("node-b"), "{text}");
            leave(folder.path(), elsewhere, Duration::ZERO);
        };
        let refused = Lock::acquire(folder.path(), JOB, 1, renewal).unwrap_err();
        assert!(matches!(refused, CheckpointError::Locked { .. }), "{refused}");
    }

    #[test]
    fn an_owner_that_was_replaced_notices_it_and_leaves_the_lock_alone() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join(FILE);
        let open = create(&file, "ours").unwrap();
        let lock = Lock::hold(file.clone(), "ours".into(), open, Duration::from_millis(1)).unwrap();
        fs::remove_file(&file).unwrap();
        // The directory may have been removed with its checkpoints: that is no loss.
        while !file.exists() {
            std::thread::yield_now();
        }
        lock.check().unwrap();
        leave(folder.path(), elsewhere, Duration::ZERO);
        while lock.check().is_ok() {
            std::thread::yield_now();
        }
        assert!(lock.check().unwrap_err().to_string().contains("host node-b"));
        drop(lock);
        assert!(file.exists());
    }

    #[test]
    fn a_take_over_spares_a_lock_that_is_newer_than_the_one_it_found() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join(FILE);
        leave(folder.path(), elsewhere, LEASE);
        let found = Found::read(&file).unwrap().unwrap();
        leave(folder.path(), |owner| owner.attempt = 7, Duration::ZERO);
        take_over(&file, &found).unwrap();
        let kept = Found::read(&file).unwrap().unwrap();
        assert_eq!(kept.owner.map(|owner| owner.attempt), Some(7));
    }
}
