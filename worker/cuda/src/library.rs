//! A shared library, its functions and its objects.
#![allow(unsafe_code)]

use crate::error::Error;
use libloading::os::unix;
use std::ffi::{CStr, c_char, c_void};
use std::path::{Path, PathBuf};

/// A library's address or handle.
pub(crate) type Pointer = *mut c_void;

/// A shared library that stays open until the process ends, because CUDA libraries do not survive
/// being closed.
pub struct Library {
    inner: &'static unix::Library,
    /// The file, or a bare name if the loader resolved it and `/proc/self/maps` does not show the
    /// path.
    pub path: PathBuf,
}

impl Library {
    /// Opens a library with global visibility. The error is the loader's message.
    pub(crate) fn open(path: &Path) -> Result<Library, String> {
        Library::open_with(path, unix::RTLD_NOW | unix::RTLD_GLOBAL)
    }

    /// Opens a library without exporting its symbols.
    pub(crate) fn open_alone(path: &Path) -> Result<Library, String> {
        Library::open_with(path, unix::RTLD_LAZY | unix::RTLD_LOCAL)
    }

    fn open_with(path: &Path, flags: i32) -> Result<Library, String> {
        // SAFETY: opening runs the library's constructors; those of NVIDIA's libraries can run on
        // any thread.
        let inner = unsafe { unix::Library::open(Some(path), flags) };
        let inner = inner.map_err(|error| {
            let mut text = error.to_string();
            if let Some(cause) = std::error::Error::source(&error) {
                text = format!("{text}: {cause}");
            }
            text
        })?;
        let path = if path.is_absolute() { path.to_path_buf() } else { mapped(path).unwrap_or_else(|| path.into()) };
        Ok(Library { inner: Box::leak(Box::new(inner)), path })
    }

    /// Resolves a function by name.
    ///
    /// # Errors
    /// The library lacks the function.
    ///
    /// # Safety
    /// `T` must be a function pointer type with the signature in the library's header.
    pub(crate) unsafe fn function<T: Copy>(&self, name: &'static str) -> Result<T, Error> {
        // SAFETY: as promised by the caller; the library is never closed, so a copy of the pointer
        // stays valid.
        let symbol = unsafe { self.inner.get::<T>(name.as_bytes()) };
        symbol.map(|symbol| *symbol).map_err(|_| Error::NoSymbol { file: self.path.clone(), symbol: name })
    }
}

/// The file behind a name that the loader resolved.
fn mapped(name: &Path) -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    // The mapped file is the link's target: `libcuda.so.1` is mapped as `libcuda.so.580.65.06`.
    let stem = name.to_str()?.split(".so").next()?;
    let files = maps.lines().filter_map(|line| line.find('/').map(|at| Path::new(&line[at..])));
    let mut same = files
        .filter(|path| path.file_name().is_some_and(|file| file.to_string_lossy().starts_with(&format!("{stem}.so"))));
    same.next().map(Path::to_path_buf)
}

/// Declares library functions as a struct of pointers, each resolved by name.
macro_rules! functions {
    ($structure:ident { $($function:ident($($argument:ty),* $(,)?) -> $result:ty;)* }) => {
        #[allow(non_snake_case)]
        struct $structure { $($function: unsafe extern "C" fn($($argument),*) -> $result,)* }
        impl $structure {
            /// The names for the driver, cuBLASLt, cuDNN and NCCL are checked against their
            /// headers.
            #[cfg(test)]
            #[allow(dead_code)]
            const NAMES: &[&str] = &[$(stringify!($function)),*];

            fn load(library: &$crate::library::Library) -> Result<$structure, $crate::error::Error> {
                Ok($structure {
                    $($function:
                        // SAFETY: the signature matches the header; see the crate documentation.
                        unsafe { library.function(stringify!($function)) }?,)*
                })
            }
        }
    };
}
pub(crate) use functions;

/// A library object, destroyed on drop.
pub(crate) struct Handle {
    pub(crate) raw: Pointer,
    pub(crate) destroy: unsafe extern "C" fn(Pointer) -> i32,
}

// SAFETY: no object of these libraries belongs to a thread.
unsafe impl Send for Handle {}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: `raw` came from the create function that matches `destroy`, and is destroyed
        // once. An error could not be handled here.
        let _ = unsafe { (self.destroy)(self.raw) };
    }
}

/// Turns any nonzero code into an error.
pub(crate) fn check(library: &'static str, call: &str, code: i32, text: impl FnOnce() -> String) -> Result<(), Error> {
    match code {
        0 => Ok(()),
        code => Err(Error::Call { library, call: call.to_string(), code, text: text() }),
    }
}

/// Copies a library's C string.
///
/// # Safety
/// `text` is null or points to a C string.
pub(crate) unsafe fn text_at(text: *const c_char) -> String {
    if text.is_null() {
        return "no text".to_string();
    }
    // SAFETY: as promised by the caller.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
