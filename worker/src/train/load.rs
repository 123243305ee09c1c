//! Reads a checkpoint once for all ranks: each reads some chunks, and they pass them on to each
//! other. What only one rank has, that rank reads alone.

use super::TrainError;
use crate::comm::{Group, Options, Reducer};
use crate::retry::retry;
use std::ops::Range;
use switchyard_checkpoint::format::CHUNK;
use switchyard_checkpoint::{Checkpoint, CheckpointError, Chunk, ChunkReader, Store, TensorSink, TensorSpec};

/// Numbers that the ranks pass on at once; the memory for them is as large as a chunk.
const BUCKET: usize = CHUNK / 4;

/// Bytes of memory to read a checkpoint: a chunk, and a bucket to pass chunks on.
pub(super) fn memory_bytes(world: u32) -> usize {
    if world == 1 { CHUNK } else { CHUNK + 4 * BUCKET }
}

/// Fills the sink of each rank. `is_own`: tensors that only this rank reads; `is_shared`: tensors
/// that all ranks need, the same on all of them. Collective.
///
/// # Errors
/// A chunk of this rank cannot be read or is damaged, the sink refuses a tensor, or the group
/// failed.
pub(super) fn load(
    group: &mut Group,
    (store, checkpoint): (&Store<'_>, &Checkpoint),
    (is_shared, is_own): (impl Fn(&TensorSpec) -> bool, impl Fn(&TensorSpec) -> bool),
    sink: &mut dyn TensorSink,
) -> Result<(), TrainError> {
    let reader = store.chunk_reader(checkpoint);
    let mut own = vec![0.0; CHUNK / 4];
    let (shared, mut alone) = (reader.chunks(&is_shared), reader.chunks(is_own));
    if group.world() == 1 {
        alone.extend(shared);
    } else {
        share(group, &reader, &shared, &mut own, sink)?;
    }
    for chunk in alone {
        read(&reader, chunk, &mut own)?;
        reader.deliver(chunk, 0, &own[..chunk.numbers()], sink)?;
    }
    Ok(())
}

/// Reads every chunk on one rank, and delivers it on all.
fn share(
    group: &mut Group,
    reader: &ChunkReader<'_>,
    chunks: &[Chunk],
    own: &mut [f32],
    sink: &mut dyn TensorSink,
) -> Result<(), TrainError> {
    let mut reducer = Reducer::connect(group, &[BUCKET], &Options::default())?;
    let readers = readers(&(0..group.world()).map(|rank| reducer.shard(0, rank)).collect::<Vec<_>>());
    let mine = readers.iter().position(|(rank, _)| *rank == group.rank());
    for turn in chunks.chunks(readers.len()) {
        let mine = mine.and_then(|place| Some((*turn.get(place)?, readers[place].1.clone())));
        if let Some((chunk, _)) = mine {
            read(reader, chunk, own)?;
        }
        let rounds = turn.iter().zip(&readers).map(|(chunk, (_, slot))| chunk.numbers().div_ceil(slot.len())).max();
        for round in 0..rounds.unwrap_or(0) {
            if let Some((chunk, slot)) = &mine {
                let part = part(*chunk, slot, round);
                reducer.bucket_mut(0)[slot.start..][..part.len()].copy_from_slice(&own[part]);
            }
            reducer.gather_all(0..1, 0);
            reducer.wait(0)?;
            for (chunk, (_, slot)) in turn.iter().zip(&readers) {
                let part = part(*chunk, slot, round);
                let numbers = &reducer.bucket(0)[slot.start..][..part.len()];
                reader.deliver(*chunk, part.start, numbers, sink)?;
            }
        }
    }
    // A rank that closes its connections early would look lost to one that still receives.
    group.barrier()?;
    Ok(())
}

/// The numbers of a chunk that fill its reader's slot in a round.
fn part(chunk: Chunk, slot: &Range<usize>, round: usize) -> Range<usize> {
    (round * slot.len()).min(chunk.numbers())..((round + 1) * slot.len()).min(chunk.numbers())
}

/// The ranks that read, with their slots in the bucket. The slots of the last ranks can be short or
/// empty; a rank with a short one would delay all others.
fn readers(slots: &[Range<usize>]) -> Vec<(u32, Range<usize>)> {
    let longest = slots.iter().map(Range::len).max().unwrap_or(0);
    (0..).zip(slots.iter().cloned()).filter(|(_, slot)| 2 * slot.len() >= longest).collect()
}

fn read(reader: &ChunkReader<'_>, chunk: Chunk, into: &mut [f32]) -> Result<(), CheckpointError> {
    retry(|error: &CheckpointError| error.is_io().then(|| error.to_string()), || reader.read(chunk, into))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_with_a_short_slot_do_not_read() {
        let ranks = |slots: &[Range<usize>]| readers(slots).into_iter().map(|(rank, _)| rank).collect::<Vec<_>>();
        assert_eq!(ranks(&[0..32, 32..64, 64..80, 80..80]), [0, 1, 2]);
        assert_eq!(ranks(&[0..32, 32..64, 64..79]), [0, 1]);
    }
}
