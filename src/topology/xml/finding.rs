//! Findings about a file, and the rules behind them.

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// NCCL stops, or ignores the content.
    Error,
    /// NCCL accepts content that can be wrong.
    Warning,
}

impl Severity {
    /// Name in the output.
    pub fn word(self) -> &'static str {
        match self {
            Severity::Error => "error",
            Severity::Warning => "warning",
        }
    }
}

/// A check.
#[derive(Debug, PartialEq, Eq)]
pub struct Rule {
    /// Stable name, for programs.
    pub name: &'static str,
    pub severity: Severity,
    /// What it finds, for the documentation.
    pub finds: &'static str,
    /// Consequence of a violation.
    pub why: &'static str,
}

/// A finding in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    pub rule: &'static Rule,
    /// Lines of the file, ascending, from 1; empty for the file as a whole.
    pub lines: Vec<u32>,
    pub got: String,
    /// How to fix it.
    pub fix: String,
}

/// Findings in file order. Equal findings on several lines are merged.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Findings(Vec<Finding>);

impl Findings {
    /// Adds a finding, or adds its line to an equal one.
    pub(super) fn add(
        &mut self,
        rule: &'static Rule,
        line: Option<u32>,
        got: impl Into<String>,
        fix: impl Into<String>,
    ) {
        let (got, fix) = (got.into(), fix.into());
        match self.0.iter_mut().find(|known| known.rule == rule && known.got == got && known.fix == fix) {
            Some(known) => known.lines.extend(line.filter(|line| !known.lines.contains(line))),
            None => self.0.push(Finding { rule, lines: line.into_iter().collect(), got, fix }),
        }
    }

    /// All findings by first line. Findings about the file as a whole come first.
    pub fn into_sorted(mut self) -> Vec<Finding> {
        self.0.iter_mut().for_each(|finding| finding.lines.sort_unstable());
        self.0.sort_by_key(|finding| finding.lines.first().copied());
        self.0
    }

    pub fn extend(&mut self, others: Findings) {
        self.0.extend(others.0);
    }
}

macro_rules! rules {
    ($($id:ident $name:literal $severity:ident $finds:literal $why:literal)*) => {
        impl Rule {
            $(#[doc = $finds] pub(super) const $id: Rule =
                Rule { name: $name, severity: Severity::$severity, finds: $finds, why: $why };)*
            /// Every rule.
            pub const ALL: &[Rule] = &[$(Rule::$id),*];
        }
    };
}

rules! {
    SYNTAX "syntax" Error
        "text that NCCL's reader stops at: an XML declaration, a tab, an attribute on a new line, a tag that is not closed"
        "NCCL's reader is not an XML parser: it stops here, and no communicator is created"
    SYSTEM "system" Error
        "not exactly one `<system>`, or one of another version than 1"
        "NCCL takes one `<system version=\"1\">`, and stops at any other version"
    LIMIT "limit" Error
        "more, or longer, than NCCL has room for: 253 characters, 16 attributes, 640 tags in a tag, 255 tags"
        "NCCL's tables are of fixed size: it stops at what is too long or too much, and does not read attributes beyond the 16th"
    UNKNOWN_TAG "unknown-tag" Error
        "a tag that NCCL does not know, or not in this place"
        "NCCL passes over it and everything in it, and says so in its log at INFO only"
    UNKNOWN_ATTRIBUTE "unknown-attribute" Warning
        "an attribute that no release of NCCL reads"
        "it does nothing"
    CPU "cpu" Error
        "a `<cpu>` without a NUMA node, or with half of its model"
        "NCCL stops at an attribute that it needs and does not find: `Attribute numaid of node cpu not found`"
    UNUSED_CPU "unused-cpu" Warning
        "several `<cpu>`, one of them without instruction set or vendor"
        "NCCL fills in both for CPUs whose devices the job uses; up to 2.21 it stops at the others: `Attribute arch of node cpu not found`"
    CPU_WORD "cpu-word" Error
        "an instruction set or vendor in other words than NCCL's"
        "NCCL takes the way between CPUs that it does not know for free (5000 GB/s)"
    AFFINITY "affinity" Warning
        "a mask of CPUs that is none"
        "NCCL binds its threads to other CPUs than meant, or to none"
    SEVERAL_NODES "several-nodes" Error
        "NUMA nodes of several machines, as in a dump of an NVLink domain, or one NUMA node twice"
        "a file to load describes one machine: NCCL writes its own host_hash over all of them, and joins the others itself"
    BUS_ID "bus-id" Error
        "a bus id that is missing or not in the kernel's form"
        "NCCL compares bus ids as text, lower case with four digits of domain: this one never matches a device"
    DUPLICATE "duplicate" Error
        "a bus id that is there twice"
        "NCCL finds the first only: what the second says is lost"
    CLASS "class" Error
        "a bridge without a class that no kernel can supply, or devices in one of another class"
        "NCCL stops at a `<pci>` without class, and does not look into one that is no bridge"
    LINK_SPEED "link-speed" Warning
        "a speed in words that NCCL does not know"
        "NCCL counts it as 8 GT/s (Gen3): 12 GB/s at 16 lanes"
    LINK_WIDTH "link-width" Warning
        "a number of lanes that no slot has"
        "NCCL counts 0, and what is no number, as 16 lanes, and every other number as it stands"
    DEVICE_TAG "device-tag" Warning
        "`<gpu>`, `<nic>` and what is in them"
        "NVIDIA's advice is to keep `<cpu>` and `<pci>` only (nccl-tests#86): what a file says of devices is of the day when it was written"
    GDR_PIN "gdr-pin" Warning
        "`gdr=`"
        "NCCL sets it only where the file does not: GPUDirect RDMA is forced on or off, whatever modules are loaded"
    KEEP_PIN "keep-pin" Warning
        "`keep=`"
        "NCCL keeps the branch though no device of the job is in it"
    PIN "pin" Warning
        "speed, port, guid and the like of a NIC, number and compute capability of a GPU, its NVLinks"
        "NCCL sets it only where the file does not, so that a link which is down still counts"
    OVERWRITTEN "overwritten" Warning
        "host_hash, rank, dev of a NIC"
        "NCCL writes its own over it: it does nothing, and shows that the file is a dump of one job"
    NO_DEVICE "no-device" Error
        "a device, or a bridge that is not invented, that the machine does not have (with --topology)"
        "NCCL takes no notice of it"
    MERGED_NIC "merged-nic" Error
        "an RDMA NIC at another address than the one that NCCL looks for (with --topology)"
        "NCCL takes all functions and devices of a bus for one NIC, at device 0 function 0 (NCCL_IB_MERGE_VFS)"
    MISSING_DEVICE "missing-device" Warning
        "a device of the machine that is not in the file (with --topology)"
        "NCCL puts it where the kernel shows it, which may be beside what the file says"
    OTHER_NUMA "other-numa" Warning
        "a device in another NUMA node than on the machine (with --topology)"
        "NCCL believes the file, and binds its threads accordingly"
    OTHER_CLASS "other-class" Warning
        "a device that is another one on the machine (with --topology)"
        "the file is of another machine, or bus ids have moved"
    NEEDLESS "needless" Warning
        "a file that only repeats what the machine reports (with --topology)"
        "NCCL reads the same from the kernel, and the kernel is never out of date"
}
