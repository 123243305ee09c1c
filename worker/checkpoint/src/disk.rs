//! What checkpoints ask of a file system, and the real one.
//!
//! It is a trait so that tests can put a disk in its place that crashes at every call and loses all that a real one may lose.

use rustix::fs::OFlags;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

/// What a path leads to. Links are not followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Link,
    /// A device, a socket, a pipe.
    Other,
}

impl Kind {
    /// The kind in words.
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

/// A file that is being written.
pub trait WriteFile {
    /// Appends all bytes.
    ///
    /// # Errors
    /// What the system says; how much was written is then unknown.
    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()>;
    /// Waits until the content is on the disk. The file's name is not: see [`Vfs::sync_directory`].
    ///
    /// # Errors
    /// What the system says; the content is then lost.
    fn sync(&mut self) -> io::Result<()>;
}

/// A regular file that is being read.
pub trait ReadFile {
    /// Its length, bytes.
    fn length(&self) -> u64;
    /// Fills `bytes` with what is at `offset`.
    ///
    /// # Errors
    /// What the system says; `UnexpectedEof` beyond the end.
    fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()>;
}

/// A file system.
pub trait Vfs: Send + Sync {
    /// Creates a directory. One that exists is an error, `AlreadyExists`.
    ///
    /// # Errors
    /// What the system says; the same for all methods.
    fn create_directory(&self, path: &Path) -> io::Result<()>;
    /// Opens a file for writing, empty.
    ///
    /// # Errors
    /// What the system says.
    fn create(&self, path: &Path) -> io::Result<Box<dyn WriteFile>>;
    /// Opens a regular file for reading; never waits for a writer and never follows a link in the last part of the path.
    ///
    /// # Errors
    /// What the system says; `InvalidInput` for what is no regular file.
    fn open(&self, path: &Path) -> io::Result<Box<dyn ReadFile>>;
    /// Gives a file another name, in place of what had it.
    ///
    /// # Errors
    /// What the system says.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Waits until the names in a directory are on the disk.
    ///
    /// # Errors
    /// What the system says.
    fn sync_directory(&self, path: &Path) -> io::Result<()>;
    /// Removes a file.
    ///
    /// # Errors
    /// What the system says.
    fn remove_file(&self, path: &Path) -> io::Result<()>;
    /// Removes an empty directory.
    ///
    /// # Errors
    /// What the system says.
    fn remove_directory(&self, path: &Path) -> io::Result<()>;
    /// Names in a directory that are UTF-8, in any order.
    ///
    /// # Errors
    /// What the system says.
    fn list(&self, path: &Path) -> io::Result<Vec<String>>;
    /// What a path leads to.
    ///
    /// # Errors
    /// What the system says.
    fn kind(&self, path: &Path) -> io::Result<Kind>;
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

/// Flags as `OpenOptions` takes them.
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
        // Without NONBLOCK opening a pipe would wait for somebody who writes.
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
            // Some network file systems know no such call; they promise no more without it than with it.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(()),
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
}
