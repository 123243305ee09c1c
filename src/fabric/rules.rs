//! The rule table: every variable that is set or deliberately left alone, when, to what, and why.
//!
//! Sources: NCCL's user guide 2.30.7 (`env.rst`, `troubleshooting/*.rst`) and code (`src/transport/net_ib/*.cc`, `src/misc/socket.cc`,
//! `src/init.cc`, `src/mnnvl.cc`); where an issue tells what went wrong it is named with the rule.

use super::gang::{Gang, training_ports};
use super::profile::{Carrier, Profile};
use crate::units::plural;
use crate::variables::nccl::{self, GUIDE, Section};
use switchyard_crds::gpu_topology::{GPUTopologyStatus, GidFamily, GidType};
use switchyard_crds::{DecisionClass, DecisionOutcome, FabricDecision, FabricMode, Framework};

/// Where NCCL's troubleshooting pages are.
const TROUBLE: &str = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html";
/// PyTorch's variables.
const TORCH: &str = "https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html";
/// Interfaces of Gloo and TensorPipe.
const GLOO: &str = "https://docs.pytorch.org/docs/stable/distributed.html";
/// The variable that names NCCL's file.
pub const CONF_FILE: &str = "NCCL_CONF_FILE";
/// The interface of the pod network inside a pod, as container runtimes name it.
const POD_INTERFACE: &str = "eth0";

/// What is decided for a node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Outcome {
    /// The value; `None`: left alone.
    pub value: Option<String>,
    pub reason: String,
    /// The fact and where it is from.
    pub evidence: String,
}

/// How a decision is reached.
#[derive(Clone, Copy)]
pub(super) enum Decide {
    /// Always left alone.
    Leave(&'static str),
    /// By the facts of the node.
    Node(fn(&Gang<'_>, u32) -> Outcome),
    /// The same for all nodes.
    Gang(fn(&Gang<'_>) -> Outcome),
}

/// Which jobs a rule is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scope {
    /// NCCL is used: there are GPUs.
    Nccl,
    /// NCCL is used between nodes.
    NcclNodes,
    /// PyTorch's Gloo and TensorPipe may be used between nodes.
    Gloo,
    /// Horovod's Gloo may be.
    Horovod,
    /// Open MPI starts the processes.
    Mpi,
    /// PyTorch with NCCL.
    Torch,
}

impl Scope {
    /// Whether programs of this framework may read the variable.
    fn is_of(self, framework: Framework) -> bool {
        use Framework as F;
        match self {
            Scope::Nccl | Scope::NcclNodes => true,
            Scope::Gloo | Scope::Torch => matches!(framework, F::Torch | F::Plain),
            Scope::Horovod => framework == F::Horovod,
            Scope::Mpi => matches!(framework, F::MPI | F::Horovod),
        }
    }
}

/// One variable.
pub(super) struct Rule {
    pub name: &'static str,
    pub class: DecisionClass,
    scope: Scope,
    pub decide: Decide,
    pub link: &'static str,
}

impl Rule {
    /// Whether the rule is about this job.
    pub fn applies(&self, gang: &Gang<'_>) -> bool {
        // Our own engine reads none of these variables.
        if gang.framework == Framework::Switchyard {
            return false;
        }
        let several = gang.has_several_nodes();
        let needs = match self.scope {
            Scope::Nccl | Scope::Torch => gang.gpus > 0,
            Scope::NcclNodes => gang.gpus > 0 && several,
            Scope::Gloo | Scope::Horovod | Scope::Mpi => several,
        };
        needs && self.scope.is_of(gang.framework)
    }

    /// What is decided for a node.
    pub fn outcome(&self, gang: &Gang<'_>, rank: u32) -> Outcome {
        match self.decide {
            Decide::Leave(reason) => leave(reason, section(self.name)),
            Decide::Node(decide) => decide(gang, rank),
            Decide::Gang(decide) => decide(gang),
        }
    }

    /// Whether nodes may differ.
    pub fn is_per_node(&self) -> bool {
        matches!(self.decide, Decide::Node(_))
    }

    /// Whether the variable has to be in the environment when a program starts; everything else is in NCCL's file, which may name any
    /// variable.
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
    // What carries data between nodes.
    rule("NCCL_NET", Must, NcclNodes, Once(net), GUIDE),
    rule("NCCL_IB_DISABLE", Must, NcclNodes, Once(ib_disable), GUIDE),
    rule("NCCL_IB_HCA", Must, NcclNodes, Node(hca), GUIDE),
    rule("NCCL_IB_ADDR_FAMILY", Must, NcclNodes, Node(address_family), GUIDE),
    rule("NCCL_IB_GID_INDEX", May, NcclNodes, Node(gid_index), TROUBLE),
    rule(
        "NCCL_IB_ROCE_VERSION_NUM",
        May,
        NcclNodes,
        Leave("NCCL takes RoCE v2, which routers pass on, unless it is told otherwise"),
        GUIDE,
    ),
    rule("NCCL_IB_ADDR_RANGE", May, NcclNodes, Node(address_range), GUIDE),
    rule("NCCL_DEBUG", May, NcclNodes, Once(debug), GUIDE),
    // What only the fabric's administrator can know.
    rule("NCCL_IB_TC", May, NcclNodes, Once(of_switches), GUIDE),
    rule("NCCL_IB_FIFO_TC", May, NcclNodes, Once(of_switches), GUIDE),
    rule("NCCL_IB_SL", May, NcclNodes, Once(of_switches), GUIDE),
    rule(
        "NCCL_IB_QPS_PER_CONNECTION",
        Never,
        NcclNodes,
        Leave(
            "more queue pairs help RoCE without adaptive routing to spread over equal paths; whether that is so, the profile has to say",
        ),
        TROUBLE,
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
        TROUBLE,
    ),
    rule("NCCL_IB_RETRY_CNT", May, NcclNodes, Leave("7 tries are the most that the hardware takes"), GUIDE),
    rule(
        "NCCL_CROSS_NIC",
        May,
        NcclNodes,
        Leave("NCCL decides by the graph; 0 is for fabrics without links between rails, which a profile says"),
        GUIDE,
    ),
    // What NCCL decides better.
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
        TROUBLE,
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
    // What belongs to others.
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
        Leave("the watchdog's own time is enough to tell a hang from a slow step"),
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

/// Where the vendor has a variable.
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
        super::conf::PATH,
        format!("names of interfaces and adapters differ from node to node: each pod has a file of its own{merged}"),
        "NCCL sets from files only what the environment has not set (src/misc/param.cc): a user's value always wins",
    )
}

/// The value of `*_IFNAME` for the node of this rank, by what was decided.
pub fn interface(decisions: &[FabricDecision], rank: u32) -> Option<&str> {
    let is_interface = |decision: &&FabricDecision| {
        let rule = RULES.iter().find(|rule| rule.name == decision.name);
        rule.is_some_and(|rule| rule.is_per_node() && Rule::is_env(rule.name))
    };
    let of_rank =
        |decision: &&FabricDecision| decision.outcome == DecisionOutcome::Set && super::conf::is_for(decision, rank);
    decisions.iter().filter(is_interface).find(of_rank)?.value.as_deref()
}

/// The interface by which the processes of a node reach the others.
enum Interface<'a> {
    /// Of the pod network.
    Pod(&'a str),
    /// Of the node's own network.
    Node(&'a str),
    /// The node uses its own network, and nobody says which interface leads out.
    Unknown,
}

fn way_out<'a>(gang: &'a Gang<'_>, rank: u32) -> Interface<'a> {
    if !gang.uses_host_network() {
        return Interface::Pod(pod_interface(gang.profile));
    }
    let host = gang.members[rank as usize].facts.and_then(|facts| facts.host.as_ref());
    host.and_then(|host| host.default_route.as_deref()).map_or(Interface::Unknown, Interface::Node)
}

fn socket_interface(gang: &Gang<'_>, rank: u32) -> Outcome {
    let reason =
        "NCCL would try other interfaces first, such as ib0 or a secondary network, which may not lead to all nodes";
    match way_out(gang, rank) {
        Interface::Pod(name) => {
            set(format!("={name}"), reason, "spec.hostNetwork is not set: the interface of the pod network")
        }
        Interface::Node(name) => {
            set(format!("={name}"), reason, "spec.hostNetwork; host.defaultRoute of the GPUTopology")
        }
        Interface::Unknown => {
            leave("the interface of the default route is not known", "no host.defaultRoute in the GPUTopology")
        }
    }
}

fn plain_interface(gang: &Gang<'_>, rank: u32) -> Outcome {
    let reason =
        "it binds to the address of the host's name otherwise, which may be a loopback address, and reads no file";
    match way_out(gang, rank) {
        Interface::Pod(name) => set(name, reason, "spec.hostNetwork is not set: the interface of the pod network"),
        Interface::Node(name) => set(name, reason, "spec.hostNetwork; host.defaultRoute of the GPUTopology"),
        Interface::Unknown => {
            leave("the interface of the default route is not known", "no host.defaultRoute in the GPUTopology")
        }
    }
}

fn net(gang: &Gang<'_>) -> Outcome {
    if gang.mode != FabricMode::Required {
        return leave("NCCL takes a plugin, else InfiniBand or RoCE, else TCP", format!("fabric.mode {:?}", gang.mode));
    }
    let reason = "NCCL fails where it would fall back to TCP without a word";
    match gang.carrier() {
        Some(Carrier::Plugin) => {
            let profile = gang.profile.and_then(|profile| Some((profile.plugin.as_deref()?, profile.name.as_str())));
            let (plugin, profile) = profile.unwrap_or_default();
            set(plugin, reason, format!("fabric.mode Required; profile {profile}"))
        }
        _ => set("IB", reason, "fabric.mode Required; RDMA ports of all nodes are up, in nics[] of the GPUTopology"),
    }
}

fn ib_disable(gang: &Gang<'_>) -> Outcome {
    if gang.mode == FabricMode::Disabled {
        return set("1", "the job asks for TCP", "fabric.mode Disabled");
    }
    match gang.carrier() {
        Some(carrier) if carrier.is_verbs() && !gang.is_granted() => set(
            "1",
            "the pods see the adapters of their node but may not open them, and NCCL would stop or warn at each",
            "no resource of the trainer gives an RDMA device",
        ),
        Some(Carrier::Socket) => {
            leave("there is nothing to turn off", "no RDMA port in nics[] of the GPUTopology is up")
        }
        _ => leave("1 is no remedy for a hang: it trades it for TCP", section("NCCL_IB_DISABLE")),
    }
}

/// Facts of a node, or the outcome of a node without them.
fn known<'a>(gang: &'a Gang<'_>, rank: u32) -> Result<&'a GPUTopologyStatus, Outcome> {
    let unknown = || leave("nothing is known of the node", "no GPUTopology that can be used");
    gang.members[rank as usize].facts.ok_or_else(unknown)
}

fn hca(gang: &Gang<'_>, rank: u32) -> Outcome {
    let facts = match known(gang, rank) {
        Ok(facts) => facts,
        Err(outcome) => return outcome,
    };
    if !gang.carrier().is_some_and(Carrier::is_verbs) {
        return leave(
            "data does not go over InfiniBand or RoCE",
            "nics[] of the GPUTopology, fabric.mode and the profile",
        );
    }
    let good: Vec<&str> = training_ports(facts).filter_map(|nic| nic.rdma_device.as_deref()).collect();
    let others = facts.nics.iter().filter(|nic| nic.rdma_device.as_deref().is_some_and(|name| !good.contains(&name)));
    let others: Vec<String> = others
        .map(|nic| {
            let name = nic.rdma_device.as_deref().unwrap_or_default();
            let what = match (&nic.virtual_function_of, nic.state.as_deref(), nic.link_layer.as_deref()) {
                (Some(_), ..) => "a virtual function",
                (None, Some(state), _) if state != "Active" => state,
                (None, _, Some(layer)) if !good.is_empty() => layer,
                _ => "slower",
            };
            format!("{name} ({what})")
        })
        .collect();
    if good.is_empty() || others.is_empty() {
        let count = good.len();
        let evidence =
            format!("nics[] of the GPUTopology: {count} RDMA port{} up and alike, no other", plural(count as u64));
        return leave("every adapter of the node is for training", evidence);
    }
    let port = |name: &&str| {
        let nic = facts.nics.iter().find(|nic| nic.rdma_device.as_deref() == Some(name));
        format!("{name}:{}", nic.and_then(|nic| nic.port).unwrap_or(1))
    };
    let list: Vec<String> = good.iter().map(port).collect();
    set(
        format!("={}", list.join(",")),
        "NCCL would also use adapters that are not for training; `=` since mlx5_1 would match mlx5_10 too",
        format!("nics[] of the GPUTopology: beside them {}", others.join(", ")),
    )
}

/// Groups of RoCE v2 addresses of the training ports: how many ports have some of this family, and the most that one has.
fn addresses(facts: &GPUTopologyStatus, family: GidFamily) -> (usize, u32) {
    let of_port = |gids: &[switchyard_crds::gpu_topology::GidGroup]| {
        let of = gids.iter().filter(|group| group.kind == GidType::RoCEv2 && group.family == Some(family));
        of.map(|group| group.count).sum::<u32>()
    };
    let counts: Vec<u32> = training_ports(facts).map(|nic| of_port(&nic.gids)).collect();
    (counts.iter().filter(|count| **count > 0).count(), counts.into_iter().max().unwrap_or(0))
}

/// The node's facts, if its ports are RoCE.
fn roce<'a>(gang: &'a Gang<'_>, rank: u32) -> Result<&'a GPUTopologyStatus, Outcome> {
    let facts = known(gang, rank)?;
    if gang.carrier() == Some(Carrier::RoCE) {
        return Ok(facts);
    }
    Err(leave("addresses of ports are for RoCE only", "linkLayer in nics[] of the GPUTopology"))
}

fn address_family(gang: &Gang<'_>, rank: u32) -> Outcome {
    let facts = match roce(gang, rank) {
        Ok(facts) => facts,
        Err(outcome) => return outcome,
    };
    let ports = training_ports(facts).count();
    match (addresses(facts, GidFamily::IPv4).0, addresses(facts, GidFamily::IPv6).0) {
        (0, 1..) => set(
            "AF_INET6",
            "NCCL looks for an IPv4 address unless it is told, and there is none",
            format!(
                "nics[].gids of the GPUTopology: {ports} port{} with RoCE v2 addresses of IPv6 only",
                plural(ports as u64)
            ),
        ),
        (0, 0) => leave("no port has an address of RoCE v2", "nics[].gids of the GPUTopology"),
        (v4, _) => leave(
            "NCCL looks for an IPv4 address by default",
            format!("nics[].gids of the GPUTopology: {v4} of {ports} port{} have one", plural(ports as u64)),
        ),
    }
}

fn gid_index(gang: &Gang<'_>, rank: u32) -> Outcome {
    let indices = known(gang, rank).map(|facts| {
        let of_port = |nic: &switchyard_crds::gpu_topology::Nic| {
            let group = nic.gids.iter().find(|group| group.kind == GidType::RoCEv2);
            Some(format!("{} {}", nic.rdma_device.as_deref()?, group?.first_index))
        };
        training_ports(facts).filter_map(of_port).collect::<Vec<_>>()
    });
    let evidence = match indices {
        Ok(indices) if !indices.is_empty() => {
            format!("nics[].gids of the GPUTopology: first RoCE v2 index on the node by port: {}", indices.join(", "))
        }
        _ => "NCCL's user guide: since 2.21 it should not be set".to_string(),
    };
    leave(
        "since 2.21 NCCL finds the index by itself, port by port; inside a pod it differs from that of the node",
        evidence,
    )
}

fn address_range(gang: &Gang<'_>, rank: u32) -> Outcome {
    let facts = match roce(gang, rank) {
        Ok(facts) => facts,
        Err(outcome) => return outcome,
    };
    let most = addresses(facts, GidFamily::IPv4).1.max(addresses(facts, GidFamily::IPv6).1);
    let evidence = format!(
        "nics[].gids of the GPUTopology: at most {most} RoCE v2 address{} of a family on a port",
        if most == 1 { "" } else { "es" }
    );
    if most > 1 {
        return leave(
            "a port has several addresses, and which one leads to the others only a profile can say",
            evidence,
        );
    }
    leave("there is nothing to choose", evidence)
}

fn debug(gang: &Gang<'_>) -> Outcome {
    set(
        "WARN",
        "NCCL says why it fails, and nothing else",
        format!("{}; fabric.mode {:?}", section("NCCL_DEBUG"), gang.mode),
    )
}

fn of_switches(gang: &Gang<'_>) -> Outcome {
    let by =
        gang.profile.map_or("no profile fits the nodes".to_string(), |profile| format!("profile {}", profile.name));
    match gang.carrier() {
        Some(Carrier::RoCE) => leave(
            "it has to match the lossless queue that the switches are configured with; an administrator's profile names it",
            format!("{by} does not say it"),
        ),
        _ => leave("it is for the queues of RoCE switches", by),
    }
}

fn topology_file(gang: &Gang<'_>, rank: u32) -> Outcome {
    let facts = match known(gang, rank) {
        Ok(facts) => facts,
        Err(outcome) => return outcome,
    };
    // A hypervisor that hides the switches puts every device on the root.
    let is_flat = |path: &Vec<String>| path.len() <= 2;
    let paths: Vec<&Vec<String>> =
        facts.gpus.iter().map(|gpu| &gpu.pcie_path).filter(|path| !path.is_empty()).collect();
    let count = paths.len();
    if count > 1 && paths.into_iter().all(is_flat) {
        return leave(
            "the machine looks like a guest whose PCIe tree is hidden: the cloud's file, if there is one, comes with the image",
            format!("gpus[].pciePath of the GPUTopology: {count} GPUs directly below a root"),
        );
    }
    leave(
        "NCCL reads the same tree from sysfs, and a file that is old would win over it",
        "gpus[].pciePath of the GPUTopology",
    )
}

/// The variables that name the interface of processes which read no file, and their value in the pod network; `None`: it is that of the node,
/// known when the place is.
pub fn interfaces(
    framework: Framework,
    uses_host_network: bool,
    profile: Option<&Profile>,
) -> Vec<(&'static str, Option<String>)> {
    let names =
        RULES.iter().filter(|rule| rule.scope.is_of(framework) && rule.is_per_node() && Rule::is_env(rule.name));
    let value = (!uses_host_network).then(|| pod_interface(profile).to_string());
    names.map(|rule| (rule.name, value.clone())).collect()
}

fn pod_interface(profile: Option<&Profile>) -> &str {
    profile.and_then(|profile| profile.pod_interface.as_deref()).unwrap_or(POD_INTERFACE)
}
