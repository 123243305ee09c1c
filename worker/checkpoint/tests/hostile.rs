//! Arbitrary bytes: nothing panics, and memory use stays proportional to the input.
//!
//! After the fixed cases, random bytes are tried for [`SECONDS`], or for `FUZZ_SECONDS` from the
//! environment.
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

/// Allowed peak allocation per byte of input.
const FACTOR: usize = 16;
/// Allowed allocation for any input: error messages, the test's disk.
const FIXED: usize = 64 << 10;

struct CountingAllocator;

thread_local! {
    /// Bytes currently allocated by this thread, and their peak.
    static HELD: Cell<(isize, isize)> = const { Cell::new((0, 0)) };
}

fn count(bytes: isize) {
    // The thread-local is gone while a thread exits.
    let _ = HELD.try_with(|held| {
        let now = held.get().0 + bytes;
        held.set((now, held.get().1.max(now)));
    });
}

// SAFETY: all calls are forwarded to the system allocator; counting does not allocate.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: upheld by the caller.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: upheld by the caller.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: CountingAllocator = CountingAllocator;

/// Peak allocation of a call above the previous level.
fn peak(call: impl FnOnce()) -> usize {
    let before = HELD.get().0;
    HELD.set((before, before));
    call();
    (HELD.get().1 - before) as usize
}

fn assert_bounded_memory(input: usize, what: &str, call: impl FnOnce()) {
    let peak = peak(call);
    assert!(peak <= FACTOR * input + FIXED, "{what}: {peak} bytes for an input of {input}");
}

/// A manifest file with this content and a matching digest.
fn sealed(inner: &[u8]) -> Vec<u8> {
    [b"{\"digest\":\"", Digest::of(inner).to_string().as_bytes(), b"\",\"manifest\":", inner, b"}\n"].concat()
}

/// A valid checkpoint, used as the template for corrupted ones.
struct Fixture {
    disk: MemoryDisk,
    checkpoint: Checkpoint,
    manifest: Vec<u8>,
    shard: Vec<u8>,
}

impl Fixture {
    fn new() -> Fixture {
        let disk = MemoryDisk::new(None);
        let store = Store::new(&disk, Path::new(DIRECTORY));
        save(&store, id(1, 5), 2).unwrap();
        let checkpoint = store.open(id(1, 5)).unwrap();
        let manifest = read(&disk, &checkpoint.directory().join("manifest.json"));
        let shard = read(&disk, &checkpoint.directory().join("rank-0.safetensors"));
        Fixture { disk, checkpoint, manifest, shard }
    }

    fn inner(&self) -> &[u8] {
        let start = self.manifest.iter().skip(1).position(|byte| *byte == b'{').unwrap() + 1;
        &self.manifest[start..self.manifest.len() - 2]
    }

    /// Tries the manifest, with a matching digest.
    fn try_manifest(&self, inner: &[u8]) {
        let file = sealed(inner);
        assert_bounded_memory(file.len(), "manifest", || drop(Manifest::decode(&file)));
    }

    /// Tries the shard, with the right header length.
    fn try_header(&self, json: &[u8]) {
        let mut file = (json.len() as u64).to_le_bytes().to_vec();
        file.extend_from_slice(json);
        self.try_shard(&file);
    }

    /// Tries a shard of any length: pruning reads its owner before it removes an unfinished
    /// checkpoint.
    fn try_shard(&self, file: &[u8]) {
        let unfinished = Path::new(DIRECTORY).join(id(1, 4).directory());
        let _ = self.disk.create_directory(&unfinished);
        write(&self.disk, &unfinished.join("rank-0.safetensors"), file);
        let store = Store::new(&self.disk, Path::new(DIRECTORY));
        assert_bounded_memory(file.len(), "header of a shard", || drop(store.prune(JOB, 1, 1).unwrap()));
        if file.len() == self.shard.len() {
            let name = self.checkpoint.directory().join("rank-0.safetensors");
            write(&self.disk, &name, file);
            assert_bounded_memory(file.len(), "shard", || {
                let faults = store.verify(&self.checkpoint);
                assert!(!faults.is_empty() || file == self.shard);
            });
            write(&self.disk, &name, &self.shard);
        }
    }
}

/// Variants of JSON that is almost a manifest or a header.
fn worst_cases() -> Vec<Vec<u8>> {
    let fixture = Fixture::new();
    let text = String::from_utf8(fixture.inner().to_vec()).unwrap();
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
    let fixture = Fixture::new();
    for case in worst_cases() {
        fixture.try_manifest(&case);
        fixture.try_header(&case);
    }
    for length in [0, 1, 1 << 20, 1 << 40, u64::MAX - 8, u64::MAX] {
        let mut file = fixture.shard.clone();
        file[..8].copy_from_slice(&length.to_le_bytes());
        fixture.try_shard(&file);
    }
}

/// Mutates some bytes: flips, truncates, repeats, replaces digits.
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
                // Digits are likely bounds.
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

fn fuzz(fixture: &Fixture, random: &mut Random) {
    let header = &fixture.shard[8..8 + u64::from_le_bytes(fixture.shard[..8].try_into().unwrap()) as usize];
    fixture.try_manifest(&mutate(fixture.inner(), random));
    fixture.try_header(&mutate(header, random));
    fixture.try_shard(&mutate(&fixture.shard, random));
    let manifest = mutate(&fixture.manifest, random);
    assert_bounded_memory(manifest.len(), "manifest", || drop(Manifest::decode(&manifest)));
}

#[test]
fn mutated_bytes_do_no_harm() {
    let fixture = Fixture::new();
    let mut random = Random(3);
    for _ in 0..3000 {
        fuzz(&fixture, &mut random);
    }
}

#[test]
fn random_bytes_do_no_harm() {
    let fixture = Fixture::new();
    let mut runner = TestRunner::new(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() });
    let result = runner.run(&prop::collection::vec(any::<u8>(), 0..2000), |bytes| {
        fixture.try_manifest(&bytes);
        fixture.try_header(&bytes);
        fixture.try_shard(&bytes);
        assert_bounded_memory(bytes.len(), "manifest", || drop(Manifest::decode(&bytes)));
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
    let fixture = Fixture::new();
    let seed = std::env::var("SWITCHYARD_SEED").ok().and_then(|text| text.parse().ok());
    let seed = seed.unwrap_or_else(|| u64::from(std::process::id()));
    // Printed if the round fails.
    println!("rerun with SWITCHYARD_SEED={seed}");
    let mut random = Random(seed);
    while Instant::now() < end {
        fuzz(&fixture, &mut random);
    }
}
