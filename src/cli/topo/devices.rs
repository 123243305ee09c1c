//! GPUs and NICs: bandwidth and path of each pair, and the consequences for traffic that leaves the
//! node.

use super::health::{self, Health};
use super::{cpus_of_node, nic_name};
use crate::text::{Screen, Table, plain};
use std::collections::{BTreeMap, BTreeSet};
use switchyard_core::path::PathClass;
use switchyard_core::placement::gpus::{Level, MAX_GPUS, Shape};
use switchyard_core::units::three_digits;
use switchyard_crds::gpu_topology::{DmaBuf, GPUTopologyStatus, ModuleState};
use switchyard_topology::cells;
use switchyard_topology::fold::{grouped, numbers, singletons, twins};
use switchyard_topology::nccl::{NcclPath, NcclPaths};
use switchyard_topology::report::{self, NamedDevices, ReportError};

/// One of several equal nodes, so that outgoing bandwidth counts.
pub(super) const GANG: Level = Level { share: 1000, nvlink: false };
/// With more GPU rows than this, equal ones are folded.
const MAX_ROWS: usize = 8;

/// A report from the perspective of placement and NCCL.
pub(super) struct NodeModel<'a> {
    pub(super) status: &'a GPUTopologyStatus,
    pub(super) named: NamedDevices,
    /// Bandwidths of GPU sets; `None` if there are more GPUs than placement supports.
    pub(super) shape: Option<Shape>,
}

/// The connection of a pair of devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Pair {
    class: NcclPath,
    /// Megabytes (10^6) per second, one direction.
    rate: Option<u32>,
}

/// Columns for the memory and processors near a GPU, which another table also has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Memory {
    Neither,
    Node,
    NodeAndCpus,
}

impl Pair {
    /// `48 PIX`.
    fn cell(self) -> String {
        match self.rate {
            _ if self.class == NcclPath::Loc => "X".to_owned(),
            Some(rate) => format!("{} {}", gigabytes(rate), self.class.word()),
            None => self.class.word().to_owned(),
        }
    }

    /// `NVL 371`.
    fn phrase(self) -> String {
        let rate = self.rate.map_or(String::new(), |rate| format!(" {}", gigabytes(rate)));
        format!("{}{rate}", self.class.word())
    }
}

/// Gigabytes per second with three digits.
pub(super) fn gigabytes(megabytes: u32) -> String {
    three_digits(f64::from(megabytes) / 1000.0)
}

impl<'a> NodeModel<'a> {
    /// # Errors
    /// The first contradiction in the report.
    pub(super) fn of(status: &'a GPUTopologyStatus) -> Result<NodeModel<'a>, ReportError> {
        let named = report::devices(status)?;
        let shape = (named.devices.gpus.len() <= MAX_GPUS).then(|| Shape::new(&named.devices));
        Ok(NodeModel { status, named, shape })
    }

    pub(super) fn ways(&self) -> NcclPaths<'_> {
        NcclPaths::from_report(self.status, &self.named.devices)
    }

    fn gpu_pair(&self, a: usize, b: usize) -> Pair {
        let ways = self.ways();
        Pair { class: ways.gpus(a, b), rate: ways.gpu_rate(a, b) }
    }

    fn nic_pair(&self, gpu: usize, nic: usize) -> Pair {
        Pair { class: self.ways().nic(gpu, nic), rate: Some(self.named.devices.nic_rate(gpu, nic)) }
    }

    fn gpu_count(&self) -> usize {
        self.named.devices.gpus.len()
    }

    fn nic_count(&self) -> usize {
        self.named.nics.len()
    }

    /// `GPU0-3,6`.
    fn gpu_label(&self, gpus: &[usize]) -> String {
        format!("GPU{}", numbers(gpus.iter().map(|gpu| self.status.gpus[*gpu].index)))
    }

    pub(super) fn nic_name(&self, nic: usize) -> String {
        plain(nic_name(&self.status.nics[self.named.nics[nic]]))
    }

    /// `NIC0-3` by the numbers in the matrix; names for NICs without a number.
    fn nic_label(&self, nics: &[usize]) -> String {
        let number = |nic: &usize| {
            let wanted = &self.status.nics[self.named.nics[*nic]];
            cells::nics(self.status).position(|other| std::ptr::eq(other, wanted))
        };
        let numbered: Option<Vec<u32>> =
            nics.iter().map(|nic| number(nic).and_then(|number| u32::try_from(number).ok())).collect();
        match numbered {
            Some(list) => format!("NIC{}", numbers(list)),
            None => nics.iter().map(|nic| self.nic_name(*nic)).collect::<Vec<_>>().join(","),
        }
    }

    /// Total bandwidth of all GPUs to other nodes, megabytes (10^6) per second.
    pub(super) fn outward(&self) -> Option<u32> {
        let shape = self.shape.as_ref().filter(|_| self.nic_count() > 0 && self.gpu_count() > 0)?;
        Some(shape.outward(shape.all(), Some(GANG)))
    }
}

/// The tables of pairs and their meaning. `full` disables folding.
pub(super) fn tables(screen: &mut Screen, known: &NodeModel<'_>, full: bool) {
    gpu_pairs(screen, known, full);
    gpu_rows(screen, known, full);
    legend(screen, known);
    leaving(screen, known);
}

fn gpu_pairs(screen: &mut Screen, known: &NodeModel<'_>, full: bool) {
    let count = known.gpu_count();
    if count < 2 {
        return;
    }
    let value = |a: usize, b: usize| known.gpu_pair(a, b);
    let groups = if full { singletons(count) } else { twins(count, value) };
    let pair = |a: &[usize], b: &[usize]| {
        let other = b.iter().find(|member| **member != a[0]);
        other.map(|other| value(a[0], *other))
    };
    let hint = format!("          --full for {count}x{count}");
    match groups.as_slice() {
        [all] => {
            let (which, hint) = if count == 2 { ("", "") } else { (" for all pairs", hint.as_str()) };
            return screen.labelled("GPU-GPU", &format!("{}{which}", value(all[0], all[1]).phrase()), hint);
        }
        [one, other] => {
            let (most, odd) = if one.len() >= other.len() { (one, other) } else { (other, one) };
            if let (Some(usual), Some(across)) = (pair(most, most), pair(most, odd))
                && pair(odd, odd).is_none_or(|within| within == across)
            {
                let what = match across.rate {
                    Some(rate) if across.class == usual.class => gigabytes(rate),
                    _ => across.phrase(),
                };
                let why = links_up(known, odd[0], most[0]);
                let odd = known.gpu_label(odd);
                let text = format!("{} for all pairs, except {odd}: {what}{why}", usual.phrase());
                return screen.labelled("GPU-GPU", &text, &hint);
            }
        }
        _ => {}
    }
    screen.line("GPU-GPU  GB/s one way, NCCL class");
    let mut rows = vec![vec![String::new()]];
    rows[0].extend(groups.iter().map(|group| known.gpu_label(group)));
    for a in &groups {
        let mut row = vec![known.gpu_label(a)];
        row.extend(groups.iter().map(|b| pair(a, b).map_or("X".to_owned(), Pair::cell)));
        rows.push(row);
    }
    let narrow = Table { rows: rows.clone(), gap: 1 };
    screen.whole(vec![Table { rows, gap: 2 }, narrow]);
}

/// ` (17 of 18 links up)`, if that makes a GPU slower than another.
fn links_up(known: &NodeModel<'_>, gpu: usize, usual: usize) -> String {
    let gpus = &known.named.devices.gpus;
    let (has, others) = (gpus[gpu].switch_links, gpus[usual].switch_links);
    let all = known.status.gpus[gpu].nvlinks.as_ref().map_or(usize::from(others), |links| {
        usize::try_from(links.up).unwrap_or(usize::MAX).saturating_add(links.down.len())
    });
    if has > 0 && has < others { format!(" ({has} of {all} links up)") } else { String::new() }
}

/// A row per GPU: its NICs, memory and health.
fn gpu_rows(screen: &mut Screen, known: &NodeModel<'_>, full: bool) {
    let status = known.status;
    let (gpus, nics) = (known.gpu_count(), known.nic_count());
    let states: Vec<Health> = status.gpus.iter().map(health::of_gpu).collect();
    let numa = |gpu: usize| report::numa_of(status, status.gpus[gpu].numa_node);
    let same = |a: usize, b: usize| {
        numa(a) == numa(b)
            && states[a] == states[b]
            && (0..nics).all(|nic| known.nic_pair(a, nic) == known.nic_pair(b, nic))
    };
    let rows = if full || gpus <= MAX_ROWS { singletons(gpus) } else { grouped(gpus, same) };
    let folded = grouped(nics, |a, b| (0..gpus).all(|gpu| known.nic_pair(gpu, a) == known.nic_pair(gpu, b)));
    let table = |columns: &[Vec<usize>], names: bool, memory: Memory, sentences: bool, gap: usize| {
        let mut heading = vec![String::new()];
        heading.extend(columns.iter().map(|column| match column.as_slice() {
            [nic] if names => known.nic_name(*nic),
            nics => known.nic_label(nics),
        }));
        heading.extend((memory >= Memory::Node).then(|| "NUMA".to_owned()));
        heading.extend((memory == Memory::NodeAndCpus).then(|| "CPUS".to_owned()));
        heading.push("HEALTH".to_owned());
        let mut table = vec![heading];
        for row in &rows {
            let gpu = row[0];
            let mut cells = vec![known.gpu_label(row)];
            cells.extend(columns.iter().map(|column| known.nic_pair(gpu, column[0]).cell()));
            let node = || numa(gpu).map_or("-".to_owned(), |node| node.to_string());
            cells.extend((memory >= Memory::Node).then(node));
            cells.extend((memory == Memory::NodeAndCpus).then(|| cpus_of_node(status, numa(gpu))));
            cells.push(if sentences { states[gpu].sentence() } else { states[gpu].word().to_owned() });
            table.push(cells);
        }
        Table { rows: table, gap }
    };
    if nics > 0 {
        screen.line("GPU-NIC  GB/s one way, NCCL class");
    }
    let single = singletons(nics);
    use Memory::{Neither, Node, NodeAndCpus};
    let wide = [true, false].map(|names| table(&single, names, NodeAndCpus, true, 2));
    if let Some(fits) = wide.into_iter().find(|table| table.width() <= screen.width) {
        return screen.table(vec![fits]);
    }
    let mut variants = vec![
        table(&single, true, NodeAndCpus, false, 2),
        table(&single, false, NodeAndCpus, false, 2),
        table(&single, true, Node, false, 2),
        table(&single, false, Node, false, 2),
    ];
    if full {
        screen.whole(variants);
    } else {
        variants.extend([
            table(&folded, true, NodeAndCpus, false, 2),
            table(&folded, false, NodeAndCpus, false, 2),
            table(&folded, false, Node, false, 2),
            table(&folded, false, Node, false, 1),
            table(&folded, false, Neither, false, 1),
        ]);
        screen.table(variants);
    }
    for row in &rows {
        if let state @ Health::Faulty(_) = &states[row[0]] {
            screen.paragraph(&known.gpu_label(row), &state.sentence());
        }
    }
}

/// Explains the terms, with their `nvidia-smi topo` names if those differ.
fn legend(screen: &mut Screen, known: &NodeModel<'_>) {
    let (gpus, nics) = (known.gpu_count(), known.nic_count());
    let mut used: BTreeMap<NcclPath, BTreeSet<PathClass>> = BTreeMap::new();
    for a in 0..gpus {
        for b in a + 1..gpus {
            used.entry(known.gpu_pair(a, b).class).or_default().insert(known.named.devices.gpu_path(a, b));
        }
        for nic in 0..nics {
            used.entry(known.nic_pair(a, nic).class).or_default().insert(known.named.devices.nic_path(a, nic));
        }
    }
    let phrase = |(class, smi): (NcclPath, BTreeSet<PathClass>)| {
        let words: Vec<&str> = smi.iter().map(|class| class.word()).collect();
        let differs = class != NcclPath::Nvl && words != [class.word()];
        let other = if differs { format!(" (nvidia-smi: {})", words.join(", ")) } else { String::new() };
        format!("{} {}{other}", class.word(), class.meaning())
    };
    let phrases: Vec<String> = used.into_iter().map(phrase).collect();
    screen.phrases(&phrases);
}

/// Traffic that leaves the node, and its path.
fn leaving(screen: &mut Screen, known: &NodeModel<'_>) {
    let (gpus, nics) = (known.gpu_count(), known.nic_count());
    if gpus == 0 || nics == 0 {
        return;
    }
    let ways = known.ways();
    let pairs = || (0..gpus).flat_map(|gpu| (0..nics).map(move |nic| (gpu, nic)));
    let classes: BTreeSet<NcclPath> = pairs().map(|(gpu, nic)| ways.nic(gpu, nic)).collect();
    let direct: Vec<&str> = classes.iter().filter(|class| class.has_direct_rdma()).map(|class| class.word()).collect();
    let host = known.status.host.as_ref();
    let is_off =
        host.is_some_and(|host| host.peermem == Some(ModuleState::NotLoaded) && host.dma_buf == Some(DmaBuf::Unlikely));
    let rdma = if is_off {
        "no GPUDirect RDMA: neither nvidia-peermem nor DMA-BUF".to_owned()
    } else if direct.is_empty() {
        let is_known = known.named.nics.iter().all(|nic| {
            let nic = &known.status.nics[*nic];
            report::numa_of(known.status, nic.numa_node).is_some()
        });
        let why = if is_known { "every NIC is too far from every GPU" } else { "NUMA nodes of NICs are not known" };
        format!("no GPUDirect RDMA: {why}")
    } else if direct.len() == classes.len() {
        "GPUDirect RDMA on every pair".to_owned()
    } else {
        format!("GPUDirect RDMA on {} only", direct.join(", "))
    };
    let shared = sharing(&ways, gpus, nics);
    let outward = known.outward().map_or(String::new(), |outward| {
        let each = outward / u32::try_from(gpus).unwrap_or(u32::MAX);
        format!(": {} GB/s leave the node, {} per GPU", gigabytes(outward), gigabytes(each))
    });
    screen.sentence(&format!("{rdma}; {shared}{outward}"));
    if pairs().any(|(gpu, nic)| ways.relay(gpu, nic).is_some()) {
        screen.sentence("PXN: to a far NIC NCCL sends over the NVLink of the GPU next to it");
    }
    if let Some(acs) = host.and_then(|host| host.acs.as_ref()).filter(|acs| !acs.redirecting.is_empty()) {
        let count = acs.redirecting.len();
        screen.sentence(&format!("ACS is on at {count} PCIe bridges: PIX and PXB go through the CPU there"));
    }
}

/// How many GPUs share the same NICs.
fn sharing(ways: &NcclPaths<'_>, gpus: usize, nics: usize) -> String {
    let own = |gpu: usize| (0..nics).filter(|nic| ways.is_local(gpu, *nic)).collect::<Vec<_>>();
    let groups = grouped(gpus, |a, b| own(a) == own(b));
    let sizes: BTreeSet<(usize, usize)> = groups.iter().map(|group| (group.len(), own(group[0]).len())).collect();
    // The most GPUs on the fewest NICs.
    let Some((most, of)) = sizes.iter().copied().max_by_key(|(most, of)| (most * 1000 / of.max(&1), *most)) else {
        return String::new();
    };
    let up_to = if sizes.len() > 1 { "up to " } else { "" };
    match of {
        _ if most <= of => "each GPU has a NIC of its own".to_owned(),
        1 => format!("{up_to}{most} GPUs share a NIC"),
        _ => format!("{up_to}{most} GPUs share {of} NICs"),
    }
}
