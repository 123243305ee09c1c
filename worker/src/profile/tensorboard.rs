//! TensorBoard event files: scalars of rank 0.
//!
//! A file is a sequence of TFRecords (length, checksum, bytes, checksum;
//! `tensorflow/core/lib/io/record_writer.h`), each an `Event` message
//! (`tensorflow/core/util/event.proto`), of which only the parts for scalars are declared here.

use prost::Message;
use std::fs::{DirBuilder, File};
use std::io::{self, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};
use switchyard_worker_contract::record::TENSORBOARD_DIR;

#[derive(Clone, PartialEq, Message)]
struct Event {
    /// Seconds since 1970.
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    #[prost(string, optional, tag = "3")]
    file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    summary: Option<Summary>,
}

#[derive(Clone, PartialEq, Message)]
struct Summary {
    #[prost(message, repeated, tag = "1")]
    value: Vec<Value>,
}

#[derive(Clone, PartialEq, Message)]
struct Value {
    #[prost(string, tag = "1")]
    tag: String,
    #[prost(float, optional, tag = "2")]
    simple_value: Option<f32>,
}

/// An event file.
pub struct EventFile {
    file: File,
}

impl EventFile {
    /// Creates a new file in the run directory. TensorBoard reads all files of a directory in name
    /// order.
    ///
    /// # Errors
    /// The directory or the file cannot be created.
    pub fn create(run_dir: &Path, attempt: u32) -> io::Result<EventFile> {
        let folder = run_dir.join(TENSORBOARD_DIR);
        DirBuilder::new().recursive(true).create(&folder)?;
        let seconds = now() as u64;
        let name = format!("events.out.tfevents.{seconds:010}.switchyard.{attempt}");
        let mut file = EventFile { file: File::create(folder.join(name))? };
        file.write(Event { wall_time: now(), file_version: Some("brain.Event:2".into()), ..Event::default() })?;
        Ok(file)
    }

    /// Appends scalars of a step; infinities and NaNs are written unchanged.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn scalars(&mut self, step: u64, scalars: &[(&str, f64)]) -> io::Result<()> {
        let value = |&(tag, value): &(&str, f64)| Value { tag: tag.to_owned(), simple_value: Some(value as f32) };
        let summary = Summary { value: scalars.iter().map(value).collect() };
        let step = i64::try_from(step).unwrap_or(i64::MAX);
        self.write(Event { wall_time: now(), step, summary: Some(summary), ..Event::default() })
    }

    fn write(&mut self, event: Event) -> io::Result<()> {
        self.file.write_all(&record(&event.encode_to_vec()))
    }
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
}

/// A TFRecord.
fn record(bytes: &[u8]) -> Vec<u8> {
    let length = (bytes.len() as u64).to_le_bytes();
    let mut out = Vec::with_capacity(bytes.len() + 16);
    out.extend_from_slice(&length);
    out.extend_from_slice(&masked_crc(&length).to_le_bytes());
    out.extend_from_slice(bytes);
    out.extend_from_slice(&masked_crc(bytes).to_le_bytes());
    out
}

/// CRC-32C, masked so that a record may contain records.
fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_match_the_tensorflow_format() {
        // From TensorFlow's own tests: the masked checksum of the length 0 is 0x07a12951... of
        // eight zero bytes.
        assert_eq!(crc32c::crc32c(&[0; 32]), 0x8a91_36aa, "RFC 3720, B.4");
        let folder = tempfile::tempdir().unwrap();
        let mut file = EventFile::create(folder.path(), 1).unwrap();
        file.scalars(7, &[("loss", 2.5), ("throughput", 100.0)]).unwrap();
        let entry = std::fs::read_dir(folder.path().join(TENSORBOARD_DIR)).unwrap().next().unwrap().unwrap();
        let bytes = std::fs::read(entry.path()).unwrap();
        let mut events = Vec::new();
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
            assert_eq!(u32::from_le_bytes(rest[8..12].try_into().unwrap()), masked_crc(&rest[..8]));
            let body = &rest[12..12 + length];
            assert_eq!(u32::from_le_bytes(rest[12 + length..16 + length].try_into().unwrap()), masked_crc(body));
            events.push(Event::decode(body).unwrap());
            rest = &rest[16 + length..];
        }
        assert_eq!(events[0].file_version.as_deref(), Some("brain.Event:2"));
        let summary = events[1].summary.clone().unwrap();
        assert_eq!(
            (events[1].step, summary.value[0].tag.as_str(), summary.value[0].simple_value),
            (7, "loss", Some(2.5))
        );
        assert_eq!(events.len(), 2);
    }
}
