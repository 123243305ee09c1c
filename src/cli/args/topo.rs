//! Arguments of `topo`.

use super::{ClusterArgs, values};
use clap::{Args, Subcommand};
use std::path::PathBuf;
use switchyard_topology::import::NicRate;

/// Arguments of `topo`.
#[derive(Debug, Args)]
pub(crate) struct TopoArgs {
    /// A command other than showing a machine.
    #[command(subcommand)]
    pub command: Option<TopoCommand>,

    /// A node of the cluster, or a GPUTopology file (YAML). An argument is a file if it exists,
    /// contains a `/`, or ends in .yaml, .yml or .json. For a file named `import` or `xml`, write
    /// `./import`. Default: this machine.
    #[arg(value_name = "NODE|FILE")]
    pub target: Option<String>,

    /// Show the cluster's domains and nodes, and who uses their GPUs.
    #[arg(long, conflicts_with_all = ["target", "svg"])]
    pub cluster: bool,

    /// Show complete matrices. With --cluster, show all nodes even of a large cluster.
    #[arg(long)]
    pub full: bool,

    /// Print a drawing of the machine (SVG).
    #[arg(long)]
    pub svg: bool,

    /// The cluster.
    #[command(flatten)]
    pub source: ClusterArgs,
}

/// Subcommands of `topo`.
#[derive(Debug, Subcommand)]
pub(crate) enum TopoCommand {
    /// Create a GPUTopology (YAML, or JSON with `-o json`) from the output of `nvidia-smi topo -m`.
    ///
    /// Paths, bus IDs and UUIDs are invented to match the distances in the matrix, as noted in
    /// `sources` of the result.
    Import(ImportArgs),
    /// Create, check or compare NCCL topology files (`NCCL_TOPO_FILE`). They are useful only in
    /// virtual machines whose kernel shows a flat tree.
    ///
    /// Exit codes: 0 no error found, 1 an error found in a file, 2 wrong command line or unreadable
    /// input.
    Xml(XmlArgs),
}

impl TopoCommand {
    /// Its name on the command line.
    pub fn name(&self) -> &'static str {
        match self {
            TopoCommand::Import(_) => "import",
            TopoCommand::Xml(_) => "xml",
        }
    }
}

/// Arguments of `topo import`.
#[derive(Debug, Args)]
pub(crate) struct ImportArgs {
    /// Output of `nvidia-smi topo -m`; `-` reads standard input.
    pub file: PathBuf,

    /// Name of the node.
    #[arg(long, default_value = "imported", value_parser = values::object_name)]
    pub name: String,

    /// GPU model, such as H100 or A100-SXM4-80GB. Determines the NVLink speed.
    #[arg(long, value_name = "MODEL", value_parser = values::product_name)]
    pub gpu_model: Option<String>,

    /// Rate of all NICs in Gbit/s per direction, or of a single NIC as NAME=RATE. Can be repeated.
    #[arg(long, value_name = "[NAME=]RATE", value_parser = values::nic_rate)]
    pub nic_gbps: Vec<NicRate>,
}

/// Arguments of `topo xml`.
#[derive(Debug, Args)]
pub(crate) struct XmlArgs {
    /// A node of the cluster, or a GPUTopology file (YAML), as for `topo`. Default: this machine.
    #[arg(value_name = "NODE|FILE")]
    pub target: Option<String>,

    /// Also write NVLinks, ports and speeds. Only for inspection: NCCL would rely on them even
    /// after they change.
    #[arg(long)]
    pub devices: bool,

    /// Check a topology file instead of generating one; `-` reads standard input.
    #[arg(long, value_name = "FILE.xml", conflicts_with_all = ["target", "devices", "diff"])]
    pub check: Option<PathBuf>,

    /// With --check: GPUTopology (YAML) of the machine that the file is for.
    #[arg(long, value_name = "FILE", requires = "check")]
    pub topology: Option<PathBuf>,

    /// Show the differences between A and B that matter to NCCL. Each is an NCCL topology file, or
    /// a GPUTopology (.yaml, .yml or .json).
    #[arg(long, num_args = 2, value_names = ["A", "B"], conflicts_with_all = ["target", "devices"])]
    pub diff: Vec<PathBuf>,

    /// The cluster.
    #[command(flatten)]
    pub source: ClusterArgs,
}
