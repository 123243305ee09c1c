//! What the user and the reader of a report should know about an import.

use super::super::matrix::Matrix;
use switchyard_crds::gpu_topology::{FactSource, Facts, NumaNode, SourceState};

/// The program that produced the text.
const SOURCE: &str = "nvidia-smi topo -m, imported";
/// Most pairs that a sentence names.
const MOST_PAIRS: usize = 3;
/// Longest message of a source, as in a `GPUTopology`.
const LONGEST_MESSAGE: usize = 1024;

/// Why two devices are not shown as the matrix has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Doubt {
    /// Other classes of the matrix contradict it.
    NoTree,
    /// The NUMA nodes contradict it.
    OtherNuma,
    /// Only NUMA nodes could show it.
    NumaUnknown,
    /// SYS, but in one NUMA node.
    Nearer,
}

impl Doubt {
    const ALL: [Doubt; 4] = [Doubt::NoTree, Doubt::OtherNuma, Doubt::NumaUnknown, Doubt::Nearer];

    fn sentence(self) -> &'static str {
        match self {
            Doubt::NoTree => "no PCIe tree has all of these classes, so the doubtful ones are taken as farther",
            Doubt::OtherNuma => "NODE between different NUMA nodes is taken as SYS",
            Doubt::NumaUnknown => "NODE reads as SYS where a NUMA node is not known",
            Doubt::Nearer => "SYS inside one NUMA node stays SYS in links, and reads as NODE from the NUMA nodes",
        }
    }
}

/// Notes as they are found.
#[derive(Debug, Default)]
pub(super) struct Notes {
    /// About the model of the GPUs.
    pub model: Option<String>,
    pairs: Vec<(Doubt, Facts, String)>,
}

impl Notes {
    /// Adds a pair to the group of facts that shows it.
    pub(super) fn pair(&mut self, doubt: Doubt, facts: Facts, text: String) {
        self.pairs.push((doubt, facts, text));
    }

    /// One line for each kind of doubt.
    pub(super) fn warnings(&self) -> Vec<String> {
        self.model.iter().cloned().chain(self.sentences(&[Facts::Links, Facts::NICs])).collect()
    }

    fn sentences(&self, groups: &[Facts]) -> Vec<String> {
        let sentence = |doubt: Doubt| {
            let found = self.pairs.iter().filter(|(own, facts, _)| *own == doubt && groups.contains(facts));
            let pairs: Vec<&str> = found.map(|(_, _, text)| text.as_str()).collect();
            let named = pairs.iter().take(MOST_PAIRS).copied().collect::<Vec<_>>().join("; ");
            let more = match pairs.len().saturating_sub(MOST_PAIRS) {
                0 => String::new(),
                more => format!("; and {more} more"),
            };
            (!pairs.is_empty()).then(|| format!("{}: {named}{more}", doubt.sentence()))
        };
        Doubt::ALL.into_iter().filter_map(sentence).collect()
    }

    /// Where each group of facts comes from, and what it lacks.
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
            source(Facts::Links, true, self.model.iter().cloned().chain(self.sentences(&[Facts::Links]))),
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
            let unsaid = |a: usize| (0..a).filter(is_nic).any(|b| matrix.class(a, b).is_none());
            let rows_missing = (0..matrix.devices()).filter(is_nic).any(unsaid);
            nics.extend(
                rows_missing.then(|| "the matrix does not say how NICs are connected to each other".to_owned()),
            );
        }
        nics.extend(self.sentences(&[Facts::NICs]));
        sources.push(source(Facts::NICs, true, nics));
        sources
    }
}

/// A source; it is complete if there is nothing to note.
fn source<S: Into<String>>(facts: Facts, available: bool, message: impl IntoIterator<Item = S>) -> FactSource {
    let parts: Vec<String> = message.into_iter().map(Into::into).collect();
    let state = match (available, parts.is_empty()) {
        (false, _) => SourceState::Unavailable,
        (true, true) => SourceState::Complete,
        (true, false) => SourceState::Partial,
    };
    let message: String = parts.join(". ").chars().take(LONGEST_MESSAGE).collect();
    FactSource { facts, source: SOURCE.to_owned(), state, message: (!message.is_empty()).then_some(message) }
}
