//! Parses, checks, generates and compares NCCL topology files (`NCCL_TOPO_FILE`,
//! `NCCL_TOPO_DUMP_FILE`).
//!
//! ```text
//!  text ── parse ── Document ──┬── check ──────┐
//!                              ├── against ────┴── Findings
//!                              └── NcclGraph ── Devices ── diff
//!  GPUTopology ── generate ── text
//! ```
//!
//! NCCL has its own reader (NVIDIA/nccl `src/graph/xml.cc`), which is not an XML parser. It stops
//! at an XML declaration, at a tab and at an attribute on a new line, and accepts text that XML
//! forbids. [`parse`] replicates that reader, but reports what would stop NCCL and continues. An
//! XML library would accept files that NCCL rejects. Everything here follows NCCL 2.30.7.
//!
//! A file is useful only in a virtual machine or with passed-through devices, where the kernel
//! shows a flat tree. On bare metal NCCL reads the tree from the kernel, and a file can only be
//! wrong.

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

/// The tags of a file, in text order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Document {
    /// All tags; those without a parent are outermost.
    pub elements: Vec<Element>,
}

/// A tag. Positions refer to [`Document::elements`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Element {
    pub tag: String,
    /// Names and values in text order, verbatim, because NCCL has no entities.
    pub attributes: Vec<(String, String)>,
    /// The enclosing tag.
    pub parent: Option<usize>,
    /// The tags directly inside.
    pub children: Vec<usize>,
    /// Line on which the tag begins, from 1.
    pub line: u32,
}

impl Element {
    /// Value of an attribute. Like NCCL, uses the first of several with the same name.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.attributes.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }
}

impl Document {
    /// Tags without a parent.
    pub fn outermost(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.elements.len()).filter(|element| self.elements[*element].parent.is_none())
    }

    /// Tags of this name directly inside a tag.
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
