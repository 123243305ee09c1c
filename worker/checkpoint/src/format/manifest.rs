//! The manifest, whose presence completes a checkpoint.
//!
//! One JSON object, `{"digest":"…","manifest":{…}}`. The digest covers the bytes of the inner
//! object, so that it can be verified before anything is parsed.

use super::header::ShardLabel;
use super::plan::{Piece, Plan, Role, TensorSpec, chunks};
use super::{CHUNK, CheckpointId, FORMAT, Fault, MANIFEST_LIMIT};
use serde::de::{DeserializeOwned, Error};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::value::RawValue;
use std::fmt;
use xxhash_rust::xxh3::xxh3_128;

/// The fixed text around digest and inner object.
const BEFORE: &[u8] = b"{\"digest\":\"";
const BETWEEN: &[u8] = b"\",\"manifest\":";
const AFTER: &[u8] = b"}\n";
/// Longest job name in bytes: the limit of Kubernetes object names.
const JOB_LIMIT: usize = 253;

/// XXH3-128 as 32 hexadecimal digits. Detects damage, but not deliberate changes of both data and
/// digest.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Digest(u128);

impl Digest {
    /// Hashes bytes.
    pub fn of(bytes: &[u8]) -> Digest {
        Digest(xxh3_128(bytes))
    }

    /// Wraps the output of an incremental hasher.
    pub(crate) fn from_raw(digest: u128) -> Digest {
        Digest(digest)
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Digest, D::Error> {
        let text = String::deserialize(deserializer)?;
        let digest = u128::from_str_radix(&text, 16).map(Digest).ok().filter(|digest| digest.to_string() == text);
        digest.ok_or_else(|| D::Error::custom(format!("got `{text}`; expected a digest of 32 digits 0-9a-f")))
    }
}

/// A rank's report about the shard that it wrote; rank 0 collects the reports for the manifest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ShardDigest {
    /// File length in bytes.
    pub bytes: u64,
    /// Digests of consecutive 4 MiB chunks; the last one may be shorter.
    pub chunks: Vec<Digest>,
}

/// Progress of the run: JSON that is opaque to this crate, except for `modelMetadata`, an object of
/// strings for exported files.
#[derive(Clone, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Progress(Box<RawValue>);

impl Progress {
    /// Stores a value.
    ///
    /// # Errors
    /// The value has no JSON representation, for example a map with non-string keys.
    pub fn new(value: &impl Serialize) -> Result<Progress, serde_json::Error> {
        serde_json::value::to_raw_value(value).map(Progress)
    }

    /// The stored value, bit for bit.
    ///
    /// # Errors
    /// The value has a different type.
    pub fn read<T: DeserializeOwned>(&self) -> Result<T, serde_json::Error> {
        serde_json::from_str(self.0.get())
    }
}

impl fmt::Debug for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.get())
    }
}

impl PartialEq for Progress {
    fn eq(&self, other: &Progress) -> bool {
        self.0.get() == other.0.get()
    }
}

/// Everything in a manifest except the tensors.
#[derive(Debug, Clone, PartialEq)]
pub struct CheckpointInfo {
    pub job: String,
    pub id: CheckpointId,
    /// Digest of the engine configuration, computed by the engine.
    pub config: String,
    /// Creation time in seconds since 1970.
    pub created: u64,
    pub progress: Progress,
}

/// A validated manifest.
#[derive(Debug, Clone, PartialEq)]
pub struct Manifest {
    info: CheckpointInfo,
    plan: Plan,
    shards: Vec<ShardDigest>,
}

/// Serialized form of the manifest.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Raw {
    format: u32,
    job: String,
    step: u64,
    attempt: u32,
    world: usize,
    config: String,
    created: u64,
    progress: Progress,
    tensors: Vec<RawTensor>,
    shards: Vec<ShardDigest>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct RawTensor {
    name: String,
    shape: Vec<usize>,
    dtype: Dtype,
    role: Role,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    export_axes: Option<Vec<usize>>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    export_names: Vec<String>,
    pieces: Vec<RawPiece>,
}

#[derive(Serialize, Deserialize)]
enum Dtype {
    F32,
}

/// Elements `offset..offset + len` of a tensor, in row-major order, stored in a shard.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawPiece {
    shard: usize,
    offset: usize,
    len: usize,
}

impl Manifest {
    /// Combines the checkpoint's metadata with the shard reports of all ranks, in rank order.
    ///
    /// # Errors
    /// A shard is missing, or its length does not match the plan; the job's name is empty or too
    /// long.
    pub fn new(info: CheckpointInfo, plan: Plan, shards: Vec<ShardDigest>) -> Result<Manifest, Fault> {
        if info.job.is_empty() || info.job.len() > JOB_LIMIT || info.job.contains(char::is_control) {
            let expected = format!("1 to {JOB_LIMIT} bytes without control characters");
            return Err(Fault::new("job", format!("{:?}", info.job), expected));
        }
        if shards.len() != plan.world() {
            return Err(Fault::new("shards", shards.len(), format!("{}, one per rank", plan.world())));
        }
        let manifest = Manifest { info, plan, shards };
        for (rank, shard) in manifest.shards.iter().enumerate() {
            let length = manifest.plan.shard_length(&manifest.label(rank))?;
            if shard.bytes != length {
                return Err(Fault::new(format!("shard {rank} bytes"), shard.bytes, length));
            }
            if shard.chunks.len() != chunks(length) {
                let expected = format!("{}, one per {CHUNK} bytes", chunks(length));
                return Err(Fault::new(format!("shard {rank} chunks"), shard.chunks.len(), expected));
            }
        }
        Ok(manifest)
    }

    /// Everything except the tensors.
    pub fn info(&self) -> &CheckpointInfo {
        &self.info
    }

    /// The tensors and their division into shards.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The shards, by rank.
    pub fn shards(&self) -> &[ShardDigest] {
        &self.shards
    }

    /// Total bytes of all shards.
    pub fn bytes(&self) -> u64 {
        self.shards.iter().map(|shard| shard.bytes).sum()
    }

    /// The label expected in the header of a shard.
    pub(crate) fn label(&self, rank: usize) -> ShardLabel {
        let CheckpointInfo { job, id, .. } = &self.info;
        ShardLabel { job: job.clone(), id: *id, rank, world: self.plan.world() }
    }

    /// Checks that a run with these tensors, in any order, can resume from here.
    ///
    /// # Errors
    /// The first tensor that is missing, differs in shape or role, or exists only in the
    /// checkpoint.
    pub fn check_tensors(&self, wanted: &[TensorSpec]) -> Result<(), Fault> {
        let mut known: std::collections::BTreeMap<&str, &TensorSpec> =
            self.plan.tensors().iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
        for tensor in wanted {
            let describe = |tensor: &TensorSpec| format!("{:?} {:?}", tensor.role, tensor.shape);
            let got = known.remove(tensor.name.as_str());
            if got.is_none_or(|got| (got.role, &got.shape) != (tensor.role, &tensor.shape)) {
                let got = got.map_or("nothing".to_string(), describe);
                return Err(Fault::new(format!("tensor `{}`", tensor.name), got, describe(tensor)));
            }
        }
        known
            .first_key_value()
            .map_or(Ok(()), |(name, _)| Err(Fault::new("tensor", format!("`{name}`"), "only those that this run has")))
    }

    /// Encodes the manifest file.
    ///
    /// # Errors
    /// The file exceeds the limit of readers.
    pub fn encode(&self) -> Result<Vec<u8>, Fault> {
        let inner = serde_json::to_vec(&self.raw()).expect("invariant: texts and numbers are JSON");
        let bytes = [BEFORE, Digest::of(&inner).to_string().as_bytes(), BETWEEN, &inner, AFTER].concat();
        check_length(bytes.len() as u64)?;
        Ok(bytes)
    }

    /// Decodes a manifest file.
    ///
    /// # Errors
    /// The bytes differ from what [`Manifest::encode`] writes, or are inconsistent.
    pub fn decode(bytes: &[u8]) -> Result<Manifest, Fault> {
        check_length(bytes.len() as u64)?;
        let inner = verified_inner(bytes)?;
        let fault = |error: serde_json::Error| Fault::new("manifest", error, format!("a manifest of format {FORMAT}"));
        /// The one field that all formats share.
        #[derive(Deserialize)]
        struct Version {
            format: u32,
        }
        let Version { format } = serde_json::from_slice(inner).map_err(fault)?;
        if format != FORMAT {
            return Err(Fault::new("format of the manifest", format, FORMAT));
        }
        Manifest::from_raw(serde_json::from_slice(inner).map_err(fault)?)
    }

    fn raw(&self) -> Raw {
        let mut pieces: Vec<Vec<RawPiece>> = self.plan.tensors().iter().map(|_| Vec::new()).collect();
        for shard in 0..self.plan.world() {
            for Piece { tensor, range } in self.plan.pieces(shard) {
                pieces[*tensor].push(RawPiece { shard, offset: range.start, len: range.len() });
            }
        }
        let tensors = self.plan.tensors().iter().cloned().zip(pieces);
        let tensors = tensors.map(|(TensorSpec { name, shape, role, export_axes, export_names }, pieces)| RawTensor {
            name,
            shape,
            dtype: Dtype::F32,
            role,
            export_axes,
            export_names,
            pieces,
        });
        let CheckpointInfo { job, id, config, created, progress } = self.info.clone();
        Raw {
            format: FORMAT,
            job,
            step: id.step,
            attempt: id.attempt,
            world: self.plan.world(),
            config,
            created,
            progress,
            tensors: tensors.collect(),
            shards: self.shards.clone(),
        }
    }

    fn from_raw(raw: Raw) -> Result<Manifest, Fault> {
        let Raw { format: _, job, step, attempt, world, config, created, progress, tensors, shards } = raw;
        if shards.len() != world {
            return Err(Fault::new("shards", shards.len(), format!("{world}, one per rank")));
        }
        let mut pieces = Vec::with_capacity(tensors.len());
        let mut specs = Vec::with_capacity(tensors.len());
        for tensor in tensors {
            let RawTensor { name, shape, dtype: Dtype::F32, role, export_axes, export_names, pieces: raw } = tensor;
            // An offset that overflows is past the end of every tensor.
            let range = |piece: &RawPiece| piece.offset..piece.offset.saturating_add(piece.len);
            pieces.push(raw.iter().map(|piece| (piece.shard, range(piece))).collect());
            specs.push(TensorSpec { name, shape, role, export_axes, export_names });
        }
        let plan = Plan::from_pieces(specs, world, pieces)?;
        let info = CheckpointInfo { job, id: CheckpointId { attempt, step }, config, created, progress };
        Manifest::new(info, plan, shards)
    }
}

fn check_length(bytes: u64) -> Result<(), Fault> {
    if bytes > MANIFEST_LIMIT {
        return Err(Fault::new("length of the manifest", bytes, format!("at most {MANIFEST_LIMIT}")));
    }
    Ok(())
}

/// Returns the inner object after verifying its digest.
fn verified_inner(bytes: &[u8]) -> Result<&[u8], Fault> {
    let parts = || {
        let rest = bytes.strip_prefix(BEFORE)?;
        let (digest, rest) = rest.split_at_checked(32)?;
        Some((digest, rest.strip_prefix(BETWEEN)?.strip_suffix(AFTER)?))
    };
    let Some((digest, inner)) = parts() else {
        return Err(Fault::new("manifest", "other bytes", "{\"digest\":\"…\",\"manifest\":{…}}"));
    };
    let actual = Digest::of(inner).to_string();
    if digest != actual.as_bytes() {
        let expected = format!("{actual}, the digest of its content");
        return Err(Fault::new("digest of the manifest", String::from_utf8_lossy(digest), expected));
    }
    Ok(inner)
}
