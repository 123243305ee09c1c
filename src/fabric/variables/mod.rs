//! Environment variables that people set in training pods: who reads them, since when, and what values they take. Tables as data, for the linter
//! and for everything else that checks or writes an environment.
//!
//! Nothing here depends on a manifest or a node.

pub mod nccl;
mod others;

pub use others::{
    Debugging, Reader, Renamed, Rendezvous, debugging_only, is_interface_list, is_of_google_profile,
    is_virtual_interface, is_visible_devices, per_process, reader_of, renamed, rendezvous, set_by_launcher,
};

/// Form of names that a shell can set.
pub fn is_name(text: &str) -> bool {
    let begins = text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
    begins && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}
