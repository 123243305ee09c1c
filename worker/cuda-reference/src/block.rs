//! Runs the blocks of a launch one after another, and the warps of each block from barrier to
//! barrier.

use crate::counts::{Counts, Shared, Traffic};
use crate::finding::{Fault, Finding};
use crate::machine::{Kernel, Machine};
use crate::memory::{Allocation, Memory};
use crate::ptx::Place;
use crate::race::Now;
use crate::random::Random;
use crate::warp::{Raised, Stop, Warp};

/// Runs all blocks in the seed's order. `blocks` and `epochs` count across all launches of the
/// device.
pub(crate) fn run(
    kernel: &Kernel<'_>,
    memory: &mut Memory,
    blocks: &mut u32,
    epochs: &mut u32,
) -> Result<Counts, Box<Finding>> {
    let count = kernel.blocks;
    let launch = *blocks + 1;
    *blocks += count;
    let now = Now { launch, block: launch, epoch: *epochs, thread: 0, step: 0 };
    let shared = Allocation::shared(kernel.shared_bytes);
    let mut machine = Machine { memory, shared, now, is_counted: kernel.is_counted, counts: Counts::default() };
    let mut random = Random::new(kernel.seed);
    let mut order: Vec<u32> = (0..count).collect();
    random.shuffle(&mut order);
    let mut warps = Vec::new();
    let mut result = Ok(());
    for block in order {
        machine.now.block = launch + block;
        machine.shared.clear();
        result = run_block(kernel, block, &mut warps, &mut machine, &mut random);
        if result.is_err() {
            break;
        }
    }
    *epochs = machine.now.epoch;
    let Machine { memory, mut counts, .. } = machine;
    result?;
    for allocation in &memory.allocations {
        if allocation.traffic != <[Traffic; 2]>::default() {
            counts.memory.insert(allocation.name.clone(), allocation.traffic);
        }
    }
    Ok(counts)
}

/// `warps` is reused from block to block to keep its memory.
fn run_block(
    kernel: &Kernel<'_>,
    block: u32,
    warps: &mut Vec<Warp>,
    machine: &mut Machine<'_>,
    random: &mut Random,
) -> Result<(), Box<Finding>> {
    let threads = kernel.threads;
    warps.resize_with(threads.div_ceil(32) as usize, Warp::default);
    for (index, warp) in warps.iter_mut().enumerate() {
        warp.start(kernel, block, index as u32);
    }
    let finding = |raised: Raised| {
        Box::new(Finding::new(raised.fault, &kernel.entry.name, raised.place, [block, raised.thread], kernel.seed))
    };
    loop {
        machine.now.epoch += 1;
        let mut order: Vec<usize> = (0..warps.len()).collect();
        random.shuffle(&mut order);
        let mut waiting: Option<(Place, u32)> = None;
        for index in order {
            match warps[index].run(kernel.entry, machine).map_err(finding)? {
                Stop::End => {}
                Stop::Barrier(place) => waiting = Some((place, index as u32 * 32)),
            }
        }
        let Some((place, thread)) = waiting else { return Ok(()) };
        let reached: u32 = warps.iter().map(Warp::waiting).sum();
        if reached < threads {
            return Err(finding(Raised { fault: Fault::Barrier { reached, threads }, place, thread }));
        }
    }
}

impl Shared {
    pub(crate) fn add(&mut self, conflicts: u64) {
        self.accesses += 1;
        self.conflicts += conflicts;
    }
}
