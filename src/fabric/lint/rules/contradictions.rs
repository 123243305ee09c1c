//! Mutually exclusive settings.

use super::{Context, Findings, Message, Severity};
use crate::lint::view::{Container, Variable};
use crate::variables::nccl::{self, GUIDE, MAX_SOCKETS};

/// `contradiction`.
pub(super) fn check(context: &Context<'_>, found: &mut Findings) {
    let container = context.container;
    without_rdma(container, found);
    limits(container, found);
    for rule in PAIRS {
        let (Some(first), Some(second)) = (rule.first.find(container), rule.second.find(container)) else { continue };
        pair(first, second, rule.severity, rule.why, found);
    }
    for (name, needs) in [("NCCL_DEBUG_SUBSYS", "NCCL_DEBUG"), ("NCCL_DEBUG_FILE", "NCCL_DEBUG")] {
        if let Some(variable) = container.variable(name).filter(|_| container.variable(needs).is_none()) {
            let why = format!("without {needs} nothing is printed");
            let fix = format!("delete {name}, or set {needs}=INFO too");
            found.add("contradiction", Severity::Note, &variable.path, Message::of(variable, why, fix).link(GUIDE));
        }
    }
}

/// A variable and its value, case-insensitive; an empty value matches any.
struct Setting(&'static str, &'static str);

impl Setting {
    fn find<'a>(&self, container: &'a Container) -> Option<&'a Variable> {
        if self.1.is_empty() { container.variable(self.0) } else { container.has(self.0, self.1) }
    }
}

struct Pair {
    first: Setting,
    second: Setting,
    severity: Severity,
    why: &'static str,
}

const fn excludes(first: Setting, second: Setting, severity: Severity, why: &'static str) -> Pair {
    Pair { first, second, severity, why }
}

/// Sources: NCCL user guide, `src/mnnvl.cc` of 2.30.7 (cuMem off turns MNNVL off), mpirun's `--help
/// btl_tcp`.
const PAIRS: [Pair; 9] = [
    excludes(
        Setting("NCCL_NET", "IB"),
        Setting("NCCL_IB_DISABLE", "1"),
        Severity::Error,
        "the one demands RDMA and the other forbids it: NCCL does not start",
    ),
    excludes(
        Setting("NCCL_MNNVL_ENABLE", "1"),
        Setting("NCCL_CUMEM_ENABLE", "0"),
        Severity::Error,
        "NVLink between nodes needs memory of the cuMem functions: it stays off without a word",
    ),
    excludes(
        Setting("NCCL_P2P_DISABLE", "1"),
        Setting("NCCL_P2P_LEVEL", ""),
        Severity::Warning,
        "with P2P disabled its level has no effect",
    ),
    excludes(
        Setting("NCCL_IB_GID_INDEX", ""),
        Setting("NCCL_IB_ADDR_FAMILY", ""),
        Severity::Warning,
        "a fixed index switches off the search that the other one directs",
    ),
    excludes(
        Setting("NCCL_IB_GID_INDEX", ""),
        Setting("NCCL_IB_ADDR_RANGE", ""),
        Severity::Warning,
        "a fixed index switches off the search that the other one directs",
    ),
    excludes(
        Setting("NCCL_IB_GID_INDEX", ""),
        Setting("NCCL_IB_ROCE_VERSION_NUM", ""),
        Severity::Warning,
        "a fixed index switches off the search that the other one directs",
    ),
    excludes(
        Setting("NCCL_GRAPH_STREAM_ORDERING", "0"),
        Setting("NCCL_GRAPH_MIXING_SUPPORT", "1"),
        Severity::Error,
        "NCCL does not support graph mixing without its own order of streams",
    ),
    excludes(
        Setting("OMPI_MCA_btl_tcp_if_include", ""),
        Setting("OMPI_MCA_btl_tcp_if_exclude", ""),
        Severity::Error,
        "Open MPI refuses both at once",
    ),
    excludes(
        Setting("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),
        Setting("PYTORCH_CUDA_ALLOC_CONF", ""),
        Severity::Warning,
        "without the caching allocator its configuration has no effect",
    ),
];

fn pair(first: &Variable, second: &Variable, severity: Severity, why: &str, found: &mut Findings) {
    let got = format!("{} with {}", first.words(), second.words());
    let fix = format!("delete one of {} and {}", first.name, second.name);
    let text = Message::new(got, why, fix);
    let is_of_nccl = [first, second].iter().all(|variable| variable.name.starts_with(nccl::PREFIX));
    found.add("contradiction", severity, &second.path, if is_of_nccl { text.link(GUIDE) } else { text });
}

/// RDMA is disabled, but the container sets or requests something that only matters with it.
fn without_rdma(container: &Container, found: &mut Findings) {
    let Some(off) = container.has("NCCL_IB_DISABLE", "1").or_else(|| container.has("NCCL_NET", "Socket")) else {
        return;
    };
    let is_of_rdma = |variable: &&Variable| variable.name.starts_with("NCCL_IB_") && variable.name != "NCCL_IB_DISABLE";
    if let Some(variable) = container.variables.iter().find(is_of_rdma) {
        let why = "RDMA is off: settings of it mean nothing";
        pair(off, variable, Severity::Warning, why, found);
    }
    if let Some(resource) = &container.rdma {
        let got = format!("{} in a container that asks for {resource}", off.words());
        let why = "the container holds an RDMA device and uses TCP";
        let fix = format!("delete {}, or do not ask for {resource}", off.name);
        found.add("contradiction", Severity::Warning, &off.path, Message::new(got, why, fix));
    }
}

/// Lower and upper limits, and products of numbers.
fn limits(container: &Container, found: &mut Findings) {
    let number = |name: &str| Some((container.variable(name)?, nccl::number(container.value(name)?)?));
    for (low, high) in [("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"), ("NCCL_MIN_CTAS", "NCCL_MAX_CTAS")] {
        if let (Some((low, least)), Some((high, most))) = (number(low), number(high))
            && least > most
        {
            pair(low, high, Severity::Error, "the lower limit is above the upper one", found);
        }
    }
    if let (Some((threads, count)), Some((sockets, each))) =
        (number("NCCL_SOCKET_NTHREADS"), number("NCCL_NSOCKS_PERTHREAD"))
        && count.saturating_mul(each) > MAX_SOCKETS
    {
        let got = format!("{} with {}", threads.words(), sockets.words());
        let why = format!("their product is {}, and NCCL takes at most {MAX_SOCKETS}", count.saturating_mul(each));
        let fix = format!("set NCCL_NSOCKS_PERTHREAD={}", (MAX_SOCKETS / count.max(1)).max(1));
        found.add("contradiction", Severity::Error, &sockets.path, Message::new(got, why, fix).link(GUIDE));
    }
}
