//! Samples: files in, micro-batches out.
//!
//! ```text
//! open: the files of a format -> Dataset: one part for training and one for validation, by content
//!          Order: (seed, step, rank, micro-batch) -> which samples, and their random numbers
//!          Prefetcher: threads that fill the next micro-batches while the current one is in use
//! ```
//!
//! Everything is a function of the files, the configuration and the step: two ranks, or two runs, that read the same
//! files see the same samples, however many threads read, and a run resumes at any step without state to restore. There
//! is no cache on disk and no tokenizer here.
#![forbid(unsafe_code)]

mod array;
mod arrays;
mod bad;
mod batch;
mod cifar;
mod csv;
mod dataset;
mod decode;
mod entropy;
mod error;
mod files;
mod folder;
mod idx;
mod loaded;
mod npy;
mod open;
mod order;
mod part;
mod permutation;
mod phrases;
mod pictures;
mod prefetch;
mod random;
mod rows;
mod scale;
mod split;
mod synthetic;
mod task;
mod text;
mod token_file;
mod tokens;
mod validation;
mod windows;

pub use bad::BadSamples;
pub use batch::{Batch, Making};
pub use dataset::{Dataset, Facts};
pub use entropy::Entropies;
pub use error::DataError;
pub use open::MAX_BYTES;
pub use order::{Order, StepShape};
pub use pictures::Normalisation;
pub use prefetch::Prefetcher;
pub use task::{Kind, Masking, Task};
pub use validation::ValidationSet;
