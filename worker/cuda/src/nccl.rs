//! NCCL: all-reduce over the ranks of a communicator, in device memory.
//!
//! Nothing here blocks: communicators are non-blocking in NCCL's sense, so calls return while NCCL
//! is still working, and another thread can abort a rank that hangs.
#![allow(unsafe_code)]

use crate::driver::{Buffer, Context, Span, Stream};
use crate::error::Error;
use crate::find::NCCL;
use crate::kernels::{Element, Memory};
use crate::library::{Library, Pointer, check, functions, text_at};
use std::ffi::c_char;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// `ncclDataType_t`.
const FLOAT16: i32 = 6;
const FLOAT32: i32 = 7;
const BFLOAT16: i32 = 9;
/// `ncclRedOp_t`.
const SUM: i32 = 0;
/// `ncclScalarHostImmediate`: the factor is read from host memory before the call returns.
const HOST_IMMEDIATE: i32 = 1;
/// `ncclResult_t`.
const REMOTE_ERROR: i32 = 6;
const IN_PROGRESS: i32 = 7;

/// `NCCL_API_MAGIC`, `NCCL_CONFIG_UNDEF_INT`.
const MAGIC: u32 = 0xcafe_beef;
const UNDEFINED: i32 = i32::MIN;
/// Version of the header whose `ncclConfig_t` is used here: 2.18. Newer libraries accept it and use
/// defaults for newer fields.
const CONFIG_VERSION: u32 = 21_800;

/// `maxCTAs` of `ncclConfig_t`: the largest value and the default, in channels of a communicator.
const MAX_CHANNELS: u64 = 32;
/// Buffers of a channel in bytes: `NCCL_BUFFSIZE` by default, which the user guide documents, and
/// those of the protocols LL128 and LL (`computeBuffSizes` in NCCL's `src/init.cc`).
const CHANNEL_BYTES: u64 = (4 << 20) + 640 * 120 * 8 * 8 + 512 * 8 * 8 * 16;

/// GPU memory that a communicator can take for its buffers, in bytes: in a ring, each channel
/// receives from one neighbour.
pub const COMMUNICATOR_BYTES: u64 = MAX_CHANNELS * CHANNEL_BYTES;

/// Polling interval while an NCCL call is in progress.
const POLL_INTERVAL: Duration = Duration::from_micros(100);
/// How long dropping a communicator waits for the other ranks.
const FINALIZE_TIMEOUT: Duration = Duration::from_secs(1);

/// `ncclUniqueId`, passed by value. It is the secret for joining the communicator.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UniqueId(pub [u8; 128]);

/// `ncclConfig_t` of NCCL 2.18.
#[repr(C)]
#[derive(Debug)]
struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: i32,
    cluster_size: i32,
    min_blocks: i32,
    max_blocks: i32,
    network: *const c_char,
    split_share: i32,
}

functions!(Functions {
    ncclGetVersion(*mut i32) -> i32;
    ncclGetUniqueId(*mut UniqueId) -> i32;
    ncclCommInitRankConfig(*mut Pointer, i32, UniqueId, i32, *const Config) -> i32;
    ncclCommGetAsyncError(Pointer, *mut i32) -> i32;
    ncclCommRegister(Pointer, Pointer, usize, *mut Pointer) -> i32;
    ncclCommDeregister(Pointer, Pointer) -> i32;
    ncclCommFinalize(Pointer) -> i32;
    ncclCommDestroy(Pointer) -> i32;
    ncclCommAbort(Pointer) -> i32;
    ncclAllReduce(Pointer, Pointer, usize, i32, i32, Pointer, Pointer) -> i32;
    ncclRedOpCreatePreMulSum(*mut i32, *const f32, i32, i32, Pointer) -> i32;
    ncclRedOpDestroy(i32, Pointer) -> i32;
    ncclGetErrorString(i32) -> *const c_char;
    ncclGetLastError(Pointer) -> *const c_char;
});

/// The library. Clones share it.
#[derive(Clone)]
pub struct Nccl {
    functions: Arc<Functions>,
}

/// Which rank an NCCL error originates from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blame {
    /// This rank; the error has NCCL's message.
    Own,
    /// A rank that has exited or is unreachable; its own error has the cause.
    Another,
}

impl Blame {
    /// `None` if NCCL did not fail.
    pub fn of(error: &Error) -> Option<Blame> {
        match error {
            Error::Call { library, code, .. } if *library == NCCL.name => {
                Some(if *code == REMOTE_ERROR { Blame::Another } else { Blame::Own })
            }
            _ => None,
        }
    }
}

impl Nccl {
    /// Oldest version with all functions used here: 2.19.
    pub const OLDEST: i32 = 21_900;

    /// Resolves the functions.
    ///
    /// # Errors
    /// The library is not version 2 or is older than [`Nccl::OLDEST`], or a function is missing.
    pub fn new(library: &Library) -> Result<Nccl, Error> {
        // SAFETY: the signature matches the header.
        let get: unsafe extern "C" fn(*mut i32) -> i32 = unsafe { library.function("ncclGetVersion") }?;
        let mut version = 0;
        // SAFETY: the pointer is to a live integer.
        check(NCCL.name, "ncclGetVersion", unsafe { get(&raw mut version) }, || "no text".to_owned())?;
        if version < Nccl::OLDEST || version / 10_000 != Nccl::OLDEST / 10_000 {
            let (got, oldest) = (version_text(version), version_text(Nccl::OLDEST));
            let text = format!("{} is version {got}; expected {oldest} or newer of 2", library.path.display());
            return Err(Error::refused("ncclGetVersion", text));
        }
        Ok(Nccl { functions: Arc::new(Functions::load(library)?) })
    }

    fn check(&self, call: &str, code: i32) -> Result<(), Error> {
        check(NCCL.name, call, code, || {
            // SAFETY: any code is valid, and so is a null communicator; both results are static
            // strings.
            let [text, last] = unsafe {
                let calls = &self.functions;
                [(calls.ncclGetErrorString)(code), (calls.ncclGetLastError)(std::ptr::null_mut())]
                    .map(|text| text_at(text))
            };
            if last.is_empty() { text } else { format!("{text}: {}", last.trim_end()) }
        })
    }

    /// The version number: 22809 is 2.28.9.
    ///
    /// # Errors
    /// The call fails.
    pub fn version(&self) -> Result<i32, Error> {
        let mut version = 0;
        // SAFETY: the pointer is to a live integer.
        self.check("ncclGetVersion", unsafe { (self.functions.ncclGetVersion)(&raw mut version) })?;
        Ok(version)
    }

    /// The id that all ranks of a new communicator need.
    ///
    /// # Errors
    /// The call fails.
    pub fn unique_id(&self) -> Result<UniqueId, Error> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: the pointer is to an id of the header's size.
        self.check("ncclGetUniqueId", unsafe { (self.functions.ncclGetUniqueId)(&raw mut id) })?;
        Ok(id)
    }

    /// Starts connecting `rank` of `world` ranks. The communicator is usable once it
    /// [`is_ready`](Communicator::is_ready).
    ///
    /// # Errors
    /// The call fails.
    pub fn connect(&self, context: &Context, id: &UniqueId, (rank, world): (u32, u32)) -> Result<Communicator, Error> {
        let config = Config {
            size: size_of::<Config>(),
            magic: MAGIC,
            version: CONFIG_VERSION,
            blocking: 0,
            cluster_size: UNDEFINED,
            min_blocks: UNDEFINED,
            max_blocks: UNDEFINED,
            network: std::ptr::null(),
            split_share: UNDEFINED,
        };
        let number = |number: u32| {
            i32::try_from(number).map_err(|_| Error::refused("connect", format!("rank {rank} of {world} ranks")))
        };
        let (rank, world) = (number(rank)?, number(world)?);
        let mut raw = std::ptr::null_mut();
        context.make_current()?;
        // SAFETY: the pointers are to a live handle, and to a configuration that is read before the
        // call returns.
        let code =
            unsafe { (self.functions.ncclCommInitRankConfig)(&raw mut raw, world, *id, rank, &raw const config) };
        if code != IN_PROGRESS {
            self.check("ncclCommInitRankConfig", code)?;
        }
        let state = Mutex::new(Some(State { raw, registered: Vec::new() }));
        Ok(Communicator { nccl: self.clone(), context: context.clone(), state })
    }

    /// A single-rank communicator, ready for use.
    ///
    /// # Errors
    /// A call fails.
    pub fn single_rank(&self, context: &Context) -> Result<Communicator, Error> {
        let communicator = self.connect(context, &self.unique_id()?, (0, 1))?;
        while !communicator.is_ready()? {
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(communicator)
    }
}

/// Formats a version: `2.28.9`.
pub fn version_text(version: i32) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

struct State {
    raw: Pointer,
    /// Handles of registered buffers.
    registered: Vec<Pointer>,
}

// SAFETY: a communicator does not belong to a thread; its calls are serialised.
unsafe impl Send for State {}

/// A rank of a communicator. It can be aborted while another thread uses it.
pub struct Communicator {
    nccl: Nccl,
    context: Context,
    /// `None` after an abort.
    state: Mutex<Option<State>>,
}

impl Communicator {
    fn state(&self) -> MutexGuard<'_, Option<State>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a call; returns whether it is still in progress.
    fn call(&self, name: &'static str, make: impl FnOnce(&Functions, &mut State) -> i32) -> Result<bool, Error> {
        self.context.make_current()?;
        let mut state = self.state();
        let state = state.as_mut().ok_or_else(|| Error::refused(name, "the communicator was aborted"))?;
        match make(&self.nccl.functions, state) {
            IN_PROGRESS => Ok(true),
            code => self.nccl.check(name, code).map(|()| false),
        }
    }

    /// Makes a call and waits until NCCL has completed it.
    fn complete(&self, name: &'static str, make: impl FnOnce(&Functions, &mut State) -> i32) -> Result<(), Error> {
        let mut is_under_way = self.call(name, make)?;
        while is_under_way {
            std::thread::sleep(POLL_INTERVAL);
            is_under_way = !self.is_ready()?;
        }
        Ok(())
    }

    /// Whether NCCL has completed its calls. Device operations can still be in progress.
    ///
    /// # Errors
    /// The communicator failed, for example because of another rank, and must be aborted.
    pub fn is_ready(&self) -> Result<bool, Error> {
        let mut status = 0;
        self.call("ncclCommGetAsyncError", |call, state| {
            // SAFETY: the communicator is alive; the pointer is to a live integer.
            unsafe { (call.ncclCommGetAsyncError)(state.raw, &raw mut status) }
        })?;
        if status == IN_PROGRESS {
            return Ok(false);
        }
        self.nccl.check("ncclCommGetAsyncError", status).map(|()| true)
    }

    /// Registers a buffer for zero-copy use where supported. The buffer must outlive the
    /// communicator.
    ///
    /// # Errors
    /// The call fails.
    pub fn register(&self, buffer: &Buffer) -> Result<(), Error> {
        self.complete("ncclCommRegister", |call, State { raw, registered }| {
            let mut handle = std::ptr::null_mut();
            // SAFETY: the communicator and the buffer are alive; the pointer is to a live handle.
            let code = unsafe { (call.ncclCommRegister)(*raw, buffer.pointer(), buffer.bytes(), &raw mut handle) };
            registered.extend((!handle.is_null()).then_some(handle));
            code
        })
    }

    /// Queues an in-place all-reduce (sum). All ranks must call it in the same order with the same
    /// size and type. 16-bit values are rounded after each addition.
    ///
    /// # Errors
    /// The memory is not a whole number of elements, its buffer has been freed, or the call fails.
    pub fn all_reduce(&self, memory: Span, element: Element, stream: &Stream) -> Result<(), Error> {
        self.reduce(SUM, memory, element, stream)
    }

    /// Queues an in-place all-reduce of f32 values, each multiplied by `factor` first
    /// (`PreMulSum`). A single rank launches a kernel for it; for a plain sum of one rank NCCL does
    /// nothing (`ncclLaunchOneRank` in its `onerank.cu`).
    ///
    /// # Errors
    /// As for [`Communicator::all_reduce`].
    pub fn all_reduce_scaled(&self, memory: Span, factor: f32, stream: &Stream) -> Result<(), Error> {
        let mut operation = SUM;
        self.complete("ncclRedOpCreatePreMulSum", |call, state| {
            let (to, factor) = (&raw mut operation, &raw const factor);
            // SAFETY: the communicator is alive; the pointers are to a live integer and float.
            unsafe { (call.ncclRedOpCreatePreMulSum)(to, factor, FLOAT32, HOST_IMMEDIATE, state.raw) }
        })?;
        let queued = self.reduce(operation, memory, Element::F32, stream);
        // NCCL keeps what queued calls need.
        let destroyed = self.complete("ncclRedOpDestroy", |call, state| {
            // SAFETY: the communicator is alive, and the operation is one of its own.
            unsafe { (call.ncclRedOpDestroy)(operation, state.raw) }
        });
        queued.and(destroyed)
    }

    fn reduce(&self, operation: i32, memory: Span, element: Element, stream: &Stream) -> Result<(), Error> {
        let (bytes, size) = (memory.bytes(), element.bytes());
        if !bytes.is_multiple_of(size) {
            return Err(Error::refused("all_reduce", format!("{bytes} bytes, expected a multiple of {size}")));
        }
        let data_type = match element {
            Element::F32 => FLOAT32,
            Element::Bf16 => BFLOAT16,
            Element::F16 => FLOAT16,
        };
        stream.uses("all_reduce", [memory].into_iter())?;
        self.complete("ncclAllReduce", |call, state| {
            let (address, count) = (memory.pointer(), bytes / size);
            // SAFETY: the range is within a live buffer, as just checked; freeing it waits for the
            // operation.
            unsafe { (call.ncclAllReduce)(address, address, count, data_type, operation, state.raw, stream.raw()) }
        })
    }

    /// Aborts immediately, whatever the device is doing: unfinished operations end without a
    /// result. Other threads get an error.
    pub fn abort(&self) {
        // Without a context NCCL cannot abort either.
        let _ = self.context.make_current();
        if let Some(State { raw, .. }) = self.state().take() {
            // SAFETY: the communicator is alive, and is never used again. An error could not be
            // handled here.
            let _ = unsafe { (self.nccl.functions.ncclCommAbort)(raw) };
        }
    }

    /// Announces that this rank makes no further calls, and briefly waits for all other ranks to do
    /// the same.
    fn finalize(&self) -> Result<(), Error> {
        // SAFETY: the communicator is alive.
        self.call("ncclCommFinalize", |call, state| unsafe { (call.ncclCommFinalize)(state.raw) })?;
        let end = Instant::now() + FINALIZE_TIMEOUT;
        while !self.is_ready()? {
            if Instant::now() > end {
                return Err(Error::refused("finalize", "other ranks still use the communicator"));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        let registered = self.state().as_mut().map(|state| std::mem::take(&mut state.registered)).unwrap_or_default();
        for handle in registered {
            // SAFETY: the handle belongs to this communicator. A buffer that stays registered is
            // harmless when the communicator ends.
            let _ =
                self.call("ncclCommDeregister", |call, state| unsafe { (call.ncclCommDeregister)(state.raw, handle) });
        }
        if self.finalize().is_err() {
            return self.abort();
        }
        if let Some(State { raw, .. }) = self.state().take() {
            // SAFETY: the communicator is alive, and is never used again. An error could not be
            // handled here.
            let _ = unsafe { (self.nccl.functions.ncclCommDestroy)(raw) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::header::assert_library_header;
    use std::mem::offset_of;

    /// According to the 2.28.9 header; `ncclConfig_t` starts with the fields of 2.18, the version
    /// that is declared.
    #[test]
    #[ignore = "needs NVIDIA's libraries: cargo xtask test --gpu-libraries"]
    fn constants_layouts_and_names_match_the_header() {
        let numbers = [
            ("ncclFloat16", FLOAT16),
            ("ncclFloat32", FLOAT32),
            ("ncclBfloat16", BFLOAT16),
            ("ncclSum", SUM),
            ("ncclScalarHostImmediate", HOST_IMMEDIATE),
            ("ncclInProgress", IN_PROGRESS),
            ("NCCL_CONFIG_UNDEF_INT", UNDEFINED),
            ("sizeof(ncclUniqueId)", size_of::<UniqueId>() as i32),
            ("offsetof(ncclConfig_t, size)", offset_of!(Config, size) as i32),
            ("offsetof(ncclConfig_t, magic)", offset_of!(Config, magic) as i32),
            ("offsetof(ncclConfig_t, version)", offset_of!(Config, version) as i32),
            ("offsetof(ncclConfig_t, blocking)", offset_of!(Config, blocking) as i32),
            ("offsetof(ncclConfig_t, cgaClusterSize)", offset_of!(Config, cluster_size) as i32),
            ("offsetof(ncclConfig_t, minCTAs)", offset_of!(Config, min_blocks) as i32),
            ("offsetof(ncclConfig_t, maxCTAs)", offset_of!(Config, max_blocks) as i32),
            ("offsetof(ncclConfig_t, netName)", offset_of!(Config, network) as i32),
            ("offsetof(ncclConfig_t, splitShare)", offset_of!(Config, split_share) as i32),
        ];
        assert_library_header("nccl.h", numbers, Functions::NAMES);
    }

    /// Compared by hand with `nccl.h` 2.18 and 2.31, whose `ncclConfig_t` starts with the fields of
    /// 2.18.
    #[test]
    fn the_configuration_layout_matches_the_header() {
        let at = [offset_of!(Config, magic), offset_of!(Config, blocking), offset_of!(Config, network)];
        assert_eq!((at, offset_of!(Config, split_share), size_of::<Config>()), ([8, 16, 32], 40, 48));
    }

    #[test]
    fn versions_read_as_nvidia_writes_them() {
        assert_eq!([22_809, 21_900, 23_203].map(version_text), ["2.28.9", "2.19.0", "2.32.3"]);
    }
}
