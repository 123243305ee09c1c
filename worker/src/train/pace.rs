//! Finds the slowest rank, from the time each rank computes and reads without waiting for others.
//! Pure: times are parameters.
//!
//! ```text
//! step:     1         2         3         4
//! report:   0-10      11-21     0-10      11-21      of 22 ranks, sent with the step's metrics
//! round:    `-------- 1 -------´`-------- 2 -------´ time since the last report
//! window:   enough rounds for 100 steps: the slowest against the median of the others
//! ```

use super::engine::REPORTED_TIMES;
use std::time::Duration;
use switchyard_worker_contract::event::Slowest;

/// The times of all ranks. All ranks hold the same state.
pub(super) struct Pace {
    rank: u32,
    per_node: u32,
    /// Seconds of this rank since its last report.
    own: f32,
    steps_per_round: u64,
    /// The first step that counts: from here on, each rank's report covers the same number of
    /// steps.
    first_step: u64,
    /// Seconds by rank in the current round.
    round: Vec<f64>,
    /// Seconds by rank in the window, excluding the current round.
    window: Vec<f64>,
    /// Steps in the window.
    steps: u64,
    /// Result of the last complete window.
    last: Option<Slowest>,
    /// Scratch space for the median.
    others: Vec<f64>,
}

impl Pace {
    /// Takes the rank, the number of ranks, and the ranks per node. `done`: steps before the first
    /// one.
    pub fn new((rank, world, per_node): (u32, u32, u32), done: u64) -> Pace {
        let steps_per_round = u64::from(world.div_ceil(REPORTED_TIMES as u32)).max(1);
        let all = || vec![0.0; world as usize];
        Pace {
            rank,
            per_node: per_node.max(1),
            own: 0.0,
            steps_per_round,
            // In the first complete round, ranks report the time since the start.
            first_step: ((done + 1).div_ceil(steps_per_round) + 1) * steps_per_round,
            round: all(),
            window: all(),
            steps: 0,
            last: None,
            others: Vec::with_capacity(world as usize),
        }
    }

    /// The first rank that reports in this step.
    fn first_reporter(&self, step: u64) -> usize {
        (step % self.steps_per_round) as usize * REPORTED_TIMES
    }

    /// This rank's entry in the times of the step that begins.
    pub fn report(&mut self, step: u64) -> [f32; REPORTED_TIMES] {
        let mut report = [0.0; REPORTED_TIMES];
        let index = (self.rank as usize).checked_sub(self.first_reporter(step));
        if let Some(slot) = index.and_then(|index| report.get_mut(index)) {
            *slot = std::mem::take(&mut self.own);
        }
        report
    }

    /// Adds the summed reports of all ranks in a step, and this rank's time in it.
    pub fn add(&mut self, step: u64, reports: &[f32; REPORTED_TIMES], own: Duration) {
        self.own += own.as_secs_f32();
        if step < self.first_step {
            return;
        }
        let first = self.first_reporter(step);
        for (sum, report) in self.round.iter_mut().skip(first).zip(reports) {
            *sum += f64::from(*report);
        }
        if !(step + 1).is_multiple_of(self.steps_per_round) {
            return;
        }
        for (sum, round) in self.window.iter_mut().zip(&mut self.round) {
            *sum += std::mem::take(round);
        }
        self.steps += self.steps_per_round;
        if self.steps >= Slowest::STEPS {
            self.last = self.compare();
            self.window.fill(0.0);
            self.steps = 0;
        }
    }

    /// The slowest rank of the last complete window.
    pub fn last(&self) -> Option<Slowest> {
        self.last
    }

    /// The slowest rank of the last complete window, or of the first window so far.
    pub fn slowest(&mut self) -> Option<Slowest> {
        self.last.or_else(|| self.compare())
    }

    /// The slowest rank of the window against the median of the others; `None` without other ranks
    /// or times.
    fn compare(&mut self) -> Option<Slowest> {
        let slowest = (0..self.window.len()).reduce(|a, b| if self.window[b] > self.window[a] { b } else { a })?;
        self.others.clear();
        self.others.extend(self.window.iter().enumerate().filter(|(rank, _)| *rank != slowest).map(|(_, time)| *time));
        let median = median(&mut self.others).filter(|median| *median > 0.0)?;
        let rank = slowest as u32;
        let over_percent = 100.0 * (self.window[slowest] - median) / median;
        Some(Slowest { rank, node_rank: rank / self.per_node, over_percent, steps: self.steps })
    }
}

/// For an even count, the mean of the middle two.
fn median(times: &mut [f64]) -> Option<f64> {
    times.sort_unstable_by(f64::total_cmp);
    let upper = *times.get(times.len() / 2)?;
    let lower = *times.get((times.len() - 1) / 2)?;
    Some((lower + upper) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates ranks that train `steps` steps after `done`; `seconds`: time of a rank in a step.
    /// Checks that all ranks agree, and returns the result after each step.
    fn simulate(
        (world, per_node): (u32, u32),
        done: u64,
        steps: u64,
        seconds: impl Fn(u32, u64) -> f64,
    ) -> Vec<Option<Slowest>> {
        let mut ranks: Vec<Pace> = (0..world).map(|rank| Pace::new((rank, world, per_node), done)).collect();
        let step = |step: u64| {
            let mut sums = [0.0; REPORTED_TIMES];
            for pace in &mut ranks {
                pace.report(step).iter().zip(&mut sums).for_each(|(report, sum)| *sum += report);
            }
            for pace in &mut ranks {
                pace.add(step, &sums, Duration::from_secs_f64(seconds(pace.rank, step)));
            }
            let known: Vec<Option<Slowest>> = ranks.iter_mut().map(Pace::slowest).collect();
            assert!(known.iter().all(|slowest| *slowest == known[0]), "{known:?}");
            known[0]
        };
        (done + 1..=done + steps).map(step).collect()
    }

    #[test]
    fn a_straggler_is_slower_by_15_percent_over_100_steps() {
        // Powers of two, so that the sums are exact.
        for (slow, is_straggler) in [(1.15625, true), (1.1484375, false), (2.0, true)] {
            let seconds = |rank: u32, _: u64| if rank == 2 { 64.0 * slow } else { 64.0 };
            let known = simulate((4, 2), 0, 110, seconds);
            let first = known.iter().position(|slowest| slowest.is_some_and(|slowest| slowest.is_straggler()));
            // No time is known in the first step, because a step's time is reported in the next
            // one.
            assert_eq!(first, is_straggler.then_some(100), "{slow}");
            let last = known[105].unwrap();
            assert_eq!((last.rank, last.node_rank, last.steps), (2, 1, 100));
        }
    }

    #[test]
    fn exactly_15_percent_is_enough_and_99_steps_are_not() {
        let slowest = Slowest { rank: 0, node_rank: 0, over_percent: 15.0, steps: 100 };
        assert!(slowest.is_straggler());
        assert!(!Slowest { steps: 99, ..slowest }.is_straggler());
        assert!(!Slowest { over_percent: 14.999, ..slowest }.is_straggler());
        let known = simulate((3, 3), 0, 101, |rank, _| if rank == 1 { 230.0 } else { 200.0 });
        assert_eq!(known[100].map(|slowest| (slowest.over_percent, slowest.steps)), Some((15.0, 100)));
        assert_eq!(known[99].map(|slowest| (slowest.over_percent, slowest.steps)), Some((15.0, 99)));
    }

    #[test]
    fn the_next_window_finds_another_slow_rank() {
        let seconds = |rank: u32, step: u64| match (rank, step) {
            (0, ..=100) | (2, 101..=200) => 3.0,
            _ => 2.0,
        };
        let known = simulate((3, 1), 0, 310, seconds);
        let at = |step: usize| known[step - 1].map(|slowest| (slowest.rank, slowest.over_percent));
        assert_eq!((at(101), at(201)), (Some((0, 50.0)), Some((2, 50.0))));
        assert_eq!(at(301), Some((0, 0.0)), "all are equally fast");
        assert_eq!(at(250), at(201), "the result stays until the next window is complete");
    }

    #[test]
    fn a_single_rank_has_no_median_and_of_two_ranks_the_other_is_the_median() {
        assert!(simulate((1, 1), 0, 150, |_, _| 1.0).iter().all(Option::is_none));
        let two = simulate((2, 2), 0, 150, |rank, _| f64::from(rank + 1));
        assert_eq!(two[149], Some(Slowest { rank: 1, node_rank: 0, over_percent: 100.0, steps: 100 }));
    }

    #[test]
    fn many_ranks_report_alternately_and_cover_equally_many_steps() {
        // Step times differ, which must not look like a slow rank.
        for (world, done) in [(11, 0), (12, 0), (23, 5), (100, 0), (513, 1000)] {
            let slow = world - 1;
            let known = simulate((world, 8), done, 400, |rank, step| {
                let time = if step % 2 == 0 { 1.0 } else { 3.0 };
                if rank == slow { 2.0 * time } else { time }
            });
            let last = known[399].unwrap();
            assert_eq!((last.rank, last.node_rank), (slow, slow / 8), "{world}");
            let steps_per_round = u64::from(world.div_ceil(REPORTED_TIMES as u32));
            assert_eq!(last.steps, 100_u64.div_ceil(steps_per_round) * steps_per_round);
            // A round with an odd number of steps has one more of one kind.
            assert!((last.over_percent - 100.0).abs() < 5.0, "{world}: {last:?}");
        }
    }
}
