//! Arguments of `cargo xtask cluster`, shared with the program that runs the cluster
//! (`tests/src/bin/cluster.rs`). xtask validates them and prints help before it compiles that
//! program.

use std::path::PathBuf;

/// Most real nodes in a cluster.
pub const MAX_REAL_NODES: u8 = 4;

/// Exit code if this machine cannot run real nodes; automake's code for a skipped test.
pub const SKIPPED: u8 = 77;

/// An action on this clone's cluster.
#[derive(Debug, Clone, clap::Subcommand)]
pub enum Action {
    /// Start it in the background.
    Up(Up),
    /// Stop it and remove everything.
    Down,
    /// Print what is running.
    Status,
    /// Print what this machine lacks for real nodes; exit with 77 if anything is missing.
    Check,
}

/// Arguments of `up`.
#[derive(Debug, Clone, clap::Args)]
pub struct Up {
    /// Number of real nodes, 1 to 4: containerd, kubelet and kube-proxy, each in its own
    /// namespaces. Needs root.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=i64::from(MAX_REAL_NODES)))]
    pub nodes: u8,
    /// With real nodes: a folder with image archives (*.tar) to load on all of them. Default: this
    /// repository's images, built without link-time optimisation.
    #[arg(long, value_name = "FOLDER", requires = "nodes")]
    pub images: Option<PathBuf>,
    /// Number of nodes with our test kubelet, if there are no real ones.
    #[arg(long, default_value_t = 4)]
    pub own_nodes: usize,
    /// Default behaviour of pods on our test kubelet: worker (runs the pod's command as processes
    /// on this machine), run, succeed-after=2s, fail=3@2s, oom, hang, image=missing, ignore-delete.
    #[arg(long, default_value = "worker")]
    pub policy: String,
}
