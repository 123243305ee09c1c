use clap::{Args, ValueEnum};
use std::net::SocketAddr;
use std::path::PathBuf;
use switchyard_plan::cluster::levels::DomainLevel;
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

/// Arguments of the controller.
#[derive(Debug, Args)]
pub struct ControllerArgs {
    /// Kubeconfig. Default: KUBECONFIG or ~/.kube/config, else the pod's service account.
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,

    /// Context of the kubeconfig. Default: the current one.
    #[arg(long)]
    pub context: Option<String>,

    /// Namespace of the Lease. Default: switchyard-system.
    #[arg(long, env = "POD_NAMESPACE")]
    pub namespace: Option<String>,

    /// Name of this controller in the Lease, plus a random part. Default: the host name.
    #[arg(long, env = "POD_NAME")]
    pub identity: Option<String>,

    /// Address of /healthz, /readyz and /metrics.
    #[arg(long, value_name = "ADDRESS", default_value = "0.0.0.0:8080")]
    pub listen: SocketAddr,

    /// Address at which /metrics is served over TLS, instead of at --listen, to clients with a
    /// token that the API server knows and the right to get the path /metrics. The certificate is
    /// made at each start. Default: the metrics are at --listen, for everybody.
    #[arg(long, value_name = "ADDRESS")]
    pub secure_metrics: Option<SocketAddr>,

    /// Whether several controllers choose a leader by a Lease.
    #[arg(long, value_enum, default_value_t = Toggle::Enabled)]
    pub leader_elect: Toggle,

    /// Seconds after which a Lease that is not renewed is free.
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..=3600))]
    pub lease_duration_seconds: u16,

    /// Seconds after which a leader that cannot renew its Lease stops.
    #[arg(long, value_name = "SECONDS", default_value_t = 7, value_parser = clap::value_parser!(u16).range(1..=3600))]
    pub renew_deadline_seconds: u16,

    /// Seconds between two attempts to take or renew the Lease.
    #[arg(long, value_name = "SECONDS", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=3600))]
    pub retry_period_seconds: u16,

    /// Reconcile only the TrainJobs of this namespace; may be repeated. Default: of all namespaces.
    #[arg(long = "watch-namespace", value_name = "NAMESPACE")]
    pub watch_namespaces: Vec<String>,

    /// Image of the worker, for jobs that name none.
    #[arg(long, value_name = "IMAGE", default_value = concat!("switchyard-worker:", env!("CARGO_PKG_VERSION")))]
    pub worker_image: String,

    /// Pull Secret of the worker image, by name, in the namespace of each job; repeatable. A job
    /// that names an image or imagePullSecrets of its own does not get it.
    #[arg(long = "job-image-pull-secret", value_name = "NAME")]
    pub image_pull_secrets: Vec<String>,

    /// Device class that ResourceClaims for GPUs name.
    #[arg(long, value_name = "CLASS", default_value = "gpu.nvidia.com")]
    pub gpu_device_class: String,

    /// Driver that offers GPUs in ResourceSlices, with their UUIDs as attributes.
    #[arg(long, value_name = "DRIVER", default_value = "gpu.nvidia.com")]
    pub gpu_driver: String,

    /// File with the administrator's profile of the fabric (docs/placement-and-fabric.md), which
    /// wins over the built-in packs.
    #[arg(long, value_name = "FILE")]
    pub fabric_profile: Option<PathBuf>,

    /// A level of domains of nodes, small to large, repeatable: KEY (a label of the nodes),
    /// KEY:FACTOR with its oversubscription, KEY:NVLink for an NVLink domain; `cluster` is all
    /// nodes. Default: NVLink cliques and the labels of Topograph and of clouds.
    #[arg(long = "domain", value_name = "KEY[:FACTOR|:NVLink]")]
    pub domains: Vec<DomainLevel>,

    /// A ValidatingAdmissionPolicy that must be in force, with a binding of the same name;
    /// repeatable. The log and the metric switchyard_policy_missing report one that is not.
    #[arg(long = "admission-policy", value_name = "NAME")]
    pub admission_policies: Vec<String>,

    /// Seconds for which a node that does not report (condition Ready is Unknown) is waited for,
    /// since it stopped and since the ranks last made progress. A node that reports that it is not
    /// ready is never taken for lost.
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub node_grace_seconds: u32,

    /// Upper bound of gangPolicy.scheduleTimeoutSeconds: no gang holds nodes for longer while its
    /// pods are not all scheduled, whatever its job says.
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u32).range(10..=86_400))]
    pub max_schedule_timeout_seconds: u32,

    /// Where more than this share of the nodes, and at least 3, stop reporting within a minute, no
    /// job is started again for that until they report; 0: never.
    #[arg(long, value_name = "PERCENT", default_value_t = 20, value_parser = clap::value_parser!(u8).range(0..=100))]
    pub fleet_brake_percent: u8,

    /// What stands in for activeDeadlineSeconds where a job has none, in the choice of who goes
    /// first; no job is stopped for it.
    #[arg(long, value_enum, default_value_t = QueuePredictor::None)]
    pub queue_predictor: QueuePredictor,

    /// How long the first job of the queue may hold nodes without being able to begin; twice as
    /// long if the limits of the jobs that run there promise that it can by then. After that it
    /// holds none for as long, and jobs behind it use the nodes.
    #[arg(long, value_name = "SECONDS", default_value_t = 86_400, value_parser = clap::value_parser!(u32).range(60..=31_536_000))]
    pub longest_reservation_seconds: u32,

    /// NAMESPACE=WEIGHT, repeatable: at equal priority, jobs of the namespace with the lowest
    /// recent GPU usage relative to its weight go first. Namespaces that are not named have weight
    /// 1. Default: by age.
    #[arg(long = "queue-weight", value_name = "NAMESPACE=WEIGHT", value_parser = parse_weight)]
    pub queue_weights: Vec<(String, u32)>,

    /// A priority class whose preemptionPolicy: Never is for the scheduler alone, repeatable:
    /// whether jobs of this class preempt others is their topologyPolicy.preemption. Jobs of other
    /// classes with that policy never preempt.
    #[arg(long = "gang-priority-class", value_name = "NAME")]
    pub gang_priority_classes: Vec<String>,

    /// Whether the status of a job names jobs of other namespaces, such as the one ahead of it in
    /// the queue.
    #[arg(long, value_enum, default_value_t = Toggle::Disabled)]
    pub name_other_namespaces: Toggle,

    /// Class of the ProvisioningRequests by which gangs that lack nodes ask the cluster's
    /// autoscaler for them, such as best-effort-atomic-scale-up.autoscaling.x-k8s.io. Default: they
    /// do not ask.
    #[arg(long, value_name = "CLASS", value_parser = parse_class)]
    pub provisioning_class: Option<String>,

    /// Jobs that are reconciled at the same time.
    #[arg(long, value_name = "COUNT", default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub concurrent_reconciles: u16,

    /// Format of the log on standard error.
    #[arg(long, value_enum, default_value_t = telemetry::Format::Text)]
    pub log_format: telemetry::Format,

    /// Log level: error, warn, info, debug, trace, or a filter of the tracing library.
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
    let expected = "expected the name of a class, such as check-capacity.autoscaling.x-k8s.io";
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
