//! Reads a manifest: YAML with positions, then the API's own validation. Every error is shown in
//! the user's file.

use crate::failure::Failure;
use crate::input;
use crate::yaml::{self, Node, Shown};
use annotate_snippets::{AnnotationKind, Group, Level, Renderer, Snippet};
use serde_json::Value;
use serde_saphyr::Spanned;
use std::ops::Range;
use std::path::Path;
use switchyard_crds::TrainJob;
use switchyard_crds::validate::{self, Fault};

/// Reads and validates the TrainJob in `path` (`-` for standard input). Errors are styled; printing
/// strips the styles if needed.
///
/// # Errors
/// The file cannot be read, is too large, is not YAML, does not contain exactly one document, or is
/// not a valid TrainJob.
pub(crate) fn read(path: &Path) -> Result<TrainJob, Failure> {
    read_document(path).map(|(_, job)| job)
}

/// Like [`read`], with the document as written: without defaults and comments.
///
/// # Errors
/// As [`read`].
pub(crate) fn read_document(path: &Path) -> Result<(Value, TrainJob), Failure> {
    let text = input::read_object(path, "TrainJob")?;
    parse(&input::name(path), &text)
}

fn parse(name: &str, text: &str) -> Result<(Value, TrainJob), Failure> {
    let mut documents = yaml::documents(name, text)?;
    if documents.len() != 1 {
        let got =
            if documents.is_empty() { "no document".to_string() } else { format!("{} documents", documents.len()) };
        return Err(Failure::usage(format!("error[SY0002]: {name}: got {got}; expected one TrainJob in a file")));
    }
    let Some(document) = documents.pop() else {
        return Err(Failure::usage(format!("error[SY0002]: {name}: got no document; expected one TrainJob")));
    };
    let value = document.value.to_json();
    match validate::train_job(&value) {
        Ok(job) => Ok((value, job)),
        Err(faults) => Err(Failure::usage(render(name, text, &document, &faults))),
    }
}

/// Position of a fault: the field's value, or its key if the field itself is wrong; the nearest
/// parent if it is missing.
fn locate(document: &Spanned<Node>, fault: &Fault) -> Option<Range<usize>> {
    let shown = if fault.kind == validate::FaultKind::UnknownField { Shown::Key } else { Shown::Value };
    yaml::locate(document, fault.path.iter().map(String::as_str), shown)
}

fn render(name: &str, text: &str, document: &Spanned<Node>, faults: &[Fault]) -> String {
    let renderer = Renderer::styled();
    let mut out = String::new();
    for fault in faults {
        let field = fault.field();
        let title = if field.is_empty() { fault.message.clone() } else { format!("{field}: {}", fault.message) };
        let mut label = String::new();
        if !fault.got.is_empty() {
            label = format!("got {}", fault.got);
        }
        let mut group: Group<'_> = match locate(document, fault).filter(|range| range.end <= text.len()) {
            Some(range) => Level::ERROR
                .primary_title(title)
                .id(fault.kind.code())
                .element(Snippet::source(text).path(name).annotation(AnnotationKind::Primary.span(range).label(label))),
            None => {
                let location = if label.is_empty() { format!("in {name}") } else { format!("in {name}: {label}") };
                Level::ERROR.primary_title(title).id(fault.kind.code()).element(Level::NOTE.message(location))
            }
        };
        if !fault.expected.is_empty() {
            group = group.element(Level::NOTE.with_name("expected").message(fault.expected.clone()));
        }
        if !fault.help.is_empty() {
            group = group.element(Level::HELP.message(fault.help.clone()));
        }
        out.push_str(&renderer.render(&[group]));
        out.push_str("\n\n");
    }
    out.push_str(&format!("{} error{}; nothing was started", faults.len(), if faults.len() == 1 { "" } else { "s" }));
    out
}

#[cfg(test)]
mod tests {
    use super::parse;

    const GOOD: &str = r#"apiVersion: training.switchyard.dev/v1alpha1
kind: TrainJob
metadata: {name: gpt-source}
spec:
  engine:
    model: {type: GPT, gpt: {layers: 4, hiddenSize: 128, heads: 4, contextLength: 128}}
    data: {path: "."}
    steps: 600
"#;

    fn refused(text: &str) -> String {
        anstream::adapter::strip_str(&parse("job.yaml", text).unwrap_err().message).to_string()
    }

    #[test]
    fn a_good_manifest_is_read_with_defaults() {
        let (_, job) = parse("job.yaml", GOOD).unwrap();
        assert_eq!(job.spec.trainer.num_nodes, 1);
        assert_eq!(job.spec.engine.as_ref().unwrap().optimizer.kind, None);
    }

    #[test]
    fn a_wrong_value_is_shown_in_its_line() {
        let text = refused(&GOOD.replace("heads: 4", "heads: 5"));
        assert!(text.contains("error[SY0100]: spec.engine.model.gpt.heads: heads must divide hiddenSize"), "{text}");
        assert!(text.contains("job.yaml:6:"), "{text}");
        assert!(text.contains("^ got integer 5"), "{text}");
    }

    #[test]
    fn an_unknown_field_is_shown_with_the_nearest_name() {
        let text = refused(&GOOD.replace("steps: 600", "steps: 600\n    bachSizePerProcess: 3"));
        assert!(text.contains("error[SY0003]: spec.engine.bachSizePerProcess: unknown field"), "{text}");
        assert!(text.contains("did you mean `batchSizePerProcess`?") && text.contains("job.yaml:9:5"), "{text}");
    }

    #[test]
    fn documents_are_counted() {
        assert!(refused(&format!("{GOOD}---\n{GOOD}")).contains("got 2 documents; expected one TrainJob"));
        assert!(refused("").contains("got no document"));
        assert!(parse("job.yaml", &format!("---\n{GOOD}")).is_ok(), "a leading marker is no document");
    }

    #[test]
    fn broken_yaml_shows_the_place() {
        let text = refused("apiVersion: [1,\nkind: {");
        assert!(text.contains("error[SY0001]: job.yaml is not valid YAML"), "{text}");
    }

    #[test]
    fn a_key_that_appears_twice_is_refused() {
        assert!(refused(&GOOD.replace("steps: 600", "steps: 600\n    steps: 5")).contains("SY0001"));
    }
}
