//! Test support: checks bindings against NVIDIA's own headers with a C compiler.

use std::fmt::Display;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A directory in `target/data`, which `command` fetches. Without it a test would check nothing, so
/// it must fail.
pub(crate) fn fetched(name: &str, command: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/data").join(name);
    assert!(folder.is_dir(), "target/data/{name} is missing: `{command}` fetches it");
    folder
}

/// A header, and the directories of it and its includes.
pub(crate) struct Header<'a> {
    pub name: &'a str,
    pub folders: &'a [PathBuf],
}

impl Header<'_> {
    /// Compiles a C file that asserts these conditions and references these functions; returns
    /// success and the compiler's output.
    pub fn compiled(&self, conditions: &[String], functions: &[&str]) -> (bool, String) {
        let asserts = conditions.iter().map(|condition| format!("_Static_assert({condition}, \"{condition}\");\n"));
        let functions = functions.iter().map(|name| format!("void *of_{name} = (void *)&{name};\n"));
        let text: String = [format!("#include <{}>\n#include <stddef.h>\n", self.name)]
            .into_iter()
            .chain(asserts)
            .chain(functions)
            .collect();
        let mut compiler = Command::new("cc");
        for folder in self.folders {
            compiler.arg("-I").arg(folder);
        }
        compiler.args(["-fsyntax-only", "-x", "c", "-"]);
        let mut child = compiler.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("a C compiler");
        child.stdin.take().expect("its input").write_all(text.as_bytes()).expect("it reads");
        let output = child.wait_with_output().expect("it ends");
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    }
}

/// Checks constants, offsets and function names against a header of a library, which only
/// `cargo xtask test --gpu-libraries` fetches.
pub(crate) fn assert_library_header(
    name: &str,
    numbers: impl IntoIterator<Item = (impl Display, i32)>,
    functions: &[&str],
) {
    let folders = ["gpu-cublas", "gpu-cudnn", "gpu-nccl", "gpu-runtime", "gpu-crt", "gpu-stub"];
    let folders = folders.map(|name| fetched(name, "cargo xtask test --gpu-libraries"));
    let conditions: Vec<String> = numbers.into_iter().map(|(name, value)| format!("{name} == {value}")).collect();
    let (is_good, text) = Header { name, folders: &folders }.compiled(&conditions, functions);
    assert!(is_good, "{text}");
}
