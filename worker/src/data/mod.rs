//! Data loading: files in, micro-batches out.
//!
//! ```text
//! open: the files of a format -> Dataset: a training and a validation split, by content
//!   scan: reads files that decide the split by their content, once for all ranks
//!          Order: (seed, step, rank, micro-batch) -> sample indices and their random numbers
//!          Prefetcher: threads that fill the next micro-batches while the current one is in use
//! ```
//!
//! Everything is a function of the files, the configuration and the step: ranks or runs that read
//! the same files see the same samples for any number of reader threads, and a run resumes at any
//! step without state to restore. There is no on-disk cache and no tokenizer.
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
mod features;
mod files;
mod folder;
mod idx;
mod images;
mod loaded;
mod npy;
mod open;
mod order;
mod part;
mod permutation;
mod phrases;
mod prefetch;
mod random;
mod rows;
mod scale;
mod scan;
mod skipped;
mod split;
mod synthetic;
mod task;
mod text;
mod token_file;
mod tokens;
mod unscanned;
mod validation;
mod windows;

pub use bad::BadSamples;
pub use batch::{Batch, Making};
pub use dataset::{Dataset, Facts};
pub use entropy::Entropies;
pub use error::DataError;
pub use images::Normalisation;
pub use open::MAX_BYTES;
pub use order::{Order, StepShape};
pub use prefetch::{Prefetcher, most_threads};
pub use scan::Scan;
pub use task::{Kind, Masking, Task};
pub use unscanned::{Source, Unscanned};
pub use validation::ValidationSet;
