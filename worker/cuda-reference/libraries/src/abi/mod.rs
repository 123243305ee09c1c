//! `libcuda.so.1`: driver functions with the signatures of its header.

mod device;
mod graph;
mod memory;
mod module;
mod stream;

use crate::code::{CallResult, Code, INVALID_CONTEXT, INVALID_HANDLE, NO_DEVICE, NOT_INITIALIZED};
use crate::fault;
use crate::gpu::{Gpu, MEMORY_BYTES, Settings};
use std::cell::Cell;
use std::ffi::c_void;
use std::str::FromStr;
use std::sync::{Mutex, OnceLock, PoisonError};

/// An address or handle passed by the program.
pub(crate) type Pointer = *mut c_void;

/// Created by `cuInit`.
struct Machine {
    gpus: Vec<Mutex<Gpu>>,
    /// Machine-wide device numbers of `gpus`.
    ordinals: Vec<usize>,
    is_busy: bool,
    /// See [`Faults`].
    exit: bool,
}

static MACHINE: OnceLock<Machine> = OnceLock::new();

thread_local! {
    /// Number of the GPU whose context is current, from 1; 0 if none.
    static CURRENT: Cell<usize> = const { Cell::new(0) };
}

fn machine() -> CallResult<&'static Machine> {
    MACHINE.get().ok_or(NOT_INITIALIZED)
}

/// Number of the GPU whose context is current, from 1, and its machine-wide device number.
pub(crate) fn current() -> CallResult<(usize, usize)> {
    let number = CURRENT.get();
    let ordinal = number.checked_sub(1).and_then(|index| machine().ok()?.ordinals.get(index)).ok_or(INVALID_CONTEXT)?;
    Ok((number, *ordinal))
}

/// Number of GPUs visible to this process.
pub(crate) fn devices() -> CallResult<usize> {
    Ok(machine()?.gpus.len())
}

/// Runs a call on the device of the current context.
pub(crate) fn with<T>(call: impl FnOnce(&mut Gpu) -> CallResult<T>) -> CallResult<T> {
    let number = CURRENT.get();
    let gpu = number.checked_sub(1).and_then(|index| machine().ok()?.gpus.get(index)).ok_or(INVALID_CONTEXT)?;
    let mut gpu = gpu.lock().unwrap_or_else(PoisonError::into_inner);
    match gpu.failed {
        Some(code) => Err(code),
        None => call(&mut gpu),
    }
}

/// Converts to the driver's return value.
pub(crate) fn done(answer: CallResult<()>) -> i32 {
    answer.map_or_else(|Code(code)| code, |()| 0)
}

/// Stores a result at the program's pointer.
///
/// # Safety
/// `to` must be null or valid for writes.
pub(crate) unsafe fn store<T>(to: *mut T, value: T) -> CallResult<()> {
    if to.is_null() {
        return Err(crate::code::INVALID_VALUE);
    }
    // SAFETY: upheld by the caller.
    unsafe { to.write(value) };
    Ok(())
}

/// Handles are unmapped addresses. The kind keeps an event from being mistaken for a stream.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Kind {
    Stream = 0x5343_0000,
    Event = 0x4556_0000,
    Module = 0x4d4f_0000,
    Function = 0x4655_0000,
    Graph = 0x4752_0000,
    Executable = 0x4758_0000,
    Communicator = 0x434f_0000,
}

pub(crate) fn handle(kind: Kind, index: usize) -> Pointer {
    std::ptr::without_provenance_mut((kind as usize) << 32 | index)
}

pub(crate) fn index(kind: Kind, handle: Pointer) -> CallResult<usize> {
    let number = handle.addr();
    if number >> 32 == kind as usize { Ok(number & 0xffff_ffff) } else { Err(INVALID_HANDLE) }
}

/// The stream of a handle.
pub(crate) fn stream(gpu: &Gpu, raw: Pointer) -> CallResult<usize> {
    // `CU_STREAM_LEGACY` is 1.
    let stream = if raw.addr() <= 1 { crate::gpu::queue::DEFAULT } else { index(Kind::Stream, raw)? };
    if gpu.queue.exists(stream) { Ok(stream) } else { Err(INVALID_HANDLE) }
}

fn number<T: FromStr>(name: &str, otherwise: T) -> Result<T, String> {
    match std::env::var(name) {
        Ok(text) => text.parse().map_err(|_| format!("{name}: `{text}`, expected a number")),
        Err(_) => Ok(otherwise),
    }
}

/// The GPU that `CUDA_VISIBLE_DEVICES` names: a number, optionally after `GPU-` or `MIG-` as if it
/// were the prefix of a UUID.
fn named(name: &str, devices: usize) -> Option<usize> {
    let number = name.strip_prefix("GPU-").or(name.strip_prefix("MIG-")).unwrap_or(name);
    number.parse().ok().filter(|index| *index < devices)
}

impl Settings {
    /// Settings of the first GPU.
    fn new() -> Result<Settings, String> {
        Ok(Settings {
            seed: number("SWITCHYARD_REFERENCE_SEED", 0)?,
            memory_bytes: number("SWITCHYARD_REFERENCE_MEMORY", MEMORY_BYTES)?,
            faults: fault::requested()?,
            ordinal: 0,
        })
    }
}

/// GPUs of this machine, visible or not.
pub(crate) fn count() -> Result<usize, String> {
    number("SWITCHYARD_REFERENCE_DEVICES", 1)
}

/// PCI address of a GPU.
pub(crate) fn bus(ordinal: usize) -> String {
    format!("0000:{:02x}:00.0", 0x10 + ordinal)
}

/// Free and total bytes of a GPU.
pub(crate) fn memory_of(ordinal: usize) -> (u64, u64) {
    let known = MACHINE.get().and_then(|machine| {
        let index = machine.ordinals.iter().position(|one| *one == ordinal)?;
        Some(machine.gpus.get(index)?.lock().unwrap_or_else(PoisonError::into_inner).memory())
    });
    known.unwrap_or_else(|| Settings::new().map_or((0, 0), |settings| Gpu::new(settings).memory()))
}

impl Machine {
    fn new() -> Result<Machine, String> {
        let settings = Settings::new()?;
        let faults = settings.faults;
        let devices = count()?;
        let ordinals: Vec<usize> = match std::env::var("CUDA_VISIBLE_DEVICES") {
            // As documented, an invalid name hides itself and all names after it.
            Ok(list) => list.split(',').map_while(|one| named(one, devices)).collect(),
            Err(_) => (0..devices).collect(),
        };
        // With MIG, a process sees a single instance.
        let most = if faults.mig { 1 } else { ordinals.len() };
        let ordinals = ordinals[..ordinals.len().min(most)].to_vec();
        let gpu = |ordinal: &usize| Mutex::new(Gpu::new(Settings { ordinal: *ordinal, ..settings }));
        let gpus = ordinals.iter().map(gpu).collect();
        Ok(Machine { gpus, ordinals, is_busy: faults.busy, exit: faults.exit })
    }

    fn start() -> CallResult<()> {
        if MACHINE.get().is_none() {
            let machine = Machine::new().map_err(|text| {
                crate::finding::explain("cuInit", &text);
                crate::code::INVALID_VALUE
            })?;
            if MACHINE.get_or_init(|| machine).exit {
                crate::finding::never_exit();
            }
        }
        if machine()?.gpus.is_empty() { Err(NO_DEVICE) } else { Ok(()) }
    }
}
