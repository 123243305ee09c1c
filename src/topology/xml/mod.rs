//! NCCL's topology files (`NCCL_TOPO_FILE`, `NCCL_TOPO_DUMP_FILE`): read, checked, generated and compared.
//!
//! ```text
//!  text ── parse ── Document ──┬── check ──────┐
//!                              ├── against ────┴── Findings
//!                              └── NcclGraph ── Devices ── diff
//!  GPUTopology ── generate ── text
//! ```
//!
//! NCCL has a reader of its own (NVIDIA/nccl `src/graph/xml.cc`), which is not an XML parser: it stops at an XML declaration, at a tab and at an
//! attribute on a new line, and accepts what XML forbids. So [`parse`] is that reader, but it continues where NCCL stops and reports it; an XML
//! library would accept what NCCL refuses. Everything here follows NCCL 2.30.7.
//!
//! A file is right only in a virtual machine, or with devices passed through, where the kernel shows a flat tree: on bare metal NCCL reads
//! the tree from the kernel itself, and a file can only be wrong.

mod against;
mod check;
mod diff;
mod finding;
mod generate;
mod graph;
mod parse;
mod tables;

pub use against::check_against;
pub use check::check;
pub use diff::{Change, diff};
pub use finding::{Finding, Findings, Rule, Severity};
pub use generate::{Content, GenerateError, generate};
pub use graph::{Cpu, Device, NcclGraph, TooManyGpus};
pub use parse::{Parsed, parse};

/// The tags of a file, in the order of the text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Document {
    /// The tags; those without a parent are the outermost.
    pub elements: Vec<Element>,
}

/// A tag. Positions are those in [`Document::elements`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Element {
    pub tag: String,
    /// Names and values in the order of the text, verbatim: NCCL knows no entities.
    pub attributes: Vec<(String, String)>,
    /// The tag around it.
    pub parent: Option<usize>,
    /// The tags in it.
    pub children: Vec<usize>,
    /// Line of the text on which it begins, from 1.
    pub line: u32,
}

impl Element {
    /// The value of an attribute; the first of several with one name, as in NCCL.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.attributes.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }
}

impl Document {
    /// The tags without a parent.
    pub fn outermost(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.elements.len()).filter(|element| self.elements[*element].parent.is_none())
    }

    /// The tags of this name in a tag.
    pub fn children<'a>(&'a self, of: usize, tag: &'a str) -> impl Iterator<Item = usize> + 'a {
        self.elements[of].children.iter().copied().filter(move |child| self.elements[*child].tag == tag)
    }

    /// All tags of this name.
    pub fn all<'a>(&'a self, tag: &'a str) -> impl Iterator<Item = &'a Element> + 'a {
        self.elements.iter().filter(move |element| element.tag == tag)
    }
}

#[cfg(test)]
mod tests;
