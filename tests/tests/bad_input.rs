//! Bad input: each case is an error that names the field or file, what was got and what was expected, with the exit code that is
//! documented for it, and leaves nothing behind.

mod case;
mod data;
mod disk_full;
mod fields;
mod files;

/// Found by `switchyard topo … | head`, which panicked.
#[test]
fn a_reader_that_goes_away_is_no_failure() {
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
