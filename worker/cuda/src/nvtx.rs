//! NVTX: names for what a thread does, which a profiler shows above the calls and kernels of that time.
//!
//! ```text
//! profiler ── sets NVTX_INJECTION64_PATH ──> attach: opens that library ──> its InitializeInjectionNvtx2 asks for our tables ──┐
//! range: calls what lies in two of our slots, or nothing   <── writes its functions into the slots that the tables point to ───┘
//! ```
//!
//! CUDA has no library for this: headers bring the tables into each program. So does this module. Not the crate `nvtx` of NVIDIA (2.0): it
//! compiles those headers, for which each build would need a C compiler and libclang. Two functions of the headers are used, push and pop of
//! the default domain; slots for all others are there because a tool may fill them. Without a tool a range is two reads of memory, and its
//! name is not made.
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

/// Names the library of a profiler, which sets it for the programs that it starts.
pub const VARIABLE: &str = "NVTX_INJECTION64_PATH";
/// In errors.
const NAME: &str = "NVTX";
const INITIALISE: &str = "InitializeInjectionNvtx2";

/// Functions of each module, with the one of number 0, which there is not. Module 0 is none either.
const FUNCTIONS: [usize; 7] = [0, 16, 9, 15, 7, 16, 7];
/// The module of ranges, and its functions.
const CORE: usize = 1;
const RANGE_PUSH: usize = 9;
const RANGE_POP: usize = 11;
/// What a tool can ask for.
const CALLBACKS: u32 = 1;
const VERSION_INFO: u32 = 3;
/// Of the headers whose tables these are.
const VERSION: u32 = 3;

/// Of the module with the most functions; tables end with a null.
const LONGEST: usize = 17;

type Slots = [AtomicPtr<std::ffi::c_void>; LONGEST];

/// Where a tool puts its functions; null: nobody wants to know.
static SLOTS: [Slots; FUNCTIONS.len()] = [const { [const { AtomicPtr::new(null_mut()) }; LONGEST] }; FUNCTIONS.len()];

/// For each module the addresses of its slots.
struct Tables([[*mut Pointer; LONGEST]; FUNCTIONS.len()]);

// SAFETY: addresses of statics, which nobody changes.
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

/// What a tool may have of us.
unsafe extern "C" fn export_table(kind: u32) -> *const std::ffi::c_void {
    match kind {
        CALLBACKS => (&raw const OUR_CALLBACKS).cast(),
        VERSION_INFO => (&raw const OUR_VERSION).cast(),
        _ => std::ptr::null(),
    }
}

/// Gives the table of a module, and its length; 0 for a module that there is not.
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
    // SAFETY: both are null or the tool's to be written.
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

/// A tool tells its own version, which changes nothing.
unsafe extern "C" fn set_version(_: u32) {}

/// Opens the library that [`VARIABLE`] names, if it is set, for all of the process; whether a tool is attached. The first call decides.
///
/// # Errors
/// The library cannot be opened, is none of a tool, or its tool does not start. Ranges then do nothing.
pub fn attach(get: impl Fn(&str) -> Option<OsString>) -> Result<bool, Error> {
    let path = || get(VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from);
    ATTACHED.get_or_init(|| path().map_or(Ok(false), open)).clone()
}

fn open(path: PathBuf) -> Result<bool, Error> {
    let library = Library::open_alone(&path);
    let library = library.map_err(|text| Error::NotLoaded { library: NAME, text: format!("{VARIABLE}: {text}") })?;
    // SAFETY: the signature is the one in the header.
    let initialise: Initialise = unsafe { library.function(INITIALISE) }?;
    // SAFETY: a tool expects a function that gives tables, which live as long as the process.
    if unsafe { initialise(export_table) } == 0 {
        // A tool that does not start may have filled some.
        SLOTS.iter().flatten().for_each(|slot| slot.store(null_mut(), Ordering::Release));
        let text = format!("{} returned 0, expected another number", path.display());
        return Err(Error::Refused { call: INITIALISE, text });
    }
    Ok(true)
}

/// Whether [`attach`] has found a tool.
pub fn is_attached() -> bool {
    matches!(ATTACHED.get(), Some(Ok(true)))
}

/// A range of this thread, which ends when this is dropped.
#[must_use = "a range ends when it is dropped"]
pub struct Range {
    is_open: bool,
    /// Tools keep a stack for each thread.
    of_thread: PhantomData<*const ()>,
}

/// Begins a range within those that this thread has begun. The name is made only if a tool is attached.
pub fn range(name: impl Display) -> Range {
    let [push, pop] = [RANGE_PUSH, RANGE_POP].map(|function| SLOTS[CORE][function].load(Ordering::Acquire));
    let is_open = !push.is_null() && !pop.is_null();
    if is_open {
        let name = CString::new(name.to_string().replace('\0', " ")).unwrap_or_default();
        // SAFETY: a tool puts only a function of this signature into this slot; it copies the name.
        let _ = unsafe { std::mem::transmute::<Pointer, Push>(push)(name.as_ptr()) };
    }
    Range { is_open, of_thread: PhantomData }
}

impl Drop for Range {
    fn drop(&mut self) {
        let pop = SLOTS[CORE][RANGE_POP].load(Ordering::Acquire);
        if self.is_open && !pop.is_null() {
            // SAFETY: a tool puts only a function of this signature into this slot.
            let _ = unsafe { std::mem::transmute::<Pointer, Pop>(pop)() };
        }
    }
}

#[cfg(test)]
mod tests;
