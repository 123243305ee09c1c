//! NVTX: named ranges of a thread's activity, which profilers show together with calls and kernels.
//!
//! ```text
//! profiler ── sets NVTX_INJECTION64_PATH ──> attach: opens that library ─┐
//!   its InitializeInjectionNvtx2 requests our tables <───────────────────┘
//!   and writes its functions into the slots that the tables point to
//! range: calls the functions in two of our slots, if any
//! ```
//!
//! CUDA has no library for this: its headers compile the tables into each program, and this module
//! does the same. NVIDIA's `nvtx` crate (2.0) is unsuitable because it compiles those headers, so
//! each build would need a C compiler and libclang. Two functions of the headers are used, push and
//! pop of the default domain; the other slots exist because a tool can fill them. Without a tool, a
//! range costs two memory reads, and its name is not formatted.
#![allow(unsafe_code)]

use crate::error::Error;
use crate::library::{Library, Pointer};
use std::ffi::{CString, OsString, c_char};
use std::fmt::Display;
use std::marker::PhantomData;
use std::path::PathBuf;
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Names a profiler's library; profilers set it for the programs they start.
pub const VARIABLE: &str = "NVTX_INJECTION64_PATH";
/// Library name in errors.
const NAME: &str = "NVTX";
const INITIALISE: &str = "InitializeInjectionNvtx2";

/// Number of functions per module, including the nonexistent function 0. There is no module 0
/// either.
const FUNCTIONS: [usize; 7] = [0, 16, 9, 15, 7, 16, 7];
/// The module of ranges, and its functions.
const CORE: usize = 1;
const RANGE_PUSH: usize = 9;
const RANGE_POP: usize = 11;
/// Tables that a tool can request.
const CALLBACKS: u32 = 1;
const VERSION_INFO: u32 = 3;
/// Version of the headers that define these tables.
const VERSION: u32 = 3;

/// Size for the module with the most functions; tables end with a null pointer.
const MAX_FUNCTIONS: usize = 17;

type Slots = [AtomicPtr<std::ffi::c_void>; MAX_FUNCTIONS];

/// Slots for a tool's functions; null without a tool.
static SLOTS: [Slots; FUNCTIONS.len()] =
    [const { [const { AtomicPtr::new(null_mut()) }; MAX_FUNCTIONS] }; FUNCTIONS.len()];

/// The slot addresses of each module.
struct Tables([[*mut Pointer; MAX_FUNCTIONS]; FUNCTIONS.len()]);

// SAFETY: addresses of statics, which never change.
unsafe impl Sync for Tables {}
// SAFETY: as above.
unsafe impl Send for Tables {}

static TABLES: OnceLock<Tables> = OnceLock::new();
static ATTACHED: OnceLock<Result<bool, Error>> = OnceLock::new();

#[repr(C)]
struct Callbacks {
    bytes: usize,
    table: unsafe extern "C" fn(u32, *mut *const *mut Pointer, *mut u32) -> i32,
}

#[repr(C)]
struct VersionInfo {
    bytes: usize,
    version: u32,
    reserved: u32,
    set_version: unsafe extern "C" fn(u32),
}

static OUR_CALLBACKS: Callbacks = Callbacks { bytes: size_of::<Callbacks>(), table };
static OUR_VERSION: VersionInfo =
    VersionInfo { bytes: size_of::<VersionInfo>(), version: VERSION, reserved: 0, set_version };

type GetTable = unsafe extern "C" fn(u32) -> *const std::ffi::c_void;
type Initialise = unsafe extern "C" fn(GetTable) -> i32;
type Push = unsafe extern "C" fn(*const c_char) -> i32;
type Pop = unsafe extern "C" fn() -> i32;

/// The tables exported to a tool.
unsafe extern "C" fn export_table(kind: u32) -> *const std::ffi::c_void {
    match kind {
        CALLBACKS => (&raw const OUR_CALLBACKS).cast(),
        VERSION_INFO => (&raw const OUR_VERSION).cast(),
        _ => std::ptr::null(),
    }
}

/// Returns a module's table and its length; 0 for an unknown module.
unsafe extern "C" fn table(module: u32, table: *mut *const *mut Pointer, functions: *mut u32) -> i32 {
    let module = module as usize;
    let tables = TABLES.get_or_init(|| {
        let slot = |module: usize, number: usize| match number {
            number if (1..FUNCTIONS[module]).contains(&number) => SLOTS[module][number].as_ptr(),
            _ => null_mut(),
        };
        Tables(std::array::from_fn(|module| std::array::from_fn(|number| slot(module, number))))
    });
    let (Some(found), Some(count @ 1..)) = (tables.0.get(module), FUNCTIONS.get(module)) else { return 0 };
    // SAFETY: both are null or writable memory of the tool.
    unsafe {
        if let Some(table) = table.as_mut() {
            *table = found.as_ptr();
        }
        if let Some(functions) = functions.as_mut() {
            *functions = *count as u32;
        }
    }
    1
}

/// Ignores the tool's version.
unsafe extern "C" fn set_version(_: u32) {}

/// Opens the library named by [`VARIABLE`], if set, for the rest of the process; returns whether a
/// tool is attached. The first call decides.
///
/// # Errors
/// The library cannot be opened, is not a tool's, or the tool fails to start. Ranges then do
/// nothing.
pub fn attach(get: impl Fn(&str) -> Option<OsString>) -> Result<bool, Error> {
    let path = || get(VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from);
    ATTACHED.get_or_init(|| path().map_or(Ok(false), open)).clone()
}

fn open(path: PathBuf) -> Result<bool, Error> {
    let library = Library::open_alone(&path);
    let library = library.map_err(|text| Error::NotLoaded { library: NAME, text: format!("{VARIABLE}: {text}") })?;
    // SAFETY: the signature matches the header.
    let initialise: Initialise = unsafe { library.function(INITIALISE) }?;
    // SAFETY: a tool expects a function that returns tables, which live as long as the process.
    if unsafe { initialise(export_table) } == 0 {
        // A tool that failed to start could have filled some slots.
        SLOTS.iter().flatten().for_each(|slot| slot.store(null_mut(), Ordering::Release));
        let text = format!("{} returned 0, expected another number", path.display());
        return Err(Error::Refused { call: INITIALISE, text });
    }
    Ok(true)
}

/// Whether [`attach`] has attached a tool.
pub fn is_attached() -> bool {
    matches!(ATTACHED.get(), Some(Ok(true)))
}

/// A range of this thread; ends on drop.
#[must_use = "a range ends when it is dropped"]
pub struct Range {
    is_open: bool,
    /// Tools keep a stack per thread.
    of_thread: PhantomData<*const ()>,
}

/// Begins a range, nested in this thread's open ranges. The name is formatted only if a tool is
/// attached.
pub fn range(name: impl Display) -> Range {
    let [push, pop] = [RANGE_PUSH, RANGE_POP].map(|function| SLOTS[CORE][function].load(Ordering::Acquire));
    let is_open = !push.is_null() && !pop.is_null();
    if is_open {
        let name = CString::new(name.to_string().replace('\0', " ")).unwrap_or_default();
        // SAFETY: a tool only puts a function with this signature into this slot; it copies the
        // name.
        let _ = unsafe { std::mem::transmute::<Pointer, Push>(push)(name.as_ptr()) };
    }
    Range { is_open, of_thread: PhantomData }
}

impl Drop for Range {
    fn drop(&mut self) {
        let pop = SLOTS[CORE][RANGE_POP].load(Ordering::Acquire);
        if self.is_open && !pop.is_null() {
            // SAFETY: a tool only puts a function with this signature into this slot.
            let _ = unsafe { std::mem::transmute::<Pointer, Pop>(pop)() };
        }
    }
}

#[cfg(test)]
mod tests;
