//! Arguments.

use clap::{CommandFactory, FromArgMatches, Parser, ValueEnum};
use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use switchyard_service::telemetry;

/// Keeps the GPUTopology of its node up to date: describes the machine, and writes what has
/// changed.
#[derive(Debug, Parser)]
#[command(name = "switchyard-node-agent", version, about, max_term_width = 100)]
pub(crate) struct Args {
    /// Name of the node and of the GPUTopology. Default with --once: the host name.
    #[arg(long, env = "NODE_NAME", value_name = "NAME", required_unless_present = "once")]
    pub node_name: Option<String>,

    /// Print the GPUTopology as YAML and exit. Needs no cluster.
    #[arg(long)]
    pub once: bool,

    /// Kubeconfig. Default: KUBECONFIG or ~/.kube/config, otherwise the pod's service account.
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,

    /// Context of the kubeconfig. Default: the current one.
    #[arg(long)]
    pub context: Option<String>,

    /// NVML's library. Default: libnvidia-ml.so.1, found by the dynamic linker.
    #[arg(long, value_name = "FILE")]
    pub nvml_lib: Option<PathBuf>,

    /// Where the host's /sys is.
    #[arg(long, value_name = "FOLDER", default_value = "/sys")]
    pub sysfs_root: PathBuf,

    /// Where the host's /proc is.
    #[arg(long, value_name = "FOLDER", default_value = "/proc")]
    pub proc_root: PathBuf,

    /// Where the host's /dev is.
    #[arg(long, value_name = "FOLDER", default_value = "/dev")]
    pub dev_root: PathBuf,

    /// A file with speeds measured on this machine (YAML); placement uses them instead of the usual
    /// ones.
    #[arg(long, value_name = "FILE")]
    pub measured: Option<PathBuf>,

    /// Read the ACS registers of the bridges between GPUs and NICs, which needs CAP_SYS_ADMIN.
    #[arg(long)]
    pub read_acs: bool,

    /// The kubelet's socket that reports which container uses which device. Empty: the kubelet is
    /// not asked.
    #[arg(long, value_name = "SOCKET", default_value = "/var/lib/kubelet/pod-resources/kubelet.sock")]
    pub pod_resources: OsString,

    /// The kubelet's configuration file, for its CPU, memory and topology policies. Default: they
    /// are not reported.
    #[arg(long, value_name = "FILE")]
    pub kubelet_config: Option<PathBuf>,

    /// Seconds between two scans of the machine.
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u16).range(1..=600))]
    pub period_seconds: u16,

    /// Seconds after which a scan of the machine counts as hung.
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u16).range(1..=600))]
    pub scan_timeout_seconds: u16,

    /// Seconds after which an unchanged report is renewed. Readers consider a report of half an
    /// hour ago as abandoned.
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u16).range(2..=600))]
    pub renew_seconds: u16,

    /// Whether to scan immediately when a GPU reports an error. Keeps the driver's module in use.
    #[arg(long, value_enum, default_value_t = Toggle::Enabled)]
    pub gpu_events: Toggle,

    /// Address of /healthz, /readyz and /metrics.
    #[arg(long, value_name = "ADDRESS", default_value = "0.0.0.0:9410")]
    pub listen: SocketAddr,

    /// Format of the log on standard error.
    #[arg(long, value_enum, default_value_t = telemetry::Format::Text)]
    pub log_format: telemetry::Format,

    /// What is logged: error, warn, info, debug, trace, or a filter of the tracing library.
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    pub log_level: String,
}

impl Args {
    /// Parses the arguments of this process; exits if they are invalid or ask for help.
    pub fn parse_as(version: &'static str) -> Args {
        let matches = Args::command().version(version).get_matches();
        Args::from_arg_matches(&matches).unwrap_or_else(|error| error.exit())
    }
}

/// An on/off switch, spelled as in the API.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "PascalCase")]
pub(crate) enum Toggle {
    Enabled,
    Disabled,
}
