//! Version of this program.

/// Text of `--version`. `cargo xtask` passes the commit.
pub(crate) const OWN: &str = match option_env!("SWITCHYARD_VERSION") {
    Some(version) => version,
    None => env!("CARGO_PKG_VERSION"),
};
