//! Damage after writing: flipped bits, and files that are truncated, lost or swapped.
#![allow(clippy::unwrap_used)]

mod support;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use support::disk::{MemoryDisk, Random};
use support::{DIRECTORY, JOB, assert_whole, id, latest, read, restored, save, tensors, write, write_shards};
use switchyard_checkpoint::disk::{Kind, ReadFile, Vfs, WriteFile};
use switchyard_checkpoint::format::{CHUNK, CheckpointInfo};
use switchyard_checkpoint::{
    Checkpoint, CheckpointError, CheckpointId, Manifest, Plan, Progress, Role, State, Store, TensorSpec,
};

const ID: CheckpointId = CheckpointId { attempt: 1, step: 500 };

fn store(disk: &MemoryDisk) -> Store<'_> {
    Store::new(disk, Path::new(DIRECTORY))
}

fn path(id: CheckpointId, file: &str) -> PathBuf {
    Path::new(DIRECTORY).join(id.directory()).join(file)
}

/// A disk with a checkpoint of three ranks.
fn saved() -> MemoryDisk {
    let disk = MemoryDisk::new(None);
    save(&store(&disk), ID, 3).unwrap();
    disk
}

/// The error for the only checkpoint.
fn refused(disk: &MemoryDisk) -> String {
    let latest = latest(&store(disk), JOB).unwrap();
    assert_eq!(latest.checkpoint, None);
    latest.skipped[0].1.to_string()
}

#[test]
fn ten_thousand_flipped_bits_are_detected() {
    let disk = saved();
    let store = store(&disk);
    let files = ["manifest.json", "rank-0.safetensors", "rank-1.safetensors", "rank-2.safetensors"];
    let files: Vec<(PathBuf, Vec<u8>)> =
        files.map(|file| path(ID, file)).map(|file| (file.clone(), read(&disk, &file))).into();
    let mut random = Random(6);
    let mut detected = 0;
    for _ in 0..10_000 {
        let (file, content) = &files[random.below(files.len())];
        let bit = random.below(content.len() * 8);
        let mut damaged = content.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        write(&disk, file, &damaged);
        let opened = store.open(ID);
        let result = opened.and_then(|checkpoint| {
            let verified = store.verify(&checkpoint);
            let numbers = restored(&store, &checkpoint);
            assert_eq!(verified.is_empty(), numbers.is_ok(), "bit {bit} of {}: {verified:?}", file.display());
            numbers
        });
        match result {
            Ok(numbers) => assert!(numbers == tensors(&support::specs(), ID.step), "bit {bit} of {}", file.display()),
            Err(error) => {
                assert!(error.to_string().starts_with(file.to_str().unwrap()), "{error}");
                detected += 1;
            }
        }
        write(&disk, file, content);
    }
    println!("{detected} of 10000 detected, the others harmless");
    assert!(detected > 9_990, "{detected}");
    assert_whole(&store, &store.open(ID).unwrap());
}

#[test]
fn truncated_and_extended_files_are_refused() {
    let disk = saved();
    for name in ["rank-1.safetensors", "manifest.json"] {
        let file = path(ID, name);
        let content = read(&disk, &file);
        for length in [0, 1, 7, 8, 100, content.len() - 1, content.len() + 1, content.len() + 4096] {
            let mut other = content.clone();
            other.resize(length, 0);
            write(&disk, &file, &other);
            let error = refused(&disk);
            assert!(error.starts_with(&format!("{}: ", file.display())), "{error}");
            if name != "manifest.json" {
                let expected = format!("length: got {length} bytes; expected {} bytes", content.len());
                assert!(error.ends_with(&expected), "{error}");
            }
        }
        write(&disk, &file, &content);
    }
    assert_whole(&store(&disk), &store(&disk).open(ID).unwrap());
}

#[test]
fn a_missing_shard_or_manifest_is_reported_and_an_older_checkpoint_used() {
    let disk = saved();
    let newer = id(1, 1000);
    save(&store(&disk), newer, 2).unwrap();
    disk.remove_file(&path(newer, "rank-1.safetensors")).unwrap();
    let latest = latest(&store(&disk), JOB).unwrap();
    assert_whole(&store(&disk), &latest.checkpoint.unwrap());
    let [(skipped, error)] = &latest.skipped[..] else { panic!("{:?}", latest.skipped) };
    assert_eq!(*skipped, newer);
    assert_eq!(
        error.to_string(),
        "/checkpoints/step-000001000.attempt-1/rank-1.safetensors: cannot find it: entity not found"
    );
    assert!(matches!(store(&disk).list().unwrap()[0].state, State::Damaged(_)));

    disk.remove_file(&path(newer, "manifest.json")).unwrap();
    let latest = support::latest(&store(&disk), JOB).unwrap();
    assert_eq!(latest.checkpoint.unwrap().manifest().info().id, ID);
    assert_eq!(
        latest.skipped[0].1.to_string(),
        "/checkpoints/step-000001000.attempt-1: got no manifest; expected one: the checkpoint was not finished"
    );
    assert!(matches!(store(&disk).list().unwrap()[0].state, State::Incomplete));
}

/// Rank 1's shard of three, as another run would have written it.
fn foreign(job: &str, other: CheckpointId, rank: usize, world: usize) -> Vec<u8> {
    let disk = MemoryDisk::new(None);
    let plan = Plan::new(support::specs(), world).unwrap();
    store(&disk).write_shard(job, other, rank, &plan, &tensors(&support::specs(), other.step)).unwrap();
    read(&disk, &path(other, &format!("rank-{rank}.safetensors")))
}

#[test]
fn a_foreign_shard_is_identified() {
    // Job names of equal length keep the file length the same.
    let cases = [
        (foreign("bot", ID, 1, 3), "job of the shard: got `bot`; expected `gpt`"),
        (foreign(JOB, id(1, 501), 1, 3), "step of the shard: got `501`; expected `500`"),
        (foreign(JOB, id(2, 500), 1, 3), "attempt of the shard: got `2`; expected `1`"),
    ];
    let own = path(ID, "rank-1.safetensors");
    for (content, expected) in cases {
        let disk = saved();
        write(&disk, &own, &content);
        let error = refused(&disk);
        assert_eq!(error, format!("{}: {expected}", own.display()));
    }
    // These two shards differ in length, which is checked before publishing.
    for (content, expected) in [
        (foreign(JOB, ID, 2, 3), "rank of the shard: got `2`; expected `1`"),
        (foreign(JOB, ID, 1, 4), "world of the shard: got `4`; expected `3`"),
    ] {
        let disk = MemoryDisk::new(None);
        let manifest = write_shards(&store(&disk), ID, 3).unwrap();
        let mut content = content;
        content.resize(manifest.shards()[1].bytes as usize, 0);
        write(&disk, &own, &content);
        let error = store(&disk).publish(&manifest).unwrap_err().to_string();
        assert_eq!(error, format!("{}: {expected}", own.display()));
    }
}

#[test]
fn the_manifest_of_another_checkpoint_is_refused() {
    let disk = saved();
    save(&store(&disk), id(1, 1000), 3).unwrap();
    let other = read(&disk, &path(id(1, 1000), "manifest.json"));
    write(&disk, &path(ID, "manifest.json"), &other);
    let error = store(&disk).open(ID).unwrap_err().to_string();
    assert!(
        error.ends_with("manifest: got one of step 1000, attempt 1; expected one of step 500, attempt 1"),
        "{error}"
    );
    assert_eq!(
        latest(&store(&disk), "another").unwrap().skipped[0].1.to_string(),
        "/checkpoints/step-000001000.attempt-1/manifest.json: job: got `gpt`; expected `another`"
    );
}

/// A checkpoint of two shards of almost three chunks each.
fn large(disk: &MemoryDisk) -> Checkpoint {
    let spec = |name: &str, size| TensorSpec {
        name: name.into(),
        shape: vec![size],
        role: Role::Weight,
        export_axes: None,
        export_names: Vec::new(),
    };
    let specs = vec![spec("first", 1_000_000), spec("second", 3_000_000), spec("third", 2_000_000)];
    let plan = Plan::new(specs.clone(), 2).unwrap();
    let state =
        specs.iter().zip([1.0, 2.0, 3.0]).map(|(spec, number)| (spec.name.clone(), vec![number; spec.element_count()]));
    let state: support::Tensors = state.collect();
    let digests = (0..2).map(|rank| store(disk).write_shard(JOB, ID, rank, &plan, &state).unwrap()).collect();
    let info = CheckpointInfo { progress: Progress::new(&()).unwrap(), ..support::info(ID) };
    store(disk).publish(&Manifest::new(info, plan, digests).unwrap()).unwrap();
    store(disk).open(ID).unwrap()
}

#[test]
fn damage_is_located_by_file_chunk_and_tensor() {
    let disk = MemoryDisk::new(None);
    let checkpoint = large(&disk);
    assert!(store(&disk).verify(&checkpoint).is_empty());
    for (name, number, size) in [("first", 1.0, 1_000_000), ("second", 2.0, 3_000_000), ("third", 3.0, 2_000_000)] {
        let mut one = support::Tensors::from([(name.into(), vec![0.0; size])]);
        store(&disk).restore(&checkpoint, &mut one).unwrap();
        assert!(one[name].iter().all(|it| *it == number), "{name}");
    }
    let mut short = support::Tensors::from([("first".into(), vec![0.0; 9])]);
    let error = store(&disk).restore(&checkpoint, &mut short).unwrap_err().to_string();
    assert!(error.ends_with("tensor `first` of this run: got 9 numbers; expected 1000000"), "{error}");

    for (rank, byte) in [(0, 3), (0, 2 * CHUNK + 5), (1, CHUNK), (1, CHUNK - 1)] {
        let file = path(ID, &format!("rank-{rank}.safetensors"));
        let mut bytes = read(&disk, &file);
        bytes[byte] ^= 4;
        write(&disk, &file, &bytes);
    }
    let found = store(&disk).verify(&checkpoint);
    let located: Vec<(String, usize, Vec<&str>)> = found
        .iter()
        .map(|error| match error {
            CheckpointError::Damaged { file, chunk, tensors, .. } => {
                let name = file.file_name().unwrap().to_str().unwrap().to_string();
                (name, *chunk, tensors.iter().map(String::as_str).collect())
            }
            other => panic!("{other}"),
        })
        .collect();
    let expected = [
        ("rank-0.safetensors".to_string(), 0, vec!["the header", "first", "second"]),
        ("rank-0.safetensors".to_string(), 2, vec!["second"]),
        ("rank-1.safetensors".to_string(), 0, vec!["the header", "second", "third"]),
        ("rank-1.safetensors".to_string(), 1, vec!["third"]),
    ];
    assert_eq!(located, expected);
    assert_eq!(
        found[1].to_string(),
        "/checkpoints/step-000000500.attempt-1/rank-0.safetensors: damaged: chunk 2, bytes 8388608 to 12000264, does not have \
         the digest in its manifest; it holds second"
    );
}

/// Each damaged chunk is found by the one rank whose share it is in.
#[test]
fn shares_of_ranks_find_what_one_rank_finds() {
    let disk = MemoryDisk::new(None);
    let checkpoint = large(&disk);
    for (rank, byte) in [(0, 3), (1, CHUNK), (1, 2 * CHUNK + 5)] {
        let file = path(ID, &format!("rank-{rank}.safetensors"));
        let mut bytes = read(&disk, &file);
        bytes[byte] ^= 4;
        write(&disk, &file, &bytes);
    }
    let texts = |faults: Vec<CheckpointError>| faults.iter().map(ToString::to_string).collect::<Vec<_>>();
    let mut all = texts(store(&disk).verify(&checkpoint));
    all.sort();
    assert_eq!(all.len(), 3);
    for parts in 1..9 {
        let mut found: Vec<String> =
            (0..parts).flat_map(|part| texts(store(&disk).verify_share(&checkpoint, (part, parts)))).collect();
        found.sort();
        assert_eq!(found, all, "{parts} ranks");
    }
}

#[test]
fn tensors_arrive_whole_from_single_chunks_in_any_order() {
    let disk = MemoryDisk::new(None);
    let checkpoint = large(&disk);
    let store = store(&disk);
    let reader = store.chunk_reader(&checkpoint);
    let all = reader.chunks(|_| true);
    assert_eq!(all.len(), 6, "three of each shard");
    assert_eq!(reader.chunks(|_| false), []);
    let chunks = reader.chunks(|tensor| tensor.name == "second");
    // Elements 1,000,000 to 4,000,000 of 6,000,000, in shards of 3,000,000 elements.
    assert_eq!(chunks, all[..4]);
    let mut tensors = support::Tensors::from([("second".into(), vec![0.0; 3_000_000])]);
    let mut numbers = vec![0.0; CHUNK / 4];
    for chunk in chunks.into_iter().rev() {
        reader.read(chunk, &mut numbers).unwrap();
        for from in (0..chunk.numbers()).step_by(99_999) {
            let part = &numbers[from..(from + 99_999).min(chunk.numbers())];
            reader.deliver(chunk, from, part, &mut tensors).unwrap();
        }
    }
    assert!(tensors["second"].iter().all(|number| *number == 2.0));

    let file = path(ID, "rank-1.safetensors");
    let mut bytes = read(&disk, &file);
    bytes[CHUNK] ^= 1;
    write(&disk, &file, &bytes);
    let error = reader.read(all[4], &mut numbers).unwrap_err().to_string();
    assert!(error.contains("rank-1.safetensors: damaged: chunk 1, bytes 4194304 to 8388608"), "{error}");
    for chunk in [all[3], all[5]] {
        reader.read(chunk, &mut numbers).unwrap();
    }
}

/// A disk on which one file cannot be opened for a while.
struct Stale<'a> {
    disk: &'a MemoryDisk,
    file: PathBuf,
    failures: AtomicU32,
}

impl Vfs for Stale<'_> {
    fn open(&self, path: &Path) -> io::Result<Box<dyn ReadFile>> {
        let fails = |left: u32| left.checked_sub(1).filter(|_| path == self.file);
        match self.failures.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fails) {
            Ok(_) => Err(io::ErrorKind::StaleNetworkFileHandle.into()),
            Err(_) => self.disk.open(path),
        }
    }

    fn create_directory(&self, path: &Path) -> io::Result<()> {
        self.disk.create_directory(path)
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn WriteFile>> {
        self.disk.create(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.disk.rename(from, to)
    }

    fn sync_directory(&self, path: &Path) -> io::Result<()> {
        self.disk.sync_directory(path)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.disk.remove_file(path)
    }

    fn remove_directory(&self, path: &Path) -> io::Result<()> {
        self.disk.remove_directory(path)
    }

    fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        self.disk.list(path)
    }

    fn kind(&self, path: &Path) -> io::Result<Kind> {
        self.disk.kind(path)
    }

    fn available(&self, directory: &Path) -> io::Result<Option<u64>> {
        self.disk.available(directory)
    }
}

/// The older checkpoint was used, and the newer one, which was good, never again.
#[test]
fn a_checkpoint_that_cannot_be_read_now_is_not_skipped() {
    let disk = MemoryDisk::new(None);
    let newest = CheckpointId { attempt: 1, step: 600 };
    save(&store(&disk), ID, 3).unwrap();
    save(&store(&disk), newest, 3).unwrap();
    for file in ["rank-1.safetensors", "manifest.json"] {
        let stale = Stale { disk: &disk, file: path(newest, file), failures: AtomicU32::new(1) };
        let store = Store::new(&stale, Path::new(DIRECTORY));
        let error = latest(&store, JOB).unwrap_err();
        assert!(error.is_io(), "{error}");
        let latest = support::latest(&store, JOB).unwrap();
        assert_eq!(latest.checkpoint.unwrap().manifest().info().id, newest);
        assert!(latest.skipped.is_empty());
    }
}
