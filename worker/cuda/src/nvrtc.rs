//! NVRTC: CUDA C to machine code at run time. Needs no GPU.
#![allow(unsafe_code)]

use crate::error::Error;
use crate::find::NVRTC;
use crate::library::{Library, Pointer, check, functions, text_at};
use std::ffi::{CString, c_char};

functions!(Functions {
    nvrtcVersion(*mut i32, *mut i32) -> i32;
    nvrtcCreateProgram(*mut Pointer, *const c_char, *const c_char, i32, *const Pointer, *const Pointer) -> i32;
    nvrtcDestroyProgram(*mut Pointer) -> i32;
    nvrtcCompileProgram(Pointer, i32, *const *const c_char) -> i32;
    nvrtcGetProgramLogSize(Pointer, *mut usize) -> i32;
    nvrtcGetProgramLog(Pointer, *mut c_char) -> i32;
    nvrtcGetCUBINSize(Pointer, *mut usize) -> i32;
    nvrtcGetCUBIN(Pointer, *mut c_char) -> i32;
    nvrtcGetErrorString(i32) -> *const c_char;
});

/// The compiler.
pub struct Nvrtc {
    functions: Functions,
}

impl Nvrtc {
    /// Looks up the functions.
    ///
    /// # Errors
    /// A function is missing.
    pub fn new(library: &Library) -> Result<Nvrtc, Error> {
        Ok(Nvrtc { functions: Functions::load(library)? })
    }

    fn check(&self, call: &str, code: i32) -> Result<(), Error> {
        // SAFETY: any number may be passed; the result is a constant string.
        check(NVRTC.name, call, code, || unsafe { text_at((self.functions.nvrtcGetErrorString)(code)) })
    }

    /// Major and minor version.
    ///
    /// # Errors
    /// The call fails.
    pub fn version(&self) -> Result<(i32, i32), Error> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both pointers are to live integers.
        self.check("nvrtcVersion", unsafe { (self.functions.nvrtcVersion)(&raw mut major, &raw mut minor) })?;
        Ok((major, minor))
    }

    /// Compiles a source to a CUBIN; `options` must name a real architecture (`sm_…`), because there is no CUBIN for a
    /// virtual one.
    ///
    /// # Errors
    /// The compiler's messages about the source or the options.
    pub fn cubin(&self, name: &str, source: &str, options: &[String]) -> Result<Vec<u8>, Error> {
        let call = &self.functions;
        let text =
            |value: &str| CString::new(value).map_err(|_| Error::refused("nvrtc", format!("a zero in {value:?}")));
        let (name, source) = (text(name)?, text(source)?);
        let options: Vec<CString> = options.iter().map(|option| text(option)).collect::<Result<_, _>>()?;
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let mut program = Program { raw: std::ptr::null_mut(), destroy: call.nvrtcDestroyProgram };
        // SAFETY: the strings live until the call returns, and NVRTC copies them; no headers are given, so both lists
        // may be null.
        let code = unsafe {
            (call.nvrtcCreateProgram)(
                &raw mut program.raw,
                source.as_ptr(),
                name.as_ptr(),
                0,
                std::ptr::null(),
                std::ptr::null(),
            )
        };
        self.check("nvrtcCreateProgram", code)?;
        // SAFETY: the program was created above; the list has as many strings as it says.
        let code = unsafe { (call.nvrtcCompileProgram)(program.raw, pointers.len() as i32, pointers.as_ptr()) };
        check(NVRTC.name, "nvrtcCompileProgram", code, || self.log(&program).unwrap_or_else(|_| "no log".to_string()))?;
        let mut size = 0;
        // SAFETY: the program was compiled; `size` lives.
        self.check("nvrtcGetCUBINSize", unsafe { (call.nvrtcGetCUBINSize)(program.raw, &raw mut size) })?;
        let mut cubin = vec![0u8; size];
        // SAFETY: NVRTC writes as many bytes as it just reported.
        self.check("nvrtcGetCUBIN", unsafe { (call.nvrtcGetCUBIN)(program.raw, cubin.as_mut_ptr().cast()) })?;
        Ok(cubin)
    }

    fn log(&self, program: &Program) -> Result<String, Error> {
        let mut size = 0;
        // SAFETY: the program lives; `size` lives.
        let code = unsafe { (self.functions.nvrtcGetProgramLogSize)(program.raw, &raw mut size) };
        self.check("nvrtcGetProgramLogSize", code)?;
        let mut log = vec![0u8; size];
        // SAFETY: NVRTC writes as many bytes as it just reported.
        let code = unsafe { (self.functions.nvrtcGetProgramLog)(program.raw, log.as_mut_ptr().cast()) };
        self.check("nvrtcGetProgramLog", code)?;
        Ok(String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_string())
    }
}

/// A program. It is destroyed through the address of its handle and therefore is not a `Handle`.
struct Program {
    raw: Pointer,
    destroy: unsafe extern "C" fn(*mut Pointer) -> i32,
}

impl Drop for Program {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: created by `nvrtcCreateProgram` and destroyed once.
            let _ = unsafe { (self.destroy)(&raw mut self.raw) };
        }
    }
}
