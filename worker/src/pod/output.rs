//! Turns what the ranks of a pod print into the log of the pod: short, and complete at its end.
//!
//! A cluster keeps only part of a log, and the controller reads only its last lines. So rank 0 is printed in full,
//! other ranks when they start, fail, or tell what their GPUs have met, and the pod of rank 0 repeats a summary of the job.

use std::io::Write;
use std::time::{Duration, Instant};
use switchyard_worker_contract::event::{Event, Failure, Finished, Summary};
use switchyard_worker_contract::fold::Fold;

/// Time between two summaries.
const INTERVAL: Duration = Duration::from_secs(5);

/// Most lines between two summaries: fewer than what is read of a log, to leave room for lines printed meanwhile.
const LINES: usize = Summary::TAIL_LINES - 14;

/// The two streams of the pod.
pub(super) struct Output<O, E> {
    out: O,
    err: E,
    /// State of the job; only in the pod of rank 0.
    journal: Option<Journal>,
}

/// What is known about the job, and what of it was printed.
struct Journal {
    fold: Fold,
    summary: Option<Summary>,
    finished: Option<Finished>,
    printed: Option<(Instant, Summary)>,
    lines: usize,
}

impl<O: Write, E: Write> Output<O, E> {
    /// `ranks_of_leader`: number of ranks in this pod, if rank 0 is one of them.
    pub fn new(out: O, err: E, ranks_of_leader: Option<u32>) -> Self {
        let journal = ranks_of_leader.map(|ranks| Journal {
            fold: Fold::new(ranks),
            summary: None,
            finished: None,
            printed: None,
            lines: 0,
        });
        Output { out, err, journal }
    }

    /// A line from the standard output of a process whose first rank is `rank`. Returns the failure that it reports, if
    /// any. An event may belong to another rank of the process.
    pub fn stdout(&mut self, rank: u32, line: &str, now: Instant) -> Option<Failure> {
        let Ok(event) = serde_json::from_str::<Event>(line) else {
            self.print(&format!("[rank {rank}] {line}"), now);
            return None;
        };
        if event.rank().unwrap_or(rank) == 0 || matches!(event, Event::Ready(_) | Event::Gpu(_) | Event::Failed(_)) {
            self.print(line, now);
        }
        let journal = self.journal.as_mut();
        match event {
            Event::Failed(failure) => return Some(failure),
            Event::Progress(progress) => {
                if let Some(journal) = journal
                    && let Some((summary, _)) = journal.fold.progress(progress)
                {
                    journal.summary = Some(summary);
                    self.summarise(now, false);
                }
            }
            Event::Evaluation { loss, accuracy, .. } => {
                if let Some(journal) = journal {
                    journal.fold.evaluation(loss, accuracy);
                    if let Some(summary) = &mut journal.summary {
                        summary.validation_loss = Some(loss);
                        summary.accuracy = accuracy;
                    }
                }
            }
            Event::Standstill { stuck } => {
                if let Some(journal) = journal {
                    journal.fold.standstill(stuck);
                    if let Some(summary) = &mut journal.summary {
                        summary.stuck = stuck;
                        self.summarise(now, true);
                    }
                }
            }
            Event::GpuTrouble { gpu } => {
                if let Some(journal) = journal {
                    journal.fold.gpu_trouble(gpu);
                    if let Some(summary) = &mut journal.summary {
                        summary.gpu = gpu;
                        self.summarise(now, true);
                    }
                }
            }
            Event::Finished(finished) if finished.rank == 0 => {
                if let Some(journal) = journal {
                    journal.finished = Some(finished);
                }
            }
            Event::Finished(_)
            | Event::Checkpoint(_)
            | Event::Measured(_)
            | Event::Ready(_)
            | Event::Gpu(_)
            | Event::Summary(_) => {}
        }
        None
    }

    /// A line from the standard error of a rank.
    pub fn stderr(&mut self, rank: u32, line: &str, now: Instant) {
        let _ = writeln!(self.err, "[rank {rank}] {line}");
        self.count(now);
    }

    /// Called at the end: returns the last summary, and prints it if it is news.
    pub fn finish(&mut self, now: Instant) -> Option<Summary> {
        let journal = self.journal.as_mut()?;
        if let (Some(summary), Some(finished)) = (&mut journal.summary, journal.finished.take()) {
            summary.step = finished.step;
            summary.loss = finished.last_loss.unwrap_or(summary.loss);
            summary.validation_loss = finished.validation_loss;
            summary.accuracy = finished.accuracy;
            summary.remaining_seconds = Some(0.0);
        }
        let summary = journal.summary;
        if journal.printed.map(|(_, printed)| printed) != summary {
            self.summarise(now, true);
        }
        summary
    }

    /// A log that cannot be written is no reason to end a training.
    fn print(&mut self, line: &str, now: Instant) {
        let _ = writeln!(self.out, "{line}").and_then(|()| self.out.flush());
        self.count(now);
    }

    /// Counts a line of the log.
    fn count(&mut self, now: Instant) {
        let Some(journal) = &mut self.journal else { return };
        journal.lines += 1;
        if journal.lines >= LINES {
            self.summarise(now, true);
        }
    }

    /// Prints the summary if it must, or if it is time.
    fn summarise(&mut self, now: Instant, must: bool) {
        let Some(journal) = &mut self.journal else { return };
        let Some(summary) = journal.summary else { return };
        let due = journal.printed.is_none_or(|(at, _)| now.saturating_duration_since(at) >= INTERVAL);
        if must || due {
            journal.printed = Some((now, summary));
            journal.lines = 0;
            let line = serde_json::to_string(&Event::Summary(summary)).expect("invariant: a summary is plain data");
            let _ = writeln!(self.out, "{line}").and_then(|()| self.out.flush());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn progress(rank: u32, step: u64) -> String {
        json!({"event": "progress", "rank": rank, "step": step, "totalSteps": 100, "intervalSteps": 1, "loss": 2.0,
            "learningRate": 0.1, "gradientNorm": 1.0, "itemsPerSecond": 10.0, "stepMs": 10.0, "maxStepMs": 10.0,
            "forwardMs": 3.0, "backwardMs": 3.0, "communicationWaitMs": 1.0, "inputWaitMs": 0.5, "optimizerMs": 1.0})
        .to_string()
    }

    fn failed(rank: u32) -> String {
        json!({"event": "failed", "rank": rank, "originRank": 9, "cause": "c", "during": "", "exitCode": 4}).to_string()
    }

    fn text(output: &Output<Vec<u8>, Vec<u8>>) -> String {
        String::from_utf8(output.out.clone()).unwrap()
    }

    fn summaries(output: &Output<Vec<u8>, Vec<u8>>) -> usize {
        text(output).matches("\"event\":\"summary\"").count()
    }

    #[test]
    fn rank_0_is_heard_in_full_and_others_when_they_fail() {
        let now = Instant::now();
        let mut output = Output::new(Vec::new(), Vec::new(), Some(2));
        output.stdout(0, &progress(0, 1), now);
        output.stdout(1, &progress(1, 1), now);
        output.stdout(1, "free text", now);
        output.stderr(1, "a warning", now);
        assert_eq!(output.stdout(1, &failed(1), now).unwrap().origin_rank, 9);
        let text = text(&output);
        assert!(
            text.contains("\"rank\":0") && text.contains("[rank 1] free text\n") && text.contains(&failed(1)),
            "{text}"
        );
        assert!(!text.contains(&progress(1, 1)), "{text}");
        assert_eq!(output.err, b"[rank 1] a warning\n");
    }

    #[test]
    fn a_summary_every_five_seconds_and_at_the_end() {
        let start = Instant::now();
        let mut output = Output::new(Vec::new(), Vec::new(), Some(1));
        for (step, seconds) in [(1, 0), (2, 4), (3, 5), (4, 9)] {
            output.stdout(0, &progress(0, step), start + Duration::from_secs(seconds));
        }
        assert_eq!(summaries(&output), 2, "{}", text(&output));
        assert_eq!(Summary::last_in(&text(&output)).unwrap().step, 3);
        output.stdout(0, &json!({"event": "evaluation", "step": 4, "loss": 1.5}).to_string(), start);
        let last = output.finish(start).unwrap();
        assert_eq!((last.step, last.validation_loss), (4, Some(1.5)));
        assert_eq!(Summary::last_in(&text(&output)), Some(last));
        output.finish(start);
        assert_eq!(summaries(&output), 3, "the end is told once");
    }

    #[test]
    fn the_end_of_the_log_always_holds_a_summary() {
        let now = Instant::now();
        let mut output = Output::new(Vec::new(), Vec::new(), Some(1));
        output.stdout(0, &progress(0, 1), now);
        for _ in 0..500 {
            output.stdout(0, "chatter", now);
            let text = text(&output);
            let lines: Vec<&str> = text.lines().collect();
            let tail = lines[lines.len().saturating_sub(Summary::TAIL_LINES)..].join("\n");
            assert!(Summary::last_in(&tail).is_some(), "{tail}");
        }
    }

    #[test]
    fn the_last_words_of_rank_0_are_the_last_figures() {
        let now = Instant::now();
        let mut output = Output::new(Vec::new(), Vec::new(), Some(2));
        output.stdout(0, &progress(0, 100), now);
        let finished = json!({"event": "finished", "rank": 0, "step": 100, "firstLoss": 5.0, "lastLoss": 1.25,
            "validationLoss": 1.5, "weightsDigest": "x", "stepMsP50": 1.0, "stepMsP99": 1.0});
        output.stdout(0, &finished.to_string(), now);
        output.stdout(1, &progress(1, 100), now);
        let last = output.finish(now).unwrap();
        assert_eq!((last.loss, last.validation_loss, last.remaining_seconds), (1.25, Some(1.5), Some(0.0)));
    }

    #[test]
    fn that_ranks_stand_still_is_told_at_once_and_until_they_go_on() {
        let now = Instant::now();
        let mut output = Output::new(Vec::new(), Vec::new(), Some(1));
        output.stdout(0, &progress(0, 1), now);
        let stuck =
            json!({"rank": 9, "nodeRank": 4, "operation": "forward", "step": 2, "index": 0, "since": 5, "ranks": 1});
        output.stdout(0, &json!({"event": "standstill", "stuck": stuck}).to_string(), now);
        let told = Summary::last_in(&text(&output)).unwrap();
        assert_eq!((told.step, told.stuck.map(|stuck| (stuck.rank, stuck.node_rank))), (1, Some((9, 4))));
        assert_eq!(told.stuck.unwrap().doing(), "step 2: forward pass of micro-batch 0");
        output.stdout(0, &json!({"event": "standstill"}).to_string(), now);
        assert_eq!(Summary::last_in(&text(&output)), Some(Summary { stuck: None, ..told }));
        assert_eq!(summaries(&output), 3);
    }

    #[test]
    fn what_gpus_have_met_is_told_of_all_ranks_and_in_the_summary() {
        let now = Instant::now();
        let mut output = Output::new(Vec::new(), Vec::new(), Some(1));
        output.stdout(0, &progress(0, 1), now);
        let report =
            json!({"event": "gpu", "rank": 1, "bus": "0000:17:00.0", "seconds": 9.0, "xids": [31]}).to_string();
        output.stdout(1, &report, now);
        assert!(text(&output).contains(&report));
        let gpu = json!({"rank": 9, "nodeRank": 4, "bus": "0000:17:00.0", "trouble": {"kind": "xid", "xid": 31}});
        output.stdout(0, &json!({"event": "gpuTrouble", "gpu": gpu}).to_string(), now);
        let told = Summary::last_in(&text(&output)).unwrap();
        let expected = "GPU 0000:17:00.0: XID 31 (GPU memory page fault)";
        assert_eq!((told.step, told.gpu.map(|gpu| gpu.what()).as_deref()), (1, Some(expected)));
        output.stdout(0, &progress(0, 2), now + INTERVAL);
        assert_eq!(Summary::last_in(&text(&output)).unwrap().gpu, told.gpu, "it stays");
        output.stdout(0, &json!({"event": "gpuTrouble"}).to_string(), now);
        assert_eq!(Summary::last_in(&text(&output)).unwrap().gpu, None);
    }

    #[test]
    fn other_pods_know_no_summary() {
        let mut output = Output::new(Vec::new(), Vec::new(), None);
        output.stdout(2, &progress(2, 1), Instant::now());
        assert_eq!((output.finish(Instant::now()), text(&output).as_str()), (None, ""));
    }
}
