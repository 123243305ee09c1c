//! Selects the files to read, and reads them.

use super::error::DataError;
use super::skipped::{Reason, SkippedFiles};
use globset::{GlobBuilder, GlobSet, GlobSetBuilder};
use rustix::fs::OFlags;
use std::collections::BTreeSet;
use std::fs::{self, File, FileType, Metadata};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;
use switchyard_checkpoint::disk::is_final;
use switchyard_worker_contract::config::Files;
use walkdir::{DirEntry, WalkDir};

const PATH: &str = "spec.engine.data.path";
const INCLUDE: &str = "spec.engine.data.include";
const EXCLUDE: &str = "spec.engine.data.exclude";
/// Leading bytes of a `CACHEDIR.TAG` that marks its directory as a cache that can be regenerated
/// (<https://bford.info/cachedir/>), such as cargo's `target`.
const CACHE_SIGNATURE: &[u8] = b"Signature: 8a477f597d28d172789f06886806bc55";

/// The concatenated bytes of all selected files.
#[derive(Debug)]
pub(super) struct Text {
    /// The files, concatenated.
    pub bytes: Vec<u8>,
    /// End of each non-empty file in `bytes`.
    pub ends: Vec<usize>,
    /// Empty files.
    pub skipped: SkippedFiles,
}

/// The contents of a directory.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// The selected files, in byte order of their paths.
    pub files: Vec<PathBuf>,
    /// The directories that were entered, relative to the root.
    pub directories: Vec<PathBuf>,
    /// Directories with a file that the patterns do not select, relative to the root.
    pub with_unselected: BTreeSet<PathBuf>,
    /// Hidden files and links that are not followed, relative to the root.
    pub skipped: SkippedFiles,
}

/// Whether to enter links to directories.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Links {
    /// Unless a link leads to a directory that contains it, by device and inode.
    Follow,
    Ignore,
}

/// Reads the file, or all files of the directory that the patterns select, in byte order of their
/// paths.
///
/// Hidden files and directories (names that start with `.`) and directories with a valid
/// `CACHEDIR.TAG` are skipped, except for the path itself. Links to files are read; links to
/// directories are not followed.
pub(super) fn read(data: &Files, limit: u64) -> Result<Text, DataError> {
    let root = absolute(Path::new(&data.path));
    let files = if kind(&root)?.is_file() {
        for (field, patterns) in [(INCLUDE, &data.include), (EXCLUDE, &data.exclude)] {
            if !patterns.is_empty() {
                return Err(DataError::PatternsForFile { field, path: root });
            }
        }
        vec![root.clone()]
    } else {
        find(&root, data, Links::Ignore)?.files
    };
    read_all(&root, &files, limit)
}

/// Whether the path is a file or a directory; anything else is an error.
pub(super) fn kind(root: &Path) -> Result<FileType, DataError> {
    let path = || root.to_owned();
    match fs::metadata(root).map(|metadata| metadata.file_type()) {
        Ok(kind) if kind.is_file() || kind.is_dir() => Ok(kind),
        Ok(kind) => {
            let expected = "a file or a directory";
            Err(DataError::NotAFile { field: PATH, path: path(), found: kind_name(kind), expected })
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(DataError::Missing { path: path() }),
        Err(error) => Err(DataError::Unreadable { path: path(), kind: "file or directory", error }),
    }
}

/// Reads a whole file.
pub(super) fn read_file(path: &Path, limit: u64) -> Result<Vec<u8>, DataError> {
    let file = open(path).map_err(|error| DataError::unreadable(path, error))?;
    let stamp = Stamp::of(path, &file)?;
    let too_large = |got| DataError::TooLarge { path: path.to_owned(), got, limit };
    if stamp.len > limit {
        return Err(too_large(stamp.len));
    }
    let mut bytes = Vec::new();
    // The length could have changed since, so it is only a hint, and a failed reservation is not
    // yet an error.
    let _ = bytes.try_reserve_exact(stamp.len as usize);
    (&file).take(limit + 1).read_to_end(&mut bytes).map_err(|error| DataError::unreadable(path, error))?;
    stamp.check(path, &file)?;
    if bytes.len() as u64 > limit {
        return Err(too_large(bytes.len() as u64));
    }
    Ok(bytes)
}

/// Length and modification time, to detect writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stamp {
    pub len: u64,
    modified: Option<SystemTime>,
}

impl Stamp {
    /// The stamp of an open file.
    ///
    /// # Errors
    /// The file is not a regular file.
    pub(super) fn of(path: &Path, file: &File) -> Result<Stamp, DataError> {
        Stamp::new(path, file.metadata())
    }

    /// The stamp of the file at a path.
    pub(super) fn at(path: &Path) -> Result<Stamp, DataError> {
        Stamp::new(path, fs::metadata(path))
    }

    fn new(path: &Path, metadata: io::Result<Metadata>) -> Result<Stamp, DataError> {
        let metadata = metadata.map_err(|error| DataError::unreadable(path, error))?;
        if !metadata.is_file() {
            let found = kind_name(metadata.file_type());
            return Err(DataError::NotAFile { field: PATH, path: path.to_owned(), found, expected: "a file" });
        }
        Ok(Stamp { len: metadata.len(), modified: metadata.modified().ok() })
    }

    /// Checks that the open file still has this stamp.
    pub(super) fn check(&self, path: &Path, file: &File) -> Result<(), DataError> {
        let now = Stamp::of(path, file)?;
        let what = match () {
            () if now.len != self.len => format!("{} bytes, they were {}", now.len, self.len),
            () if now.modified != self.modified => "it was written to".to_owned(),
            () => return Ok(()),
        };
        Err(DataError::Changed { path: path.to_owned(), what })
    }
}

/// Makes a path absolute for messages, because the meaning of a relative path depends on the
/// working directory.
pub(super) fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// The name of a non-regular file type.
fn kind_name(kind: FileType) -> &'static str {
    match kind {
        kind if kind.is_dir() => "a directory",
        kind if kind.is_char_device() => "a character device",
        kind if kind.is_block_device() => "a block device",
        kind if kind.is_fifo() => "a pipe",
        kind if kind.is_socket() => "a socket",
        kind if kind.is_symlink() => "a link to nothing",
        _ => "not a regular file",
    }
}

/// Compiled patterns. `*` and `?` do not match `/`; `**` does.
#[derive(Debug)]
struct Patterns {
    /// `None` selects every file.
    include: Option<GlobSet>,
    exclude: GlobSet,
    /// Directories whose whole content is excluded, so they are not even opened.
    pruned: GlobSet,
}

impl Patterns {
    fn new(data: &Files) -> Result<Self, DataError> {
        let whole: Vec<String> =
            data.exclude.iter().filter_map(|pattern| pattern.strip_suffix("/**")).map(str::to_owned).collect();
        Ok(Self {
            include: if data.include.is_empty() { None } else { Some(compile(INCLUDE, &data.include)?) },
            exclude: compile(EXCLUDE, &data.exclude)?,
            pruned: compile(EXCLUDE, &whole)?,
        })
    }

    fn choose(&self, relative: &Path) -> bool {
        self.include.as_ref().is_none_or(|include| include.is_match(relative)) && !self.exclude.is_match(relative)
    }

    /// The error for a selected path that is not a file.
    fn not_a_file(&self, path: PathBuf, found: &'static str) -> DataError {
        let field = if self.include.is_some() { INCLUDE } else { PATH };
        DataError::NotAFile { field, path, found, expected: "files only: exclude it" }
    }
}

fn compile(field: &str, patterns: &[String]) -> Result<GlobSet, DataError> {
    let mut set = GlobSetBuilder::new();
    for (index, pattern) in patterns.iter().enumerate() {
        let wrong = |reason: String| DataError::Pattern {
            field: format!("{field}[{index}]"),
            pattern: pattern.clone(),
            reason,
        };
        let relative = pattern.strip_prefix("./").unwrap_or(pattern);
        if relative.is_empty() {
            return Err(wrong("is empty".to_owned()));
        }
        if relative.starts_with('/') || relative.split('/').any(|part| part == "..") {
            return Err(wrong("leads out of the directory".to_owned()));
        }
        let glob = GlobBuilder::new(relative).literal_separator(true).build();
        set.add(glob.map_err(|error| wrong(error.kind().to_string()))?);
    }
    set.build().map_err(|error| DataError::Pattern {
        field: field.to_owned(),
        pattern: patterns.join(" "),
        reason: error.kind().to_string(),
    })
}

/// Finds the files of a directory that the patterns select.
pub(super) fn find(root: &Path, data: &Files, links: Links) -> Result<Found, DataError> {
    let patterns = Patterns::new(data)?;
    let relative = |path: &Path| path.strip_prefix(root).unwrap_or(path).to_owned();
    let is_hidden = |path: &Path| path.file_name().is_some_and(|name| name.as_bytes().starts_with(b"."));
    let (mut files, mut directories) = (Vec::new(), Vec::new());
    let mut skipped = SkippedFiles::default();
    let mut with_unselected = BTreeSet::new();
    let mut seen = 0;
    let enter = |entry: &DirEntry| {
        let inner = entry.depth() > 0;
        let is_dir = entry.file_type().is_dir();
        if inner && is_hidden(entry.path()) {
            if !is_dir {
                skipped.add(&relative(entry.path()), Reason::Hidden);
            }
            return false;
        }
        !(inner && is_dir && (patterns.pruned.is_match(relative(entry.path())) || is_cache(entry.path())))
    };
    let mut dangling = Vec::new();
    let mut loops = Vec::new();
    let walk = WalkDir::new(root).follow_links(links == Links::Follow).into_iter();
    for entry in walk.filter_entry(enter) {
        let entry = match entry {
            Ok(entry) => entry,
            Err(error) => {
                let path = error.path().unwrap_or(root).to_owned();
                let is_link = fs::symlink_metadata(&path).is_ok_and(|metadata| metadata.is_symlink());
                let is_missing = error.io_error().is_some_and(|error| error.kind() == io::ErrorKind::NotFound);
                if error.loop_ancestor().is_some() {
                    loops.push(path);
                } else if is_link && is_missing {
                    dangling.push(path);
                } else {
                    let error = error.into_io_error().unwrap_or_else(|| io::ErrorKind::Other.into());
                    return Err(DataError::Unreadable { path, kind: "directory", error });
                }
                continue;
            }
        };
        if entry.file_type().is_dir() {
            directories.push(relative(entry.path()));
            continue;
        }
        // For a link, the kind of its target; a dangling link stays a link.
        let kind = fs::metadata(entry.path()).map_or(entry.file_type(), |metadata| metadata.file_type());
        if kind.is_dir() {
            continue;
        }
        seen += 1;
        if !patterns.choose(&relative(entry.path())) {
            with_unselected.extend(relative(entry.path()).parent().map(Path::to_owned));
            continue;
        }
        if !kind.is_file() {
            return Err(patterns.not_a_file(entry.into_path(), kind_name(kind)));
        }
        files.push(entry.into_path());
    }
    let is_wanted = |path: &PathBuf| !is_hidden(path) && patterns.choose(&relative(path));
    if let Some(path) = dangling.into_iter().find(is_wanted) {
        return Err(patterns.not_a_file(path, "a link to nothing"));
    }
    loops.iter().filter(|path| is_wanted(path)).for_each(|path| skipped.add(&relative(path), Reason::Loop));
    if files.is_empty() {
        let list = |patterns: &[String], none: &str| match patterns {
            [] => none.to_owned(),
            patterns => format!("`{}`", patterns.join("`, `")),
        };
        return Err(DataError::NothingMatches {
            path: root.to_owned(),
            seen,
            include: list(&data.include, "any name"),
            exclude: list(&data.exclude, "(none)"),
        });
    }
    files.sort_unstable_by(|a, b| a.as_os_str().as_bytes().cmp(b.as_os_str().as_bytes()));
    Ok(Found { files, directories, with_unselected, skipped })
}

/// Whether a directory is marked as a cache.
fn is_cache(directory: &Path) -> bool {
    let mut start = [0; CACHE_SIGNATURE.len()];
    open(&directory.join("CACHEDIR.TAG"))
        .and_then(|mut file| file.read_exact(&mut start))
        .is_ok_and(|()| start == CACHE_SIGNATURE)
}

/// Opens for reading without blocking: what was a file a moment ago can be a pipe by now.
pub(super) fn open(path: &Path) -> io::Result<File> {
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    fs::OpenOptions::new().read(true).custom_flags(flags).open(path)
}

/// Repeats a read of a file that could be read when the run started. A missing or shorter file is
/// not read again.
///
/// # Errors
/// The last error.
pub(super) fn retry<T>(path: &Path, read: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    crate::retry::retry(|error| (!is_final(error)).then(|| format!("{}: {error}", path.display())), read)
}

/// Rejects a compressed file, by its extension or first bytes.
pub(super) fn check_uncompressed(path: &Path, start: &[u8]) -> Result<(), DataError> {
    const FORMATS: [(&str, &[u8], &str); 4] = [
        ("gz", &[0x1f, 0x8b, 8], "gunzip"),
        ("zst", &[0x28, 0xb5, 0x2f, 0xfd], "unzstd"),
        ("bz2", b"BZh", "bunzip2"),
        ("xz", &[0xfd, b'7', b'z', b'X', b'Z', 0], "unxz"),
    ];
    let extension = path.extension().unwrap_or_default();
    match FORMATS.iter().find(|(name, magic, _)| extension.eq_ignore_ascii_case(name) || start.starts_with(magic)) {
        None => Ok(()),
        Some((name, _, unpack)) => {
            let expected = format!("plain data: unpack it with `{unpack}`");
            Err(DataError::format(path, format!("compressed ({name})"), expected))
        }
    }
}

fn read_all(root: &Path, files: &[PathBuf], limit: u64) -> Result<Text, DataError> {
    let too_large = |got| DataError::TooLarge { path: root.to_owned(), got, limit };
    let mut expected = 0_u64;
    for path in files {
        let metadata = fs::metadata(path).map_err(|error| DataError::unreadable(path, error))?;
        expected = expected.saturating_add(metadata.len());
        if expected > limit {
            return Err(too_large(expected));
        }
    }
    let mut text = Text { bytes: Vec::new(), ends: Vec::new(), skipped: SkippedFiles::default() };
    // The length could have changed since, so it is only a hint, and a failed reservation is not
    // yet an error.
    let _ = text.bytes.try_reserve_exact(usize::try_from(expected).unwrap_or(0));
    for path in files {
        let start = text.bytes.len();
        let room = limit - start as u64;
        let read = open(path).and_then(|file| file.take(room + 1).read_to_end(&mut text.bytes));
        let read = read.map_err(|error| DataError::unreadable(path, error))?;
        if read as u64 > room {
            return Err(too_large(text.bytes.len() as u64));
        }
        check_uncompressed(path, &text.bytes[start..])?;
        match read {
            0 => text.skipped.add(path.strip_prefix(root).unwrap_or(path), Reason::Empty),
            _ => text.ends.push(text.bytes.len()),
        }
    }
    if text.bytes.is_empty() {
        return Err(DataError::AllEmpty { path: root.to_owned(), files: files.len() as u64 });
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::Errno;

    #[test]
    fn a_read_is_repeated_unless_the_file_itself_is_the_cause() {
        let mut errors = vec![Errno::STALE, Errno::IO];
        let read = retry(Path::new("f"), || errors.pop().map_or(Ok(7), |errno| Err(errno.into())));
        assert_eq!(read.ok(), Some(7));
        let mut reads = 0;
        let read = retry(Path::new("f"), || {
            reads += 1;
            Err::<(), _>(Errno::NOENT.into())
        });
        assert!(read.is_err_and(|error| is_final(&error)));
        assert_eq!(reads, 1);
    }

    #[test]
    fn an_error_of_the_disk_is_not_one_of_the_data() {
        let path = Path::new("f");
        for errno in [Errno::IO, Errno::STALE, Errno::MFILE] {
            assert!(DataError::unreadable(path, errno.into()).is_io(), "{errno:?}");
        }
        for errno in [Errno::NOENT, Errno::ACCESS] {
            assert!(!DataError::unreadable(path, errno.into()).is_io(), "{errno:?}");
        }
        assert!(DataError::unreadable_now(path, Errno::ACCESS.into()).is_io());
    }
}
