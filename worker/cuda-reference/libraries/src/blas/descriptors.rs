//! Handles and descriptors. A tag identifies each kind, so that one cannot be mistaken for another.

use super::{CallResult, INVALID_VALUE, NOT_INITIALIZED, NOT_SUPPORTED, done, refused};
use crate::abi::{self, Pointer};
use crate::gpu::product::Layout;
use crate::numbers::Format;
use std::ffi::c_void;
use switchyard_cuda_reference::fp8::{E4M3, E5M2};

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
const PREF_MAX_WORKSPACE_BYTES: i32 = 1;
const PREF_MIN_ALIGNMENT_A_BYTES: i32 = 5;
const PREF_MIN_ALIGNMENT_D_BYTES: i32 = 8;

/// A matrix product description (`cublasLtMatmulDesc_t`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Operation {
    pub(super) is_tf32: bool,
    pub(super) transposed: [bool; 2],
    pub(super) has_fast_sums: bool,
    /// Addresses of the scales of A and B; 0 if unset.
    pub(super) scales: [u64; 2],
    pub(super) epilogue: EpilogueAttributes,
}

/// EpilogueAttributes attributes of a matrix product.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(super) struct EpilogueAttributes {
    /// `cublasLtEpilogue_t`; 0 or 1: none.
    pub(super) kind: i32,
    /// Addresses; 0 if unset.
    pub(super) bias: u64,
    pub(super) kept: u64,
    /// Column stride of the auxiliary output.
    pub(super) kept_pitch: i64,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Preference {
    pub(super) workspace_bytes: u64,
    /// Alignments of the addresses of A, B, C and D.
    pub(super) alignments: [u32; 4],
}

/// Target of a handle.
#[repr(C)]
struct Tagged<T> {
    tag: u64,
    value: T,
}

pub(super) trait Kind: Copy {
    const TAG: u64;
}

impl Kind for () {
    const TAG: u64 = 0x7377_6c74_6861_6e64;
}

impl Kind for Operation {
    const TAG: u64 = 0x7377_6c74_6f70_6572;
}

impl Kind for Layout {
    const TAG: u64 = 0x7377_6c74_6c61_796f;
}

impl Kind for Preference {
    const TAG: u64 = 0x7377_6c74_7072_6566;
}

fn create<T: Kind>(to: *mut Pointer, value: T) -> CallResult<()> {
    if to.is_null() {
        return Err(INVALID_VALUE);
    }
    let made = Box::into_raw(Box::new(Tagged { tag: T::TAG, value }));
    // SAFETY: the header's contract makes it writable.
    unsafe { to.write(made.cast()) };
    Ok(())
}

/// Resolves a handle of the program.
///
/// # Safety
/// It must be null or have been created here.
pub(super) unsafe fn get<'a, T: Kind>(call: &str, handle: Pointer) -> CallResult<&'a mut T> {
    // SAFETY: upheld by the caller. Everything created here starts with a tag.
    let tag = unsafe { handle.cast::<u64>().as_ref() };
    if tag != Some(&T::TAG) {
        return refused(call, INVALID_VALUE, "a handle of another kind, or of what was destroyed");
    }
    // SAFETY: the tag identifies the type.
    Ok(unsafe { &mut (*handle.cast::<Tagged<T>>()).value })
}

/// # Safety
/// It must be null or have been created here.
unsafe fn destroy<T: Kind>(call: &str, handle: Pointer) -> i32 {
    // SAFETY: upheld by the caller.
    done(unsafe { get::<T>(call, handle) }.map(|_| {
        // SAFETY: created by `create`, with the type that the tag identifies.
        let mut tagged = unsafe { Box::from_raw(handle.cast::<Tagged<T>>()) };
        tagged.tag = 0;
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtCreate(handle: *mut Pointer) -> i32 {
    done(match abi::with(|_| Ok(())) {
        Ok(()) => create(handle, ()),
        Err(_) => refused("cublasLtCreate", NOT_INITIALIZED, "no context is current, or its device has failed"),
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtDestroy(handle: Pointer) -> i32 {
    // SAFETY: per the header's contract.
    unsafe { destroy::<()>("cublasLtDestroy", handle) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulDescCreate(handle: *mut Pointer, compute: i32, scale: i32) -> i32 {
    let known = [COMPUTE_32F, COMPUTE_32F_FAST_TF32].contains(&compute) && scale == R_32F;
    done(if known {
        create(
            handle,
            Operation {
                is_tf32: compute == COMPUTE_32F_FAST_TF32,
                transposed: [false; 2],
                has_fast_sums: false,
                scales: [0; 2],
                epilogue: EpilogueAttributes::default(),
            },
        )
    } else {
        refused("cublasLtMatmulDescCreate", NOT_SUPPORTED, &format!("compute type {compute}, scale type {scale}"))
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulDescDestroy(handle: Pointer) -> i32 {
    // SAFETY: per the header's contract.
    unsafe { destroy::<Operation>("cublasLtMatmulDescDestroy", handle) }
}

/// Reads an attribute, checking its size.
///
/// # Safety
/// `bytes` bytes at `value` must be readable.
unsafe fn attribute<T: Copy>(call: &str, value: *const c_void, bytes: usize) -> CallResult<T> {
    if value.is_null() || bytes != size_of::<T>() {
        return refused(call, INVALID_VALUE, &format!("{bytes} bytes, expected {}", size_of::<T>()));
    }
    // SAFETY: as the caller promises; the size was just checked.
    Ok(unsafe { value.cast::<T>().read_unaligned() })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulDescSetAttribute(
    handle: Pointer,
    name: i32,
    value: *const c_void,
    bytes: usize,
) -> i32 {
    const CALL: &str = "cublasLtMatmulDescSetAttribute";
    // SAFETY: per the header's contract.
    let set = || unsafe {
        let operation = get::<Operation>(CALL, handle)?;
        match name {
            DESC_TRANSA | DESC_TRANSB => {
                operation.transposed[(name - DESC_TRANSA) as usize] = match attribute::<i32>(CALL, value, bytes)? {
                    0 => false,
                    1 => true,
                    other => return refused(CALL, INVALID_VALUE, &format!("operation {other}")),
                };
            }
            DESC_A_SCALE_POINTER | DESC_B_SCALE_POINTER => {
                operation.scales[(name - DESC_A_SCALE_POINTER) as usize] = attribute(CALL, value, bytes)?;
            }
            DESC_EPILOGUE => operation.epilogue.kind = attribute(CALL, value, bytes)?,
            DESC_BIAS_POINTER => operation.epilogue.bias = attribute(CALL, value, bytes)?,
            DESC_EPILOGUE_AUX_POINTER => operation.epilogue.kept = attribute(CALL, value, bytes)?,
            DESC_EPILOGUE_AUX_LD => operation.epilogue.kept_pitch = attribute(CALL, value, bytes)?,
            DESC_FAST_ACCUM => operation.has_fast_sums = attribute::<i8>(CALL, value, bytes)? != 0,
            _ => return refused(CALL, NOT_SUPPORTED, &format!("attribute {name}")),
        }
        Ok(())
    };
    done(set())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatrixLayoutCreate(
    handle: *mut Pointer,
    element: i32,
    rows: u64,
    columns: u64,
    pitch: i64,
) -> i32 {
    const CALL: &str = "cublasLtMatrixLayoutCreate";
    let format = match element {
        R_32F => Format::F32,
        R_16F => Format::F16,
        R_16BF => Format::Bf16,
        R_8F_E4M3 => Format::Fp8(E4M3),
        R_8F_E5M2 => Format::Fp8(E5M2),
        _ => return done(refused(CALL, NOT_SUPPORTED, &format!("numbers of type {element}"))),
    };
    let fits = rows > 0 && columns > 0 && pitch >= 0 && pitch as u64 >= rows;
    done(if fits {
        create(handle, Layout { format, rows, columns, pitch: pitch as u64 })
    } else {
        refused(CALL, INVALID_VALUE, &format!("{rows} rows, {columns} columns, {pitch} from one to the next"))
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatrixLayoutDestroy(handle: Pointer) -> i32 {
    // SAFETY: per the header's contract.
    unsafe { destroy::<Layout>("cublasLtMatrixLayoutDestroy", handle) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulPreferenceCreate(handle: *mut Pointer) -> i32 {
    done(create(handle, Preference { workspace_bytes: 0, alignments: [256; 4] }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulPreferenceDestroy(handle: Pointer) -> i32 {
    // SAFETY: per the header's contract.
    unsafe { destroy::<Preference>("cublasLtMatmulPreferenceDestroy", handle) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulPreferenceSetAttribute(
    handle: Pointer,
    name: i32,
    value: *const c_void,
    bytes: usize,
) -> i32 {
    const CALL: &str = "cublasLtMatmulPreferenceSetAttribute";
    // SAFETY: per the header's contract.
    let set = || unsafe {
        let preference = get::<Preference>(CALL, handle)?;
        match name {
            PREF_MAX_WORKSPACE_BYTES => preference.workspace_bytes = attribute::<u64>(CALL, value, bytes)?,
            PREF_MIN_ALIGNMENT_A_BYTES..=PREF_MIN_ALIGNMENT_D_BYTES => {
                let alignment = attribute::<u32>(CALL, value, bytes)?;
                if !alignment.is_power_of_two() {
                    return refused(CALL, INVALID_VALUE, &format!("an alignment of {alignment} bytes"));
                }
                preference.alignments[(name - PREF_MIN_ALIGNMENT_A_BYTES) as usize] = alignment;
            }
            _ => return refused(CALL, NOT_SUPPORTED, &format!("attribute {name}")),
        }
        Ok(())
    };
    done(set())
}
