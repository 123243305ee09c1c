//! Form of entries: names, lines, lengths, duplicates.

use super::{Findings, Message, Severity};
use crate::lint::view::{Container, Origin, Setting, Variable};
use crate::variables::is_name;
use crate::variables::nccl::{self, MAX_VALUE_LEN};

/// Whether other rules can judge the variable.
pub(super) fn is_usable(variable: &Variable) -> bool {
    variable.origin != Origin::Conf || is_name(&variable.name) && variable.setting != Setting::Absent
}

/// `not-text`, `too-long` and `conf-line`.
pub(super) fn check(variable: &Variable, found: &mut Findings) {
    if let Setting::NotText(value) = &variable.setting {
        let why = "values of environment variables are strings, and YAML takes this for something else: the API server refuses it";
        let fix = format!("write value: {:?}", value.trim_matches('"'));
        found.add("not-text", Severity::Error, &variable.path, Message::of(variable, why, fix));
    }
    let length = variable.text().map_or(0, |value| value.chars().count());
    if length > MAX_VALUE_LEN && variable.name.starts_with(nccl::PREFIX) {
        // It works in the environment, but cannot be moved to a file.
        let severity = if variable.origin == Origin::Conf { Severity::Error } else { Severity::Warning };
        let why = format!("NCCL cuts lines of nccl.conf after {MAX_VALUE_LEN} characters without a word");
        let fix = "shorten it: prefixes instead of lists, or a file that the variable names";
        found.add("too-long", severity, &variable.path, Message::of(variable, why, fix));
    }
    if variable.origin == Origin::Conf {
        conf_line(variable, found);
    }
}

fn conf_line(variable: &Variable, found: &mut Findings) {
    let value = variable.text().unwrap_or_default();
    let bare_name = variable.name.trim().trim_start_matches("export ").trim();
    let bare_value = value.trim().trim_matches(['"', '\'']);
    let is_quoted = value.starts_with(['"', '\'']);
    if is_name(&variable.name) && variable.setting != Setting::Absent && value == value.trim() && !is_quoted {
        return;
    }
    let why = "NCCL splits the line at the first `=` and trims nothing: spaces, quotes and `export` become part of name or value";
    let fix = if is_name(bare_name) && !bare_value.is_empty() {
        format!("write {bare_name}={bare_value}")
    } else {
        "write NAME=value, or begin the line with #".to_owned()
    };
    found.add("conf-line", Severity::Error, &variable.path, Message::of(variable, why, fix));
}

/// `duplicate-name`.
pub(super) fn duplicates(container: &Container, found: &mut Findings) {
    for (index, variable) in container.variables.iter().enumerate().filter(|(_, one)| one.origin != Origin::Command) {
        let same = |other: &&Variable| {
            other.name == variable.name && other.origin == variable.origin && other.path.list() == variable.path.list()
        };
        // Report duplicates once, at the last entry.
        let Some(first) = container.variables[..index].iter().find(same) else { continue };
        if container.variables[index + 1..].iter().any(|other| same(&other)) {
            continue;
        }
        let differs = first.setting != variable.setting;
        let severity = if differs { Severity::Error } else { Severity::Warning };
        let (why, keep) = if variable.origin == Origin::Conf {
            ("the first one counts: NCCL does not set a variable that is set", first)
        } else {
            ("the last one counts, and server-side apply refuses the list", variable)
        };
        let got = format!("{} and {}", first.words(), variable.words());
        let fix = format!("keep one of them; {} is what counts today", keep.words());
        found.add("duplicate-name", severity, &variable.path, Message::new(got, why, fix));
    }
}
