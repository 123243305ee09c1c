//! Small data of every format, and helpers to read it.

use image::ImageEncoder;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use switchyard_worker::data::{Batch, DataError, Dataset, Kind, Order, Prefetcher, StepShape, Task, ValidationSet};
use switchyard_worker_contract::config::{
    Data, Features, Files, ImageShape, Images, Reader, SampleType, Source, Synthetic, TokenType, Tokens,
};

pub(crate) const READER: Reader = Reader {
    workers: Some(1),
    double_buffer: true,
    infinite: true,
    sample_type: SampleType::UInt8,
    max_bad_samples: 0,
};

/// A temporary directory.
pub(crate) struct Dir(tempfile::TempDir);

impl Dir {
    pub(crate) fn new() -> Dir {
        Dir(tempfile::tempdir().unwrap())
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, bytes: impl AsRef<[u8]>) {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }

    pub(crate) fn files(&self) -> Files {
        files(self.0.path())
    }

    pub(crate) fn below(&self, name: &str) -> Files {
        files(&self.path(name))
    }

    pub(crate) fn tokens(&self, name: &str, token_type: TokenType) -> Source {
        Source::Tokens(Tokens { path: self.path(name).to_str().unwrap().to_owned(), token_type })
    }
}

pub(crate) fn files(path: &Path) -> Files {
    Files { path: path.to_str().unwrap().to_owned(), include: vec![], exclude: vec![] }
}

pub(crate) fn data(source: Source) -> Data {
    let images = Images { size: 0, crop_padding: 0, flip: false, mean: vec![0.0], deviation: vec![1.0] };
    Data { source, validation_fraction: 0.0, images, features: Features::Raw }
}

pub(crate) fn synthetic(samples: u64, image: Option<ImageShape>) -> Data {
    data(Source::Synthetic(Synthetic { samples, image, classes: 4 }))
}

pub(crate) fn next_token(context: u32, vocabulary: u32) -> Task {
    Task::NextToken { context, vocabulary }
}

pub(crate) fn open(data: &Data, task: &Task) -> Result<Arc<Dataset>, DataError> {
    Dataset::open(data, &READER, task, 7).map(Arc::new)
}

/// The error message, which names a field, the actual and the expected value.
pub(crate) fn error(data: &Data, task: &Task) -> String {
    let text = open(data, task).expect_err("an error").to_string();
    assert!(text.starts_with("spec.engine.") && text.contains("expected") && !text.ends_with('.'), "{text}");
    text
}

pub(crate) fn assert_error(data: &Data, task: &Task, words: &[&str]) {
    let text = error(data, task);
    for words in words {
        assert!(text.contains(words), "`{words}` is missing: {text}");
    }
}

pub(crate) fn order(dataset: &Dataset, batch_size: u32, merge: u32, world: u32) -> Order {
    Order::new(dataset, StepShape { batch_size, merge, world }, 7).unwrap()
}

/// The next `count` batches, without their timings.
pub(crate) fn take(prefetcher: &mut Prefetcher, count: usize) -> Vec<Batch> {
    let next = |_| {
        let mut batch = prefetcher.next().unwrap().clone();
        batch.making = None;
        batch
    };
    (0..count).map(next).collect()
}

pub(crate) fn start(dataset: &Arc<Dataset>, order: Order, reader: &Reader) -> Prefetcher {
    Prefetcher::start(Arc::clone(dataset), order, 0, 0, reader).unwrap()
}

/// All validation samples in order, as one batch.
pub(crate) fn validation(dataset: &Arc<Dataset>) -> Batch {
    let samples = dataset.facts().validation_samples as u32;
    let mut set = ValidationSet::new(dataset, samples, Some(1), 1, dataset.bad_samples()).unwrap();
    set.batch(0, 0).unwrap().0.clone()
}

/// (pixels or values as bits, class) of every training sample, sorted.
pub(crate) fn training(dataset: &Arc<Dataset>) -> Vec<(Vec<u32>, u32)> {
    let samples = dataset.facts().train_samples as u32;
    let mut prefetcher = start(dataset, order(dataset, samples, 1, 1), &READER);
    let mut rows = rows(dataset, prefetcher.next().unwrap());
    rows.sort_unstable();
    rows
}

/// (pixels or values as bits, class) of every sample.
pub(crate) fn rows(dataset: &Dataset, batch: &Batch) -> Vec<(Vec<u32>, u32)> {
    assert!(matches!(dataset.kind(), Kind::Images { .. } | Kind::Features { .. }));
    let mut all: Vec<u32> = batch.pixels.iter().map(|byte| u32::from(*byte)).collect();
    all.extend(batch.values.iter().map(|value| value.to_bits()));
    let samples = batch.targets.len();
    all.chunks_exact(all.len() / samples).map(<[u32]>::to_vec).zip(batch.targets.iter().copied()).collect()
}

/// An image of noise that is smooth enough to compress.
fn pixels(width: u32, height: u32, seed: u32) -> Vec<u8> {
    (0..height)
        .flat_map(|y| (0..width).flat_map(move |x| [x * 3 + seed * 40, y * 5 + seed, x * y / 4]))
        .map(|value| value as u8)
        .collect()
}

pub(crate) fn jpeg(width: u32, height: u32, seed: u32) -> Vec<u8> {
    let mut file = Vec::new();
    let encoder = image::codecs::jpeg::JpegEncoder::new_with_quality(&mut file, 80);
    encoder.write_image(&pixels(width, height, seed), width, height, image::ExtendedColorType::Rgb8).unwrap();
    file
}

pub(crate) fn png(width: u32, height: u32, seed: u32) -> Vec<u8> {
    let mut file = Vec::new();
    let mut encoder = png::Encoder::new(&mut file, width, height);
    encoder.set_color(png::ColorType::Rgb);
    encoder.write_header().unwrap().write_image_data(&pixels(width, height, seed)).unwrap();
    file
}

/// An IDX file of bytes.
pub(crate) fn idx(sizes: &[u32], data: &[u8]) -> Vec<u8> {
    let mut file = vec![0, 0, 8, sizes.len() as u8];
    file.extend(sizes.iter().flat_map(|size| size.to_be_bytes()));
    file.extend(data);
    file
}

/// A `.npy` file.
pub(crate) fn npy(kind: &str, shape: &[usize], data: &[u8]) -> Vec<u8> {
    let sizes: String = shape.iter().map(|size| format!("{size},")).collect();
    let header = format!("{{'descr': '{kind}', 'fortran_order': False, 'shape': ({sizes}), }}\n");
    let mut file = b"\x93NUMPY\x01\x00".to_vec();
    file.extend((header.len() as u16).to_le_bytes());
    file.extend(header.as_bytes());
    file.extend(data);
    file
}

/// CIFAR-10 records with this class and byte.
pub(crate) fn cifar(records: &[(u8, u8)]) -> Vec<u8> {
    records.iter().flat_map(|(class, byte)| [vec![*class], vec![*byte; 3072]].concat()).collect()
}

/// The six CIFAR-10 files, with two records each.
pub(crate) fn cifar_directory() -> Dir {
    let directory = Dir::new();
    for batch in 0..6 {
        let name = if batch == 5 { "test_batch.bin".to_owned() } else { format!("data_batch_{}.bin", batch + 1) };
        directory.write(&name, cifar(&[(batch, batch), (9, 100 + batch)]));
    }
    directory
}

/// The four MNIST files: 3 images of 2x2 for training, 2 for validation.
pub(crate) fn idx_directory() -> Dir {
    let directory = Dir::new();
    directory.write("train-images-idx3-ubyte", idx(&[3, 2, 2], &(0..12).collect::<Vec<u8>>()));
    directory.write("train-labels-idx1-ubyte", idx(&[3], &[2, 0, 1]));
    directory.write("t10k-images-idx3-ubyte", idx(&[2, 2, 2], &(100..108).collect::<Vec<u8>>()));
    directory.write("t10k-labels-idx1-ubyte", idx(&[2], &[4, 0]));
    directory
}
