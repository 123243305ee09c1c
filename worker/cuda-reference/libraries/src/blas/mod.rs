//! `libcublasLt.so.13`: descriptors, a heuristic, matrix products. Rejects what the documentation
//! rejects, with the reason on standard error.

mod descriptors;
mod matmul;

use crate::finding::explain;
use std::ffi::c_char;

/// `cublasStatus_t`.
const NOT_INITIALIZED: i32 = 1;
const INVALID_VALUE: i32 = 7;
const EXECUTION_FAILED: i32 = 13;
const NOT_SUPPORTED: i32 = 15;

type CallResult<T> = Result<T, i32>;

fn done(answer: CallResult<()>) -> i32 {
    answer.err().unwrap_or(0)
}

/// Logs the reason and returns the error.
fn refused<T>(call: &str, status: i32, text: &str) -> CallResult<T> {
    explain(call, text);
    Err(status)
}

/// The version in NVIDIA's wheel for CUDA 13.0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtGetVersion() -> usize {
    130_100
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtGetStatusString(status: i32) -> *const c_char {
    let text = match status {
        0 => c"CUBLAS_STATUS_SUCCESS",
        NOT_INITIALIZED => c"CUBLAS_STATUS_NOT_INITIALIZED",
        INVALID_VALUE => c"CUBLAS_STATUS_INVALID_VALUE",
        EXECUTION_FAILED => c"CUBLAS_STATUS_EXECUTION_FAILED",
        NOT_SUPPORTED => c"CUBLAS_STATUS_NOT_SUPPORTED",
        _ => c"CUBLAS_STATUS unknown",
    };
    text.as_ptr()
}
