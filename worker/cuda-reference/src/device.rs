//! A device, whose memory persists across launches.

use crate::block;
use crate::counts::Counts;
use crate::finding::Finding;
use crate::machine::Kernel;
use crate::memory::{Declared, Memory};
use crate::ptx::{Constant, Entry, Module};
use bytemuck::Pod;
use std::ops::Range;
use switchyard_cuda::kernels::{self, Argument, Call};

/// A range of device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    address: u64,
    bytes: usize,
}

impl Span {
    /// The first address.
    pub fn address(self) -> u64 {
        self.address
    }

    /// A part of the range; `None` if it exceeds it.
    pub fn part(self, range: Range<usize>) -> Option<Span> {
        let fits = range.start <= range.end && range.end <= self.bytes;
        fits.then_some(Span { address: self.address + range.start as u64, bytes: range.end - range.start })
    }
}

impl kernels::Memory for Span {
    fn bytes(&self) -> usize {
        self.bytes
    }
}

fn bytes(argument: Argument<Span>) -> Vec<u8> {
    match argument {
        Argument::Reads(span) | Argument::Writes(span) | Argument::Updates(span) => span.address.to_le_bytes().into(),
        Argument::Absent => 0u64.to_le_bytes().into(),
        Argument::Int(value) => value.to_le_bytes().into(),
        Argument::Float(value) => value.to_le_bytes().into(),
    }
}

/// A launch of a kernel. The kernel may use memory only as its arguments declare.
#[derive(Debug, Clone, Copy)]
pub struct Launch<'a, A = Argument<Span>> {
    pub kernel: &'a str,
    pub blocks: u32,
    pub threads: u32,
    /// Size of dynamic shared memory.
    pub shared_bytes: u32,
    pub arguments: &'a [A],
    /// Seed for the order of blocks and warps.
    pub seed: u64,
}

impl<'a> Launch<'a> {
    pub fn new(call: &'a Call<Span>, seed: u64) -> Launch<'a> {
        Launch {
            kernel: call.kernel(),
            blocks: call.blocks(),
            threads: call.threads(),
            shared_bytes: call.shared_bytes(),
            arguments: call.arguments(),
            seed,
        }
    }
}

/// A launch as a driver receives it: arguments are bytes, without declared memory uses.
pub type RawLaunch<'a> = Launch<'a, Vec<u8>>;

/// Addresses used by a launch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Touched {
    pub range: Range<u64>,
    pub writes: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LaunchError {
    /// The launch does not fit the kernel.
    #[error("{kernel}: {text}")]
    Refused { kernel: String, text: String },
    #[error(transparent)]
    Found(#[from] Box<Finding>),
}

/// The limit of compute capability 9.0 per block.
const MOST_SHARED_BYTES: usize = 232_448;
const MOST_THREADS: u32 = 1024;

impl Module {
    /// Checks that a launch fits its kernel.
    ///
    /// # Errors
    /// [`LaunchError::Refused`].
    pub fn check(&self, launch: &RawLaunch<'_>) -> Result<(), LaunchError> {
        check(self, launch).map(|_| ())
    }
}

/// A device without a notion of time.
#[derive(Default)]
pub struct Device {
    memory: Memory,
    blocks: u32,
    epochs: u32,
}

impl Device {
    /// Allocates memory whose content is uninitialised.
    pub fn allocate(&mut self, name: &str, bytes: usize) -> Span {
        Span { address: self.memory.allocate(name, bytes), bytes }
    }

    /// Allocates memory and copies `values` into it.
    pub fn upload<T: Pod>(&mut self, name: &str, values: &[T]) -> Span {
        let span = self.allocate(name, size_of_val(values));
        self.write(span, values);
        span
    }

    /// Copies `values` to the start of a span. Values past the end of its allocation are dropped.
    pub fn write<T: Pod>(&mut self, span: Span, values: &[T]) {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        if let Some(index) = self.memory.holding(span.address, bytes.len(), 0) {
            self.memory.allocations[index].write(span.address, bytes);
        }
    }

    /// Copies memory to the host; uninitialised bytes are 0xff.
    pub fn download<T: Pod>(&self, span: Span) -> Vec<T> {
        let bytes = match self.memory.holding(span.address, span.bytes, 0) {
            Some(index) => self.memory.allocations[index].bytes(span.address, span.bytes),
            None => &[],
        };
        bytemuck::pod_collect_to_vec(bytes)
    }

    /// Frees memory. Its address is never reused.
    pub fn free(&mut self, address: u64) {
        self.memory.free(address);
    }

    /// The span at an address; `None` unless one allocation contains all of it.
    pub fn at(&self, address: u64, bytes: usize) -> Option<Span> {
        self.memory.holding(address, bytes, 0).map(|_| Span { address, bytes })
    }

    /// The allocation that contains a span, with its name.
    pub fn allocation(&self, span: Span) -> Option<(&str, Span)> {
        let index = self.memory.holding(span.address, span.bytes, 0)?;
        let allocation = &self.memory.allocations[index];
        let Range { start, end } = allocation.addresses();
        Some((&allocation.name, Span { address: start, bytes: (end - start) as usize }))
    }

    /// Whether all of the span is initialised.
    pub fn is_written(&self, span: Span) -> bool {
        let of = |index: usize| self.memory.allocations[index].written(span.address, span.bytes);
        self.memory.holding(span.address, span.bytes, 0).is_some_and(|index| of(index).iter().all(|written| *written))
    }

    /// Copies as much as both spans hold. Uninitialised bytes stay uninitialised.
    pub fn copy(&mut self, from: Span, to: Span) {
        let bytes = from.bytes.min(to.bytes);
        let Some(source) = self.memory.holding(from.address, bytes, 0) else { return };
        let Some(target) = self.memory.holding(to.address, bytes, source) else { return };
        let source = &self.memory.allocations[source];
        let (values, written) =
            (source.bytes(from.address, bytes).to_vec(), source.written(from.address, bytes).to_vec());
        self.memory.allocations[target].write_some(to.address, &values, &written);
    }

    /// Runs a kernel to completion or to the first finding.
    ///
    /// # Errors
    /// The launch does not fit the kernel, or the kernel has a fault.
    pub fn launch(&mut self, module: &Module, launch: &Launch<'_>) -> Result<Counts, LaunchError> {
        let Launch { kernel, blocks, threads, shared_bytes, seed, .. } = *launch;
        let arguments: Vec<Vec<u8>> = launch.arguments.iter().map(|argument| bytes(*argument)).collect();
        let bare = RawLaunch { kernel, blocks, threads, shared_bytes, arguments: &arguments, seed };
        let entry = check(module, &bare)?;
        self.declare(launch.arguments);
        self.run(entry, &bare, true)
    }

    /// Like [`Device::launch`], but without declarations: the kernel may use all memory. Returns
    /// what it used.
    ///
    /// # Errors
    /// The launch does not fit the kernel, or the kernel has a fault.
    pub fn launch_raw(&mut self, module: &Module, launch: &RawLaunch<'_>) -> Result<Vec<Touched>, LaunchError> {
        let entry = check(module, launch)?;
        for allocation in &mut self.memory.allocations {
            allocation.declared = None;
            allocation.watch();
        }
        self.run(entry, launch, false)?;
        let touched = |[read, written]: [Vec<Range<u64>>; 2]| {
            let of = |ranges: Vec<Range<u64>>, writes| ranges.into_iter().map(move |range| Touched { range, writes });
            of(read, false).chain(of(written, true))
        };
        Ok(self.memory.allocations.iter_mut().map(|allocation| allocation.touched()).flat_map(touched).collect())
    }

    fn run(&mut self, entry: &Entry, launch: &RawLaunch<'_>, is_counted: bool) -> Result<Counts, LaunchError> {
        let parameter = |index: usize, offset: usize, bytes: usize| {
            let mut value = [0; 8];
            value[..bytes].copy_from_slice(&launch.arguments[index][offset..offset + bytes]);
            u64::from_le_bytes(value)
        };
        let constants = entry.constants.iter().map(|(register, constant)| {
            let constant = match *constant {
                Constant::Parameter { index, offset, bytes } => Constant::Bits(parameter(index, offset, bytes)),
                other => other,
            };
            (*register, constant)
        });
        let kernel = Kernel {
            entry,
            constants: constants.collect(),
            blocks: launch.blocks,
            threads: launch.threads,
            shared_bytes: entry.shared_bytes + launch.shared_bytes as usize,
            seed: launch.seed,
            is_counted,
        };
        self.memory.allocations.iter_mut().for_each(|allocation| allocation.traffic = Default::default());
        Ok(block::run(&kernel, &mut self.memory, &mut self.blocks, &mut self.epochs)?)
    }

    /// Records how the kernel may use each range.
    fn declare(&mut self, arguments: &[Argument<Span>]) {
        for allocation in &mut self.memory.allocations {
            allocation.declared = Some(Vec::new());
        }
        for argument in arguments {
            let (span, reads, writes) = match *argument {
                Argument::Reads(span) => (span, true, false),
                Argument::Writes(span) => (span, false, true),
                Argument::Updates(span) => (span, true, true),
                Argument::Absent | Argument::Int(_) | Argument::Float(_) => continue,
            };
            let range = span.address..span.address + span.bytes as u64;
            if let Some(index) = self.memory.holding(span.address, span.bytes, 0)
                && let Some(declared) = &mut self.memory.allocations[index].declared
            {
                declared.push(Declared { range, reads, writes });
            }
        }
    }
}

/// The kernel of a launch, if the launch fits it. Checks what the driver checks, and also the
/// argument sizes, which the driver cannot.
///
/// # Errors
/// [`LaunchError::Refused`].
pub(crate) fn check<'a>(module: &'a Module, launch: &RawLaunch<'_>) -> Result<&'a Entry, LaunchError> {
    let refused = |text: String| LaunchError::Refused { kernel: launch.kernel.to_owned(), text };
    let entry = module.entry(launch.kernel).ok_or_else(|| {
        refused(format!("not in the module, which has {}", module.kernels().collect::<Vec<_>>().join(", ")))
    })?;
    fits(entry, launch).map_err(refused)?;
    Ok(entry)
}

fn fits(entry: &Entry, launch: &RawLaunch<'_>) -> Result<(), String> {
    let given: Vec<usize> = launch.arguments.iter().map(Vec::len).collect();
    if given != entry.parameters {
        return Err(format!("arguments of {given:?} bytes, expected {:?}", entry.parameters));
    }
    let most = entry.most_threads.unwrap_or(MOST_THREADS);
    if launch.threads == 0 || launch.threads > most {
        return Err(format!("blocks of {} threads, expected 1 to {most}", launch.threads));
    }
    if launch.blocks == 0 {
        return Err("no blocks".to_owned());
    }
    if launch.shared_bytes > 0 && !entry.has_dynamic_shared {
        return Err(format!("{} bytes of shared memory for a kernel that declares none", launch.shared_bytes));
    }
    let shared = entry.shared_bytes + launch.shared_bytes as usize;
    if shared > MOST_SHARED_BYTES {
        return Err(format!("{shared} bytes of shared memory, expected at most {MOST_SHARED_BYTES}"));
    }
    Ok(())
}
