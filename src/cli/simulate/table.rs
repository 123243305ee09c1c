//! Formats the outcomes of a simulation.

use super::{Input, Outcome, gpu_hours};
use crate::args::SimulateArgs;
use crate::snapshot::Settings;
use crate::text::{Screen, Table};
use switchyard_core::units::{counted, duration, grouped, three_digits};
use switchyard_simulate::cluster::SimulatedCluster;
use switchyard_simulate::measure::{Figures, JobWindow, Waits, deviation, mean};
use switchyard_simulate::rules::Policy;
use switchyard_simulate::trace::Format;

/// Names of job groups by number of GPUs.
pub(super) const SIZES: [&str; 5] = ["1", "2 to 8", "9 to 63", "64 to 255", "256 and more"];
/// Most queues shown; the other output formats have all.
const MAX_QUEUES: usize = 20;
/// Most skipped nodes shown with a reason.
const MAX_SKIPPED: usize = 5;

/// The group of a job with this many GPUs.
pub(super) fn size(gpus: u32) -> &'static str {
    match gpus {
        0..=1 => SIZES[0],
        2..=8 => SIZES[1],
        9..=63 => SIZES[2],
        64..=255 => SIZES[3],
        _ => SIZES[4],
    }
}

pub(super) fn table(input: &Input, args: &SimulateArgs, outcomes: &[Outcome], width: usize) -> String {
    let mut screen = Screen::new(width);
    head(&mut screen, input, args, outcomes);
    let has_restarts = outcomes.iter().any(|outcome| outcome.figures.iter().any(|figures| figures.restarts > 0));
    let groups = if has_restarts { vec![WAITS, USE, RESTARTS] } else { vec![WAITS, USE] };
    let all = rules(outcomes, &groups);
    let tables = if all.width() <= width {
        vec![all]
    } else {
        groups.into_iter().map(|columns| rules(outcomes, &[columns])).collect()
    };
    for table in tables {
        screen.line("");
        screen.table(vec![table]);
    }
    // Prefer the product as configured, on the current cluster.
    let of = |policy| outcomes.iter().find(|outcome| outcome.policy == policy);
    let own = of(Policy::Configured).or_else(|| of(Policy::LeastAttainedService)).or_else(|| of(Policy::Switchyard));
    if let Some(outcome) = own.or(outcomes.first()) {
        let name = format!("{}, limits: {}, cluster {}", outcome.policy.name(), input.limits.word(), outcome.cluster);
        parts(&mut screen, &name, "GPUS OF A JOB", &outcome.sizes);
        let mut queues = outcome.queues.clone();
        queues.sort_by(|a, b| b.1.wait_mean.total_cmp(&a.1.wait_mean).then(a.0.cmp(&b.0)));
        let more = queues.len().saturating_sub(MAX_QUEUES);
        queues.truncate(MAX_QUEUES);
        parts(&mut screen, &name, "QUEUE", &queues);
        if more > 0 {
            screen.line(&format!("and {more} more: -o json shows all"));
        }
    }
    if let Some(path) = &args.svg {
        screen.line("");
        screen.line(&format!("picture  {}", path.display()));
    }
    screen.into_text()
}

fn head(screen: &mut Screen, input: &Input, args: &SimulateArgs, outcomes: &[Outcome]) {
    let SimulatedCluster { fabric, keys, skipped, machine } = &input.cluster;
    let hours = gpu_hours(&input.rows);
    let first = input.rows.first().map_or(0.0, |row| row.submit);
    let last = input.rows.last().map_or(0.0, |row| row.submit);
    let jobs = grouped(input.rows.len() as u64);
    labelled(
        screen,
        "trace",
        &format!(
            "{}: {jobs} jobs submitted within {}, {} GPU hours",
            input.trace,
            duration(last - first),
            grouped(hours.round() as u64)
        ),
    );
    for (why, jobs) in &input.skipped_jobs {
        labelled(screen, "left out", &format!("{} {why}", counted(*jobs, "job")));
    }
    let level = |key: &Option<String>, count: usize, word: &str| match key {
        Some(key) => format!(", {} ({key})", counted(count as u64, word)),
        None => String::new(),
    };
    let [rack, block] = fabric.oversubscription;
    let through = if fabric.leaves.len() > 1 { format!(", oversubscription {rack}, {block}") } else { String::new() };
    labelled(
        screen,
        "cluster",
        &format!(
            "{} with {} GPUs like {machine}{}{}{through}; empty when the trace begins",
            counted(fabric.hosts.len() as u64, "node"),
            fabric.gpus_per_host,
            level(&keys[0], fabric.leaves.len(), "rack"),
            level(&keys[1], fabric.blocks.len(), "block"),
        ),
    );
    if last > first {
        let load = hours * 3600.0 / (last - first) / f64::from(fabric.gpus());
        labelled(screen, "load", &format!("{} of what all GPUs could do in that time", three_digits(load)));
    }
    for (name, why) in skipped.iter().take(MAX_SKIPPED) {
        labelled(screen, "left out", &format!("{name}: {why}"));
    }
    if skipped.len() > MAX_SKIPPED {
        labelled(screen, "left out", &format!("{} more nodes", skipped.len() - MAX_SKIPPED));
    }
    let limits = input.limits.word();
    let of = match input.counted {
        JobWindow::Middle => "figures are of the jobs submitted between 15 and 90 % of the trace",
        JobWindow::All => "figures are of all jobs",
    };
    let inputs = args.seeds.map_or_else(String::new, |seeds| format!("; means over {seeds} shaken inputs ± deviation"));
    let failures = args
        .node_failures
        .map_or_else(String::new, |days| format!("; each node fails every {}", counted(days.into(), "day")));
    let Settings { queue, arguments, .. } = &input.settings;
    let queue_text = input.settings.assumption().unwrap_or_else(|| arguments.join(", "));
    labelled(screen, "queue", &queue_text);
    labelled(screen, "played", &format!("limits: {limits}{failures}; {of}{inputs}"));
    if outcomes.iter().any(|outcome| outcome.policy.preempts(queue)) {
        let SimulateArgs { preemptible_percent, checkpoint_seconds, .. } = args;
        let preemption_seconds = input.preemption_seconds(args);
        let share = match preemptible_percent {
            Some(percent) => format!("{percent} % of the jobs are preemptible"),
            None if input.format == Format::Objects => "jobs are preemptible as their manifests say".into(),
            None => "all jobs are preemptible".into(),
        };
        let text = format!(
            "{share}, with a checkpoint every {checkpoint_seconds} s; a \
             preemption costs {preemption_seconds} s"
        );
        labelled(screen, "", &text);
    }
}

fn labelled(screen: &mut Screen, label: &str, text: &str) {
    screen.paragraph(&format!("{label:<8}"), text);
}

/// A column of the table of rules.
struct Column {
    heading: &'static str,
    cell: fn(&Outcome) -> String,
}

/// Columns that share a table if the screen is too narrow for all of them.
type Columns = &'static [Column];

const fn column(heading: &'static str, cell: fn(&Outcome) -> String) -> Column {
    Column { heading, cell }
}

const WAITS: Columns = &[
    column("SUBMIT TO END", |outcome| {
        let completions: Vec<f64> = outcome.figures.iter().map(|figures| figures.completion_mean).collect();
        let around = match completions.len() {
            0 | 1 => String::new(),
            _ => format!(" ± {}", duration(deviation(&completions))),
        };
        outcome.time(|figures| figures.completion_mean) + &around
    }),
    column("WAIT", |outcome| outcome.time(|figures| figures.wait_mean)),
    column("P99", |outcome| outcome.time(|figures| figures.wait_p99)),
    column("LONGEST", |outcome| outcome.time(|figures| figures.wait_longest)),
];

const USE: Columns = &[
    column("64 GPUS AND MORE", |outcome| {
        let has_large = outcome.sizes.iter().any(|(name, _)| SIZES[3..].contains(&name.as_str()));
        if has_large { outcome.time(|figures| figures.large_wait_mean) } else { "-".into() }
    }),
    column("SLOWER BY PLACE", |outcome| outcome.share(|figures| figures.slow_percent)),
    column("IDLE BESIDE WAITING", |outcome| outcome.share(|figures| figures.idle_percent)),
    column("USED", |outcome| outcome.share(|figures| figures.utilisation_percent)),
];

const RESTARTS: Columns = &[
    column("RESTARTS", |outcome| three_digits(outcome.average(|figures| figures.restarts.into()))),
    column("WAIT AGAIN", |outcome| outcome.time(|figures| figures.restart_wait_mean.unwrap_or(0.0))),
    column("DONE AGAIN", |outcome| outcome.share(|figures| figures.lost_percent)),
];

impl Outcome {
    fn average(&self, get: fn(&Figures) -> f64) -> f64 {
        mean(self.figures.iter().map(get))
    }

    fn time(&self, get: fn(&Figures) -> f64) -> String {
        duration(self.average(get))
    }

    fn share(&self, get: fn(&Figures) -> f64) -> String {
        format!("{} %", three_digits(self.average(get)))
    }
}

/// One row per rule.
fn rules(outcomes: &[Outcome], groups: &[Columns]) -> Table {
    let has_clusters = outcomes.iter().any(|outcome| outcome.cluster != outcomes[0].cluster);
    let columns: Vec<&Column> = groups.iter().copied().flatten().collect();
    let mut heading = if has_clusters { vec!["CLUSTER", "RULE"] } else { vec!["RULE"] };
    heading.extend(columns.iter().map(|column| column.heading));
    let mut table = Table::new(&heading);
    for outcome in outcomes {
        let mut row = if has_clusters { vec![outcome.cluster.clone()] } else { Vec::new() };
        row.push(outcome.policy.name().to_owned());
        row.extend(columns.iter().map(|column| (column.cell)(outcome)));
        table.rows.push(row);
    }
    table
}

/// Wait times by group of jobs.
fn parts(screen: &mut Screen, outcome: &str, word: &str, parts: &[(String, Waits)]) {
    if parts.is_empty() {
        return;
    }
    let mut table = Table::new(&[word, "JOBS", "GPU HOURS", "WAIT", "P99", "LONGEST"]);
    for (name, waits) in parts {
        table.rows.push(vec![
            if name.is_empty() { "(none)".into() } else { name.clone() },
            grouped(waits.jobs as u64),
            grouped(waits.gpu_hours.round() as u64),
            duration(waits.wait_mean),
            duration(waits.wait_p99),
            duration(waits.wait_longest),
        ]);
    }
    screen.line("");
    screen.line(&format!("by {}, {outcome}", word.to_lowercase()));
    screen.table(vec![table]);
}
