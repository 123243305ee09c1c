//! Real nodes: containers, links and GPUs, and the product on them.
#![forbid(unsafe_code)]
#![allow(missing_docs, clippy::unwrap_used)]

mod e2e;
mod nodes;
