//! Reads files named on the command line as text, up to a limit.

use crate::failure::Failure;
use std::path::Path;
use switchyard_controller::daemon;
use switchyard_fabric::profile::Profile;
use switchyard_service::file::{self, ONE_OBJECT};
pub(crate) use switchyard_service::file::{Limit, name};

/// A file can hold several manifests, so this exceeds the cluster's limit for one.
pub(crate) const MANIFESTS: Limit = (16 << 20, "16 MiB");

/// Reads a file that should hold one object, a `kind`.
pub(crate) fn read_object(path: &Path, kind: &str) -> Result<String, Failure> {
    let kind = format!("{kind} of at most 1 MiB, the most that a cluster stores");
    read(path, &kind, ONE_OBJECT)
}

/// Reads a file; see [`file::read`].
pub(crate) fn read(path: &Path, kind: &str, limit: Limit) -> Result<String, Failure> {
    file::read(path, kind, limit).map_err(Failure::usage)
}

/// Reads an administrator's fabric profile.
pub(crate) fn fabric_profile(path: &Path) -> Result<Profile, Failure> {
    daemon::fabric_profile(path).map_err(Failure::usage)
}
