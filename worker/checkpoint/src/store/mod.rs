//! Checkpoints in a directory, one directory per job.
//!
//! **Which is newest** goes by attempt, then by step ([`CheckpointId`]). **An old attempt cannot harm a newer one**: its number is in the
//! names of all that it writes, it refuses to go on as soon as it sees a higher one, and it deletes nothing of a higher one. For this the
//! number must never come again: a job that is started anew in an old directory takes [`Store::next_attempt`].

mod prune;
mod read;
mod write;

use crate::disk::{Kind, ReadFile, Vfs};
use crate::error::CheckpointError;
use crate::format::{CheckpointId, Fault, MANIFEST_FILE, MANIFEST_LIMIT, Manifest, decode_header, shard_file};
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

pub(crate) use write::write_atomically;

/// Where tensors come from.
pub trait TensorSource {
    /// Some numbers of a tensor, row-major. Only those of the rank's own pieces are asked for: a copy need not hold more.
    fn numbers(&self, name: &str, range: Range<usize>) -> Option<&[f32]>;
}

/// Where tensors go.
pub trait TensorSink {
    /// Room for all numbers of a tensor, row-major. `None`: nobody wants it.
    fn tensor(&mut self, name: &str) -> Option<&mut [f32]>;
}

impl TensorSource for BTreeMap<String, Vec<f32>> {
    fn numbers(&self, name: &str, range: Range<usize>) -> Option<&[f32]> {
        self.get(name)?.get(range)
    }
}

impl TensorSink for BTreeMap<String, Vec<f32>> {
    fn tensor(&mut self, name: &str) -> Option<&mut [f32]> {
        self.get_mut(name).map(Vec::as_mut_slice)
    }
}

/// The checkpoints in a directory.
#[derive(Clone, Copy)]
pub struct Store<'a> {
    vfs: &'a dyn Vfs,
    directory: &'a Path,
}

/// A checkpoint whose manifest is valid and whose shards are there with the right lengths. Their content has not been looked at.
#[derive(Debug, Clone, PartialEq)]
pub struct Checkpoint {
    directory: PathBuf,
    manifest: Manifest,
}

impl Checkpoint {
    /// Its own directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// What it says of itself.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }
}

/// What is in the directory of a checkpoint.
#[derive(Debug)]
pub enum State {
    /// All of it, as far as lengths tell.
    Complete(Box<Checkpoint>),
    /// No manifest: it is being written, or never was finished.
    Incomplete,
    /// Something that must not be used.
    Damaged(CheckpointError),
}

/// A checkpoint, or what is left of one.
#[derive(Debug)]
pub struct Found {
    /// Which.
    pub id: CheckpointId,
    /// Its state.
    pub state: State,
}

/// The newest checkpoint that can be used.
#[derive(Debug)]
pub struct Latest {
    /// It; `None` if there is none.
    pub checkpoint: Option<Checkpoint>,
    /// Newer ones that cannot be used, newest first, and why.
    pub passed: Vec<(CheckpointId, CheckpointError)>,
}

impl<'a> Store<'a> {
    /// The checkpoints in a directory, which need not exist before something is written.
    pub fn new(vfs: &'a dyn Vfs, directory: &'a Path) -> Store<'a> {
        Store { vfs, directory }
    }

    /// All checkpoints, newest first. Lengths are compared, contents are not: see [`Store::verify`].
    ///
    /// # Errors
    /// The directory cannot be read. What is wrong with a checkpoint is in its state.
    pub fn list(&self) -> Result<Vec<Found>, CheckpointError> {
        let state = |id| match self.open(id) {
            Ok(checkpoint) => State::Complete(Box::new(checkpoint)),
            Err(CheckpointError::Incomplete { .. }) => State::Incomplete,
            Err(error) => State::Damaged(error),
        };
        Ok(self.ids()?.into_iter().map(|id| Found { id, state: state(id) }).collect())
    }

    /// The newest checkpoint of a job all of whose bytes are as they were written. One rank looks for it and tells the others, which
    /// [`Store::open`] it: else each could find another one.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn latest(&self, job: &str) -> Result<Latest, CheckpointError> {
        let mut passed = Vec::new();
        for id in self.ids()? {
            let usable = self.open(id).and_then(|checkpoint| {
                let got = checkpoint.manifest.about().job.as_str();
                if got != job {
                    let fault = Fault::new("job", format!("`{got}`"), format!("`{job}`"));
                    return Err(CheckpointError::Refused { file: checkpoint.directory.join(MANIFEST_FILE), fault });
                }
                self.verify(&checkpoint).into_iter().next().map_or(Ok(checkpoint), Err)
            });
            match usable {
                Ok(checkpoint) => return Ok(Latest { checkpoint: Some(checkpoint), passed }),
                Err(error) => passed.push((id, error)),
            }
        }
        Ok(Latest { checkpoint: None, passed })
    }

    /// Reads the manifest of a checkpoint and compares the lengths of its shards.
    ///
    /// # Errors
    /// There is no manifest, it is not valid, or not that of this checkpoint; a shard is missing or too short or long.
    pub fn open(&self, id: CheckpointId) -> Result<Checkpoint, CheckpointError> {
        let directory = self.path(id);
        expect_kind(self.vfs, &directory, Kind::Directory)?;
        let file = directory.join(MANIFEST_FILE);
        if let Err(error) = self.vfs.kind(&file)
            && error.kind() == io::ErrorKind::NotFound
        {
            return Err(CheckpointError::Incomplete { directory });
        }
        let opened = open_file(self.vfs, &file)?;
        let length = opened.length();
        if length > MANIFEST_LIMIT {
            let fault = Fault::new("length", length, format!("at most {MANIFEST_LIMIT} bytes"));
            return Err(CheckpointError::Refused { file, fault });
        }
        let mut bytes = vec![0; length as usize];
        opened.read_exact_at(&mut bytes, 0).map_err(CheckpointError::io("read it", &file))?;
        let manifest = Manifest::decode(&bytes).map_err(CheckpointError::refused(&file))?;
        if manifest.about().id != id {
            let fault = Fault::new("manifest", format!("one {}", manifest.about().id), format!("one {id}"));
            return Err(CheckpointError::Refused { file, fault });
        }
        for (rank, shard) in manifest.shards().iter().enumerate() {
            open_shard(self.vfs, &directory.join(shard_file(rank)), shard.bytes)?;
        }
        Ok(Checkpoint { directory, manifest })
    }

    /// The number under which a process that starts now writes: that with which it was launched, or one more than what has been written
    /// if that is higher. One rank asks and tells the others.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn next_attempt(&self, launched: u32) -> Result<u32, CheckpointError> {
        let written = self.ids()?.first().map_or(0, |newest| newest.attempt.saturating_add(1));
        Ok(launched.max(written))
    }

    /// The directory of a checkpoint.
    fn path(&self, id: CheckpointId) -> PathBuf {
        self.directory.join(id.directory())
    }

    /// All that have a directory, newest first.
    fn ids(&self) -> Result<Vec<CheckpointId>, CheckpointError> {
        let names = match self.vfs.list(self.directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            names => names.map_err(CheckpointError::io("list it", self.directory))?,
        };
        let mut ids: Vec<CheckpointId> = names.iter().filter_map(|name| CheckpointId::parse(name)).collect();
        ids.sort_unstable_by(|a, b| b.cmp(a));
        Ok(ids)
    }

    /// Refuses to go on beside a newer attempt.
    fn check_attempt(&self, own: u32) -> Result<(), CheckpointError> {
        match self.ids()?.first() {
            Some(newest) if newest.attempt > own => {
                let directory = self.directory.to_path_buf();
                Err(CheckpointError::Superseded { directory, own, newest: newest.attempt })
            }
            _ => Ok(()),
        }
    }

    /// The job that an unfinished checkpoint belongs to, as far as one of its shards says.
    fn job_of_shards(&self, id: CheckpointId) -> Option<String> {
        let directory = self.path(id);
        let names = self.vfs.list(&directory).ok()?;
        names.iter().filter(|name| name.ends_with(".safetensors")).find_map(|name| {
            let path = directory.join(name);
            let file = open_file(self.vfs, &path).ok()?;
            let json = read::header(file.as_ref(), &path).ok()?;
            decode_header(&json).ok().map(|header| header.job().to_string()).filter(|job| !job.is_empty())
        })
    }
}

fn expect_kind(vfs: &dyn Vfs, path: &Path, expected: Kind) -> Result<(), CheckpointError> {
    let got = vfs.kind(path).map_err(CheckpointError::io("find it", path))?;
    if got == expected {
        return Ok(());
    }
    let fault = Fault::new("kind", got.name(), expected.name());
    Err(CheckpointError::Refused { file: path.to_path_buf(), fault })
}

/// Opens a regular file.
fn open_file(vfs: &dyn Vfs, path: &Path) -> Result<Box<dyn ReadFile>, CheckpointError> {
    expect_kind(vfs, path, Kind::File)?;
    vfs.open(path).map_err(CheckpointError::io("open it", path))
}

/// Opens a shard that has to have this length.
fn open_shard(vfs: &dyn Vfs, path: &Path, length: u64) -> Result<Box<dyn ReadFile>, CheckpointError> {
    let file = open_file(vfs, path)?;
    if file.length() != length {
        let fault = Fault::new("length", format!("{} bytes", file.length()), format!("{length} bytes"));
        return Err(CheckpointError::Refused { file: path.to_path_buf(), fault });
    }
    Ok(file)
}
