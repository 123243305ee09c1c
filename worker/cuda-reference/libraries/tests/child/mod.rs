//! Runs programs under test in a child process, which is the same test started again, because a
//! finding ends its process.

use std::process::{Command, Output};

/// Set in a child process: whether it is the correct variant.
const VARIABLE: &str = "CHILD_IS_RIGHT";

/// `None` in the parent; in a child, whether it is the correct variant.
pub fn role() -> Option<bool> {
    std::env::var(VARIABLE).ok().map(|text| text == "true")
}

/// Runs the test of this name as a child.
pub fn start(test: &str, is_right: bool, variables: &[(&str, &str)]) -> Output {
    command(test, is_right).envs(variables.iter().copied()).output().unwrap()
}

/// The command of the child.
pub fn command(test: &str, is_right: bool) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture"]).env(VARIABLE, is_right.to_string()).env_remove("RUST_TEST_THREADS");
    // The machine running the tests may have GPUs.
    command.env_remove("CUDA_VISIBLE_DEVICES");
    command.envs(switchyard_cuda_libraries::environment());
    command
}

/// Checks that the faulty variant ends with a finding under every seed, and the correct one never
/// does.
pub fn finds(test: &str, expected: &str) {
    for seed in ["0", "1", "2", "3"] {
        // As many as any test program needs.
        let variables = [("SWITCHYARD_REFERENCE_SEED", seed), ("SWITCHYARD_REFERENCE_DEVICES", "2")];
        let output = start(test, false, &variables);
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(switchyard_cuda_libraries::finding::EXIT_CODE), "{test}: {output:?}");
        assert!(errors.contains(expected) && errors.contains(&format!("; seed {seed}")), "{test}: {errors}");
        let output = start(test, true, &variables);
        assert!(output.status.success(), "{test} without its misuse: {output:?}");
    }
}

/// A test whose block runs in two variants, correct and with an injected misuse, according to its
/// argument.
macro_rules! misuse_test {
    ($($name:ident: $expected:expr, |$is_right:ident| $program:block)*) => {$(
        #[test]
        fn $name() {
            let program = |$is_right: bool| $program;
            match crate::child::role() {
                Some(is_right) => program(is_right),
                None => crate::child::finds(stringify!($name), $expected),
            }
        }
    )*};
}
pub(crate) use misuse_test;
