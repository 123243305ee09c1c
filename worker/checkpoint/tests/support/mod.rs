//! A training state to save, and a faulty in-memory disk.
#![allow(dead_code)] // Every test uses its own part.

pub mod disk;

use std::collections::BTreeMap;
use std::path::Path;
use switchyard_checkpoint::disk::Vfs;
use switchyard_checkpoint::format::CheckpointInfo;
use switchyard_checkpoint::store::Latest;
use switchyard_checkpoint::{
    Checkpoint, CheckpointError, CheckpointId, Manifest, Plan, Progress, Role, ShardDigest, Store, TensorSpec,
};
use xxhash_rust::xxh3::xxh3_64;

pub const JOB: &str = "gpt";
pub const DIRECTORY: &str = "/checkpoints";

pub type Tensors = BTreeMap<String, Vec<f32>>;

pub fn spec(name: &str, shape: &[usize], role: Role) -> TensorSpec {
    TensorSpec { name: name.into(), shape: shape.to_vec(), role, export_axes: None, export_names: Vec::new() }
}

/// A small model with every kind of tensor: matrices, a convolution, a scalar, statistics, moments.
pub fn specs() -> Vec<TensorSpec> {
    let mut specs = vec![
        spec("wte.weight", &[50, 7], Role::Weight),
        spec("conv.weight", &[4, 3, 3, 2], Role::Weight),
        spec("attention.qkv", &[5, 6], Role::Weight),
        spec("bn.running_mean", &[4], Role::Statistic),
        spec("temperature", &[], Role::Weight),
        spec("optimizer.m.wte.weight", &[50, 7], Role::Optimizer),
        spec("optimizer.m.conv.weight", &[4, 3, 3, 2], Role::Optimizer),
    ];
    specs[1].export_axes = Some(vec![0, 3, 1, 2]);
    specs[2].export_axes = Some(vec![1, 0]);
    specs[2].export_names = ["q", "k", "v"].map(String::from).to_vec();
    specs
}

/// The value of a tensor element after a number of steps; all are distinct.
pub fn number(name: &str, step: u64, index: usize) -> f32 {
    let hash = xxh3_64(format!("{name} {step} {index}").as_bytes());
    f32::from_bits(hash as u32 & 0x3fff_ffff)
}

pub fn tensors(specs: &[TensorSpec], step: u64) -> Tensors {
    let numbers = |spec: &TensorSpec| (0..spec.element_count()).map(|index| number(&spec.name, step, index)).collect();
    specs.iter().map(|spec| (spec.name.clone(), numbers(spec))).collect()
}

pub fn info(id: CheckpointId) -> CheckpointInfo {
    let progress = Progress::new(&id.step).unwrap();
    CheckpointInfo { job: JOB.into(), id, config: "c0ffee".into(), created: 1_700_000_000, progress }
}

pub fn id(attempt: u32, step: u64) -> CheckpointId {
    CheckpointId { attempt, step }
}

/// Writes all shards of a checkpoint as `world` ranks.
pub fn write_shards(store: &Store<'_>, id: CheckpointId, world: usize) -> Result<Manifest, CheckpointError> {
    let plan = Plan::new(specs(), world).unwrap();
    let state = tensors(&specs(), id.step);
    // The ranks write out of order.
    let mut digests: Vec<(usize, ShardDigest)> = Vec::new();
    for rank in (0..world).rev() {
        digests.push((rank, store.write_shard(JOB, id, rank, &plan, &state)?));
    }
    digests.sort_by_key(|(rank, _)| *rank);
    Ok(Manifest::new(info(id), plan, digests.into_iter().map(|(_, digest)| digest).collect()).unwrap())
}

pub fn save(store: &Store<'_>, id: CheckpointId, world: usize) -> Result<Manifest, CheckpointError> {
    let manifest = write_shards(store, id, world)?;
    store.publish(&manifest)?;
    Ok(manifest)
}

/// The newest checkpoint of a job, verified by one rank.
pub fn latest(store: &Store<'_>, job: &str) -> Result<Latest, CheckpointError> {
    store.latest(job, |checkpoint| Ok(store.verify(checkpoint)))
}

/// The tensors of a checkpoint as a run receives them.
pub fn restored(store: &Store<'_>, checkpoint: &Checkpoint) -> Result<Tensors, CheckpointError> {
    let plan = checkpoint.manifest().plan();
    let mut room: Tensors =
        plan.tensors().iter().map(|spec| (spec.name.clone(), vec![f32::NAN; spec.element_count()])).collect();
    store.restore(checkpoint, &mut room)?;
    Ok(room)
}

/// Checks that exactly the state at the checkpoint's step is restored.
pub fn assert_whole(store: &Store<'_>, checkpoint: &Checkpoint) {
    let step = checkpoint.manifest().info().id.step;
    assert_eq!(checkpoint.manifest().info().progress.read::<u64>().unwrap(), step);
    assert!(restored(store, checkpoint).unwrap() == tensors(&specs(), step), "other values than at step {step}");
}

pub fn read(vfs: &dyn Vfs, file: &Path) -> Vec<u8> {
    let opened = vfs.open(file).unwrap();
    let mut bytes = vec![0; opened.length() as usize];
    opened.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

pub fn write(vfs: &dyn Vfs, file: &Path, bytes: &[u8]) {
    vfs.create(file).unwrap().write_all(bytes).unwrap();
}
