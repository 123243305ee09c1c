//! Arguments of `simulate`.

use super::ClusterArgs;
use clap::{Args, ValueEnum};
use std::path::PathBuf;
use switchyard_simulate::replay;
use switchyard_simulate::rules::Policy;
use switchyard_simulate::speed::Model;

/// Arguments of `simulate`.
#[derive(Debug, Args)]
pub(crate) struct SimulateArgs {
    /// Trace to replay: a CSV file with the columns submit_seconds, duration_seconds and gpus,
    /// optionally queue and limit_seconds, in submission order; the output of `sacct --parsable2`;
    /// or a log in the format of the Helios, Acme or Philly traces. Can be gzipped. Default: the
    /// finished TrainJobs and GPU pods in the cluster.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,

    /// The cluster, which is empty when the trace starts.
    #[command(flatten)]
    pub source: ClusterArgs,

    /// Scheduling rules to compare.
    #[arg(long, value_enum, value_delimiter = ',', num_args = 1.., value_name = "RULE", default_values_t = Rule::value_variants().to_vec())]
    pub rules: Vec<Rule>,

    /// Time limits (`activeDeadlineSeconds`) of the jobs. Default: the trace's, if it has
    /// any.
    #[arg(long, value_enum)]
    pub limits: Option<Limits>,

    /// Percentage of the jobs that write checkpoints and can be preempted, chosen by a hash.
    /// Default: the cluster's jobs as their manifests say, and all jobs of a trace.
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(0..=100))]
    pub preemptible_percent: Option<u8>,

    /// Seconds of work between two checkpoints of a job. A preempted job repeats the work since the
    /// last one.
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub checkpoint_seconds: u32,

    /// Seconds to save a preempted job and to start it again. Default: what the controller assumes,
    /// 120 unless configured.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(0..=86_400))]
    pub preemption_seconds: Option<u32>,

    /// Model of a gang's bandwidth.
    #[arg(long, value_enum, default_value_t = Bandwidth::Flows)]
    pub bandwidth: Bandwidth,

    /// Also simulate the cluster with this many more racks, each as large as the largest one.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub more_racks: Option<u16>,

    /// Also simulate the cluster with this oversubscription of the uplinks of racks and, after the
    /// comma, of blocks of racks.
    #[arg(long, value_name = "RACK[,BLOCK]", value_delimiter = ',', num_args = 1, value_parser = factor)]
    pub oversubscription: Vec<f64>,

    /// Mean number of days between failures of a node. Failed nodes are repaired after 12 hours,
    /// and their jobs resume from hourly checkpoints. Default: no node fails.
    #[arg(long, value_name = "DAYS", value_parser = clap::value_parser!(u16).range(1..=10_000))]
    pub node_failures: Option<u16>,

    /// Simulate this many randomized variants of the trace (submissions up to 30 minutes earlier or
    /// later, durations up to 5 % shorter or longer), and show means with deviations. Default: the
    /// trace as it is.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=100))]
    pub seeds: Option<u16>,

    /// Write a chart of wait times by rule (SVG) to this file.
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
}

/// A scheduling rule for queue and placement. `-like` rules follow the documentation of other
/// schedulers, without quotas and plugins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Rule {
    /// The controller's queue and placement, with the settings of the cluster's controller.
    Configured,
    /// The same, but first come, first served.
    Switchyard,
    /// The same, with estimated run times instead of missing limits.
    SwitchyardPredictor,
    /// The same, with the queue policy Opportunistic: preemptible jobs make way for older ones.
    SwitchyardOpportunistic,
    /// By default as configured: the queue policy LeastAttainedService with estimated run times:
    /// preemptible jobs also make way for jobs that have run less.
    SwitchyardLeastAttained,
    /// The first job blocks those behind it; places jobs like kueue-like.
    StrictFifo,
    /// Kueue's BestEffortFIFO with topology-aware scheduling.
    KueueLike,
    /// The same, with preemption of newer jobs (LowerOrNewerEqualPriority).
    KueuePreempting,
    /// Volcano's gang scheduling, which prefers the most used nodes.
    VolcanoLike,
    /// kube-scheduler's choice of the least used nodes; gangs start as a whole.
    DefaultScheduler,
    /// EASY backfill by limits, as in Slurm; places jobs like kueue-like.
    Easy,
}

impl Rule {
    pub(crate) fn policy(self) -> Policy {
        match self {
            Rule::Configured => Policy::Configured,
            Rule::Switchyard => Policy::Switchyard,
            Rule::SwitchyardPredictor => Policy::Predicting,
            Rule::SwitchyardOpportunistic => Policy::Opportunistic,
            Rule::SwitchyardLeastAttained => Policy::LeastAttainedService,
            Rule::StrictFifo => Policy::StrictFifo,
            Rule::KueueLike => Policy::KueueLike,
            Rule::KueuePreempting => Policy::KueuePreempting,
            Rule::VolcanoLike => Policy::VolcanoLike,
            Rule::DefaultScheduler => Policy::DefaultScheduler,
            Rule::Easy => Policy::Easy,
        }
    }
}

/// Limits of jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Limits {
    /// The limits in the trace.
    Trace,
    /// The smallest sufficient limit of 1 h, 4 h, 12 h, 1 d, 3 d, 7 d, 14 d and 90 d.
    Coarse,
    /// The same, for half of the jobs.
    Half,
    /// No limits.
    None,
    /// Exactly the duration, as if the future were known.
    Exact,
}

impl Limits {
    /// The word of the command line.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Limits::Trace => "trace",
            Limits::Coarse => "coarse",
            Limits::Half => "half",
            Limits::None => "none",
            Limits::Exact => "exact",
        }
    }
}

impl From<Limits> for replay::Limits {
    fn from(limits: Limits) -> replay::Limits {
        match limits {
            Limits::Trace => replay::Limits::Trace,
            Limits::Coarse => replay::Limits::Coarse,
            Limits::Half => replay::Limits::Half,
            Limits::None => replay::Limits::None,
            Limits::Exact => replay::Limits::Exact,
        }
    }
}

/// Model of a gang's bandwidth.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Bandwidth {
    /// Each gang is a ring, and all rings share the links between racks fairly.
    Flows,
    /// Depends only on the smallest domain that contains the gang.
    Levels,
}

impl From<Bandwidth> for Model {
    fn from(bandwidth: Bandwidth) -> Model {
        match bandwidth {
            Bandwidth::Flows => Model::Flows,
            Bandwidth::Levels => Model::Levels,
        }
    }
}

fn factor(text: &str) -> Result<f64, String> {
    let factor = text.parse().ok().filter(|factor| (1.0..=1000.0).contains(factor));
    factor.ok_or_else(|| "expected a factor from 1 to 1000, such as 2".into())
}
