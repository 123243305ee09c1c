//! NCCL: one communicator.
#![allow(unsafe_code)]

use crate::driver::Buffer;
use crate::error::Error;
use crate::find::NCCL;
use crate::library::{Handle, Library, Pointer, check, functions, text_at};
use std::ffi::c_char;

const FLOAT32: i32 = 7;
const SUM: i32 = 0;

/// `ncclUniqueId`, which is passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u8; 128]);

functions!(Functions {
    ncclGetVersion(*mut i32) -> i32;
    ncclGetUniqueId(*mut UniqueId) -> i32;
    ncclCommInitRank(*mut Pointer, i32, UniqueId, i32) -> i32;
    ncclCommDestroy(Pointer) -> i32;
    ncclAllReduce(Pointer, Pointer, usize, i32, i32, Pointer, Pointer) -> i32;
    ncclGetErrorString(i32) -> *const c_char;
});

/// The library.
pub struct Nccl {
    functions: Functions,
}

impl Nccl {
    /// Looks up the functions.
    ///
    /// # Errors
    /// A function is missing.
    pub fn new(library: &Library) -> Result<Nccl, Error> {
        Ok(Nccl { functions: Functions::load(library)? })
    }

    fn check(&self, call: &str, code: i32) -> Result<(), Error> {
        // SAFETY: any number may be passed; the result is a constant string.
        check(NCCL.name, call, code, || unsafe { text_at((self.functions.ncclGetErrorString)(code)) })
    }

    /// The version number.
    ///
    /// # Errors
    /// The call fails.
    pub fn version(&self) -> Result<i32, Error> {
        let mut version = 0;
        // SAFETY: the pointer is to a live integer.
        self.check("ncclGetVersion", unsafe { (self.functions.ncclGetVersion)(&raw mut version) })?;
        Ok(version)
    }

    /// Creates a communicator of this process alone, on the current device.
    ///
    /// # Errors
    /// A call fails.
    pub fn alone(&self) -> Result<Communicator<'_>, Error> {
        let (mut id, mut raw) = (UniqueId([0; 128]), std::ptr::null_mut());
        // SAFETY: the pointer is to as many bytes as the header says.
        self.check("ncclGetUniqueId", unsafe { (self.functions.ncclGetUniqueId)(&raw mut id) })?;
        // SAFETY: the pointer is to a live handle; one rank, number 0.
        self.check("ncclCommInitRank", unsafe { (self.functions.ncclCommInitRank)(&raw mut raw, 1, id, 0) })?;
        Ok(Communicator { nccl: self, handle: Handle { raw, destroy: self.functions.ncclCommDestroy } })
    }
}

pub struct Communicator<'a> {
    nccl: &'a Nccl,
    handle: Handle,
}

impl Communicator<'_> {
    /// Launches the sum over all ranks of all `f32` of `from` into `into`.
    ///
    /// # Errors
    /// The sizes differ, or the call fails.
    pub fn all_reduce(&self, from: &Buffer, into: &Buffer) -> Result<(), Error> {
        if from.bytes() != into.bytes() {
            return Err(Error::refused("all_reduce", format!("{} bytes into {}", from.bytes(), into.bytes())));
        }
        // SAFETY: both buffers have as many elements; stream 0 is the default one, and freeing a buffer waits for it.
        let code = unsafe {
            (self.nccl.functions.ncclAllReduce)(
                from.pointer(),
                into.pointer(),
                from.bytes() / size_of::<f32>(),
                FLOAT32,
                SUM,
                self.handle.raw,
                std::ptr::null_mut(),
            )
        };
        self.nccl.check("ncclAllReduce", code)
    }
}
