//! Explains errors in logs: finds known errors, the first one among all ranks, and its
//! consequences. Pure: takes lines, returns a diagnosis.
//!
//! ```text
//! line ─> speaker, time ─> known error ─> first hit per rank and error ─> Diagnosis
//! ```
//!
//! Each line is read once and not kept, so memory depends on the number of ranks and known errors
//! rather than the length of the logs.

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

pub use known::{KnownError, Role, known};
pub use verdict::{Attempt, Diagnosis, ErrorLine, Fold};

use aho_corasick::BuildError;
use matcher::Matcher;
use std::collections::BTreeMap;
use time::Moment;

/// Bytes of a line that are searched.
pub const LONGEST_LINE: usize = 1 << 16;
/// Longest timestamp before a line.
const STAMP: usize = 40;
/// Characters of a line kept for display.
const KEPT: usize = 240;
/// Most attempts tracked separately; a job that fails more often fails the same way.
const MAX_ATTEMPTS: usize = 100;
/// Most ranks and logs of an attempt tracked separately.
const MAX_SPEAKERS: usize = 1 << 16;
/// Lines within which torchrun's summary names the exit code and rank of a process.
const SUMMARY_LINES: u64 = 4;

/// The source of a line.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Speaker {
    Rank(u32),
    /// A log of an unknown rank: a node, a launcher, a pod.
    Log(String),
}

/// The first occurrence of an error.
#[derive(Debug, Clone)]
struct Hit {
    known: &'static KnownError,
    /// Time of the line, or of the last line before it with a time.
    time: Option<Moment>,
    log: String,
    line: u64,
    text: String,
    /// Number of occurrences.
    count: u64,
    /// The rank that the line blames.
    blamed: Option<u32>,
    /// Sequence number of the collective that it waited for.
    sequence: Option<u32>,
}

/// The errors of one speaker: the first hit of each known error, by position in the table.
type Hits = BTreeMap<usize, Hit>;

/// Errors seen in an attempt.
#[derive(Debug, Default)]
struct AttemptHits {
    speakers: BTreeMap<Speaker, Hits>,
}

#[derive(Debug)]
pub struct Doctor {
    matcher: Matcher,
    attempts: BTreeMap<Option<u32>, AttemptHits>,
    read: verdict::Counts,
}

/// State of a log that is being read.
#[derive(Debug)]
pub struct Log {
    name: String,
    rank: Option<u32>,
    attempt: Option<u32>,
    year: i16,
    time: Option<Moment>,
    line: u64,
    /// Indentation and speaker of the current traceback.
    traceback: Option<(usize, Speaker)>,
    /// The rank in torchrun's summary, with its line.
    summary: Option<(u32, u64)>,
}

impl Doctor {
    /// Creates a doctor that has not read anything.
    ///
    /// # Errors
    /// The table of known errors is too large for the search; a test rules this out.
    pub fn new() -> Result<Doctor, BuildError> {
        Ok(Doctor { matcher: Matcher::new()?, attempts: BTreeMap::new(), read: verdict::Counts::default() })
    }

    /// Starts a log. `year` applies to times without one, and can be the year of the file.
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
        // Count a log without errors too: it can belong to the rank that the group waits for.
        if let Some(rank) = log.rank {
            self.hits(log.attempt, Speaker::Rank(rank));
        }
        log
    }

    /// Counts skipped bytes of an overlong line.
    pub fn skip_bytes(&mut self, bytes: u64) {
        self.read.bytes += bytes;
    }

    /// Reads the next line of a log, with or without its line feed; only the first [`LONGEST_LINE`]
    /// bytes matter.
    pub fn line(&mut self, log: &mut Log, bytes: &[u8]) {
        log.line += 1;
        self.read.lines += 1;
        self.read.bytes += bytes.len() as u64;
        let end = bytes.iter().rposition(|byte| !matches!(byte, b'\n' | b'\r')).map_or(0, |last| last + 1);
        let bytes = &bytes[..end];
        // Errors are ASCII; the text around them can be anything.
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
        self.handle(log, &text, found);
    }

    /// Reads a line prefixed with the cluster's timestamp, as from `kubectl logs --timestamps`.
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

    /// Handles a line that can contain an error.
    fn handle(&mut self, log: &mut Log, text: &str, found: Option<(usize, &'static KnownError)>) {
        if text.starts_with('{') && self.event(log, text) {
            return;
        }
        let source = speaker(log, text);
        let found = match found {
            // The exception itself is in the last line.
            Some((_, known)) if known.id == "exception" => {
                log.traceback = text.find("Traceback").map(|column| (column, source));
                return;
            }
            Some(found) => Some(found),
            None => self.end_of_traceback(log, text, &source),
        };
        let (found, blamed) = match own_failure(text) {
            // Our ranks repeat the group's message, which is about the rank that it names.
            Some(origin) if source != Speaker::Rank(origin) && is_of_a_rank(log, text) => {
                self.record_silent_rank(log, origin, text, found);
                (self.matcher.position(known::PEER), Some(origin))
            }
            Some(origin) if found.is_some_and(|(_, known)| known.id == known::SILENT) => {
                return self.record_silent_rank(log, origin, text, found);
            }
            Some(_) => (found.or_else(|| self.matcher.position(known::FAILURE)), None),
            None => (found, None),
        };
        let Some((position, known)) = found else { return };
        if log.traceback.as_ref().is_some_and(|(_, speaker)| *speaker == source) && known.role != Role::Remark {
            log.traceback = None;
        }
        let about = subject(log, text).map_or(source, Speaker::Rank);
        self.record_hit(log, about, (position, known), text, blamed);
    }

    /// Handles the last line of a traceback, which contains the exception.
    fn end_of_traceback(
        &mut self,
        log: &mut Log,
        text: &str,
        source: &Speaker,
    ) -> Option<(usize, &'static KnownError)> {
        let (column, speaker) = log.traceback.as_ref()?;
        let rest = text.get(*column..).unwrap_or_default();
        if speaker != source || rest.starts_with([' ', '\t']) || rest.trim().is_empty() {
            return None;
        }
        log.traceback = None;
        self.matcher.position("exception")
    }

    /// Reads a line of `events.jsonl`, or a rank's failure event in its pod's log; returns whether
    /// it was one.
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
            self.record_silent_rank(log, origin, &cause, found);
            log.attempt = before;
        }
        let of_cause = found.filter(|(_, known)| rank == origin && known.role == Role::Cause);
        if let Some(found) = of_cause.or_else(|| self.matcher.position(id)) {
            let attempt = std::mem::replace(&mut log.attempt, attempt);
            self.record_hit(log, Speaker::Rank(rank), found, &cause, blamed);
            log.attempt = attempt;
        }
        true
    }

    /// Records the end of a rank that did not log it itself, as reported by the others.
    fn record_silent_rank(&mut self, log: &Log, origin: u32, text: &str, found: Option<(usize, &'static KnownError)>) {
        if let Some(found) = found.filter(|(_, known)| known.id == known::SILENT) {
            self.record_hit(log, Speaker::Rank(origin), found, text, None);
        }
    }

    fn record_hit(
        &mut self,
        log: &Log,
        speaker: Speaker,
        (position, known): (usize, &'static KnownError),
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
            text: shortened(text),
            count: 1,
            blamed,
            sequence: line::number_after(text, "SeqNum="),
        };
        hits.insert(position, hit);
    }

    /// The errors of a speaker; `None` if there are too many speakers.
    fn hits(&mut self, attempt: Option<u32>, speaker: Speaker) -> Option<&mut Hits> {
        if self.attempts.len() >= MAX_ATTEMPTS && !self.attempts.contains_key(&attempt) {
            return None;
        }
        let speakers = &mut self.attempts.entry(attempt).or_default().speakers;
        if speakers.len() >= MAX_SPEAKERS && !speakers.contains_key(&speaker) {
            return None;
        }
        Some(speakers.entry(speaker).or_default())
    }

    pub fn diagnosis(&self) -> Diagnosis {
        verdict::diagnosis(&self.attempts, self.read)
    }
}

/// The speaker of a line: the rank that it names, the log's rank, or the pod in its prefix.
fn speaker(log: &Log, text: &str) -> Speaker {
    let pod = || text.strip_prefix("[pod/")?.split(['/', ']']).next();
    match line::rank(text).or(log.rank) {
        Some(rank) => Speaker::Rank(rank),
        None => Speaker::Log(pod().unwrap_or(&log.name).to_owned()),
    }
}

/// Whether a rank wrote the line: the log belongs to a rank, or the line names its writer.
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

/// Whether the line can be from our worker.
fn is_own(bytes: &[u8]) -> bool {
    bytes.starts_with(b"{") || own_failure(&String::from_utf8_lossy(&bytes[..bytes.len().min(64)])).is_some()
}

/// Parses `error: rank 1: …`: the rank that failed first, as agreed by the group.
fn own_failure(text: &str) -> Option<u32> {
    let at = text.find("error: rank ")?;
    let rest = &text[at + "error: rank ".len()..];
    let (number, words) = rest.split_once(':')?;
    (!words.is_empty()).then(|| number.parse().ok())?
}

/// A line for display: without control characters, at most a few terminal lines long.
fn shortened(text: &str) -> String {
    let plain = text.trim().chars().map(|letter| if letter.is_control() { ' ' } else { letter });
    let mut shortened: String = plain.take(KEPT).collect();
    if text.trim().chars().nth(KEPT).is_some() {
        shortened.push('…');
    }
    shortened
}
