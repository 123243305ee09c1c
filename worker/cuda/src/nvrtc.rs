//! NVRTC: compiles CUDA C to machine code at run time. Needs no GPU.
#![allow(unsafe_code)]

use crate::error::Error;
use crate::find::NVRTC;
use crate::library::{Library, Pointer, check, functions, text_at};
use std::ffi::{CString, c_char};

functions!(Functions {
    nvrtcVersion(*mut i32, *mut i32) -> i32;
    nvrtcCreateProgram(*mut Pointer, *const c_char, *const c_char, i32, *const *const c_char, *const *const c_char) -> i32;
    nvrtcDestroyProgram(*mut Pointer) -> i32;
    nvrtcCompileProgram(Pointer, i32, *const *const c_char) -> i32;
    nvrtcGetProgramLogSize(Pointer, *mut usize) -> i32;
    nvrtcGetProgramLog(Pointer, *mut c_char) -> i32;
    nvrtcGetPTXSize(Pointer, *mut usize) -> i32;
    nvrtcGetPTX(Pointer, *mut c_char) -> i32;
    nvrtcGetCUBINSize(Pointer, *mut usize) -> i32;
    nvrtcGetCUBIN(Pointer, *mut c_char) -> i32;
    nvrtcGetErrorString(i32) -> *const c_char;
});

/// The compiler.
pub struct Nvrtc {
    functions: Functions,
}

impl Nvrtc {
    /// Resolves the functions.
    ///
    /// # Errors
    /// A function is missing.
    pub fn new(library: &Library) -> Result<Nvrtc, Error> {
        Ok(Nvrtc { functions: Functions::load(library)? })
    }

    fn check(&self, call: &str, code: i32) -> Result<(), Error> {
        // SAFETY: any code is valid; the result is a constant string.
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

    /// Compiles a source with its named headers. `options` must name a real architecture (`sm_…`),
    /// because there is no CUBIN for a virtual one.
    ///
    /// # Errors
    /// The compiler's messages about the source or the options, or it produced no machine code.
    pub fn compile(
        &self,
        (name, source): (&str, &str),
        headers: &[(&str, &str)],
        options: &[String],
    ) -> Result<Compiled, Error> {
        let call = &self.functions;
        let text =
            |value: &str| CString::new(value).map_err(|_| Error::refused("nvrtc", format!("a zero in {value:?}")));
        let (name, source) = (text(name)?, text(source)?);
        let header_names: Vec<CString> = headers.iter().map(|(name, _)| text(name)).collect::<Result<_, _>>()?;
        let header_texts: Vec<CString> = headers.iter().map(|(_, source)| text(source)).collect::<Result<_, _>>()?;
        let options: Vec<CString> = options.iter().map(|option| text(option)).collect::<Result<_, _>>()?;
        let [header_names, header_texts, pointers] = [&header_names, &header_texts, &options]
            .map(|list| list.iter().map(|one| one.as_ptr()).collect::<Vec<*const c_char>>());
        let mut program = Program { raw: std::ptr::null_mut(), destroy: call.nvrtcDestroyProgram };
        // SAFETY: the strings live until the call returns, and NVRTC copies them; both lists have
        // the given length.
        let code = unsafe {
            (call.nvrtcCreateProgram)(
                &raw mut program.raw,
                source.as_ptr(),
                name.as_ptr(),
                headers.len() as i32,
                header_texts.as_ptr(),
                header_names.as_ptr(),
            )
        };
        self.check("nvrtcCreateProgram", code)?;
        // SAFETY: the program was created above; the list has the given length.
        let code = unsafe { (call.nvrtcCompileProgram)(program.raw, pointers.len() as i32, pointers.as_ptr()) };
        check(NVRTC.name, "nvrtcCompileProgram", code, || self.log(&program).unwrap_or_else(|_| "no log".to_string()))?;
        let cubin = self.bytes(&program, "nvrtcGetCUBIN", call.nvrtcGetCUBINSize, call.nvrtcGetCUBIN)?;
        // A CUBIN is an ELF file; otherwise the output is PTX or empty.
        if !cubin.starts_with(b"\x7fELF") {
            return Err(Error::refused("nvrtcGetCUBIN", format!("{} bytes that are not an ELF file", cubin.len())));
        }
        let ptx = self.bytes(&program, "nvrtcGetPTX", call.nvrtcGetPTXSize, call.nvrtcGetPTX)?;
        let ptx = String::from_utf8_lossy(&ptx).trim_end_matches('\0').to_owned();
        Ok(Compiled { cubin, ptx, log: self.log(&program)? })
    }

    /// Reads an output of a compiled program.
    fn bytes(&self, program: &Program, call: &str, size: Size, get: Get) -> Result<Vec<u8>, Error> {
        let mut length = 0;
        // SAFETY: the program was compiled; `length` is alive.
        self.check(call, unsafe { size(program.raw, &raw mut length) })?;
        let mut bytes = vec![0u8; length];
        // SAFETY: NVRTC writes as many bytes as it just reported.
        self.check(call, unsafe { get(program.raw, bytes.as_mut_ptr().cast()) })?;
        Ok(bytes)
    }

    fn log(&self, program: &Program) -> Result<String, Error> {
        let call = &self.functions;
        let log = self.bytes(program, "nvrtcGetProgramLog", call.nvrtcGetProgramLogSize, call.nvrtcGetProgramLog)?;
        Ok(String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_string())
    }
}

type Size = unsafe extern "C" fn(Pointer, *mut usize) -> i32;
type Get = unsafe extern "C" fn(Pointer, *mut c_char) -> i32;

/// The output of a compilation.
pub struct Compiled {
    /// Machine code for the architecture.
    pub cubin: Vec<u8>,
    pub ptx: String,
    /// Warnings, and with `--ptxas-options=-v` the registers and spills of each kernel.
    pub log: String,
}

/// A program. Not a `Handle`, because it is destroyed through the address of its handle.
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
