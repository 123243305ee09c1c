//! cuBLASLt: matrix products with a choice of algorithms.
#![allow(unsafe_code)]

use crate::driver::Buffer;
use crate::error::Error;
use crate::find::CUBLASLT;
use crate::library::{Handle, Library, Pointer, check, functions, text_at};
use std::ffi::{c_char, c_void};

functions!(Functions {
    cublasLtGetVersion() -> usize;
    cublasLtGetStatusString(i32) -> *const c_char;
    cublasLtCreate(*mut Pointer) -> i32;
    cublasLtDestroy(Pointer) -> i32;
    cublasLtMatmulDescCreate(*mut Pointer, i32, i32) -> i32;
    cublasLtMatmulDescDestroy(Pointer) -> i32;
    cublasLtMatmulDescSetAttribute(Pointer, i32, *const c_void, usize) -> i32;
    cublasLtMatrixLayoutCreate(*mut Pointer, i32, u64, u64, i64) -> i32;
    cublasLtMatrixLayoutDestroy(Pointer) -> i32;
    cublasLtMatmulPreferenceCreate(*mut Pointer) -> i32;
    cublasLtMatmulPreferenceDestroy(Pointer) -> i32;
    cublasLtMatmulPreferenceSetAttribute(Pointer, i32, *const c_void, usize) -> i32;
    cublasLtMatmulAlgoGetHeuristic(
        Pointer, Pointer, Pointer, Pointer, Pointer, Pointer, Pointer, i32, *mut Heuristic, *mut i32,
    ) -> i32;
    cublasLtMatmul(
        Pointer, Pointer, *const f32, Pointer, Pointer, Pointer, Pointer, *const f32, Pointer, Pointer, Pointer,
        Pointer, *const [u64; 8], Pointer, usize, Pointer,
    ) -> i32;
});

const R_32F: i32 = 0;
const R_16BF: i32 = 14;
const COMPUTE_32F: i32 = 68;
const COMPUTE_32F_FAST_TF32: i32 = 77;
const DESC_TRANSA: i32 = 3;
const OP_T: i32 = 1;
const PREF_MAX_WORKSPACE_BYTES: i32 = 1;

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Heuristic {
    algorithm: [u64; 8],
    workspace_bytes: usize,
    state: i32,
    waves: f32,
    reserved: [i32; 4],
}

/// Format of the elements, and how they are multiplied; sums are in f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    /// 16 bits in and out.
    Bf16,
    /// 32 bits in and out, rounded to TF32 in the tensor cores.
    Tf32,
}

impl Precision {
    /// Bytes per element.
    pub fn bytes(self) -> usize {
        match self {
            Precision::Bf16 => 2,
            Precision::Tf32 => 4,
        }
    }
}

/// The library on the current device.
pub struct CublasLt {
    functions: Functions,
    handle: Option<Handle>,
}

impl CublasLt {
    /// Looks up the functions. Only [`CublasLt::start`] needs a GPU.
    ///
    /// # Errors
    /// A function is missing.
    pub fn new(library: &Library) -> Result<CublasLt, Error> {
        Ok(CublasLt { functions: Functions::load(library)?, handle: None })
    }

    /// Starts the library on the current device.
    ///
    /// # Errors
    /// The call fails.
    pub fn start(&mut self) -> Result<(), Error> {
        // SAFETY: the pointer is to a live handle.
        let make = |raw: *mut Pointer| unsafe { (self.functions.cublasLtCreate)(raw) };
        self.handle = Some(self.create("cublasLtCreate", self.functions.cublasLtDestroy, make)?);
        Ok(())
    }

    /// The version number.
    pub fn version(&self) -> usize {
        // SAFETY: takes nothing.
        unsafe { (self.functions.cublasLtGetVersion)() }
    }

    fn check(&self, call: &str, code: i32) -> Result<(), Error> {
        // SAFETY: any number may be passed; the result is a constant string.
        check(CUBLASLT.name, call, code, || unsafe { text_at((self.functions.cublasLtGetStatusString)(code)) })
    }

    fn create(
        &self,
        call: &str,
        destroy: unsafe extern "C" fn(Pointer) -> i32,
        make: impl FnOnce(*mut Pointer) -> i32,
    ) -> Result<Handle, Error> {
        let mut raw = std::ptr::null_mut();
        self.check(call, make(&raw mut raw))?;
        Ok(Handle { raw, destroy })
    }

    /// The product of a linear layer, `y[m,n] = x[m,k] * w[n,k]^T`, all row-major, with at most `candidates` algorithms
    /// and `workspace_bytes` of memory.
    ///
    /// # Errors
    /// A call fails, or the library has no algorithm.
    pub fn product(
        &self,
        precision: Precision,
        [m, n, k]: [usize; 3],
        workspace_bytes: usize,
        candidates: usize,
    ) -> Result<Product<'_>, Error> {
        let Some(handle) = &self.handle else { return Err(Error::refused("product", "cuBLASLt was not started")) };
        let call = &self.functions;
        let (element, compute) = match precision {
            Precision::Bf16 => (R_16BF, COMPUTE_32F),
            Precision::Tf32 => (R_32F, COMPUTE_32F_FAST_TF32),
        };
        // SAFETY: (of the calls below): handles were created above and are alive; pointers are to live values of the
        // types and sizes given.
        let operation = self.create("cublasLtMatmulDescCreate", call.cublasLtMatmulDescDestroy, |raw| {
            // SAFETY: as above.
            unsafe { (call.cublasLtMatmulDescCreate)(raw, compute, R_32F) }
        })?;
        let transposed = OP_T;
        // SAFETY: as above.
        let code = unsafe {
            (call.cublasLtMatmulDescSetAttribute)(
                operation.raw,
                DESC_TRANSA,
                (&raw const transposed).cast(),
                size_of::<i32>(),
            )
        };
        self.check("cublasLtMatmulDescSetAttribute", code)?;
        // The library is column-major: a row-major matrix is its transpose, and y^T[n,m] = w[n,k] * x^T[k,m].
        let layout = |rows: usize, columns: usize| {
            self.create("cublasLtMatrixLayoutCreate", call.cublasLtMatrixLayoutDestroy, |raw| {
                // SAFETY: as above.
                unsafe { (call.cublasLtMatrixLayoutCreate)(raw, element, rows as u64, columns as u64, rows as i64) }
            })
        };
        let layouts = [layout(k, n)?, layout(k, m)?, layout(n, m)?];
        let preference =
            self.create("cublasLtMatmulPreferenceCreate", call.cublasLtMatmulPreferenceDestroy, |raw| {
                // SAFETY: as above.
                unsafe { (call.cublasLtMatmulPreferenceCreate)(raw) }
            })?;
        // SAFETY: as above.
        let code = unsafe {
            (call.cublasLtMatmulPreferenceSetAttribute)(
                preference.raw,
                PREF_MAX_WORKSPACE_BYTES,
                (&raw const workspace_bytes).cast(),
                size_of::<usize>(),
            )
        };
        self.check("cublasLtMatmulPreferenceSetAttribute", code)?;
        let empty = Heuristic { algorithm: [0; 8], workspace_bytes: 0, state: 0, waves: 0.0, reserved: [0; 4] };
        let (mut found, mut count) = (vec![empty; candidates], 0);
        let [w, x, y] = layouts.each_ref().map(|layout| layout.raw);
        // SAFETY: as above; the library writes at most as many results as requested.
        let code = unsafe {
            (call.cublasLtMatmulAlgoGetHeuristic)(
                handle.raw,
                operation.raw,
                w,
                x,
                y,
                y,
                preference.raw,
                candidates as i32,
                found.as_mut_ptr(),
                &raw mut count,
            )
        };
        self.check("cublasLtMatmulAlgoGetHeuristic", code)?;
        found.truncate(usize::try_from(count).unwrap_or(0));
        found.retain(|heuristic| heuristic.state == 0 && heuristic.workspace_bytes <= workspace_bytes);
        if found.is_empty() {
            return Err(Error::refused("cublasLtMatmulAlgoGetHeuristic", format!("no algorithm for {m} x {n} x {k}")));
        }
        let bytes = [m * k, n * k, m * n].map(|elements| elements * precision.bytes());
        Ok(Product { cublaslt: self, handle, operation, layouts, found, bytes })
    }
}

/// A planned product of one shape.
pub struct Product<'a> {
    cublaslt: &'a CublasLt,
    handle: &'a Handle,
    operation: Handle,
    /// Of `w`, `x` and `y`.
    layouts: [Handle; 3],
    found: Vec<Heuristic>,
    /// Of `x`, `w` and `y`.
    bytes: [usize; 3],
}

impl Product<'_> {
    pub fn algorithms(&self) -> usize {
        self.found.len()
    }

    /// Launches the product with one of the algorithms.
    ///
    /// # Errors
    /// A buffer is too small, or the call fails.
    pub fn run(&self, algorithm: usize, [x, w, y, workspace]: [&Buffer<'_>; 4]) -> Result<(), Error> {
        let heuristic = &self.found[algorithm];
        let needed = [self.bytes[0], self.bytes[1], self.bytes[2], heuristic.workspace_bytes];
        let given = [x, w, y, workspace].map(Buffer::bytes);
        if needed.iter().zip(given).any(|(needed, given)| *needed > given) {
            return Err(Error::refused("product", format!("buffers of {given:?} bytes, expected at least {needed:?}")));
        }
        let (one, zero) = (1.0f32, 0.0f32);
        let [w_layout, x_layout, y_layout] = self.layouts.each_ref().map(|layout| layout.raw);
        // SAFETY: all handles live; the buffers are as large as their layouts say, as just checked; `one` and `zero`
        // are read before the call returns; stream 0 is the default one, and freeing a buffer waits for it.
        let code = unsafe {
            (self.cublaslt.functions.cublasLtMatmul)(
                self.handle.raw,
                self.operation.raw,
                &raw const one,
                w.pointer(),
                w_layout,
                x.pointer(),
                x_layout,
                &raw const zero,
                y.pointer(),
                y_layout,
                y.pointer(),
                y_layout,
                &raw const heuristic.algorithm,
                workspace.pointer(),
                heuristic.workspace_bytes,
                std::ptr::null_mut(),
            )
        };
        self.cublaslt.check("cublasLtMatmul", code)
    }
}
