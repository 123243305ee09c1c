//! NVIDIA's compiler, with a cache on disk for all tests and later runs, because compiling takes
//! longer than executing.

use crate::fetched;
use std::ffi::OsString;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};
use switchyard_cuda::Error;
use switchyard_cuda::find::{NVRTC, Places, VARIABLE};
use switchyard_cuda::kernels::Program;
use switchyard_cuda::nvrtc::{Compiled, Nvrtc};

/// NVRTC from the pinned wheel.
///
/// # Panics
/// As for [`fetched`], or if it cannot be opened.
pub fn nvrtc() -> &'static Nvrtc {
    static OPENED: LazyLock<Nvrtc> = LazyLock::new(|| {
        let folder = fetched("nvrtc");
        let get = |name: &str| (name == VARIABLE).then(|| OsString::from(&folder));
        let found = Places::new(get, Path::new("/"), None).open(&NVRTC).expect("NVRTC of the wheel");
        Nvrtc::new(&found.library).expect("NVRTC of the wheel")
    });
    &OPENED
}

/// The PTX and machine code of a program, from the cache if possible.
///
/// # Panics
/// As for [`nvrtc`], or with the compiler's messages.
pub fn compiled(program: &Program, architecture: &str) -> Compiled {
    let compiler = fetched("nvrtc").canonicalize().expect("a folder");
    let file = cache_file(&cache(), &(compiler, program.identity(architecture)));
    cached_or(Some(&file), || program.compile(nvrtc(), architecture)).unwrap_or_else(|error| panic!("{error}"))
}

/// The cache folder, next to the compiler in the user's cache: a fresh clone compiles only what has
/// changed.
///
/// # Panics
/// As for [`fetched`], or if it cannot be created.
pub fn cache() -> PathBuf {
    let compiler = fetched("nvrtc").canonicalize().expect("a folder");
    let folder = compiler.parent().expect("invariant: the wheel lies in a folder").join("kernels");
    std::fs::create_dir_all(&folder).expect("a folder");
    folder
}

/// The cache file of a compilation; its name is a hash of all inputs.
pub fn cache_file(folder: &Path, all: &impl Hash) -> PathBuf {
    let half = |salt: u8| {
        let mut hasher = DefaultHasher::new();
        (salt, all).hash(&mut hasher);
        hasher.finish()
    };
    folder.join(format!("{:016x}{:016x}", half(0), half(1)))
}

/// The content of the cache file, or else the result of `compile`, which is then cached.
///
/// # Errors
/// Errors from `compile`.
pub fn cached_or(file: Option<&Path>, compile: impl FnOnce() -> Result<Compiled, Error>) -> Result<Compiled, Error> {
    if let Some(known) = file.and_then(|file| std::fs::read(file).ok()).and_then(|bytes| parsed(&bytes)) {
        return Ok(known);
    }
    let compiled = compile()?;
    if let Some(file) = file {
        // Other threads and processes may do the same: each writes its own file, and the last
        // rename wins.
        static WRITTEN: AtomicU32 = AtomicU32::new(0);
        let own = file.with_extension(format!("{}-{}", std::process::id(), WRITTEN.fetch_add(1, Ordering::Relaxed)));
        let Compiled { log, ptx, cubin } = &compiled;
        let bytes = [log.as_bytes(), ptx.as_bytes(), cubin].join(&0);
        // If this fails, the next process compiles again.
        let _ = std::fs::write(&own, bytes).and_then(|()| std::fs::rename(&own, file));
    }
    Ok(compiled)
}

/// Splits a cache file into log, PTX and machine code, which are separated by zero bytes; the texts
/// contain none.
fn parsed(bytes: &[u8]) -> Option<Compiled> {
    let mut parts = bytes.splitn(3, |byte| *byte == 0);
    let mut text = || String::from_utf8(parts.next()?.to_vec()).ok();
    let (log, ptx) = (text()?, text()?);
    Some(Compiled { log, ptx, cubin: parts.next()?.to_vec() })
}

#[cfg(test)]
mod tests {
    use super::{Compiled, cache_file, cached_or};
    use switchyard_cuda::Error;

    #[test]
    fn results_are_cached_and_damaged_files_are_rebuilt() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = cache_file(folder.path(), &("source", "option"));
        assert_ne!(file, cache_file(folder.path(), &("source", "another")));
        let made = |cubin: &[u8]| Compiled { log: "log\n".into(), ptx: "ptx".into(), cubin: cubin.to_vec() };
        let first = cached_or(Some(&file), || Ok(made(b"\x7fELF\0\0code"))).expect("compiled");
        let second = cached_or(Some(&file), || unreachable!("it is cached")).expect("kept");
        assert_eq!((first.log, first.ptx, first.cubin), (second.log, second.ptx, second.cubin));
        std::fs::write(&file, "log").expect("a file");
        let third = cached_or(Some(&file), || Ok(made(b"new"))).expect("compiled again");
        assert_eq!(third.cubin, b"new");
        std::fs::remove_file(&file).expect("a file");
        let refused = cached_or(Some(&file), || Err(Error::Refused { call: "nvrtc", text: "no".to_owned() }));
        assert!(refused.is_err() && !file.exists(), "a failed compilation is not cached");
    }
}
