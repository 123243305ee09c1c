//! A warp: 32 lanes, of which those with the lowest program counter run.

mod matrix;

use crate::counts::conflicts;
use crate::finding::Fault;
use crate::machine::{Kernel, Machine};
use crate::memory::verb;
use crate::ptx::{
    Access, Constant, Entry, Flush, Function, Operation, Place, Register, SHARED, Shuffle, Space, Special, Step, Vote,
};
use crate::race::Kind;

const LANES: usize = 32;
const SECTOR: u64 = 32;
/// After so many instructions of a warp the kernel is taken for one that does not end.
const MOST_INSTRUCTIONS: u64 = 1_000_000;

/// Why a warp does not go on.
pub(crate) enum Stop {
    End,
    Barrier(Place),
}

/// A fault of a thread, by its linear index within the block.
pub(crate) struct Raised {
    pub(crate) fault: Fault,
    pub(crate) place: Place,
    pub(crate) thread: u32,
}

/// A fault of a lane.
struct LaneFault(Fault, usize);

#[derive(Default)]
pub(crate) struct Warp {
    /// 32 lanes of each register.
    registers: Vec<u64>,
    /// Program counters with their lanes, the lowest last.
    groups: Vec<(u32, u32)>,
    first_thread: u32,
    step: u16,
    executed: u64,
    /// Index of the allocation that was touched last.
    last: usize,
    /// Sectors and allocations of one access, kept for its memory.
    sectors: Vec<(u64, usize)>,
}

fn lanes(mask: u32) -> impl Iterator<Item = usize> {
    (0..LANES).filter(move |lane| mask >> lane & 1 != 0)
}

impl Warp {
    pub(crate) fn start(&mut self, kernel: &Kernel<'_>, block: u32, index: u32) {
        self.first_thread = index * LANES as u32;
        (self.step, self.executed, self.last) = (0, 0, 0);
        let count = (kernel.threads - self.first_thread).min(LANES as u32);
        self.groups.clear();
        self.groups.push((0, u32::MAX >> (LANES as u32 - count)));
        self.registers.clear();
        self.registers.resize(kernel.entry.registers * LANES, 0);
        for (register, constant) in &kernel.constants {
            for lane in 0..LANES as u32 {
                let value = match *constant {
                    Constant::Bits(bits) => bits,
                    Constant::Special(Special::Thread) => (self.first_thread + lane).into(),
                    Constant::Special(Special::Threads) => kernel.threads.into(),
                    Constant::Special(Special::Block) => block.into(),
                    Constant::Special(Special::Blocks) => kernel.blocks.into(),
                    Constant::Special(Special::Lane) => lane.into(),
                    Constant::Special(Special::Warp) => index.into(),
                    // The launch has put its bytes here.
                    Constant::Parameter { .. } => 0,
                };
                self.registers[*register as usize * LANES + lane as usize] = value;
            }
        }
    }

    /// Lanes that have not ended.
    pub(crate) fn waiting(&self) -> u32 {
        self.live().count_ones()
    }

    fn live(&self) -> u32 {
        self.groups.iter().fold(0, |lanes, (_, mask)| lanes | mask)
    }

    fn get(&self, register: Register, lane: usize) -> u64 {
        self.registers[register as usize * LANES + lane]
    }

    fn set(&mut self, register: Register, lane: usize, value: u64) {
        self.registers[register as usize * LANES + lane] = value;
    }

    /// Puts lanes where they go on; those that meet there go on together.
    fn insert(&mut self, counter: u32, mask: u32) {
        if mask == 0 {
            return;
        }
        let at = self.groups.partition_point(|(other, _)| *other > counter);
        match self.groups.get_mut(at) {
            Some((other, lanes)) if *other == counter => *lanes |= mask,
            _ => self.groups.insert(at, (counter, mask)),
        }
    }

    /// Runs to the next barrier of the block, or to the end.
    pub(crate) fn run(&mut self, entry: &Entry, machine: &mut Machine<'_>) -> Result<Stop, Raised> {
        while let Some((counter, mask)) = self.groups.pop() {
            let step = &entry.steps[counter as usize];
            let active = self.guarded(step, mask);
            let raised =
                |LaneFault(fault, lane), first: u32| Raised { fault, place: step.place, thread: first + lane as u32 };
            let first = self.first_thread;
            let lane = active.trailing_zeros().min(31) as usize;
            machine.counts.instructions += 1;
            self.executed += 1;
            if self.executed > MOST_INSTRUCTIONS {
                return Err(raised(LaneFault(Fault::Endless(MOST_INSTRUCTIONS), lane), first));
            }
            match step.operation {
                Operation::Branch { target } => {
                    self.insert(counter + 1, mask & !active);
                    self.insert(target, active);
                }
                Operation::Exit => self.insert(counter + 1, mask & !active),
                Operation::BlockBarrier if active != 0 => {
                    let live = mask | self.live();
                    if active != live {
                        let fault = Fault::Barrier { reached: active.count_ones(), threads: live.count_ones() };
                        return Err(raised(LaneFault(fault, lane), first));
                    }
                    self.insert(counter + 1, mask);
                    return Ok(Stop::Barrier(step.place));
                }
                operation => {
                    if active != 0 {
                        let live = mask | self.live();
                        self.execute(operation, active, live, machine).map_err(|fault| raised(fault, first))?;
                    }
                    self.insert(counter + 1, mask);
                }
            }
        }
        Ok(Stop::End)
    }

    fn guarded(&self, step: &Step, mask: u32) -> u32 {
        match step.guard {
            None => mask,
            Some(guard) => {
                let taken = |lane: &usize| (self.get(guard.predicate, *lane) != 0) != guard.negated;
                lanes(mask).filter(taken).fold(0, |all, lane| all | 1 << lane)
            }
        }
    }

    fn execute(
        &mut self,
        operation: Operation,
        active: u32,
        live: u32,
        machine: &mut Machine<'_>,
    ) -> Result<(), LaneFault> {
        match operation {
            Operation::Compute { function, to, from, flush } => self.compute(function, to, from, flush, active),
            Operation::Split { to, parts, bits, from } => {
                for lane in lanes(active) {
                    let value = self.get(from, lane);
                    for (part, to) in to[..parts].iter().enumerate() {
                        self.set(*to, lane, value >> (part as u32 * bits) & (u64::MAX >> (64 - bits)));
                    }
                }
            }
            Operation::Join { to, parts, bits, from } => {
                for lane in lanes(active) {
                    let of = |(part, from): (usize, &Register)| {
                        (self.get(*from, lane) & (u64::MAX >> (64 - bits))) << (part as u32 * bits)
                    };
                    let value = from[..parts].iter().enumerate().map(of).fold(0, |all, part| all | part);
                    self.set(to, lane, value);
                }
            }
            Operation::Load { access, to } => self.load(access, to, active, machine)?,
            Operation::Store { access, from } => self.store(access, from, active, machine)?,
            Operation::Atomic { access, function, to, from } => {
                self.atomic(access, function, to, from, active, machine)?
            }
            Operation::WarpBarrier { mask } => {
                let mask = self.mask(mask, active)?;
                if mask != live {
                    return Err(LaneFault(Fault::PartOfAWarp { mask }, active.trailing_zeros() as usize));
                }
                self.step = self.step.wrapping_add(1);
            }
            Operation::Shuffle { mode, to, valid, from, lane, clamp, mask } => {
                self.mask(mask, active)?;
                self.shuffle(mode, (to, valid), [from, lane, clamp], active)?;
            }
            Operation::Vote { mode, to, predicate, negated, mask } => {
                self.mask(mask, active)?;
                let agrees = |lane: &usize| (self.get(predicate, *lane) != 0) != negated;
                let yes = lanes(active).filter(agrees).fold(0u32, |all, lane| all | 1 << lane);
                let value = match mode {
                    Vote::All => u64::from(yes == active),
                    Vote::Any => u64::from(yes != 0),
                    Vote::Uniform => u64::from(yes == 0 || yes == active),
                    Vote::Ballot => yes.into(),
                };
                for lane in lanes(active) {
                    self.set(to, lane, value);
                }
            }
            Operation::Multiply(product) => {
                machine.counts.products += 1;
                self.multiply(product, active)?;
            }
            Operation::LoadMatrices(matrices) => self.load_matrices(matrices, active, machine)?,
            Operation::Branch { .. } | Operation::Exit | Operation::BlockBarrier | Operation::Nothing => {}
        }
        Ok(())
    }

    fn compute(&mut self, function: Function, to: Register, from: [Register; 3], flush: Flush, active: u32) {
        let [a, b, c] = from;
        for lane in lanes(active) {
            let (a, b, c) = (self.get(a, lane), self.get(b, lane), self.get(c, lane));
            let value = match flush {
                Flush::Nothing => function(a, b, c),
                Flush::Operands => function(flushed(a), flushed(b), flushed(c)),
                Flush::All => flushed(function(flushed(a), flushed(b), flushed(c))),
            };
            self.set(to, lane, value);
        }
    }

    /// The mask of an instruction of a whole warp; it must name the lanes that are here, all of them.
    fn mask(&self, register: Register, active: u32) -> Result<u32, LaneFault> {
        for lane in lanes(active) {
            let mask = self.get(register, lane) as u32;
            if mask != active {
                return Err(LaneFault(Fault::Mask { mask, active }, lane));
            }
        }
        Ok(active)
    }

    fn shuffle(
        &mut self,
        mode: Shuffle,
        (to, valid): (Register, Option<Register>),
        [from, by, clamp]: [Register; 3],
        active: u32,
    ) -> Result<(), LaneFault> {
        let values: [u64; LANES] = std::array::from_fn(|lane| self.get(from, lane));
        let mut results = [(0, false); LANES];
        for lane in lanes(active) {
            let (by, clamp) = (self.get(by, lane) as u32 & 31, self.get(clamp, lane) as u32);
            let (own, segment) = (lane as u32, clamp >> 8 & 31);
            let last = own & segment | clamp & 31 & !segment;
            let (source, within) = match mode {
                Shuffle::Up => (own.wrapping_sub(by), own as i32 - by as i32 >= last as i32),
                Shuffle::Down => (own + by, own + by <= last),
                Shuffle::Exchange => (own ^ by, own ^ by <= last),
                Shuffle::Index => (own & segment | by & !segment, own & segment | by & !segment <= last),
            };
            let source = if within { source } else { own };
            if active >> source & 1 == 0 {
                return Err(LaneFault(Fault::InactiveLane { lane: source }, lane));
            }
            results[lane] = (values[source as usize], within);
        }
        for lane in lanes(active) {
            let (value, within) = results[lane];
            self.set(to, lane, value);
            if let Some(valid) = valid {
                self.set(valid, lane, within.into());
            }
        }
        Ok(())
    }

    fn load(
        &mut self,
        access: Access,
        to: [Register; 4],
        active: u32,
        machine: &mut Machine<'_>,
    ) -> Result<(), LaneFault> {
        self.each(access, Kind::Read, active, machine, &mut |warp, lane, bytes| {
            for (to, value) in to.iter().zip(bytes.chunks_exact(access.bytes)) {
                warp.set(*to, lane, number(value));
            }
        })
    }

    fn store(
        &mut self,
        access: Access,
        from: [Register; 4],
        active: u32,
        machine: &mut Machine<'_>,
    ) -> Result<(), LaneFault> {
        self.each(access, Kind::Write, active, machine, &mut |warp, lane, bytes| {
            for (from, value) in from.iter().zip(bytes.chunks_exact_mut(access.bytes)) {
                value.copy_from_slice(&warp.get(*from, lane).to_le_bytes()[..access.bytes]);
            }
        })
    }

    fn atomic(
        &mut self,
        access: Access,
        function: Function,
        to: Option<Register>,
        from: [Register; 2],
        active: u32,
        machine: &mut Machine<'_>,
    ) -> Result<(), LaneFault> {
        self.each(access, Kind::Atomic, active, machine, &mut |warp, lane, bytes| {
            let old = number(bytes);
            let new = function(old, warp.get(from[0], lane), warp.get(from[1], lane));
            bytes.copy_from_slice(&new.to_le_bytes()[..access.bytes]);
            if let Some(to) = to {
                warp.set(to, lane, old);
            }
        })
    }

    /// Checks the access of each lane, and lets `work` have its bytes; what `work` changes is kept unless this reads.
    fn each(
        &mut self,
        access: Access,
        kind: Kind,
        active: u32,
        machine: &mut Machine<'_>,
        work: &mut dyn FnMut(&mut Warp, usize, &mut [u8]),
    ) -> Result<(), LaneFault> {
        let size = access.bytes * access.parts;
        let mut offsets = [None; LANES];
        let mut buffer = [0; 32];
        self.sectors.clear();
        for lane in lanes(active) {
            let address = self.address(access, lane);
            let mut now = machine.now;
            (now.thread, now.step) = ((self.first_thread + lane as u32) as u16, self.step);
            let is_shared = access.space == Space::Shared || address >> 40 == SHARED >> 40;
            let allocation = if is_shared {
                offsets[lane] = Some(address.wrapping_sub(SHARED));
                &mut machine.shared
            } else {
                let Some(index) = machine.memory.holding(address, size, self.last) else {
                    let place = machine.memory.place(address);
                    return Err(LaneFault(Fault::OutOfBounds { what: verb(kind), bytes: size, place }, lane));
                };
                self.last = index;
                let allocation = &mut machine.memory.allocations[index];
                for sector in address / SECTOR..(address + size as u64).div_ceil(SECTOR) {
                    if self.sectors.last() != Some(&(sector, index)) {
                        self.sectors.push((sector, index));
                    }
                }
                allocation.traffic[usize::from(kind != Kind::Read)].asked += size as u64;
                allocation
            };
            if !address.is_multiple_of(size as u64) {
                let place = allocation.place(address);
                return Err(LaneFault(Fault::Misaligned { what: verb(kind), bytes: size, place }, lane));
            }
            allocation.check(address, size, kind, &now).map_err(|fault| LaneFault(fault, lane))?;
            let bytes = &mut buffer[..size];
            bytes.copy_from_slice(allocation.bytes(address, size));
            work(self, lane, bytes);
            if kind != Kind::Read {
                allocation.write(address, bytes);
            }
        }
        if machine.is_counted {
            self.count(kind, size, &offsets, machine);
        }
        Ok(())
    }

    fn count(&mut self, kind: Kind, size: usize, offsets: &[Option<u64>; LANES], machine: &mut Machine<'_>) {
        if offsets.iter().any(Option::is_some) {
            machine.counts.shared.add(conflicts(offsets, size, kind == Kind::Atomic));
        }
        if self.sectors.is_empty() {
            return;
        }
        machine.counts.accesses += 1;
        machine.counts.wide_accesses += u64::from(size >= 16);
        if !self.sectors.is_sorted() {
            self.sectors.sort_unstable();
        }
        self.sectors.dedup();
        for (_, index) in &self.sectors {
            machine.memory.allocations[*index].traffic[usize::from(kind != Kind::Read)].moved += SECTOR;
        }
    }

    fn address(&self, access: Access, lane: usize) -> u64 {
        let base = self.get(access.base, lane);
        match access.space {
            Space::Global => base.wrapping_add_signed(access.offset),
            // 32 bits, which may have come from below zero.
            Space::Shared => {
                SHARED.wrapping_add_signed(i64::from(base.wrapping_add_signed(access.offset) as u32 as i32))
            }
        }
    }
}

fn number(bytes: &[u8]) -> u64 {
    let mut value = [0; 8];
    value[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(value)
}

/// Subnormal numbers as zeros with their sign.
fn flushed(bits: u64) -> u64 {
    let value = f32::from_bits(bits as u32);
    if value.is_subnormal() { (bits as u32 & 0x8000_0000).into() } else { bits }
}
