//! NCCL: sums over the ranks of a communicator, in the memory of their devices.
//!
//! Nothing here blocks: communicators are not blocking in NCCL's sense, so a call returns while NCCL still works on it, and a rank that
//! hangs can be aborted from another thread.
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
/// `ncclResult_t`.
const REMOTE_ERROR: i32 = 6;
const IN_PROGRESS: i32 = 7;

/// `NCCL_API_MAGIC`, `NCCL_CONFIG_UNDEF_INT`.
const MAGIC: u32 = 0xcafe_beef;
const UNDEFINED: i32 = i32::MIN;
/// That of the header whose `ncclConfig_t` is used here: 2.18. Newer libraries take it and choose the rest themselves.
const CONFIG_VERSION: u32 = 21_800;

/// Pause while NCCL works on something.
const PAUSE: Duration = Duration::from_micros(100);
/// How long a communicator that is dropped waits for the other ranks.
const FAREWELL: Duration = Duration::from_secs(1);

/// `ncclUniqueId`, which is passed by value. Whoever knows it can join the communicator.
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
    least_blocks: i32,
    most_blocks: i32,
    network: *const c_char,
    shares_split: i32,
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
    ncclGetErrorString(i32) -> *const c_char;
    ncclGetLastError(Pointer) -> *const c_char;
});

/// The library. A copy is the same.
#[derive(Clone)]
pub struct Nccl {
    functions: Arc<Functions>,
}

/// Whose failure an error tells of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blame {
    /// NCCL's own words here.
    Own,
    /// A rank that is gone or cannot be reached: it may know why.
    Another,
}

impl Blame {
    /// Nothing if NCCL did not fail.
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
    /// The oldest version that has all functions used here: 2.19.
    pub const OLDEST: i32 = 21_900;

    /// Looks up the functions.
    ///
    /// # Errors
    /// The library has another major version than 2 or is older than [`Nccl::OLDEST`], or a function is missing.
    pub fn new(library: &Library) -> Result<Nccl, Error> {
        // SAFETY: the signature is that of the header.
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
            // SAFETY: any number may be passed, and no communicator; both results are strings that stay.
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

    /// What all ranks of a new communicator need.
    ///
    /// # Errors
    /// The call fails.
    pub fn unique_id(&self) -> Result<UniqueId, Error> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: the pointer is to as many bytes as the header says.
        self.check("ncclGetUniqueId", unsafe { (self.functions.ncclGetUniqueId)(&raw mut id) })?;
        Ok(id)
    }

    /// Begins to connect a rank of a communicator, whose number and count are given. It may be used once it
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
            least_blocks: UNDEFINED,
            most_blocks: UNDEFINED,
            network: std::ptr::null(),
            shares_split: UNDEFINED,
        };
        let number = |number: u32| {
            i32::try_from(number).map_err(|_| Error::refused("connect", format!("rank {rank} of {world} ranks")))
        };
        let (rank, world) = (number(rank)?, number(world)?);
        let mut raw = std::ptr::null_mut();
        context.make_current()?;
        // SAFETY: the pointers are to a live handle, and to a configuration that is read before the call returns.
        let code =
            unsafe { (self.functions.ncclCommInitRankConfig)(&raw mut raw, world, *id, rank, &raw const config) };
        if code != IN_PROGRESS {
            self.check("ncclCommInitRankConfig", code)?;
        }
        let state = Mutex::new(Some(State { raw, registered: Vec::new() }));
        Ok(Communicator { nccl: self.clone(), context: context.clone(), state })
    }

    /// A communicator of this process alone, ready to be used.
    ///
    /// # Errors
    /// A call fails.
    pub fn alone(&self, context: &Context) -> Result<Communicator, Error> {
        let communicator = self.connect(context, &self.unique_id()?, (0, 1))?;
        while !communicator.is_ready()? {
            std::thread::sleep(PAUSE);
        }
        Ok(communicator)
    }
}

/// `2.28.9`.
pub fn version_text(version: i32) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

struct State {
    raw: Pointer,
    /// Handles of buffers.
    registered: Vec<Pointer>,
}

// SAFETY: a communicator belongs to no thread; calls about it come one after another.
unsafe impl Send for State {}

/// A rank of a communicator. It may be aborted while another thread uses it.
pub struct Communicator {
    nccl: Nccl,
    context: Context,
    /// Nothing: it was aborted.
    state: Mutex<Option<State>>,
}

impl Communicator {
    fn state(&self) -> MutexGuard<'_, Option<State>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a call. The answer says whether NCCL goes on working on it.
    fn call(&self, name: &'static str, make: impl FnOnce(&Functions, &mut State) -> i32) -> Result<bool, Error> {
        self.context.make_current()?;
        let mut state = self.state();
        let state = state.as_mut().ok_or_else(|| Error::refused(name, "the communicator was aborted"))?;
        match make(&self.nccl.functions, state) {
            IN_PROGRESS => Ok(true),
            code => self.nccl.check(name, code).map(|()| false),
        }
    }

    /// The same, and waits until NCCL has done it.
    fn complete(&self, name: &'static str, make: impl FnOnce(&Functions, &mut State) -> i32) -> Result<(), Error> {
        let mut is_under_way = self.call(name, make)?;
        while is_under_way {
            std::thread::sleep(PAUSE);
            is_under_way = !self.is_ready()?;
        }
        Ok(())
    }

    /// Whether NCCL has done what it was told. Work on the device may still be under way.
    ///
    /// # Errors
    /// Something failed meanwhile, such as another rank. The communicator must then be aborted.
    pub fn is_ready(&self) -> Result<bool, Error> {
        let mut status = 0;
        self.call("ncclCommGetAsyncError", |call, state| {
            // SAFETY: the communicator lives; the pointer is to a live number.
            unsafe { (call.ncclCommGetAsyncError)(state.raw, &raw mut status) }
        })?;
        if status == IN_PROGRESS {
            return Ok(false);
        }
        self.nccl.check("ncclCommGetAsyncError", status).map(|()| true)
    }

    /// Lets NCCL use a buffer without copies, where it can. The buffer must live as long as the communicator.
    ///
    /// # Errors
    /// The call fails.
    pub fn register(&self, buffer: &Buffer) -> Result<(), Error> {
        self.complete("ncclCommRegister", |call, State { raw, registered }| {
            let mut handle = std::ptr::null_mut();
            // SAFETY: the communicator and the buffer live; the pointer is to a live handle.
            let code = unsafe { (call.ncclCommRegister)(*raw, buffer.pointer(), buffer.bytes(), &raw mut handle) };
            registered.extend((!handle.is_null()).then_some(handle));
            code
        })
    }

    /// Queues the sum over all ranks, in place. All ranks call it in the same order with the same size and type. 16-bit numbers are
    /// rounded after each addition.
    ///
    /// # Errors
    /// The memory is no whole number of elements, its buffer is gone, or the call fails.
    pub fn all_reduce(&self, memory: Span, element: Element, stream: &Stream) -> Result<(), Error> {
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
            // SAFETY: the range is within a buffer that lives, as just checked; freeing it waits for the work.
            unsafe { (call.ncclAllReduce)(address, address, count, data_type, SUM, state.raw, stream.raw()) }
        })
    }

    /// Ends it at once, whatever the device does: work of it that has not ended ends without a result. Other threads get an error.
    pub fn abort(&self) {
        // Without a context NCCL cannot end it either.
        let _ = self.context.make_current();
        if let Some(State { raw, .. }) = self.state().take() {
            // SAFETY: the communicator lives, and is never used again. The result could not be used.
            let _ = unsafe { (self.nccl.functions.ncclCommAbort)(raw) };
        }
    }

    /// Tells the other ranks that nothing more is called here, and waits a moment until they have all said so.
    fn finalize(&self) -> Result<(), Error> {
        // SAFETY: the communicator lives.
        self.call("ncclCommFinalize", |call, state| unsafe { (call.ncclCommFinalize)(state.raw) })?;
        let end = Instant::now() + FAREWELL;
        while !self.is_ready()? {
            if Instant::now() > end {
                return Err(Error::refused("finalize", "other ranks still use the communicator"));
            }
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        let registered = self.state().as_mut().map(|state| std::mem::take(&mut state.registered)).unwrap_or_default();
        for handle in registered {
            // SAFETY: the handle is of this communicator. A buffer that stays registered does no harm to one that ends.
            let _ =
                self.call("ncclCommDeregister", |call, state| unsafe { (call.ncclCommDeregister)(state.raw, handle) });
        }
        if self.finalize().is_err() {
            return self.abort();
        }
        if let Some(State { raw, .. }) = self.state().take() {
            // SAFETY: the communicator lives, and is never used again. The result could not be used.
            let _ = unsafe { (self.nccl.functions.ncclCommDestroy)(raw) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::header::{Header, of_libraries};
    use std::mem::offset_of;

    /// By the header of 2.28.9; `ncclConfig_t` begins as that of 2.18, which is the version that is said.
    #[test]
    #[ignore = "needs NVIDIA's libraries: cargo xtask test --gpu-libraries"]
    fn constants_layouts_and_names_are_those_of_the_header() {
        let folders = of_libraries();
        let numbers = [
            ("ncclFloat16", FLOAT16),
            ("ncclFloat32", FLOAT32),
            ("ncclBfloat16", BFLOAT16),
            ("ncclSum", SUM),
            ("ncclInProgress", IN_PROGRESS),
            ("NCCL_CONFIG_UNDEF_INT", UNDEFINED),
            ("sizeof(ncclUniqueId)", size_of::<UniqueId>() as i32),
        ];
        let fields = [
            ("size", offset_of!(Config, size)),
            ("magic", offset_of!(Config, magic)),
            ("version", offset_of!(Config, version)),
            ("blocking", offset_of!(Config, blocking)),
            ("cgaClusterSize", offset_of!(Config, cluster_size)),
            ("minCTAs", offset_of!(Config, least_blocks)),
            ("maxCTAs", offset_of!(Config, most_blocks)),
            ("netName", offset_of!(Config, network)),
            ("splitShare", offset_of!(Config, shares_split)),
        ];
        let numbers = numbers.map(|(name, value)| format!("{name} == {value}"));
        let fields = fields.map(|(field, at)| format!("offsetof(ncclConfig_t, {field}) == {at}"));
        let conditions: Vec<String> = numbers.into_iter().chain(fields).collect();
        let header = Header { name: "nccl.h", folders: &folders };
        let (is_good, text) = header.compiled(&conditions, Functions::NAMES);
        assert!(is_good, "{text}");
        let (is_good, text) = header.compiled(&["ncclFloat16 == 5".to_owned()], &["ncclAllReduce_v9"]);
        assert!(!is_good && text.contains("ncclFloat16 == 5") && text.contains("ncclAllReduce_v9"), "{text}");
    }

    /// Compared by hand with `nccl.h` 2.18 and 2.31, whose `ncclConfig_t` begins with the former's.
    #[test]
    fn the_configuration_has_the_layout_of_the_header() {
        let at = [offset_of!(Config, magic), offset_of!(Config, blocking), offset_of!(Config, network)];
        assert_eq!((at, offset_of!(Config, shares_split), size_of::<Config>()), ([8, 16, 32], 40, 48));
    }

    #[test]
    fn versions_read_as_nvidia_writes_them() {
        assert_eq!([22_809, 21_900, 23_203].map(version_text), ["2.28.9", "2.19.0", "2.32.3"]);
    }
}
