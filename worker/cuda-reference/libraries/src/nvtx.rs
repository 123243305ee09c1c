//! A minimal NVTX profiler: records a program's ranges, and what it enqueues within them.
//!
//! `NVTX_INJECTION64_PATH` loads this library under the name [`RECORDER`](crate::RECORDER). Each
//! process then writes a file, named after its process ID, into the folder in [`VARIABLE`]. A line
//! has a thread number and `push NAME`, `pop`, or `call NAME` for an enqueued launch, product,
//! convolution or graph.

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_void};
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

/// Folder of the recordings; without it the profiler stays inactive.
pub const VARIABLE: &str = "SWITCHYARD_REFERENCE_RANGES";

/// From NVIDIA's headers: callback table, core module, and its functions.
const CALLBACKS: u32 = 1;
const CORE: u32 = 1;
const RANGE_PUSH: usize = 9;
const RANGE_POP: usize = 11;

#[repr(C)]
struct Callbacks {
    bytes: usize,
    table: Option<unsafe extern "C" fn(u32, *mut *mut *mut *const c_void, *mut u32) -> i32>,
}

static FILE: OnceLock<Mutex<File>> = OnceLock::new();
static THREADS: AtomicU32 = AtomicU32::new(0);

thread_local! {
    /// From 1; 0 if not assigned yet.
    static THREAD: Cell<u32> = const { Cell::new(0) };
}

fn write(text: &str) {
    let Some(file) = FILE.get() else { return };
    if THREAD.get() == 0 {
        THREAD.set(1 + THREADS.fetch_add(1, Ordering::Relaxed));
    }
    let mut file = file.lock().unwrap_or_else(PoisonError::into_inner);
    // A single call, so that a killed process leaves whole lines.
    let _ = file.write_all(format!("{} {text}\n", THREAD.get()).as_bytes());
}

/// Records an enqueued operation; does nothing if no profiler is active.
pub(crate) fn queued(name: &str) {
    if FILE.get().is_some() {
        write(&format!("call {name}"));
    }
}

unsafe extern "C" fn push(name: *const c_char) -> i32 {
    // SAFETY: the header's contract makes it a C string.
    write(&format!("push {}", unsafe { CStr::from_ptr(name) }.to_string_lossy()));
    0
}

unsafe extern "C" fn pop() -> i32 {
    write("pop");
    0
}

fn open() -> Option<File> {
    let folder = PathBuf::from(std::env::var_os(VARIABLE)?);
    File::create(folder.join(std::process::id().to_string())).ok()
}

/// Called by a program that has ranges. `get` returns tables of slots for the profiler's functions.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn InitializeInjectionNvtx2(get: unsafe extern "C" fn(u32) -> *const c_void) -> i32 {
    // SAFETY: the program returns a table as in the header, or null.
    let Some(callbacks) = (unsafe { get(CALLBACKS).cast::<Callbacks>().as_ref() }) else { return 0 };
    let Some(file) = open() else { return 0 };
    let (Some(table), true) = (callbacks.table, callbacks.bytes >= size_of::<Callbacks>()) else { return 0 };
    let (mut slots, mut count) = (std::ptr::null_mut(), 0);
    // SAFETY: both are writable.
    if unsafe { table(CORE, &raw mut slots, &raw mut count) } == 0 || count as usize <= RANGE_POP {
        return 0;
    }
    let _ = FILE.set(Mutex::new(file));
    for (number, function) in [(RANGE_PUSH, push as *const c_void), (RANGE_POP, pop as *const c_void)] {
        // SAFETY: the table is longer than the index, and each entry is null or a slot for a
        // function.
        unsafe {
            match slots.add(number).read() {
                place if place.is_null() => return 0,
                place => place.write(function),
            }
        }
    }
    1
}
