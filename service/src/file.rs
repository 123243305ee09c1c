//! Text files named on the command line.

use std::io::Read;
use std::path::Path;

/// Upper bound on the size of a file: bytes, and the same as text.
pub type Limit = (u64, &'static str);

/// Upper bound on a single Kubernetes object; etcd refuses objects above 1.5 MiB.
pub const ONE_OBJECT: Limit = (1 << 20, "1 MiB");

/// The name of a file in messages; `-` is standard input.
pub fn name(path: &Path) -> String {
    if path == Path::new("-") { "standard input".to_string() } else { path.display().to_string() }
}

/// Reads a file, or standard input for `-`. `kind` describes the expected content. Never waits for
/// a named pipe or a device.
///
/// # Errors
/// The file cannot be read, is not a regular file, is too large, or is not UTF-8.
pub fn read(path: &Path, kind: &str, (largest, most): Limit) -> Result<String, String> {
    let name = name(path);
    let unreadable = |what: &str| format!("error[SY0001]: cannot read {name}: {what}");
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
