//! `switchyard explain`: shows the page of an error code offline, or explains a job's placement.

use crate::args::{Cli, ExplainArgs};
use crate::cluster;
use crate::failure::Failure;
use crate::output::print;
use switchyard_worker_contract::exit::Exit;

/// The pages, one heading per code.
const PAGES: &str = include_str!("../../docs/errors.md");

/// Explains a code or a job.
pub(super) fn explain(cli: &Cli, args: &ExplainArgs) -> Result<Exit, Failure> {
    let digits = args.subject.strip_prefix("SY").or_else(|| args.subject.strip_prefix("sy")).unwrap_or_default();
    let is_code = digits.len() == 4 && digits.bytes().all(|byte| byte.is_ascii_digit());
    if is_code { of_code(&args.subject) } else { cluster::explain(cli, args) }
}

/// Prints the page of a code.
fn of_code(code: &str) -> Result<Exit, Failure> {
    let text = page(code).ok_or_else(|| {
        let known: Vec<&str> = PAGES.lines().filter_map(|line| line.strip_prefix("## ")?.split(' ').next()).collect();
        Failure::usage(format!("no error code `{code}`; known: {}", known.join(", ")))
    })?;
    print(&text);
    Ok(Exit::Done)
}

/// The section of a code, without the heading's marker.
fn page(code: &str) -> Option<String> {
    let heading = format!("## {} ", code.to_uppercase());
    let start = PAGES.find(&heading)? + 3;
    let rest = &PAGES[start..];
    Some(rest[..rest.find("\n## ").unwrap_or(rest.len())].trim_end().to_string())
}

#[cfg(test)]
mod tests {
    use super::page;
    use switchyard_crds::validate::FaultKind;

    #[test]
    fn every_code_of_the_validation_has_a_page() {
        use FaultKind::*;
        for kind in [WrongDocument, UnknownField, WrongType, NotAllowed, OutOfRange, Missing, WrongForm, Rule] {
            assert!(page(kind.code()).is_some_and(|text| text.lines().count() >= 2), "{}", kind.code());
        }
        for code in ["SY0001", "SY0503", "sy0503"] {
            assert!(page(code).is_some(), "{code}");
        }
        assert_eq!(page("SY9999"), None);
    }
}
