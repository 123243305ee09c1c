//! Computes the figures of a replayed trace.

use crate::replay::{Idle, JobOutcome, ReplayOutcome, Team};
use crate::trace::Row;
use serde::Serialize;

/// Gangs of at least this many GPUs get a separate figure, because they must wait for others to
/// finish.
const LARGE: u32 = 64;
/// Durations below this count as this in the slowdown, seconds.
const SHORT: f64 = 600.0;

/// Which jobs the figures cover.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JobWindow {
    /// Jobs submitted between 15 and 90 % of the submission period: the empty cluster at the start
    /// and the draining one at the end say little about the queue.
    Middle,
    /// All jobs, for traces too short to have a middle.
    All,
}

impl JobWindow {
    /// The middle if the trace is long enough to have one.
    pub fn of(rows: &[Row]) -> JobWindow {
        let is_long = rows.len() >= 200 && rows.last().is_some_and(|last| last.submit > 0.0);
        if is_long { JobWindow::Middle } else { JobWindow::All }
    }

    /// Start and end of the covered period, seconds.
    fn window(self, outcome: &ReplayOutcome) -> [f64; 2] {
        let most = |of: fn(&JobOutcome) -> f64| outcome.jobs.iter().map(of).fold(0.0, f64::max);
        match self {
            JobWindow::Middle => [0.15, 0.9].map(|part| part * most(|job| job.submit)),
            JobWindow::All => [0.0, most(|job| job.end)],
        }
    }

    /// The covered jobs with their positions in the trace.
    pub fn jobs(self, outcome: &ReplayOutcome) -> impl Iterator<Item = (usize, &JobOutcome)> {
        let [from, to] = self.window(outcome);
        outcome.jobs.iter().enumerate().filter(move |(_, job)| (from..=to).contains(&job.submit))
    }
}

/// Wait times, seconds.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Waits {
    pub jobs: usize,
    pub gpu_hours: f64,
    pub wait_mean: f64,
    pub wait_p99: f64,
    pub wait_longest: f64,
}

impl Waits {
    pub fn of<'a>(jobs: impl IntoIterator<Item = &'a JobOutcome>) -> Waits {
        let jobs: Vec<&JobOutcome> = jobs.into_iter().collect();
        let waits = || jobs.iter().map(|job| job.wait());
        Waits {
            jobs: jobs.len(),
            gpu_hours: jobs.iter().map(|job| job.duration * f64::from(job.gpus)).sum::<f64>() / 3600.0,
            wait_mean: mean(waits()),
            wait_p99: percentile(waits(), 0.99),
            wait_longest: waits().fold(0.0, f64::max),
        }
    }
}

/// Figures of one rule. Times are seconds.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Figures {
    /// From submission to end.
    pub completion_mean: f64,
    /// Of the jobs at their best placements. No rule completes them in less on average.
    pub duration_mean: f64,
    pub completion_p99: f64,
    pub wait_mean: f64,
    pub wait_p99: f64,
    /// For gangs of at least 64 GPUs.
    pub large_wait_mean: f64,
    pub wait_longest: f64,
    /// Mean of (wait + duration) ÷ duration, where ten minutes is the shortest duration.
    pub slowdown: f64,
    /// GPU hours spent beyond the GPU hours needed at the best placements, percent of the latter;
    /// repeated work counts as needed.
    pub slow_percent: f64,
    /// GPUs idle while a waiting job needs no more than the idle ones, percent of all GPUs over the
    /// period: GPUs that are reserved or badly placed.
    pub idle_percent: f64,
    /// The same while the longest-waiting job needs no more than the idle GPUs, percent: GPUs that
    /// are badly placed.
    pub fragmentation_percent: f64,
    /// GPUs in use, percent of all GPUs over the period.
    pub utilisation_percent: f64,
    /// How often jobs were stopped, by host failures or preemption.
    pub restarts: u32,
    /// Of the job that was stopped most often.
    pub restarts_most: u32,
    /// Jobs stopped more than once, percent of the stopped jobs; `None` without restarts.
    pub stopped_again_percent: Option<f64>,
    /// For jobs of the higher class and for the others; `None` if all jobs have one class.
    pub urgent_wait_mean: Option<f64>,
    pub others_wait_mean: Option<f64>,
    /// Mean time from a stop to the restart; `None` without restarts.
    pub restart_wait_mean: Option<f64>,
    /// GPU hours of repeated work, percent of the GPU hours at the best placements.
    pub lost_percent: f64,
    /// GPU hours that teams were short of their fair share, percent of the fair shares; `None` if
    /// the trace has no queues.
    pub short_percent: Option<f64>,
    /// Waiting jobs that got a forecast of their start, percent; `None` for a rule without
    /// forecasts.
    pub forecast_percent: Option<f64>,
    /// Of these, jobs that started within the forecast window, percent.
    pub forecast_coverage_percent: Option<f64>,
    /// Of these, jobs that started before the forecast window, percent.
    pub forecast_early_percent: Option<f64>,
    /// Median width of the forecast window.
    pub forecast_width_median: Option<f64>,
}

/// Computes the figures of a trace on a cluster with this many GPUs.
pub fn figures(outcome: &ReplayOutcome, gpus: u32, of: JobWindow) -> Figures {
    let [from, to] = of.window(outcome);
    let counted: Vec<&JobOutcome> = of.jobs(outcome).map(|(_, job)| job).collect();
    let completion = |job: &JobOutcome| job.end - job.submit;
    let mean = |of: &dyn Fn(&JobOutcome) -> f64| mean(counted.iter().map(|job| of(job)));
    let large = counted.iter().filter(|job| job.gpus >= LARGE).map(|job| job.wait());
    let hours = |seconds: &dyn Fn(&JobOutcome) -> f64| -> f64 {
        counted.iter().map(|job| seconds(job) * f64::from(job.gpus)).sum()
    };
    let (useful, lost) = (hours(&|job| job.duration), hours(&|job| job.lost));
    let within = |begin: f64, end: f64| (end.min(to) - begin.max(from)).max(0.0);
    let busy = outcome.busy.iter().map(|(begin, end, gpus)| within(*begin, *end) * f64::from(*gpus));
    let gpu_seconds = |idle: &Idle| within(idle.at, idle.at + idle.time) * f64::from(idle.gpus);
    let idle: f64 = outcome.idle.iter().map(gpu_seconds).sum();
    let fragmented: f64 = outcome.idle.iter().filter(|idle| idle.is_fragmented).map(gpu_seconds).sum();
    let restarts: u32 = counted.iter().map(|job| job.restarts).sum();
    let waited_again: f64 = counted.iter().map(|job| job.waited_again).sum();
    let stopped = |times: u32| counted.iter().filter(|job| job.restarts >= times).count() as f64;
    let has_classes = counted.iter().any(|job| job.is_urgent);
    let wait_of =
        |is_urgent: bool| self::mean(counted.iter().filter(|job| job.is_urgent == is_urgent).map(|job| job.wait()));
    let all = f64::from(gpus) * (to - from);
    let waited = counted.iter().filter(|job| job.wait() > 0.0).count();
    // Allow a second on either side, because limits are whole seconds.
    let forecasts = counted.iter().filter(|job| job.wait() > 0.0);
    let forecasts: Vec<(&JobOutcome, [f64; 2])> =
        forecasts.filter_map(|job| job.forecast.map(|[from, to]| (*job, [from - 1.0, to + 1.0]))).collect();
    let share = |is: &dyn Fn(f64, f64, f64) -> bool| {
        let is = forecasts.iter().filter(|(job, [from, to])| is(job.start, *from, *to)).count();
        forecasts.first().map(|_| 100.0 * is as f64 / forecasts.len() as f64)
    };
    Figures {
        completion_mean: mean(&completion),
        duration_mean: mean(&|job| job.duration),
        completion_p99: percentile(counted.iter().map(|job| completion(job)), 0.99),
        wait_mean: mean(&JobOutcome::wait),
        wait_p99: percentile(counted.iter().map(|job| job.wait()), 0.99),
        large_wait_mean: self::mean(large),
        wait_longest: counted.iter().map(|job| job.wait()).fold(0.0, f64::max),
        slowdown: mean(&|job| completion(job).max(SHORT) / job.duration.max(SHORT)),
        slow_percent: 100.0 * (hours(&JobOutcome::ran) / (useful + lost) - 1.0),
        idle_percent: 100.0 * idle / all,
        fragmentation_percent: 100.0 * fragmented / all,
        utilisation_percent: 100.0 * busy.sum::<f64>() / all,
        restarts,
        restarts_most: counted.iter().map(|job| job.restarts).max().unwrap_or(0),
        stopped_again_percent: (restarts > 0).then(|| 100.0 * stopped(2) / stopped(1)),
        urgent_wait_mean: has_classes.then(|| wait_of(true)),
        others_wait_mean: has_classes.then(|| wait_of(false)),
        restart_wait_mean: (restarts > 0).then(|| waited_again / f64::from(restarts)),
        lost_percent: 100.0 * lost / useful,
        short_percent: short(&outcome.teams),
        forecast_percent: forecasts.first().map(|_| 100.0 * forecasts.len() as f64 / waited as f64),
        forecast_coverage_percent: share(&|start, from, to| (from..=to).contains(&start)),
        forecast_early_percent: share(&|start, from, _| start < from),
        forecast_width_median: forecasts
            .first()
            .map(|_| percentile(forecasts.iter().map(|(_, [from, to])| to - from), 0.5)),
    }
}

/// See [`Figures::short_percent`].
fn short(teams: &[Team]) -> Option<f64> {
    let short: f64 = teams.iter().map(|team| (team.fair_share - team.used).max(0.0)).sum();
    let fair_shares: f64 = teams.iter().map(|team| team.fair_share).sum();
    (teams.len() > 1).then(|| 100.0 * short / fair_shares)
}

/// Mean; 0 if empty.
pub fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0), |(sum, count), value| (sum + value, count + 1));
    if count == 0 { 0.0 } else { sum / f64::from(count) }
}

/// Sample standard deviation; 0 for fewer than two values.
pub fn deviation(values: &[f64]) -> f64 {
    let mean = mean(values.iter().copied());
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    if values.len() < 2 { 0.0 } else { (squares / (values.len() - 1) as f64).sqrt() }
}

fn percentile(values: impl Iterator<Item = f64>, part: f64) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let at = (part * values.len() as f64).ceil() as usize;
    values.get(at.saturating_sub(1)).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn figures_cover_the_middle_of_the_trace() {
        let job = |submit: f64, start: f64, end: f64, duration: f64, gpus| JobOutcome {
            submit,
            start,
            end,
            duration,
            gpus,
            is_urgent: gpus == 1,
            restarts: 0,
            lost: 0.0,
            waited_again: 0.0,
            forecast: None,
        };
        let jobs = vec![
            job(0.0, 0.0, 1000.0, 1000.0, 8),
            job(500.0, 600.0, 1800.0, 1000.0, 64),
            job(600.0, 600.0, 700.0, 100.0, 1),
            job(1000.0, 5000.0, 5100.0, 100.0, 8),
        ];
        let idle = |at, gpus, is_fragmented| Idle { at, time: 100.0, gpus, is_fragmented };
        let idle = vec![idle(500.0, 10, true), idle(600.0, 20, false), idle(2000.0, 50, true)];
        let busy = jobs.iter().map(|job| (job.start, job.end, job.gpus)).collect();
        let outcome = ReplayOutcome { jobs, busy, idle, teams: Vec::new(), longest: Duration::ZERO };
        let figures = figures(&outcome, 100, JobWindow::Middle);
        assert_eq!((figures.completion_mean, figures.wait_mean, figures.wait_longest), (700.0, 50.0, 100.0));
        assert_eq!((figures.large_wait_mean, figures.duration_mean), (100.0, 550.0));
        assert_eq!((figures.urgent_wait_mean, figures.others_wait_mean), (Some(0.0), Some(100.0)));
        assert!((figures.slow_percent - 100.0 * (76_900.0 / 64_100.0 - 1.0)).abs() < 1e-9);
        assert!((figures.fragmentation_percent - 100.0 * 1000.0 / 75_000.0).abs() < 1e-9);
        assert!((figures.idle_percent - 100.0 * 3000.0 / 75_000.0).abs() < 1e-9);
        // 8 GPUs for all of the 750 s, 64 from 600 to 900, one for 100 s.
        assert!((figures.utilisation_percent - 100.0 * (6000.0 + 19_200.0 + 100.0) / 75_000.0).abs() < 1e-9);
        assert_eq!(figures.slowdown, (1300.0 / 1000.0 + 1.0) / 2.0);
    }

    /// A job of 100 s was stopped after 70 s, had checkpointed 60 s of work, and resumed 30 s later
    /// on GPUs half as fast.
    #[test]
    fn repeated_work_counts_as_lost_rather_than_slow() {
        let (restarts, lost, waited_again) = (1, 10.0, 30.0);
        let (start, end, duration) = (0.0, 180.0, 100.0);
        let job = JobOutcome {
            submit: 0.0,
            start,
            end,
            duration,
            gpus: 8,
            is_urgent: false,
            restarts,
            lost,
            waited_again,
            forecast: None,
        };
        let busy = vec![(0.0, 70.0, 8), (100.0, 180.0, 8)];
        let outcome =
            ReplayOutcome { jobs: vec![job], busy, idle: Vec::new(), teams: Vec::new(), longest: Duration::ZERO };
        let figures = figures(&outcome, 8, JobWindow::All);
        assert_eq!((figures.restarts, figures.restart_wait_mean), (1, Some(30.0)));
        assert_eq!((figures.stopped_again_percent, figures.urgent_wait_mean), (Some(0.0), None));
        assert!(
            (figures.lost_percent - 10.0).abs() < 1e-9 && (figures.slow_percent - 100.0 * 40.0 / 110.0).abs() < 1e-9
        );
        assert!((figures.utilisation_percent - 100.0 * 150.0 / 180.0).abs() < 1e-9);
    }

    #[test]
    fn the_deviation_is_a_sample_deviation() {
        assert_eq!(deviation(&[1.0, 3.0]), 2.0_f64.sqrt());
        assert_eq!(deviation(&[7.0]), 0.0);
    }
}
