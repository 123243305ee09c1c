//! Corrupt files of any kind give a clear error or samples; never a panic, and never more memory
//! than the file justifies.
//!
//! Each format is tried for [`SECONDS`], or for `FUZZ_SECONDS` from the environment.

use crate::memory::memory;
use crate::support::*;
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::{Config, TestCaseError, TestRunner};
use safetensors::tensor::{Dtype, TensorView, serialize};
use std::cell::RefCell;
use std::sync::Once;
use std::time::{Duration, Instant};
use switchyard_worker::data::{Dataset, Task, ValidationSet};
use switchyard_worker_contract::config::{Csv, Data, Header, Reader, Source, TokenType};

const SECONDS: u64 = 1;

thread_local! {
    /// Where our own code has panicked on this thread.
    static PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Records panics of our own code, which the guard around decoders turns into errors. A panic of a
/// third-party decoder is what that guard is for.
fn record_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let print = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            // Paths of this workspace are relative to its root.
            let own = panic.location().filter(|place| place.file().starts_with("worker/src/"));
            PANIC.set(own.map(ToString::to_string).or_else(|| PANIC.take()));
            print(panic);
        }));
    });
}

/// A change to a file.
#[derive(Debug, Clone)]
enum Change {
    Random(Vec<u8>),
    Cut(Index),
    Set(Vec<(Index, u8)>),
    /// A 32-bit integer of all ones or zeros, or with a high bit set: typical of corrupt sizes.
    Size(Index, [u8; 4]),
    Insert(Index, Vec<u8>),
    Remove(Index, Index),
}

fn change() -> impl Strategy<Value = Change> {
    let bytes = |most| prop::collection::vec(any::<u8>(), 0..most);
    let sizes =
        prop::sample::select(vec![[0xff; 4], [0; 4], [0x80, 0, 0, 0], [0, 0, 0, 0x7f], [0, 1, 0, 0], [9, 0, 0, 0]]);
    prop_oneof![
        1 => bytes(300).prop_map(Change::Random),
        2 => any::<Index>().prop_map(Change::Cut),
        4 => prop::collection::vec((any::<Index>(), any::<u8>()), 1..6).prop_map(Change::Set),
        3 => (any::<Index>(), sizes).prop_map(|(at, size)| Change::Size(at, size)),
        1 => (any::<Index>(), bytes(40)).prop_map(|(at, bytes)| Change::Insert(at, bytes)),
        1 => (any::<Index>(), any::<Index>()).prop_map(|(from, to)| Change::Remove(from, to)),
    ]
}

impl Change {
    fn apply(&self, good: &[u8]) -> Vec<u8> {
        let mut file = good.to_vec();
        let at = |index: &Index| index.index(good.len());
        match self {
            Change::Random(bytes) => return bytes.clone(),
            Change::Cut(end) => file.truncate(at(end)),
            Change::Set(bytes) => bytes.iter().for_each(|(place, byte)| file[at(place)] = *byte),
            // Headers are at the start, so half of the changes are there.
            Change::Size(place, size) => {
                let place = if size[0] == 0 { at(place) } else { place.index(good.len().min(64)) };
                file.iter_mut().skip(place).zip(size).for_each(|(byte, size)| *byte = *size);
            }
            Change::Insert(place, bytes) => drop(file.splice(at(place)..at(place), bytes.iter().copied())),
            Change::Remove(from, to) => {
                let (from, to) = (at(from).min(at(to)), at(from).max(at(to)));
                file.drain(from..to);
            }
        }
        file
    }
}

/// Repeatedly corrupts one of the files and reads the data: opens it and reads a batch of each
/// side.
fn fuzz(directory: &Dir, names: &[&str], data: &Data, task: &Task, allowed: impl Fn(usize) -> usize) {
    let seconds = std::env::var("FUZZ_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(SECONDS);
    let end = Instant::now() + Duration::from_secs(seconds);
    let good: Vec<Vec<u8>> = names.iter().map(|name| std::fs::read(directory.path(name)).unwrap()).collect();
    record_panics();
    assert!(read(data, task, 0).is_ok(), "the files are valid before");
    while Instant::now() < end {
        // A failing file with a large image is slow to shrink.
        let config = Config { cases: 200, failure_persistence: None, max_shrink_time: 20_000, ..Config::default() };
        let mut runner = TestRunner::new(config);
        let case = (any::<Index>(), change());
        let result = runner.run(&case, |(file, change)| {
            let file = file.index(names.len());
            let broken = change.apply(&good[file]);
            directory.write(names[file], &broken);
            let input: usize = good.iter().map(Vec::len).sum::<usize>() + broken.len();
            let (result, bytes) = memory(|| read(data, task, 0));
            // Reports of bad samples go to standard error, which the test harness buffers in
            // memory, so they are not measured.
            let _ = read(data, task, 3);
            directory.write(names[file], &good[file]);
            if let Some(place) = PANIC.take() {
                return Err(TestCaseError::fail(format!("a panic at {place}")));
            }
            if bytes > allowed(input) {
                let text = format!("{bytes} bytes of memory for {input} bytes of files: {result:?}");
                return Err(TestCaseError::fail(text));
            }
            Ok(())
        });
        result.unwrap();
    }
    assert!(read(data, task, 0).is_ok(), "the files are valid again");
}

/// Opens and reads the data on this thread, so that its memory is counted. An error must name a
/// field.
fn read(data: &Data, task: &Task, max_bad_samples: u64) -> Result<(), String> {
    let reader = Reader { max_bad_samples, ..READER };
    let read = || {
        let dataset = std::sync::Arc::new(Dataset::open(data, &reader, task, 7)?);
        let samples = dataset.facts().validation_samples.min(64) as u32;
        if let Some(mut set) = ValidationSet::new(&dataset, samples, Some(1), 1, dataset.bad_samples()) {
            set.batch(0, 0)?;
        }
        Ok(())
    };
    read().map_err(|error: switchyard_worker::data::DataError| {
        let text = error.to_string();
        assert!(text.starts_with("spec.engine.") && text.contains("expected"), "{text}");
        text
    })
}

/// For data kept in memory: 16 times the file size, plus 1 MiB.
fn by_size(input: usize) -> usize {
    16 * input + (1 << 20)
}

#[test]
fn cifar10_files() {
    let directory = cifar_directory();
    let data = data(Source::Cifar10(directory.files()));
    fuzz(&directory, &["data_batch_1.bin", "test_batch.bin"], &data, &Task::Classify, by_size);
}

#[test]
fn idx_files() {
    let directory = idx_directory();
    let names =
        ["train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"];
    fuzz(&directory, &names, &data(Source::Idx(directory.files())), &Task::Classify, by_size);
}

#[test]
fn csv_files() {
    csv((0..40).map(|line| format!("{line},{}.5,-1e{},{}\n", line * 3, line % 19, line % 5)).collect());
}

#[test]
fn csv_files_with_class_names() {
    csv((0..40).map(|line| format!("{line},\"kind {}\"\n", line % 5)).collect());
}

fn csv(lines: String) {
    let directory = Dir::new();
    directory.write("x.csv", lines);
    let path = directory.path("x.csv").to_str().unwrap().to_owned();
    let mut data = data(Source::Csv(Csv { path, image: None, largest: 1.0, label: None, header: Header::Auto }));
    data.validation_fraction = 0.2;
    fuzz(&directory, &["x.csv"], &data, &Task::Classify, by_size);
}

/// Images of 2 by 2 pixels, and their classes.
fn arrays() -> (Vec<u8>, Vec<u8>) {
    ((0..120).collect(), (0..10_i64).flat_map(|label| (label % 3).to_le_bytes()).collect())
}

#[test]
fn npy_files() {
    let (directory, (pixels, labels)) = (Dir::new(), arrays());
    directory.write("images.npy", npy("|u1", &[10, 2, 2, 3], &pixels));
    directory.write("labels.npy", npy("<i8", &[10], &labels));
    let mut data = data(Source::SafeTensors(directory.files()));
    data.validation_fraction = 0.3;
    fuzz(&directory, &["images.npy", "labels.npy"], &data, &Task::Classify, by_size);
}

#[test]
fn safetensors_files() {
    let (directory, (pixels, labels)) = (Dir::new(), arrays());
    let tensors = [
        ("images", TensorView::new(Dtype::U8, vec![10, 2, 2, 3], &pixels).unwrap()),
        ("labels", TensorView::new(Dtype::I64, vec![10], &labels).unwrap()),
    ];
    directory.write("x.safetensors", serialize(tensors, None).unwrap());
    let mut data = data(Source::SafeTensors(files(&directory.path("x.safetensors"))));
    data.validation_fraction = 0.3;
    fuzz(&directory, &["x.safetensors"], &data, &Task::Classify, by_size);
}

#[test]
fn token_files() {
    let directory = Dir::new();
    directory.write("train.bin", (0..3000_u32).flat_map(|token| (token % 90).to_le_bytes()).collect::<Vec<u8>>());
    directory.write("val.bin", [1, 0, 0, 0].repeat(200));
    let data = data(directory.tokens("", TokenType::UInt32));
    fuzz(&directory, &["train.bin", "val.bin"], &data, &next_token(16, 100), by_size);
}

/// An image may decode to 1000 times its file size. The sizes in its header are limited, which
/// bounds the memory: for the sizes that small changes produce, to a quarter of the largest image.
fn image_files(extension: &str, images: &[Vec<u8>]) {
    let directory = Dir::new();
    let name = |image: usize| format!("val/a/{image}.{extension}");
    // One more stays as it is, so that bad images can be replaced.
    for (image, content) in images.iter().chain(&images[..1]).enumerate() {
        directory.write(&name(image), content);
    }
    directory.write(&format!("train/a/1.{extension}"), &images[0]);
    let mut data = data(Source::ImageFolder(directory.files()));
    data.images.size = 16;
    let names: Vec<String> = (0..images.len()).map(name).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    fuzz(&directory, &names, &data, &Task::Classify, |_| 1 << 30);
}

/// The fixtures of `worker/tests/fixtures/generate_images.py`.
fn fixtures(names: &[&str]) -> Vec<Vec<u8>> {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/images");
    names.iter().map(|name| std::fs::read(folder.join(name)).expect(name)).collect()
}

#[test]
fn jpeg_files() {
    image_files("jpg", &[jpeg(40, 30, 1)]);
}

#[test]
fn png_files() {
    image_files("png", &[png(40, 30, 1)]);
}

#[test]
fn bmp_files() {
    image_files("bmp", &fixtures(&["plain.bmp", "palette.bmp", "bits.bmp"]));
}

#[test]
fn gif_files() {
    image_files("gif", &fixtures(&["plain.gif", "animated.gif"]));
}

#[test]
fn netpbm_files() {
    image_files("pgm", &fixtures(&["grey.pgm", "plain.bmp.ppm"]));
}

#[test]
fn tiff_files() {
    let names =
        ["lzw.tiff", "deflate.tiff", "bits.tiff", "alpha.tiff", "palette.tiff", "palette-2.tiff", "upright.tif"];
    image_files("tiff", &fixtures(&names));
}

#[test]
fn webp_files() {
    image_files("webp", &fixtures(&["lossy.webp", "lossless.webp", "alpha.webp", "animated.webp", "upright.webp"]));
}
