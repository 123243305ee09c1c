//! Real nodes with containers, links and GPUs, and Switchyard running on them.
#![forbid(unsafe_code)]
#![allow(missing_docs, clippy::unwrap_used)]

mod e2e;
mod nodes;
