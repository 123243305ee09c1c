//! Checkpoints that the ranks read together when they resume.

use crate::ranks::{blueprint, bytes_read, on_ranks, runs, saving};
use std::fs;
use std::path::Path;
use switchyard_worker::train::{TrainError, Trainer};
use switchyard_worker_contract::config::*;

const WORLD: u32 = 4;
/// Bytes with one digest.
const CHUNK: u64 = 4 << 20;
/// Bytes that a rank reads besides the shards: manifest, lock, machine, limits.
const OTHER: u64 = 256 << 10;

/// A model with 34 MB of weights and as much momentum.
fn large() -> EngineConfig {
    let plain = crate::plain::resnet();
    let image = Some(ImageShape { height: 8, width: 8, channels: 3 });
    EngineConfig {
        model: Model::Mlp(Mlp { hidden_sizes: vec![2048, 4096], activation: Activation::Relu }),
        data: Data { source: Source::Synthetic(Synthetic { samples: 80, image, classes: 4 }), ..plain.data },
        batch_size_per_process: 1,
        length: Length::Steps(2),
        ..plain
    }
}

/// Bytes of all shards of the newest checkpoint.
fn size_of_newest(directory: &Path) -> u64 {
    let mut folders: Vec<_> = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    folders.retain(|folder| folder.is_dir());
    folders.sort();
    let files = fs::read_dir(folders.last().unwrap()).unwrap().map(|entry| entry.unwrap());
    let shards = files.filter(|file| file.path().extension().is_some_and(|name| name == "safetensors"));
    shards.map(|file| file.metadata().unwrap().len()).sum()
}

/// Saves a checkpoint, and resumes from it. Returns its size, and the bytes that each rank reads.
fn resumed(config: &EngineConfig) -> (u64, Vec<u64>) {
    let (folder, run_dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let config = saving(config, folder.path(), 1);
    for (outcome, _) in runs(&config, WORLD, run_dir.path(), |_, _, _| ()) {
        outcome.unwrap();
    }
    let read = on_ranks(WORLD, |group| {
        let before = bytes_read();
        let trainer = Trainer::join(blueprint(&config, WORLD)?, &group)?;
        let read = bytes_read() - before;
        assert_eq!(trainer.resumed_step(), Some(2));
        trainer.leave()?;
        Ok::<_, TrainError>(read)
    });
    (size_of_newest(folder.path()), read.into_iter().map(Result::unwrap).collect())
}

/// A rank reads its share twice: once to verify it, once to pass it on.
#[test]
fn each_rank_reads_a_share_of_the_checkpoint() {
    let (size, read) = resumed(&large());
    assert!(size > 16 * CHUNK, "{size} bytes");
    let most = 2 * ((size / CHUNK).div_ceil(WORLD.into()) + 1) * CHUNK + OTHER;
    assert!(most < size, "{most} of {size} bytes would prove nothing");
    for (rank, read) in read.iter().enumerate() {
        assert!(*read <= most, "rank {rank} has read {read} of {size} bytes; expected at most {most}");
    }
    assert!(read.iter().sum::<u64>() >= 2 * size, "{read:?} of {size} bytes");
}

/// With local steps each rank has its own momentum, which no other rank needs.
#[test]
fn a_rank_alone_reads_what_it_alone_has() {
    let averages = LocalSteps { every_steps: 1, outer_optimizer: OuterOptimizer::Average };
    let (size, read) = resumed(&EngineConfig { sync: SyncPolicy::Local(averages), ..large() });
    let weights = size / (u64::from(WORLD) + 1);
    // Verified: a share of all. Passed on: a share of the weights. Alone: its momentum.
    let share = |bytes: u64| bytes / u64::from(WORLD);
    let most = share(size) + share(weights) + weights + 6 * CHUNK + OTHER;
    assert!(most < size, "{most} of {size} bytes would prove nothing");
    for (rank, read) in read.iter().enumerate() {
        assert!(*read <= most, "rank {rank} has read {read} of {size} bytes; expected at most {most}");
    }
}
