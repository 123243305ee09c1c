//! The step file: one line of JSON per step.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use switchyard_worker_contract::record::{self, StepRecord};

/// Buffer size in bytes: several hundred steps. Allocated once.
const BUFFER: usize = 256 << 10;
/// Maximum bytes of a line.
const LINE: usize = 1 << 10;

/// A rank's step file.
pub struct StepFile {
    file: File,
    buffer: Vec<u8>,
    /// The first write error. Afterwards nothing is written, and training continues.
    failed: Option<io::Error>,
}

impl StepFile {
    /// Opens the rank's file in the run directory for appending to the steps of earlier attempts.
    ///
    /// # Errors
    /// The directory or the file cannot be created.
    pub fn open(run_dir: &Path, rank: u32) -> io::Result<StepFile> {
        let folder = run_dir.join(record::DIR);
        DirBuilder::new().recursive(true).create(&folder)?;
        let file = OpenOptions::new().create(true).append(true).open(folder.join(record::steps_file(rank)))?;
        Ok(StepFile { file, buffer: Vec::with_capacity(BUFFER), failed: None })
    }

    /// Buffers a step; does not allocate.
    pub fn push(&mut self, step: &StepRecord) {
        if self.buffer.len() + LINE > BUFFER {
            self.flush();
        }
        // Serialising numbers to memory cannot fail.
        if serde_json::to_writer(&mut self.buffer, step).is_ok() {
            self.buffer.push(b'\n');
        }
    }

    /// Writes the buffered steps.
    pub fn flush(&mut self) {
        if self.failed.is_none()
            && let Err(error) = self.file.write_all(&self.buffer)
        {
            self.failed = Some(error);
        }
        self.buffer.clear();
    }

    /// The error that stopped writing; returned once.
    pub fn failure(&mut self) -> Option<io::Error> {
        let failed = self.failed.take()?;
        self.failed = Some(io::Error::from(failed.kind()));
        Some(failed)
    }
}

impl Drop for StepFile {
    fn drop(&mut self) {
        self.flush();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_append_and_every_line_is_a_step() {
        let folder = tempfile::tempdir().unwrap();
        for attempt in 1..=2 {
            let mut file = StepFile::open(folder.path(), 3).unwrap();
            for step in 1..=2_000 {
                file.push(&StepRecord {
                    attempt,
                    step,
                    total_ms: 1.5,
                    gradient_norm: Some(0.5),
                    ..StepRecord::default()
                });
            }
        }
        let text = std::fs::read_to_string(folder.path().join("record/rank-3.steps.jsonl")).unwrap();
        let steps: Vec<StepRecord> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(steps.len(), 4_000);
        assert_eq!((steps[1_999].attempt, steps[1_999].step, steps[2_000].attempt), (1, 2_000, 2));
    }

    #[test]
    fn a_full_disk_is_reported_and_does_not_panic() {
        let Ok(file) = OpenOptions::new().write(true).open("/dev/full") else { return };
        let mut file = StepFile { file, buffer: Vec::with_capacity(BUFFER), failed: None };
        file.push(&StepRecord::default());
        file.flush();
        assert_eq!(file.failure().unwrap().kind(), io::ErrorKind::StorageFull);
        file.push(&StepRecord::default());
        file.flush();
    }
}
