//! Reading: digests first, then numbers.

use super::{Checkpoint, Store, TensorSink, open_shard};
use crate::disk::{ReadFile, Vfs};
use crate::error::CheckpointError;
use crate::format::{CHUNK, Digest, Fault, HEADER_LIMIT, Manifest, Plan, ShardDigest, decode_header, shard_file};
use std::ops::Range;
use std::path::{Path, PathBuf};

impl Store<'_> {
    /// Reads all bytes of a checkpoint and returns everything that is wrong with them; nothing if they are unchanged.
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

    /// Passes all tensors that the sink wants to it. The digest of bytes is compared before they are handed out. After
    /// an error the sink holds only a part of the state, and has to be filled from another checkpoint.
    ///
    /// # Errors
    /// A shard cannot be read, is not the expected one, or is damaged; the sink's memory does not match the size of a
    /// tensor.
    pub fn restore(&self, checkpoint: &Checkpoint, sink: &mut dyn TensorSink) -> Result<(), CheckpointError> {
        (0..checkpoint.manifest.plan().world()).try_for_each(|rank| {
            let shard = Shard::new(checkpoint, rank);
            shard.read(self.vfs, &mut |place, chunk| shard.deliver(place, chunk?, sink))
        })
    }
}

/// A shard being read.
struct Shard<'a> {
    manifest: &'a Manifest,
    rank: usize,
    file: PathBuf,
    /// Bytes of its header, according to the manifest.
    header: u64,
}

/// Called for each chunk: its range in the file, and its bytes or what is wrong with them.
type OnChunk<'a> = dyn FnMut(Range<u64>, Result<&[u8], CheckpointError>) -> Result<(), CheckpointError> + 'a;

impl<'a> Shard<'a> {
    fn new(checkpoint: &'a Checkpoint, rank: usize) -> Shard<'a> {
        let manifest = &checkpoint.manifest;
        let header = manifest.plan().header(&manifest.label(rank)).len() as u64;
        Shard { manifest, rank, file: checkpoint.directory.join(shard_file(rank)), header }
    }

    /// Reads all chunks. A damaged chunk ends this only if `on_chunk` returns an error.
    fn read(&self, vfs: &dyn Vfs, on_chunk: &mut OnChunk<'_>) -> Result<(), CheckpointError> {
        let ShardDigest { bytes: length, chunks } = &self.manifest.shards()[self.rank];
        let file = open_shard(vfs, &self.file, *length)?;
        let refused = CheckpointError::refused;
        let header = header(file.as_ref(), &self.file);
        let header = header.and_then(|json| {
            let decoded = decode_header(&json).map_err(refused(&self.file))?;
            Ok((json.len() as u64 + 8, decoded))
        });
        // A shard from elsewhere identifies itself, which says more than that its digests are wrong.
        if let Ok((_, header)) = &header {
            header.check_label(&self.manifest.label(self.rank)).map_err(refused(&self.file))?;
        }
        let mut header = Some(header);
        let mut buffer = vec![0; CHUNK.min(*length as usize)];
        for (index, expected) in chunks.iter().enumerate() {
            let start = index as u64 * CHUNK as u64;
            let place = start..(*length).min(start + CHUNK as u64);
            let bytes = &mut buffer[..(place.end - place.start) as usize];
            file.read_exact_at(bytes, start).map_err(CheckpointError::io("read it", &self.file))?;
            if Digest::of(bytes) != *expected {
                let damage = CheckpointError::Damaged {
                    file: self.file.clone(),
                    chunk: index,
                    tensors: self.tensors_in(&place),
                    bytes: place.clone(),
                };
                on_chunk(place, Err(damage))?;
                continue;
            }
            // Compared only now, so that a damaged header is reported as damage.
            if let Some(header) = header.take_if(|_| index == 0) {
                let (bytes, header) = header?;
                if bytes != self.header {
                    return Err(refused(&self.file)(Fault::new("length of the header", bytes, self.header)));
                }
                header.check_tensors(self.plan().entries(self.rank)).map_err(refused(&self.file))?;
            }
            on_chunk(place, Ok(bytes))?;
        }
        Ok(())
    }

    fn plan(&self) -> &'a Plan {
        self.manifest.plan()
    }

    /// Where pieces and a part of the file overlap.
    fn overlaps(&self, place: &Range<u64>) -> impl Iterator<Item = Overlap> {
        let pieces = self.plan().pieces(self.rank).iter().enumerate();
        let mut at = self.header;
        let place = place.clone();
        pieces.filter_map(move |(index, piece)| {
            let start = at;
            at += piece.range.len() as u64 * 4;
            let common = start.max(place.start)..at.min(place.end);
            (common.start < common.end).then_some(Overlap { index, common, start })
        })
    }

    fn tensors_in(&self, place: &Range<u64>) -> Vec<String> {
        let pieces = self.plan().pieces(self.rank);
        let header = (place.start < self.header).then(|| "the header".to_string());
        let tensors =
            self.overlaps(place).map(|overlap| self.plan().tensors()[pieces[overlap.index].tensor].name.clone());
        header.into_iter().chain(tensors).collect()
    }

    /// Copies the numbers in a chunk to their destination.
    fn deliver(&self, place: Range<u64>, bytes: &[u8], sink: &mut dyn TensorSink) -> Result<(), CheckpointError> {
        for Overlap { index, common, start } in self.overlaps(&place) {
            let piece = &self.plan().pieces(self.rank)[index];
            let spec = &self.plan().tensors()[piece.tensor];
            let Some(room) = sink.tensor(&spec.name) else { continue };
            if room.len() != spec.numbers() {
                let what = format!("tensor `{}` of this run", spec.name);
                let fault = Fault::new(what, format!("{} numbers", room.len()), spec.numbers());
                return Err(CheckpointError::refused(&self.file)(fault));
            }
            let to: &mut [u8] = bytemuck::cast_slice_mut(&mut room[piece.range.clone()]);
            let part = (common.start - start) as usize..(common.end - start) as usize;
            let from = (common.start - place.start) as usize..(common.end - place.start) as usize;
            to[part].copy_from_slice(&bytes[from]);
        }
        Ok(())
    }
}

/// Bytes that a piece of a shard and a part of its file have in common.
struct Overlap {
    index: usize,
    common: Range<u64>,
    /// Start of the piece in the file.
    start: u64,
}

/// The JSON of a shard's header, whose length is checked before memory is allocated.
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
