//! What the programs in a cluster share: the connection to the API server with its requests
//! counted, creation on trial, the log, and files that a command line names.
//!
//! Not here: what they count, log and do.
#![forbid(unsafe_code)]

mod clock;
mod connection;
pub mod file;
pub mod telemetry;
mod trial;

pub use clock::ServerClock;
pub use connection::{Answered, Connection, client, connect};
pub use trial::{may, trial};
