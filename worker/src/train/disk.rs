//! A file system that counts its calls, so that the watchdog can tell a slow checkpoint from a
//! stuck one.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use switchyard_checkpoint::disk::{Disk, Kind, ReadFile, Vfs, WriteFile};

/// The local file system, with a count of completed calls.
#[derive(Debug, Clone, Default)]
pub(super) struct CountedDisk(Arc<AtomicU64>);

impl CountedDisk {
    /// Completed calls.
    pub fn completed_calls(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Counts a completed call.
    pub fn count(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn counted<T>(&self, result: T) -> T {
        self.count();
        result
    }
}

struct Counted<F: ?Sized> {
    disk: CountedDisk,
    file: Box<F>,
}

impl WriteFile for Counted<dyn WriteFile> {
    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.disk.counted(self.file.write_all(bytes))
    }

    fn sync(&mut self) -> io::Result<()> {
        self.disk.counted(self.file.sync())
    }
}

impl ReadFile for Counted<dyn ReadFile> {
    fn length(&self) -> u64 {
        self.file.length()
    }

    fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        self.disk.counted(self.file.read_exact_at(bytes, offset))
    }
}

impl Vfs for CountedDisk {
    fn create_directory(&self, path: &Path) -> io::Result<()> {
        self.counted(Disk.create_directory(path))
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn WriteFile>> {
        let file = self.counted(Disk.create(path))?;
        Ok(Box::new(Counted { disk: self.clone(), file }))
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn ReadFile>> {
        let file = self.counted(Disk.open(path))?;
        Ok(Box::new(Counted { disk: self.clone(), file }))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.counted(Disk.rename(from, to))
    }

    fn sync_directory(&self, path: &Path) -> io::Result<()> {
        self.counted(Disk.sync_directory(path))
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.counted(Disk.remove_file(path))
    }

    fn remove_directory(&self, path: &Path) -> io::Result<()> {
        self.counted(Disk.remove_directory(path))
    }

    fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        self.counted(Disk.list(path))
    }

    fn kind(&self, path: &Path) -> io::Result<Kind> {
        self.counted(Disk.kind(path))
    }

    fn available(&self, directory: &Path) -> io::Result<Option<u64>> {
        self.counted(Disk.available(directory))
    }
}
