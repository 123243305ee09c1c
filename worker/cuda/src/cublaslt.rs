//! cuBLASLt: GEMM with a choice of algorithms.
#![allow(unsafe_code)]

mod product;

use crate::driver::{Span, Stream};
use crate::error::Error;
use crate::find::CUBLASLT;
use crate::kernels::Memory;
use crate::kernels::activation::Function;
use crate::kernels::fp8::Fp8;
use crate::library::{Handle, Library, Pointer, check, functions, text_at};
use std::ffi::{c_char, c_void};
use std::sync::Arc;

pub use product::{Arithmetic, Epilogue, Format, KEPT_PITCH, Matrix, Product};

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
    cublasLtMatmulAlgoCheck(
        Pointer, Pointer, Pointer, Pointer, Pointer, Pointer, *const Algorithm, *mut Heuristic,
    ) -> i32;
    cublasLtMatmul(
        Pointer, Pointer, *const f32, Pointer, Pointer, Pointer, Pointer, *const f32, Pointer, Pointer, Pointer,
        Pointer, *const Algorithm, Pointer, usize, Pointer,
    ) -> i32;
});

const R_32F: i32 = 0;
const R_16F: i32 = 2;
const R_16BF: i32 = 14;
const R_8F_E4M3: i32 = 28;
const R_8F_E5M2: i32 = 29;
const COMPUTE_32F: i32 = 68;
const COMPUTE_32F_FAST_TF32: i32 = 77;
const DESC_TRANSA: i32 = 3;
const DESC_TRANSB: i32 = 4;
const DESC_EPILOGUE: i32 = 7;
const DESC_BIAS_POINTER: i32 = 8;
const DESC_EPILOGUE_AUX_POINTER: i32 = 11;
const DESC_EPILOGUE_AUX_LD: i32 = 12;
const DESC_A_SCALE_POINTER: i32 = 17;
const DESC_B_SCALE_POINTER: i32 = 18;
const DESC_FAST_ACCUM: i32 = 25;
const EPILOGUE_BIAS: i32 = 4;
const EPILOGUE_RELU_BIAS: i32 = 6;
const EPILOGUE_GELU_AUX_BIAS: i32 = 164;
const OP_T: i32 = 1;
const PREF_MAX_WORKSPACE_BYTES: i32 = 1;
/// For A, B, C and D. The library assumes an alignment of 256 if unset.
const PREF_MIN_ALIGNMENTS: [i32; 4] = [5, 6, 7, 8];

/// `cublasLtMatmulAlgo_t`: an opaque algorithm description, valid only for this library version.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Algorithm(pub [u64; 8]);

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Heuristic {
    algorithm: Algorithm,
    workspace_bytes: usize,
    state: i32,
    waves: f32,
    reserved: [i32; 4],
}

impl Heuristic {
    const EMPTY: Heuristic =
        Heuristic { algorithm: Algorithm([0; 8]), workspace_bytes: 0, state: 0, waves: 0.0, reserved: [0; 4] };
}

/// cuBLASLt handle for one device; clones share it.
#[derive(Clone)]
pub struct CublasLt {
    inner: Arc<Inner>,
}

struct Inner {
    functions: Functions,
    handle: Option<Handle>,
}

// SAFETY: according to the library's documentation, several threads can use the handle
// concurrently.
unsafe impl Sync for Inner {}

impl CublasLt {
    /// Resolves the functions. Only [`CublasLt::start`] needs a GPU.
    ///
    /// # Errors
    /// A function is missing.
    pub fn new(library: &Library) -> Result<CublasLt, Error> {
        let inner = Inner { functions: Functions::load(library)?, handle: None };
        Ok(CublasLt { inner: Arc::new(inner) })
    }

    /// Initialises the library on the device of the current context.
    ///
    /// # Errors
    /// A function is missing, or the call fails.
    pub fn start(library: &Library) -> Result<CublasLt, Error> {
        let mut inner = Inner { functions: Functions::load(library)?, handle: None };
        // SAFETY: the pointer is to a live handle.
        let make = |raw: *mut Pointer| unsafe { (inner.functions.cublasLtCreate)(raw) };
        inner.handle = Some(inner.create("cublasLtCreate", inner.functions.cublasLtDestroy, make)?);
        Ok(CublasLt { inner: Arc::new(inner) })
    }

    /// The version number.
    pub fn version(&self) -> usize {
        // SAFETY: no arguments.
        unsafe { (self.inner.functions.cublasLtGetVersion)() }
    }

    /// Selects at most `candidates` algorithms for a GEMM, best first, each with at most
    /// `workspace_bytes` of workspace.
    ///
    /// # Errors
    /// The matrices do not match, a call fails, or the library has no algorithm.
    pub fn plan(&self, product: Product, workspace_bytes: usize, candidates: usize) -> Result<Planned, Error> {
        product.shape()?;
        let descriptors = Descriptors::new(&self.inner, &product)?;
        let found = descriptors.heuristic(&self.inner, &product, workspace_bytes, candidates)?;
        if found.is_empty() {
            let text = format!("no algorithm for {}", product.kind());
            return Err(Error::refused("cublasLtMatmulAlgoGetHeuristic", text));
        }
        Ok(Planned { cublaslt: self.clone(), product, descriptors, found })
    }

    /// Plans a GEMM with an algorithm that was selected for the same [`Product::kind`].
    ///
    /// # Errors
    /// The matrices do not match, or the library does not support the algorithm for them.
    pub fn plan_by(&self, product: Product, algorithm: Algorithm) -> Result<Planned, Error> {
        product.shape()?;
        let descriptors = Descriptors::new(&self.inner, &product)?;
        let found = vec![descriptors.check(&self.inner, &algorithm)?];
        Ok(Planned { cublaslt: self.clone(), product, descriptors, found })
    }
}

impl Inner {
    fn check(&self, call: &str, code: i32) -> Result<(), Error> {
        // SAFETY: any code is valid; the result is a constant string.
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

    fn handle(&self) -> Result<Pointer, Error> {
        let handle = self.handle.as_ref().ok_or_else(|| Error::refused("product", "cuBLASLt was not started"))?;
        Ok(handle.raw)
    }

    fn describe<T>(&self, operation: &Handle, attribute: i32, value: T) -> Result<(), Error> {
        // SAFETY: the descriptor is alive; the pointer is to a live value of the given size.
        let code = unsafe {
            (self.functions.cublasLtMatmulDescSetAttribute)(
                operation.raw,
                attribute,
                (&raw const value).cast(),
                size_of::<T>(),
            )
        };
        self.check("cublasLtMatmulDescSetAttribute", code)
    }

    fn prefer<T>(&self, preference: &Handle, attribute: i32, value: T) -> Result<(), Error> {
        // SAFETY: the preference is alive; the pointer is to a live value of the given size.
        let code = unsafe {
            (self.functions.cublasLtMatmulPreferenceSetAttribute)(
                preference.raw,
                attribute,
                (&raw const value).cast(),
                size_of::<T>(),
            )
        };
        self.check("cublasLtMatmulPreferenceSetAttribute", code)
    }

    fn layout(&self, matrix: &Matrix) -> Result<Handle, Error> {
        let call = &self.functions;
        let element = match matrix.format {
            Format::F32 => R_32F,
            Format::Bf16 => R_16BF,
            Format::F16 => R_16F,
            Format::Fp8(Fp8::E4m3) => R_8F_E4M3,
            Format::Fp8(Fp8::E5m2) => R_8F_E5M2,
        };
        // The library is column-major: a row-major matrix is its transpose.
        let (rows, columns, pitch) = (matrix.columns as u64, matrix.rows as u64, matrix.pitch as i64);
        self.create("cublasLtMatrixLayoutCreate", call.cublasLtMatrixLayoutDestroy, |raw| {
            // SAFETY: the pointer is to a live handle.
            unsafe { (call.cublasLtMatrixLayoutCreate)(raw, element, rows, columns, pitch) }
        })
    }
}

/// The library's descriptors of a GEMM: `result^T = right^T left^T`, so A is `right` and B is
/// `left`.
struct Descriptors {
    operation: Handle,
    a: Handle,
    b: Handle,
    c: Handle,
    d: Handle,
}

impl Descriptors {
    fn new(cublaslt: &Inner, product: &Product) -> Result<Descriptors, Error> {
        let Product { left, right, result, arithmetic, .. } = product;
        let call = &cublaslt.functions;
        let compute = match (left.format, arithmetic) {
            (Format::F32, Arithmetic::Tf32) => COMPUTE_32F_FAST_TF32,
            _ => COMPUTE_32F,
        };
        let operation = cublaslt.create("cublasLtMatmulDescCreate", call.cublasLtMatmulDescDestroy, |raw| {
            // SAFETY: the pointer is to a live handle.
            unsafe { (call.cublasLtMatmulDescCreate)(raw, compute, R_32F) }
        })?;
        for (matrix, attribute) in [(right, DESC_TRANSA), (left, DESC_TRANSB)] {
            if matrix.is_transposed {
                cublaslt.describe(&operation, attribute, OP_T)?;
            }
        }
        if let Some([left, right]) = product.scales {
            for (scale, attribute) in [(right, DESC_A_SCALE_POINTER), (left, DESC_B_SCALE_POINTER)] {
                cublaslt.describe(&operation, attribute, scale.pointer())?;
            }
        }
        if product.has_fast_sums() {
            cublaslt.describe(&operation, DESC_FAST_ACCUM, 1i8)?;
        }
        if let Some(Epilogue { bias, function, kept }) = product.epilogue {
            let kind = match function {
                Function::Relu => EPILOGUE_RELU_BIAS,
                Function::Gelu => EPILOGUE_GELU_AUX_BIAS,
                Function::Identity | Function::Tanh => EPILOGUE_BIAS,
            };
            cublaslt.describe(&operation, DESC_EPILOGUE, kind)?;
            cublaslt.describe(&operation, DESC_BIAS_POINTER, bias.pointer())?;
            if let Some(kept) = kept {
                cublaslt.describe(&operation, DESC_EPILOGUE_AUX_POINTER, kept.memory.pointer())?;
                cublaslt.describe(&operation, DESC_EPILOGUE_AUX_LD, kept.pitch as i64)?;
            }
        }
        let [a, b, c, d] = [right, left, product.addend(), result].map(|matrix| cublaslt.layout(matrix));
        Ok(Descriptors { operation, a: a?, b: b?, c: c?, d: d? })
    }

    fn heuristic(
        &self,
        cublaslt: &Inner,
        product: &Product,
        workspace_bytes: usize,
        candidates: usize,
    ) -> Result<Vec<Heuristic>, Error> {
        let call = &cublaslt.functions;
        let preference =
            cublaslt.create("cublasLtMatmulPreferenceCreate", call.cublasLtMatmulPreferenceDestroy, |raw| {
                // SAFETY: the pointer is to a live handle.
                unsafe { (call.cublasLtMatmulPreferenceCreate)(raw) }
            })?;
        cublaslt.prefer(&preference, PREF_MAX_WORKSPACE_BYTES, workspace_bytes)?;
        // Algorithms depend on address alignment, and parameters can start at any offset.
        let matrices = [&product.right, &product.left, product.addend(), &product.result];
        for (attribute, matrix) in PREF_MIN_ALIGNMENTS.into_iter().zip(matrices) {
            cublaslt.prefer(&preference, attribute, matrix.memory.alignment())?;
        }
        let (mut found, mut count) = (vec![Heuristic::EMPTY; candidates], 0);
        let handle = cublaslt.handle()?;
        // SAFETY: all handles are alive; the library writes at most as many results as requested.
        let code = unsafe {
            (call.cublasLtMatmulAlgoGetHeuristic)(
                handle,
                self.operation.raw,
                self.a.raw,
                self.b.raw,
                self.c.raw,
                self.d.raw,
                preference.raw,
                candidates as i32,
                found.as_mut_ptr(),
                &raw mut count,
            )
        };
        cublaslt.check("cublasLtMatmulAlgoGetHeuristic", code)?;
        found.truncate(usize::try_from(count).unwrap_or(0));
        found.retain(|heuristic| heuristic.state == 0 && heuristic.workspace_bytes <= workspace_bytes);
        Ok(found)
    }

    /// Checks an algorithm; returns its workspace and state.
    fn check(&self, cublaslt: &Inner, algorithm: &Algorithm) -> Result<Heuristic, Error> {
        let (handle, mut result) = (cublaslt.handle()?, Heuristic::EMPTY);
        // SAFETY: all handles are alive; the algorithm is read, and the result written, before the
        // call returns.
        let code = unsafe {
            (cublaslt.functions.cublasLtMatmulAlgoCheck)(
                handle,
                self.operation.raw,
                self.a.raw,
                self.b.raw,
                self.c.raw,
                self.d.raw,
                algorithm,
                &raw mut result,
            )
        };
        cublaslt.check("cublasLtMatmulAlgoCheck", code)?;
        // According to the documentation, only the heuristic fills in the algorithm.
        Ok(Heuristic { algorithm: *algorithm, ..result })
    }
}

/// A GEMM with its algorithms.
pub struct Planned {
    cublaslt: CublasLt,
    product: Product,
    descriptors: Descriptors,
    found: Vec<Heuristic>,
}

impl Planned {
    pub fn product(&self) -> &Product {
        &self.product
    }

    pub fn algorithms(&self) -> usize {
        self.found.len()
    }

    /// One of the algorithms.
    pub fn algorithm(&self, index: usize) -> Algorithm {
        self.found[index].algorithm
    }

    /// Workspace bytes of an algorithm.
    pub fn workspace_bytes(&self, algorithm: usize) -> usize {
        self.found[algorithm].workspace_bytes
    }

    /// Queues the GEMM with one of the algorithms. No other stream can use `workspace` in the
    /// meantime.
    ///
    /// # Errors
    /// The workspace is too small, a buffer has been freed, or the call fails.
    pub fn run(&self, algorithm: usize, workspace: Span, stream: &Stream) -> Result<(), Error> {
        let Planned { cublaslt, product, descriptors, found } = self;
        let Product { left, right, result, addend, .. } = product;
        let heuristic = &found[algorithm];
        if workspace.bytes() < heuristic.workspace_bytes {
            let (given, needed) = (workspace.bytes(), heuristic.workspace_bytes);
            return Err(Error::refused("product", format!("a workspace of {given} bytes, expected at least {needed}")));
        }
        let spans = [left.memory, right.memory, result.memory, product.addend().memory, workspace];
        let of_epilogue =
            product.epilogue.iter().flat_map(|of| [Some(of.bias), of.kept.map(|kept| kept.memory)]).flatten();
        stream.uses("product", spans.into_iter().chain(product.scales.into_iter().flatten()).chain(of_epilogue))?;
        stream.context().make_current()?;
        let (alpha, beta) = (1.0f32, if addend.is_some() { 1.0f32 } else { 0.0 });
        let handle = cublaslt.inner.handle()?;
        // SAFETY: all handles are alive; the matrices are within live buffers, as checked; `alpha`
        // and `beta` are read before the call returns; freeing a buffer waits for the GEMM.
        let code = unsafe {
            (cublaslt.inner.functions.cublasLtMatmul)(
                handle,
                descriptors.operation.raw,
                &raw const alpha,
                right.memory.pointer(),
                descriptors.a.raw,
                left.memory.pointer(),
                descriptors.b.raw,
                &raw const beta,
                product.addend().memory.pointer(),
                descriptors.c.raw,
                result.memory.pointer(),
                descriptors.d.raw,
                &raw const heuristic.algorithm,
                workspace.pointer(),
                heuristic.workspace_bytes,
                stream.raw(),
            )
        };
        cublaslt.inner.check("cublasLtMatmul", code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::header::assert_library_header;
    use std::mem::offset_of;

    #[test]
    #[ignore = "needs NVIDIA's libraries: cargo xtask test --gpu-libraries"]
    fn constants_layouts_and_names_match_the_header() {
        let [a, b, c, d] = PREF_MIN_ALIGNMENTS;
        let numbers = [
            ("CUDA_R_32F", R_32F),
            ("CUDA_R_16F", R_16F),
            ("CUDA_R_16BF", R_16BF),
            ("CUDA_R_8F_E4M3", R_8F_E4M3),
            ("CUDA_R_8F_E5M2", R_8F_E5M2),
            ("CUBLAS_COMPUTE_32F", COMPUTE_32F),
            ("CUBLAS_COMPUTE_32F_FAST_TF32", COMPUTE_32F_FAST_TF32),
            ("CUBLASLT_MATMUL_DESC_TRANSA", DESC_TRANSA),
            ("CUBLASLT_MATMUL_DESC_TRANSB", DESC_TRANSB),
            ("CUBLASLT_MATMUL_DESC_EPILOGUE", DESC_EPILOGUE),
            ("CUBLASLT_MATMUL_DESC_BIAS_POINTER", DESC_BIAS_POINTER),
            ("CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER", DESC_EPILOGUE_AUX_POINTER),
            ("CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD", DESC_EPILOGUE_AUX_LD),
            ("CUBLASLT_EPILOGUE_BIAS", EPILOGUE_BIAS),
            ("CUBLASLT_EPILOGUE_RELU_BIAS", EPILOGUE_RELU_BIAS),
            ("CUBLASLT_EPILOGUE_GELU_AUX_BIAS", EPILOGUE_GELU_AUX_BIAS),
            ("sizeof(cublasLtEpilogue_t)", size_of::<i32>() as i32),
            ("CUBLASLT_MATMUL_DESC_A_SCALE_POINTER", DESC_A_SCALE_POINTER),
            ("CUBLASLT_MATMUL_DESC_B_SCALE_POINTER", DESC_B_SCALE_POINTER),
            ("CUBLASLT_MATMUL_DESC_FAST_ACCUM", DESC_FAST_ACCUM),
            ("CUBLAS_OP_T", OP_T),
            ("CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES", PREF_MAX_WORKSPACE_BYTES),
            ("CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES", a),
            ("CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES", b),
            ("CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES", c),
            ("CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES", d),
            ("sizeof(cublasLtMatmulAlgo_t)", size_of::<Algorithm>() as i32),
            ("sizeof(cublasLtMatmulHeuristicResult_t)", size_of::<Heuristic>() as i32),
            ("offsetof(cublasLtMatmulHeuristicResult_t, algo)", offset_of!(Heuristic, algorithm) as i32),
            ("offsetof(cublasLtMatmulHeuristicResult_t, workspaceSize)", offset_of!(Heuristic, workspace_bytes) as i32),
            ("offsetof(cublasLtMatmulHeuristicResult_t, state)", offset_of!(Heuristic, state) as i32),
            ("offsetof(cublasLtMatmulHeuristicResult_t, wavesCount)", offset_of!(Heuristic, waves) as i32),
        ];
        assert_library_header("cublasLt.h", numbers, Functions::NAMES);
    }
}
