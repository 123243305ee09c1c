mod queue;

pub use queue::QueueArgs;

use clap::{Args, Command, FromArgMatches, ValueEnum};
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

    #[command(flatten)]
    pub queue: QueueArgs,

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

impl ControllerArgs {
    /// Parses the arguments of a running controller. Also returns those of its queue, defaults
    /// included, each as `NAME=VALUE`.
    ///
    /// # Errors
    /// This version would refuse the arguments.
    pub fn of(arguments: &[String]) -> Result<(ControllerArgs, Vec<String>), String> {
        let command = ControllerArgs::augment_args(Command::new("controller")).no_binary_name(true);
        let matches = command.try_get_matches_from(arguments).map_err(|error| first_paragraph(&error))?;
        let parsed = ControllerArgs::from_arg_matches(&matches).map_err(|error| first_paragraph(&error))?;
        Ok((parsed, QueueArgs::effective(&matches)))
    }
}

/// The cause of an error, without hints about usage.
fn first_paragraph(error: &clap::Error) -> String {
    let text = error.to_string();
    text.trim_start_matches("error: ").split("\n\n").next().unwrap_or_default().into()
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
    use super::parse_class;

    #[test]
    fn parse_class_accepts_kubernetes_names_only() {
        for valid in ["best-effort-atomic-scale-up.autoscaling.x-k8s.io", "a", "queued-provisioning.gke.io"] {
            assert_eq!(parse_class(valid), Ok(valid.into()));
        }
        for invalid in ["", "-a", "a-", "A", "a..b", "a_b", "a b"] {
            assert!(parse_class(invalid).is_err(), "{invalid}");
        }
    }
}
