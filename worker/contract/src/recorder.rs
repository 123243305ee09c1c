//! Flight recorder of a rank: its last operations, in a file that survives its death.
//!
//! ```text
//! RUN_DIR/record/rank-3.attempt-1.recorder     64-bit words, in the byte order of the machine:
//! header                                       who, when it began, when it was last alive, operations begun
//! ring                                         the last operations, three words each; number n is in slot n % RING
//! ```
//!
//! The rank writes through a memory mapping, so everything written so far survives even SIGKILL.
//! The slot after the newest operation may be half written and is not read.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Size of the file in 64-bit words.
pub const WORDS: usize = 256;
/// Operations in the ring.
pub const RING: usize = 64;
/// Word offset of the ring.
pub const RING_AT: usize = 32;
/// Words per operation.
pub const ENTRY: usize = 3;
/// First word: identifies the format.
pub const MAGIC: u64 = 0x3172_6364_7277_7373;
/// Bytes of a string in the header.
pub const TEXT: usize = 64;

/// Word offsets in the header.
pub mod at {
    /// [`super::MAGIC`].
    pub const MAGIC: usize = 0;
    /// Rank.
    pub const RANK: usize = 1;
    /// Number of ranks of the job.
    pub const WORLD: usize = 2;
    /// Attempt.
    pub const ATTEMPT: usize = 3;
    /// Process id.
    pub const PID: usize = 4;
    /// Start of the recording, microseconds since 1970.
    pub const START: usize = 5;
    /// When the process was last alive, microseconds after the start.
    pub const ALIVE: usize = 6;
    /// Number of operations begun.
    pub const COUNT: usize = 7;
    /// Host name, 64 bytes.
    pub const HOST: usize = 8;
    /// The layer that was running when the process was last alive, 64 bytes.
    pub const LAYER: usize = 16;
}

/// File of a rank's recorder in [`crate::record::DIR`].
pub fn file(rank: u32, attempt: u32) -> String {
    format!("rank-{rank}.attempt-{attempt}.{EXTENSION}")
}

/// Extension of the file.
pub const EXTENSION: &str = "recorder";

/// What a rank is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[repr(u8)]
pub enum Operation {
    /// Joining the group.
    Join,
    /// Looking for a checkpoint, or reading it.
    Restore,
    /// Waiting for the reader to fill a micro-batch.
    Input,
    /// Forward pass of a micro-batch.
    Forward,
    /// Backward pass of a micro-batch.
    Backward,
    /// Waiting for the all-reduce of a bucket.
    Reduce,
    /// Norm, clipping, optimizer.
    Update,
    /// Copying its part of a checkpoint, or waiting until that is written.
    Checkpoint,
    /// A batch of the validation set.
    Evaluate,
    /// Waiting for all ranks to agree on something.
    Agree,
    /// Writing the trained model.
    Save,
    /// Reports and other work between two steps.
    Between,
    /// Waiting for all ranks to leave.
    Leave,
    /// All steps are done.
    Finished,
    /// The rank failed.
    Failed,
    /// Reading training data before the first step.
    Open,
}

impl Operation {
    const ALL: [Operation; 16] = [
        Operation::Join,
        Operation::Restore,
        Operation::Input,
        Operation::Forward,
        Operation::Backward,
        Operation::Reduce,
        Operation::Update,
        Operation::Checkpoint,
        Operation::Evaluate,
        Operation::Agree,
        Operation::Save,
        Operation::Between,
        Operation::Leave,
        Operation::Finished,
        Operation::Failed,
        Operation::Open,
    ];

    /// Whether the rank waits for other ranks.
    pub fn waits(self) -> bool {
        matches!(self, Operation::Join | Operation::Reduce | Operation::Agree | Operation::Leave)
    }

    /// Whether it is part of every step.
    pub fn in_step(self) -> bool {
        use Operation::{Backward, Between, Forward, Input, Reduce, Update};
        matches!(self, Input | Forward | Backward | Reduce | Update | Between)
    }

    /// Whether no operation can follow.
    pub fn is_last(self) -> bool {
        matches!(self, Operation::Finished | Operation::Failed)
    }
}

/// An operation of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Entry {
    /// The operation.
    pub operation: Operation,
    /// Step of the operation, from 1.
    pub step: u64,
    /// Micro-batch, bucket, or batch of the validation set, from 0.
    pub index: u32,
    /// Start, microseconds after the start of the recording.
    pub since_us: u64,
}

impl Entry {
    /// Encodes the entry as words.
    pub fn pack(self) -> [u64; ENTRY] {
        [self.step, (self.operation as u64) << 32 | u64::from(self.index), self.since_us]
    }

    /// Decodes an entry; `None` if the words are not a valid one.
    pub fn unpack([step, kind, since_us]: [u64; ENTRY]) -> Option<Entry> {
        let operation = usize::try_from(kind >> 32).ok().and_then(|number| Operation::ALL.get(number))?;
        Some(Entry { operation: *operation, step, index: kind as u32, since_us })
    }
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Entry { operation, step, index, .. } = self;
        match operation {
            Operation::Join => write!(f, "joining the group"),
            Operation::Open => write!(f, "reading the training data before the first step"),
            Operation::Restore => write!(f, "reading the checkpoint"),
            Operation::Input => write!(f, "step {step}: waiting for the reader, micro-batch {index}"),
            Operation::Forward => write!(f, "step {step}: forward pass of micro-batch {index}"),
            Operation::Backward => write!(f, "step {step}: backward pass of micro-batch {index}"),
            Operation::Reduce => write!(f, "step {step}: waiting for the all-reduce of bucket {index}"),
            Operation::Update => write!(f, "step {step}: norm and optimizer, bucket {index}"),
            Operation::Checkpoint => write!(f, "step {step}: writing its part of a checkpoint"),
            Operation::Evaluate => write!(f, "validation after step {step}: batch {index}"),
            Operation::Agree => write!(f, "step {step}: waiting for all ranks to agree"),
            Operation::Save => write!(f, "step {step}: writing the trained model"),
            Operation::Between => write!(f, "reports and files after step {step}"),
            Operation::Leave => write!(f, "waiting for all ranks to leave"),
            Operation::Finished => write!(f, "finished after step {step}"),
            Operation::Failed => write!(f, "failed in step {step}"),
        }
    }
}

/// Contents of a recorder file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Recording {
    /// Rank among all ranks of the job.
    pub rank: u32,
    /// Ranks of the job.
    pub world: u32,
    /// Attempt.
    pub attempt: u32,
    /// Process id.
    pub pid: u32,
    /// Host name.
    pub host: String,
    /// Start of the recording, microseconds since 1970 by the clock of its host.
    pub start_us: u64,
    /// When the process was last alive, microseconds after the start.
    pub alive_us: u64,
    /// The layer that was running then; empty if it is unknown.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub layer: String,
    /// The last operations, oldest first; at least one.
    pub entries: Vec<Entry>,
}

impl Recording {
    /// Parses a recorder file.
    ///
    /// # Errors
    /// The bytes are not a recorder file; the message gives the actual and expected values.
    pub fn read(bytes: &[u8]) -> Result<Recording, String> {
        let size = 8 * WORDS;
        if bytes.len() != size {
            return Err(format!("got {} bytes; expected {size}, the size of a recorder", bytes.len()));
        }
        let words: Vec<u64> = bytes.chunks_exact(8).map(|word| word.try_into().map_or(0, u64::from_ne_bytes)).collect();
        if words[at::MAGIC] != MAGIC {
            return Err(format!("got {:#x} as the first word; expected {MAGIC:#x}", words[at::MAGIC]));
        }
        let small = |at: usize, name: &str| {
            u32::try_from(words[at]).map_err(|_| format!("{name}: got {}; expected less than 2^32", words[at]))
        };
        let text = |at: usize| {
            let bytes = &bytes[8 * at..8 * at + TEXT];
            String::from_utf8_lossy(bytes.split(|byte| *byte == 0).next().unwrap_or_default()).into_owned()
        };
        let count = words[at::COUNT];
        let kept = count.min(RING as u64 - 1);
        let slot = |number: u64| {
            let at = RING_AT + ENTRY * (number % RING as u64) as usize;
            Entry::unpack([words[at], words[at + 1], words[at + 2]])
        };
        let entries: Vec<Entry> = (count - kept..count).filter_map(slot).collect();
        let newest = entries.last().ok_or("got no operation; expected at least one")?;
        Ok(Recording {
            rank: small(at::RANK, "rank")?,
            world: small(at::WORLD, "ranks of the job")?,
            attempt: small(at::ATTEMPT, "attempt")?,
            pid: small(at::PID, "process id")?,
            host: text(at::HOST),
            start_us: words[at::START],
            alive_us: words[at::ALIVE].max(newest.since_us),
            layer: text(at::LAYER),
            entries,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file_of(count: u64) -> Vec<u8> {
        let mut words = [0_u64; WORDS];
        (words[at::MAGIC], words[at::RANK], words[at::WORLD], words[at::COUNT]) = (MAGIC, 3, 4, count);
        words[at::HOST] = u64::from_ne_bytes(*b"node-b\0\0");
        for number in 0..count {
            let entry = Entry { operation: Operation::Forward, step: number, index: 1, since_us: 10 * number };
            let at = RING_AT + ENTRY * (number % RING as u64) as usize;
            words[at..at + ENTRY].copy_from_slice(&entry.pack());
        }
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    #[test]
    fn the_last_operations_are_read_in_order() {
        for count in [1, 5, 63, 64, 200] {
            let found = Recording::read(&file_of(count)).unwrap();
            let steps: Vec<u64> = found.entries.iter().map(|entry| entry.step).collect();
            assert_eq!(steps, (count - count.min(63)..count).collect::<Vec<_>>());
            assert_eq!((found.rank, found.world, found.host.as_str()), (3, 4, "node-b"));
            assert_eq!(found.alive_us, 10 * (count - 1), "it was alive when it began its last operation");
        }
    }

    #[test]
    fn rejects_other_files_with_the_expected_value() {
        assert_eq!(Recording::read(b"text").unwrap_err(), "got 4 bytes; expected 2048, the size of a recorder");
        let error = Recording::read(&[7; 8 * WORDS]).unwrap_err();
        assert!(error.starts_with("got 0x707070707070707 as the first word"), "{error}");
        assert!(Recording::read(&file_of(0)).unwrap_err().contains("no operation"));
        let mut strange = file_of(2);
        strange[8 * (RING_AT + 1) + 4..][..4].fill(0xff);
        assert_eq!(Recording::read(&strange).unwrap().entries.len(), 1, "an operation of another version is skipped");
    }

    #[test]
    fn every_operation_survives_packing() {
        for (number, operation) in Operation::ALL.into_iter().enumerate() {
            assert_eq!(operation as usize, number);
            let entry = Entry { operation, step: 1 << 40, index: u32::MAX, since_us: 7 };
            assert_eq!(Entry::unpack(entry.pack()), Some(entry), "{entry}");
        }
    }
}
