//! Programs under test run in a child process: the same test, started again. A finding ends the process that has it.

use std::process::{Command, Output};

/// Set in a child: whether it does it right.
const VARIABLE: &str = "CHILD_IS_RIGHT";

/// Whether this is a child, and which of both it plays.
pub fn role() -> Option<bool> {
    std::env::var(VARIABLE).ok().map(|text| text == "true")
}

/// Runs the test of this name again as a child.
pub fn start(test: &str, is_right: bool, variables: &[(&str, &str)]) -> Output {
    command(test, is_right).envs(variables.iter().copied()).output().unwrap()
}

/// The child, not started.
pub fn command(test: &str, is_right: bool) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture"]).env(VARIABLE, is_right.to_string()).env_remove("RUST_TEST_THREADS");
    // Of a machine that has GPUs.
    command.env_remove("CUDA_VISIBLE_DEVICES");
    command.envs(switchyard_cuda_libraries::environment());
    command
}

/// Checks that a program ends with a finding in every order, and without its fault in none.
pub fn finds(test: &str, expected: &str) {
    for seed in ["0", "1", "2", "3"] {
        // As many as a program may want.
        let variables = [("SWITCHYARD_REFERENCE_SEED", seed), ("SWITCHYARD_REFERENCE_DEVICES", "2")];
        let output = start(test, false, &variables);
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(switchyard_cuda_libraries::finding::EXIT_CODE), "{test}: {output:?}");
        assert!(errors.contains(expected) && errors.contains(&format!("; seed {seed}")), "{test}: {errors}");
        let output = start(test, true, &variables);
        assert!(output.status.success(), "{test} without its fault: {output:?}");
    }
}

/// A test whose block is a program: it is right or has a planted fault, as the block is told.
macro_rules! planted {
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
pub(crate) use planted;
