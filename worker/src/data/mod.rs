//! Samples: text files in, batches of tokens out.
//!
//! ```text
//! files -> one run of bytes -> blocks, each to training or validation by its content -> Corpus
//!          Sampler: (seed, step, rank, micro-batch) -> where each window starts
//!          Prefetcher: a thread that fills the next micro-batch while the current one is in use
//! ```
//!
//! A token is a byte. Everything is a function of the files, the configuration and the step: two ranks, or two runs,
//! that read the same files see the same samples, and a run continues at any step without a state to restore.
//! There is no cache on disk and no tokenizer here.
#![forbid(unsafe_code)]

mod corpus;
mod entropy;
mod error;
mod files;
mod permutation;
mod prefetch;
mod sampler;
mod split;
mod validation;

pub use corpus::{Corpus, MAX_BYTES};
pub use entropy::{bigram_entropy, unigram_entropy};
pub use error::DataError;
pub use permutation::Permutation;
pub use prefetch::{Batch, Prefetcher};
pub use sampler::{Sampler, Shape};
pub use validation::{TokenBatch, ValidationSet};
