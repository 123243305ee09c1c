//! Combines the flight recorders of an attempt into one explanation. Pure: takes recordings,
//! returns a paragraph.
//!
//! ```text
//! last operation of each rank ─> the rank that the others waited for ─> a paragraph
//! ```

use jiff::Timestamp;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use switchyard_core::units::{counted, duration, rank_list};
use switchyard_worker_contract::recorder::{Entry, Operation, Recording};

/// Seconds without a new operation that are worth mentioning.
const LONG: f64 = 2.0;
/// Number of operations before the last one to mention.
const BEFORE: usize = 3;

/// What happened to the ranks of an attempt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AttemptSummary {
    pub attempt: u32,
    pub text: String,
}

/// The end of a rank according to its recorder.
struct End<'a> {
    of: &'a Recording,
    /// The last operation before the end.
    last: &'a Entry,
    /// How the rank ended; `None` if it did so without an entry.
    end: Option<Operation>,
    /// Latest known time of the last operation, microseconds after the start of the recording.
    until_us: u64,
}

impl End<'_> {
    fn of(recording: &Recording) -> Option<End<'_>> {
        let newest = recording.entries.last()?;
        let last = recording.entries.iter().rev().find(|entry| !entry.operation.is_last()).unwrap_or(newest);
        let end = Some(newest.operation).filter(|operation| operation.is_last());
        let until_us = if end.is_some() { newest.since_us } else { recording.alive_us };
        Some(End { of: recording, last, end, until_us })
    }

    /// Duration of the last operation in seconds.
    fn seconds(&self) -> f64 {
        self.until_us.saturating_sub(self.last.since_us) as f64 / 1e6
    }

    fn name(&self) -> String {
        format!("rank {} on {} (process {})", self.of.rank, self.of.host, self.of.pid)
    }

    fn doing(&self) -> String {
        let computes = matches!(self.last.operation, Operation::Forward | Operation::Backward | Operation::Evaluate);
        match self.of.layer.as_str() {
            layer if computes && !layer.is_empty() => format!("{}, layer {layer}", self.last),
            _ => self.last.to_string(),
        }
    }

    fn time(&self, us: u64) -> String {
        let us = i64::try_from(self.of.start_us.saturating_add(us)).unwrap_or(i64::MAX);
        Timestamp::from_microsecond(us).map_or_else(|_| "an unknown time".to_owned(), |time| format!("{time:.3}"))
    }

    /// The operations before the last one.
    fn before(&self) -> String {
        let at = self.of.entries.iter().position(|entry| entry == self.last).unwrap_or(0);
        let pairs = self.of.entries[..=at].windows(2).skip(at.saturating_sub(BEFORE));
        let operations = pairs.map(|pair| {
            let seconds = pair[1].since_us.saturating_sub(pair[0].since_us) as f64 / 1e6;
            format!("{} ({seconds:.3} s)", pair[0])
        });
        operations.collect::<Vec<_>>().join(", ")
    }
}

/// A paragraph for each attempt, in order.
pub fn summaries(recordings: &[Recording]) -> Vec<AttemptSummary> {
    let mut attempts: BTreeMap<u32, Vec<&Recording>> = BTreeMap::new();
    for recording in recordings {
        attempts.entry(recording.attempt).or_default().push(recording);
    }
    attempts.into_iter().map(|(attempt, of)| AttemptSummary { attempt, text: summary(&of) }).collect()
}

fn summary(recordings: &[&Recording]) -> String {
    let mut ends: Vec<End<'_>> = recordings.iter().filter_map(|recording| End::of(recording)).collect();
    ends.sort_by_key(|end| end.of.rank);
    let world = ends.iter().map(|end| end.of.world).max().unwrap_or(0);
    let steps = ends.iter().map(|end| end.last.step).max().unwrap_or(0);
    let mut text = match awaited_rank(&ends) {
        None if ends.iter().all(|end| end.end == Some(Operation::Finished)) => {
            format!("all {} finished after step {steps}.", counted(ends.len() as u64, "rank"))
        }
        None => format!(
            "all {} gave up while they waited for each other, in step {steps}.",
            counted(ends.len() as u64, "rank")
        ),
        Some(end) => describe(end),
    };
    let origin = awaited_rank(&ends).map(|end| end.of.rank);
    let mut groups: BTreeMap<String, BTreeSet<u32>> = BTreeMap::new();
    for end in ends.iter().filter(|end| Some(end.of.rank) != origin && end.end != Some(Operation::Finished)) {
        groups.entry(end.last.to_string()).or_default().insert(end.of.rank);
    }
    let others = groups.iter().map(|(doing, ranks)| format!("{}: {doing}", rank_names(ranks)));
    let others: Vec<String> = others.collect();
    if !others.is_empty() {
        text.push_str(&format!(" The others at the end: {}.", others.join("; ")));
    }
    let known: BTreeSet<u32> = ends.iter().map(|end| end.of.rank).collect();
    let missing: BTreeSet<u32> = (0..world).filter(|rank| !known.contains(rank)).collect();
    if !missing.is_empty() {
        text.push_str(&format!(" There is no recorder of {}.", rank_names(&missing)));
    }
    text
}

/// The rank that the others had to wait for: one that was not waiting itself, otherwise one that
/// ended without an entry. If there are several, the one that was longest in its last operation.
fn awaited_rank<'a, 'b>(ends: &'b [End<'a>]) -> Option<&'b End<'a>> {
    let unfinished = || ends.iter().filter(|end| end.end != Some(Operation::Finished));
    let longest = |ends: Vec<&'b End<'a>>| ends.into_iter().max_by(|a, b| a.seconds().total_cmp(&b.seconds()));
    longest(unfinished().filter(|end| end.end.is_none() && !end.last.operation.waits()).collect())
        .or_else(|| longest(unfinished().filter(|end| !end.last.operation.waits()).collect()))
        .or_else(|| longest(unfinished().filter(|end| end.end.is_none()).collect()))
}

fn describe(end: &End<'_>) -> String {
    let (name, doing, since) = (end.name(), end.doing(), end.time(end.last.since_us));
    let seconds = end.seconds();
    let mut text = match end.end {
        None if seconds >= LONG => format!("{name} stood still for {} from {since} on: {doing}.", duration(seconds)),
        None => format!("{name} ended without a word, last alive at {}: {doing}.", end.time(end.of.alive_us)),
        Some(_) => format!("{name} gave up at {}: {doing} ({} in it).", end.time(end.until_us), duration(seconds)),
    };
    let before = end.before();
    if !before.is_empty() {
        text.push_str(&format!(" Before that: {before}."));
    }
    text
}

fn rank_names(ranks: &BTreeSet<u32>) -> String {
    let word = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{word} {}", rank_list(ranks.iter().copied()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(operation: Operation, step: u64, index: u32, seconds: f64) -> Entry {
        Entry { operation, step, index, since_us: (seconds * 1e6) as u64 }
    }

    fn recording(rank: u32, alive: f64, entries: &[Entry]) -> Recording {
        Recording {
            rank,
            world: 3,
            attempt: 1,
            pid: 4711 + rank,
            host: format!("node-{rank}"),
            start_us: 1_763_906_400_000_000,
            alive_us: (alive * 1e6) as u64,
            layer: "blocks.3".into(),
            entries: entries.to_vec(),
        }
    }

    fn summary_of(recordings: &[Recording]) -> String {
        let summaries = summaries(recordings);
        assert_eq!(summaries.len(), 1);
        summaries[0].text.clone()
    }

    fn waiting(rank: u32) -> Recording {
        let reduce = entry(Operation::Reduce, 17, 2, 10.4);
        recording(rank, 41.0, &[entry(Operation::Backward, 17, 0, 10.3), reduce, entry(Operation::Failed, 17, 0, 41.0)])
    }

    #[test]
    fn a_stalled_rank_is_named_with_what_the_others_waited_for() {
        let stuck = [entry(Operation::Input, 17, 0, 10.0), entry(Operation::Forward, 17, 0, 10.25)];
        let text = summary_of(&[waiting(2), recording(1, 41.25, &stuck), waiting(0)]);
        let expected = "rank 1 on node-1 (process 4712) stood still for 31s from 2025-11-23T14:00:10.250Z on: step 17: forward pass of \
                        micro-batch 0, layer blocks.3. Before that: step 17: waiting for the reader, micro-batch 0 (0.250 s). \
                        The others at the end: ranks 0, 2: step 17: waiting for the all-reduce of bucket 2.";
        assert_eq!(text, expected);
    }

    #[test]
    fn killed_and_failed_ranks_are_distinguished() {
        let killed = recording(1, 10.5, &[entry(Operation::Backward, 17, 0, 10.3)]);
        let text = summary_of(&[waiting(0), killed, waiting(2)]);
        assert!(text.contains("ended without a word, last alive at") && text.contains("backward pass"), "{text}");
        let input = [entry(Operation::Input, 17, 0, 10.3), entry(Operation::Failed, 17, 0, 10.4)];
        let text = summary_of(&[waiting(0), recording(1, 10.4, &input)]);
        assert!(
            text.contains("rank 1 on node-1 (process 4712) gave up") && text.contains("no recorder of rank 2"),
            "{text}"
        );
    }

    #[test]
    fn each_attempt_has_a_summary_and_a_successful_one_is_short() {
        let done =
            |rank| recording(rank, 9.0, &[entry(Operation::Leave, 20, 0, 8.0), entry(Operation::Finished, 20, 0, 9.0)]);
        let mut all: Vec<Recording> = (0..3).map(done).collect();
        assert_eq!(summary_of(&all), "all 3 ranks finished after step 20.");
        all.push(Recording { attempt: 2, ..waiting(0) });
        assert_eq!(summaries(&all).iter().map(|summary| summary.attempt).collect::<Vec<_>>(), [1, 2]);
    }
}
