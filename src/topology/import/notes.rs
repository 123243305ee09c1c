//! Notes about an import, for the user and for readers of the report.

use super::super::matrix::Matrix;
use switchyard_crds::gpu_topology::{FactSource, Facts, NumaNode, SourceState};

/// Program that produced the text.
const SOURCE: &str = "nvidia-smi topo -m, imported";
/// Maximum number of pairs named in a sentence.
const MAX_PAIRS: usize = 3;
/// Maximum length of a source message, as in a `GPUTopology`.
const MAX_MESSAGE_LEN: usize = 1024;

/// NUMA nodes without a number in the matrix.
const NUMBERED: &str = "the matrix has no NUMA affinity, so NUMA nodes are numbered by the CPUs of the GPUs";

/// NVLinks that the matrix does not show.
const PCIE_ONLY: &str = "the text is from `nvidia-smi topo -mp`, which shows PCIe where GPUs have NVLink: give the output of `nvidia-smi topo -m`";

/// Why the result represents a pair differently from the matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Discrepancy {
    /// Other classes in the matrix contradict it.
    NotATree,
    /// The NUMA nodes contradict it.
    OtherNuma,
    /// Only NUMA nodes could express it, and they are unknown.
    NumaUnknown,
    /// SYS within one NUMA node.
    Nearer,
}

impl Discrepancy {
    const ALL: [Discrepancy; 4] =
        [Discrepancy::NotATree, Discrepancy::OtherNuma, Discrepancy::NumaUnknown, Discrepancy::Nearer];

    fn sentence(self) -> &'static str {
        match self {
            Discrepancy::NotATree => {
                "no PCIe tree has all of these classes, so contradictory ones are treated as farther"
            }
            Discrepancy::OtherNuma => "NODE between different NUMA nodes is taken as SYS",
            Discrepancy::NumaUnknown => "NODE reads as SYS where a NUMA node is not known",
            Discrepancy::Nearer => "SYS inside one NUMA node stays SYS in links, and reads as NODE from the NUMA nodes",
        }
    }
}

/// Collected notes.
#[derive(Debug, Default)]
pub(super) struct Notes {
    /// About the GPU model.
    pub model: Option<String>,
    /// About the rates of NICs.
    pub rates: Option<String>,
    /// NUMA nodes are numbered by the CPU lists of GPUs.
    pub numbered_by_cpus: bool,
    /// The matrix leaves NVLinks out.
    pub pcie_only: bool,
    pub(super) pairs: Vec<(Discrepancy, Facts, String)>,
}

impl Notes {
    /// Records a pair under the fact group that shows it.
    pub(super) fn pair(&mut self, discrepancy: Discrepancy, facts: Facts, text: String) {
        self.pairs.push((discrepancy, facts, text));
    }

    /// One line per kind of discrepancy.
    pub(super) fn warnings(&self) -> Vec<String> {
        let numa = self.numbered_by_cpus.then(|| NUMBERED.to_owned());
        let links = self.pcie_only.then(|| PCIE_ONLY.to_owned());
        let about = self.model.iter().cloned().chain(numa).chain(links);
        about.chain(self.sentences(&[Facts::Links, Facts::NICs])).collect()
    }

    fn sentences(&self, groups: &[Facts]) -> Vec<String> {
        let sentence = |discrepancy: Discrepancy| {
            let found = self.pairs.iter().filter(|(own, facts, _)| *own == discrepancy && groups.contains(facts));
            let pairs: Vec<&str> = found.map(|(_, _, text)| text.as_str()).collect();
            let named = pairs.iter().take(MAX_PAIRS).copied().collect::<Vec<_>>().join("; ");
            let more = match pairs.len().saturating_sub(MAX_PAIRS) {
                0 => String::new(),
                more => format!("; and {more} more"),
            };
            (!pairs.is_empty()).then(|| format!("{}: {named}{more}", discrepancy.sentence()))
        };
        Discrepancy::ALL.into_iter().filter_map(sentence).collect()
    }

    /// The source of each fact group, and what it lacks.
    pub(super) fn sources(&self, matrix: &Matrix, numa_nodes: &[NumaNode]) -> Vec<FactSource> {
        let has_cpus = matrix.gpus.iter().any(|gpu| gpu.cpus.is_some());
        let lists = matrix.gpus.iter().any(|gpu| gpu.numa.as_ref().is_some_and(|list| list.len() > 1));
        let cpus = if has_cpus { "only CPUs near GPUs are known" } else { "the matrix has no CPU affinity" };
        let mut numa = vec![if numa_nodes.is_empty() {
            "the matrix has no NUMA affinity"
        } else {
            "only NUMA nodes near GPUs are known"
        }];
        numa.extend(lists.then_some("of a list the first was taken"));
        numa.extend(self.numbered_by_cpus.then_some(NUMBERED));
        let links = self.pcie_only.then(|| PCIE_ONLY.to_owned());
        let mut sources = vec![
            source(Facts::CPUs, has_cpus, [cpus]),
            source(Facts::NUMANodes, !numa_nodes.is_empty(), numa),
            source(
                Facts::GPUs,
                true,
                [
                    "UUIDs and bus ids are made up, PCIe paths reconstructed from the matrix; where it shows NVLink, the way over \
                  PCIe is inferred",
                ],
            ),
            source(Facts::Links, true, self.model.iter().cloned().chain(links).chain(self.sentences(&[Facts::Links]))),
        ];
        let mut nics = Vec::new();
        if matrix.nics.is_empty() {
            nics.push("the matrix has no NIC".to_owned());
        } else {
            nics.push(
                "bus ids are made up, PCIe paths reconstructed from the matrix, NUMA nodes those of near GPUs"
                    .to_owned(),
            );
            let is_nic = |device: &usize| *device >= matrix.gpus.len();
            let unstated = |a: usize| (0..a).filter(is_nic).any(|b| matrix.class(a, b).is_none());
            let rows_missing = (0..matrix.devices()).filter(is_nic).any(unstated);
            nics.extend(
                rows_missing.then(|| "the matrix does not say how NICs are connected to each other".to_owned()),
            );
        }
        nics.extend(self.rates.clone());
        nics.extend(self.sentences(&[Facts::NICs]));
        sources.push(source(Facts::NICs, true, nics));
        sources
    }
}

/// A source; complete if there are no notes.
fn source<S: Into<String>>(facts: Facts, available: bool, message: impl IntoIterator<Item = S>) -> FactSource {
    let parts: Vec<String> = message.into_iter().map(Into::into).collect();
    let state = match (available, parts.is_empty()) {
        (false, _) => SourceState::Unavailable,
        (true, true) => SourceState::Complete,
        (true, false) => SourceState::Partial,
    };
    let message: String = parts.join(". ").chars().take(MAX_MESSAGE_LEN).collect();
    FactSource { facts, source: SOURCE.to_owned(), state, message: (!message.is_empty()).then_some(message) }
}
