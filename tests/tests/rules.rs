//! Repository rules, and placement against brute force. Starts no processes.
#![forbid(unsafe_code)]
#![allow(missing_docs, clippy::unwrap_used)]

mod placement;
mod tidy;
