//! Groups of ranks that fail, meet intruders, or share a process. The tests count open handles and
//! threads of this process, so they run one at a time and separately from others.

#![allow(clippy::unwrap_used, reason = "a test may end where a helper fails")]

#[path = "../collective_support/mod.rs"]
mod collective_support;
mod failures;
mod strangers;
mod threads;
