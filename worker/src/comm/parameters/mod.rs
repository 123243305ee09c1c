//! Connections between the ranks and parameter servers: messages, and one thread at each end.
//!
//! ```text
//! rank     ParameterClient   push, request ──> TCP, one connection per rank and server
//!                            wait          <── replies, one awaited per slot
//! server   ParameterServer   every message ──> Handler ──> replies to any ranks
//! ```
//!
//! A server sees only messages, so it runs in the process of a rank or in one of its own. What
//! servers hold and how they update it is the handler's business. Connections are
//! authenticated like the other data connections of a group. If the group fails, both ends stop.

mod client;
mod connect;
mod link;
mod message;
mod server;

pub use client::ParameterClient;
pub use connect::{ParameterLinks, accept_ranks, connect_parameters, connect_servers};
pub use message::{Message, MessageKind};
pub use server::{Handler, ParameterServer};
