//! The rules of the repository, and placement against brute force: nothing is started.
#![forbid(unsafe_code)]
#![allow(missing_docs, clippy::unwrap_used)]

mod placement;
mod tidy;
