//! Bad input: each case is an error that names the field or file, what was got and what was expected, with the exit code that is
//! documented for it, and leaves nothing behind.
#![forbid(unsafe_code)]

#[path = "bad_input/case.rs"]
mod case;
#[path = "bad_input/data.rs"]
mod data;
#[path = "bad_input/disk_full.rs"]
mod disk_full;
#[path = "bad_input/fields.rs"]
mod fields;
#[path = "bad_input/files.rs"]
mod files;

#[test]
fn there_are_enough_cases() {
    let count = fields::CASES.len() + files::CASES.len() + data::CASES.len();
    assert!(count >= 60, "{count} cases");
}
