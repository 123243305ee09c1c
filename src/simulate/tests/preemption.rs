//! Queue policies that preempt jobs with checkpoints.

use super::*;
use crate::replay::PreemptibleJobs;
use switchyard_plan::cluster::queue_policy::{PolicySettings, QueuePolicy};

const HOUR: f64 = 3600.0;

/// Records when jobs start and are preempted, and for how long the head waits beyond the start that
/// was first computed for it, not counting the time during which jobs ahead of it ran.
struct Recorder {
    rule: Product,
    events: Vec<(f64, Decision)>,
    /// Whether jobs ahead of the head run since the last decision.
    is_overtaken: bool,
    overtaken_until: f64,
    longest_delay: f64,
}

impl Rule for Recorder {
    fn submitted(&mut self, job: &Job) -> Result<(), String> {
        self.rule.submitted(job)
    }

    fn ended(&mut self, job: usize, now: f64) {
        self.rule.ended(job, now);
    }

    fn failed(&mut self, host: usize, jobs: &[usize], now: f64) {
        self.rule.failed(host, jobs, now);
    }

    fn repaired(&mut self, host: usize, now: f64) {
        self.rule.repaired(host, now);
    }

    fn decide(&mut self, now: f64) -> Result<Vec<Decision>, String> {
        let decisions = self.rule.decide(now)?;
        self.events.extend(decisions.iter().map(|decision| (now, decision.clone())));
        if self.is_overtaken {
            self.overtaken_until = now;
        }
        self.is_overtaken = self.rule.runs_ahead_of_head();
        let due = self.rule.first_start_of_head().map(|first| first.max(self.overtaken_until));
        self.longest_delay = self.longest_delay.max(due.map_or(0.0, |due| now - due));
        Ok(decisions)
    }

    fn next_decision(&self) -> Option<f64> {
        self.rule.next_decision()
    }
}

fn played(jobs: &[(f64, f64, u32)], policy: QueuePolicy, percent: u64) -> (ReplayOutcome, Recorder) {
    let fabric = fabric();
    let settings = PolicySettings { policy, ..PolicySettings::default() };
    let rule = product(&fabric).with_queue(|queue| queue.policy = settings);
    let mut recorder =
        Recorder { rule, events: Vec::new(), is_overtaken: false, overtaken_until: 0.0, longest_delay: 0.0 };
    let preemptible = Some(PreemptibleJobs { percent: Some(percent), checkpoint: 600.0, overhead: 120.0 });
    let scenario = Scenario { preemptible, ..Scenario::new(&fabric, Model::Levels, Limits::None) };
    let outcome = replay(&rows(jobs), scenario, &mut recorder).unwrap();
    (outcome, recorder)
}

/// A job of 20 h has all hosts; a job of an hour arrives after five hours.
const LONG_FIRST: [(f64, f64, u32); 2] = [(0.0, 20.0 * HOUR, 32), (5.0 * HOUR, HOUR, 32)];

#[test]
fn a_job_that_ran_longer_makes_way_and_resumes_from_its_checkpoint() {
    let (outcome, _) = played(&LONG_FIRST, QueuePolicy::LeastAttainedService, 100);
    let [long, short] = &outcome.jobs[..] else { panic!("two jobs") };
    assert_eq!((short.start, short.end), (5.0 * HOUR, 6.0 * HOUR));
    // Its last checkpoint was due at this very moment.
    assert_eq!((long.restarts, long.lost, long.end), (1, 120.0, 21.0 * HOUR + 120.0));
    for (policy, percent) in [
        (QueuePolicy::FirstComeFirstServed, 100),
        (QueuePolicy::Opportunistic, 100),
        (QueuePolicy::LeastAttainedService, 0),
    ] {
        let (outcome, _) = played(&LONG_FIRST, policy, percent);
        assert_eq!(outcome.jobs[1].start, 20.0 * HOUR, "{policy:?}, {percent} %");
    }
}

/// The gang of all hosts waits for the first job, and later jobs use the other hosts meanwhile.
#[test]
fn jobs_that_overtook_an_older_one_make_way_after_their_quantum() {
    let jobs = [(0.0, 2.0 * HOUR, 24), (60.0, HOUR, 32), (120.0, 9.0 * HOUR, 8)];
    let starts =
        |policy, percent| played(&jobs, policy, percent).0.jobs.iter().map(|job| job.start).collect::<Vec<_>>();
    assert_eq!(starts(QueuePolicy::FirstComeFirstServed, 100), [0.0, 2.0 * HOUR, 3.0 * HOUR]);
    assert_eq!(starts(QueuePolicy::Opportunistic, 0), [0.0, 2.0 * HOUR, 3.0 * HOUR]);
    assert_eq!(starts(QueuePolicy::Opportunistic, 100), [0.0, 2.0 * HOUR, 120.0]);
}

/// It runs as soon as its quantum is over, without any event at that time.
#[test]
fn the_head_preempts_when_a_quantum_ends() {
    let jobs = [(0.0, 3.5 * HOUR, 16), (0.0, 20.0 * HOUR, 16), (4.5 * HOUR - 60.0, HOUR, 32)];
    let (outcome, _) = played(&jobs, QueuePolicy::LeastAttainedService, 100);
    assert_eq!(outcome.jobs[2].start, 4.5 * HOUR - 60.0);
    let late = [(0.0, 20.0 * HOUR, 32), (HOUR, HOUR, 32)];
    let (outcome, _) = played(&late, QueuePolicy::LeastAttainedService, 100);
    assert_eq!(outcome.jobs[1].start, 4.0 * HOUR, "when the first job reaches the threshold");
    // The arrival of the third job orders the queue half a minute earlier.
    let ordered = [late[0], late[1], (4.0 * HOUR - 30.0, HOUR, 8)];
    let (outcome, _) = played(&ordered, QueuePolicy::LeastAttainedService, 100);
    assert_eq!(outcome.jobs[1].start, 4.0 * HOUR, "although the queue was ordered before");
}

/// The second job can preempt the first one after 4 h. Until then the third one may use the nodes
/// held for it, for at least a quantum; the fourth one comes after that time and waits.
#[test]
fn jobs_use_held_nodes_until_the_first_forecast_of_the_head() {
    let jobs = [(0.0, 20.0 * HOUR, 24), (3.5 * HOUR, HOUR, 32), (3.6 * HOUR, 9.0 * HOUR, 4), (4.1 * HOUR, HOUR, 4)];
    let (outcome, _) = played(&jobs, QueuePolicy::LeastAttainedService, 100);
    let starts: Vec<f64> = outcome.jobs.iter().map(|job| job.start / HOUR).collect();
    assert_eq!(starts, [0.0, 4.6, 3.6, 5.6], "hours");
}

/// The second job preempts the first one, which then expects to preempt it after 4 h. The third
/// job has run least and comes before the first one, so that forecast no longer holds.
#[test]
fn jobs_that_have_run_less_delay_the_head_beyond_its_forecast() {
    let jobs = [(0.0, 4.25 * HOUR, 32), (0.0, 5.25 * HOUR, 8), (5.5 * HOUR, 4.0 * HOUR, 8)];
    let (outcome, recorder) = played(&jobs, QueuePolicy::LeastAttainedService, 100);
    let starts: Vec<f64> = outcome.jobs.iter().map(|job| job.start / HOUR).collect();
    assert_eq!(starts, [0.0, 4.0, 5.5], "hours");
    assert_eq!(outcome.jobs[0].end, 9.75 * HOUR + 120.0, "it resumes when the third job has ended");
    assert!(recorder.longest_delay <= HOUR, "{} s", recorder.longest_delay);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn preemptions_keep_their_bounds_and_starve_no_head(
        jobs in prop::collection::vec((0_u32..40, 1_u32..60, 0_u32..4), 1..14),
        is_opportunistic in any::<bool>(),
    ) {
        let mut jobs: Vec<(f64, f64, u32)> = jobs
            .into_iter()
            .map(|(submit, duration, size)| (f64::from(submit) * 1800.0, f64::from(duration) * 900.0, 8 << size.min(2)))
            .collect();
        jobs.sort_by(|a, b| a.0.total_cmp(&b.0));
        let policy =
            if is_opportunistic { QueuePolicy::Opportunistic } else { QueuePolicy::LeastAttainedService };
        let (outcome, recorder) = played(&jobs, policy, 100);
        let allowed = PolicySettings::default();
        // Seconds are rounded up.
        let most = allowed.quantum.as_secs_f64() + 1.0;
        prop_assert!(recorder.longest_delay <= most, "the head starts {} s late", recorder.longest_delay);
        prop_assert!(outcome.jobs.iter().all(|job| job.restarts <= allowed.max_preemptions as u32));
        let mut started = BTreeMap::new();
        for (at, decision) in recorder.events {
            match decision {
                Decision::Start(start) => drop(started.insert(start.job, at)),
                Decision::Preempt(job) => {
                    let ran = at - started[&job];
                    prop_assert!(ran >= allowed.quantum.as_secs_f64(), "job {job} was preempted after {ran} s");
                }
            }
        }
    }
}
