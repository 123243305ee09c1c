//! `switchyard simulate`: replays a trace of jobs against a cluster under several rules, for the
//! current cluster and a changed one.

mod table;

use crate::args::{Cli, Limits, SimulateArgs};
use crate::failure::Failure;
use crate::input;
use crate::output::{emit, width};
use crate::progress::{Progress, Work};
use crate::snapshot::{self, Settings, SnapshotFile};
use serde_json::{Value, json};
use std::fs::File;
use std::path::Path;
use switchyard_core::units::grouped;
use switchyard_crds::gpu_topology::GPUTopology;
use switchyard_simulate::cluster::{SimulatedCluster, from_nodes};
use switchyard_simulate::fabric::Fabric;
use switchyard_simulate::failures::Failures;
use switchyard_simulate::measure::{Figures, JobWindow, Waits, figures};
use switchyard_simulate::picture::{Curve, picture};
use switchyard_simulate::replay::{Decision, Job, PreemptibleJobs, ReplayOutcome, Rule, Scenario, replay};
use switchyard_simulate::rules::{Policy, settings_for};
use switchyard_simulate::trace::{self, Format, Row, Skipped, Trace, shaken};
use switchyard_worker_contract::exit::Exit;
use table::{SIZES, size};

/// Simulates the rules and prints the outcomes.
pub(super) fn simulate(cli: &Cli, args: &SimulateArgs) -> Result<Exit, Failure> {
    let (input, outcomes) = outcomes(cli, args)?;
    if let Some(path) = &args.svg {
        let curves: Vec<Curve> = outcomes.iter().map(Outcome::curve).collect();
        let title = format!("Waits of {} jobs, limits: {}", grouped(input.rows.len() as u64), input.limits.word());
        std::fs::write(path, picture(&title, &curves))
            .map_err(|error| Failure::usage(format!("--svg: cannot write {}: {error}", path.display())))?;
    }
    emit(cli.output, "Simulation", &input.json(args, &outcomes), || table::table(&input, args, &outcomes, width()));
    Ok(Exit::Done)
}

/// Replays the trace under each rule, on the current cluster and on the changed one.
fn outcomes(cli: &Cli, args: &SimulateArgs) -> Result<(Input, Vec<Outcome>), Failure> {
    let input = Input::read(args)?;
    let variants = variants(&input.cluster.fabric, args)?;
    let inputs: Vec<Vec<Row>> = match args.seeds {
        None => vec![input.rows.clone()],
        Some(seeds) => (0..u64::from(seeds)).map(|seed| shaken(&input.rows, seed)).collect(),
    };
    let mut policies: Vec<Policy> = args.rules.iter().map(|rule| rule.policy()).collect();
    policies.dedup();
    let total = (variants.len() * policies.len() * inputs.len() * input.rows.len()) as u64;
    let mut progress = Progress::new(!cli.quiet, Work { verb: "replayed", words: grouped, total, stride: 16 });
    let mut outcomes = Vec::new();
    for variant in &variants {
        for policy in &policies {
            let replays: Result<Vec<ReplayOutcome>, Failure> = (0..)
                .zip(&inputs)
                .map(|(seed, rows)| {
                    let (model, limits) = (args.bandwidth.into(), input.limits.into());
                    let failures =
                        args.node_failures.map(|days| Failures { seed, ..Failures::every_days(days.into()) });
                    let preemptible = Some(PreemptibleJobs {
                        percent: args.preemptible_percent.map(u64::from),
                        checkpoint: args.checkpoint_seconds.into(),
                        overhead: input.preemption_seconds(args).into(),
                    });
                    let scenario = Scenario { failures, preemptible, ..Scenario::new(&variant.fabric, model, limits) };
                    let queue = settings_for(rows, input.settings.queue.clone());
                    let rule = policy.rule(&variant.fabric, &input.machine, &queue).map_err(Failure::unexpected)?;
                    let mut watched = WithProgress { rule, progress: &mut progress };
                    replay(rows, scenario, &mut watched).map_err(|why| {
                        Failure::new(format!("{}, {}: {why}", policy.name(), variant.name), Exit::NotPlaceable)
                    })
                })
                .collect();
            outcomes.push(Outcome::of(variant, *policy, &inputs, &replays?, input.counted));
        }
    }
    progress.clear();
    Ok((input, outcomes))
}

/// The input of a simulation.
struct Input {
    trace: String,
    format: Format,
    rows: Vec<Row>,
    /// Jobs of the trace that cannot be replayed.
    skipped_jobs: Vec<(Skipped, u64)>,
    cluster: SimulatedCluster,
    machine: GPUTopology,
    /// The controller's.
    settings: Settings,
    limits: Limits,
    counted: JobWindow,
}

impl Input {
    fn read(args: &SimulateArgs) -> Result<Input, Failure> {
        let file = snapshot::read(&args.source)?;
        let (cluster, settings) = snapshot::with_settings(&file)?;
        let cluster = from_nodes(cluster.nodes(), cluster.levels()).map_err(Failure::usage)?;
        let machine = report(&file, &cluster.machine)?;
        let (trace, read) = match &args.trace {
            Some(path) => {
                let name = input::name(path);
                let read = trace::read(open(path)?, &cluster.fabric);
                let read = read.map_err(|error| Failure::usage(format!("error[SY0001]: {name}: {error}")));
                (name, read)
            }
            None => {
                ("the cluster".to_owned(), trace::from_objects(&file.items, &cluster.fabric).map_err(Failure::usage))
            }
        };
        let Trace { format, rows, skipped: skipped_jobs } = read?;
        let has_limits = rows.iter().any(|row| row.limit.is_some());
        let limits = match args.limits {
            Some(Limits::Trace) if !has_limits => {
                return Err(Failure::usage(format!(
                    "--limits trace: {trace} has no limits (limit_seconds, or Timelimit of sacct)"
                )));
            }
            Some(limits) => limits,
            None if has_limits => Limits::Trace,
            None => Limits::None,
        };
        let counted = JobWindow::of(&rows);
        Ok(Input { trace, format, rows, skipped_jobs, cluster, machine, settings, limits, counted })
    }

    /// What a preemption costs.
    fn preemption_seconds(&self, args: &SimulateArgs) -> u32 {
        let assumed = self.settings.queue.policy.overhead.as_secs();
        args.preemption_seconds.unwrap_or(u32::try_from(assumed).unwrap_or(u32::MAX))
    }

    fn json(&self, args: &SimulateArgs, outcomes: &[Outcome]) -> Value {
        let SimulatedCluster { fabric, machine, keys, skipped } = &self.cluster;
        let word = |value: &dyn std::fmt::Debug| format!("{value:?}").to_lowercase();
        json!({
            "trace": self.trace,
            "format": self.format.to_string(),
            "jobsLeftOut": self.skipped_jobs.iter().map(|(why, jobs)| (why.to_string(), json!(jobs))).collect::<serde_json::Map<_, _>>(),
            "jobs": self.rows.len(),
            "gpuHours": gpu_hours(&self.rows),
            "limits": self.limits.word(),
            "bandwidth": word(&args.bandwidth),
            "countedJobs": word(&self.counted),
            "nodeFailuresEveryDays": args.node_failures,
            "preemptiblePercent": args.preemptible_percent,
            "checkpointSeconds": args.checkpoint_seconds,
            "preemptionSeconds": self.preemption_seconds(args),
            "queue": self.settings.arguments,
            "queueIsAssumed": self.settings.assumption().is_some(),
            "cluster": {
                "hosts": fabric.hosts.len(), "gpusPerHost": fabric.gpus_per_host, "leaves": fabric.leaves.len(), "blocks": fabric.blocks.len(),
                "oversubscription": fabric.oversubscription, "labels": keys, "reportOf": machine, "leftOut": skipped,
            },
            "results": outcomes.iter().map(Outcome::json).collect::<Vec<_>>(),
        })
    }
}

fn open(path: &Path) -> Result<Box<dyn std::io::Read>, Failure> {
    if path == Path::new("-") {
        return Ok(Box::new(std::io::stdin()));
    }
    let unreadable = |what: String| Failure::usage(format!("error[SY0001]: cannot read {}: {what}", path.display()));
    // Opening a pipe would wait for a writer.
    let about = path.metadata().map_err(|error| unreadable(error.to_string()))?;
    if !about.is_file() {
        return Err(unreadable("expected a file with a trace of jobs".into()));
    }
    Ok(Box::new(File::open(path).map_err(|error| unreadable(error.to_string()))?))
}

fn report(file: &SnapshotFile, node: &str) -> Result<GPUTopology, Failure> {
    let is = |item: &&Value| item["kind"] == "GPUTopology" && item["metadata"]["name"] == node;
    let item = file.items.iter().find(is).cloned().unwrap_or_default();
    serde_json::from_value(item).map_err(|error| Failure::usage(format!("GPUTopology {node}: {error}")))
}

fn gpu_hours(rows: &[Row]) -> f64 {
    rows.iter().map(|row| row.duration * f64::from(row.gpus)).sum::<f64>() / 3600.0
}

/// A cluster to replay the trace on.
struct Variant {
    name: String,
    fabric: Fabric,
}

/// The current cluster and, if the command line changes it, the changed one.
fn variants(fabric: &Fabric, args: &SimulateArgs) -> Result<Vec<Variant>, Failure> {
    let mut variants = vec![Variant { name: "as it is".into(), fabric: fabric.clone() }];
    let mut changed = fabric.clone();
    let mut words = Vec::new();
    if let Some(more) = args.more_racks {
        changed = changed.with_more_leaves(usize::from(more));
        words.push(format!("+{more} rack{}", if more == 1 { "" } else { "s" }));
    }
    match args.oversubscription[..] {
        [] => (),
        [rack] => changed.oversubscription = [rack, changed.oversubscription[1].max(rack)],
        [rack, block] if rack <= block => changed.oversubscription = [rack, block],
        [rack, block] => {
            return Err(Failure::usage(format!(
                "--oversubscription: got {rack},{block}; expected the second factor to be no less than the first, since what leaves a block \
                 also leaves a rack"
            )));
        }
        _ => return Err(Failure::usage("--oversubscription: expected one factor or two")),
    }
    if !args.oversubscription.is_empty() {
        let [rack, block] = changed.oversubscription;
        words.push(format!("oversubscription {rack}, {block}"));
    }
    if !words.is_empty() {
        variants.push(Variant { name: words.join(", "), fabric: changed });
    }
    Ok(variants)
}

/// The outcome of one rule on one cluster.
struct Outcome {
    cluster: String,
    gpus: u32,
    policy: Policy,
    /// One per input.
    figures: Vec<Figures>,
    /// From the first input, by queue; empty if the trace has no queues.
    queues: Vec<(String, Waits)>,
    /// From the first input, by size.
    sizes: Vec<(String, Waits)>,
    /// From the first input, seconds.
    waits: Vec<f64>,
}

impl Outcome {
    fn of(
        variant: &Variant,
        policy: Policy,
        inputs: &[Vec<Row>],
        replays: &[ReplayOutcome],
        counted: JobWindow,
    ) -> Outcome {
        let gpus = variant.fabric.gpus();
        let figures = replays.iter().map(|replays| figures(replays, gpus, counted)).collect();
        let jobs: Vec<_> = replays.iter().take(1).flat_map(|replays| counted.jobs(replays)).collect();
        let rows = &inputs[0];
        let mut queues: Vec<&str> = rows.iter().map(|row| row.queue.as_str()).collect();
        queues.sort_unstable();
        queues.dedup();
        let is_known = queues.iter().any(|queue| !queue.is_empty());
        let of =
            |is: &dyn Fn(&Row) -> bool| Waits::of(jobs.iter().filter(|(at, _)| is(&rows[*at])).map(|(_, job)| *job));
        let queues =
            queues.iter().filter(|_| is_known).map(|queue| ((*queue).to_owned(), of(&|row| row.queue == **queue)));
        let sizes = SIZES.iter().map(|name| ((*name).to_owned(), of(&|row| size(row.gpus) == *name)));
        Outcome {
            cluster: variant.name.clone(),
            gpus,
            policy,
            figures,
            queues: queues.filter(|(_, waits)| waits.jobs > 0).collect(),
            sizes: sizes.filter(|(_, waits)| waits.jobs > 0).collect(),
            waits: jobs.iter().map(|(_, job)| job.wait()).collect(),
        }
    }

    fn curve(&self) -> Curve {
        let cluster = if self.cluster == "as it is" { String::new() } else { format!(", {}", self.cluster) };
        Curve { name: format!("{}{cluster}", self.policy.name()), waits: self.waits.clone() }
    }

    fn json(&self) -> Value {
        let parts = |parts: &[(String, Waits)], key: &str| -> Vec<Value> {
            let part = |(name, waits): &(String, Waits)| {
                let mut part = json!(waits);
                part[key] = name.as_str().into();
                part
            };
            parts.iter().map(part).collect()
        };
        json!({
            "cluster": self.cluster, "gpus": self.gpus, "rule": self.policy.name(), "figures": self.figures,
            "queues": parts(&self.queues, "queue"), "sizes": parts(&self.sizes, "gpus"),
        })
    }
}

/// A rule that reports progress.
struct WithProgress<'a> {
    rule: Box<dyn Rule>,
    progress: &'a mut Progress,
}

impl Rule for WithProgress<'_> {
    fn submitted(&mut self, job: &Job) -> Result<(), String> {
        self.rule.submitted(job)
    }

    fn ended(&mut self, job: usize, now: f64) {
        self.progress.advance(1);
        self.rule.ended(job, now);
    }

    fn failed(&mut self, host: usize, jobs: &[usize], now: f64) {
        self.rule.failed(host, jobs, now);
    }

    fn repaired(&mut self, host: usize, now: f64) {
        self.rule.repaired(host, now);
    }

    fn decide(&mut self, now: f64) -> Result<Vec<Decision>, String> {
        self.rule.decide(now)
    }

    fn next_decision(&self) -> Option<f64> {
        self.rule.next_decision()
    }
}

#[cfg(test)]
mod tests;
