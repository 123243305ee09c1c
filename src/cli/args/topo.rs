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

    /// A node of the cluster, or a file with a GPUTopology (YAML): whatever exists, contains a `/`
    /// or ends in .yaml, .yml or .json is a file. Write `./import` for a file that is called
    /// `import` (or `xml`). Default: this machine.
    #[arg(value_name = "NODE|FILE")]
    pub target: Option<String>,

    /// Show the domains of a cluster, its nodes, and who uses their GPUs.
    #[arg(long, conflicts_with_all = ["target", "svg"])]
    pub cluster: bool,

    /// Show complete matrices; with --cluster all nodes of a large one.
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
    /// Make a GPUTopology (YAML, or JSON with `-o json`) from the text that `nvidia-smi topo -m`
    /// prints.
    ///
    /// Paths, bus ids and UUIDs are invented to match the distances of the matrix; `sources` in the
    /// result says so.
    Import(ImportArgs),
    /// Make, check or compare topology files of NCCL (`NCCL_TOPO_FILE`): useful only in virtual
    /// machines, where the kernel shows a flat tree.
    ///
    /// Exit codes: 0 no error found, 1 an error found in a file, 2 a wrong command line, or input
    /// that cannot be read.
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
    /// Text of `nvidia-smi topo -m`; `-` reads standard input.
    pub file: PathBuf,

    /// Name of the node.
    #[arg(long, default_value = "imported", value_parser = values::object_name)]
    pub name: String,

    /// Model of the GPUs, such as H100 or A100-SXM4-80GB: determines the speed of NVLinks.
    #[arg(long, value_name = "MODEL", value_parser = values::product_name)]
    pub gpu_model: Option<String>,

    /// Rate of the NICs in Gbit/s, one direction; of one NIC as NAME=RATE. May be repeated.
    #[arg(long, value_name = "[NAME=]RATE", value_parser = values::nic_rate)]
    pub nic_gbps: Vec<NicRate>,
}

/// Arguments of `topo xml`.
#[derive(Debug, Args)]
pub(crate) struct XmlArgs {
    /// A node of the cluster, or a file with a GPUTopology (YAML), as for `topo`. Default: this
    /// machine.
    #[arg(value_name = "NODE|FILE")]
    pub target: Option<String>,

    /// Also write NVLinks, ports and speeds. For people only: NCCL would believe them even when
    /// they are no longer true.
    #[arg(long)]
    pub devices: bool,

    /// Check a topology file instead of generating one; `-` reads standard input.
    #[arg(long, value_name = "FILE.xml", conflicts_with_all = ["target", "devices", "diff"])]
    pub check: Option<PathBuf>,

    /// With --check: the machine that the file is for, a GPUTopology (YAML).
    #[arg(long, value_name = "FILE", requires = "check")]
    pub topology: Option<PathBuf>,

    /// Show what differs from A to B for NCCL: topology files, or a GPUTopology (.yaml, .yml or
    /// .json).
    #[arg(long, num_args = 2, value_names = ["A", "B"], conflicts_with_all = ["target", "devices"])]
    pub diff: Vec<PathBuf>,

    /// The cluster.
    #[command(flatten)]
    pub source: ClusterArgs,
}
