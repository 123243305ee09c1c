//! What the programs in a cluster share: the connection to the API server with its requests counted, and the log.
//!
//! Not here: what they count, log and do.
#![forbid(unsafe_code)]

mod connection;
pub mod telemetry;

pub use connection::{Answered, Connection, client, connect};
