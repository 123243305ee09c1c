//! Formats the outcomes of a simulation.

use super::{Input, Outcome, gpu_hours};
use crate::args::SimulateArgs;
use crate::text::{Screen, Table};
use switchyard_core::units::{counted, duration, grouped, three_digits};
use switchyard_simulate::cluster::SimulatedCluster;
use switchyard_simulate::measure::{Figures, JobWindow, Waits, deviation, mean};
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
    let (short, long) = (rules(outcomes, false), rules(outcomes, true));
    screen.line("");
    screen.table(vec![long, short]);
    // Prefer the product's outcome on the current cluster, otherwise the first one.
    let own = outcomes.iter().find(|outcome| outcome.policy == switchyard_simulate::rules::Policy::Switchyard);
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
    labelled(screen, "played", &format!("limits: {limits}{failures}; {of}{inputs}"));
    if outcomes.iter().any(|outcome| outcome.policy.preempts()) {
        let SimulateArgs { preemptible_percent, checkpoint_seconds, preemption_seconds, .. } = args;
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

/// One row per rule. `long` shows all columns.
fn rules(outcomes: &[Outcome], long: bool) -> Table {
    let clusters = outcomes.iter().any(|outcome| outcome.cluster != outcomes[0].cluster);
    let mut heading = if clusters { vec!["CLUSTER"] } else { Vec::new() };
    heading.extend(["RULE", "SUBMIT TO END", "WAIT", "P99", "LONGEST"]);
    if long {
        heading.extend(["64 GPUS AND MORE", "SLOWER BY PLACE", "IDLE BESIDE WAITING", "USED"]);
    }
    let has_restarts = outcomes.iter().any(|outcome| outcome.figures.iter().any(|figures| figures.restarts > 0));
    if has_restarts {
        heading.extend(["RESTARTS", "WAIT AGAIN", "DONE AGAIN"]);
    }
    let mut table = Table::new(&heading);
    for outcome in outcomes {
        let average = |get: &dyn Fn(&Figures) -> f64| mean(outcome.figures.iter().map(get));
        let time = |get: &dyn Fn(&Figures) -> f64| duration(average(get));
        let share = |get: &dyn Fn(&Figures) -> f64| format!("{} %", three_digits(average(get)));
        let completions: Vec<f64> = outcome.figures.iter().map(|figures| figures.completion_mean).collect();
        let around = match completions.len() {
            0 | 1 => String::new(),
            _ => format!(" ± {}", duration(deviation(&completions))),
        };
        let mut row = if clusters { vec![outcome.cluster.clone()] } else { Vec::new() };
        row.extend([
            outcome.policy.name().to_owned(),
            time(&|figures| figures.completion_mean) + &around,
            time(&|figures| figures.wait_mean),
            time(&|figures| figures.wait_p99),
            time(&|figures| figures.wait_longest),
        ]);
        if long {
            let has_large = outcome.sizes.iter().any(|(name, _)| SIZES[3..].contains(&name.as_str()));
            row.push(if has_large { time(&|figures| figures.large_wait_mean) } else { "-".into() });
            row.push(share(&|figures| figures.slow_percent));
            row.push(share(&|figures| figures.idle_percent));
            row.push(share(&|figures| figures.utilisation_percent));
        }
        if has_restarts {
            row.push(three_digits(average(&|figures| figures.restarts.into())));
            row.push(time(&|figures| figures.restart_wait_mean.unwrap_or(0.0)));
            row.push(share(&|figures| figures.lost_percent));
        }
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
