//! `switchyard doctor`: reads logs and reports the first error, its consequences, and what to
//! check.

mod cluster;
mod gpu;

use crate::args::{Cli, DoctorArgs, DoctorCommand};
use crate::failure::Failure;
use crate::live;
use crate::output::{emit, width};
use crate::progress::{Progress, Work};
use crate::text::Screen;
use jiff::Timestamp;
use jiff::tz::TimeZone;
use serde_json::{Value, json};
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use switchyard_core::units::{binary, counted, duration, grouped};
use switchyard_tools::doctor::flight::{AttemptSummary, summaries};
use switchyard_tools::doctor::gang::Gang;
use switchyard_tools::doctor::{Attempt, Diagnosis, Doctor, Fold, LONGEST_LINE};
use switchyard_worker_contract::exit::Exit;
use switchyard_worker_contract::recorder::{self, Recording};

/// Greatest folder depth; `logs/attempt-1/rank-0.log` is at 3.
const DEEPEST: usize = 6;
/// Most files to read in a folder.
const MAX_FILES: usize = 100_000;
/// Extensions of files that are not logs.
const NO_LOGS: [&str; 19] = [
    "safetensors",
    "pt",
    "pth",
    "bin",
    "npy",
    "npz",
    "gz",
    "zst",
    "zip",
    "tar",
    "html",
    "json",
    "key",
    "py",
    "so",
    "png",
    "parquet",
    "tfevents",
    recorder::EXTENSION,
];
/// Bytes between two checks of the clock.
const STRIDE: u64 = 8 << 20;

/// Reads logs and explains them.
pub(super) fn doctor(cli: &Cli, args: &DoctorArgs) -> Result<Exit, Failure> {
    match &args.command {
        Some(DoctorCommand::Gpu(args)) => return gpu::gpu(cli, args),
        Some(DoctorCommand::Cluster(args)) => return cluster::cluster(cli, args),
        None => {}
    }
    let (diagnosis, gang, summaries) = match live::name_in(args) {
        Some(name) => live::diagnose(args, name).map(|(diagnosis, gang)| (diagnosis, Some(gang), Vec::new()))?,
        None => (read_all(cli, &args.logs)?, None, recorded(&args.logs)?),
    };
    let (gang, summaries) = (gang.as_ref(), summaries.as_slice());
    emit(cli.output, "Diagnosis", &data(&diagnosis, gang, summaries), || screen(&diagnosis, gang, summaries, width()));
    Ok(Exit::Done)
}

/// Reads the flight recorders in the folders.
fn recorded(paths: &[PathBuf]) -> Result<Vec<AttemptSummary>, Failure> {
    let mut files = Vec::new();
    for path in paths.iter().filter(|path| path.is_dir()) {
        let unreadable = |error| Failure::usage(format!("cannot read {}: {error}", path.display()));
        collect(path, 1, &is_recorder, &mut files).map_err(unreadable)?;
    }
    // A rank can die before it writes to its recorder. Skip that recorder; the logs are still worth
    // reading.
    let read = |file: &PathBuf| {
        let bytes = std::fs::read(file).map_err(|error| error.to_string());
        let recording = bytes.and_then(|bytes| Recording::read(&bytes));
        recording.inspect_err(|error| eprintln!("warning: {}: {error}", file.display())).ok()
    };
    Ok(summaries(&files.iter().filter_map(read).collect::<Vec<_>>()))
}

/// The diagnosis as data: each attempt with the facts about its gang, and the flight recorders.
fn data(diagnosis: &Diagnosis, gang: Option<&Gang>, summaries: &[AttemptSummary]) -> Value {
    let mut value = json!(diagnosis);
    if !summaries.is_empty() {
        value["recorders"] = json!(summaries);
    }
    if let Some(gang) = gang {
        for (place, attempt) in diagnosis.attempts.iter().enumerate() {
            value["attempts"][place]["facts"] = json!(gang.facts(attempt));
        }
        value["unread"] = json!(gang.unread);
    }
    value
}

fn read_all(cli: &Cli, paths: &[PathBuf]) -> Result<Diagnosis, Failure> {
    let logs = logs(paths)?;
    let mut doctor = Doctor::new().map_err(|error| Failure::unexpected(format!("the table of errors: {error}")))?;
    let total = logs.iter().filter_map(|log| log.metadata().ok()).map(|about| about.len()).sum();
    let mut progress = Progress::new(!cli.quiet, Work { verb: "read", words: binary, total, stride: STRIDE });
    for log in &logs {
        let read = if log == Path::new("-") {
            read(&mut doctor, "standard input", this_year(None), io::stdin().lock(), &mut progress)
        } else {
            let changed = log.metadata().and_then(|about| about.modified()).ok();
            let year = this_year(changed.and_then(|time| Timestamp::try_from(time).ok()));
            File::open(log).and_then(|file| {
                let name = log.display().to_string();
                read(&mut doctor, &name, year, BufReader::with_capacity(1 << 18, file), &mut progress)
            })
        };
        read.map_err(|error| {
            progress.clear();
            Failure::usage(format!("cannot read {}: {error}", log.display()))
        })?;
    }
    progress.clear();
    Ok(doctor.diagnosis())
}

/// The year to assume for timestamps without one.
fn this_year(time: Option<Timestamp>) -> i16 {
    time.unwrap_or_else(Timestamp::now).to_zoned(TimeZone::UTC).year()
}

/// The named files, and every file in the named folders that can be a log.
fn logs(paths: &[PathBuf]) -> Result<Vec<PathBuf>, Failure> {
    let mut found = Vec::new();
    for path in paths {
        let unreadable = |what: &dyn std::fmt::Display| {
            let expected = "expected a log, or a folder with logs";
            Failure::usage(format!("cannot read {}: {what}; {expected}", path.display()))
        };
        if path == Path::new("-") {
            found.push(path.clone());
            continue;
        }
        let about = path.metadata().map_err(|error| unreadable(&error))?;
        if about.is_dir() {
            let before = found.len();
            collect(path, 1, &may_be_log, &mut found).map_err(|error| unreadable(&error))?;
            let mut recorders = Vec::new();
            collect(path, 1, &is_recorder, &mut recorders).map_err(|error| unreadable(&error))?;
            if found.len() == before && recorders.is_empty() {
                return Err(unreadable(&"got a folder without any file that may be a log"));
            }
        } else if about.is_file() {
            found.push(path.clone());
        } else {
            return Err(unreadable(&"got something that is no regular file"));
        }
    }
    Ok(found)
}

fn collect(folder: &Path, depth: usize, wanted: &dyn Fn(&Path) -> bool, found: &mut Vec<PathBuf>) -> io::Result<()> {
    let mut entries: Vec<PathBuf> = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        entries.push(entry?.path());
    }
    entries.sort();
    for path in entries {
        // Do not follow links, which can form cycles.
        let Ok(about) = path.symlink_metadata() else { continue };
        if about.is_dir() && depth < DEEPEST {
            // Skip unreadable subfolders; only the folder itself was requested.
            let _ = collect(&path, depth + 1, wanted, found);
        } else if about.is_file() && wanted(&path) && found.len() < MAX_FILES {
            found.push(path);
        }
    }
    Ok(())
}

fn is_recorder(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == recorder::EXTENSION)
}

fn may_be_log(path: &Path) -> bool {
    let name = path.file_name().map(|name| name.to_string_lossy().to_lowercase()).unwrap_or_default();
    let end = name.rsplit_once('.').map_or("", |(_, end)| end);
    // Step records are large and contain no errors.
    !name.starts_with('.') && !NO_LOGS.contains(&end) && !name.ends_with(".steps.jsonl") && !name.contains("tfevents")
}

/// Passes every line of a log to `doctor`, holding one line in memory at a time.
fn read(doctor: &mut Doctor, name: &str, year: i16, mut from: impl BufRead, progress: &mut Progress) -> io::Result<()> {
    let mut log = doctor.open(name, year);
    let mut line = Vec::new();
    loop {
        line.clear();
        let read = from.by_ref().take(LONGEST_LINE as u64).read_until(b'\n', &mut line)?;
        if read == 0 {
            return Ok(());
        }
        let whole = line.last() == Some(&b'\n');
        doctor.line(&mut log, &line);
        let rest = if !whole && read == LONGEST_LINE { skip_line(&mut from)? } else { 0 };
        doctor.skip_bytes(rest);
        progress.advance(read as u64 + rest);
    }
}

/// Skips the rest of an overlong line; returns its length.
fn skip_line(from: &mut impl BufRead) -> io::Result<u64> {
    let mut skipped = 0;
    loop {
        let (used, ends) = {
            let buffer = from.fill_buf()?;
            match buffer.iter().position(|byte| *byte == b'\n') {
                Some(at) => (at + 1, true),
                None => (buffer.len(), buffer.is_empty()),
            }
        };
        from.consume(used);
        skipped += used as u64;
        if ends {
            return Ok(skipped);
        }
    }
}

/// Formats the diagnosis, the last attempt first.
fn screen(diagnosis: &Diagnosis, gang: Option<&Gang>, summaries: &[AttemptSummary], width: usize) -> String {
    let mut screen = Screen::new(width);
    for AttemptSummary { attempt, text } in summaries.iter().rev() {
        screen.line(&format!("flight recorders of attempt {attempt}:"));
        screen.paragraph(&detail("story"), text);
        screen.line("");
    }
    for attempt in diagnosis.attempts.iter().rev() {
        of_attempt(attempt, gang, &mut screen);
    }
    if !diagnosis.attempts.iter().any(has_error) {
        screen.paragraph("result", "no known error in these logs");
        screen.paragraph(
            "next",
            "if a job failed: give the logs of all ranks and of the launcher, the end of the kernel log of the nodes (dmesg -T), and \
             kubectl describe of the pods; NCCL says more with NCCL_DEBUG=WARN. An error that should be known: send the line with \
             twenty before it",
        );
    }
    let read = &diagnosis.read;
    let mut text = format!("{}, {} lines, {}", counted(read.logs, "log"), grouped(read.lines), binary(read.bytes));
    if read.not_utf8 > 0 {
        text.push_str(&format!("; {} not UTF-8", counted(read.not_utf8, "line")));
    }
    screen.paragraph("read", &text);
    if let Some((gang, first)) = gang.and_then(|gang| Some((gang, gang.unread.first()?))) {
        screen.paragraph("unread", &format!("{}; {first}", counted(gang.unread.len() as u64, "log")));
    }
    screen.into_text()
}

fn has_error(attempt: &Attempt) -> bool {
    attempt.first.is_some() || !attempt.followed.is_empty()
}

fn of_attempt(attempt: &Attempt, gang: Option<&Gang>, screen: &mut Screen) {
    let number = attempt.attempt.map_or_else(String::new, |number| format!(" of attempt {number}"));
    match &attempt.first {
        Some(first) => {
            let time = first.time.as_ref().map_or_else(String::new, |time| format!(", {time}"));
            screen.line(&format!("first error{number}: {} on {}", first.error.id, first.who));
            screen.paragraph(&detail("where"), &format!("{}:{}{time}", first.log, first.line));
            screen.paragraph(&detail("said"), &first.text);
            screen.paragraph(&detail("means"), first.error.means);
            first.error.look.iter().for_each(|look| screen.paragraph(&detail("look"), look));
            for fact in gang.map(|gang| gang.facts(attempt)).unwrap_or_default() {
                screen.paragraph(&detail(fact.about), &fact.text);
            }
            labelled(screen, "before", first.error.told_by);
            labelled(screen, "more", first.error.link);
            screen.paragraph(&detail("basis"), &attempt.basis);
        }
        None if has_error(attempt) => {
            let named = attempt.suspects.as_deref().unwrap_or("not in these logs");
            screen.line(&format!("first error{number}: {named}"));
            screen.paragraph(&detail("basis"), &attempt.basis);
        }
        None => {}
    }
    attempt
        .suspects
        .iter()
        .filter(|_| attempt.first.is_some())
        .for_each(|suspects| screen.paragraph(&detail("suspect"), suspects));
    for (label, folds) in [("other", &attempt.other_causes), ("after", &attempt.followed), ("note", &attempt.remarks)] {
        folds.iter().for_each(|fold| screen.paragraph(label, &folded(fold)));
    }
    screen.line("");
}

fn labelled(screen: &mut Screen, label: &str, text: &str) {
    if !text.is_empty() {
        screen.paragraph(&detail(label), text);
    }
}

/// A label below the name of an error, padded to a common width.
fn detail(label: &str) -> String {
    format!("  {label:<7}")
}

fn folded(fold: &Fold) -> String {
    let after = match fold.after_seconds {
        Some(seconds) if seconds > 0.0 => format!(", {} later", duration(seconds)),
        _ => String::new(),
    };
    format!("{} on {}{after}: {} ({}:{})", fold.error.id, fold.who, fold.error.means, fold.log, fold.line)
}

#[cfg(test)]
mod tests;
