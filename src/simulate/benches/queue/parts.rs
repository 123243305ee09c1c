//! The parts of the benchmark: which rules run on which traces at which loads.

use jiff::SignedDuration;
use std::collections::BTreeMap;
use switchyard_crds::gpu_topology::GPUTopology;
use switchyard_ledger::queue::{PlacementDelay, PredictorSettings, QueueSettings, Weights};
use switchyard_plan::cluster::queue_policy::{PolicySettings, QueuePolicy};
use switchyard_simulate::fabric::Fabric;
use switchyard_simulate::failures::Failures;
use switchyard_simulate::replay::{Limits, PreemptibleJobs, Rule, UrgentJobs};
use switchyard_simulate::rules::{Policy, Pool, PoolOrder, Product};

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum TraceName {
    /// An LLM cluster's trace on equal leaves of eight hosts.
    Lingjun,
    /// The same trace on its original 847 hosts in uneven leaves, with compressed arrival times.
    Fleet,
    /// Mostly small jobs of many teams, on equal leaves of eight hosts.
    Philly,
}

impl TraceName {
    pub(crate) fn name(self) -> &'static str {
        match self {
            TraceName::Lingjun => "lingjun",
            TraceName::Fleet => "fleet",
            TraceName::Philly => "philly",
        }
    }

    pub(crate) fn file(self) -> &'static str {
        match self {
            TraceName::Lingjun | TraceName::Fleet => "lingjun-2023.csv.gz",
            TraceName::Philly => "philly-2017-october.csv.gz",
        }
    }

    pub(crate) fn hosts(self) -> Option<&'static str> {
        (self == TraceName::Fleet).then_some("lingjun-2023-hosts.csv.gz")
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Part {
    /// Our queue compared with the rules of other schedulers.
    Rules,
    /// The same with node failures, 100 days apart per node.
    Failures,
    /// Our queue with each constant halved and doubled.
    Constants,
    /// Our queue with and without equal team weights.
    Teams,
    /// Our queue with and without waiting for a better placement.
    Patience,
    /// Our queue when one job in ten has a higher priority class and can preempt.
    Priorities,
    /// Queue policies without limits, if all jobs are preemptible.
    Preemptible,
    /// The same, if four of five jobs are.
    MostlyPreemptible,
    /// The same, if half of the jobs are.
    HalfPreemptible,
    /// The same, if no job is.
    NotPreemptible,
    /// The same with 60 s per preemption, if all jobs are preemptible.
    CheapPreemption,
    /// The same with checkpoints every 30 min and 300 s per preemption.
    CostlyPreemption,
    /// The default policy with limits, if all jobs are preemptible. Part `rules` has the same
    /// limits without preemptions.
    PreemptibleWithLimits,
    /// Times single passes over a long queue.
    Pass,
}

pub(crate) type RuleResult = Result<Box<dyn Rule>, String>;

/// One table row: a rule and the limits it receives.
pub(crate) struct Entry {
    pub(crate) name: &'static str,
    pub(crate) limits: Limits,
    pub(crate) make: fn(&Fabric, &GPUTopology) -> RuleResult,
}

impl Part {
    pub(crate) const ALL: [Part; 14] = [
        Part::Rules,
        Part::Failures,
        Part::Constants,
        Part::Teams,
        Part::Patience,
        Part::Priorities,
        Part::Preemptible,
        Part::MostlyPreemptible,
        Part::HalfPreemptible,
        Part::NotPreemptible,
        Part::CheapPreemption,
        Part::CostlyPreemption,
        Part::PreemptibleWithLimits,
        Part::Pass,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Part::Rules => "rules",
            Part::Failures => "failures",
            Part::Constants => "constants",
            Part::Teams => "teams",
            Part::Patience => "patience",
            Part::Priorities => "priorities",
            Part::Preemptible => "preemptible",
            Part::MostlyPreemptible => "mostlyPreemptible",
            Part::HalfPreemptible => "halfPreemptible",
            Part::NotPreemptible => "notPreemptible",
            Part::CheapPreemption => "cheapPreemption",
            Part::CostlyPreemption => "costlyPreemption",
            Part::PreemptibleWithLimits => "preemptibleWithLimits",
            Part::Pass => "pass",
        }
    }

    pub(crate) fn traces(self) -> &'static [TraceName] {
        match self {
            Part::Rules | Part::Preemptible => &[TraceName::Lingjun, TraceName::Philly],
            Part::Teams => &[TraceName::Philly],
            Part::Pass => &[TraceName::Fleet],
            _ => &[TraceName::Lingjun],
        }
    }

    pub(crate) fn loads(self, trace: TraceName) -> &'static [f64] {
        match (self, trace) {
            (
                Part::Rules
                | Part::Preemptible
                | Part::MostlyPreemptible
                | Part::HalfPreemptible
                | Part::NotPreemptible
                | Part::CheapPreemption
                | Part::CostlyPreemption
                | Part::PreemptibleWithLimits,
                TraceName::Lingjun,
            ) => &[0.8, 0.71, 0.64],
            // At loads below 0.86 hardly any job of this trace waits, because one week has most of
            // the submissions.
            (Part::Rules, TraceName::Philly) => &[1.01, 0.86, 0.8, 0.71, 0.64],
            (Part::Preemptible, _) => &[1.01, 0.86],
            (Part::Teams, _) => &[1.01],
            (Part::Patience | Part::Priorities, _) => &[0.71, 0.64],
            _ => &[0.71],
        }
    }

    pub(crate) fn failures(self) -> Option<Failures> {
        (self == Part::Failures).then(|| Failures::every_days(100.0))
    }

    pub(crate) fn entries(self) -> &'static [Entry] {
        match self {
            Part::Rules => &RULES,
            // A pool has no hosts that could fail.
            Part::Failures => &RULES[..WITH_HOSTS],
            Part::Constants => &CONSTANTS,
            Part::Teams => &TEAMS,
            Part::Patience => &PATIENCE,
            Part::Priorities => &PRIORITIES,
            Part::PreemptibleWithLimits => &WITH_LIMITS,
            Part::Pass => &PREEMPTION[..OURS],
            _ => &PREEMPTION,
        }
    }

    /// One job in ten is urgent. Checkpoints are an hour apart, as in the runs with failures.
    pub(crate) fn urgent(self) -> Option<UrgentJobs> {
        (self == Part::Priorities).then_some(UrgentJobs { one_in: 10, checkpoint: 3600.0 })
    }
}

impl Part {
    pub(crate) fn preemptible(self) -> Option<PreemptibleJobs> {
        let (percent, checkpoint, overhead) = match self {
            Part::Preemptible | Part::PreemptibleWithLimits => (100, 600.0, 120.0),
            Part::MostlyPreemptible => (80, 600.0, 120.0),
            Part::HalfPreemptible => (50, 600.0, 120.0),
            Part::NotPreemptible => (0, 600.0, 120.0),
            Part::CheapPreemption => (100, 600.0, 60.0),
            Part::CostlyPreemption => (100, 1800.0, 300.0),
            _ => return None,
        };
        Some(PreemptibleJobs { percent: Some(percent), checkpoint, overhead })
    }
}

/// Number of rules in `PREEMPTION` that are ours.
const OURS: usize = 7;

const PREEMPTION: [Entry; 10] = [
    Entry { name: "first come, first served", limits: Limits::None, make: |f, m| rule(Policy::Switchyard, f, m) },
    Entry { name: "the same with predictor", limits: Limits::None, make: |f, m| rule(Policy::Predicting, f, m) },
    Entry { name: "opportunistic", limits: Limits::None, make: |f, m| rule(Policy::Opportunistic, f, m) },
    Entry { name: "opportunistic with predictor", limits: Limits::None, make: opportunistic_and_predicting },
    Entry { name: "least attained service", limits: Limits::None, make: |f, m| preempting(f, m, 4) },
    Entry {
        name: "least attained with predictor",
        limits: Limits::None,
        make: |f, m| rule(Policy::LeastAttainedService, f, m),
    },
    Entry { name: "least attained, 8 preemptions", limits: Limits::None, make: |f, m| preempting(f, m, 8) },
    Entry { name: "strict FIFO", limits: Limits::None, make: |f, m| rule(Policy::StrictFifo, f, m) },
    Entry { name: "Kueue-like", limits: Limits::None, make: |f, m| rule(Policy::KueueLike, f, m) },
    Entry {
        name: "Kueue-like, preempting newer",
        limits: Limits::None,
        make: |f, m| rule(Policy::KueuePreempting, f, m),
    },
];

const WITH_LIMITS: [Entry; 2] = [
    Entry {
        name: "least attained, limits",
        limits: Limits::Coarse,
        make: |f, m| rule(Policy::LeastAttainedService, f, m),
    },
    Entry {
        name: "least attained, half without",
        limits: Limits::Half,
        make: |f, m| rule(Policy::LeastAttainedService, f, m),
    },
];

/// A rule of a controller with default settings.
fn rule(policy: Policy, fabric: &Fabric, machine: &GPUTopology) -> RuleResult {
    policy.rule(fabric, machine, &QueueSettings::default())
}

fn preempting(fabric: &Fabric, machine: &GPUTopology, max_preemptions: i32) -> RuleResult {
    let policy = PolicySettings {
        policy: QueuePolicy::LeastAttainedService,
        max_preemptions,
        max_preemptions_per_day: max_preemptions,
        ..PolicySettings::default()
    };
    Ok(Box::new(Product::new(fabric, machine)?.with_queue(|queue| queue.policy = policy)))
}

fn opportunistic_and_predicting(fabric: &Fabric, machine: &GPUTopology) -> RuleResult {
    let product = Product::new(fabric, machine)?.with_queue(|queue| {
        queue.policy.policy = QueuePolicy::Opportunistic;
        queue.predictor = Some(PredictorSettings::default());
    });
    Ok(Box::new(product))
}

fn pool(fabric: &Fabric, order: PoolOrder) -> RuleResult {
    Ok(Box::new(Pool::new(fabric, order)))
}

/// Number of rules in `RULES` that place jobs on hosts.
const WITH_HOSTS: usize = 11;

const RULES: [Entry; 14] = [
    Entry { name: "Switchyard", limits: Limits::Coarse, make: |f, m| rule(Policy::Switchyard, f, m) },
    Entry {
        name: "Switchyard, half without limits",
        limits: Limits::Half,
        make: |f, m| rule(Policy::Switchyard, f, m),
    },
    Entry { name: "with predictor, half without", limits: Limits::Half, make: |f, m| rule(Policy::Predicting, f, m) },
    Entry { name: "Switchyard, no limits", limits: Limits::None, make: |f, m| rule(Policy::Switchyard, f, m) },
    Entry { name: "with predictor, no limits", limits: Limits::None, make: |f, m| rule(Policy::Predicting, f, m) },
    Entry { name: "strict FIFO", limits: Limits::None, make: |f, m| rule(Policy::StrictFifo, f, m) },
    Entry { name: "Kueue-like", limits: Limits::None, make: |f, m| rule(Policy::KueueLike, f, m) },
    Entry { name: "Volcano-like", limits: Limits::None, make: |f, m| rule(Policy::VolcanoLike, f, m) },
    Entry { name: "default scheduler", limits: Limits::None, make: |f, m| rule(Policy::DefaultScheduler, f, m) },
    Entry { name: "EASY, coarse limits", limits: Limits::Coarse, make: |f, m| rule(Policy::Easy, f, m) },
    Entry { name: "EASY, half without", limits: Limits::Half, make: |f, m| rule(Policy::Easy, f, m) },
    Entry { name: "ideal: strict FIFO, no places", limits: Limits::None, make: |f, _| pool(f, PoolOrder::StrictFifo) },
    Entry { name: "ideal: best effort, no places", limits: Limits::None, make: |f, _| pool(f, PoolOrder::BestEffort) },
    Entry {
        name: "ideal: shortest first, no places",
        limits: Limits::Exact,
        make: |f, _| pool(f, PoolOrder::Shortest),
    },
];

fn predicting(fabric: &Fabric, machine: &GPUTopology, settings: PredictorSettings) -> RuleResult {
    Ok(Box::new(Product::new(fabric, machine)?.with_queue(|queue| queue.predictor = Some(settings))))
}

fn forecasting(fabric: &Fabric, machine: &GPUTopology, one_in: i32) -> RuleResult {
    Ok(Box::new(Product::new(fabric, machine)?.with_queue(|queue| queue.early = one_in)))
}

fn limits_within(fabric: &Fabric, machine: &GPUTopology, within_hours: i64) -> RuleResult {
    Ok(Box::new(
        Product::new(fabric, machine)?
            .with_queue(|queue| queue.longest_limit = SignedDuration::from_hours(within_hours)),
    ))
}

fn with_placement_delay_percent(fabric: &Fabric, machine: &GPUTopology, percent_of_limit: i32) -> RuleResult {
    Ok(Box::new(
        Product::new(fabric, machine)?
            .with_queue(|queue| queue.placement_delay = Some(PlacementDelay { percent_of_limit })),
    ))
}

const PATIENCE: [Entry; 4] = [
    Entry { name: "Switchyard", limits: Limits::Coarse, make: |f, m| rule(Policy::Switchyard, f, m) },
    Entry {
        name: "waits for 10 % of its limit",
        limits: Limits::Coarse,
        make: |f, m| with_placement_delay_percent(f, m, 10),
    },
    Entry {
        name: "waits for 5 % of its limit",
        limits: Limits::Coarse,
        make: |f, m| with_placement_delay_percent(f, m, 5),
    },
    Entry {
        name: "waits for 20 % of its limit",
        limits: Limits::Coarse,
        make: |f, m| with_placement_delay_percent(f, m, 20),
    },
];

const PRIORITIES: [Entry; 2] = [
    Entry { name: "Switchyard", limits: Limits::Coarse, make: |f, m| rule(Policy::Switchyard, f, m) },
    Entry {
        name: "Switchyard, half without limits",
        limits: Limits::Half,
        make: |f, m| rule(Policy::Switchyard, f, m),
    },
];

/// Equal weights for all teams, with this half-life of past usage.
fn fair_share(fabric: &Fabric, machine: &GPUTopology, half_life_hours: i64) -> RuleResult {
    let equal = Weights { half_life: SignedDuration::from_hours(half_life_hours), ..Weights::new(BTreeMap::new()) };
    Ok(Box::new(Product::new(fabric, machine)?.with_queue(|queue| queue.weights = Some(equal))))
}

/// Usage half-lives of one week, half a week and two weeks.
const TEAMS: [Entry; 5] = [
    Entry { name: "Switchyard", limits: Limits::Coarse, make: |f, m| rule(Policy::Switchyard, f, m) },
    Entry { name: "equal weights", limits: Limits::Coarse, make: |f, m| fair_share(f, m, 168) },
    Entry { name: "equal weights, half-life 3.5 days", limits: Limits::Coarse, make: |f, m| fair_share(f, m, 84) },
    Entry { name: "equal weights, half-life 14 days", limits: Limits::Coarse, make: |f, m| fair_share(f, m, 336) },
    Entry { name: "Kueue-like", limits: Limits::None, make: |f, m| rule(Policy::KueueLike, f, m) },
];

const MINUTES_5: SignedDuration = SignedDuration::from_mins(5);
const MINUTES_20: SignedDuration = SignedDuration::from_mins(20);

/// Ordering constants, with limits for all jobs; then predictor constants, with limits for half of
/// the jobs; then forecast constants.
const CONSTANTS: [Entry; 13] = [
    Entry { name: "late within a day, all limits", limits: Limits::Coarse, make: |f, m| limits_within(f, m, 24) },
    Entry { name: "late within half a day", limits: Limits::Coarse, make: |f, m| limits_within(f, m, 12) },
    Entry { name: "late within two days", limits: Limits::Coarse, make: |f, m| limits_within(f, m, 48) },
    Entry { name: "as they are", limits: Limits::Half, make: |f, m| predicting(f, m, PredictorSettings::default()) },
    Entry {
        name: "10 jobs kept",
        limits: Limits::Half,
        make: |f, m| predicting(f, m, PredictorSettings { samples: 10, ..PredictorSettings::default() }),
    },
    Entry {
        name: "40 jobs kept",
        limits: Limits::Half,
        make: |f, m| predicting(f, m, PredictorSettings { samples: 40, ..PredictorSettings::default() }),
    },
    Entry {
        name: "half as long again",
        limits: Limits::Half,
        make: |f, m| predicting(f, m, PredictorSettings { remaining_percent: 50, ..PredictorSettings::default() }),
    },
    Entry {
        name: "twice as long again",
        limits: Limits::Half,
        make: |f, m| predicting(f, m, PredictorSettings { remaining_percent: 200, ..PredictorSettings::default() }),
    },
    Entry {
        name: "at least 5 minutes",
        limits: Limits::Half,
        make: |f, m| predicting(f, m, PredictorSettings { min_remaining: MINUTES_5, ..PredictorSettings::default() }),
    },
    Entry {
        name: "at least 20 minutes",
        limits: Limits::Half,
        make: |f, m| predicting(f, m, PredictorSettings { min_remaining: MINUTES_20, ..PredictorSettings::default() }),
    },
    Entry { name: "forecasts as they are", limits: Limits::Coarse, make: |f, m| forecasting(f, m, 10) },
    Entry { name: "one in 5 ends early", limits: Limits::Coarse, make: |f, m| forecasting(f, m, 5) },
    Entry { name: "one in 20 ends early", limits: Limits::Coarse, make: |f, m| forecasting(f, m, 20) },
];
