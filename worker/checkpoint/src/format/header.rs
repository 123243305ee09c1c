//! Safetensors headers: 8 bytes with the length, then JSON padded with spaces.
//!
//! We do not use the `safetensors` crate, because it orders metadata randomly and its buffers for
//! reading headers take up to fifty times their size. `tests/store.rs` reads our headers with that
//! crate.

use super::{CheckpointId, Fault};
use serde::de::{MapAccess, Visitor};
use serde::ser::{SerializeMap, Serializer};
use serde::{Deserialize, Deserializer, Serialize};
use std::fmt;
use std::ops::Range;

/// The only key of a header that is not a tensor.
pub(super) const METADATA: &str = "__metadata__";
/// The value of `format` in shards.
const SHARD_FORMAT: &str = "switchyard-shard/1";

/// Identifies the owner of a shard. Stored in the header, so that a misplaced copy of the file is
/// recognised without other files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ShardLabel {
    pub job: String,
    pub id: CheckpointId,
    pub rank: usize,
    pub world: usize,
}

/// The label as safetensors metadata, where all values are strings.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
struct RawLabel {
    format: String,
    job: String,
    step: String,
    attempt: String,
    rank: String,
    world: String,
}

impl From<&ShardLabel> for RawLabel {
    fn from(label: &ShardLabel) -> RawLabel {
        RawLabel {
            format: SHARD_FORMAT.to_string(),
            job: label.job.clone(),
            step: label.id.step.to_string(),
            attempt: label.id.attempt.to_string(),
            rank: label.rank.to_string(),
            world: label.world.to_string(),
        }
    }
}

impl Serialize for ShardLabel {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        RawLabel::from(self).serialize(serializer)
    }
}

/// A tensor in a header, as read.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Info {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: (u64, u64),
}

/// A decoded header that has not been checked yet.
#[derive(Debug, Default)]
pub(crate) struct Header {
    label: RawLabel,
    tensors: Vec<(String, Info)>,
}

/// A tensor in a header. All values are f32.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TensorEntry<'a> {
    pub name: &'a str,
    pub shape: Vec<usize>,
    /// Offsets from the end of the header.
    pub bytes: Range<u64>,
}

/// Encodes a header, preceded by its length.
pub(crate) fn encode<'a>(metadata: &impl Serialize, tensors: impl Iterator<Item = TensorEntry<'a>>) -> Vec<u8> {
    #[derive(Serialize)]
    struct Entry {
        dtype: &'static str,
        shape: Vec<usize>,
        data_offsets: (u64, u64),
    }
    let mut bytes = vec![0; 8];
    let write = || {
        let mut serializer = serde_json::Serializer::new(&mut bytes);
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry(METADATA, metadata)?;
        for TensorEntry { name, shape, bytes } in tensors {
            map.serialize_entry(name, &Entry { dtype: "F32", shape, data_offsets: (bytes.start, bytes.end) })?;
        }
        map.end()
    };
    write().expect("invariant: texts and numbers are JSON");
    // Keeps the tensors aligned in the file.
    bytes.resize(bytes.len().next_multiple_of(8), b' ');
    let length = bytes.len() as u64 - 8;
    bytes[..8].copy_from_slice(&length.to_le_bytes());
    bytes
}

/// Parses the JSON of a header.
pub(crate) fn decode(json: &[u8]) -> Result<Header, Fault> {
    serde_json::from_slice(json)
        .map_err(|error| Fault::new("header", format!("an invalid one ({error})"), "a safetensors header"))
}

impl Header {
    /// Checks that this is the expected shard.
    pub(crate) fn check_label(&self, label: &ShardLabel) -> Result<(), Fault> {
        let expected = RawLabel::from(label);
        let fields = [
            ("format", &self.label.format, &expected.format),
            ("job", &self.label.job, &expected.job),
            ("step", &self.label.step, &expected.step),
            ("attempt", &self.label.attempt, &expected.attempt),
            ("rank", &self.label.rank, &expected.rank),
            ("world", &self.label.world, &expected.world),
        ];
        let wrong = fields.into_iter().find(|(_, got, expected)| got != expected);
        wrong.map_or(Ok(()), |(field, got, expected)| {
            Err(Fault::new(format!("{field} of the shard"), format!("`{got}`"), format!("`{expected}`")))
        })
    }

    /// The job that the shard belongs to.
    pub(crate) fn job(&self) -> &str {
        &self.label.job
    }

    /// Checks that the header holds exactly the expected tensors.
    pub(crate) fn check_tensors<'a>(&self, expected: impl Iterator<Item = TensorEntry<'a>>) -> Result<(), Fault> {
        let mut got = self.tensors.iter();
        for TensorEntry { name, shape, bytes } in expected {
            let wanted = format!("F32 {shape:?} at bytes {bytes:?}");
            let Some((found, info)) = got.next() else {
                return Err(Fault::new(format!("tensor `{name}` of the shard"), "nothing", wanted));
            };
            if found != name {
                return Err(Fault::new("tensor of the shard", format!("`{found}`"), format!("`{name}`")));
            }
            let (start, end) = info.data_offsets;
            if info.dtype != "F32" || info.shape != shape || (start, end) != (bytes.start, bytes.end) {
                let is = format!("{} {:?} at bytes {start}..{end}", info.dtype, info.shape);
                return Err(Fault::new(format!("tensor `{name}` of the shard"), is, wanted));
            }
        }
        got.next().map_or(Ok(()), |(name, _)| Err(Fault::new("tensor of the shard", format!("`{name}`"), "no more")))
    }
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Header, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Header;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("tensors by name")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut header = Header::default();
                while let Some(name) = map.next_key::<String>()? {
                    if name == METADATA {
                        header.label = map.next_value()?;
                    } else {
                        header.tensors.push((name, map.next_value()?));
                    }
                }
                Ok(header)
            }
        }
        deserializer.deserialize_map(Entries)
    }
}
