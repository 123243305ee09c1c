//! Environment variables that users set in training pods: which program reads them, since which
//! release, and valid values. Tables as data, for the linter and everything else that checks or
//! writes an environment.
//!
//! Nothing here depends on a manifest or a node.

pub mod nccl;
mod others;

pub use others::{
    Debugging, Reader, Renamed, Rendezvous, debugging_only, is_interface_list, is_of_google_profile,
    is_virtual_interface, is_visible_devices, per_process, reader_of, renamed, rendezvous, set_by_launcher,
};

/// Whether a shell can set a variable of this name.
pub fn is_name(text: &str) -> bool {
    let begins = text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
    begins && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}
