//! Memory of a recorder: 64-bit words in a mapped file or in private memory.
#![allow(unsafe_code)]

use rustix::mm::{MapFlags, ProtFlags};
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;
use switchyard_worker_contract::recorder::WORDS;

pub(super) enum Words {
    Private(Box<[AtomicU64; WORDS]>),
    Mapped(Mapped),
}

pub(super) struct Mapped(NonNull<[AtomicU64; WORDS]>);

// SAFETY: the words are atomic, and the mapping lives as long as this value.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Words {
    pub fn private() -> Words {
        Words::Private(Box::new([const { AtomicU64::new(0) }; WORDS]))
    }

    /// Replaces the file. Its blocks are written first, because a mapping cannot report a full
    /// disk.
    pub fn in_file(path: &Path) -> io::Result<Words> {
        let mut file = File::options().read(true).write(true).create(true).truncate(true).open(path)?;
        file.write_all(&[0; 8 * WORDS])?;
        // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing. The file has
        // this length, and nothing truncates the files of a run.
        let base = unsafe {
            let prot = ProtFlags::READ | ProtFlags::WRITE;
            rustix::mm::mmap(std::ptr::null_mut(), 8 * WORDS, prot, MapFlags::SHARED, &file, 0)?
        };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Words::Mapped(Mapped(base)))
    }

    pub fn at(&self, word: usize) -> &AtomicU64 {
        match self {
            Words::Private(words) => &words[word],
            // SAFETY: the page is suitably aligned, all words are mapped, and they are only used as
            // atomics.
            Words::Mapped(Mapped(base)) => unsafe { &base.as_ref()[word] },
        }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping, and references to it borrow this value.
        let _ = unsafe { rustix::mm::munmap(self.0.as_ptr().cast(), 8 * WORDS) };
    }
}
