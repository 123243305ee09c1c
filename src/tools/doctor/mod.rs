//! Explains errors in logs: finds known ones, which of them was first among many ranks, and what followed from it. Pure: lines in, a diagnosis
//! out.
//!
//! ```text
//! line ─> who says it, when ─> known error ─> the first of its kind of each rank ─> Diagnosis
//! ```
//!
//! Each line is read once and not kept: memory depends on the number of ranks and known errors, not on the length of the logs.

pub mod flight;
pub mod gang;
mod known;
mod line;
mod matcher;
#[cfg(test)]
mod samples;
#[cfg(test)]
mod tests;
mod time;
mod verdict;

pub use known::{Known, Role, known};
pub use verdict::{Attempt, Diagnosis, Fold, Said};

use aho_corasick::BuildError;
use matcher::Matcher;
use std::collections::BTreeMap;
use time::Moment;

/// Bytes of a line that are searched.
pub const LONGEST_LINE: usize = 1 << 16;
/// Longest timestamp before a line.
const STAMP: usize = 40;
/// Characters of a line that are kept.
const KEPT: usize = 240;
/// Most attempts that are kept apart; a job that fails more often fails the same way.
const MOST_ATTEMPTS: usize = 100;
/// Most ranks and logs of an attempt that are kept apart.
const MOST_SPEAKERS: usize = 1 << 16;
/// Lines within which torchrun's summary names exit code and rank of a process.
const SUMMARY_LINES: u64 = 4;

/// Who logs a line.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Speaker {
    Rank(u32),
    /// A log of unknown rank: a node, a launcher, a pod.
    Log(String),
}

/// The first occurrence of an error.
#[derive(Debug, Clone)]
struct Hit {
    known: &'static Known,
    /// Time of the line, or of the last line before it that has one.
    time: Option<Moment>,
    log: String,
    line: u64,
    text: String,
    /// How often.
    count: u64,
    /// The rank that it blames.
    blamed: Option<u32>,
    /// The collective that it waited for, in the order of the group.
    sequence: Option<u32>,
}

/// The errors of one speaker: the first of each known error, by its position in the table.
type Hits = BTreeMap<usize, Hit>;

/// The state of an attempt.
#[derive(Debug, Default)]
struct Heard {
    speakers: BTreeMap<Speaker, Hits>,
}

/// Reads logs.
#[derive(Debug)]
pub struct Doctor {
    matcher: Matcher,
    attempts: BTreeMap<Option<u32>, Heard>,
    read: verdict::Counts,
}

/// The state of one log that is being read.
#[derive(Debug)]
pub struct Log {
    name: String,
    rank: Option<u32>,
    attempt: Option<u32>,
    year: i16,
    time: Option<Moment>,
    line: u64,
    /// Column and speaker of a traceback that is being read.
    traceback: Option<(usize, Speaker)>,
    /// The rank in a summary of torchrun, and its line.
    summary: Option<(u32, u64)>,
}

impl Doctor {
    /// Nothing read yet.
    ///
    /// # Errors
    /// The table of known errors is too large for the search; a test excludes that.
    pub fn new() -> Result<Doctor, BuildError> {
        Ok(Doctor { matcher: Matcher::new()?, attempts: BTreeMap::new(), read: verdict::Counts::default() })
    }

    /// Begins a log. `year`: for times without one, such as the year of the file.
    pub fn open(&mut self, name: &str, year: i16) -> Log {
        self.read.logs += 1;
        let log = Log {
            name: name.to_owned(),
            rank: line::rank_of_path(name),
            attempt: line::attempt_of_path(name),
            year,
            time: None,
            line: 0,
            traceback: None,
            summary: None,
        };
        // A log without errors counts too: it may be the rank that the group waits for.
        if let Some(rank) = log.rank {
            self.hits(log.attempt, Speaker::Rank(rank));
        }
        log
    }

    /// Counts skipped bytes: the rest of a line that is too long.
    pub fn passed_over(&mut self, bytes: u64) {
        self.read.bytes += bytes;
    }

    /// Takes the next line of a log, with or without its line feed; only the first [`LONGEST_LINE`] bytes are needed.
    pub fn line(&mut self, log: &mut Log, bytes: &[u8]) {
        log.line += 1;
        self.read.lines += 1;
        self.read.bytes += bytes.len() as u64;
        let end = bytes.iter().rposition(|byte| !matches!(byte, b'\n' | b'\r')).map_or(0, |last| last + 1);
        let bytes = &bytes[..end];
        // Errors are ASCII; the text around them may be anything.
        let head = &bytes[..bytes.len().min(256)];
        let head = String::from_utf8_lossy(head);
        log.time = time::moment(&head, log.year).or(log.time);
        if std::str::from_utf8(bytes).is_err() {
            self.read.not_utf8 += 1;
        }
        if let Some(rank) = torchrun_rank(&head) {
            log.summary = Some((rank, log.line));
        }
        let found = self.matcher.find(bytes);
        if found.is_none() && log.traceback.is_none() && !is_own(bytes) {
            return;
        }
        let text = String::from_utf8_lossy(bytes).into_owned();
        self.judge(log, &text, found);
    }

    /// Takes a line with the cluster's timestamp before it, as `kubectl logs --timestamps` does: the line itself follows.
    pub fn stamped_line(&mut self, log: &mut Log, bytes: &[u8]) {
        let split = bytes.iter().take(STAMP).position(|byte| *byte == b' ');
        let stamp = split.and_then(|split| Some((std::str::from_utf8(&bytes[..split]).ok()?, split)));
        match stamp.and_then(|(stamp, split)| Some((stamp.parse::<jiff::Timestamp>().ok()?, stamp, split))) {
            Some((_, stamp, split)) => {
                log.time = time::moment(stamp, log.year).or(log.time);
                self.line(log, &bytes[split + 1..]);
            }
            None => self.line(log, bytes),
        }
    }

    /// A line that may contain an error.
    fn judge(&mut self, log: &mut Log, text: &str, found: Option<(usize, &'static Known)>) {
        if text.starts_with('{') && self.event(log, text) {
            return;
        }
        let said_by = speaker(log, text);
        let found = match found {
            // The exception itself is at its end.
            Some((_, known)) if known.id == "exception" => {
                log.traceback = text.find("Traceback").map(|column| (column, said_by));
                return;
            }
            Some(found) => Some(found),
            None => self.end_of_traceback(log, text, &said_by),
        };
        let (found, blamed) = match own_words(text) {
            // Our ranks repeat the message of the group: it is about the rank that it names.
            Some(origin) if said_by != Speaker::Rank(origin) && is_of_a_rank(log, text) => {
                self.silent(log, origin, text, found);
                (self.matcher.position(known::PEER), Some(origin))
            }
            Some(origin) if found.is_some_and(|(_, known)| known.id == known::SILENT) => {
                return self.silent(log, origin, text, found);
            }
            Some(_) => (found.or_else(|| self.matcher.position(known::FAILURE)), None),
            None => (found, None),
        };
        let Some((position, known)) = found else { return };
        if log.traceback.as_ref().is_some_and(|(_, speaker)| *speaker == said_by) && known.role != Role::Remark {
            log.traceback = None;
        }
        let about = subject(log, text).map_or(said_by, Speaker::Rank);
        self.remember(log, about, (position, known), text, blamed);
    }

    /// The last line of a traceback, which is the exception.
    fn end_of_traceback(&mut self, log: &mut Log, text: &str, said_by: &Speaker) -> Option<(usize, &'static Known)> {
        let (column, speaker) = log.traceback.as_ref()?;
        let rest = text.get(*column..).unwrap_or_default();
        if speaker != said_by || rest.starts_with([' ', '\t']) || rest.trim().is_empty() {
            return None;
        }
        log.traceback = None;
        self.matcher.position("exception")
    }

    /// Reads a line of `events.jsonl`, or the failure of a rank as it stands in the log of its pod; returns whether it was one.
    fn event(&mut self, log: &mut Log, text: &str) -> bool {
        let Ok(value) = serde_json::from_str::<serde_json::Value>(text) else { return false };
        let is_of_pod = value["event"] == "failed" && value["originRank"].is_u64();
        let event = if is_of_pod { &value } else { &value["event"] };
        if event["event"] != "failed" {
            return event.is_object();
        }
        let number = |value: &serde_json::Value| value.as_u64().and_then(|number| u32::try_from(number).ok());
        let (Some(rank), Some(origin)) = (number(&event["rank"]), number(&event["originRank"])) else { return false };
        let cause = event["cause"].as_str().unwrap_or_default().to_owned();
        let attempt = number(&value["attempt"]).or(log.attempt);
        let (id, blamed) = if rank == origin { (known::FAILURE, None) } else { (known::PEER, Some(origin)) };
        let found = self.matcher.find(cause.as_bytes());
        if rank != origin {
            let before = std::mem::replace(&mut log.attempt, attempt);
            self.silent(log, origin, &cause, found);
            log.attempt = before;
        }
        let of_cause = found.filter(|(_, known)| rank == origin && known.role == Role::Cause);
        if let Some(found) = of_cause.or_else(|| self.matcher.position(id)) {
            let attempt = std::mem::replace(&mut log.attempt, attempt);
            self.remember(log, Speaker::Rank(rank), found, &cause, blamed);
            log.attempt = attempt;
        }
        true
    }

    /// A rank that says nothing about its own end has it from the others.
    fn silent(&mut self, log: &Log, origin: u32, text: &str, found: Option<(usize, &'static Known)>) {
        if let Some(found) = found.filter(|(_, known)| known.id == known::SILENT) {
            self.remember(log, Speaker::Rank(origin), found, text, None);
        }
    }

    fn remember(
        &mut self,
        log: &Log,
        speaker: Speaker,
        (position, known): (usize, &'static Known),
        text: &str,
        blamed: Option<u32>,
    ) {
        let Some(hits) = self.hits(log.attempt, speaker) else { return };
        if let Some(hit) = hits.get_mut(&position) {
            hit.count += 1;
            return;
        }
        let hit = Hit {
            known,
            time: log.time,
            log: log.name.clone(),
            line: log.line,
            text: kept(text),
            count: 1,
            blamed,
            sequence: line::number_after(text, "SeqNum="),
        };
        hits.insert(position, hit);
    }

    /// The state of a speaker; `None` if there are too many.
    fn hits(&mut self, attempt: Option<u32>, speaker: Speaker) -> Option<&mut Hits> {
        if self.attempts.len() >= MOST_ATTEMPTS && !self.attempts.contains_key(&attempt) {
            return None;
        }
        let speakers = &mut self.attempts.entry(attempt).or_default().speakers;
        if speakers.len() >= MOST_SPEAKERS && !speakers.contains_key(&speaker) {
            return None;
        }
        Some(speakers.entry(speaker).or_default())
    }

    pub fn diagnosis(&self) -> Diagnosis {
        verdict::diagnosis(&self.attempts, self.read)
    }
}

/// The speaker of a line: the rank that it names, that of the log, or the pod in its prefix.
fn speaker(log: &Log, text: &str) -> Speaker {
    let pod = || text.strip_prefix("[pod/")?.split(['/', ']']).next();
    match line::rank(text).or(log.rank) {
        Some(rank) => Speaker::Rank(rank),
        None => Speaker::Log(pod().unwrap_or(&log.name).to_owned()),
    }
}

/// Whether a line was written by a rank: the log is one of a rank, or the line names the one that wrote it.
fn is_of_a_rank(log: &Log, text: &str) -> bool {
    log.rank.is_some() || line::rank(text).is_some()
}

/// The rank in a launcher's message.
fn subject(log: &Log, text: &str) -> Option<u32> {
    let marks = ["process rank ", "invoked on rank "];
    let named = marks.iter().find_map(|mark| line::number_after(text, mark));
    let ours = || text.contains("(pid ").then(|| line::number_after(text, "rank "))?;
    let summary = || {
        let (rank, line) = log.summary?;
        (text.contains("exitcode") && log.line - line <= SUMMARY_LINES).then_some(rank)
    };
    named.or_else(summary).or_else(ours)
}

/// `rank      : 3 (local_rank: 3)` of torchrun's summary.
fn torchrun_rank(text: &str) -> Option<u32> {
    let rest = text.trim_start().strip_prefix("rank ")?.trim_start();
    rest.contains("local_rank").then(|| line::number_after(rest, ":"))?
}

/// Whether a line may come from our worker.
fn is_own(bytes: &[u8]) -> bool {
    bytes.starts_with(b"{") || own_words(&String::from_utf8_lossy(&bytes[..bytes.len().min(64)])).is_some()
}

/// `error: rank 1: …`: the rank that failed first, as the group agreed.
fn own_words(text: &str) -> Option<u32> {
    let at = text.find("error: rank ")?;
    let rest = &text[at + "error: rank ".len()..];
    let (number, words) = rest.split_once(':')?;
    (!words.is_empty()).then(|| number.parse().ok())?
}

/// A line for display: without control characters, not longer than a few terminal lines.
fn kept(text: &str) -> String {
    let plain = text.trim().chars().map(|letter| if letter.is_control() { ' ' } else { letter });
    let mut kept: String = plain.take(KEPT).collect();
    if text.trim().chars().nth(KEPT).is_some() {
        kept.push('…');
    }
    kept
}
