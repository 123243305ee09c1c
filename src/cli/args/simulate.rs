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
    /// The jobs: CSV with the columns submit_seconds, duration_seconds and gpus, and queue and
    /// limit_seconds where they are known, in the order of submission; or what `sacct --parsable2`
    /// prints, or a log in the format of the Helios, Acme or Philly traces. Packed by gzip or not.
    /// Default: the TrainJobs, and the pods of others with GPUs, that have ended in the cluster.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,

    /// The cluster, which is empty when the trace begins.
    #[command(flatten)]
    pub source: ClusterArgs,

    /// Rules to play.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "RULE", default_values_t = Rule::value_variants().to_vec())]
    pub rules: Vec<Rule>,

    /// What limits (`activeDeadlineSeconds`) the jobs have. Default: those of the trace if it has
    /// some, else coarse ones.
    #[arg(long, value_enum)]
    pub limits: Option<Limits>,

    /// What the bandwidth of a gang depends on.
    #[arg(long, value_enum, default_value_t = Bandwidth::Flows)]
    pub bandwidth: Bandwidth,

    /// Also play the cluster with so many more racks, each as large as the largest.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub more_racks: Option<u16>,

    /// Also play the cluster with this oversubscription of the links that leave a rack and, behind
    /// the comma, a block of racks.
    #[arg(long, value_name = "RACK[,BLOCK]", value_delimiter = ',', num_args = 1, value_parser = factor)]
    pub oversubscription: Vec<f64>,

    /// Nodes fail, each every so many days on average, and are repaired after 12 hours; their jobs
    /// resume from checkpoints that they write every hour. Default: no node fails.
    #[arg(long, value_name = "DAYS", value_parser = clap::value_parser!(u16).range(1..=10_000))]
    pub node_failures: Option<u16>,

    /// Play so many shaken inputs (submissions up to 30 minutes earlier or later, durations up to 5
    /// %) and show means with their deviations. Default: the trace as it is.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=100))]
    pub seeds: Option<u16>,

    /// Write a picture of how long jobs wait by each rule (SVG) to this file.
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
}

/// A rule for the queue and for places. `-like`: from the documentation of others, without quotas
/// and plugins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Rule {
    /// The controller's own queue and placement.
    Switchyard,
    /// The same, where run times stand in for limits that are missing.
    SwitchyardPredictor,
    /// The first job blocks those behind it; places as with kueue-like.
    StrictFifo,
    /// Kueue's BestEffortFIFO with topology-aware scheduling.
    KueueLike,
    /// Volcano's gangs on the most used nodes.
    VolcanoLike,
    /// The least used nodes, as kube-scheduler chooses them; gangs start as a whole.
    DefaultScheduler,
    /// EASY backfill by limits, as Slurm does it; places as with kueue-like.
    Easy,
}

impl Rule {
    pub(crate) fn policy(self) -> Policy {
        match self {
            Rule::Switchyard => Policy::Switchyard,
            Rule::SwitchyardPredictor => Policy::Predicting,
            Rule::StrictFifo => Policy::StrictFifo,
            Rule::KueueLike => Policy::KueueLike,
            Rule::VolcanoLike => Policy::VolcanoLike,
            Rule::DefaultScheduler => Policy::DefaultScheduler,
            Rule::Easy => Policy::Easy,
        }
    }
}

/// Limits of jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Limits {
    /// Those of the trace.
    Trace,
    /// The least of 1 h, 4 h, 12 h, 1 d, 3 d, 7 d, 14 d and 90 d that the job needs.
    Coarse,
    /// The same for half of the jobs.
    Half,
    /// None.
    None,
    /// Exactly the duration: what a rule could do that knows the future.
    Exact,
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

/// What the bandwidth of a gang depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Bandwidth {
    /// Rings of all gangs share the links between racks fairly.
    Flows,
    /// The smallest domain that holds the gang.
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
