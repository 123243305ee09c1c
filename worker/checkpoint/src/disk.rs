//! File system interface of checkpoints, and its implementation on the real one.
//!
//! A trait, so that tests can substitute a disk that crashes at any call and loses everything that
//! a real disk might lose.

use rustix::fs::OFlags;
use rustix::io::Errno;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

/// Type of the file at a path. Links are not followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    File,
    Directory,
    Link,
    /// A device, a socket, or a pipe.
    Other,
}

impl Kind {
    /// Description for error messages.
    pub fn name(self) -> &'static str {
        match self {
            Kind::File => "a file",
            Kind::Directory => "a directory",
            Kind::Link => "a symbolic link",
            Kind::Other => "a device, a socket or a pipe",
        }
    }
}

impl From<fs::FileType> for Kind {
    fn from(kind: fs::FileType) -> Kind {
        match kind {
            _ if kind.is_file() => Kind::File,
            _ if kind.is_dir() => Kind::Directory,
            _ if kind.is_symlink() => Kind::Link,
            _ => Kind::Other,
        }
    }
}

/// Whether a read that failed with this error fails again whenever it is repeated, because the file
/// itself is the cause. Any other I/O error can pass: a disk, a network or a limit fails for a
/// while.
pub fn is_final(error: &io::Error) -> bool {
    use io::ErrorKind as Cause;
    matches!(
        error.kind(),
        Cause::InvalidData
            | Cause::InvalidFilename
            | Cause::InvalidInput
            | Cause::IsADirectory
            | Cause::NotADirectory
            | Cause::NotFound
            | Cause::UnexpectedEof
    )
}

pub trait WriteFile {
    /// Appends all bytes.
    ///
    /// # Errors
    /// The system's error; it is then unknown how much was written.
    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()>;
    /// Waits until the content is durable. The file's name might not be: see
    /// [`Vfs::sync_directory`].
    ///
    /// # Errors
    /// The system's error; the content is then lost.
    fn sync(&mut self) -> io::Result<()>;
}

/// A regular file being read.
pub trait ReadFile {
    /// Length in bytes.
    fn length(&self) -> u64;
    /// Fills `bytes` from `offset`.
    ///
    /// # Errors
    /// The system's error; `UnexpectedEof` past the end.
    fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()>;
}

/// A file system.
pub trait Vfs: Send + Sync {
    /// Creates a directory; `AlreadyExists` if it exists.
    ///
    /// # Errors
    /// The system's error, as for all methods.
    fn create_directory(&self, path: &Path) -> io::Result<()>;
    /// Opens an empty file for writing.
    ///
    /// # Errors
    /// The system's error.
    fn create(&self, path: &Path) -> io::Result<Box<dyn WriteFile>>;
    /// Opens a regular file for reading. Never waits for a writer, and does not follow a link in
    /// the last path component.
    ///
    /// # Errors
    /// The system's error; `InvalidInput` if this is not a regular file.
    fn open(&self, path: &Path) -> io::Result<Box<dyn ReadFile>>;
    /// Renames a file, replacing an existing file of that name.
    ///
    /// # Errors
    /// The system's error.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Waits until the names in a directory are durable.
    ///
    /// # Errors
    /// The system's error.
    fn sync_directory(&self, path: &Path) -> io::Result<()>;

    /// Removes a file.
    ///
    /// # Errors
    /// The system's error.
    fn remove_file(&self, path: &Path) -> io::Result<()>;
    /// Removes an empty directory.
    ///
    /// # Errors
    /// The system's error.
    fn remove_directory(&self, path: &Path) -> io::Result<()>;
    /// The UTF-8 names in a directory, in any order.
    ///
    /// # Errors
    /// The system's error.
    fn list(&self, path: &Path) -> io::Result<Vec<String>>;
    /// Type of the file at a path. Links are not followed.
    ///
    /// # Errors
    /// The system's error.
    fn kind(&self, path: &Path) -> io::Result<Kind>;
    /// Bytes that this user can still write to the file system of a directory; `None` if it reports
    /// no size, as some network file systems do.
    ///
    /// # Errors
    /// The system's error.
    fn available(&self, directory: &Path) -> io::Result<Option<u64>>;
}

/// The file system of this machine.
#[derive(Debug, Clone, Copy, Default)]
pub struct Disk;

impl WriteFile for File {
    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        Write::write_all(self, bytes)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.sync_all()
    }
}

struct Open {
    file: File,
    length: u64,
}

impl ReadFile for Open {
    fn length(&self) -> u64 {
        self.length
    }

    fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_exact_at(bytes, offset)
    }
}

/// Whether a file system cannot sync directories. Several give the same guarantees without it: NFS
/// returns EINVAL, FUSE ENOSYS or EOPNOTSUPP (gocryptfs#587), SMB and 9p EACCES or EBADF.
fn lacks_directory_sync(error: &io::Error) -> bool {
    let lacks = [Errno::INVAL, Errno::NOSYS, Errno::OPNOTSUPP, Errno::ACCESS, Errno::BADF];
    Errno::from_io_error(error).is_some_and(|errno| lacks.contains(&errno))
}

/// Converts to the flag type of `OpenOptions`.
fn flags(flags: OFlags) -> i32 {
    flags.bits().cast_signed()
}

impl Vfs for Disk {
    fn create_directory(&self, path: &Path) -> io::Result<()> {
        fs::create_dir(path)
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn WriteFile>> {
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).custom_flags(flags(OFlags::NOFOLLOW));
        Ok(Box::new(options.open(path)?))
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn ReadFile>> {
        // Without NONBLOCK, opening a pipe would block until a writer appears.
        let file = OpenOptions::new().read(true).custom_flags(flags(OFlags::NOFOLLOW | OFlags::NONBLOCK)).open(path)?;
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            let text = format!("got {}; expected a file", Kind::from(metadata.file_type()).name());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        Ok(Box::new(Open { file, length: metadata.len() }))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn sync_directory(&self, path: &Path) -> io::Result<()> {
        match File::open(path)?.sync_all() {
            Err(error) if lacks_directory_sync(&error) => Ok(()),
            other => other,
        }
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn remove_directory(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir(path)
    }

    fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(path)? {
            names.extend(entry?.file_name().into_string());
        }
        Ok(names)
    }

    fn kind(&self, path: &Path) -> io::Result<Kind> {
        Ok(fs::symlink_metadata(path)?.file_type().into())
    }

    fn available(&self, directory: &Path) -> io::Result<Option<u64>> {
        let system = rustix::fs::statvfs(directory)?;
        Ok((system.f_blocks > 0).then(|| system.f_bavail.saturating_mul(system.f_frsize)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_errors_of_a_missing_call_are_tolerated() {
        for (errno, tolerated) in
            [(Errno::NOSYS, true), (Errno::INVAL, true), (Errno::IO, false), (Errno::NOSPC, false)]
        {
            assert_eq!(lacks_directory_sync(&errno.into()), tolerated, "{errno:?}");
        }
    }
}
