//! Files that the ranks read together before the first step.

use crate::plain::{gpt, resnet};
use crate::ranks::{bytes_read, on_ranks};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Barrier};
use switchyard_worker::comm::{CommError, Group};
use switchyard_worker::data::Facts;
use switchyard_worker::model::Registry;
use switchyard_worker::train::{Preparation, SharedData, TrainError, Trainer, open};
use switchyard_worker_contract::config::{Data, EngineConfig, Files, Images, Source, TokenType, Tokens};
use xxhash_rust::xxh3::xxh3_128;

const WORLD: u32 = 4;
const TOKENS: usize = 1 << 21;
/// Bytes that a rank reads besides the data: itself, the machine, its limits.
const OTHER: u64 = 128 << 10;

/// Pseudo-random bytes.
fn noise(count: usize, seed: u64) -> impl Iterator<Item = u8> {
    let next =
        |state: &u64| Some(state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407));
    std::iter::successors(Some(seed), next).map(|state| (state >> 56) as u8).take(count)
}

/// Little-endian tokens below 256.
fn tokens(seed: u64) -> Vec<u8> {
    noise(TOKENS, seed).flat_map(|token| [token, 0]).collect()
}

fn token_config(path: &Path) -> EngineConfig {
    let plain = gpt(Path::new("."), &[]);
    let source = Source::Tokens(Tokens { path: path.display().to_string(), token_type: TokenType::UInt16 });
    EngineConfig { data: Data { source, ..plain.data }, ..plain }
}

/// Joins the ranks; returns the facts about the data, and the bytes that each rank has read.
/// `opened`: called by each rank before and after it has opened the files.
fn facts(config: &EngineConfig, opened: impl Fn(u32, bool) + Sync) -> Vec<Result<(Facts, u64), TrainError>> {
    let registry = Registry::new();
    on_ranks(WORLD, |group| {
        let before = bytes_read();
        opened(group.rank(), false);
        let data = SharedData::open(config, WORLD);
        opened(group.rank(), true);
        let preparation = Preparation::new(config, &Arc::new(data?), (WORLD, 0), None, &registry)?;
        let trainer = Trainer::join(preparation, &group)?;
        let read = bytes_read() - before;
        let facts = trainer.training().dataset.facts().clone();
        trainer.leave()?;
        Ok((facts, read))
    })
}

/// Checks that rank 0 reads `size` bytes and the others a share, with the result of a single rank.
fn assert_divided(config: &EngineConfig, size: u64) -> Facts {
    let alone = open(config).unwrap().facts().clone();
    assert!(alone.validation_samples > 0, "{alone:?}");
    for (rank, outcome) in facts(config, |_, _| {}).into_iter().enumerate() {
        let (facts, read) = outcome.unwrap();
        assert_eq!(facts, alone, "rank {rank}");
        let most = if rank == 0 { size } else { size / u64::from(WORLD) };
        assert!(read < most + OTHER, "rank {rank} has read {read} bytes; expected at most {most} and a few more");
    }
    alone
}

#[test]
fn one_rank_reads_whole_token_files_and_the_others_a_share() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokens.bin");
    let bytes = tokens(1);
    fs::write(&path, &bytes).unwrap();
    let size = bytes.len() as u64;
    let facts = assert_divided(&token_config(&path), size);
    // Checkpoints of older versions hold this digest.
    let all = [&size.to_le_bytes(), bytes.as_slice(), &facts.validation_items.to_le_bytes()].concat();
    assert_eq!(facts.digest, format!("{:032x}", xxh3_128(&all)));
}

#[test]
fn one_rank_reads_the_heads_of_all_images_and_the_others_a_share() {
    let folder = tempfile::tempdir().unwrap();
    let mut size = 0;
    for number in 0..64_u64 {
        let class = folder.path().join(if number % 2 == 0 { "even" } else { "odd" });
        fs::create_dir_all(&class).unwrap();
        let path = class.join(format!("{number}.ppm"));
        let image: Vec<u8> = b"P6\n120 120\n255\n".iter().copied().chain(noise(120 * 120 * 3, number)).collect();
        fs::write(path, &image).unwrap();
        size += image.len() as u64;
    }
    let source = Source::ImageFolder(Files {
        path: folder.path().display().to_string(),
        include: Vec::new(),
        exclude: Vec::new(),
    });
    let plain = resnet();
    let images = Images { size: 8, ..plain.data.images };
    let config = EngineConfig { data: Data { source, images, ..plain.data }, batch_size_per_process: 2, ..plain };
    assert_divided(&config, size);
}

#[test]
fn rank_0_alone_reports_a_token_outside_of_the_vocabulary() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokens.bin");
    let mut bytes = tokens(1);
    for position in [5, TOKENS - 1] {
        bytes[2 * position + 1] = 3;
    }
    fs::write(&path, &bytes).unwrap();
    let config = token_config(&path);
    let alone = open(&config).unwrap_err().to_string();
    assert!(alone.contains("at position 5"), "{alone}");
    for (rank, outcome) in facts(&config, |_, _| {}).into_iter().enumerate() {
        match outcome.unwrap_err() {
            TrainError::Data(error) if rank == 0 => assert_eq!(error.to_string(), alone),
            TrainError::Comm(CommError::Failed(cause)) if rank > 0 => {
                assert_eq!((cause.origin_rank, cause.text), (0, alone.clone()), "rank {rank}");
            }
            error => panic!("rank {rank}: {error}"),
        }
    }
}

#[test]
fn all_ranks_name_the_rank_with_another_copy_of_the_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let path: PathBuf = folder.path().join("tokens.bin");
    fs::write(&path, tokens(1)).unwrap();
    let other = folder.path().join("other.bin");
    fs::write(&other, tokens(2)).unwrap();
    let (before, after) = (Barrier::new(WORLD as usize), Barrier::new(WORLD as usize));
    let outcomes = facts(&token_config(&path), |rank, is_open| match (rank, is_open) {
        (2, false) => {
            before.wait();
            fs::rename(&other, &path).unwrap();
        }
        (2, true) | (_, false) => {
            if is_open {
                after.wait();
            }
        }
        (_, true) => {
            before.wait();
            after.wait();
        }
    });
    for outcome in outcomes {
        let text = outcome.unwrap_err().to_string();
        assert!(text.contains("rank 2 read other contents than rank 0"), "{text}");
    }
}

#[test]
fn the_ranks_of_a_process_share_one_data_set() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokens.bin");
    fs::write(&path, tokens(1)).unwrap();
    let (config, registry) = (token_config(&path), Registry::new());
    let data = Arc::new(SharedData::open(&config, WORLD).unwrap());
    let datasets = on_ranks(WORLD, |group| {
        let preparation = Preparation::new(&config, &data, (WORLD, 0), None, &registry).unwrap();
        let trainer = Trainer::join(preparation, &group).unwrap();
        let dataset = Arc::clone(&trainer.training().dataset);
        trainer.leave().unwrap();
        dataset
    });
    assert!(datasets.iter().all(|dataset| Arc::ptr_eq(dataset, &datasets[0])));
}

#[test]
fn a_broadcast_of_any_length_reaches_all_ranks() {
    on_ranks(WORLD, |config| {
        let mut group = Group::join(&config).unwrap();
        for length in [0, 1, (64 << 10) - 1, 64 << 10, (64 << 10) + 1, 200_000] {
            let bytes: Vec<u8> = noise(length, 3).collect();
            let own = if group.rank() == 0 { &bytes[..] } else { b"ignored" };
            assert_eq!(group.broadcast("bytes", own).unwrap(), bytes, "{length} bytes");
        }
        group.leave().unwrap();
    });
}
