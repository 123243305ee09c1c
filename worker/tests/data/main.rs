//! Samples from files: every format, the reader, and corrupt files.
#![allow(clippy::unwrap_used)]

mod csv;
mod folder;
mod formats;
mod fuzz;
mod links;
mod memory;
mod reader;
mod support;
mod tokens;
