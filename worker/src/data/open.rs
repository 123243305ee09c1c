//! Opens each source.

use super::error::DataError;
use super::images::{AugmentedImages, Images, Normalisation};
use super::loaded::{Classes, Content, Loaded, Pair, check_shape};
use super::part::Part;
use super::phrases::SyntheticTokens;
use super::rows::{MAX_CLASSES, Rows};
use super::scan::Scan;
use super::skipped::SkippedFiles;
use super::synthetic::{FEATURES, SyntheticFeatures, SyntheticImages};
use super::task::{Kind, Masking, Task, WindowKind};
use super::text::Corpus;
use super::token_file::TokenFiles;
use super::tokens::Tokens;
use super::windows::Windows;
use super::{arrays, cifar, csv, decode, features, files, folder, idx};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use switchyard_worker_contract::config::{self, Data, Features, ImageShape, Reader, Source, Synthetic};
use xxhash_rust::xxh3::Xxh3;

/// In-memory limit: 4 GiB, all of it in every rank. Token files and image folders are read on
/// demand instead.
pub const MAX_BYTES: u64 = 4 << 30;
/// Maximum number of synthetic samples.
const MAX_SYNTHETIC: u64 = 1 << 40;
/// Mixed into the seed, so that synthetic validation samples differ from training samples.
const VALIDATION: u64 = 0x5851_f42d_4c95_7f2d;
/// Number of distinct bytes: the vocabulary of text.
const BYTES: u32 = 256;

/// An opened source.
pub(super) struct Opened {
    pub kind: Kind,
    /// Names of the classes, in order; empty if they are numbers.
    pub class_names: Vec<String>,
    pub train: Box<dyn Part>,
    pub validation: Option<Box<dyn Part>>,
    /// Training and validation items, if they differ from the samples.
    pub items: Option<(u64, u64)>,
    pub files: u64,
    pub skipped: SkippedFiles,
    /// Unreadable samples, which are skipped.
    pub bad: u64,
    pub bytes: u64,
    pub digest: u128,
    pub normalisation: Option<Normalisation>,
    /// How features were normalised.
    pub features: Features,
}

/// A source, possibly with blocks that are still to be read.
pub(super) enum Found {
    Opened(Box<Opened>),
    Unscanned(UnscannedFiles),
}

/// Files that are divided by the content of their blocks.
pub(super) enum UnscannedFiles {
    Tokens(TokenFiles, WindowKind),
    Images(Box<folder::Unsplit>),
}

impl UnscannedFiles {
    pub fn blocks(&self) -> u64 {
        match self {
            UnscannedFiles::Tokens(files, _) => files.blocks(),
            UnscannedFiles::Images(images) => images.len(),
        }
    }

    /// Description without the content of blocks.
    pub fn description(&self) -> String {
        match self {
            UnscannedFiles::Tokens(files, _) => format!("{} token bytes in {} blocks", files.bytes(), files.blocks()),
            UnscannedFiles::Images(images) => format!("{} images, digest {:032x}", images.len(), images.digest()),
        }
    }

    /// Reads all blocks, and splits them. `read` counts blocks.
    pub fn scan(&self, read: &AtomicU64) -> Result<Scan, DataError> {
        match self {
            UnscannedFiles::Tokens(files, _) => files.scan(read),
            UnscannedFiles::Images(images) => images.scan(read),
        }
    }

    /// Reads these blocks; returns their hashes.
    pub fn hashes(&self, blocks: &mut dyn Iterator<Item = u64>) -> Result<Vec<u64>, DataError> {
        match self {
            UnscannedFiles::Tokens(files, _) => files.hashes(blocks),
            UnscannedFiles::Images(images) => images.hashes(blocks),
        }
    }

    /// The source, split according to a scan.
    pub fn split(&self, scan: &Scan, data: &Data, reader: &Reader) -> Result<Opened, DataError> {
        match self {
            UnscannedFiles::Tokens(files, shape) => {
                let (train, validation) = files.divide(scan);
                let windows = |pieces| Windows { tokens: Tokens::File(pieces), shape: *shape };
                Ok(Opened {
                    files: files.files(),
                    bytes: files.bytes(),
                    ..self::windows(windows(train), validation.map(windows), scan.digest())
                })
            }
            UnscannedFiles::Images(images) => folder(images.split(scan), data, reader),
        }
    }
}

pub(super) fn open(data: &Data, reader: &Reader, task: &Task, seed: u64) -> Result<Found, DataError> {
    let fraction = data.validation_fraction;
    if !(0.0..=0.5).contains(&fraction) {
        return Err(DataError::value("spec.engine.data.validationFraction", fraction, "0 to 0.5"));
    }
    match task {
        Task::NextToken { context, vocabulary } => {
            let shape = WindowKind::NextToken { context: *context, vocabulary: *vocabulary };
            tokens(data, shape, *vocabulary, task, seed)
        }
        Task::Masked(masking) => {
            check_masking(masking)?;
            tokens(data, WindowKind::Masked(*masking), masking.vocabulary, task, seed)
        }
        Task::Classify => classes(data, reader, task, seed),
    }
}

/// The error for a source that does not suit the model.
fn mismatch(source: &Source, task: &Task) -> DataError {
    let (format, holds) = match source {
        Source::Text(_) => ("Text", "tokens"),
        Source::Tokens(_) => ("Tokens", "tokens"),
        Source::ImageFolder(_) => ("ImageFolder", "images"),
        Source::Cifar10(_) => ("CIFAR10", "images"),
        Source::Idx(_) => ("IDX", "images"),
        Source::Csv(_) => ("CSV", "samples with a class"),
        Source::SafeTensors(_) => ("SafeTensors", "samples with a class"),
        Source::Synthetic(_) => ("Synthetic", "samples of any kind"),
    };
    DataError::Mismatch { format, holds, wants: task.wants(), expected: task.formats() }
}

fn check_masking(masking: &Masking) -> Result<(), DataError> {
    let most = masking.window() / if masking.next_sentence { 2 } else { 1 };
    if most == 0 || masking.predictions > masking.window() {
        let found = format!("{} with {} tokens to predict", masking.context, masking.predictions);
        let expected = "room for the special tokens, for text in each segment and for the tokens to predict";
        return Err(DataError::value("spec.engine.model.bert.contextLength", found, expected));
    }
    Ok(())
}

fn tokens(data: &Data, shape: WindowKind, vocabulary: u32, task: &Task, seed: u64) -> Result<Found, DataError> {
    if shape.stride() == 0 {
        return Err(DataError::Zero { field: "spec.engine.model.gpt.contextLength" });
    }
    if vocabulary == 0 {
        return Err(DataError::Zero { field: "spec.engine.model.vocabulary" });
    }
    let needed = shape.needed(1);
    let mut digest = Xxh3::new();
    let (train, validation, files, bytes);
    let mut skipped = SkippedFiles::default();
    match &data.source {
        Source::Text(text) => {
            if vocabulary < BYTES {
                let expected = format!("{BYTES} for text, whose tokens are bytes");
                return Err(DataError::value("spec.engine.model.vocabulary", vocabulary, expected));
            }
            let corpus = Corpus::load(text, data.validation_fraction, needed, MAX_BYTES)?;
            corpus.digest(&mut digest);
            (files, skipped) = (corpus.files, corpus.skipped);
            bytes = (corpus.train.len() + corpus.validation.len()) as u64;
            train = Tokens::Text(corpus.train);
            validation = Some(corpus.validation).filter(|text| !text.is_empty()).map(Tokens::Text);
        }
        Source::Tokens(source) => {
            let fraction = data.validation_fraction;
            let files = TokenFiles::open(&source.path, source.token_type, vocabulary, fraction, needed)?;
            return Ok(Found::Unscanned(UnscannedFiles::Tokens(files, shape)));
        }
        Source::Synthetic(source) => {
            let (samples, for_validation) = synthetic_counts(source, data, seed, &mut digest)?;
            let make = |seed, samples| Tokens::Synthetic(SyntheticTokens::new(seed, vocabulary, shape.needed(samples)));
            train = make(seed, samples);
            validation = (for_validation > 0).then(|| make(seed ^ VALIDATION, for_validation));
            (files, bytes) = (0, 0);
        }
        other => return Err(mismatch(other, task)),
    }
    let windows = |tokens| Windows { tokens, shape };
    let digest = digest.digest128();
    Ok(Found::Opened(Box::new(Opened {
        files,
        skipped,
        bytes,
        ..self::windows(windows(train), validation.map(windows), digest)
    })))
}

/// A source of windows, without figures about files.
fn windows(train: Windows, validation: Option<Windows>, digest: u128) -> Opened {
    let kind = match train.shape {
        WindowKind::NextToken { context, vocabulary } => Kind::Tokens { context, vocabulary },
        WindowKind::Masked(masking) => Kind::Masked(masking),
    };
    Opened {
        kind,
        class_names: Vec::new(),
        items: Some((train.tokens.len(), validation.as_ref().map_or(0, |windows| windows.tokens.len()))),
        train: Box::new(train),
        validation: validation.map(|windows| Box::new(windows) as Box<dyn Part>),
        files: 0,
        skipped: SkippedFiles::default(),
        bad: 0,
        bytes: 0,
        digest,
        normalisation: None,
        features: Features::Raw,
    }
}

/// Synthetic training and validation tokens.
fn synthetic_counts(source: &Synthetic, data: &Data, seed: u64, digest: &mut Xxh3) -> Result<(u64, u64), DataError> {
    if source.samples == 0 || source.samples > MAX_SYNTHETIC {
        let expected = format!("1 to {MAX_SYNTHETIC}");
        return Err(DataError::value("spec.engine.data.samples", source.samples, expected));
    }
    digest.update(format!("{source:?} {} {seed}", data.validation_fraction).as_bytes());
    Ok((source.samples, (source.samples as f64 * data.validation_fraction).round() as u64))
}

fn classes(data: &Data, reader: &Reader, task: &Task, seed: u64) -> Result<Found, DataError> {
    let path = |path: &str| -> PathBuf { files::absolute(Path::new(path)) };
    // Not needed for formats that are a directory: their error names the first missing file.
    let existing = |path: PathBuf| files::kind(&path).map(|_| path);
    let loaded = match &data.source {
        Source::Cifar10(files) => cifar::load(&existing(path(&files.path))?, MAX_BYTES)?,
        Source::Idx(files) => idx::load(&existing(path(&files.path))?, MAX_BYTES)?,
        Source::Csv(file) => csv::load(file, reader.max_bad_samples, MAX_BYTES)?,
        Source::SafeTensors(files) => arrays::load(&path(&files.path), MAX_BYTES)?,
        Source::ImageFolder(files) => {
            let side = data.images.size;
            let found = folder::open(files, side, data.validation_fraction)?;
            check_shape(&folder_shape(side), side)?;
            return Ok(match found {
                folder::Found::Split(opened) => Found::Opened(Box::new(self::folder(*opened, data, reader)?)),
                folder::Found::Unsplit(unsplit) => Found::Unscanned(UnscannedFiles::Images(unsplit)),
            });
        }
        Source::Synthetic(source) => {
            return synthetic_samples(source, data, reader, seed).map(|opened| Found::Opened(Box::new(opened)));
        }
        other => return Err(mismatch(other, task)),
    };
    in_memory(loaded, data, reader).map(|opened| Found::Opened(Box::new(opened)))
}

fn folder_shape(side: u32) -> ImageShape {
    ImageShape { height: side, width: side, channels: decode::CHANNELS as u32 }
}

/// The images of a folder, decoded on demand.
fn folder(opened: folder::Opened, data: &Data, reader: &Reader) -> Result<Opened, DataError> {
    let shape = folder_shape(data.images.size);
    let into_part = |folder| images(folder, shape, data, reader);
    Ok(Opened {
        kind: image_kind(&shape, opened.classes.len() as u32),
        class_names: opened.classes,
        train: into_part(opened.train)?,
        validation: opened.validation.map(into_part).transpose()?,
        items: None,
        files: opened.files,
        skipped: opened.skipped,
        bad: 0,
        bytes: opened.bytes,
        digest: opened.digest,
        normalisation: Some(Normalisation::new(&data.images, shape.channels)?),
        features: Features::Raw,
    })
}

/// Samples of fully loaded files.
fn in_memory(loaded: Loaded, data: &Data, reader: &Reader) -> Result<Opened, DataError> {
    let Loaded { content, classes, files, bytes, bad } = loaded;
    let mut digest = Xxh3::new();
    let (kind, train, validation, normalisation): (_, Box<dyn Part>, Option<Box<dyn Part>>, _);
    let mut normalised = Features::Raw;
    match content {
        Content::Images(shape, pair) => {
            check_shape(&shape, data.images.size)?;
            let classes = count(&classes, &pair);
            if data.features == Features::TrainingSplit {
                let expected = "mean and deviation for images";
                return Err(DataError::value("spec.engine.data.normalisation.source", "TrainingSplit", expected));
            }
            let (rows, own) = sides(pair, data.validation_fraction)?;
            add_to_digest(&rows, own.as_ref(), &mut digest);
            let part = |rows: Rows<u8>| -> Result<(Box<dyn Part>, ImageShape), DataError> {
                let (rows, scaled) = rows.scaled(shape, data.images.size);
                Ok((images(rows, scaled, data, reader)?, scaled))
            };
            let scaled;
            (train, scaled) = part(rows)?;
            validation = own.map(part).transpose()?.map(|(rows, _)| rows);
            kind = image_kind(&scaled, classes);
            normalisation = Some(Normalisation::new(&data.images, shape.channels)?);
        }
        Content::Features(pair) => {
            let width = pair.train.each as u32;
            kind = Kind::Features { width, classes: count(&classes, &pair) };
            let (mut rows, mut own) = sides(pair, data.validation_fraction)?;
            // Before the digest, so that ranks and checkpoints agree on the statistics too.
            normalised = features::normalise(&data.features, &mut rows, own.as_mut())?;
            add_to_digest(&rows, own.as_ref(), &mut digest);
            train = Box::new(rows);
            validation = own.map(|rows| Box::new(rows) as Box<dyn Part>);
            normalisation = None;
        }
    }
    let class_names = if let Classes::Named(names) = classes { names } else { Vec::new() };
    // Ends each name with a byte that is not UTF-8.
    class_names.iter().for_each(|name| [name.as_bytes(), &[0xff]].iter().for_each(|bytes| digest.update(bytes)));
    Ok(Opened {
        kind,
        class_names,
        train,
        validation,
        items: None,
        files,
        skipped: SkippedFiles::default(),
        bad,
        bytes,
        digest: digest.digest128(),
        normalisation,
        features: normalised,
    })
}

/// Training and validation rows: the source's own splits, or its samples divided.
fn sides<T: bytemuck::Pod>(pair: Pair<T>, fraction: f64) -> Result<(Rows<T>, Option<Rows<T>>), DataError> {
    match pair.validation {
        None => pair.train.divide(fraction),
        own => Ok((pair.train, own)),
    }
}

fn add_to_digest<T: bytemuck::Pod>(train: &Rows<T>, validation: Option<&Rows<T>>, digest: &mut Xxh3) {
    train.digest(digest);
    if let Some(rows) = validation {
        rows.digest(digest);
    }
}

/// The number of classes.
fn count<T>(classes: &Classes, pair: &Pair<T>) -> u32 {
    match classes {
        Classes::Count(count) => *count,
        Classes::Named(names) => names.len() as u32,
        Classes::FromLabels => {
            let labels = pair.train.labels.iter().chain(pair.validation.iter().flat_map(|rows| &rows.labels));
            labels.max().map_or(1, |largest| largest + 1)
        }
    }
}

fn image_kind(shape: &ImageShape, classes: u32) -> Kind {
    Kind::Images { height: shape.height, width: shape.width, channels: shape.channels, classes }
}

fn images(
    images: impl Images + 'static,
    shape: ImageShape,
    data: &Data,
    reader: &Reader,
) -> Result<Box<dyn Part>, DataError> {
    Ok(Box::new(AugmentedImages::new(Box::new(images), shape, &data.images, reader.sample_type)?))
}

/// Synthetic images or features.
fn synthetic_samples(source: &Synthetic, data: &Data, reader: &Reader, seed: u64) -> Result<Opened, DataError> {
    if source.classes == 0 || source.classes > MAX_CLASSES {
        let expected = format!("1 to {MAX_CLASSES}");
        return Err(DataError::value("spec.engine.data.classes", source.classes, expected));
    }
    let mut digest = Xxh3::new();
    let (samples, for_validation) = synthetic_counts(source, data, seed, &mut digest)?;
    let classes = source.classes;
    let side = data.images.size;
    let shape = source.image.map(|shape| match side {
        0 => shape,
        side => ImageShape { height: side, width: side, ..shape },
    });
    // No augmentation: synthetic images are random already, and must cost nothing.
    let plain = config::Images { crop_padding: 0, flip: false, ..data.images.clone() };
    let plain = Data { images: plain, ..data.clone() };
    let make = |seed, samples| -> Result<Box<dyn Part>, DataError> {
        match shape {
            Some(shape) => images(SyntheticImages::new(seed, samples, shape, classes), shape, &plain, reader),
            None => Ok(Box::new(SyntheticFeatures { seed, samples, classes })),
        }
    };
    let (kind, normalisation) = match shape {
        Some(shape) => {
            check_shape(&shape, side)?;
            (image_kind(&shape, classes), Some(Normalisation::new(&data.images, shape.channels)?))
        }
        None => (Kind::Features { width: FEATURES, classes }, None),
    };
    Ok(Opened {
        kind,
        class_names: Vec::new(),
        train: make(seed, samples)?,
        validation: if for_validation > 0 { Some(make(seed ^ VALIDATION, for_validation)?) } else { None },
        items: None,
        files: 0,
        skipped: SkippedFiles::default(),
        bad: 0,
        bytes: 0,
        digest: digest.digest128(),
        normalisation,
        features: Features::Raw,
    })
}
