//! Reads files of the command line as text, up to a limit.

use crate::failure::Failure;
use std::io::Read;
use std::path::Path;
use switchyard_fabric::profile::Profile;

/// How much of a file is read: bytes, and the same in words.
pub(crate) type Limit = (u64, &'static str);

/// The largest object that a cluster stores: etcd refuses objects above 1.5 MiB.
const ONE_OBJECT: Limit = (1 << 20, "1 MiB");
/// Several manifests in one file may be more than a cluster stores of each.
pub(crate) const MANIFESTS: Limit = (16 << 20, "16 MiB");

/// The name of a file in messages; `-` is standard input.
pub(crate) fn name(path: &Path) -> String {
    if path == Path::new("-") { "standard input".to_string() } else { path.display().to_string() }
}

/// The text of a file that should hold one object, a `kind`.
pub(crate) fn read_object(path: &Path, kind: &str) -> Result<String, Failure> {
    let kind = format!("{kind} of at most 1 MiB, the most that a cluster stores");
    read(path, &kind, ONE_OBJECT)
}

/// The text of a file; `kind` describes the expected content. Never waits for a pipe or a device.
pub(crate) fn read(path: &Path, kind: &str, (largest, most): Limit) -> Result<String, Failure> {
    let name = name(path);
    let unreadable = |what: &str| Failure::usage(format!("error[SY0001]: cannot read {name}: {what}"));
    let mut bytes = Vec::new();
    if path == Path::new("-") {
        std::io::stdin().take(largest + 1).read_to_end(&mut bytes).map_err(|error| unreadable(&error.to_string()))?;
    } else {
        let found = std::fs::metadata(path).map_err(|error| unreadable(&error.to_string()))?;
        if !found.is_file() {
            let got = if found.is_dir() { "a directory" } else { "not a regular file" };
            return Err(unreadable(&format!("got {got}; expected a file with a {kind}")));
        }
        let file = std::fs::File::open(path).map_err(|error| unreadable(&error.to_string()))?;
        file.take(largest + 1).read_to_end(&mut bytes).map_err(|error| unreadable(&error.to_string()))?;
    }
    if bytes.len() as u64 > largest {
        return Err(unreadable(&format!("got more than {most}; expected a {kind}")));
    }
    String::from_utf8(bytes).map_err(|error| {
        unreadable(&format!(
            "got a byte that is not UTF-8 at offset {}; expected text",
            error.utf8_error().valid_up_to()
        ))
    })
}

/// An administrator's profile of the fabric.
pub(crate) fn fabric_profile(path: &Path) -> Result<Profile, Failure> {
    let text = read(path, "fabric profile of at most 1 MiB", ONE_OBJECT)?;
    Profile::parse(&text).map_err(|error| Failure::usage(format!("--fabric-profile {}: {error}", name(path))))
}
