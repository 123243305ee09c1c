//! Checks that paths named in the documentation exist.

use crate::tidy::{caught, none, read, repository_files, rust_files};
use switchyard_tests::documents::{SHELLS, blocks_in, documents};
use switchyard_tests::root;

/// Repository folders that identify a path.
const FOLDERS: [&str; 14] = [
    ".cargo",
    ".ci",
    ".github",
    "charts",
    "crds",
    "docs",
    "examples",
    "node-agent",
    "scripts",
    "shared",
    "src",
    "tests",
    "worker",
    "xtask",
];

/// Output folders, whose files need not exist.
const WRITTEN: [&str; 1] = ["docs/results/"];

/// Whether this document is checked.
fn is_document(file: &str) -> bool {
    file.ends_with(".md") && (!file.contains('/') || file.starts_with("docs/") || file.starts_with(".github/"))
}

/// Text between single backticks outside code blocks, with line numbers.
fn code_spans(text: &str) -> Vec<(usize, &str)> {
    let mut spans = Vec::new();
    let mut in_block = false;
    for (index, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            in_block = !in_block;
        } else if !in_block {
            spans.extend(line.split('`').skip(1).step_by(2).map(|span| (index + 1, span)));
        }
    }
    spans
}

/// Expands `a/{b,c}.rs` to `a/b.rs` and `a/c.rs`.
fn alternatives(path: &str) -> Vec<String> {
    let Some((before, rest)) = path.split_once('{') else { return vec![path.to_string()] };
    let Some((list, after)) = rest.split_once('}') else { return vec![path.to_string()] };
    list.split(',').flat_map(|word| alternatives(&format!("{before}{}{after}", word.trim()))).collect()
}

/// Repository paths in a code span. For a pattern, the part before the first `*`.
fn paths(span: &str) -> Vec<String> {
    let is_file_of_the_root = !span.contains('/') && [".md", ".toml"].iter().any(|end| span.ends_with(end));
    let is_below_a_folder = span.split_once('/').is_some_and(|(first, _)| FOLDERS.contains(&first));
    let is_path = span.chars().all(|c| c.is_ascii_alphanumeric() || "._-/{},*".contains(c));
    if !is_path || !(is_file_of_the_root || is_below_a_folder) {
        return Vec::new();
    }
    let fixed = |path: String| match path.split_once('*') {
        Some((before, _)) => before.rsplit_once('/').map_or(String::new(), |(folder, _)| folder.to_string()),
        None => path,
    };
    alternatives(span).into_iter().map(fixed).filter(|path| !path.is_empty()).collect()
}

fn check(file: &str, text: &str, exists: impl Fn(&str) -> bool) -> Vec<String> {
    let mut faults = Vec::new();
    for (line, span) in code_spans(text) {
        let missing = |path: &String| !exists(path) && !WRITTEN.iter().any(|folder| path.starts_with(folder));
        for path in paths(span).into_iter().filter(missing) {
            faults.push(format!("{file}:{line}: `{path}` does not exist"));
        }
    }
    faults
}

/// Prefixes of a command line.
const COMMANDS: [&str; 6] = ["$ ", "switchyard ", "kubectl ", "helm ", "cargo ", "target/release/"];

/// Finds command blocks without a declared environment, and commands in blocks of another language.
fn check_blocks(file: &str, text: &str) -> Vec<String> {
    let mut faults: Vec<String> = blocks_in(file, text).iter().filter_map(|block| block.class().err()).collect();
    let mut language: Option<&str> = None;
    for (index, line) in text.lines().enumerate() {
        match (line.trim_start().strip_prefix("```"), language) {
            (Some(info), None) => language = Some(info.split(' ').next().unwrap_or_default()),
            (Some(_), Some(_)) => language = None,
            (None, Some(name)) if !SHELLS.contains(&name) && COMMANDS.iter().any(|word| line.starts_with(word)) => {
                faults.push(format!("{file}:{}: a command in a block of `{name}`; expected sh or console", index + 1));
            }
            _ => {}
        }
    }
    faults
}

/// Block languages that can be excerpts.
const EXCERPTS: [&str; 2] = ["text", "yaml"];

/// Lines of a `text FILE` or `yaml FILE` block that are missing from that file.
fn check_excerpts(file: &str, text: &str, read: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let mut faults = Vec::new();
    let mut from: Option<(&str, String)> = None;
    for (index, line) in text.lines().enumerate() {
        match (line.strip_prefix("```"), &from) {
            (Some(info), None) => {
                let source = info.split_once(' ').filter(|(language, _)| EXCERPTS.contains(language));
                from = source.map(|(_, source)| (source, read(source).unwrap_or_default()));
            }
            (Some(_), Some(_)) => from = None,
            (None, Some((source, whole))) if !whole.lines().any(|known| known == line) => {
                faults.push(format!("{file}:{}: this line is not in {source}", index + 1));
            }
            (None, _) => {}
        }
    }
    faults
}

#[test]
fn excerpts_match_their_files() {
    let documents = documents().unwrap_or_else(|error| panic!("{error:#}"));
    let readme = read("README.md").unwrap_or_default();
    assert!(["```text docs/results/", "```yaml examples/"].iter().all(|begin| readme.contains(begin)));
    none(
        &documents
            .iter()
            .flat_map(|file| check_excerpts(file, &read(file).unwrap_or_default(), read))
            .collect::<Vec<_>>(),
    );
}

#[test]
fn stale_excerpts_are_caught() {
    let text = "```yaml a.txt\none\nthree\n```\n```text\nfour\n```\n```text gone.txt\nfive\n```\n";
    let faults = check_excerpts("docs/x.md", text, |name| (name == "a.txt").then(|| "one\ntwo\n".into()));
    caught(&faults, &["docs/x.md:3: this line is not in a.txt", "docs/x.md:9: this line is not in gone.txt"]);
}

#[test]
fn every_command_block_has_a_class() {
    let documents = documents().unwrap_or_else(|error| panic!("{error:#}"));
    assert!(documents.len() > 20 && documents.iter().any(|file| file == "docs/install.md"), "{documents:?}");
    none(&documents.iter().flat_map(|file| check_blocks(file, &read(file).unwrap_or_default())).collect::<Vec<_>>());
}

#[test]
fn unclassified_blocks_are_caught() {
    let text = "```sh local\nswitchyard topo\n```\n```sh\nswitchyard topo\n```\n```text\n$ switchyard topo\n```\n```\nkubectl get\n```\n";
    let faults = check_blocks("docs/x.md", text);
    assert_eq!(faults.len(), 3, "{faults:#?}");
    caught(
        &faults,
        &["docs/x.md:4: block class", "docs/x.md:8: a command in a block of `text`", "docs/x.md:11: a command"],
    );
}

#[test]
fn documented_paths_exist() {
    let exists = |path: &str| root().join(path).exists();
    let documents = repository_files().iter().filter(|file| is_document(file));
    let faults: Vec<String> = documents.flat_map(|file| check(file, &read(file).unwrap_or_default(), exists)).collect();
    none(&faults);
}

#[test]
fn missing_paths_are_caught() {
    let text = "See `src/plan/mod.rs` and `src/{plan,gone}.rs`, `docs/*.md`, `gone.toml`.\n```\n`src/in/a/block.rs`\n```\n\
                Not paths: `tokens/s`, `cargo run src/x`, `runs/job-1/status.yaml`, `docs/results/step.json`, `gone/*.rs`, `worker`. `crds/away/`";
    let faults = check("README.md", text, |path| ["src/plan/mod.rs", "src/plan.rs", "docs"].contains(&path));
    assert_eq!(
        faults,
        [
            "README.md:1: `src/gone.rs` does not exist",
            "README.md:1: `gone.toml` does not exist",
            "README.md:5: `crds/away/` does not exist",
        ]
    );
}

/// Quoted texts in the first column of a table, with line numbers.
fn quoted(text: &str) -> Vec<(usize, &str)> {
    let rows = text.lines().enumerate().filter(|(_, line)| line.starts_with("| "));
    let first = rows.filter_map(|(at, line)| Some((at + 1, line.split('|').nth(1)?)));
    first.flat_map(|(at, cell)| cell.split('"').skip(1).step_by(2).map(move |quote| (at, quote))).collect()
}

/// Quotations that no program prints. A number or `…` matches any text.
fn check_quotations(file: &str, text: &str, source: &str) -> Vec<String> {
    let is_open = |letter: char| letter == '…' || letter.is_ascii_digit();
    let mut faults = Vec::new();
    for (line, quote) in quoted(text) {
        let parts = quote.split(is_open).map(str::trim).filter(|part| part.len() > 3);
        for part in parts.filter(|part| !source.contains(part)) {
            faults.push(format!("{file}:{line}: nothing prints `{part}`"));
        }
    }
    faults
}

/// Regression: troubleshooting.md quoted messages that no program had printed for months.
#[test]
fn quoted_messages_are_printed_somewhere() {
    let product = rust_files().iter().filter(|file| file.path.starts_with("src/"));
    let source: String = product.map(|file| file.text.as_str()).collect();
    let joined = source.split("\\\n").map(str::trim_start).collect::<String>();
    let file = "docs/troubleshooting.md";
    let text = read(file).unwrap_or_default();
    assert!(quoted(&text).len() > 20, "{:?}", quoted(&text));
    none(&check_quotations(file, &text, &joined));
}

#[test]
fn unprinted_messages_are_caught() {
    let text = "| a | b |\n|---|---|\n| Running, \"ends after 5 tries\", \"never … said\" | \"not here\" |\n";
    let faults = check_quotations("docs/x.md", text, "format!(\"ends after {tries} tries\")");
    assert_eq!(faults, ["docs/x.md:3: nothing prints `never`", "docs/x.md:3: nothing prints `said`"]);
}

/// Checks the test names in the last column of the administrators' tables.
fn check_tests(file: &str, text: &str, source: &str) -> Vec<String> {
    let rows = text.lines().enumerate().filter(|(_, line)| line.starts_with("| ") && !line.ends_with("| test |"));
    let named = rows.flat_map(|(at, line)| {
        let last = line.trim_end_matches(" |").rsplit(" | ").next().unwrap_or_default();
        last.split('`').skip(1).step_by(2).map(move |name| (at + 1, name))
    });
    let is_test = |name: &str| name.len() > 20 && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    let missing = named.filter(|(_, name)| is_test(name) && !source.contains(&format!("fn {name}(")));
    missing.map(|(line, name)| format!("{file}:{line}: no test is named `{name}`")).collect()
}

#[test]
fn tests_named_in_the_operations_page_exist() {
    let source: String = rust_files().iter().map(|file| file.text.as_str()).collect();
    let text = read("docs/operations.md").unwrap_or_default();
    assert!(text.matches("| test |").count() == 2, "two tables name their tests");
    none(&check_tests("docs/operations.md", &text, &source));
}

#[test]
fn unknown_test_names_are_caught() {
    let text = "| a | b | test |\n|---|---|---|\n| x | y | `a_test_that_is_there_and_long`, `a_test_that_is_not_there_any_more` |\n";
    let faults = check_tests("docs/x.md", text, "fn a_test_that_is_there_and_long() {");
    assert_eq!(faults, ["docs/x.md:3: no test is named `a_test_that_is_not_there_any_more`"]);
}
