//! Checkpoints in a directory, one directory per job.
//!
//! **The newest checkpoint** is determined by attempt, then by step ([`CheckpointId`]). **An old
//! attempt cannot harm a newer one**: the names of all files that it writes contain its number, it
//! stops as soon as it sees a higher one, and it deletes nothing of a higher one. Numbers must
//! therefore never be reused: a job that is restarted in an old directory uses
//! [`Store::next_attempt`].

mod prune;
mod read;
mod write;

use crate::disk::{Kind, ReadFile, Vfs};
use crate::error::CheckpointError;
use crate::format::{
    CheckpointId, Fault, MANIFEST_FILE, MANIFEST_LIMIT, Manifest, TensorSpec, decode_header, shard_file,
};
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

pub use read::{Chunk, ChunkReader};
pub(crate) use write::write_atomically;

/// Source of tensors to write.
pub trait TensorSource {
    /// Some elements of a tensor, row-major. Only elements of the rank's own pieces are requested,
    /// so a copy need not hold more.
    fn values(&self, name: &str, range: Range<usize>) -> Option<&[f32]>;
}

/// Destination of restored tensors.
pub trait TensorSink {
    /// Takes elements of a tensor, row-major, from index `from` on; ignores tensors that it does
    /// not want. A tensor arrives in any number of parts, with others in between.
    ///
    /// # Errors
    /// The sink's tensor of this name has another size.
    fn write(&mut self, tensor: &TensorSpec, from: usize, values: &[f32]) -> Result<(), Fault>;
}

impl TensorSource for BTreeMap<String, Vec<f32>> {
    fn values(&self, name: &str, range: Range<usize>) -> Option<&[f32]> {
        self.get(name)?.get(range)
    }
}

impl TensorSink for BTreeMap<String, Vec<f32>> {
    fn write(&mut self, tensor: &TensorSpec, from: usize, values: &[f32]) -> Result<(), Fault> {
        let Some(room) = self.get_mut(&tensor.name) else { return Ok(()) };
        if room.len() != tensor.element_count() {
            let what = format!("tensor `{}` of this run", tensor.name);
            return Err(Fault::new(what, format!("{} numbers", room.len()), tensor.element_count()));
        }
        room[from..][..values.len()].copy_from_slice(values);
        Ok(())
    }
}

/// The checkpoints in a directory.
#[derive(Clone, Copy)]
pub struct Store<'a> {
    vfs: &'a dyn Vfs,
    directory: &'a Path,
}

/// A checkpoint with a valid manifest whose shards exist and have the right lengths. Their contents
/// are unverified.
#[derive(Debug, Clone, PartialEq)]
pub struct Checkpoint {
    directory: PathBuf,
    manifest: Manifest,
}

impl Checkpoint {
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }
}

/// State of a checkpoint's directory.
#[derive(Debug)]
pub enum State {
    /// Complete, judging by file lengths.
    Complete(Box<Checkpoint>),
    /// No manifest: still being written, or abandoned.
    Incomplete,
    /// Unusable.
    Damaged(CheckpointError),
}

/// A checkpoint, or the remains of one.
#[derive(Debug)]
pub struct StoreEntry {
    pub id: CheckpointId,
    pub state: State,
}

/// The newest usable checkpoint.
#[derive(Debug)]
pub struct Latest {
    /// `None` if no checkpoint is usable.
    pub checkpoint: Option<Checkpoint>,
    /// Newer checkpoints that are unusable, newest first, with the reasons.
    pub skipped: Vec<(CheckpointId, CheckpointError)>,
}

impl<'a> Store<'a> {
    /// The directory need not exist until something is written.
    pub fn new(vfs: &'a dyn Vfs, directory: &'a Path) -> Store<'a> {
        Store { vfs, directory }
    }

    /// All checkpoints, newest first. Checks lengths but not contents: see [`Store::verify`].
    ///
    /// # Errors
    /// The directory cannot be read. Problems with a checkpoint are in its state.
    pub fn list(&self) -> Result<Vec<StoreEntry>, CheckpointError> {
        let state = |id| match self.open(id) {
            Ok(checkpoint) => State::Complete(Box::new(checkpoint)),
            Err(CheckpointError::Incomplete { .. }) => State::Incomplete,
            Err(error) => State::Damaged(error),
        };
        Ok(self.ids()?.into_iter().map(|id| StoreEntry { id, state: state(id) }).collect())
    }

    /// The newest checkpoint of a job in which `verify` finds no damage: [`Store::verify`], or
    /// [`Store::verify_share`] on several ranks. One rank finds it and sends its ID to the others;
    /// otherwise each rank could find a different one.
    ///
    /// # Errors
    /// The directory, or a checkpoint, cannot be read now ([`CheckpointError::is_io`]). Skipping
    /// that checkpoint would lose its steps for good, because the next attempt writes newer ones.
    /// Also an error of `verify` itself.
    pub fn latest<E: From<CheckpointError>>(
        &self,
        job: &str,
        mut verify: impl FnMut(&Checkpoint) -> Result<Vec<CheckpointError>, E>,
    ) -> Result<Latest, E> {
        let mut skipped = Vec::new();
        for id in self.ids()? {
            let opened = self.open(id).and_then(|checkpoint| {
                let got = checkpoint.manifest.info().job.as_str();
                if got != job {
                    let fault = Fault::new("job", format!("`{got}`"), format!("`{job}`"));
                    return Err(CheckpointError::Refused { file: checkpoint.directory.join(MANIFEST_FILE), fault });
                }
                Ok(checkpoint)
            });
            let usable = match opened {
                Ok(checkpoint) => verify(&checkpoint)?.into_iter().next().map_or(Ok(checkpoint), Err),
                Err(error) => Err(error),
            };
            match usable {
                Ok(checkpoint) => return Ok(Latest { checkpoint: Some(checkpoint), skipped }),
                Err(error) if error.is_io() => return Err(error.into()),
                Err(error) => skipped.push((id, error)),
            }
        }
        Ok(Latest { checkpoint: None, skipped })
    }

    /// Reads the manifest of a checkpoint and checks the lengths of its shards.
    ///
    /// # Errors
    /// The manifest is missing, invalid, or belongs to another checkpoint; a shard is missing or
    /// has the wrong length.
    pub fn open(&self, id: CheckpointId) -> Result<Checkpoint, CheckpointError> {
        let checkpoint = self.open_manifest(id)?;
        for (rank, shard) in checkpoint.manifest.shards().iter().enumerate() {
            open_shard(self.vfs, &checkpoint.directory.join(shard_file(rank)), shard.bytes)?;
        }
        Ok(checkpoint)
    }

    /// As [`Store::open`], for a rank to which another one has sent the ID: does not look at the
    /// shards.
    ///
    /// # Errors
    /// The manifest is missing, invalid, or belongs to another checkpoint.
    pub fn open_manifest(&self, id: CheckpointId) -> Result<Checkpoint, CheckpointError> {
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
        if manifest.info().id != id {
            let fault = Fault::new("manifest", format!("one {}", manifest.info().id), format!("one {id}"));
            return Err(CheckpointError::Refused { file, fault });
        }
        Ok(Checkpoint { directory, manifest })
    }

    /// The attempt number for a process that starts now: its launch number, or one more than the
    /// highest attempt that has written, whichever is higher. One rank determines it and sends it
    /// to the others.
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

    /// IDs of all checkpoints that have a directory, newest first.
    fn ids(&self) -> Result<Vec<CheckpointId>, CheckpointError> {
        let names = match self.vfs.list(self.directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            names => names.map_err(CheckpointError::io("list it", self.directory))?,
        };
        let mut ids: Vec<CheckpointId> = names.iter().filter_map(|name| CheckpointId::parse(name)).collect();
        ids.sort_unstable_by(|a, b| b.cmp(a));
        Ok(ids)
    }

    /// Fails if there is a newer attempt.
    fn check_attempt(&self, own: u32) -> Result<(), CheckpointError> {
        match self.ids()?.first() {
            Some(newest) if newest.attempt > own => {
                let directory = self.directory.to_path_buf();
                Err(CheckpointError::Superseded { directory, own, newest: newest.attempt })
            }
            _ => Ok(()),
        }
    }

    /// The job that an unfinished checkpoint belongs to, from the first readable shard.
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

fn open_file(vfs: &dyn Vfs, path: &Path) -> Result<Box<dyn ReadFile>, CheckpointError> {
    expect_kind(vfs, path, Kind::File)?;
    vfs.open(path).map_err(CheckpointError::io("open it", path))
}

/// Opens a shard and checks its length.
fn open_shard(vfs: &dyn Vfs, path: &Path, length: u64) -> Result<Box<dyn ReadFile>, CheckpointError> {
    let file = open_file(vfs, path)?;
    if file.length() != length {
        let fault = Fault::new("length", format!("{} bytes", file.length()), format!("{length} bytes"));
        return Err(CheckpointError::Refused { file: path.to_path_buf(), fault });
    }
    Ok(file)
}
