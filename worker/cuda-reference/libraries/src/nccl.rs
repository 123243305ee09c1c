//! `libnccl.so.2`: all-reduce, with the signatures and constants of `nccl.h` 2.28.
//!
//! ```text
//! ncclAllReduce ─> a stream: Send, Receive      Send sends this rank's data, Receive runs once the sum has arrived
//! ```
//!
//! Not supported: blocking communicators, group calls, other collectives, capture in graphs.

use crate::abi::{self, Pointer};
use crate::code::INVALID_VALUE;
use crate::fault;
use crate::finding::explain;
use crate::gpu::collective::Collective;
use crate::gpu::work::Work;
use crate::numbers::Format;
use crate::ranks::{
    self, Call, Communicator, IN_PROGRESS, INVALID_USAGE, REMOTE_ERROR, SCALED, SUCCESS, SYSTEM_ERROR, Status,
};
use std::ffi::{c_char, c_void};
use std::sync::{Arc, Mutex, PoisonError};

type CallResult<T> = Result<T, Status>;

const UNHANDLED_CUDA_ERROR: Status = Status(1);
const INVALID_ARGUMENT: Status = Status(4);

/// 2.28.9.
const VERSION: u64 = 22_809;

/// `ncclUniqueId`: the length of the root's name, and the name.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct UniqueId([u8; 128]);

/// The start of `ncclConfig_t`, all that is used here.
#[repr(C)]
#[derive(Debug)]
pub struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: i32,
}

const MAGIC: u32 = 0xcafe_beef;

/// `ncclScalarHostImmediate`.
const HOST_IMMEDIATE: i32 = 1;

/// Factors of users' operations, in their order; `None` once destroyed.
static FACTORS: Mutex<Vec<Option<f32>>> = Mutex::new(Vec::new());

static COMMUNICATORS: Mutex<Vec<Option<Arc<Communicator>>>> = Mutex::new(Vec::new());

fn done(answer: CallResult<()>) -> i32 {
    let Status(code) = answer.err().unwrap_or(SUCCESS);
    code
}

fn refused<T>(call: &str, status: Status, text: &str) -> CallResult<T> {
    explain(call, text);
    Err(status)
}

/// # Safety
/// `to` must be null or valid for writes.
unsafe fn store<T>(to: *mut T, value: T) -> CallResult<()> {
    // SAFETY: upheld by the caller.
    unsafe { abi::store(to, value) }.map_err(|_| INVALID_ARGUMENT)
}

fn communicator(raw: Pointer) -> CallResult<Arc<Communicator>> {
    let index = abi::index(abi::Kind::Communicator, raw).map_err(|_| INVALID_ARGUMENT)?;
    let all = COMMUNICATORS.lock().unwrap_or_else(PoisonError::into_inner);
    all.get(index).cloned().flatten().ok_or(INVALID_ARGUMENT)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetVersion(version: *mut i32) -> i32 {
    let faults = fault::requested().unwrap_or_default();
    // SAFETY: per the header's contract.
    done(unsafe { store(version, faults.nccl_version.unwrap_or(VERSION) as i32) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetErrorString(code: i32) -> *const c_char {
    let text = match Status(code) {
        SUCCESS => c"no error",
        UNHANDLED_CUDA_ERROR => c"unhandled cuda error",
        SYSTEM_ERROR => c"unhandled system error",
        INVALID_ARGUMENT => c"invalid argument",
        INVALID_USAGE => c"invalid usage",
        REMOTE_ERROR => c"remote process exited or there was a network error",
        IN_PROGRESS => c"NCCL operation in progress",
        _ => c"unknown result code",
    };
    text.as_ptr()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetUniqueId(id: *mut UniqueId) -> i32 {
    done(ranks::open().map_err(|_| SYSTEM_ERROR).and_then(|name| {
        let mut bytes = [0; 128];
        bytes[0] = name.len() as u8;
        bytes[1..=name.len()].copy_from_slice(&name);
        // SAFETY: per the header's contract.
        unsafe { store(id, UniqueId(bytes)) }
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRankConfig(
    raw: *mut Pointer,
    world: i32,
    id: UniqueId,
    rank: i32,
    config: *const Config,
) -> i32 {
    const CALL: &str = "ncclCommInitRankConfig";
    // SAFETY: per the header's contract.
    let Some(Config { size, magic, version, blocking }) = (unsafe { config.as_ref() }) else {
        return done(refused(CALL, INVALID_ARGUMENT, "no configuration"));
    };
    if *magic != MAGIC || *size < size_of::<Config>() || *version < 21_400 || *blocking != 0 {
        let text = format!("size {size}, magic {magic:#x}, version {version}, blocking {blocking}");
        return done(refused(CALL, INVALID_ARGUMENT, &text));
    }
    // SAFETY: per the header's contract.
    done(unsafe { start(CALL, raw, (rank, world), &id) })
}

/// # Safety
/// `raw` must be null or valid for writes.
unsafe fn start(call: &str, raw: *mut Pointer, (rank, world): (i32, i32), UniqueId(id): &UniqueId) -> CallResult<()> {
    let (Ok(rank), Ok(world)) = (u32::try_from(rank), u32::try_from(world)) else {
        return refused(call, INVALID_ARGUMENT, &format!("rank {rank} of {world}"));
    };
    let name = id.get(1..=usize::from(id[0])).filter(|name| !name.is_empty());
    let Some(name) = name.filter(|_| rank < world) else {
        return refused(call, INVALID_ARGUMENT, &format!("rank {rank} of {world}, or an id of unknown origin"));
    };
    let device = abi::current().map_err(|_| UNHANDLED_CUDA_ERROR)?;
    let settings = abi::with(|gpu| Ok(gpu.settings)).map_err(|_| UNHANDLED_CUDA_ERROR)?;
    let faults = (settings.faults, settings.seed);
    let new = Communicator::start(name.to_vec(), (rank, world), device, faults)?;
    let mut all = COMMUNICATORS.lock().unwrap_or_else(PoisonError::into_inner);
    all.push(Some(new));
    let handle = abi::handle(abi::Kind::Communicator, all.len() - 1);
    drop(all);
    // SAFETY: upheld by the caller.
    unsafe { store(raw, handle)? };
    Err(IN_PROGRESS)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGetAsyncError(raw: Pointer, code: *mut i32) -> i32 {
    done(communicator(raw).and_then(|communicator| {
        let Status(status) = communicator.status();
        // SAFETY: per the header's contract.
        unsafe { store(code, status) }
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommFinalize(raw: Pointer) -> i32 {
    done(communicator(raw).and_then(|communicator| {
        communicator.finalize();
        Err(IN_PROGRESS)
    }))
}

/// Waits for the other ranks if it was not finalized.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommDestroy(raw: Pointer) -> i32 {
    done(communicator(raw).and_then(|communicator| {
        communicator.finalize();
        communicator.settle();
        forget(raw)
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommAbort(raw: Pointer) -> i32 {
    done(communicator(raw).and_then(|communicator| {
        communicator.abort();
        forget(raw)
    }))
}

fn forget(raw: Pointer) -> CallResult<()> {
    let index = abi::index(abi::Kind::Communicator, raw).map_err(|_| INVALID_ARGUMENT)?;
    COMMUNICATORS.lock().unwrap_or_else(PoisonError::into_inner)[index] = None;
    Ok(())
}

/// The last warning. Here, warnings go to standard error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetLastError(_: Pointer) -> *const c_char {
    c"".as_ptr()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommRegister(raw: Pointer, buffer: Pointer, bytes: usize, handle: *mut Pointer) -> i32 {
    done(communicator(raw).and_then(|_| {
        let start = buffer.addr() as u64;
        let is_memory =
            abi::with(|gpu| gpu.find_allocation(&(start..start + bytes as u64)).map(|_| ()).ok_or(INVALID_VALUE));
        if is_memory.is_err() {
            return refused("ncclCommRegister", INVALID_ARGUMENT, &format!("{bytes} bytes of no allocation"));
        }
        // SAFETY: per the header's contract.
        unsafe { store(handle, buffer) }
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommDeregister(raw: Pointer, handle: Pointer) -> i32 {
    done(communicator(raw).and_then(|_| if handle.is_null() { Err(INVALID_ARGUMENT) } else { Ok(()) }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclRedOpCreatePreMulSum(
    operation: *mut i32,
    scalar: *const f32,
    data_type: i32,
    residence: i32,
    raw: Pointer,
) -> i32 {
    done(communicator(raw).and_then(|_| {
        if (ranks::format(data_type), residence) != (Some(Format::F32), HOST_IMMEDIATE) || scalar.is_null() {
            let text = format!("a factor of type {data_type} in residence {residence}");
            return refused("ncclRedOpCreatePreMulSum", INVALID_ARGUMENT, &text);
        }
        let mut factors = FACTORS.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: per the header's contract.
        factors.push(Some(unsafe { *scalar }));
        // SAFETY: per the header's contract.
        unsafe { store(operation, (ranks::FIRST_OWN + factors.len() - 1) as i32) }
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclRedOpDestroy(operation: i32, raw: Pointer) -> i32 {
    done(communicator(raw).and_then(|_| {
        let mut factors = FACTORS.lock().unwrap_or_else(PoisonError::into_inner);
        match own_index(operation).and_then(|index| factors.get_mut(index)?.take()) {
            Some(_) => Ok(()),
            None => refused("ncclRedOpDestroy", INVALID_ARGUMENT, &format!("operation {operation}")),
        }
    }))
}

/// Index of a user's operation.
fn own_index(operation: i32) -> Option<usize> {
    usize::try_from(operation).ok()?.checked_sub(ranks::FIRST_OWN)
}

/// The operation as the ranks exchange it.
fn operation_of(operation: i32) -> Option<u64> {
    if operation == ranks::SUM as i32 {
        return Some(ranks::SUM);
    }
    let factors = FACTORS.lock().unwrap_or_else(PoisonError::into_inner);
    let factor = factors.get(own_index(operation)?).copied().flatten()?;
    Some(SCALED | u64::from(factor.to_bits()))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAllReduce(
    from: *const c_void,
    to: Pointer,
    count: usize,
    data_type: i32,
    operation: i32,
    raw: Pointer,
    stream: Pointer,
) -> i32 {
    done(all_reduce((from.addr() as u64, to.addr() as u64), count, (data_type, operation), raw, stream))
}

fn all_reduce(
    (from, to): (u64, u64),
    count: usize,
    (data_type, operation): (i32, i32),
    raw: Pointer,
    stream: Pointer,
) -> CallResult<()> {
    const CALL: &str = "ncclAllReduce";
    let communicator = communicator(raw)?;
    let both = ranks::format(data_type).zip(operation_of(operation));
    // Factors are in f32.
    let Some((format, operation)) = both.filter(|(format, own)| *own & SCALED == 0 || *format == Format::F32) else {
        return refused(CALL, INVALID_ARGUMENT, &format!("type {data_type}, operation {operation}"));
    };
    if abi::current().map_err(|_| UNHANDLED_CUDA_ERROR)?.0 != communicator.device {
        return refused(CALL, INVALID_USAGE, "the current device is not that of the communicator");
    }
    match communicator.status() {
        SUCCESS if !communicator.is_finalized() => {}
        SUCCESS => return refused(CALL, INVALID_USAGE, "the communicator is finalized"),
        status => return refused(CALL, status, "the communicator is not ready, or has failed"),
    }
    let bytes = count as u64 * format.bytes();
    let (from, to) = (from..from + bytes, to..to + bytes);
    if from != to && from.start < to.end && to.start < from.end {
        return refused(CALL, INVALID_ARGUMENT, "source and result overlap, and are not the same");
    }
    let put = abi::with(|gpu| {
        let stream = abi::stream(gpu, stream)?;
        gpu.graphs.refuse_for(stream, CALL)?;
        gpu.reductions += 1;
        let (number, place) = (communicator.next_call(), gpu.reductions);
        let call = Call { number, place, data_type: data_type as u64, operation, count: count as u64 };
        let name = format!("all-reduce {number} of a communicator");
        let collective =
            Collective { communicator: Arc::clone(&communicator), call, from: from.clone(), to: to.clone() };
        gpu.enqueue(stream, name.clone(), &[from], Work::Send(collective.clone()));
        gpu.enqueue(stream, name, &[to], Work::Receive(collective));
        Ok(())
    });
    put.map_err(|_| UNHANDLED_CUDA_ERROR)
}
