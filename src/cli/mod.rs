//! The command line.

pub mod topo;
