//! `switchyard report`: reads a run directory line by line and writes its report.

use crate::args::{Cli, Output, ReportArgs};
use crate::failure::Failure;
use crate::output::{print, width, yaml};
use crate::text::Screen;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use switchyard_core::units::{self, counted, three_digits};
use switchyard_local::RunDir;
use switchyard_tools::report::{Document, Item, Record, Report, html};
use switchyard_worker_contract::exit::Exit;
use switchyard_worker_contract::prediction::Gpu;
use switchyard_worker_contract::record;

/// The HTML page in a run directory.
pub(super) const PAGE: &str = "report.html";
/// The same report as data.
const DATA: &str = "report.json";
/// Most bytes read from a document; the largest are manifests of 1 MiB.
const LONGEST_DOCUMENT: u64 = 8 << 20;
/// Most bytes read from a line; an event has less than 4 KiB.
const LONGEST_LINE: u64 = 1 << 20;

/// Whether the argument is the name of a job in a cluster. An argument with a separator, or an
/// existing path, is a directory.
pub(super) fn is_job(subject: &Path) -> bool {
    subject.components().count() == 1 && !subject.exists()
}

/// Reports on a run directory or a job in a cluster.
pub(super) fn report(cli: &Cli, args: &ReportArgs) -> Result<Exit, Failure> {
    let report = make(&args.subject, args.synthetic.as_deref(), args.device.as_deref())?;
    let page = match &args.out {
        Some(file) => {
            std::fs::write(file, html(&report))
                .map_err(|error| Failure::unexpected(format!("cannot write {}: {error}", file.display())))?;
            file.display().to_string()
        }
        None => write(&RunDir::existing(&args.subject), &report)?,
    };
    match cli.output {
        Output::Json => print(&data(&report)?),
        Output::Yaml => print(&yaml(&report)),
        Output::Table | Output::Dot => print(&format!("{}{}", verdict(&report), advice(&report, &page))),
    }
    Ok(Exit::Done)
}

/// Writes the report of a finished run and returns its summary lines; `None` if nothing was
/// started.
pub(super) fn after_run(run_dir: &RunDir) -> Result<Option<String>, Failure> {
    // A run refused before the start has no plan, and the directory can belong to another run.
    if !run_dir.path().join(Document::Plan.file()).is_file() {
        return Ok(None);
    }
    let report = make(run_dir.path(), None, None)?;
    let page = write(run_dir, &report)?;
    Ok(Some(advice(&report, &page)))
}

/// Writes the page and the data; returns the path of the page.
fn write(run_dir: &RunDir, report: &Report) -> Result<String, Failure> {
    run_dir.replace(DATA, &data(report)?).map_err(Failure::unexpected)?;
    run_dir.replace(PAGE, &html(report)).map_err(Failure::unexpected)?;
    Ok(format!("{}/{PAGE}", run_dir.short()))
}

/// The report as JSON, with the fields in document order.
fn data(report: &Report) -> Result<String, Failure> {
    serde_json::to_string(report)
        .map_err(|error| Failure::unexpected(format!("the report cannot be written as JSON: {error}")))
}

fn make(folder: &Path, synthetic: Option<&Path>, device: Option<&Path>) -> Result<Report, Failure> {
    let mut record = read(folder)?;
    if let Some(other) = synthetic {
        let step = read(other)?.step_ms().ok_or_else(|| {
            Failure::usage(format!("{}: no step is recorded; expected a run of the same job", other.display()))
        })?;
        record.synthetic(step);
    }
    if let Some(file) = device {
        let name = file.display().to_string();
        let text = text(file).map_err(|error| Failure::usage(format!("device file {name}: {error}")))?;
        record.device(Gpu::parse(&text, &name).map_err(|error| Failure::usage(error.to_string()))?);
    }
    Ok(record.report())
}

/// Reads the files that exist in a run directory.
fn read(folder: &Path) -> Result<Record, Failure> {
    if !folder.is_dir() {
        return Err(Failure::usage(format!("{}: expected the directory of a run", folder.display())));
    }
    let mut record = Record::new();
    let mut found = false;
    let mut absent = Vec::new();
    for document in Document::ALL {
        match text(&folder.join(document.file())) {
            Ok(text) => {
                found = true;
                record.document(document, &text);
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => absent.push(document),
            Err(error) => record.note(format!("{} cannot be read: {error}", document.file())),
        }
    }
    missing_documents(&absent).into_iter().for_each(|note| record.note(note));
    match lines(&folder.join("events.jsonl"), |line| record.event_line(line)) {
        Ok(()) => found = true,
        Err(error) => record.note(format!("events.jsonl cannot be read: {error}")),
    }
    for rank in recorded(&folder.join(record::DIR), ".steps.jsonl") {
        let path = folder.join(record::DIR).join(record::steps_file(rank));
        found = true;
        if let Err(error) = lines(&path, |line| record.step_line(rank, line)) {
            record.note(format!("the steps of rank {rank} cannot be read: {error}"));
        }
    }
    for rank in recorded(&folder.join(record::DIR), ".kernels.json") {
        let path = folder.join(record::DIR).join(record::kernels_file(rank));
        match text(&path) {
            Ok(text) => record.kernel_times(rank, &text),
            Err(error) => record.note(format!("the kernels of rank {rank} cannot be read: {error}")),
        }
    }
    for rank in recorded(&folder.join(record::DIR), ".layers.json") {
        match text(&folder.join(record::DIR).join(record::layers_file(rank))) {
            Ok(text) => record.layer_times(rank, &text),
            Err(error) => record.note(format!("the layers of rank {rank} cannot be read: {error}")),
        }
    }
    if !found {
        let expected = "expected the directory of a run, with plan.yaml or events.jsonl";
        return Err(Failure::usage(format!("{}: {expected}", folder.display())));
    }
    Ok(record)
}

/// Documents that a run in a cluster never has.
const LOCAL: [Document; 3] = [Document::Plan, Document::Inspection, Document::Machine];

/// Names the missing documents in a sentence or two.
fn missing_documents(absent: &[Document]) -> Vec<String> {
    let is_of_cluster = LOCAL.iter().all(|document| absent.contains(document));
    let (local, others): (Vec<&Document>, Vec<&Document>) =
        absent.iter().partition(|document| is_of_cluster && LOCAL.contains(document));
    let names =
        |documents: &[&Document]| documents.iter().map(|document| document.file()).collect::<Vec<_>>().join(", ");
    let mut notes = Vec::new();
    if is_of_cluster {
        notes.push(format!("there is no {}: only `switchyard run` writes them", names(&local)));
    }
    notes.extend(others.iter().map(|document| format!("there is no {}", document.file())));
    notes
}

/// The ranks that have a file with this suffix, ascending.
fn recorded(folder: &Path, end: &str) -> Vec<u32> {
    let names = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let rank = |name: &str| name.strip_prefix("rank-")?.strip_suffix(end)?.parse().ok();
    let mut ranks: Vec<u32> = names.filter_map(|name| rank(name.to_str()?)).collect();
    ranks.sort_unstable();
    ranks
}

fn text(path: &Path) -> io::Result<String> {
    let mut bytes = Vec::new();
    File::open(path)?.take(LONGEST_DOCUMENT).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Passes on every non-empty line of a file, holding one line in memory at a time.
fn lines(path: &Path, mut take: impl FnMut(&str)) -> io::Result<()> {
    let mut reader = BufReader::with_capacity(1 << 18, File::open(path)?);
    let mut line = Vec::new();
    loop {
        line.clear();
        if reader.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut line)? == 0 {
            return Ok(());
        }
        if line.len() as u64 == LONGEST_LINE && line.last() != Some(&b'\n') {
            // Too long to be one of our lines: skip the rest.
            reader.skip_until(b'\n')?;
        }
        let text = String::from_utf8_lossy(&line);
        let text = text.trim_end();
        if !text.is_empty() {
            take(text);
        }
    }
}

fn figure(value: Option<f64>) -> String {
    value.map_or_else(|| "-".into(), three_digits)
}

/// Formats how the run went.
fn verdict(report: &Report) -> String {
    let verdict = &report.verdict;
    let steps = verdict.steps.map_or_else(|| "-".into(), |steps| steps.to_string());
    let total = verdict.total_steps.map_or_else(String::new, |total| format!("/{total}"));
    let rate = verdict.items_per_second.map_or_else(String::new, |rate| {
        format!("   {} {}/s", units::rate(rate), verdict.item.as_deref().unwrap_or("items"))
    });
    let mut screen = Screen::new(width());
    screen.line(&format!("{}  {}: {}", report.job, verdict.result, verdict.message));
    screen.line(&format!(
        "        {steps}{total} steps   loss {} -> {} (val {})",
        figure(verdict.first_loss),
        figure(verdict.last_loss),
        figure(verdict.validation_loss)
    ));
    screen.line(&format!(
        "        p50 {} ms, p99 {} ms{rate}",
        figure(verdict.step_ms_p50),
        figure(verdict.step_ms_p99)
    ));
    if verdict.preemptions > 0 {
        let preemptions = counted(verdict.preemptions.into(), "preemption");
        let repeated = counted(verdict.repeated_steps, "step");
        screen.line(&format!("        {preemptions}; restarts repeated {repeated}"));
    }
    if let Some(slowest) = verdict.slowest {
        screen.paragraph("", &format!("slowest: {slowest}"));
    }
    screen.paragraph("", &verdict.sentence.replace('`', ""));
    report.gaps.iter().for_each(|gap| screen.paragraph("gap", &gap.replace('`', "")));
    screen.into_text()
}

/// Formats what would make the run faster.
fn advice(report: &Report, page: &str) -> String {
    let mut screen = Screen::new(width());
    screen.paragraph("report", page);
    if report.advice.is_empty() {
        screen.line("advice: no rule sees more than 1 % of the step to gain");
    } else {
        screen.line("advice (by ms saved per step)");
    }
    for (index, item) in report.advice.iter().enumerate() {
        screen.paragraph(&format!("  {}  {}", index + 1, gain(item)), &words(item));
    }
    report.notes.iter().for_each(|note| screen.paragraph("  note", &note.text));
    // Answer the usual questions even if there is nothing to report.
    let asked = |rule: &str| report.fine.iter().find(|remark| remark.rule == rule).map(|remark| remark.text.clone());
    let fine: Vec<String> = ["input-bound", "communication-bound", "straggler"].into_iter().filter_map(asked).collect();
    if !fine.is_empty() {
        screen.paragraph("  fine", &fine.join("; "));
    }
    screen.into_text()
}

fn gain(item: &Item) -> String {
    match item.gain_ms {
        Some(ms) => format!("~{} ms {}", three_digits(ms), item.basis.word()),
        None if item.urgent => "first".into(),
        None => "not estimated".into(),
    }
}

fn words(item: &Item) -> String {
    let change = item.changes.first().map_or_else(String::new, |change| format!(" Try: {}", change.what));
    format!("{}{change}", item.evidence).replace('`', "")
}

#[cfg(test)]
mod tests {
    use super::{Document, missing_documents};

    /// Regression: "missing there is no plan.yaml" appeared three times, about files that no
    /// cluster job has.
    #[test]
    fn documents_of_local_runs_are_named_together() {
        use Document::{Engine, Inspection, Machine, Plan};
        let together = "there is no plan.yaml, inspection.json, machine.json: only `switchyard run` writes them";
        assert_eq!(missing_documents(&[Plan, Engine, Inspection, Machine]), [together, "there is no engine.json"]);
        assert_eq!(missing_documents(&[Inspection]), ["there is no inspection.json"]);
        assert!(missing_documents(&[]).is_empty());
    }
}
