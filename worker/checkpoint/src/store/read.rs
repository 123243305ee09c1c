//! Reading: verifies digests before passing on data.

use super::{Checkpoint, Store, TensorSink, open_shard};
use crate::disk::{ReadFile, Vfs};
use crate::error::CheckpointError;
use crate::format::{
    CHUNK, Digest, Fault, HEADER_LIMIT, Manifest, Plan, ShardDigest, TensorSpec, decode_header, shard_file,
};
use std::ops::Range;
use std::path::{Path, PathBuf};

impl Store<'_> {
    /// Reads all bytes of a checkpoint and returns all errors; empty if the bytes are unchanged.
    pub fn verify(&self, checkpoint: &Checkpoint) -> Vec<CheckpointError> {
        self.verify_share(checkpoint, (0, 1))
    }

    /// As [`Store::verify`], of every `parts`-th chunk from chunk `part` on.
    pub fn verify_share(&self, checkpoint: &Checkpoint, (part, parts): (usize, usize)) -> Vec<CheckpointError> {
        let mut faults = Vec::new();
        let mut first = 0;
        for (rank, shard) in checkpoint.manifest.shards().iter().enumerate() {
            let is_wanted = |index: usize| (first + index) % parts == part;
            if (0..shard.chunks.len()).any(is_wanted) {
                let read = Shard::new(checkpoint, rank).read(self.vfs, &is_wanted, &mut |_, chunk| {
                    faults.extend(chunk.err());
                    Ok(())
                });
                faults.extend(read.err());
            }
            first += shard.chunks.len();
        }
        faults
    }

    /// Passes all tensors to the sink. Every chunk is verified first. After an error the sink holds
    /// partial state and must be filled from another checkpoint.
    ///
    /// # Errors
    /// A shard is unreadable, not the expected one, or damaged; the sink refuses a tensor.
    pub fn restore(&self, checkpoint: &Checkpoint, sink: &mut dyn TensorSink) -> Result<(), CheckpointError> {
        (0..checkpoint.manifest.plan().world()).try_for_each(|rank| {
            let shard = Shard::new(checkpoint, rank);
            shard.read(self.vfs, &|_| true, &mut |start, chunk| shard.deliver(start, chunk?, sink))
        })
    }

    /// Reads single chunks of a checkpoint.
    pub fn chunk_reader<'a>(&'a self, checkpoint: &'a Checkpoint) -> ChunkReader<'a> {
        let shards = (0..checkpoint.manifest.plan().world()).map(|rank| Shard::new(checkpoint, rank)).collect();
        ChunkReader { vfs: self.vfs, shards }
    }
}

/// A part of a shard with a digest of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    shard: usize,
    index: usize,
    numbers: usize,
}

impl Chunk {
    /// Length in numbers of 4 bytes; the first ones of a shard are its header.
    pub fn numbers(&self) -> usize {
        self.numbers
    }
}

/// Reads chunks of a checkpoint in any order, so that ranks can divide them.
pub struct ChunkReader<'a> {
    vfs: &'a dyn Vfs,
    shards: Vec<Shard<'a>>,
}

impl ChunkReader<'_> {
    /// The chunks that hold tensors for which `is_wanted`, in the order of the shards.
    pub fn chunks(&self, is_wanted: impl Fn(&TensorSpec) -> bool) -> Vec<Chunk> {
        let mut chunks: Vec<Chunk> = Vec::new();
        for shard in &self.shards {
            let mut start = shard.header;
            for piece in shard.plan().pieces(shard.rank) {
                let end = start + piece.range.len() as u64 * 4;
                if is_wanted(&shard.plan().tensors()[piece.tensor]) {
                    let indices = (start / CHUNK as u64) as usize..=((end - 1) / CHUNK as u64) as usize;
                    let found = indices.map(|index| {
                        let range = shard.range(index);
                        Chunk { shard: shard.rank, index, numbers: ((range.end - range.start) / 4) as usize }
                    });
                    chunks.extend(found);
                }
                start = end;
            }
        }
        // A chunk can hold several pieces.
        chunks.dedup();
        chunks
    }

    /// Reads a chunk to the beginning of `into`, and verifies it.
    ///
    /// # Errors
    /// The chunk is unreadable or damaged.
    ///
    /// # Panics
    /// `into` is shorter than the chunk.
    pub fn read(&self, chunk: Chunk, into: &mut [f32]) -> Result<(), CheckpointError> {
        let shard = &self.shards[chunk.shard];
        let file = open_shard(self.vfs, &shard.file, shard.digests().bytes)?;
        shard.read_chunk(file.as_ref(), chunk.index, &mut into[..chunk.numbers])
    }

    /// Passes numbers of a chunk to the sink, `from` numbers after its beginning.
    ///
    /// # Errors
    /// The sink refuses a tensor.
    pub fn deliver(
        &self,
        chunk: Chunk,
        from: usize,
        numbers: &[f32],
        sink: &mut dyn TensorSink,
    ) -> Result<(), CheckpointError> {
        let shard = &self.shards[chunk.shard];
        shard.deliver(shard.range(chunk.index).start + from as u64 * 4, numbers, sink)
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

/// Called for each chunk with its start in the file, and its numbers or an error.
type OnChunk<'a> = dyn FnMut(u64, Result<&[f32], CheckpointError>) -> Result<(), CheckpointError> + 'a;

impl<'a> Shard<'a> {
    fn new(checkpoint: &'a Checkpoint, rank: usize) -> Shard<'a> {
        let manifest = &checkpoint.manifest;
        let header = manifest.plan().header(&manifest.label(rank)).len() as u64;
        Shard { manifest, rank, file: checkpoint.directory.join(shard_file(rank)), header }
    }

    fn digests(&self) -> &'a ShardDigest {
        &self.manifest.shards()[self.rank]
    }

    /// A chunk's bytes in the file. Headers and chunks are multiples of 4 bytes.
    fn range(&self, chunk: usize) -> Range<u64> {
        let start = chunk as u64 * CHUNK as u64;
        start..self.digests().bytes.min(start + CHUNK as u64)
    }

    /// Reads the wanted chunks. A damaged chunk stops the read only if `on_chunk` returns an error.
    fn read(
        &self,
        vfs: &dyn Vfs,
        is_wanted: &dyn Fn(usize) -> bool,
        on_chunk: &mut OnChunk<'_>,
    ) -> Result<(), CheckpointError> {
        let ShardDigest { bytes: length, chunks } = self.digests();
        let file = open_shard(vfs, &self.file, *length)?;
        let refused = CheckpointError::refused;
        let mut header = is_wanted(0).then(|| -> Result<_, CheckpointError> {
            let json = header(file.as_ref(), &self.file)?;
            let decoded = decode_header(&json).map_err(refused(&self.file))?;
            Ok((json.len() as u64 + 8, decoded))
        });
        // A misplaced shard is identified by its label, which is more specific than a digest
        // mismatch.
        if let Some(Ok((_, header))) = &header {
            header.check_label(&self.manifest.label(self.rank)).map_err(refused(&self.file))?;
        }
        let mut buffer = vec![0.0; (CHUNK as u64).min(*length) as usize / 4];
        for index in (0..chunks.len()).filter(|index| is_wanted(*index)) {
            let range = self.range(index);
            let numbers = &mut buffer[..(range.end - range.start) as usize / 4];
            match self.read_chunk(file.as_ref(), index, numbers) {
                Err(error @ CheckpointError::Damaged { .. }) => {
                    on_chunk(range.start, Err(error))?;
                    continue;
                }
                read => read?,
            }
            // Checked only now, so that a damaged header is reported as damage.
            if let Some(header) = header.take_if(|_| index == 0) {
                let (bytes, header) = header?;
                if bytes != self.header {
                    return Err(refused(&self.file)(Fault::new("length of the header", bytes, self.header)));
                }
                header.check_tensors(self.plan().entries(self.rank)).map_err(refused(&self.file))?;
            }
            on_chunk(range.start, Ok(numbers))?;
        }
        Ok(())
    }

    /// Reads a chunk and compares its digest.
    fn read_chunk(&self, file: &dyn ReadFile, index: usize, into: &mut [f32]) -> Result<(), CheckpointError> {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(into);
        let range = self.range(index);
        file.read_exact_at(bytes, range.start).map_err(CheckpointError::io("read it", &self.file))?;
        if Digest::of(bytes) == self.digests().chunks[index] {
            return Ok(());
        }
        let (file, tensors) = (self.file.clone(), self.tensors_in(&range));
        Err(CheckpointError::Damaged { file, chunk: index, tensors, bytes: range })
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

    /// Passes numbers, which start at this byte of the file, to their tensors.
    fn deliver(&self, start: u64, numbers: &[f32], sink: &mut dyn TensorSink) -> Result<(), CheckpointError> {
        for Overlap { index, common, start: piece_start } in self.overlaps(&(start..start + numbers.len() as u64 * 4)) {
            let piece = &self.plan().pieces(self.rank)[index];
            let numbers = &numbers[((common.start - start) / 4) as usize..((common.end - start) / 4) as usize];
            let from = piece.range.start + ((common.start - piece_start) / 4) as usize;
            sink.write(&self.plan().tensors()[piece.tensor], from, numbers)
                .map_err(CheckpointError::refused(&self.file))?;
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
