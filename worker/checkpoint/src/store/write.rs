//! Writing: shards by all ranks, then the manifest by rank 0.

use super::{Store, TensorSource, expect_kind, open_shard, read};
use crate::disk::{Kind, Vfs, WriteFile};
use crate::error::CheckpointError;
use crate::format::{
    CHUNK, CheckpointId, Digest, Fault, MANIFEST_FILE, Manifest, Plan, ShardDigest, ShardLabel, decode_header,
    shard_file, temporary,
};
use std::io;
use std::path::Path;
use xxhash_rust::xxh3::Xxh3;

/// File that probes the directory before the first step.
const PROBE_FILE: &str = ".probe";

impl Store<'_> {
    /// Writes a rank's shard and returns its digest, to be sent to rank 0. The file is then durable
    /// under its final name.
    ///
    /// # Errors
    /// The disk fails, in which case partial files are removed if possible; a newer attempt exists;
    /// the checkpoint exists; a tensor of the plan is missing in the source or has a different
    /// size; the rank is not in the plan.
    pub fn write_shard(
        &self,
        job: &str,
        id: CheckpointId,
        rank: usize,
        plan: &Plan,
        source: &dyn TensorSource,
    ) -> Result<ShardDigest, CheckpointError> {
        let directory = self.path(id);
        let file = directory.join(shard_file(rank));
        let refused = |fault| CheckpointError::Refused { file: file.clone(), fault };
        if rank >= plan.world() {
            return Err(refused(Fault::new("rank", rank, format!("less than {}", plan.world()))));
        }
        let mut pieces = Vec::with_capacity(plan.pieces(rank).len());
        for piece in plan.pieces(rank) {
            let spec = &plan.tensors()[piece.tensor];
            let numbers = source.values(&spec.name, piece.range.clone());
            let Some(numbers) = numbers.filter(|numbers| numbers.len() == piece.range.len()) else {
                let got = numbers.map_or("nothing".to_string(), |numbers| format!("{} numbers", numbers.len()));
                let expected = format!("{} numbers from index {}", piece.range.len(), piece.range.start);
                return Err(refused(Fault::new(format!("tensor `{}`", spec.name), got, expected)));
            };
            pieces.push(numbers);
        }
        let label = ShardLabel { job: job.to_string(), id, rank, world: plan.world() };
        let length = plan.shard_length(&label).map_err(refused)?;

        self.check_attempt(id.attempt)?;
        ensure_directory(self.vfs, self.directory)?;
        ensure_directory(self.vfs, &directory)?;
        self.check_unpublished(id)?;
        write_atomically(self.vfs, &file, length, |out| {
            let mut out = ChunkHasher::new(out);
            out.write(&plan.header(&label))?;
            for piece in &pieces {
                out.write(bytemuck::cast_slice(piece))?;
            }
            Ok(out.finish())
        })
    }

    /// Turns the shards into a checkpoint. Rank 0 calls this once all ranks have written their
    /// shards. On return the checkpoint survives a crash of the machine.
    ///
    /// # Errors
    /// The disk fails; a newer attempt exists; the checkpoint exists; a shard is missing or not the
    /// expected one.
    pub fn publish(&self, manifest: &Manifest) -> Result<(), CheckpointError> {
        let id = manifest.info().id;
        let directory = self.path(id);
        let file = directory.join(MANIFEST_FILE);
        self.check_attempt(id.attempt)?;
        expect_kind(self.vfs, &directory, Kind::Directory)?;
        self.check_unpublished(id)?;
        for (rank, shard) in manifest.shards().iter().enumerate() {
            let path = directory.join(shard_file(rank));
            let opened = open_shard(self.vfs, &path, shard.bytes)?;
            let header = read::header(opened.as_ref(), &path)?;
            let header = decode_header(&header).map_err(CheckpointError::refused(&path))?;
            header.check_label(&manifest.label(rank)).map_err(CheckpointError::refused(&path))?;
        }
        let bytes = manifest.encode().map_err(CheckpointError::refused(&file))?;
        // A process may have created the directory and died before it was durable.
        sync_directory(self.vfs, self.directory)?;
        write_atomically(self.vfs, &file, bytes.len() as u64, |out| out.write_all(&bytes))
    }

    /// Tries all calls that a checkpoint needs: create, write, fsync, rename, fsync of the
    /// directory, remove. Creates the directory if it is missing. Returns the bytes that can be
    /// written; `None` if the file system reports no size.
    ///
    /// # Errors
    /// A call fails; without this, every checkpoint would.
    pub fn probe(&self) -> Result<Option<u64>, CheckpointError> {
        const CONTENT: &[u8] = b"probe";
        ensure_directory(self.vfs, self.directory)?;
        let file = self.directory.join(PROBE_FILE);
        write_atomically(self.vfs, &file, CONTENT.len() as u64, |out| out.write_all(CONTENT))?;
        self.vfs.remove_file(&file).map_err(CheckpointError::io("remove it", &file))?;
        self.vfs.available(self.directory).map_err(CheckpointError::io("read its free space", self.directory))
    }

    pub(super) fn check_unpublished(&self, id: CheckpointId) -> Result<(), CheckpointError> {
        let directory = self.path(id);
        let file = directory.join(MANIFEST_FILE);
        match self.vfs.kind(&file) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(CheckpointError::io("find it", &file)(error)),
            Ok(_) => Err(CheckpointError::Exists { directory }),
        }
    }
}

/// Creates a directory and its parents durably.
fn ensure_directory(vfs: &dyn Vfs, path: &Path) -> Result<(), CheckpointError> {
    let parent = parent_of(path);
    match vfs.create_directory(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return expect_kind(vfs, path, Kind::Directory),
        Err(error) if error.kind() == io::ErrorKind::NotFound && parent != path => {
            ensure_directory(vfs, parent)?;
            // Another rank may have created it in the meantime.
            if let Err(error) = vfs.create_directory(path)
                && error.kind() != io::ErrorKind::AlreadyExists
            {
                return Err(CheckpointError::io("create it", path)(error));
            }
        }
        created => created.map_err(CheckpointError::io("create it", path))?,
    }
    sync_directory(vfs, parent)
}

fn parent_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

pub(super) fn sync_directory(vfs: &dyn Vfs, path: &Path) -> Result<(), CheckpointError> {
    vfs.sync_directory(path).map_err(CheckpointError::io("write its names to the disk", path))
}

/// Writes a file of `length` bytes that appears completely under its name, or not at all. On return
/// it is durable: first the content, then the name.
pub(crate) fn write_atomically<T>(
    vfs: &dyn Vfs,
    file: &Path,
    length: u64,
    write: impl FnOnce(&mut dyn WriteFile) -> io::Result<T>,
) -> Result<T, CheckpointError> {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    let temporary = file.with_file_name(temporary(&name));
    let failed = |action, source| {
        // Free the space of a partial file. If that fails too, the first error is the one to
        // report.
        let _ = vfs.remove_file(&temporary);
        CheckpointError::Io { file: file.to_path_buf(), action, needed: Some(length), source }
    };
    let mut out = vfs.create(&temporary).map_err(|error| failed("create it", error))?;
    let result = write(out.as_mut()).map_err(|error| failed("write it", error))?;
    out.sync().map_err(|error| failed("write it to the disk", error))?;
    drop(out);
    vfs.rename(&temporary, file).map_err(|error| failed("rename it", error))?;
    sync_directory(vfs, parent_of(file))?;
    Ok(result)
}

/// Hashes chunks while writing.
struct ChunkHasher<'a> {
    out: &'a mut dyn WriteFile,
    hasher: Xxh3,
    /// Bytes in the current chunk.
    filled: usize,
    digest: ShardDigest,
}

impl<'a> ChunkHasher<'a> {
    fn new(out: &'a mut dyn WriteFile) -> ChunkHasher<'a> {
        ChunkHasher { out, hasher: Xxh3::new(), filled: 0, digest: ShardDigest { bytes: 0, chunks: Vec::new() } }
    }

    fn write(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let (part, rest) = bytes.split_at(bytes.len().min(CHUNK - self.filled));
            self.out.write_all(part)?;
            self.hasher.update(part);
            self.filled += part.len();
            self.digest.bytes += part.len() as u64;
            if self.filled == CHUNK {
                self.end_chunk();
            }
            bytes = rest;
        }
        Ok(())
    }

    fn end_chunk(&mut self) {
        self.digest.chunks.push(Digest::from_raw(self.hasher.digest128()));
        self.hasher.reset();
        self.filled = 0;
    }

    fn finish(mut self) -> ShardDigest {
        if self.filled > 0 {
            self.end_chunk();
        }
        self.digest
    }
}
