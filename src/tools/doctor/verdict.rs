//! Finds the first of many errors, and its consequences.

use super::known::{KnownError, Role};
use super::time::Moment;
use super::{AttemptHits, Hit, Hits, Speaker};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use switchyard_core::units::rank_list;

/// A cause reported up to this many microseconds after the first consequence still counts: peers
/// see a connection close immediately, while launchers poll their processes every few seconds and
/// node clocks differ.
const LATE: u64 = 60_000_000;
/// Most log names listed; the rest are counted.
const LISTED: usize = 8;

/// Amount of input read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Counts {
    pub logs: u64,
    pub bytes: u64,
    pub lines: u64,
    /// Lines that are not valid UTF-8, which are read anyway.
    pub not_utf8: u64,
}

/// The result of a diagnosis.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Diagnosis {
    /// Amount of input.
    pub read: Counts,
    /// Attempts with known errors, in order.
    pub attempts: Vec<Attempt>,
}

/// The errors of an attempt.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Attempt {
    /// Its number, if the logs' names contain it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attempt: Option<u32>,
    /// The first error; absent if all known errors follow from something outside these logs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first: Option<ErrorLine>,
    /// Why it is considered the first.
    pub basis: String,
    /// Where to look if the cause is not in these logs, or if the ranks wait for one of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub suspects: Option<String>,
    /// Other errors that are causes.
    pub other_causes: Vec<Fold>,
    pub followed: Vec<Fold>,
    pub remarks: Vec<Fold>,
}

/// A known error in a log.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ErrorLine {
    #[serde(flatten)]
    pub error: Explained,
    /// The speaker: `rank 13`, or the name of the log.
    pub who: String,
    /// The rank, if known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    pub log: String,
    /// Line number, from 1.
    pub line: u64,
    /// Time as in the log, or of the last line before it with a time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub time: Option<String>,
    /// The line itself.
    pub text: String,
}

/// An error in the table, for display.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Explained {
    /// Its id.
    pub id: &'static str,
    /// How it relates to others.
    pub role: &'static str,
    /// What it means.
    pub means: &'static str,
    /// What to check.
    pub look: &'static [&'static str],
    /// The check that would have found it before the start.
    #[serde(skip_serializing_if = "str::is_empty")]
    pub told_by: &'static str,
    /// Further reading.
    #[serde(skip_serializing_if = "str::is_empty")]
    pub link: &'static str,
}

/// The same error from several speakers.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Fold {
    #[serde(flatten)]
    pub error: Explained,
    /// The speakers.
    pub who: String,
    /// Total count.
    pub count: u64,
    /// Seconds from the attempt's first error to this one, if both have a time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after_seconds: Option<f64>,
    /// The log with its first occurrence.
    pub log: String,
    /// Line number there, from 1.
    pub line: u64,
    /// The line itself.
    pub text: String,
}

impl Explained {
    fn new(known: &'static KnownError) -> Explained {
        let KnownError { id, means, look, told_by, link, .. } = *known;
        Explained { id, role: known.role.word(), means, look, told_by, link }
    }
}

/// A hit with its speaker.
type Heading<'a> = (&'a Speaker, &'a Hit);

pub(super) fn diagnosis(attempts: &BTreeMap<Option<u32>, AttemptHits>, read: Counts) -> Diagnosis {
    let has_hits = |attempt_hits: &&AttemptHits| attempt_hits.speakers.values().any(|hits| !hits.is_empty());
    let attempts = attempts.iter().filter(|(_, attempt_hits)| has_hits(attempt_hits));
    Diagnosis { read, attempts: attempts.map(|(attempt, attempt_hits)| of_attempt(*attempt, attempt_hits)).collect() }
}

fn of_attempt(attempt: Option<u32>, attempt_hits: &AttemptHits) -> Attempt {
    let all: Vec<Heading<'_>> =
        attempt_hits.speakers.iter().flat_map(|(speaker, hits)| hits.values().map(move |hit| (speaker, hit))).collect();
    let (first, basis) = first(&all);
    let others = |roles: &[Role]| {
        let is_other = |heading: &&Heading<'_>| first.is_none_or(|first| !std::ptr::eq(heading.1, first.1));
        let meant: Vec<Heading<'_>> =
            all.iter().filter(is_other).filter(|(_, hit)| roles.contains(&hit.known.role)).copied().collect();
        fold(&meant, first.and_then(|(_, hit)| hit.time))
    };
    Attempt {
        attempt,
        first: first.map(error_line),
        basis,
        suspects: suspects(&all, &attempt_hits.speakers, first),
        other_causes: others(&[Role::Cause]),
        followed: others(&[Role::Symptom, Role::General, Role::Follower]),
        remarks: others(&[Role::Remark]),
    }
}

/// The first error, with the reason for the choice.
fn first<'a>(all: &[Heading<'a>]) -> (Option<Heading<'a>>, String) {
    let of = |role: Role| all.iter().filter(move |(_, hit)| hit.known.role == role).copied();
    let symptoms = || of(Role::Symptom).chain(of(Role::General));
    let consequences = symptoms().chain(of(Role::Follower));
    let earliest = consequences.filter_map(|(_, hit)| hit.time).min();
    let in_time = |(_, hit): &Heading<'_>| match (hit.time, earliest) {
        (Some(time), Some(earliest)) => time.since(earliest) <= LATE,
        _ => true,
    };
    // Hits with a time are comparable; among the others, take the lowest rank.
    let by_time = |(speaker, hit): &Heading<'a>| (hit.time.is_none(), hit.time, *speaker, hit.line);
    if let Some(cause) = of(Role::Cause).filter(in_time).min_by_key(by_time) {
        let several = of(Role::Cause).any(|(speaker, _)| speaker != cause.0);
        let basis = match (cause.1.time, several) {
            (Some(_), true) => "the first in time of the errors that stand for themselves",
            (None, true) => {
                "the lines have no time: of the errors that stand for themselves the one of the lowest rank"
            }
            (_, false) => "the error that is a cause by itself; everything else can follow from it",
        };
        return (Some(cause), basis.to_owned());
    }
    if let Some(symptom) = symptoms().min_by_key(by_time) {
        let is_specific = |(speaker, _): &Heading<'_>| *speaker == symptom.0;
        let specific = of(Role::Symptom).filter(is_specific).filter(in_time).min_by_key(by_time);
        let symptom = specific.filter(|_| symptom.1.known.role == Role::General).unwrap_or(symptom);
        let basis = "no error here is a cause by itself: this is the first symptom, and its cause may be missing";
        return (Some(symptom), basis.to_owned());
    }
    if of(Role::Follower).next().is_some() {
        return (
            None,
            "everything here follows from the end of another process, whose log is missing or has no error".to_owned(),
        );
    }
    (None, "no error".to_owned())
}

/// Other suspects: the rank that others blame, or the one that a timeout waits for.
fn suspects(all: &[Heading<'_>], speakers: &BTreeMap<Speaker, Hits>, first: Option<Heading<'_>>) -> Option<String> {
    let is_cause = first.is_some_and(|(_, hit)| hit.known.role == Role::Cause);
    let blamed: BTreeSet<u32> = all.iter().filter_map(|(_, hit)| hit.blamed).collect();
    if !blamed.is_empty() && !is_cause {
        return Some(format!("rank {}: the others name it as the one that failed first", rank_list(blamed)));
    }
    let waiting: Vec<&Heading<'_>> = all.iter().filter(|(_, hit)| hit.known.id == "nccl-timeout").collect();
    if waiting.is_empty() || is_cause {
        return None;
    }
    // The lagging rank never reached the collective that the others wait in.
    let sequences: Vec<(u32, &Speaker)> =
        waiting.iter().filter_map(|(speaker, hit)| Some((hit.sequence?, *speaker))).collect();
    let least = sequences.iter().map(|(sequence, _)| *sequence).min()?;
    if sequences.iter().any(|(sequence, _)| *sequence > least) {
        let behind = sequences.iter().filter(|(sequence, _)| *sequence == least).map(|(_, speaker)| *speaker);
        return Some(format!("{}: behind the others, at collective {least}", names(behind)));
    }
    let is_silent = |speaker: &&Speaker| speakers[*speaker].is_empty() && matches!(speaker, Speaker::Rank(_));
    let silent: Vec<&Speaker> = speakers.keys().filter(is_silent).collect();
    (!silent.is_empty()).then(|| format!("{}: silent while the others wait", names(silent.into_iter())))
}

fn error_line((speaker, hit): Heading<'_>) -> ErrorLine {
    ErrorLine {
        error: Explained::new(hit.known),
        who: names(std::iter::once(speaker)),
        rank: match speaker {
            Speaker::Rank(rank) => Some(*rank),
            Speaker::Log(_) => None,
        },
        log: hit.log.clone(),
        line: hit.line,
        time: hit.time.map(|time| time.to_string()),
        text: hit.text.clone(),
    }
}

/// Groups equal errors of several speakers, ordered by time.
fn fold(hits: &[Heading<'_>], start: Option<Moment>) -> Vec<Fold> {
    let mut errors: BTreeMap<&str, Vec<Heading<'_>>> = BTreeMap::new();
    for heading in hits {
        errors.entry(heading.1.known.id).or_default().push(*heading);
    }
    let mut folds: Vec<(Option<Moment>, Fold)> = errors
        .into_values()
        .filter_map(|same| {
            let (_, earliest) = *same.iter().min_by_key(|(_, hit)| (hit.time.is_none(), hit.time))?;
            let after = start.zip(earliest.time).map(|(start, time)| time.since(start) as f64 / 1e6);
            let fold = Fold {
                error: Explained::new(earliest.known),
                who: names(same.iter().map(|(speaker, _)| *speaker)),
                count: same.iter().map(|(_, hit)| hit.count).sum(),
                after_seconds: after,
                log: earliest.log.clone(),
                line: earliest.line,
                text: earliest.text.clone(),
            };
            Some((earliest.time, fold))
        })
        .collect();
    folds.sort_by_key(|(time, fold)| (time.is_none(), *time, fold.error.id));
    folds.into_iter().map(|(_, fold)| fold).collect()
}

/// `ranks 0-12, 14`, followed by logs by name.
fn names<'a>(speakers: impl Iterator<Item = &'a Speaker>) -> String {
    let (mut ranks, mut logs) = (BTreeSet::new(), BTreeSet::new());
    for speaker in speakers {
        match speaker {
            Speaker::Rank(rank) => _ = ranks.insert(*rank),
            Speaker::Log(log) => _ = logs.insert(log.as_str()),
        }
    }
    let mut parts = Vec::new();
    if !ranks.is_empty() {
        parts.push(format!("rank{} {}", if ranks.len() == 1 { "" } else { "s" }, rank_list(ranks)));
    }
    parts.extend(logs.iter().take(LISTED).map(|log| (*log).to_owned()));
    if logs.len() > LISTED {
        parts.push(format!("{} more logs", logs.len() - LISTED));
    }
    parts.join(", ")
}
