use clap::{Args, ValueEnum};
use std::net::SocketAddr;
use std::path::PathBuf;
use switchyard_plan::cluster::levels::DomainLevel;
use switchyard_plan::cluster::queue_policy::QueuePolicy;
use switchyard_service::telemetry;

/// An on/off switch, spelled as in the API.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "PascalCase")]
pub enum Toggle {
    /// On.
    Enabled,
    /// Off.
    Disabled,
}

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

/// Arguments of the controller.
#[derive(Debug, Args)]
pub struct ControllerArgs {
    /// Kubeconfig. Default: KUBECONFIG or ~/.kube/config, otherwise the pod's service account.
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,

    /// Context of the kubeconfig. Default: the current one.
    #[arg(long)]
    pub context: Option<String>,

    /// Namespace of the Lease. Default: switchyard-system.
    #[arg(long, env = "POD_NAMESPACE")]
    pub namespace: Option<String>,

    /// Name of this controller in the Lease; a random suffix is added. Default: the host name.
    #[arg(long, env = "POD_NAME")]
    pub identity: Option<String>,

    /// Address of /healthz, /readyz and /metrics.
    #[arg(long, value_name = "ADDRESS", default_value = "0.0.0.0:8080")]
    pub listen: SocketAddr,

    /// Serve /metrics over TLS at this address instead of --listen, and only to clients whose token
    /// the API server accepts and that are allowed to get the path /metrics. A new certificate is
    /// generated at each start. Default: /metrics is public, at --listen.
    #[arg(long, value_name = "ADDRESS")]
    pub secure_metrics: Option<SocketAddr>,

    /// Whether replicas elect a leader with a Lease.
    #[arg(long, value_enum, default_value_t = Toggle::Enabled)]
    pub leader_elect: Toggle,

    /// Seconds after which a Lease that is not renewed expires.
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..=3600))]
    pub lease_duration_seconds: u16,

    /// Seconds after which a leader that cannot renew its Lease stops.
    #[arg(long, value_name = "SECONDS", default_value_t = 7, value_parser = clap::value_parser!(u16).range(1..=3600))]
    pub renew_deadline_seconds: u16,

    /// Seconds between attempts to acquire or renew the Lease.
    #[arg(long, value_name = "SECONDS", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=3600))]
    pub retry_period_seconds: u16,

    /// Reconcile only the TrainJobs of this namespace. Can be repeated. Default: all namespaces.
    #[arg(long = "watch-namespace", value_name = "NAMESPACE")]
    pub watch_namespaces: Vec<String>,

    /// Worker image for jobs that do not set an image.
    #[arg(long, value_name = "IMAGE", default_value = concat!("switchyard-worker:", env!("CARGO_PKG_VERSION")))]
    pub worker_image: String,

    /// Name of a pull Secret for the worker image, in the namespace of each job. Can be repeated.
    /// Jobs that set an image or imagePullSecrets do not get it.
    #[arg(long = "job-image-pull-secret", value_name = "NAME")]
    pub image_pull_secrets: Vec<String>,

    /// Device class in ResourceClaims for GPUs.
    #[arg(long, value_name = "CLASS", default_value = "gpu.nvidia.com")]
    pub gpu_device_class: String,

    /// DRA driver whose ResourceSlices offer GPUs, with their UUIDs as attributes.
    #[arg(long, value_name = "DRIVER", default_value = "gpu.nvidia.com")]
    pub gpu_driver: String,

    /// Fabric profile of this cluster (docs/placement-and-fabric.md). Overrides the built-in packs.
    #[arg(long, value_name = "FILE")]
    pub fabric_profile: Option<PathBuf>,

    /// A level of node domains, small to large: KEY (a node label), KEY:FACTOR (with its
    /// oversubscription) or KEY:NVLink (an NVLink domain); `cluster` is all nodes. Can be repeated.
    /// Default: NVLink cliques, and the labels of Topograph and of cloud providers.
    #[arg(long = "domain", value_name = "KEY[:FACTOR|:NVLink]")]
    pub domains: Vec<DomainLevel>,

    /// A ValidatingAdmissionPolicy that must be in force, with a binding of the same name. Can be
    /// repeated. Missing policies are reported in the log and by the metric
    /// switchyard_policy_missing.
    #[arg(long = "admission-policy", value_name = "NAME")]
    pub admission_policies: Vec<String>,

    /// Grace period in seconds for a node that stops reporting (condition Ready is Unknown). It
    /// restarts whenever the ranks make progress. A node that reports NotReady is never treated as
    /// lost.
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub node_grace_seconds: u32,

    /// Upper bound of gangPolicy.scheduleTimeoutSeconds. No gang holds nodes for longer while some
    /// of its pods are unscheduled.
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u32).range(10..=86_400))]
    pub max_schedule_timeout_seconds: u32,

    /// If more than this percentage of the nodes (and at least 3) stop reporting within a minute,
    /// assume a network fault and restart no jobs until they report again. 0 disables this circuit
    /// breaker.
    #[arg(long, value_name = "PERCENT", default_value_t = 20, value_parser = clap::value_parser!(u8).range(0..=100))]
    pub fleet_brake_percent: u8,

    /// Run time estimate for jobs without activeDeadlineSeconds. It only affects the order of the
    /// queue and never stops a job.
    #[arg(long, value_enum, default_value_t = QueuePredictor::RunTimes)]
    pub queue_predictor: QueuePredictor,

    /// Which jobs of equal priority come first, and whether they preempt jobs with checkpoints.
    #[arg(long, value_enum, default_value_t = QueuePolicyName::LeastAttainedService)]
    pub queue_policy: QueuePolicyName,

    /// A run time in seconds after which jobs come behind those that have run for less, under the
    /// queue policy LeastAttainedService. Can be repeated, in ascending order.
    #[arg(long, value_name = "SECONDS", default_values_t = [14_400_u32], value_parser = clap::value_parser!(u32).range(60..=31_536_000))]
    pub queue_threshold_seconds: Vec<u32>,

    /// Shortest time that a job runs before the queue policy preempts it.
    #[arg(long, value_name = "SECONDS", default_value_t = 3600, value_parser = clap::value_parser!(u32).range(60..=31_536_000))]
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

    /// Class of the ProvisioningRequests with which gangs that lack nodes request them from the
    /// cluster autoscaler, such as best-effort-atomic-scale-up.autoscaling.x-k8s.io. Default: gangs
    /// do not request nodes.
    #[arg(long, value_name = "CLASS", value_parser = parse_class)]
    pub provisioning_class: Option<String>,

    /// Maximum number of concurrent reconciles.
    #[arg(long, value_name = "COUNT", default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub concurrent_reconciles: u16,

    /// Format of the log on standard error.
    #[arg(long, value_enum, default_value_t = telemetry::Format::Text)]
    pub log_format: telemetry::Format,

    /// Log level: error, warn, info, debug, trace, or a filter in the syntax of the tracing
    /// library.
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    pub log_level: String,
}

fn parse_weight(text: &str) -> Result<(String, u32), String> {
    let parts = text.split_once('=').filter(|(namespace, _)| !namespace.is_empty());
    let parsed = parts.and_then(|(namespace, weight)| Some((namespace.to_string(), weight.parse().ok()?)));
    let weight = parsed.filter(|(_, weight)| (1..=1_000_000).contains(weight));
    weight.ok_or_else(|| "expected NAMESPACE=WEIGHT with a weight from 1 to 1000000, such as research=2".into())
}

fn parse_class(text: &str) -> Result<String, String> {
    let is_word = |part: &str| {
        let is_inside = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        !part.is_empty() && part.bytes().all(is_inside) && !part.starts_with('-') && !part.ends_with('-')
    };
    let is_name = text.len() <= 253 && text.split('.').all(is_word);
    let expected = "expected a class name, such as check-capacity.autoscaling.x-k8s.io";
    if is_name { Ok(text.into()) } else { Err(expected.into()) }
}

#[cfg(test)]
mod tests {
    use super::{parse_class, parse_weight};

    #[test]
    fn parse_class_accepts_kubernetes_names_only() {
        for valid in ["best-effort-atomic-scale-up.autoscaling.x-k8s.io", "a", "queued-provisioning.gke.io"] {
            assert_eq!(parse_class(valid), Ok(valid.into()));
        }
        for invalid in ["", "-a", "a-", "A", "a..b", "a_b", "a b"] {
            assert!(parse_class(invalid).is_err(), "{invalid}");
        }
    }

    #[test]
    fn parse_weight_accepts_positive_weights_only() {
        assert_eq!(parse_weight("research=2"), Ok(("research".into(), 2)));
        for invalid in ["research", "=2", "research=0", "research=1000001", "research=x"] {
            assert!(parse_weight(invalid).is_err(), "{invalid}");
        }
    }
}
