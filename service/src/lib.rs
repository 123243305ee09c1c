//! Shared by the programs in a cluster: the connection to the API server, request counting, dry
//! runs, logging, and files named on the command line.
//!
//! What they count, log and do is up to the programs.
#![forbid(unsafe_code)]

mod clock;
mod connection;
pub mod file;
pub mod telemetry;
mod trial;

pub use clock::ServerClock;
pub use connection::{Answered, Connection, client, connect};
pub use trial::{may, trial};
