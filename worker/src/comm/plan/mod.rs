//! Algorithms of collectives as data: which rank sends which chunk to whom, and what the receiver
//! does with it. Pure; [`super::executor`] runs a plan.
//!
//! ```text
//! Layout, Collective -> cost: choose an Algorithm -> its file: the Program of one rank
//!                                                      -> verify (tests): all ranks' programs
//! ```
//!
//! A program is a list of steps on chunks of one buffer, in place. Steps with one peer and one
//! direction run in program order, as one byte stream; streams run concurrently. Besides that, a
//! step waits only for the earlier steps in [`Program::after`], byte by byte: a rank can forward
//! the first bytes of a chunk while the rest is still arriving.
//!
//! An algorithm is one file and its line in [`DEFINITIONS`].

mod cost;
mod halving_doubling;
mod hierarchical;
mod pairwise;
mod recursive_doubling;
mod ring;
mod tree;
#[cfg(test)]
mod verify;

pub use cost::Algorithm;
pub(super) use cost::{Cost, CostModel, Path};

/// A collective operation. Barriers are all-reduces of one element.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Collective {
    AllReduce,
    /// Rank `r` ends with chunk `r` reduced.
    ReduceScatter,
    /// Rank `r` starts with chunk `r`.
    AllGather,
    Broadcast {
        root: usize,
    },
    /// Rank `r` ends with chunk `r` of rank `i` as its chunk `i`. All chunks have equal lengths.
    AllToAll,
}

/// The ranks of a plan, as one of them sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Layout {
    pub rank: usize,
    /// Number of the host of each rank, in order of first appearance.
    pub hosts: Vec<usize>,
}

impl Layout {
    pub fn ranks(&self) -> usize {
        self.hosts.len()
    }

    /// Ranks of each host, in rank order.
    pub fn by_host(&self) -> Vec<Vec<usize>> {
        let mut hosts: Vec<Vec<usize>> = Vec::new();
        for (rank, &host) in self.hosts.iter().enumerate() {
            if host >= hosts.len() {
                hosts.resize(host + 1, Vec::new());
            }
            hosts[host].push(rank);
        }
        hosts
    }
}

/// What a rank does in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    Send,
    /// Receive, and combine with this rank's chunk.
    Reduce,
    /// As `Reduce`; the result is complete. Formats that round on the wire round it here, so that
    /// all ranks get the same bits.
    ReduceLast,
    /// Receive, and replace this rank's chunk.
    Copy,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Step {
    pub peer: usize,
    pub chunk: usize,
    pub action: Action,
}

/// One rank's part of a plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Program {
    /// The buffer is divided into this many chunks.
    pub chunks: usize,
    pub steps: Vec<Step>,
    /// End of each step's entries in `after`.
    ends: Vec<usize>,
    after: Vec<usize>,
    /// Steps that use a chunk's current content: the last receive, then the sends since.
    users: Vec<(Option<usize>, Vec<usize>)>,
}

impl Program {
    pub fn new(chunks: usize) -> Program {
        let users = vec![(None, Vec::new()); chunks];
        Program { chunks, steps: Vec::new(), ends: Vec::new(), after: Vec::new(), users }
    }

    /// Earlier steps on the same chunk that a step follows byte by byte: a send follows the receive
    /// of its content; a receive also follows the sends of the content that it overwrites.
    pub fn after(&self, step: usize) -> &[usize] {
        let start = step.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.after[start..self.ends[step]]
    }

    pub fn send(&mut self, peer: usize, chunk: usize) {
        let (written, sends) = &mut self.users[chunk];
        self.after.extend(*written);
        sends.push(self.steps.len());
        self.push(Step { peer, chunk, action: Action::Send });
    }

    pub fn receive(&mut self, peer: usize, chunk: usize, action: Action) {
        let (written, sends) = &mut self.users[chunk];
        self.after.extend(*written);
        self.after.append(sends);
        *written = Some(self.steps.len());
        self.push(Step { peer, chunk, action });
    }

    fn push(&mut self, step: Step) {
        self.steps.push(step);
        self.ends.push(self.after.len());
    }

    /// The same steps without their order, which a test must notice.
    #[cfg(test)]
    fn forget_order(&mut self) {
        self.after.clear();
        self.ends.fill(0);
    }

    /// Combines what arrives from `peer`; `last`: the result is complete.
    pub fn reduce(&mut self, peer: usize, chunk: usize, last: bool) {
        self.receive(peer, chunk, if last { Action::ReduceLast } else { Action::Reduce });
    }

    pub fn copy(&mut self, peer: usize, chunk: usize) {
        self.receive(peer, chunk, Action::Copy);
    }
}

/// An algorithm: its programs and their price.
struct Definition {
    algorithm: Algorithm,
    /// The program of a rank, for two or more ranks; `None` if the algorithm cannot do this
    /// collective with these ranks.
    program: fn(&Layout, Collective) -> Option<Program>,
    cost: fn(&Layout, Collective) -> Cost,
    /// All ranks reduce, instead of one rank per chunk. Formats that round on the wire would then
    /// give different bits.
    reduces_everywhere: bool,
}

const DEFINITIONS: [&Definition; 6] = [
    &ring::RING,
    &recursive_doubling::RECURSIVE_DOUBLING,
    &halving_doubling::HALVING_DOUBLING,
    &tree::TREE,
    &hierarchical::HIERARCHICAL,
    &pairwise::PAIRWISE,
];

impl Algorithm {
    fn definition(self) -> &'static Definition {
        // The order of the variants; a test compares.
        DEFINITIONS[self as usize]
    }

    /// The program of this layout's rank; `None` if the algorithm cannot do this collective with
    /// these ranks.
    pub(super) fn program(self, layout: &Layout, collective: Collective) -> Option<Program> {
        if layout.ranks() < 2 {
            return Some(Program::new(1));
        }
        (self.definition().program)(layout, collective)
    }

    /// Whether this algorithm suits a format that rounds on the wire.
    pub(super) fn suits_rounding(self) -> bool {
        !self.definition().reduces_everywhere
    }
}

/// The largest power of two up to `n`, and how many ranks are left over.
fn power_of_two(n: usize) -> (usize, usize) {
    let power = 1 << n.ilog2();
    (power, n - power)
}

#[cfg(test)]
mod tests;
