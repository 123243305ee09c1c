//! Bad input: every case must produce an error that names the field or file, the actual value and
//! the expected one. It must exit with the documented code and leave nothing behind.

mod case;
mod data;
mod disk_full;
mod fields;
mod files;

/// Regression: `switchyard topo … | head` panicked.
#[test]
fn a_closed_pipe_is_not_an_error() {
    use std::process::{Command, Stdio};
    let program = switchyard_tests::programs().join("switchyard");
    let mut crd =
        Command::new(program).arg("crd").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("starts");
    drop(crd.stdout.take());
    let ended = crd.wait_with_output().expect("ends");
    assert_eq!(ended.status.code(), Some(0));
    assert!(ended.stderr.is_empty(), "{}", String::from_utf8_lossy(&ended.stderr));
}

#[test]
fn there_are_enough_cases() {
    let count = fields::CASES.len() + files::CASES.len() + data::CASES.len();
    assert!(count >= 60, "{count} cases");
}
