//! `switchyard lint`: reports problems in manifests, shown in the user's files.

use crate::args::{Cli, LintArgs};
use crate::failure::Failure;
use crate::input;
use crate::output::emit;
use crate::yaml::{self, Duplicate, Node, Shown};
use annotate_snippets::{AnnotationKind, Level, Renderer, Snippet};
use serde::Serialize;
use serde_saphyr::Spanned;
use std::ops::Range;
use std::path::Path;
use switchyard_core::units::{counted, plural};
use switchyard_fabric::lint::{self, Finding, Linted, Options, Severity, Step};
use switchyard_worker_contract::exit::Exit;

/// The exit code when there are errors in the input, as in other linters.
const FOUND: Exit = Exit::Unexpected;

/// A file with its findings.
struct File {
    name: String,
    text: String,
    documents: Vec<(Spanned<Node>, Vec<Linted>)>,
}

/// Checks all files; stops at the first one that cannot be read.
pub(super) fn lint(cli: &Cli, args: &LintArgs) -> Result<Exit, Failure> {
    let options = Options { nccl: args.nccl };
    let files: Vec<File> = args.files.iter().map(|path| read(path, options)).collect::<Result<_, _>>()?;
    emit(cli.output, "LintReport", &report(&files), || screen(&files));
    Ok(if count(&files, Severity::Error) > 0 { FOUND } else { Exit::Done })
}

fn read(path: &Path, options: Options) -> Result<File, Failure> {
    let text = input::read(path, "manifest of at most 16 MiB", input::MANIFESTS)?;
    file(input::name(path), text, options)
}

fn file(name: String, text: String, options: Options) -> Result<File, Failure> {
    let check = |document: Spanned<Node>| {
        let mut linted = lint::lint(&document.value.to_json(), options);
        if let Some(first) = linted.first_mut() {
            first.findings.splice(0..0, yaml::duplicates(&document).iter().map(duplicate));
        }
        (document, linted)
    };
    let documents: Vec<(Spanned<Node>, Vec<Linted>)> = yaml::lenient(&name, &text)?.into_iter().map(check).collect();
    if documents.iter().all(|(_, linted)| linted.is_empty()) {
        return Err(Failure::usage(format!(
            "error[SY0002]: {name}: got nothing that starts pods; expected a TrainJob, PyTorchJob, MPIJob, Job, Pod or the \
             like, or a ConfigMap with an nccl.conf"
        )));
    }
    Ok(File { name, text, documents })
}

/// `duplicate-key`, which only the reader of the text can see.
fn duplicate(duplicate: &Duplicate) -> Finding {
    let field = duplicate.path.iter().fold(lint::Path::default(), |path, part| match part.parse() {
        Ok(index) => path.index(index),
        Err(_) => path.key(part),
    });
    Finding {
        rule: "duplicate-key",
        severity: Severity::Warning,
        field,
        got: duplicate.to_string(),
        why: "most readers of YAML take the last one and say nothing; the API server can refuse the object".into(),
        fix: "merge the two into one".into(),
        link: None,
    }
}

fn findings(files: &[File]) -> impl Iterator<Item = &Finding> {
    let linted = files.iter().flat_map(|file| &file.documents).flat_map(|(_, linted)| linted);
    linted.flat_map(|linted| &linted.findings)
}

fn count(files: &[File], severity: Severity) -> u64 {
    findings(files).filter(|finding| finding.severity == severity).count() as u64
}

/// Position of a finding in the text: its field, or the word in a script.
fn position(text: &str, document: &Spanned<Node>, finding: &Finding) -> Option<Range<usize>> {
    let steps: Vec<String> = finding
        .field
        .steps()
        .iter()
        .map(|step| match step {
            Step::Index(index) => index.to_string(),
            Step::Key(key) => key.clone(),
        })
        .collect();
    let field = yaml::locate(document, steps.iter().map(String::as_str), Shown::Value)?;
    let script = text.get(field.clone()).filter(|script| script.contains('\n'));
    let word = finding.got.split(' ').next().unwrap_or_default();
    match script.and_then(|script| script.rfind(word)) {
        Some(at) => Some(field.start + at..field.start + at + word.len()),
        None if script.is_some() => Some(field.start..field.start + 1),
        None => text.get(field.clone()).map(|_| field),
    }
}

/// Findings with excerpts, followed by the totals.
fn screen(files: &[File]) -> String {
    let mut out = String::new();
    for file in files {
        for (document, linted) in &file.documents {
            for linted in linted {
                for finding in &linted.findings {
                    out.push_str(&excerpt(file, document, linted, finding));
                    out.push_str("\n\n");
                }
            }
        }
    }
    let looked: u64 = files.iter().flat_map(|file| &file.documents).map(|(_, linted)| linted.len() as u64).sum();
    let severities = [Severity::Error, Severity::Warning, Severity::Note];
    let counts = severities.map(|severity| (count(files, severity), severity.word()));
    let found: Vec<String> =
        counts.iter().filter(|(count, _)| *count > 0).map(|(count, word)| counted(*count, word)).collect();
    let found = if found.is_empty() { "nothing found".to_string() } else { found.join(", ") };
    let objects = format!("{looked} object{}", plural(looked));
    out.push_str(&format!("{found} in {objects} of {}", counted(files.len() as u64, "file")));
    out
}

fn excerpt(file: &File, document: &Spanned<Node>, linted: &Linted, finding: &Finding) -> String {
    let level = match finding.severity {
        Severity::Error => Level::ERROR,
        Severity::Warning => Level::WARNING,
        Severity::Note => Level::NOTE,
    };
    let group = level.primary_title(finding.got.clone()).id(finding.rule);
    let group = match position(&file.text, document, finding) {
        Some(range) => {
            let label = AnnotationKind::Primary.span(range).label(finding.field.to_string());
            group.element(Snippet::source(&file.text).path(&file.name).annotation(label))
        }
        None => group.element(Level::NOTE.message(format!("in {}: {}", file.name, finding.field))),
    };
    let mut group = group.element(Level::NOTE.with_name("why").message(finding.why.clone()));
    group = group.element(Level::HELP.with_name("fix").message(finding.fix.clone()));
    let is_one_of_several = file.documents.iter().map(|(_, linted)| linted.len()).sum::<usize>() > 1;
    if is_one_of_several && !linted.name.is_empty() {
        group = group.element(Level::NOTE.with_name("of").message(format!("{} {}", linted.kind_word, linted.name)));
    }
    if let Some(link) = finding.link {
        group = group.element(Level::NOTE.with_name("see").message(link));
    }
    Renderer::styled().render(&[group])
}

/// The report for programs.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Report<'a> {
    errors: u64,
    warnings: u64,
    notes: u64,
    findings: Vec<Row<'a>>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Row<'a> {
    file: &'a str,
    /// Counted from 1, as in editors.
    #[serde(skip_serializing_if = "Option::is_none")]
    line: Option<usize>,
    object_kind: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    object_name: &'a str,
    rule: &'static str,
    severity: &'static str,
    field: String,
    got: &'a str,
    why: &'a str,
    fix: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    link: Option<&'static str>,
}

fn report(files: &[File]) -> Report<'_> {
    let mut rows = Vec::new();
    for file in files {
        for (document, linted) in &file.documents {
            for linted in linted {
                rows.extend(linted.findings.iter().map(|finding| row(file, document, linted, finding)));
            }
        }
    }
    Report {
        errors: count(files, Severity::Error),
        warnings: count(files, Severity::Warning),
        notes: count(files, Severity::Note),
        findings: rows,
    }
}

fn row<'a>(file: &'a File, document: &Spanned<Node>, linted: &'a Linted, finding: &'a Finding) -> Row<'a> {
    let line = position(&file.text, document, finding)
        .and_then(|range| file.text.get(..range.start))
        .map(|before| before.matches('\n').count() + 1);
    Row {
        file: &file.name,
        line,
        object_kind: &linted.kind_word,
        object_name: &linted.name,
        rule: finding.rule,
        severity: finding.severity.word(),
        field: finding.field.to_string(),
        got: &finding.got,
        why: &finding.why,
        fix: &finding.fix,
        link: finding.link,
    }
}

#[cfg(test)]
mod tests;
