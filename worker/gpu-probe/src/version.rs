//! Version of this program.

/// `--version` text. `cargo xtask` sets the commit.
pub(crate) const OWN: &str = match option_env!("SWITCHYARD_VERSION") {
    Some(version) => version,
    None => env!("CARGO_PKG_VERSION"),
};
