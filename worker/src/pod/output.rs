//! Turns the output of a pod's ranks into the pod's log: short, and complete at its end.
//!
//! A cluster keeps only part of a log, and the controller reads only its last lines. Rank 0 is
//! therefore printed in full, other ranks only when they start, fail, or report GPU events, and
//! rank 0's pod repeats a summary of the job. Each other pod repeats the progress of its first
//! rank, because the kubelet of rank 0's node may be unreachable.

use std::io::Write;
use std::time::{Duration, Instant};
use switchyard_worker_contract::event::{Event, Failure, Finished, Progress, Summary};
use switchyard_worker_contract::fold::Fold;
use switchyard_worker_contract::nccl::Channels;

/// Interval between summaries or progress reports.
const INTERVAL: Duration = Duration::from_secs(5);

/// Most lines between them: fewer than the controller reads, to leave room for lines printed
/// meanwhile.
const MAX_LINES: usize = Summary::TAIL_LINES - 14;

/// The pod's two output streams.
pub(super) struct Output<O, E> {
    out: O,
    err: E,
    journal: Journal,
    printed: Option<(Instant, Event)>,
    /// Lines printed since then.
    lines: usize,
    /// What NCCL logged about its channels.
    channels: Channels,
}

/// The state that a pod repeats in its log.
enum Journal {
    /// State of the job, in rank 0's pod.
    Job(Box<JobJournal>),
    /// Last progress of the first rank, in other pods.
    Rank(Option<Progress>),
}

struct JobJournal {
    fold: Fold,
    summary: Option<Summary>,
    finished: Option<Finished>,
}

impl Journal {
    fn event(&self) -> Option<Event> {
        match self {
            Journal::Job(job) => job.summary.map(Event::Summary),
            Journal::Rank(progress) => progress.clone().map(Event::Progress),
        }
    }
}

impl<O: Write, E: Write> Output<O, E> {
    /// `ranks_of_leader`: number of ranks in this pod, if rank 0 is one of them.
    pub fn new(out: O, err: E, ranks_of_leader: Option<u32>) -> Self {
        let job = |ranks| JobJournal { fold: Fold::new(0..ranks), summary: None, finished: None };
        let journal = ranks_of_leader.map_or(Journal::Rank(None), |ranks| Journal::Job(Box::new(job(ranks))));
        Output { out, err, journal, printed: None, lines: 0, channels: Channels::default() }
    }

    /// Handles a line from the standard output of a process whose first rank is `rank`. Returns the
    /// failure that it reports, if any. An event may belong to another rank of the process.
    pub fn stdout(&mut self, rank: u32, line: &str, now: Instant) -> Option<Failure> {
        let Ok(mut event) = serde_json::from_str::<Event>(line) else {
            self.channels.line(line);
            self.print(&format!("[rank {rank}] {line}"), now);
            return None;
        };
        if let Event::Ready(ready) = &mut event
            && self.channels.complete(ready)
        {
            let line = serde_json::to_string(&event).expect("invariant: an event is plain data");
            self.print(&line, now);
        } else if event.rank().unwrap_or(rank) == 0
            || matches!(event, Event::Ready(_) | Event::Gpu(_) | Event::Failed(_))
        {
            self.print(line, now);
        }
        match (event, &mut self.journal) {
            (Event::Failed(failure), _) => return Some(failure),
            (Event::Progress(progress), Journal::Job(job)) => {
                if let Some((summary, _)) = job.fold.progress(progress) {
                    job.summary = Some(summary);
                    self.repeat(now, false);
                }
            }
            // The process's other ranks report the same, since ranks reduce their gradients
            // together.
            (Event::Progress(progress), Journal::Rank(last))
                if last.as_ref().is_none_or(|last| progress.rank <= last.rank) =>
            {
                *last = Some(progress);
                self.repeat(now, false);
            }
            (Event::Evaluation { loss, accuracy, .. }, Journal::Job(job)) => {
                job.fold.evaluation(loss, accuracy);
                if let Some(summary) = &mut job.summary {
                    summary.validation_loss = Some(loss);
                    summary.accuracy = accuracy;
                }
            }
            (Event::Standstill { stuck }, Journal::Job(job)) => {
                job.fold.standstill(stuck);
                if let Some(summary) = &mut job.summary {
                    summary.stuck = stuck;
                    self.repeat(now, true);
                }
            }
            (Event::GpuTrouble { gpu }, Journal::Job(job)) => {
                job.fold.gpu_trouble(gpu);
                if let Some(summary) = &mut job.summary {
                    summary.gpu = gpu;
                    self.repeat(now, true);
                }
            }
            (Event::Finished(finished), Journal::Job(job)) if finished.rank == 0 => job.finished = Some(finished),
            _ => {}
        }
        None
    }

    /// Handles a line from a rank's standard error.
    pub fn stderr(&mut self, rank: u32, line: &str, now: Instant) {
        let _ = writeln!(self.err, "[rank {rank}] {line}");
        self.count(now);
    }

    /// Called at the end: returns the last summary, and prints it unless it was already printed.
    pub fn finish(&mut self, now: Instant) -> Option<Summary> {
        let Journal::Job(job) = &mut self.journal else { return None };
        if let (Some(summary), Some(finished)) = (&mut job.summary, job.finished.take()) {
            summary.step = finished.step;
            summary.loss = finished.last_loss.unwrap_or(summary.loss);
            summary.validation_loss = finished.validation_loss;
            summary.accuracy = finished.accuracy;
            summary.remaining_seconds = Some(0.0);
        }
        let summary = job.summary;
        if self.printed.as_ref().map(|(_, printed)| printed) != self.journal.event().as_ref() {
            self.repeat(now, true);
        }
        summary
    }

    /// Write errors are ignored: they must not end the training.
    fn print(&mut self, line: &str, now: Instant) {
        let _ = writeln!(self.out, "{line}").and_then(|()| self.out.flush());
        self.count(now);
    }

    fn count(&mut self, now: Instant) {
        self.lines += 1;
        if self.lines >= MAX_LINES {
            self.repeat(now, true);
        }
    }

    /// Prints the journal if `force` is set or the interval has passed.
    fn repeat(&mut self, now: Instant, force: bool) {
        let due = self.printed.as_ref().is_none_or(|(at, _)| now.saturating_duration_since(*at) >= INTERVAL);
        if let Some(event) = self.journal.event().filter(|_| force || due) {
            let line = serde_json::to_string(&event).expect("invariant: an event is plain data");
            let _ = writeln!(self.out, "{line}").and_then(|()| self.out.flush());
            (self.printed, self.lines) = (Some((now, event)), 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use switchyard_worker_contract::event::step_in;

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
    fn rank_0_is_printed_in_full_and_other_ranks_when_they_fail() {
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
    fn ready_events_have_the_channels_of_nccl() {
        let now = Instant::now();
        let mut output = Output::new(Vec::new(), Vec::new(), Some(2));
        output.stdout(0, "n:7:19 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM", now);
        let ready = |transport: &str| {
            json!({"event": "ready", "rank": 0, "pid": 1, "host": "n", "cpus": "0", "threads": 1, "kernel": "avx2",
                "address": "n:1", "transport": transport, "allReduceMs": 1.0})
            .to_string()
        };
        output.stdout(0, &ready("shm"), now);
        assert!(!text(&output).contains("\"links\""), "{}", text(&output));
        output.stdout(0, &ready("nccl"), now);
        let line = text(&output).lines().last().unwrap_or_default().to_owned();
        let Ok(Event::Ready(ready)) = serde_json::from_str(&line) else { panic!("{line}") };
        assert_eq!(switchyard_worker_contract::nccl::summary(&ready.links).as_deref(), Some("1 x P2P/CUMEM"));
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
        assert_eq!(summaries(&output), 3, "the last summary is printed once");
    }

    #[test]
    fn the_tail_of_the_log_always_contains_a_summary() {
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
    fn the_last_summary_has_the_figures_of_the_finished_event() {
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
    fn hung_ranks_are_reported_at_once_and_until_they_recover() {
        let now = Instant::now();
        let mut output = Output::new(Vec::new(), Vec::new(), Some(1));
        output.stdout(0, &progress(0, 1), now);
        let stuck =
            json!({"rank": 9, "nodeRank": 4, "operation": "forward", "step": 2, "index": 0, "since": 5, "ranks": 1});
        output.stdout(0, &json!({"event": "standstill", "stuck": stuck}).to_string(), now);
        let summary = Summary::last_in(&text(&output)).unwrap();
        assert_eq!((summary.step, summary.stuck.map(|stuck| (stuck.rank, stuck.node_rank))), (1, Some((9, 4))));
        assert_eq!(summary.stuck.unwrap().doing(), "step 2: forward pass of micro-batch 0");
        output.stdout(0, &json!({"event": "standstill"}).to_string(), now);
        assert_eq!(Summary::last_in(&text(&output)), Some(Summary { stuck: None, ..summary }));
        assert_eq!(summaries(&output), 3);
    }

    #[test]
    fn gpu_events_of_all_ranks_are_printed_and_summarised() {
        let now = Instant::now();
        let mut output = Output::new(Vec::new(), Vec::new(), Some(1));
        output.stdout(0, &progress(0, 1), now);
        let report =
            json!({"event": "gpu", "rank": 1, "bus": "0000:17:00.0", "seconds": 9.0, "xids": [31]}).to_string();
        output.stdout(1, &report, now);
        assert!(text(&output).contains(&report));
        let gpu = json!({"rank": 9, "nodeRank": 4, "bus": "0000:17:00.0", "trouble": {"kind": "xid", "xid": 31}});
        output.stdout(0, &json!({"event": "gpuTrouble", "gpu": gpu}).to_string(), now);
        let summary = Summary::last_in(&text(&output)).unwrap();
        let expected = "GPU 0000:17:00.0: XID 31 (GPU memory page fault)";
        assert_eq!((summary.step, summary.gpu.map(|gpu| gpu.what()).as_deref()), (1, Some(expected)));
        output.stdout(0, &progress(0, 2), now + INTERVAL);
        assert_eq!(Summary::last_in(&text(&output)).unwrap().gpu, summary.gpu, "it stays");
        output.stdout(0, &json!({"event": "gpuTrouble"}).to_string(), now);
        assert_eq!(Summary::last_in(&text(&output)).unwrap().gpu, None);
    }

    /// Regression: only rank 0's pod printed progress, so the silence of its node looked like a
    /// hang of all ranks.
    #[test]
    fn other_pods_repeat_the_progress_of_their_first_rank_and_print_no_summary() {
        let start = Instant::now();
        let mut output = Output::new(Vec::new(), Vec::new(), None);
        for (step, seconds) in [(1, 0), (2, 4), (3, 5)] {
            output.stdout(2, &progress(2, step), start + Duration::from_secs(seconds));
            output.stdout(3, &progress(3, step), start + Duration::from_secs(seconds));
        }
        let lines: Vec<String> = text(&output).lines().map(ToString::to_string).collect();
        assert_eq!((lines.len(), step_in(&text(&output))), (2, Some(3)), "{lines:?}");
        for _ in 0..500 {
            output.stdout(2, "chatter", start);
            let text = text(&output);
            let lines: Vec<&str> = text.lines().collect();
            let tail = lines[lines.len().saturating_sub(Summary::TAIL_LINES)..].join("\n");
            assert_eq!(step_in(&tail), Some(3), "{tail}");
        }
        assert_eq!((output.finish(start), summaries(&output)), (None, 0));
    }
}
