//! The rule table: every variable that is set or deliberately not set, when, to what, and why.
//!
//! Sources: NCCL's user guide 2.30.7 (`env.rst`, `troubleshooting/*.rst`) and code
//! (`src/transport/net_ib/*.cc`, `src/misc/socket.cc`, `src/init.cc`, `src/mnnvl.cc`). If an issue
//! describes a failure, the rule names it.

mod interfaces;
mod ports;

pub use interfaces::{interface, interfaces};

use super::gang::Gang;
use crate::variables::nccl::{self, GUIDE, Section};
use interfaces::{plain_interface, socket_interface};
use ports::{address_family, address_range, debug, gid_index, hca, ib_disable, net, switch_queue, topology_file};
use switchyard_crds::{DecisionClass, FabricDecision, Framework};
use switchyard_worker_contract::CpuList;

/// NCCL's troubleshooting pages.
const TROUBLESHOOTING: &str = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html";
/// PyTorch's variables.
const TORCH: &str = "https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html";
/// Interfaces of Gloo and TensorPipe.
const GLOO: &str = "https://docs.pytorch.org/docs/stable/distributed.html";
/// Variable that names NCCL's settings file.
pub const CONF_FILE: &str = "NCCL_CONF_FILE";
/// Path of that file in the trainer: the image's settings, then ours.
pub const CONF_PATH: &str = "/etc/switchyard/fabric/nccl.conf";

/// Decision for a node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Outcome {
    /// The value; `None` if not set.
    pub value: Option<String>,
    pub reason: String,
    /// The fact and its source.
    pub evidence: String,
}

/// How a rule decides.
#[derive(Clone, Copy)]
pub(super) enum Decide {
    /// Never set.
    Leave(&'static str),
    /// From the facts of the node.
    Node(fn(&Gang<'_>, u32) -> Outcome),
    /// The same for all nodes.
    Gang(fn(&Gang<'_>) -> Outcome),
}

/// Jobs that a rule applies to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scope {
    /// NCCL is used: there are GPUs.
    Nccl,
    /// NCCL is used between nodes.
    NcclNodes,
    /// PyTorch's Gloo and TensorPipe can be used between nodes.
    Gloo,
    /// Horovod's Gloo can be used between nodes.
    Horovod,
    /// Open MPI starts the processes.
    Mpi,
    /// PyTorch with NCCL.
    Torch,
}

impl Scope {
    /// Whether programs of this framework can read the variable.
    fn includes(self, framework: Framework) -> bool {
        use Framework as F;
        match self {
            Scope::Nccl | Scope::NcclNodes => true,
            Scope::Gloo | Scope::Torch => matches!(framework, F::Torch | F::Plain),
            Scope::Horovod => framework == F::Horovod,
            Scope::Mpi => matches!(framework, F::MPI | F::Horovod),
        }
    }
}

/// The rule for one variable.
pub(super) struct Rule {
    pub name: &'static str,
    pub class: DecisionClass,
    scope: Scope,
    pub decide: Decide,
    pub link: &'static str,
}

impl Rule {
    /// Whether the rule applies to this job.
    pub fn applies(&self, gang: &Gang<'_>) -> bool {
        let several = gang.has_several_nodes();
        let needs = match self.scope {
            Scope::Nccl | Scope::Torch => gang.gpus > 0,
            Scope::NcclNodes => gang.gpus > 0 && several,
            Scope::Gloo | Scope::Horovod | Scope::Mpi => several,
        };
        needs && self.scope.includes(gang.framework)
    }

    /// Decision for a node.
    pub fn outcome(&self, gang: &Gang<'_>, rank: u32) -> Outcome {
        match self.decide {
            Decide::Leave(reason) => leave(reason, section(self.name)),
            Decide::Node(decide) => decide(gang, rank),
            Decide::Gang(decide) => decide(gang),
        }
    }

    /// Whether the decision can differ between nodes.
    pub fn is_per_node(&self) -> bool {
        matches!(self.decide, Decide::Node(_))
    }

    /// Whether the variable must be in the environment at program start. All others are in NCCL's
    /// file, which can set any variable.
    pub fn is_env(name: &str) -> bool {
        let at_start =
            |rule: &Rule| matches!(rule.scope, Scope::Gloo | Scope::Horovod | Scope::Mpi) && rule.name == name;
        name == CONF_FILE || RULES.iter().any(at_start)
    }
}

const fn rule(name: &'static str, class: DecisionClass, scope: Scope, decide: Decide, link: &'static str) -> Rule {
    Rule { name, class, scope, decide, link }
}

use Decide::{Gang as Once, Leave, Node};
use DecisionClass::{May, Must, Never};
use Scope::{Gloo, Horovod, Mpi, Nccl, NcclNodes, Torch};

/// All rules, by topic.
pub(super) const RULES: [Rule; 52] = [
    // How processes find each other.
    rule(CONF_FILE, Must, NcclNodes, Once(conf_file), GUIDE),
    rule("NCCL_SOCKET_IFNAME", May, NcclNodes, Node(socket_interface), GUIDE),
    rule("GLOO_SOCKET_IFNAME", Must, Gloo, Node(plain_interface), GLOO),
    rule("TP_SOCKET_IFNAME", Must, Gloo, Node(plain_interface), GLOO),
    rule(
        "HOROVOD_GLOO_IFACE",
        Must,
        Horovod,
        Node(plain_interface),
        "https://horovod.readthedocs.io/en/stable/gloo.html",
    ),
    rule(
        "OMPI_MCA_btl_tcp_if_include",
        Must,
        Mpi,
        Node(plain_interface),
        "https://docs.open-mpi.org/en/v5.0.x/tuning-apps/networking/tcp.html",
    ),
    // Transport between nodes.
    rule("NCCL_NET", Must, NcclNodes, Once(net), GUIDE),
    rule("NCCL_IB_DISABLE", Must, NcclNodes, Once(ib_disable), GUIDE),
    rule("NCCL_IB_HCA", Must, NcclNodes, Node(hca), GUIDE),
    rule("NCCL_IB_ADDR_FAMILY", Must, NcclNodes, Node(address_family), GUIDE),
    rule("NCCL_IB_GID_INDEX", May, NcclNodes, Node(gid_index), TROUBLESHOOTING),
    rule(
        "NCCL_IB_ROCE_VERSION_NUM",
        May,
        NcclNodes,
        Leave("NCCL uses RoCE v2, which routers forward, by default"),
        GUIDE,
    ),
    rule("NCCL_IB_ADDR_RANGE", May, NcclNodes, Node(address_range), GUIDE),
    rule("NCCL_DEBUG", May, NcclNodes, Once(debug), GUIDE),
    // Known only to the fabric's administrator.
    rule("NCCL_IB_TC", May, NcclNodes, Once(switch_queue), GUIDE),
    rule("NCCL_IB_FIFO_TC", May, NcclNodes, Once(switch_queue), GUIDE),
    rule("NCCL_IB_SL", May, NcclNodes, Once(switch_queue), GUIDE),
    rule(
        "NCCL_IB_QPS_PER_CONNECTION",
        Never,
        NcclNodes,
        Leave(
            "more queue pairs help RoCE without adaptive routing to spread over equal paths; the profile has to say whether that applies",
        ),
        TROUBLESHOOTING,
    ),
    rule(
        "NCCL_IB_SPLIT_DATA_ON_QPS",
        Never,
        NcclNodes,
        Leave("follows the number of queue pairs, which only a profile changes"),
        GUIDE,
    ),
    rule(
        "NCCL_IB_ADAPTIVE_ROUTING",
        Never,
        NcclNodes,
        Leave("on for InfiniBand and off for RoCE by default; a profile turns it on where the switches do it"),
        GUIDE,
    ),
    rule(
        "NCCL_IB_TIMEOUT",
        May,
        NcclNodes,
        Leave(
            "20 is 30 s; more only hides what \"error 12\" is mostly about: MTU, addresses or a cable (nccl#426, nccl#709)",
        ),
        TROUBLESHOOTING,
    ),
    rule("NCCL_IB_RETRY_CNT", May, NcclNodes, Leave("7 tries are the most that the hardware takes"), GUIDE),
    rule(
        "NCCL_CROSS_NIC",
        May,
        NcclNodes,
        Leave("NCCL decides by the graph; 0 is for fabrics without links between rails, which a profile says"),
        GUIDE,
    ),
    // Better decided by NCCL.
    rule(
        "NCCL_NET_GDR_LEVEL",
        Never,
        NcclNodes,
        Leave(
            "NICs reach GPU memory up to PXB by default; farther ways over the CPU are slower than a copy, unless an administrator has measured otherwise",
        ),
        GUIDE,
    ),
    rule(
        "NCCL_DMABUF_ENABLE",
        Never,
        NcclNodes,
        Leave("on by default; 0 is for a driver that is known to be broken"),
        GUIDE,
    ),
    rule(
        "NCCL_P2P_LEVEL",
        Never,
        Nccl,
        Leave("GPUs reach each other up to PXB, or as far as the CPU is known to allow"),
        GUIDE,
    ),
    rule(
        "NCCL_P2P_DISABLE",
        Never,
        Nccl,
        Leave("1 sends data between GPUs of a node through host memory, and turns NVLink between nodes off with it"),
        GUIDE,
    ),
    rule(
        "NCCL_SHM_DISABLE",
        Never,
        Nccl,
        Leave("1 hides a /dev/shm that is too small at a large cost; the pod has a large one"),
        GUIDE,
    ),
    rule(
        "NCCL_SOCKET_NTHREADS",
        May,
        NcclNodes,
        Leave("NCCL knows the values for the NICs of clouds; others only after measuring on TCP from 100 Gbit/s on"),
        GUIDE,
    ),
    rule(
        "NCCL_NSOCKS_PERTHREAD",
        May,
        NcclNodes,
        Leave("goes with NCCL_SOCKET_NTHREADS; the product is at most 64"),
        GUIDE,
    ),
    rule(
        "NCCL_ALGO",
        Never,
        Nccl,
        Leave(
            "NCCL chooses by size; since 2.24 it fails where none of a list fits, and on AWS any value turns the tuner off",
        ),
        GUIDE,
    ),
    rule(
        "NCCL_PROTO",
        Never,
        Nccl,
        Leave("NCCL chooses by size; LL128 where it is not supported corrupts data"),
        GUIDE,
    ),
    rule(
        "NCCL_MIN_NCHANNELS",
        Never,
        Nccl,
        Leave("channels follow from the graph that NCCL finds; more take GPU cores from the training"),
        GUIDE,
    ),
    rule(
        "NCCL_MAX_NCHANNELS",
        Never,
        Nccl,
        Leave("channels follow from the graph that NCCL finds; fewer leave links unused"),
        GUIDE,
    ),
    rule(
        "NCCL_BUFFSIZE",
        Never,
        Nccl,
        Leave("4 MiB for each channel; more costs GPU memory, and plugins set what they need"),
        GUIDE,
    ),
    rule("NCCL_NTHREADS", Never, Nccl, Leave("NCCL chooses by the GPU's generation"), GUIDE),
    rule("NCCL_TOPO_FILE", May, Nccl, Node(topology_file), GUIDE),
    rule(
        "NCCL_NVLS_ENABLE",
        Never,
        Nccl,
        Leave("used where NVSwitch has it; 0 hides a Fabric Manager that does not work"),
        GUIDE,
    ),
    rule(
        "NCCL_MNNVL_ENABLE",
        Never,
        Nccl,
        Leave(
            "2 uses NVLink between nodes where it works; 1 does not make NCCL fail without it in 2.30, so that the preflight looks (check 12)",
        ),
        GUIDE,
    ),
    rule("NCCL_CUMEM_ENABLE", Never, Nccl, Leave("chosen by the driver; 0 turns NVLink between nodes off"), GUIDE),
    rule(
        "NCCL_CUMEM_HOST_ENABLE",
        Never,
        Nccl,
        Leave("chosen by the driver; only 2.24 to 2.26.4 fail where a container may not call for NUMA nodes"),
        TROUBLESHOOTING,
    ),
    rule(
        "NCCL_IGNORE_CPU_AFFINITY",
        May,
        Nccl,
        Leave("ranks are pinned near their GPU, or not at all, so that NCCL may narrow the cores further"),
        GUIDE,
    ),
    rule("NCCL_HOSTID", Never, Nccl, Leave("one pod per node of a gang: no two pods have to pass for one host"), GUIDE),
    rule("NCCL_RAS_ENABLE", Never, Nccl, Leave("listens on the loopback interface of the pod only"), GUIDE),
    // Owned by other components.
    rule(
        "CUDA_VISIBLE_DEVICES",
        Never,
        Nccl,
        Leave("the container sees the GPUs that it was given, and launchers number them"),
        "https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#env-vars",
    ),
    rule(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        Never,
        Torch,
        Leave("3 by default: after an error ranks end, and the next attempt can start; 0 leaves them hanging"),
        TORCH,
    ),
    rule(
        "TORCH_NCCL_BLOCKING_WAIT",
        Never,
        Torch,
        Leave("1 makes the host wait for every collective: nothing overlaps"),
        TORCH,
    ),
    rule(
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
        Never,
        Torch,
        Leave("the watchdog's default time is enough to distinguish a hang from a slow step"),
        TORCH,
    ),
    rule(
        "TORCH_NCCL_TRACE_BUFFER_SIZE",
        May,
        Torch,
        Leave(
            "the flight recorder writes to a volume, which the job has to have; 2000 with TORCH_NCCL_DUMP_ON_TIMEOUT=1 is usual",
        ),
        TORCH,
    ),
    rule(
        "UCX_TLS",
        Never,
        Mpi,
        Leave("UCX finds the best devices by itself"),
        "https://docs.open-mpi.org/en/v5.0.x/tuning-apps/networking/ib-and-roce.html",
    ),
    rule(
        "UCX_NET_DEVICES",
        Never,
        Mpi,
        Leave("UCX finds the best devices by itself"),
        "https://docs.open-mpi.org/en/v5.0.x/tuning-apps/networking/ib-and-roce.html",
    ),
    rule(
        "OMPI_MCA_btl_tcp_if_exclude",
        Never,
        Mpi,
        Leave("must not be set together with btl_tcp_if_include"),
        "https://docs.open-mpi.org/en/v5.0.x/tuning-apps/networking/tcp.html",
    ),
];

fn leave(reason: impl Into<String>, evidence: impl Into<String>) -> Outcome {
    Outcome { value: None, reason: reason.into(), evidence: evidence.into() }
}

fn set(value: impl Into<String>, reason: impl Into<String>, evidence: impl Into<String>) -> Outcome {
    Outcome { value: Some(value.into()), ..leave(reason, evidence) }
}

/// Whether a decision applies to the node of this rank.
pub(super) fn is_for(decision: &FabricDecision, rank: u32) -> bool {
    let Some(nodes) = &decision.nodes else { return true };
    nodes.parse::<CpuList>().is_ok_and(|nodes| nodes.iter().any(|node| node == rank))
}

/// The vendor's section about a variable.
fn section(name: &str) -> String {
    match nccl::find(name).map(|key| key.section) {
        Some(Section::System) => "section \"System configuration\" of NCCL's user guide: may stay in scripts".into(),
        Some(Section::Debugging) => "section \"Debugging\" of NCCL's user guide: should not stay in scripts".into(),
        Some(Section::Undocumented) => "not in NCCL's user guide: only the code has it".into(),
        None => "the documentation of its reader".into(),
    }
}

fn conf_file(gang: &Gang<'_>) -> Outcome {
    let image = gang.profile.and_then(|profile| profile.image.as_ref()?.conf.as_deref());
    let merged = image.map(|path| format!(", {path} of the image before it")).unwrap_or_default();
    set(
        CONF_PATH,
        format!("names of interfaces and adapters differ from node to node: each pod has a file of its own{merged}"),
        "NCCL sets from files only what the environment has not set (src/misc/param.cc): a user's value always wins",
    )
}
