//! Arbitrary bytes: nothing panics, and nothing takes much more memory than there are bytes.
//!
//! After the fixed cases, random bytes are tried for [`SECONDS`], or for the time in the variable `FUZZ_SECONDS`.
#![allow(clippy::unwrap_used)]

mod support;

use proptest::prelude::*;
use proptest::test_runner::{TestError, TestRunner};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::Path;
use std::time::{Duration, Instant};
use support::disk::{MemoryDisk, Random};
use support::{DIRECTORY, JOB, id, read, save, write};
use switchyard_checkpoint::disk::Vfs;
use switchyard_checkpoint::format::Digest;
use switchyard_checkpoint::{Checkpoint, Manifest, Store};

const SECONDS: u64 = 1;

/// Most bytes that may be held at once per byte of input.
const FACTOR: usize = 16;
/// Bytes held for an input of any size: texts of errors, the disk of the test.
const FIXED: usize = 64 << 10;

struct Counting;

thread_local! {
    /// Bytes that this thread holds, and the most that it has held.
    static HELD: Cell<(isize, isize)> = const { Cell::new((0, 0)) };
}

fn count(bytes: isize) {
    // While a thread ends there is nothing left to count.
    let _ = HELD.try_with(|held| {
        let now = held.get().0 + bytes;
        held.set((now, held.get().1.max(now)));
    });
}

// SAFETY: all calls go to the system's allocator; counting does not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: as promised by the caller.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: as promised by the caller.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// The most bytes that a call held beyond what was held before.
fn peak(call: impl FnOnce()) -> usize {
    let before = HELD.get().0;
    HELD.set((before, before));
    call();
    (HELD.get().1 - before) as usize
}

fn assert_modest(input: usize, what: &str, call: impl FnOnce()) {
    let peak = peak(call);
    assert!(peak <= FACTOR * input + FIXED, "{what}: {peak} bytes for an input of {input}");
}

/// A manifest's file with this content and the right digest.
fn sealed(inner: &[u8]) -> Vec<u8> {
    [b"{\"digest\":\"", Digest::of(inner).to_string().as_bytes(), b"\",\"manifest\":", inner, b"}\n"].concat()
}

/// A valid checkpoint, next to which others are placed.
struct Bench {
    disk: MemoryDisk,
    checkpoint: Checkpoint,
    manifest: Vec<u8>,
    shard: Vec<u8>,
}

impl Bench {
    fn new() -> Bench {
        let disk = MemoryDisk::new(None);
        let store = Store::new(&disk, Path::new(DIRECTORY));
        save(&store, id(1, 5), 2).unwrap();
        let checkpoint = store.open(id(1, 5)).unwrap();
        let manifest = read(&disk, &checkpoint.directory().join("manifest.json"));
        let shard = read(&disk, &checkpoint.directory().join("rank-0.safetensors"));
        Bench { disk, checkpoint, manifest, shard }
    }

    fn inner(&self) -> &[u8] {
        let start = self.manifest.iter().skip(1).position(|byte| *byte == b'{').unwrap() + 1;
        &self.manifest[start..self.manifest.len() - 2]
    }

    /// The manifest, with a right digest.
    fn try_manifest(&self, inner: &[u8]) {
        let file = sealed(inner);
        assert_modest(file.len(), "manifest", || drop(Manifest::decode(&file)));
    }

    /// The shard, with a header of the right length.
    fn try_header(&self, json: &[u8]) {
        let mut file = (json.len() as u64).to_le_bytes().to_vec();
        file.extend_from_slice(json);
        self.try_shard(&file);
    }

    /// A shard of any length: its owner is read before an unfinished checkpoint is removed.
    fn try_shard(&self, file: &[u8]) {
        let unfinished = Path::new(DIRECTORY).join(id(1, 4).directory());
        let _ = self.disk.create_directory(&unfinished);
        write(&self.disk, &unfinished.join("rank-0.safetensors"), file);
        let store = Store::new(&self.disk, Path::new(DIRECTORY));
        assert_modest(file.len(), "header of a shard", || drop(store.prune(JOB, 1, 1).unwrap()));
        if file.len() == self.shard.len() {
            let name = self.checkpoint.directory().join("rank-0.safetensors");
            write(&self.disk, &name, file);
            assert_modest(file.len(), "shard", || {
                let faults = store.verify(&self.checkpoint);
                assert!(!faults.is_empty() || file == self.shard);
            });
            write(&self.disk, &name, &self.shard);
        }
    }
}

/// JSON that is almost a manifest or a header, in many variants.
fn worst_cases() -> Vec<Vec<u8>> {
    let bench = Bench::new();
    let text = String::from_utf8(bench.inner().to_vec()).unwrap();
    let many = |one: &str| vec![one; 40_000].join(",");
    let mut cases: Vec<String> = vec![
        text.replace("\"progress\":5", &format!("\"progress\":[{}]", many("0"))),
        text.replace("\"progress\":5", &format!("\"progress\":{}1{}", "[".repeat(100_000), "]".repeat(100_000))),
        text.replace("\"shape\":[50,7]", &format!("\"shape\":[{}]", many("1"))),
        text.replace("\"exportAxes\":[0,3,1,2]", &format!("\"exportAxes\":[{}]", many("1"))),
        text.replace("\"tensors\":[", &format!("\"tensors\":[{},", many("{}"))),
        text.replace("\"world\":2", "\"world\":65536"),
        text.replace("\"job\":\"gpt\"", &format!("\"job\":\"{}\"", "\\u00e4".repeat(40_000))),
    ];
    let tensor = r#"{"name":"","shape":[],"dtype":"F32","role":"Weight","pieces":[]}"#;
    cases.push(text.replace("\"tensors\":[", &format!("\"tensors\":[{},", many(tensor))));
    let piece = r#"{"shard":0,"offset":0,"len":0}"#;
    cases.push(text.replace("\"pieces\":[", &format!("\"pieces\":[{},", many(piece))));
    let digest = format!("\"{}\"", "0".repeat(32));
    cases.push(text.replace("\"chunks\":[", &format!("\"chunks\":[{},", many(&digest))));
    assert!(cases.iter().all(|case| *case != text), "every change changes something");
    let entry = |index: usize| format!(r#""{index}":{{"dtype":"F32","shape":[],"data_offsets":[0,0]}}"#);
    cases.push(format!("{{{}}}", (0..40_000).map(entry).collect::<Vec<_>>().join(",")));
    cases.push(format!(r#"{{"a":{{"shape":[{}]}}}}"#, many("1")));
    cases.push(format!(r#"{{"__metadata__":{{{}}}}}"#, many(r#""a":"""#)));
    cases.push("[".repeat(1 << 20));
    cases.into_iter().map(String::into_bytes).collect()
}

#[test]
fn the_worst_cases_take_little_memory() {
    let bench = Bench::new();
    for case in worst_cases() {
        bench.try_manifest(&case);
        bench.try_header(&case);
    }
    for length in [0, 1, 1 << 20, 1 << 40, u64::MAX - 8, u64::MAX] {
        let mut file = bench.shard.clone();
        file[..8].copy_from_slice(&length.to_le_bytes());
        bench.try_shard(&file);
    }
}

/// Changes some bytes: flips, truncates, repeats, exchanges digits.
fn mutate(bytes: &[u8], random: &mut Random) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for _ in 0..=random.below(4) {
        if bytes.is_empty() {
            break;
        }
        let at = random.below(bytes.len());
        let end = (at + 1 + random.below(40)).min(bytes.len());
        match random.below(6) {
            0 => bytes[at] ^= 1 << random.below(8),
            1 => drop(bytes.drain(at..end)),
            2 => {
                let part = bytes[at..end].to_vec();
                bytes.splice(at..at, part);
            }
            3 => {
                let part = bytes[at..end].to_vec();
                let to = random.below(bytes.len());
                bytes.splice(to..to, part);
            }
            4 => {
                // Bounds are where numbers are.
                let digits = (at..bytes.len()).find(|at| bytes[*at].is_ascii_digit());
                let number = [&b"0"[..], b"-1", b"18446744073709551615", b"4294967296", b"1e308"][random.below(5)];
                if let Some(at) = digits {
                    bytes.splice(at..at + 1, number.iter().copied());
                }
            }
            _ => bytes.truncate(at),
        }
    }
    bytes
}

fn fuzz(bench: &Bench, random: &mut Random) {
    let header = &bench.shard[8..8 + u64::from_le_bytes(bench.shard[..8].try_into().unwrap()) as usize];
    bench.try_manifest(&mutate(bench.inner(), random));
    bench.try_header(&mutate(header, random));
    bench.try_shard(&mutate(&bench.shard, random));
    let manifest = mutate(&bench.manifest, random);
    assert_modest(manifest.len(), "manifest", || drop(Manifest::decode(&manifest)));
}

#[test]
fn changed_bytes_do_no_harm() {
    let bench = Bench::new();
    let mut random = Random(3);
    for _ in 0..3000 {
        fuzz(&bench, &mut random);
    }
}

#[test]
fn random_bytes_do_no_harm() {
    let bench = Bench::new();
    let mut runner = TestRunner::new(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() });
    let result = runner.run(&prop::collection::vec(any::<u8>(), 0..2000), |bytes| {
        bench.try_manifest(&bytes);
        bench.try_header(&bytes);
        bench.try_shard(&bytes);
        assert_modest(bytes.len(), "manifest", || drop(Manifest::decode(&bytes)));
        Ok(())
    });
    if let Err(TestError::Fail(reason, bytes)) = result {
        panic!("{reason}: {bytes:?}");
    }
}

#[test]
fn fuzz_manifests_and_shards() {
    let seconds = std::env::var("FUZZ_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(SECONDS);
    let end = Instant::now() + Duration::from_secs(seconds);
    let bench = Bench::new();
    let seed = std::env::var("SWITCHYARD_SEED").ok().and_then(|text| text.parse().ok());
    let seed = seed.unwrap_or_else(|| u64::from(std::process::id()));
    // Shown if a round fails.
    println!("again with SWITCHYARD_SEED={seed}");
    let mut random = Random(seed);
    while Instant::now() < end {
        fuzz(&bench, &mut random);
    }
}
