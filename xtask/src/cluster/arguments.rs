//! Arguments of `cargo xtask cluster`, shared with the program that keeps the cluster (`tests/src/bin/cluster.rs`): xtask checks them, and
//! prints help, before it compiles that program.

use std::path::PathBuf;

/// The most real nodes of a cluster.
pub const MOST_NODES: u8 = 4;

/// Exit code where this machine cannot run real nodes: skipped, as automake and others say it.
pub const SKIPPED: u8 = 77;

/// What to do with the cluster of this clone.
#[derive(Debug, Clone, clap::Subcommand)]
pub enum Action {
    /// Start it in the background.
    Up(Up),
    /// End it, and leave nothing.
    Down,
    /// Print what runs.
    Status,
    /// Print what this machine lacks for real nodes; exit code 77 if it lacks something.
    Check,
}

/// Arguments of `up`.
#[derive(Debug, Clone, clap::Args)]
pub struct Up {
    /// Real nodes, 1 to 4: containerd, kubelet and kube-proxy, each in its own namespaces. Needs root.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=i64::from(MOST_NODES)))]
    pub nodes: u8,
    /// With real nodes: a folder with image archives (*.tar) to load on all of them. Default: the images of this repository, built without
    /// link-time optimisation.
    #[arg(long, value_name = "FOLDER", requires = "nodes")]
    pub images: Option<PathBuf>,
    /// Nodes with our test kubelet, if there are no real ones.
    #[arg(long, default_value_t = 4)]
    pub own_nodes: usize,
    /// What pods on our test kubelet do by default: worker (the pod's command runs as processes of this machine), run, succeed-after=2s,
    /// fail=3@2s, oom, hang, image=missing, ignore-delete.
    #[arg(long, default_value = "worker")]
    pub policy: String,
}
