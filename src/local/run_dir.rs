//! The directory of a run: configuration, logs, events, status, trained model.
//!
//! ```text
//! RUN_DIR/
//!   plan.yaml        what runs, and the reason of each setting
//!   engine.json      what every rank reads
//!   inspection.json  what the worker found in the data and the model before the start
//!   machine.json     the GPUTopology of this machine
//!   logs/attempt-1/rank-0.log   standard error and free text of a rank
//!   logs/attempt-1/server-0.log the same of a parameter server in a process of its own
//!   events.jsonl     every event of every rank with its time
//!   status.yaml      the TrainJob with its status, replaced as a whole
//!   model.safetensors
//!   report.html, report.json    how it went, made of the files above and of record/
//! ```

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// A directory that belongs to one run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunDir {
    path: PathBuf,
}

/// An error of the run directory.
#[derive(Debug, thiserror::Error)]
pub enum RunDirError {
    /// It cannot be created.
    #[error("cannot make the run directory {}: {source}; choose another with --run-dir", path.display())]
    Create { path: PathBuf, source: io::Error },
    /// It is not empty.
    #[error("the run directory {} is not empty; expected a new or an empty directory", path.display())]
    NotEmpty { path: PathBuf },
    /// A file in it cannot be written.
    #[error("cannot write {}: {source}", path.display())]
    Write { path: PathBuf, source: io::Error },
    /// Its path is not UTF-8.
    #[error("the path of the run directory {} is not valid UTF-8", path.display())]
    NotText { path: PathBuf },
}

impl RunDir {
    /// The directory of a new run: the requested one, or `runs/JOB-xxxx` in the current directory.
    /// Creates nothing.
    pub fn choose(job: &str, requested: Option<&Path>) -> RunDir {
        let path =
            requested.map_or_else(|| Path::new("runs").join(format!("{job}-{}", random_suffix())), PathBuf::from);
        // Absolute, so that a rank finds it from any working directory.
        RunDir { path: std::path::absolute(&path).unwrap_or(path) }
    }

    /// The directory of an earlier run.
    pub fn existing(path: &Path) -> RunDir {
        RunDir { path: std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf()) }
    }

    /// Creates the directory, readable by its owner only.
    ///
    /// # Errors
    /// It exists and is not empty, or cannot be created.
    pub fn create(&self) -> Result<(), RunDirError> {
        let create = |source| RunDirError::Create { path: self.path.clone(), source };
        if self.path.to_str().is_none() {
            return Err(RunDirError::NotText { path: self.path.clone() });
        }
        match fs::read_dir(&self.path) {
            Ok(mut entries) => {
                if entries.next().is_some() {
                    return Err(RunDirError::NotEmpty { path: self.path.clone() });
                }
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                fs::DirBuilder::new().recursive(true).mode(0o755).create(&self.path).map_err(create)?;
            }
            Err(error) => return Err(create(error)),
        }
        // An existing directory is not enough: logs must be writable.
        let probe = self.path.join(".writable");
        File::create(&probe).and_then(|_| fs::remove_file(&probe)).map_err(create)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The path as text, for the plan.
    pub fn text(&self) -> &str {
        self.path.to_str().unwrap_or_default()
    }

    /// The path for display: relative to the current directory if it is inside it.
    pub fn short(&self) -> String {
        let here = std::env::current_dir().unwrap_or_default();
        self.path.strip_prefix(here).unwrap_or(&self.path).display().to_string()
    }

    /// Replaces a file atomically, so no reader sees a partial file.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn replace(&self, name: &str, text: &str) -> Result<(), RunDirError> {
        let path = self.path.join(name);
        let temporary = self.path.join(format!(".{name}.new"));
        let write = || {
            let mut file = File::create(&temporary)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            fs::rename(&temporary, &path)
        };
        write().map_err(|source| {
            let _ = fs::remove_file(&temporary);
            RunDirError::Write { path: path.clone(), source }
        })
    }

    /// Writes the token of an attempt, by default 32 random bytes. Only the owner can read it.
    ///
    /// # Errors
    /// The file exists or cannot be written.
    pub fn write_key(&self, attempt: u32, token: Option<[u8; 32]>) -> Result<PathBuf, RunDirError> {
        let path = self.key_path(attempt);
        let write = || {
            let mut key = token.unwrap_or_default();
            if token.is_none() {
                getrandom::fill(&mut key).map_err(io::Error::other)?;
            }
            OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?.write_all(&key)
        };
        write().map_err(|source| RunDirError::Write { path: path.clone(), source })?;
        Ok(path)
    }

    pub fn remove_key(&self, attempt: u32) {
        let _ = fs::remove_file(self.key_path(attempt));
    }

    fn key_path(&self, attempt: u32) -> PathBuf {
        self.path.join(format!("attempt-{attempt}.key"))
    }

    /// Opens an append-only file: a log, or the events.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub fn open_log(&self, name: &str) -> Result<LogFile, RunDirError> {
        let path = self.path.join(name);
        let open = || {
            if let Some(folder) = path.parent() {
                fs::create_dir_all(folder)?;
            }
            OpenOptions::new().create(true).append(true).open(&path)
        };
        match open() {
            Ok(file) => Ok(LogFile { file, path }),
            Err(source) => Err(RunDirError::Write { path, source }),
        }
    }
}

/// A file to which lines are appended.
#[derive(Debug)]
pub struct LogFile {
    file: File,
    path: PathBuf,
}

impl LogFile {
    /// Appends one line in one write, so that lines of several writers never mix.
    ///
    /// # Errors
    /// The line could not be written, for example because the disk is full.
    pub fn line(&mut self, text: &str) -> Result<(), RunDirError> {
        let mut line = String::with_capacity(text.len() + 1);
        line.push_str(text);
        line.push('\n');
        self.file.write_all(line.as_bytes()).map_err(|source| RunDirError::Write { path: self.path.clone(), source })
    }
}

/// Four hexadecimal digits, so that two runs of one job do not collide.
fn random_suffix() -> String {
    let mut bytes = [0_u8; 2];
    if getrandom::fill(&mut bytes).is_err() {
        // Without random bytes, fall back to the process id.
        bytes = (std::process::id() as u16).to_be_bytes();
    }
    format!("{:02x}{:02x}", bytes[0], bytes[1])
}
