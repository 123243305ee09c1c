//! The opened and validated data of a run, independent of the format.

use super::bad::{BadSample, BadSamples};
use super::batch::{Batch, Lengths};
use super::entropy::Entropies;
use super::error::DataError;
use super::images::Normalisation;
use super::open::{Found, Opened, open};
use super::part::{Draw, EpochSize, Part, SampleError, Scratch};
use super::task::{Kind, Task};
use std::sync::atomic::AtomicU64;
use switchyard_worker_contract::config::{Data, Features, Reader};
use switchyard_worker_contract::event::{Item, Skipped};

/// Statistics of the data.
#[derive(Debug, Clone, PartialEq)]
pub struct Facts {
    /// The unit of throughput.
    pub item: Item,
    /// Windows, images or rows.
    pub train_samples: u64,
    pub validation_samples: u64,
    /// Tokens, images or rows.
    pub train_items: u64,
    pub validation_items: u64,
    /// Non-empty files.
    pub files: u64,
    /// Files that are not read, although the patterns select them.
    pub skipped: Vec<Skipped>,
    /// Unreadable samples skipped while opening the data.
    pub bad_samples: u64,
    /// Total size of the files.
    pub bytes: u64,
    /// Digest of both splits, 32 hexadecimal digits: ranks with the same digest have the same
    /// samples.
    pub digest: String,
    /// Memory for the data in bytes, without batches.
    pub memory_bytes: u64,
    /// Description of a sample, for example `128 tokens`.
    pub sample: String,
}

/// The data of a run, immutable and shared by threads.
#[derive(Debug)]
pub struct Dataset {
    kind: Kind,
    class_names: Vec<String>,
    lengths: Lengths,
    train: Box<dyn Part>,
    validation: Option<Box<dyn Part>>,
    normalisation: Option<Normalisation>,
    features: Features,
    facts: Facts,
    max_bad_samples: u64,
}

impl Dataset {
    /// Opens the source, checks everything that can be checked before the first step, and splits
    /// off validation data. `seed` is for synthetic samples.
    ///
    /// # Errors
    /// See [`DataError`]. [`super::Order::new`] checks whether there are enough samples for a step.
    pub fn open(data: &Data, reader: &Reader, task: &Task, seed: u64) -> Result<Dataset, DataError> {
        let opened = match open(data, reader, task, seed)? {
            Found::Opened(opened) => *opened,
            Found::Unscanned(content) => content.split(&content.scan(&AtomicU64::new(0))?, data, reader)?,
        };
        Ok(Dataset::new(opened, reader))
    }

    pub(super) fn new(opened: Opened, reader: &Reader) -> Dataset {
        let samples = |part: &dyn Part| part.epoch_size().samples;
        let train_samples = samples(&*opened.train);
        let validation_samples = opened.validation.as_deref().map_or(0, samples);
        let (train_items, validation_items) = opened.items.unwrap_or((train_samples, validation_samples));
        let memory = opened.train.memory_bytes() + opened.validation.as_deref().map_or(0, Part::memory_bytes);
        let facts = Facts {
            item: opened.kind.item(),
            train_samples,
            validation_samples,
            train_items,
            validation_items,
            files: opened.files,
            skipped: opened.skipped.by_reason(),
            bad_samples: opened.bad,
            bytes: opened.bytes,
            digest: format!("{:032x}", opened.digest),
            memory_bytes: memory,
            sample: opened.kind.words(),
        };
        Dataset {
            lengths: Lengths::new(&opened.kind, reader.sample_type),
            kind: opened.kind,
            class_names: opened.class_names,
            train: opened.train,
            // A split with fewer tokens than a window is unusable.
            validation: opened.validation.filter(|part| samples(&**part) > 0),
            normalisation: opened.normalisation,
            features: opened.features,
            facts,
            max_bad_samples: reader.max_bad_samples,
        }
    }

    /// The sample kind.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Names of the classes, in order; empty if the classes are numbers.
    pub fn class_names(&self) -> &[String] {
        &self.class_names
    }

    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// How image bytes become floats. With `sampleType: Float32` the reader has already converted
    /// them.
    pub fn normalisation(&self) -> Option<&Normalisation> {
        self.normalisation.as_ref()
    }

    /// How features were normalised: [`Features::Given`] with a number for each, or
    /// [`Features::Raw`].
    pub fn features(&self) -> &Features {
        &self.features
    }

    /// Entropies of the validation tokens, or of the training tokens if there are none. `None` if
    /// the model does not predict the next token, or the vocabulary exceeds 65,536. Reads all
    /// tokens.
    ///
    /// # Errors
    /// The data can no longer be read.
    pub fn entropies(&self) -> Result<Option<Entropies>, DataError> {
        self.validation.as_ref().unwrap_or(&self.train).entropies()
    }

    /// A bad-sample counter for one rank's run.
    pub fn bad_samples(&self) -> BadSamples {
        BadSamples::new(self.max_bad_samples, self.facts.bad_samples)
    }

    /// Batch memory in bytes for a number of samples.
    pub fn batch_bytes(&self, samples: u32) -> u64 {
        u64::from(samples) * self.lengths.bytes()
    }

    /// An empty batch for a number of samples.
    pub(super) fn batch(&self, samples: u32) -> Batch {
        Batch::new(samples, &self.lengths)
    }

    /// Number of training samples, and the slack of their windows.
    pub(super) fn epoch_size(&self) -> EpochSize {
        self.train.epoch_size()
    }

    pub(super) fn validation_samples(&self) -> u64 {
        self.facts.validation_samples
    }

    /// The error if a step needs more training samples than there are.
    pub(super) fn too_few(&self, samples: u64) -> DataError {
        let got = self.facts.train_items;
        match self.train.windows() {
            Some(shape) => {
                let (needed, stride) = (shape.needed(samples), shape.stride());
                DataError::TooShort { got, needed, windows: samples, stride }
            }
            None => DataError::TooFew { got, needed: samples },
        }
    }

    /// Fills a batch with the training samples at these positions of the order given by `draw`.
    pub(super) fn fill_training(
        &self,
        batch: &mut Batch,
        positions: impl Iterator<Item = u64>,
        draw: impl Fn(u64) -> Draw,
        scratch: &mut Scratch,
        stop: impl Fn() -> bool,
    ) -> Result<(), DataError> {
        self.fill(&*self.train, batch, positions, draw, scratch, stop)
    }

    /// Fills a batch with these validation samples, and replaces unreadable ones.
    ///
    /// # Panics
    /// There is no validation part.
    pub(super) fn fill_validation(
        &self,
        batch: &mut Batch,
        samples: impl Iterator<Item = u64>,
        scratch: &mut Scratch,
    ) -> Result<(), DataError> {
        self.fill(self.validation_part(), batch, samples, validation_draw, scratch, || false)
    }

    /// Fills a batch with these validation samples once each: the rows of unreadable samples, and
    /// those without a sample, count for nothing. Returns the number of samples.
    ///
    /// # Panics
    /// See [`Dataset::fill_validation`].
    pub(super) fn fill_validation_once(
        &self,
        batch: &mut Batch,
        samples: impl Iterator<Item = Option<u64>>,
        scratch: &mut Scratch,
    ) -> Result<u64, DataError> {
        let part = self.validation_part();
        part.check()?;
        batch.bad.clear();
        let mut written = 0;
        for (row, sample) in samples.enumerate() {
            let result = sample.map(|sample| {
                part.write(&validation_draw(sample), &mut batch.row(row, &self.lengths), scratch)
                    .map(|()| written += 1)
                    .map_err(|error| (sample, error))
            });
            match result {
                Some(Ok(())) => continue,
                Some(Err((_, SampleError::Data(error)))) => return Err(error),
                Some(Err((sample, SampleError::Unreadable(what)))) => batch.bad.push(BadSample { sample, what }),
                None => {}
            }
            batch.ignore(row, &self.lengths);
        }
        part.check()?;
        Ok(written)
    }

    fn validation_part(&self) -> &dyn Part {
        let Some(part) = &self.validation else { panic!("invariant: a set exists only with a validation part") };
        &**part
    }

    /// Replaces an unreadable sample with the next readable one. If a single batch has more bad
    /// samples than allowed, it stays incomplete, and the thread that counts them rejects it.
    fn fill(
        &self,
        part: &dyn Part,
        batch: &mut Batch,
        positions: impl Iterator<Item = u64>,
        draw: impl Fn(u64) -> Draw,
        scratch: &mut Scratch,
        stop: impl Fn() -> bool,
    ) -> Result<(), DataError> {
        part.check()?;
        batch.bad.clear();
        let samples = part.epoch_size().samples;
        for (row, first) in positions.enumerate() {
            let mut tries = 0;
            loop {
                if stop() {
                    return Ok(());
                }
                let draw = draw((first + tries) % samples);
                match part.write(&draw, &mut batch.row(row, &self.lengths), scratch) {
                    Ok(()) => break,
                    Err(SampleError::Data(error)) => return Err(error),
                    Err(SampleError::Unreadable(what)) => {
                        tries += 1;
                        if tries == samples {
                            return Err(DataError::BadSamples { count: samples, limit: samples - 1, last: what });
                        }
                        let sample = draw.sample;
                        if batch.bad.iter().all(|bad| bad.sample != sample) {
                            batch.bad.push(BadSample { sample, what });
                        }
                        if batch.bad.len() as u64 > self.max_bad_samples {
                            return Ok(());
                        }
                    }
                }
            }
        }
        part.check()
    }
}

/// Uses the same random numbers at every evaluation: they decide which tokens are masked.
fn validation_draw(sample: u64) -> Draw {
    Draw { sample, offset: 0, key: super::random::mix(sample), augment: false }
}

#[cfg(test)]
impl Dataset {
    /// Single-feature test data with one class.
    pub(super) fn of_part(train: Box<dyn Part>) -> Dataset {
        let kind = Kind::Features { width: 1, classes: 1 };
        let facts = Facts {
            item: Item::Samples,
            train_samples: train.epoch_size().samples,
            validation_samples: 0,
            train_items: train.epoch_size().samples,
            validation_items: 0,
            files: 0,
            skipped: Vec::new(),
            bad_samples: 0,
            bytes: 0,
            digest: String::new(),
            memory_bytes: 0,
            sample: kind.words(),
        };
        let lengths = Lengths::new(&kind, switchyard_worker_contract::config::SampleType::UInt8);
        Dataset {
            kind,
            class_names: Vec::new(),
            lengths,
            train,
            validation: None,
            normalisation: None,
            features: Features::Raw,
            facts,
            max_bad_samples: 0,
        }
    }
}
