//! Findings: misuse of the libraries by the program under test.
//!
//! A finding ends the process with [`EXIT_CODE`] and one line on standard error. A failing call
//! could be ignored, as errors of frees are, or be retried like a hardware failure; a faulty
//! program must not keep running.

/// Exit code of a process with a finding.
pub const EXIT_CODE: i32 = 97;

/// Prefix of the line.
pub const PREFIX: &str = "reference CUDA: ";

unsafe extern "C" {
    fn _exit(code: i32) -> !;
    fn atexit(handler: extern "C" fn()) -> i32;
}

pub(crate) fn report(text: &str, seed: u64) -> ! {
    eprintln!("{PREFIX}{text}; seed {seed}");
    // SAFETY: no preconditions. Skips exit handlers, which could wait for threads in the middle of
    // a call.
    unsafe { _exit(EXIT_CODE) }
}

/// Makes the exit of this process hang.
pub(crate) fn never_exit() {
    extern "C" fn wait() {
        explain("the end of the process", "the driver waits for its device");
        loop {
            std::thread::park();
        }
    }
    // SAFETY: the function is in this library, which is never unloaded.
    unsafe { atexit(wait) };
}

/// Logs why a legal call fails; the driver's API returns only a number.
pub(crate) fn explain(call: &str, text: &str) {
    eprintln!("{PREFIX}{call} fails: {text}");
}
