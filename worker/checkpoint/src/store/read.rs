//! Reading: verifies digests before passing on data.

use super::{Checkpoint, Store, TensorSink, open_shard};
use crate::disk::{ReadFile, Vfs};
use crate::error::CheckpointError;
use crate::format::{CHUNK, Digest, Fault, HEADER_LIMIT, Manifest, Plan, ShardDigest, decode_header, shard_file};
use std::ops::Range;
use std::path::{Path, PathBuf};

impl Store<'_> {
    /// Reads all bytes of a checkpoint and returns all errors; empty if the bytes are unchanged.
    pub fn verify(&self, checkpoint: &Checkpoint) -> Vec<CheckpointError> {
        let mut faults = Vec::new();
        for rank in 0..checkpoint.manifest.plan().world() {
            let read = Shard::new(checkpoint, rank).read(self.vfs, &mut |_, chunk| {
                faults.extend(chunk.err());
                Ok(())
            });
            faults.extend(read.err());
        }
        faults
    }

    /// Passes the tensors that the sink accepts to it. Every chunk is verified first. After an
    /// error the sink holds partial state and must be filled from another checkpoint.
    ///
    /// # Errors
    /// A shard is unreadable, not the expected one, or damaged; the sink's memory does not match
    /// the size of a tensor.
    pub fn restore(&self, checkpoint: &Checkpoint, sink: &mut dyn TensorSink) -> Result<(), CheckpointError> {
        (0..checkpoint.manifest.plan().world()).try_for_each(|rank| {
            let shard = Shard::new(checkpoint, rank);
            shard.read(self.vfs, &mut |range, chunk| shard.deliver(range, chunk?, sink))
        })
    }
}

/// A shard being read.
struct Shard<'a> {
    manifest: &'a Manifest,
    rank: usize,
    file: PathBuf,
    /// Header size in bytes, according to the manifest.
    header: u64,
}

/// Called for each chunk with its range in the file, and its bytes or an error.
type OnChunk<'a> = dyn FnMut(Range<u64>, Result<&[u8], CheckpointError>) -> Result<(), CheckpointError> + 'a;

impl<'a> Shard<'a> {
    fn new(checkpoint: &'a Checkpoint, rank: usize) -> Shard<'a> {
        let manifest = &checkpoint.manifest;
        let header = manifest.plan().header(&manifest.label(rank)).len() as u64;
        Shard { manifest, rank, file: checkpoint.directory.join(shard_file(rank)), header }
    }

    /// Reads all chunks. A damaged chunk stops the read only if `on_chunk` returns an error.
    fn read(&self, vfs: &dyn Vfs, on_chunk: &mut OnChunk<'_>) -> Result<(), CheckpointError> {
        let ShardDigest { bytes: length, chunks } = &self.manifest.shards()[self.rank];
        let file = open_shard(vfs, &self.file, *length)?;
        let refused = CheckpointError::refused;
        let header = header(file.as_ref(), &self.file);
        let header = header.and_then(|json| {
            let decoded = decode_header(&json).map_err(refused(&self.file))?;
            Ok((json.len() as u64 + 8, decoded))
        });
        // A misplaced shard is identified by its label, which is more specific than a digest
        // mismatch.
        if let Ok((_, header)) = &header {
            header.check_label(&self.manifest.label(self.rank)).map_err(refused(&self.file))?;
        }
        let mut header = Some(header);
        let mut buffer = vec![0; CHUNK.min(*length as usize)];
        for (index, expected) in chunks.iter().enumerate() {
            let start = index as u64 * CHUNK as u64;
            let range = start..(*length).min(start + CHUNK as u64);
            let bytes = &mut buffer[..(range.end - range.start) as usize];
            file.read_exact_at(bytes, start).map_err(CheckpointError::io("read it", &self.file))?;
            if Digest::of(bytes) != *expected {
                let damage = CheckpointError::Damaged {
                    file: self.file.clone(),
                    chunk: index,
                    tensors: self.tensors_in(&range),
                    bytes: range.clone(),
                };
                on_chunk(range, Err(damage))?;
                continue;
            }
            // Checked only now, so that a damaged header is reported as damage.
            if let Some(header) = header.take_if(|_| index == 0) {
                let (bytes, header) = header?;
                if bytes != self.header {
                    return Err(refused(&self.file)(Fault::new("length of the header", bytes, self.header)));
                }
                header.check_tensors(self.plan().entries(self.rank)).map_err(refused(&self.file))?;
            }
            on_chunk(range, Ok(bytes))?;
        }
        Ok(())
    }

    fn plan(&self) -> &'a Plan {
        self.manifest.plan()
    }

    /// Overlaps of the shard's pieces with a range of the file.
    fn overlaps(&self, range: &Range<u64>) -> impl Iterator<Item = Overlap> {
        let pieces = self.plan().pieces(self.rank).iter().enumerate();
        let mut at = self.header;
        let range = range.clone();
        pieces.filter_map(move |(index, piece)| {
            let start = at;
            at += piece.range.len() as u64 * 4;
            let common = start.max(range.start)..at.min(range.end);
            (common.start < common.end).then_some(Overlap { index, common, start })
        })
    }

    fn tensors_in(&self, range: &Range<u64>) -> Vec<String> {
        let pieces = self.plan().pieces(self.rank);
        let header = (range.start < self.header).then(|| "the header".to_string());
        let tensors =
            self.overlaps(range).map(|overlap| self.plan().tensors()[pieces[overlap.index].tensor].name.clone());
        header.into_iter().chain(tensors).collect()
    }

    /// Copies a chunk's elements to their destination.
    fn deliver(&self, range: Range<u64>, bytes: &[u8], sink: &mut dyn TensorSink) -> Result<(), CheckpointError> {
        for Overlap { index, common, start } in self.overlaps(&range) {
            let piece = &self.plan().pieces(self.rank)[index];
            let spec = &self.plan().tensors()[piece.tensor];
            let Some(room) = sink.tensor(&spec.name) else { continue };
            if room.len() != spec.element_count() {
                let what = format!("tensor `{}` of this run", spec.name);
                let fault = Fault::new(what, format!("{} numbers", room.len()), spec.element_count());
                return Err(CheckpointError::refused(&self.file)(fault));
            }
            let to: &mut [u8] = bytemuck::cast_slice_mut(&mut room[piece.range.clone()]);
            let part = (common.start - start) as usize..(common.end - start) as usize;
            let from = (common.start - range.start) as usize..(common.end - range.start) as usize;
            to[part].copy_from_slice(&bytes[from]);
        }
        Ok(())
    }
}

/// Overlap of a piece with a range of the file.
struct Overlap {
    index: usize,
    common: Range<u64>,
    /// Start of the piece in the file.
    start: u64,
}

/// Reads the JSON of a shard's header, checking its length before allocating memory.
pub(super) fn header(file: &dyn ReadFile, path: &Path) -> Result<Vec<u8>, CheckpointError> {
    let mut length = [0; 8];
    file.read_exact_at(&mut length, 0).map_err(CheckpointError::io("read its header", path))?;
    let length = u64::from_le_bytes(length);
    let limit = HEADER_LIMIT.min(file.length().saturating_sub(8));
    if length > limit {
        let fault = Fault::new("length of the header", length, format!("at most {limit} bytes"));
        return Err(CheckpointError::refused(path)(fault));
    }
    let mut json = vec![0; length as usize];
    file.read_exact_at(&mut json, 8).map_err(CheckpointError::io("read its header", path))?;
    Ok(json)
}
