//! Files that are opened, but not yet read: see [`super::scan`].

use super::dataset::Dataset;
use super::error::DataError;
use super::open::{Found, UnscannedFiles, open};
use super::scan::{self, Scan};
use super::task::Task;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use switchyard_worker_contract::config::{Data, Reader};

/// An opened source.
pub enum Source {
    /// Nothing is left to read before the first step.
    Opened(Box<Dataset>),
    Unscanned(Box<Unscanned>),
}

/// Files whose blocks are still to be read.
pub struct Unscanned {
    data: Data,
    reader: Reader,
    files: UnscannedFiles,
    read: Arc<AtomicU64>,
}

impl Source {
    /// Like [`Dataset::open`], but does not read the blocks of files that only the ranks together
    /// need to read.
    ///
    /// # Errors
    /// See [`Dataset::open`].
    pub fn open(data: &Data, reader: &Reader, task: &Task, seed: u64) -> Result<Source, DataError> {
        Ok(match open(data, reader, task, seed)? {
            Found::Opened(opened) => Source::Opened(Box::new(Dataset::new(*opened, reader))),
            Found::Unscanned(files) => Source::Unscanned(Box::new(Unscanned {
                data: data.clone(),
                reader: *reader,
                files,
                read: Arc::default(),
            })),
        })
    }
}

impl Unscanned {
    /// Description of the files without their contents; equal on ranks with the same files.
    pub fn files(&self) -> String {
        self.files.description()
    }

    /// Counts the blocks that have been read.
    pub fn blocks_read(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.read)
    }

    /// Reads all blocks, and splits them into training and validation.
    ///
    /// # Errors
    /// A file cannot be read, a token is not in the vocabulary, or there is too little for the
    /// split.
    pub fn scan(&self) -> Result<Scan, DataError> {
        self.files.scan(&self.read)
    }

    /// Reads the blocks that this rank compares; returns a hash of them.
    ///
    /// # Errors
    /// See [`Unscanned::scan`].
    pub fn share(&self, rank: u32, world: u32) -> Result<u64, DataError> {
        let mut blocks = scan::share(self.files.blocks(), rank, world).inspect(|_| {
            self.read.fetch_add(1, Ordering::Relaxed);
        });
        Ok(scan::combine(self.files.hashes(&mut blocks)?.into_iter()))
    }

    /// The scan of rank 0, from [`Scan::encode`]; `None` if it is not one of as many blocks.
    pub fn decode(&self, scan: &[u8]) -> Option<Scan> {
        Scan::decode(scan, self.files.blocks())
    }

    /// The data set, split according to a scan of the same files.
    ///
    /// # Errors
    /// The settings of images are invalid.
    pub fn dataset(&self, scan: &Scan) -> Result<Dataset, DataError> {
        Ok(Dataset::new(self.files.split(scan, &self.data, &self.reader)?, &self.reader))
    }
}
