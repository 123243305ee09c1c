//! What the programs in a cluster share: the connection to the API server, its requests counted, and the log.
//!
//! Not here: what they count and log, and what they do.
#![forbid(unsafe_code)]

mod connection;
pub mod telemetry;

pub use connection::{Answered, Connection, client, connect};
