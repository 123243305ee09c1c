//! Checks for phrases that a native engineer would not write, and the shape of commit subjects.

use crate::tidy::{caught, none, output_of, read, repository_files};
use regex::{Regex, RegexSet};
use std::sync::LazyLock;

/// A phrase, and how to say it instead.
struct Phrase {
    pattern: Regex,
    instead: &'static str,
}

/// The part of CONTRIBUTING.md's style guide that regular expressions can check.
static PHRASES: LazyLock<Vec<Phrase>> = LazyLock::new(|| {
    [
        (r"(numbers|floats|values|words|types) of (8|16|32|64) bits", "f32, bf16, 16-bit values"),
        (r"\b(GPUs?|libraries|kernels|drivers?|cards?) of NVIDIA\b", "NVIDIA GPUs"),
        (r"\b(crates|programs|images|frameworks) of others\b", "third-party …"),
        (r"\bby way of\b", "via, through"),
        (r"\bgoes on from\b|\bgo on from\b", "resumes from"),
        (r"\bwhoever\b", "name the actor"),
        (r"\bcannot be had\b|\bis had\b", "unavailable, not found"),
        (r"\bfor ever\b", "forever, without end"),
        (r"\bis told\b|\bare told\b|\btells (of|that|the)\b", "logs, reports, receives"),
        (r"\blately\b", "recently"),
        (r"\bnobody knows\b", "unknown"),
        (r"\bis a circle\b|\bcircles? of modules\b", "cycle"),
    ]
    .into_iter()
    .map(|(pattern, instead)| Phrase { pattern: Regex::new(&format!("(?i){pattern}")).expect("a pattern"), instead })
    .collect()
});

/// All patterns in one, because searching a line for each of them takes five times as long.
static PATTERNS: LazyLock<RegexSet> =
    LazyLock::new(|| RegexSet::new(PHRASES.iter().map(|phrase| phrase.pattern.as_str())).expect("patterns"));

/// Third-party texts, files generated from checked ones, and this list.
const LEFT_OUT: [&str; 7] = [
    "LICENSE",
    "docs/results/",
    "charts/switchyard/templates/crds/",
    "crds/generated/",
    "/snapshots/",
    "/golden/",
    "tests/tests/tidy/words.rs",
];
/// Columns of a comment.
const COLUMNS: usize = 100;
/// Longest subject of a commit.
const SUBJECT: usize = 72;

fn is_checked(file: &str) -> bool {
    let is_text = [".rs", ".cu", ".md", ".yaml", ".toml", ".tpl"].iter().any(|end| file.ends_with(end));
    let starts = |part: &&str| file.starts_with(*part) || (part.starts_with('/') && file.contains(*part));
    is_text && !LEFT_OUT.iter().any(starts)
}

/// Faults of a text.
fn check(file: &str, text: &str) -> Vec<String> {
    let mut faults = Vec::new();
    let is_markdown = file.ends_with(".md");
    let mut in_block = false;
    for (number, line) in (1..).zip(text.lines()) {
        let is_comment = file.ends_with(".rs") && line.trim_start().starts_with("//");
        let body = if is_comment { line.trim_start().trim_start_matches(['/', '!']) } else { line };
        if (is_markdown || is_comment) && body.trim_start().starts_with("```") {
            in_block = !in_block;
        }
        in_block &= is_markdown || is_comment;
        // Diagrams and program output, whose source is checked separately.
        if in_block {
            continue;
        }
        for Phrase { pattern, instead } in PATTERNS.matches(line).into_iter().map(|index| &PHRASES[index]) {
            if let Some(found) = pattern.find(line) {
                faults.push(format!("{file}:{number}: `{}`; write: {instead}", found.as_str()));
            }
        }
        let columns = line.chars().count();
        // Links and table rows cannot be wrapped.
        let is_whole = line.contains("http") || body.trim_start().starts_with('|');
        if is_comment && columns > COLUMNS && !is_whole {
            faults.push(format!("{file}:{number}: a comment of {columns} columns; wrap it at {COLUMNS}"));
        }
    }
    faults
}

/// The fault of a commit subject, if any.
fn check_subject(subject: &str) -> Option<String> {
    let length = subject.chars().count();
    if length > SUBJECT {
        return Some(format!("`{subject}`: {length} characters; at most {SUBJECT}, the reason belongs in the body"));
    }
    let area = subject.split_once(": ").filter(|(area, rest)| {
        let is_area = !area.is_empty() && area.chars().all(|c| c.is_ascii_lowercase() || "-_/,. ".contains(c));
        is_area && rest.starts_with(|c: char| c.is_lowercase() || c.is_ascii_digit() || c == '`')
    });
    area.is_none().then(|| format!("`{subject}`: expected `area: imperative summary`"))
}

#[test]
fn texts_read_as_native_english() {
    let files = repository_files().iter().filter(|file| is_checked(file));
    none(&files.filter_map(|file| Some(check(file, &read(file)?))).flatten().collect::<Vec<_>>());
}

#[test]
fn unnatural_phrases_are_caught() {
    let text = "//! Kernels for GPUs of NVIDIA.\n// Numbers of 16 bits go by way of the host.\nfn f() {}\n";
    caught(
        &check("src/a.rs", text),
        &["src/a.rs:1: `GPUs of NVIDIA`", "src/a.rs:2: `Numbers of 16 bits`", "`by way of`"],
    );
    caught(&check("src/a.rs", &format!("    // {}\n", "word ".repeat(20))), &["columns; wrap it at 100"]);
    caught(&check("docs/a.md", "```text\nby way of\n```\nIt goes on from there.\n"), &["docs/a.md:4"]);
    assert_eq!(check("src/a.rs", "// The controller rechecks the node.\n"), [""; 0]);
    assert!(is_checked("docs/install.md") && !is_checked("docs/results/report.txt") && !is_checked("LICENSE"));
}

#[test]
fn commits_have_an_area_and_a_short_subject() {
    // Older subjects cannot be changed.
    let log = output_of("git", &["log", "--no-merges", "--since=2026-11-27T19:00:00Z", "--format=%s"]);
    none(&log.lines().filter_map(check_subject).collect::<Vec<_>>());
}

#[test]
fn malformed_subjects_are_caught() {
    let long = format!("plan: {}", "word ".repeat(20));
    let faults: Vec<String> =
        ["A gang waits", "plan: Wait", long.as_str()].into_iter().filter_map(check_subject).collect();
    caught(&faults, &["`A gang waits`: expected", "`plan: Wait`: expected", "characters; at most 72"]);
    assert_eq!(faults.len(), 3);
    assert_eq!(check_subject("plan, cli: name the pod that waits"), None);
}
