//! `libnvrtc.so.13`: NVIDIA's compiler. Instead of a CUBIN it returns the PTX of the same
//! compilation, see [`CONTAINER`].

use crate::abi::Pointer;
use std::ffi::{CStr, OsString, c_char};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use switchyard_cuda::Error;
use switchyard_cuda::find::{NVRTC, Places, VARIABLE};
use switchyard_cuda::nvrtc::Nvrtc;
use switchyard_cuda_reference::compiler::{cache_file, cached_or};

/// Header of an emulated CUBIN: looks like an ELF file, and is followed by zero-terminated PTX.
pub(crate) const CONTAINER: &[u8] = b"\x7fELF switchyard reference: PTX\n";

const INVALID_INPUT: i32 = 3;
const INVALID_PROGRAM: i32 = 4;
const COMPILATION: i32 = 6;
const NO_COMPILER: i32 = 11;

/// A program: compiler inputs and outputs. Strings are zero-terminated.
#[derive(Default)]
pub struct Program {
    name: String,
    source: String,
    headers: Vec<(String, String)>,
    ptx: Vec<u8>,
    log: Vec<u8>,
}

/// NVIDIA's compiler.
fn compiler() -> Result<&'static Nvrtc, String> {
    static COMPILER: OnceLock<Result<Nvrtc, String>> = OnceLock::new();
    let open = || {
        let folder = std::env::var_os("SWITCHYARD_REFERENCE_NVRTC");
        let folder = folder.ok_or("SWITCHYARD_REFERENCE_NVRTC names no folder with NVIDIA's NVRTC")?;
        let get = |name: &str| (name == VARIABLE).then(|| OsString::from(&folder));
        let found = Places::new(get, Path::new("/"), None).open(&NVRTC).map_err(|error| error.to_string())?;
        if found.library.path.parent() != Some(Path::new(&folder)) {
            return Err(format!("{} has no libnvrtc", Path::new(&folder).display()));
        }
        Nvrtc::new(&found.library).map_err(|error| error.to_string())
    };
    COMPILER.get_or_init(open).as_ref().map_err(Clone::clone)
}

fn with_zero(text: &str) -> Vec<u8> {
    let mut bytes = text.as_bytes().to_vec();
    bytes.push(0);
    bytes
}

impl Program {
    fn compile(&mut self, options: &[String]) -> Result<(), (i32, String)> {
        let headers: Vec<(&str, &str)> = self.headers.iter().map(|(name, text)| (&**name, &**text)).collect();
        let compiled = cached_or(self.cached(options).as_deref(), || {
            let compiler = compiler().map_err(|text| Error::Refused { call: "nvrtc", text })?;
            compiler.compile((&self.name, &self.source), &headers, options)
        });
        let compiled = compiled.map_err(|error| match error {
            Error::Call { code, text, .. } => (code, text),
            other => (NO_COMPILER, other.to_string()),
        })?;
        (self.log, self.ptx) = (with_zero(&compiled.log), with_zero(&compiled.ptx));
        Ok(())
    }

    /// The cache file of a compilation.
    fn cached(&self, options: &[String]) -> Option<PathBuf> {
        let folder = PathBuf::from(std::env::var_os("SWITCHYARD_REFERENCE_CACHE")?);
        let compiler = std::env::var_os("SWITCHYARD_REFERENCE_NVRTC");
        let compiler = compiler.and_then(|folder| Path::new(&folder).canonicalize().ok());
        Some(cache_file(&folder, &(&compiler, &self.name, &self.source, &self.headers, options)))
    }
}

/// # Safety
/// `text` must be a C string.
unsafe fn text(text: *const c_char) -> String {
    // SAFETY: upheld by the caller.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// # Safety
/// `list` must have `count` C strings.
unsafe fn texts(count: i32, list: *const *const c_char) -> Vec<String> {
    // SAFETY: upheld by the caller.
    (0..usize::try_from(count).unwrap_or(0)).map(|index| unsafe { text(list.add(index).read()) }).collect()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcVersion(major: *mut i32, minor: *mut i32) -> i32 {
    match compiler().map(Nvrtc::version) {
        Ok(Ok((first, second))) => {
            // SAFETY: per the header's contract.
            unsafe {
                major.write(first);
                minor.write(second);
            }
            0
        }
        Ok(Err(error)) => refuse("nvrtcVersion", &error.to_string()),
        Err(error) => refuse("nvrtcVersion", &error),
    }
}

fn refuse(call: &str, text: &str) -> i32 {
    crate::finding::explain(call, text);
    NO_COMPILER
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcCreateProgram(
    program: *mut Pointer,
    source: *const c_char,
    name: *const c_char,
    count: i32,
    headers: *const *const c_char,
    names: *const *const c_char,
) -> i32 {
    if program.is_null() || source.is_null() {
        return INVALID_INPUT;
    }
    // SAFETY: per the header's contract.
    unsafe {
        let name = if name.is_null() { "default_program".to_owned() } else { text(name) };
        let headers = texts(count, names).into_iter().zip(texts(count, headers)).collect();
        let made = Box::new(Program { name, source: text(source), headers, ..Program::default() });
        program.write(Box::into_raw(made).cast());
    }
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcDestroyProgram(program: *mut Pointer) -> i32 {
    // SAFETY: the header's contract makes it a result of `nvrtcCreateProgram`.
    unsafe {
        drop(Box::from_raw(program.read().cast::<Program>()));
        program.write(std::ptr::null_mut());
    }
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcCompileProgram(program: *mut Program, count: i32, options: *const *const c_char) -> i32 {
    // SAFETY: the header's contract makes it a result of `nvrtcCreateProgram`, with `count`
    // options.
    let (Some(program), options) = (unsafe { (program.as_mut(), texts(count, options)) }) else {
        return INVALID_PROGRAM;
    };
    match program.compile(&options) {
        Ok(()) => 0,
        Err((code, text)) => {
            program.log = with_zero(&text);
            code
        }
    }
}

/// Declares the functions that return the size of a result, and the result.
macro_rules! results {
    ($($size:ident, $get:ident: $of:expr;)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $size(program: *const Program, bytes: *mut usize) -> i32 {
            let of: fn(&Program) -> Vec<u8> = $of;
            // SAFETY: per the header's contract.
            unsafe {
                let Some(program) = program.as_ref() else { return INVALID_PROGRAM };
                bytes.write(of(program).len());
            }
            0
        }

        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $get(program: *const Program, to: *mut c_char) -> i32 {
            let of: fn(&Program) -> Vec<u8> = $of;
            // SAFETY: per the header's contract.
            unsafe {
                let Some(program) = program.as_ref() else { return INVALID_PROGRAM };
                let bytes = of(program);
                to.cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            }
            0
        }
    )*};
}

results! {
    nvrtcGetProgramLogSize, nvrtcGetProgramLog: |program| program.log.clone();
    nvrtcGetPTXSize, nvrtcGetPTX: |program| program.ptx.clone();
    nvrtcGetCUBINSize, nvrtcGetCUBIN: |program| [CONTAINER, &program.ptx].concat();
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetErrorString(code: i32) -> *const c_char {
    let text = match code {
        0 => c"NVRTC_SUCCESS",
        INVALID_INPUT => c"NVRTC_ERROR_INVALID_INPUT",
        INVALID_PROGRAM => c"NVRTC_ERROR_INVALID_PROGRAM",
        5 => c"NVRTC_ERROR_INVALID_OPTION",
        COMPILATION => c"NVRTC_ERROR_COMPILATION",
        NO_COMPILER => c"NVRTC_ERROR_INTERNAL_ERROR",
        _ => c"NVRTC_ERROR unknown",
    };
    text.as_ptr()
}
