//! What a program does wrong.
//!
//! A finding ends the process with [`EXIT_CODE`] and one line on standard error. A call that fails instead could be swallowed, as errors of
//! frees are, or be taken for a broken GPU and tried again; a program that is wrong must not get on.

/// The exit code of a process that did something wrong.
pub const EXIT_CODE: i32 = 97;

/// What a line begins with.
pub const PREFIX: &str = "reference CUDA: ";

unsafe extern "C" {
    fn _exit(code: i32) -> !;
    fn atexit(handler: extern "C" fn()) -> i32;
}

pub(crate) fn end(text: &str, seed: u64) -> ! {
    eprintln!("{PREFIX}{text}; seed {seed}");
    // SAFETY: takes a number. Nothing that waits for threads or libraries at the exit of a process runs: some may be in the middle of a call.
    unsafe { _exit(EXIT_CODE) }
}

/// Keeps this process from its end: what runs then never ends.
pub(crate) fn never_exit() {
    extern "C" fn wait() {
        explain("the end of the process", "the driver waits for its device");
        loop {
            std::thread::park();
        }
    }
    // SAFETY: the function is of this library, which is never closed.
    unsafe { atexit(wait) };
}

/// Why a call fails that a program may make: the driver itself gives a number only.
pub(crate) fn explain(call: &str, text: &str) {
    eprintln!("{PREFIX}{call} does not succeed: {text}");
}
