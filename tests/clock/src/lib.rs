//! Shifts the wall clock of a program under test, which loads this library through `LD_PRELOAD`.
//!
//! The file named by `SYTEST_CLOCK_OFFSET` holds whole seconds. Every call rereads it, so the clock
//! jumps when a test writes the file. Monotonic clocks stay correct, as when someone sets a real
//! clock.

use std::ffi::{c_int, c_long};
use std::path::PathBuf;
use std::sync::OnceLock;

#[cfg(target_arch = "x86_64")]
const SYS_CLOCK_GETTIME: c_long = 228;
#[cfg(target_arch = "aarch64")]
const SYS_CLOCK_GETTIME: c_long = 113;
/// `CLOCK_REALTIME` and `CLOCK_REALTIME_COARSE`.
const WALL_CLOCKS: [c_int; 2] = [0, 5];

/// `struct timespec` of a 64-bit Linux.
#[repr(C)]
#[derive(Debug)]
pub struct Timespec {
    seconds: i64,
    nanoseconds: i64,
}

// SAFETY: the C library has this function, with this signature, and `std` is linked with it.
unsafe extern "C" {
    fn syscall(number: c_long, ...) -> c_long;
}

/// Seconds by which the wall clock is off now.
fn offset() -> i64 {
    static FILE: OnceLock<Option<PathBuf>> = OnceLock::new();
    let file = FILE.get_or_init(|| std::env::var_os("SYTEST_CLOCK_OFFSET").map(PathBuf::from));
    let text = file.as_ref().and_then(|file| std::fs::read_to_string(file).ok());
    text.and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

/// Replaces the C library's function.
///
/// # Safety
/// `time` is as for the C library's function: null, or a place for a `timespec`.
// SAFETY: the name is meant to be that of the C library's function, whose contract this one keeps.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clock_gettime(clock: c_int, time: *mut Timespec) -> c_int {
    // SAFETY: the caller gives what the system call asks for; the kernel checks the pointer.
    let answer = unsafe { syscall(SYS_CLOCK_GETTIME, clock, time) };
    if answer == 0 && WALL_CLOCKS.contains(&clock) {
        // SAFETY: the call above wrote a `timespec` there, so the pointer is valid. The caller owns
        // what it points to.
        unsafe { (*time).seconds += offset() };
    }
    answer as c_int
}
