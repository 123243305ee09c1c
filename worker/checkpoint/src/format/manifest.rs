//! The manifest, which turns files into a checkpoint.
//!
//! It is one JSON object, `{"digest":"…","manifest":{…}}`. The digest is that of the bytes of the inner object, so it
//! can be compared before anything is parsed.

use super::header::ShardLabel;
use super::plan::{Piece, Plan, Role, TensorSpec, chunks};
use super::{CHUNK, CheckpointId, FORMAT, Fault, MANIFEST_LIMIT};
use serde::de::{DeserializeOwned, Error};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::value::RawValue;
use std::fmt;
use xxhash_rust::xxh3::xxh3_128;

/// The text before and after the digest, and at the end of the file.
const BEFORE: &[u8] = b"{\"digest\":\"";
const BETWEEN: &[u8] = b"\",\"manifest\":";
const AFTER: &[u8] = b"}\n";
/// Longest name of a job in bytes: that of an object in Kubernetes.
const JOB_LIMIT: usize = 253;

/// XXH3-128 of some bytes, as 32 hexadecimal digits. It detects damage; it does not stop anyone who changes both data
/// and digest.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Digest(u128);

impl Digest {
    /// Hashes bytes.
    pub fn of(bytes: &[u8]) -> Digest {
        Digest(xxh3_128(bytes))
    }

    /// The result of a hasher that has seen the bytes.
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

/// What a rank reports about the shard that it has written; rank 0 collects the reports for the manifest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ShardDigest {
    /// Length of the file in bytes.
    pub bytes: u64,
    /// Digests of consecutive pieces of 4 MiB; the last one may be shorter.
    pub chunks: Vec<Digest>,
}

/// Progress of the run: a JSON value that is opaque to this crate.
#[derive(Clone, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Progress(Box<RawValue>);

impl Progress {
    /// Stores a value.
    ///
    /// # Errors
    /// The value cannot be represented as JSON, such as a map with keys that are not strings.
    pub fn new(value: &impl Serialize) -> Result<Progress, serde_json::Error> {
        serde_json::value::to_raw_value(value).map(Progress)
    }

    /// The stored value, bit for bit.
    ///
    /// # Errors
    /// It is not of this type.
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

/// Facts about a checkpoint besides its tensors.
#[derive(Debug, Clone, PartialEq)]
pub struct About {
    pub job: String,
    pub id: CheckpointId,
    /// Digest of the engine's configuration, computed by the engine.
    pub config: String,
    /// Creation time in seconds since 1970.
    pub created: u64,
    pub progress: Progress,
}

/// A valid manifest.
#[derive(Debug, Clone, PartialEq)]
pub struct Manifest {
    about: About,
    plan: Plan,
    shards: Vec<ShardDigest>,
}

/// The manifest as stored in the file.
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

/// Numbers `offset..offset + len` of a tensor, in row-major order, are in a shard.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawPiece {
    shard: usize,
    offset: usize,
    len: usize,
}

impl Manifest {
    /// Combines what rank 0 knows with the reports of the ranks about their shards, in the order of the ranks.
    ///
    /// # Errors
    /// A shard is missing, or its length does not match the plan; the job's name is empty or too long.
    pub fn new(about: About, plan: Plan, shards: Vec<ShardDigest>) -> Result<Manifest, Fault> {
        if about.job.is_empty() || about.job.len() > JOB_LIMIT || about.job.contains(char::is_control) {
            let expected = format!("1 to {JOB_LIMIT} bytes without control characters");
            return Err(Fault::new("job", format!("{:?}", about.job), expected));
        }
        if shards.len() != plan.world() {
            return Err(Fault::new("shards", shards.len(), format!("{}, one per rank", plan.world())));
        }
        let manifest = Manifest { about, plan, shards };
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

    /// Facts besides the tensors.
    pub fn about(&self) -> &About {
        &self.about
    }

    /// The tensors, and the shards that they are in.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The shards, by rank.
    pub fn shards(&self) -> &[ShardDigest] {
        &self.shards
    }

    /// Bytes of all shards.
    pub fn bytes(&self) -> u64 {
        self.shards.iter().map(|shard| shard.bytes).sum()
    }

    /// The expected label in the header of a shard.
    pub(crate) fn label(&self, rank: usize) -> ShardLabel {
        let About { job, id, .. } = &self.about;
        ShardLabel { job: job.clone(), id: *id, rank, world: self.plan.world() }
    }

    /// Checks that a run with these tensors can resume from here; their order does not matter.
    ///
    /// # Errors
    /// The first tensor that is missing, has another shape or role, or exists only in the checkpoint.
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

    /// Encodes the file.
    ///
    /// # Errors
    /// It is longer than readers accept.
    pub fn encode(&self) -> Result<Vec<u8>, Fault> {
        let inner = serde_json::to_vec(&self.raw()).expect("invariant: texts and numbers are JSON");
        let bytes = [BEFORE, Digest::of(&inner).to_string().as_bytes(), BETWEEN, &inner, AFTER].concat();
        check_length(bytes.len() as u64)?;
        Ok(bytes)
    }

    /// Decodes the file.
    ///
    /// # Errors
    /// Anything that differs from the output of [`Manifest::encode`], or is inconsistent.
    pub fn decode(bytes: &[u8]) -> Result<Manifest, Fault> {
        check_length(bytes.len() as u64)?;
        let inner = open(bytes)?;
        let fault = |error: serde_json::Error| Fault::new("manifest", error, format!("one of format {FORMAT}"));
        /// The one field that every format has.
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
        let About { job, id, config, created, progress } = self.about.clone();
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
            // An end that overflows is beyond every tensor.
            let range = |piece: &RawPiece| piece.offset..piece.offset.saturating_add(piece.len);
            pieces.push(raw.iter().map(|piece| (piece.shard, range(piece))).collect());
            specs.push(TensorSpec { name, shape, role, export_axes, export_names });
        }
        let plan = Plan::from_pieces(specs, world, pieces)?;
        let about = About { job, id: CheckpointId { attempt, step }, config, created, progress };
        Manifest::new(about, plan, shards)
    }
}

fn check_length(bytes: u64) -> Result<(), Fault> {
    if bytes > MANIFEST_LIMIT {
        return Err(Fault::new("length of the manifest", bytes, format!("at most {MANIFEST_LIMIT}")));
    }
    Ok(())
}

/// The inner object, if its digest is right.
fn open(bytes: &[u8]) -> Result<&[u8], Fault> {
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
        let expected = format!("{actual}, that of its content");
        return Err(Fault::new("digest of the manifest", String::from_utf8_lossy(digest), expected));
    }
    Ok(inner)
}
