//! `libcudnn.so.9`: convolutions as single-operation graphs, and graphs of matrix products,
//! reductions and elementwise operations. Rejects what the real library rejects, with the reason on
//! standard error.
//!
//! ```text
//! tensors, window ── operation ── graph ── heuristic ── configuration of an engine ── plan
//!                                             handle, or device ────────────────────────┘
//!                                             handle, addresses ── execute ── plan
//! ```

mod attributes;
mod descriptors;
mod engines;
mod execute;
mod flows;
mod graphs;
mod plans;

use crate::abi::{self, Pointer};
use crate::fault;
use crate::finding::explain;
use std::cell::RefCell;
use std::ffi::{CString, c_char};

/// `cudnnStatus_t`.
const NOT_INITIALIZED: i32 = 1001;
const BAD_PARAM: i32 = 2000;
const NULL_POINTER: i32 = 2002;
const MISALIGNED_POINTER: i32 = 2003;
const NOT_FINALIZED: i32 = 2004;
const OUT_OF_BOUND: i32 = 2005;
const SHAPE_MISMATCH: i32 = 2008;
const DUPLICATED_ENTRIES: i32 = 2009;
const ATTRIBUTE_TYPE: i32 = 2010;
const DESCRIPTOR_TYPE: i32 = 2012;
const NOT_SUPPORTED: i32 = 3000;
const EXECUTION_FAILED: i32 = 5000;

/// A version with everything that the engine needs.
const VERSION: u64 = 91_200;

type CallResult<T> = Result<T, i32>;

thread_local! {
    /// Message of the last failed call.
    static LAST: RefCell<String> = const { RefCell::new(String::new()) };
}

fn done(answer: CallResult<()>) -> i32 {
    answer.err().unwrap_or(0)
}

/// Logs the reason and returns the error.
fn refused<T>(call: &str, status: i32, text: &str) -> CallResult<T> {
    explain(call, text);
    LAST.set(text.to_owned());
    Err(status)
}

/// Not logged: callers probe for support and have a fallback.
fn unsupported<T>(text: &str) -> CallResult<T> {
    LAST.set(text.to_owned());
    Err(NOT_SUPPORTED)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnGetVersion() -> usize {
    let version = fault::requested().ok().and_then(|faults| faults.cudnn_version).unwrap_or(VERSION);
    usize::try_from(version).unwrap_or(0)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnGetCudartVersion() -> usize {
    13_000
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnGetErrorString(status: i32) -> *const c_char {
    let text = match status {
        0 => c"CUDNN_STATUS_SUCCESS",
        NOT_INITIALIZED => c"CUDNN_STATUS_NOT_INITIALIZED",
        BAD_PARAM => c"CUDNN_STATUS_BAD_PARAM",
        NULL_POINTER => c"CUDNN_STATUS_BAD_PARAM_NULL_POINTER",
        MISALIGNED_POINTER => c"CUDNN_STATUS_BAD_PARAM_MISALIGNED_POINTER",
        NOT_FINALIZED => c"CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED",
        OUT_OF_BOUND => c"CUDNN_STATUS_BAD_PARAM_OUT_OF_BOUND",
        SHAPE_MISMATCH => c"CUDNN_STATUS_BAD_PARAM_SHAPE_MISMATCH",
        DUPLICATED_ENTRIES => c"CUDNN_STATUS_BAD_PARAM_DUPLICATED_ENTRIES",
        ATTRIBUTE_TYPE => c"CUDNN_STATUS_BAD_PARAM_ATTRIBUTE_TYPE",
        DESCRIPTOR_TYPE => c"CUDNN_STATUS_BAD_PARAM_DESCRIPTOR_TYPE",
        NOT_SUPPORTED => c"CUDNN_STATUS_NOT_SUPPORTED",
        EXECUTION_FAILED => c"CUDNN_STATUS_EXECUTION_FAILED",
        _ => c"CUDNN_STATUS unknown",
    };
    text.as_ptr()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnGetLastErrorString(text: *mut c_char, most: usize) {
    let last = CString::new(LAST.take()).unwrap_or_default();
    let bytes = last.as_bytes_with_nul();
    if !text.is_null() && most > 0 {
        let length = bytes.len().min(most);
        // SAFETY: the header's contract makes that many bytes writable.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr().cast(), text, length);
            text.add(length - 1).write(0);
        }
    }
}

/// Target of a handle. The tag rejects other pointers.
#[repr(C)]
struct Handle {
    tag: u64,
    stream: Pointer,
}

const HANDLE: u64 = 0x7377_646e_6861_6e64;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnCreate(handle: *mut Pointer) -> i32 {
    const CALL: &str = "cudnnCreate";
    if handle.is_null() {
        return done(refused(CALL, NULL_POINTER, "no handle"));
    }
    done(match abi::with(|_| Ok(())) {
        Ok(()) => {
            let made = Box::new(Handle { tag: HANDLE, stream: std::ptr::null_mut() });
            // SAFETY: the header's contract makes it writable.
            unsafe { handle.write(Box::into_raw(made).cast()) };
            Ok(())
        }
        Err(_) => refused(CALL, NOT_INITIALIZED, "no context is current, or its device has failed"),
    })
}

/// Resolves a handle of the program.
///
/// # Safety
/// It must be null or have been created here.
unsafe fn handle<'a>(call: &str, raw: Pointer) -> CallResult<&'a mut Handle> {
    // SAFETY: upheld by the caller. Everything created here starts with a tag.
    let tag = unsafe { raw.cast::<u64>().as_ref() };
    if tag != Some(&HANDLE) {
        return refused(call, BAD_PARAM, "no handle, or one that was destroyed");
    }
    // SAFETY: the tag identifies the type.
    Ok(unsafe { &mut *raw.cast::<Handle>() })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnDestroy(raw: Pointer) -> i32 {
    // SAFETY: per the header's contract.
    done(unsafe { handle("cudnnDestroy", raw) }.map(|handle| {
        handle.tag = 0;
        // SAFETY: created by `cudnnCreate`, as the tag shows.
        drop(unsafe { Box::from_raw(raw.cast::<Handle>()) });
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnSetStream(raw: Pointer, stream: Pointer) -> i32 {
    // SAFETY: per the header's contract.
    done(unsafe { handle("cudnnSetStream", raw) }.map(|handle| handle.stream = stream))
}

#[cfg(test)]
mod tests;
