//! A GPU: memory, streams and failure state.

mod access;
pub(crate) mod collective;
pub(crate) mod convolution;
pub(crate) mod dataflow;
mod graph;
pub(crate) mod product;
pub(crate) mod queue;
#[allow(unsafe_code)]
mod run;
pub(crate) mod tensor;
pub(crate) mod work;

pub(crate) use graph::Graph;

use crate::clock::Clock;
use crate::code::{CallResult, Code, ECC_UNCORRECTABLE, INVALID_VALUE, LAUNCH_FAILED, OUT_OF_MEMORY};
use crate::fault::Faults;
use crate::finding;
use crate::host::HostRange;
use crate::ranks::await_change;
use crate::reported;
use crate::shadow::{Shadow, Stamp};
use graph::Graphs;
use queue::Queue;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use switchyard_cuda_reference::{Device, Module};
use work::{Source, Work};

/// Bytes reported by the driver of an H200.
pub(crate) const MEMORY_BYTES: u64 = 150_109_814_784;

/// Memory allocated by the program: on the device, or pinned on the host.
#[derive(Debug)]
pub(crate) struct Allocation {
    pub(crate) name: Arc<str>,
    pub(crate) bytes: u64,
    pub(crate) is_pinned: bool,
    /// Last operation of each stream that uses it.
    uses: BTreeMap<usize, (u64, Arc<str>)>,
}

/// Constant for the process's lifetime.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Settings {
    pub(crate) seed: u64,
    pub(crate) memory_bytes: u64,
    pub(crate) faults: Faults,
    /// Machine-wide number of the device.
    pub(crate) ordinal: usize,
}

pub(crate) struct Gpu {
    pub(crate) device: Device,
    pub(crate) queue: Queue,
    pub(crate) shadow: Shadow,
    /// Result of every call after a device failure.
    pub(crate) failed: Option<Code>,
    pub(crate) settings: Settings,
    /// By first address.
    allocations: BTreeMap<u64, Allocation>,
    /// Freed allocations by first address. Device addresses are never reused.
    freed: BTreeMap<u64, (Arc<str>, u64)>,
    is_retained: bool,
    /// Number of calls so far.
    allocated: u64,
    launched: u64,
    /// Products and convolutions executed.
    multiplied: u64,
    /// Whether a copy subject to the stale fault has run.
    has_copied: bool,
    /// All-reduce calls so far.
    pub(crate) reductions: u64,
    pub(crate) events: Vec<Option<Event>>,
    pub(crate) modules: Vec<Option<Arc<Module>>>,
    pub(crate) functions: Vec<Function>,
    pub(crate) graphs: Graphs,
    /// Module number and kernel name.
    pub(crate) launched_kernels: BTreeSet<(usize, String)>,
}

pub(crate) struct Event {
    /// Clock of its last record.
    pub(crate) clock: Option<Clock>,
    pub(crate) has_time: bool,
}

/// A kernel of a module.
pub(crate) struct Function {
    pub(crate) module: usize,
    pub(crate) name: String,
    pub(crate) most_dynamic_bytes: u32,
}

impl Gpu {
    pub(crate) fn new(settings: Settings) -> Gpu {
        Gpu {
            device: Device::default(),
            queue: Queue::new(settings.seed),
            shadow: Shadow::default(),
            failed: None,
            settings,
            allocations: BTreeMap::new(),
            freed: BTreeMap::new(),
            is_retained: false,
            allocated: 0,
            launched: 0,
            multiplied: 0,
            has_copied: false,
            reductions: 0,
            events: Vec::new(),
            modules: Vec::new(),
            functions: Vec::new(),
            graphs: Graphs::default(),
            launched_kernels: BTreeSet::new(),
        }
    }

    /// Retains the device for a new user. Each user after the first gets the next seed.
    pub(crate) fn retain(&mut self) {
        if std::mem::replace(&mut self.is_retained, true) && self.settings.seed != 0 {
            self.settings.seed += 1;
            self.queue.randomize(self.settings.seed);
        }
    }

    /// Ends the process with a finding.
    pub(crate) fn report(&self, text: &str) -> ! {
        finding::report(text, self.settings.seed)
    }

    pub(crate) fn stream_name(&self, stream: usize) -> String {
        if stream == crate::gpu::queue::DEFAULT { "the default stream".to_owned() } else { format!("stream {stream}") }
    }

    /// Runs operations until `clock` has passed, and merges it into the host's clock.
    pub(crate) fn synchronize(&mut self, clock: &Clock) -> CallResult<()> {
        self.graphs.refuse("a call that waits")?;
        while self.failed.is_none() && !self.queue.is_done(clock) {
            // Other ranks may depend on operations that no one waits for here.
            let next = self.queue.next(clock).or_else(|| self.queue.next(&self.queue.all()));
            match next {
                Some(operation) => self.run(operation),
                None => await_change(),
            }
        }
        self.queue.host.join(clock);
        self.failed.map_or(Ok(()), Err)
    }

    /// Runs one operation towards a clock. Returns whether the clock has passed.
    pub(crate) fn advance(&mut self, clock: &Clock) -> CallResult<bool> {
        self.graphs.refuse("a query")?;
        let is_done = self.queue.is_done(clock);
        if is_done {
            self.queue.host.join(clock);
        } else if let Some(operation) = self.queue.next(clock) {
            self.run(operation);
        }
        self.failed.map_or(Ok(is_done), Err)
    }

    pub(crate) fn next_launch(&mut self) -> u64 {
        self.launched += 1;
        self.launched
    }

    /// Whether an injected fault fails this launch; everything fails from then on. A hang does not
    /// return.
    pub(crate) fn fails(&mut self, launch: u64) -> bool {
        let Faults { launch: failing, lost, hang, .. } = self.settings.faults;
        reported::launched(self.settings.ordinal, launch, &self.settings.faults);
        if hang == Some(launch) {
            finding::explain("a wait", &format!("launch {launch} never ends"));
            loop {
                std::thread::park();
            }
        }
        if failing == Some(launch) {
            self.failed = Some(LAUNCH_FAILED);
        }
        if lost == Some(launch) {
            self.failed = Some(ECC_UNCORRECTABLE);
        }
        self.failed.is_some()
    }

    /// Whether an injected fault corrupts the next product or convolution.
    pub(crate) fn is_wrong(&mut self) -> bool {
        self.multiplied += 1;
        self.settings.faults.wrong.is_some_and(|first| self.multiplied >= first)
    }

    /// Whether an injected fault drops this copy to the device.
    pub(crate) fn is_stale(&mut self, bytes: usize) -> bool {
        self.settings.faults.stale == Some(bytes as u64) && std::mem::replace(&mut self.has_copied, true)
    }

    pub(crate) fn memory(&self) -> (u64, u64) {
        let used: u64 = self.allocations.values().filter(|one| !one.is_pinned).map(|one| one.bytes).sum();
        let others = self.settings.faults.process.map_or(0, |(_, mebibytes)| mebibytes << 20);
        (self.settings.memory_bytes.saturating_sub(used + others), self.settings.memory_bytes)
    }

    pub(crate) fn allocate(&mut self, bytes: u64) -> CallResult<u64> {
        if bytes == 0 {
            return Err(INVALID_VALUE);
        }
        self.graphs.refuse("cuMemAlloc")?;
        self.allocated += 1;
        if self.settings.faults.out_of_memory == Some(self.allocated) || bytes > self.memory().0 {
            return Err(OUT_OF_MEMORY);
        }
        let name = format!("buffer {}", self.allocated);
        let address = self.device.allocate(&name, bytes as usize);
        Ok(self.register(address.address(), name, bytes, false))
    }

    /// Registers an allocation; returns its address.
    pub(crate) fn register(&mut self, address: u64, name: String, bytes: u64, is_pinned: bool) -> u64 {
        // Unlike the device, the host reuses addresses.
        self.freed.remove(&address);
        self.allocations.insert(address, Allocation { name: name.into(), bytes, is_pinned, uses: BTreeMap::new() });
        address
    }

    /// Frees memory; returns its size. Waiting for all its users must come first.
    pub(crate) fn free(&mut self, address: u64, is_pinned: bool) -> u64 {
        let Some(one) = self.allocations.get(&address).filter(|one| one.is_pinned == is_pinned) else {
            self.report(&format!("a free of {}", self.describe(&(address..address + 1))));
        };
        let known = |stream: usize| self.queue.host.get(stream);
        if let Some((stream, (_, user))) = one.uses.iter().find(|(stream, (index, _))| known(**stream) < *index) {
            let stream = self.stream_name(*stream);
            self.report(&format!(
                "a free of `{}`, which {user} in {stream} uses; nobody has waited for that",
                one.name
            ));
        }
        let (name, bytes) = (Arc::clone(&one.name), one.bytes);
        self.allocations.remove(&address);
        self.shadow.forget(&(address..address + bytes));
        if !is_pinned {
            self.device.free(address);
        }
        self.freed.insert(address, (name, bytes));
        bytes
    }

    /// The allocation that contains a range, and its first address.
    pub(crate) fn find_allocation(&self, range: &Range<u64>) -> Option<(u64, &Allocation)> {
        let (start, one) = self.allocations.range(..=range.start).next_back()?;
        (range.end <= start + one.bytes).then_some((*start, one))
    }

    /// Describes a range.
    pub(crate) fn describe(&self, range: &Range<u64>) -> String {
        let bytes = range.end - range.start;
        if let Some((start, one)) = self.find_allocation(range) {
            return format!("{bytes} bytes at byte {} of `{}` ({} bytes)", range.start - start, one.name, one.bytes);
        }
        match self.freed.range(..=range.start).next_back() {
            Some((start, (name, size))) if range.start < start + size => {
                format!("{bytes} bytes at byte {} of `{name}`, which was freed", range.start - start)
            }
            _ => format!("{bytes} bytes at {:#x}, which are of no allocation", range.start),
        }
    }

    /// Enqueues work on a stream. Each range that it uses must be within an allocation.
    pub(crate) fn enqueue(&mut self, stream: usize, name: String, uses: &[Range<u64>], work: Work) {
        let Some(work) = self.graphs.take(stream, name.clone(), uses, work) else { return };
        let name: Arc<str> = name.into();
        let mut starts = Vec::new();
        for range in uses {
            match self.find_allocation(range) {
                Some((start, _)) => starts.push(start),
                None => self.report(&format!("{name} in {} uses {}", self.stream_name(stream), self.describe(range))),
            }
        }
        let index = self.queue.put(stream, Arc::clone(&name), work);
        for start in starts {
            if let Some(one) = self.allocations.get_mut(&start) {
                one.uses.insert(stream, (index, Arc::clone(&name)));
            }
        }
    }

    /// Whether a queued copy uses this host memory.
    pub(crate) fn host_is_used(&mut self, range: &Range<u64>) -> bool {
        let hosts = self.queue.pending().filter_map(|operation| operation.work.host());
        hosts.into_iter().any(|queued| queued.range.start < range.end && range.start < queued.range.end)
    }

    /// Enqueues a copy to the device. The bytes are staged or in pinned memory.
    pub(crate) fn upload(&mut self, stream: usize, from: Source, to: Range<u64>) {
        let name = format!("a copy of {} bytes to the device", to.end - to.start);
        let mut uses = vec![to.clone()];
        if let Source::Pinned(queued) = &from {
            uses.push(queued.range.clone());
        }
        self.enqueue(stream, name, &uses, Work::Upload { from, to: to.start });
    }

    /// Enqueues a copy from the device. For pageable memory the caller then waits.
    pub(crate) fn download(&mut self, stream: usize, from: Range<u64>, to: HostRange, is_pinned: bool) {
        let name = format!("a copy of {} bytes from the device", from.end - from.start);
        let mut uses = vec![from.clone()];
        if is_pinned {
            uses.push(to.range.clone());
        }
        self.enqueue(stream, name, &uses, Work::Download { from: from.start, to });
    }

    pub(crate) fn write(&mut self, address: u64, bytes: &[u8]) {
        if let Some(span) = self.device.at(address, bytes.len()) {
            self.device.write(span, bytes);
        }
    }

    /// Reads memory for an operation, which must have been written.
    pub(crate) fn read_written(&self, range: &Range<u64>, stamp: &Stamp) -> Vec<u8> {
        let bytes = (range.end - range.start) as usize;
        if !self.device.at(range.start, bytes).is_some_and(|span| self.device.is_written(span)) {
            self.report(&format!("{} reads {} that nobody has written", stamp.name, self.describe(range)));
        }
        self.read(range.start, bytes)
    }

    pub(crate) fn read(&self, address: u64, bytes: usize) -> Vec<u8> {
        self.device.at(address, bytes).map(|span| self.device.download(span)).unwrap_or_default()
    }
}
