//! Groups of ranks that fail, meet strangers, or share a process. Their tests count the open handles and threads of this process, so they run one at a
//! time, and no others run beside them.

#![allow(clippy::unwrap_used, reason = "a test may end where a helper fails")]

#[path = "../collective_support/mod.rs"]
mod collective_support;
mod failures;
mod strangers;
mod threads;
