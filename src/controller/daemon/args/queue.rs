//! Arguments that determine the order of the queue.

use super::{Toggle, first_paragraph};
use clap::{ArgMatches, Args, Command, FromArgMatches, ValueEnum};
use jiff::SignedDuration;
use switchyard_ledger::queue::{PredictorSettings, QueueSettings, Weights};
use switchyard_plan::cluster::queue_policy::{PolicySettings, QueuePolicy};

/// How to estimate the run time of a job that sets no `activeDeadlineSeconds`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "PascalCase")]
pub enum QueuePredictor {
    /// No estimate.
    None,
    /// From the run times of this job and similar ones.
    RunTimes,
}

/// Which jobs of equal priority come first, and whether they preempt others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "PascalCase")]
pub enum QueuePolicyName {
    /// In order of submission, without preemption.
    FirstComeFirstServed,
    /// In order of submission. Jobs with checkpoints use nodes that the first job cannot use yet,
    /// and make way for it.
    Opportunistic,
    /// Jobs that have run for less than four hours come first; jobs with checkpoints make way for
    /// them.
    LeastAttainedService,
}

impl From<QueuePolicyName> for QueuePolicy {
    fn from(name: QueuePolicyName) -> QueuePolicy {
        match name {
            QueuePolicyName::FirstComeFirstServed => QueuePolicy::FirstComeFirstServed,
            QueuePolicyName::Opportunistic => QueuePolicy::Opportunistic,
            QueuePolicyName::LeastAttainedService => QueuePolicy::LeastAttainedService,
        }
    }
}

/// Arguments of the queue.
#[derive(Debug, Args)]
pub struct QueueArgs {
    /// Run time estimate for jobs without activeDeadlineSeconds. It only affects the order of the
    /// queue and never stops a job.
    #[arg(long, value_enum, default_value_t = QueuePredictor::RunTimes)]
    pub queue_predictor: QueuePredictor,

    /// Which jobs of equal priority come first, and whether they preempt jobs with checkpoints.
    #[arg(long, value_enum, default_value_t = QueuePolicyName::LeastAttainedService)]
    pub queue_policy: QueuePolicyName,

    /// A run time in seconds after which jobs come behind those that have run for less, under the
    /// queue policy LeastAttainedService. Can be repeated, in ascending order.
    #[arg(long, value_name = "SECONDS", default_values_t = [14_400_u32], value_parser = clap::value_parser!(u32).range(1..=31_536_000))]
    pub queue_threshold_seconds: Vec<u32>,

    /// Shortest time that a job runs before the queue policy preempts it.
    #[arg(long, value_name = "SECONDS", default_value_t = 3600, value_parser = clap::value_parser!(u32).range(1..=31_536_000))]
    pub queue_quantum_seconds: u32,

    /// How often the queue policy preempts a job at most. Preemptions by jobs of higher priority
    /// and drains count too, but are not limited.
    #[arg(long, value_name = "COUNT", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=10_000))]
    pub max_preemptions: u16,

    /// The same within 24 hours.
    #[arg(long, value_name = "COUNT", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=10_000))]
    pub max_preemptions_per_day: u16,

    /// Time to save a preempted job and to start it again. The queue policy preempts a job only if
    /// the gain exceeds this cost and the work that is repeated.
    #[arg(long, value_name = "SECONDS", default_value_t = 120, value_parser = clap::value_parser!(u32).range(0..=86_400))]
    pub preemption_seconds: u32,

    /// How long the first job of the queue can reserve nodes without starting; twice as long if the
    /// time limits of the running jobs show that it will start by then. After that it reserves none
    /// for the same time, and jobs behind it use the nodes.
    #[arg(long, value_name = "SECONDS", default_value_t = 86_400, value_parser = clap::value_parser!(u32).range(60..=31_536_000))]
    pub longest_reservation_seconds: u32,

    /// Fair-share weight of a namespace. At equal priority, jobs of the namespace with the lowest
    /// recent GPU usage relative to its weight go first. Other namespaces have weight 1. Can be
    /// repeated. Default: jobs go by age.
    #[arg(long = "queue-weight", value_name = "NAMESPACE=WEIGHT", value_parser = parse_weight)]
    pub queue_weights: Vec<(String, u32)>,

    /// A priority class whose `preemptionPolicy: Never` applies to the scheduler only. Its jobs
    /// preempt other jobs as set in topologyPolicy.preemption. Jobs of other classes with that
    /// policy never preempt. Can be repeated.
    #[arg(long = "gang-priority-class", value_name = "NAME")]
    pub gang_priority_classes: Vec<String>,

    /// Whether a job's status names jobs of other namespaces, such as the job ahead of it in the
    /// queue.
    #[arg(long, value_enum, default_value_t = Toggle::Disabled)]
    pub name_other_namespaces: Toggle,
}

impl QueueArgs {
    /// The queue arguments of a controller whose arguments were parsed to `matches`, defaults
    /// included, each as `NAME=VALUE`.
    pub(super) fn effective(matches: &ArgMatches) -> Vec<String> {
        let queue = QueueArgs::augment_args(Command::new("queue"));
        let names =
            queue.get_arguments().filter_map(|argument| Some((argument.get_id().as_str(), argument.get_long()?)));
        let values = names.flat_map(|(id, name)| {
            let values = matches.get_raw(id).into_iter().flatten();
            values.map(move |value| format!("{name}={}", value.to_string_lossy()))
        });
        values.collect()
    }

    /// Settings from arguments as in `ControllerArgs::of`; absent ones have their defaults.
    ///
    /// # Errors
    /// There is no argument of this name, or its value is invalid.
    pub fn parse(arguments: &[String]) -> Result<QueueSettings, String> {
        let command = QueueArgs::augment_args(Command::new("queue")).no_binary_name(true);
        let flags = arguments.iter().map(|argument| format!("--{argument}"));
        let matches = command.try_get_matches_from(flags).map_err(|error| first_paragraph(&error))?;
        QueueArgs::from_arg_matches(&matches).map_err(|error| first_paragraph(&error))?.settings()
    }

    /// # Errors
    /// The thresholds do not ascend.
    pub fn settings(&self) -> Result<QueueSettings, String> {
        let weights =
            (!self.queue_weights.is_empty()).then(|| Weights::new(self.queue_weights.iter().cloned().collect()));
        Ok(QueueSettings {
            longest_reservation: Some(SignedDuration::from_secs(self.longest_reservation_seconds.into())),
            predictor: (self.queue_predictor == QueuePredictor::RunTimes).then(PredictorSettings::default),
            policy: self.policy()?,
            weights,
            gang_classes: self.gang_priority_classes.iter().cloned().collect(),
            names_others: self.name_other_namespaces == Toggle::Enabled,
            ..QueueSettings::default()
        })
    }

    fn policy(&self) -> Result<PolicySettings, String> {
        let thresholds = &self.queue_threshold_seconds;
        if let Some((before, after)) = thresholds.iter().zip(thresholds.iter().skip(1)).find(|(a, b)| a >= b) {
            return Err(format!(
                "--queue-threshold-seconds: got {after} after {before}; expected each threshold above the previous one"
            ));
        }
        let seconds = |seconds: u32| SignedDuration::from_secs(seconds.into());
        Ok(PolicySettings {
            policy: self.queue_policy.into(),
            thresholds: thresholds.iter().copied().map(seconds).collect(),
            quantum: seconds(self.queue_quantum_seconds),
            max_preemptions: self.max_preemptions.into(),
            max_preemptions_per_day: self.max_preemptions_per_day.into(),
            overhead: seconds(self.preemption_seconds),
        })
    }
}

fn parse_weight(text: &str) -> Result<(String, u32), String> {
    let parts = text.split_once('=').filter(|(namespace, _)| !namespace.is_empty());
    let parsed = parts.and_then(|(namespace, weight)| Some((namespace.to_string(), weight.parse().ok()?)));
    let weight = parsed.filter(|(_, weight)| (1..=1_000_000).contains(weight));
    weight.ok_or_else(|| "expected NAMESPACE=WEIGHT with a weight from 1 to 1000000, such as research=2".into())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::ControllerArgs;
    use super::*;

    #[test]
    fn parse_weight_accepts_positive_weights_only() {
        assert_eq!(parse_weight("research=2"), Ok(("research".into(), 2)));
        for invalid in ["research", "=2", "research=0", "research=1000001", "research=x"] {
            assert!(parse_weight(invalid).is_err(), "{invalid}");
        }
    }

    fn policy(words: &[&str]) -> Result<PolicySettings, String> {
        let words: Vec<String> = words.iter().map(ToString::to_string).collect();
        Ok(QueueArgs::parse(&words)?.policy)
    }

    #[test]
    fn the_flags_have_the_defaults_of_the_policy() {
        let policy_of_the_chart = QueuePolicy::LeastAttainedService;
        assert_eq!(policy(&[]), Ok(PolicySettings { policy: policy_of_the_chart, ..PolicySettings::default() }));
        let words = ["queue-threshold-seconds=3600", "queue-threshold-seconds=14400", "max-preemptions=8"];
        let settings = policy(&words).unwrap();
        assert_eq!(settings.thresholds, [1, 4].map(SignedDuration::from_hours));
        assert_eq!((settings.max_preemptions, settings.max_preemptions_per_day), (8, 4));
    }

    #[test]
    fn invalid_settings_of_the_policy_are_named() {
        let cases: [(&str, &[&str], &str); 6] = [
            (
                "queue-threshold-seconds",
                &["7200", "7200"],
                "--queue-threshold-seconds: got 7200 after 7200; expected each threshold above the previous one",
            ),
            ("queue-threshold-seconds", &["0"], "'0' for '--queue-threshold-seconds <SECONDS>': 0 is not in 1.."),
            ("queue-quantum-seconds", &["0"], "'0' for '--queue-quantum-seconds <SECONDS>': 0 is not in 1.."),
            ("max-preemptions", &["0"], "'0' for '--max-preemptions <COUNT>': 0 is not in 1.."),
            ("max-preemptions-per-day", &["0"], "'0' for '--max-preemptions-per-day <COUNT>': 0 is not in 1.."),
            ("preemption-seconds", &["x"], "'x' for '--preemption-seconds <SECONDS>'"),
        ];
        for (name, values, expected) in cases {
            let words: Vec<String> = values.iter().map(|value| format!("{name}={value}")).collect();
            let error = QueueArgs::parse(&words).unwrap_err();
            assert!(error.contains(expected), "{words:?}: {error}");
        }
    }

    /// Other programs decide as a controller with this command line.
    #[test]
    fn a_command_line_has_all_settings_of_the_queue() {
        let command_line =
            ["--listen=0.0.0.0:80", "--queue-policy=Opportunistic", "--queue-weight=a=2", "--domain=rack"];
        let command_line = command_line.map(String::from);
        let effective = ControllerArgs::of(&command_line).unwrap().1;
        let expected = [
            "queue-predictor=RunTimes",
            "queue-policy=Opportunistic",
            "queue-threshold-seconds=14400",
            "queue-quantum-seconds=3600",
            "max-preemptions=4",
            "max-preemptions-per-day=4",
            "preemption-seconds=120",
            "longest-reservation-seconds=86400",
            "queue-weight=a=2",
            "name-other-namespaces=Disabled",
        ];
        assert_eq!(effective, expected);
        let settings = QueueArgs::parse(&effective).unwrap();
        assert_eq!(settings.policy.policy, QueuePolicy::Opportunistic);
        assert_eq!(settings.weights.unwrap().by_namespace, [("a".to_string(), 2)].into());
        let error = ControllerArgs::of(&["--queue-patience=1".into()]).unwrap_err();
        assert_eq!(error, "unexpected argument '--queue-patience' found");
    }
}
