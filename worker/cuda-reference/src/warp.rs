//! A warp: 32 lanes, of which those with the lowest program counter run.

use crate::counts::conflicts;
use crate::finding::Fault;
use crate::machine::{Kernel, Machine};
use crate::memory::verb;
use crate::ptx::{
    Access, Constant, Entry, Flush, Function, Lanes, Operation, Place, Register, SHARED, Shuffle, Space, Special, Step,
    Vote,
};
use crate::race::Kind;

const LANES: usize = 32;
const SECTOR: u64 = 32;
/// Limit on a warp's instructions, after which the kernel counts as endless.
const MOST_INSTRUCTIONS: u64 = 1_000_000;

/// Why a warp stops.
pub(crate) enum Stop {
    End,
    Barrier(Place),
}

/// A fault of a thread, given by its linear index within the block.
pub(crate) struct Raised {
    pub(crate) fault: Fault,
    pub(crate) place: Place,
    pub(crate) thread: u32,
}

/// A fault of a lane.
struct LaneFault(Fault, usize);

#[derive(Default)]
pub(crate) struct Warp {
    registers: Vec<Lanes>,
    /// Program counters with their lanes, lowest last.
    groups: Vec<(u32, u32)>,
    first_thread: u32,
    step: u16,
    executed: u64,
    /// Index of the allocation touched last.
    last: usize,
    /// Sectors and allocations of one access; a field only to reuse its memory.
    sectors: Vec<(u64, usize)>,
}

fn lanes(mut mask: u32) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let lane = mask.trailing_zeros();
        mask &= mask.wrapping_sub(1);
        (lane < LANES as u32).then_some(lane as usize)
    })
}

/// Lanes with a nonzero value.
fn ones(lanes: &Lanes) -> u32 {
    lanes.iter().enumerate().fold(0, |all, (lane, value)| all | u32::from(*value != 0) << lane)
}

impl Warp {
    pub(crate) fn start(&mut self, kernel: &Kernel<'_>, block: u32, index: u32) {
        self.first_thread = index * LANES as u32;
        (self.step, self.executed, self.last) = (0, 0, 0);
        let count = (kernel.threads - self.first_thread).min(LANES as u32);
        self.groups.clear();
        self.groups.push((0, u32::MAX >> (LANES as u32 - count)));
        // Of the constants, only the block index differs from the previous block.
        let is_first = self.registers.is_empty();
        self.registers.resize(kernel.entry.registers, [0; LANES]);
        let changes = |constant: &Constant| is_first || *constant == Constant::Special(Special::Block);
        for (register, constant) in kernel.constants.iter().filter(|(_, constant)| changes(constant)) {
            self.registers[*register as usize] = match *constant {
                Constant::Bits(bits) => [bits; LANES],
                Constant::Special(Special::Thread) => {
                    std::array::from_fn(|lane| u64::from(self.first_thread) + lane as u64)
                }
                Constant::Special(Special::Threads) => [kernel.threads.into(); LANES],
                Constant::Special(Special::Block) => [block.into(); LANES],
                Constant::Special(Special::Blocks) => [kernel.blocks.into(); LANES],
                Constant::Special(Special::Lane) => std::array::from_fn(|lane| lane as u64),
                Constant::Special(Special::Warp) => [index.into(); LANES],
                // Filled in by the launch.
                Constant::Parameter { .. } => [0; LANES],
            };
        }
    }

    /// Lanes that have not exited.
    pub(crate) fn waiting(&self) -> u32 {
        self.live().count_ones()
    }

    fn live(&self) -> u32 {
        self.groups.iter().fold(0, |lanes, (_, mask)| lanes | mask)
    }

    fn get(&self, register: Register, lane: usize) -> u64 {
        self.registers[register as usize][lane]
    }

    fn set(&mut self, register: Register, lane: usize, value: u64) {
        self.registers[register as usize][lane] = value;
    }

    /// Sets a register in the active lanes.
    fn put(&mut self, register: Register, values: &Lanes, active: u32) {
        let register = &mut self.registers[register as usize];
        match active {
            u32::MAX => *register = *values,
            _ => lanes(active).for_each(|lane| register[lane] = values[lane]),
        }
    }

    /// Queues lanes at a program counter, where they merge with lanes already there.
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

    /// Runs to the next block barrier, or to the end.
    pub(crate) fn run(&mut self, entry: &Entry, machine: &mut Machine<'_>) -> Result<Stop, Raised> {
        let Some((mut counter, mut mask)) = self.groups.pop() else { return Ok(Stop::End) };
        loop {
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
            match &step.operation {
                Operation::Branch { target } if active == mask => counter = *target,
                Operation::Branch { target } => {
                    self.insert(*target, active);
                    (counter, mask) = (counter + 1, mask & !active);
                }
                Operation::Exit => (counter, mask) = (counter + 1, mask & !active),
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
                        self.execute(operation, active, mask, machine).map_err(|fault| raised(fault, first))?;
                    }
                    counter += 1;
                }
            }
            // Other lanes continue together with these, or before them.
            if mask == 0 || self.groups.last().is_some_and(|(other, _)| *other <= counter) {
                self.insert(counter, mask);
                let Some(next) = self.groups.pop() else { return Ok(Stop::End) };
                (counter, mask) = next;
            }
        }
    }

    fn guarded(&self, step: &Step, mask: u32) -> u32 {
        match step.guard {
            None => mask,
            Some(guard) => {
                let taken = ones(&self.registers[guard.predicate as usize]);
                mask & if guard.negated { !taken } else { taken }
            }
        }
    }

    fn execute(
        &mut self,
        operation: &Operation,
        active: u32,
        mask: u32,
        machine: &mut Machine<'_>,
    ) -> Result<(), LaneFault> {
        match *operation {
            Operation::Compute { function, to, from, flush } => self.compute(function, to, from, flush, active),
            Operation::Split { to, parts, bits, from } => {
                let values = self.registers[from as usize];
                for (part, to) in to[..parts].iter().enumerate() {
                    let of = |value: u64| value >> (part as u32 * bits) & (u64::MAX >> (64 - bits));
                    self.put(*to, &values.map(of), active);
                }
            }
            Operation::Join { to, parts, bits, from } => {
                let mut values = [0; LANES];
                for (part, from) in from[..parts].iter().enumerate() {
                    for (value, of_part) in values.iter_mut().zip(&self.registers[*from as usize]) {
                        *value |= (of_part & (u64::MAX >> (64 - bits))) << (part as u32 * bits);
                    }
                }
                self.put(to, &values, active);
            }
            Operation::Load { access, to } => self.load(access, to, active, machine)?,
            Operation::Store { access, from } => self.store(access, from, active, machine)?,
            Operation::Atomic { access, function, to, from } => {
                self.atomic(access, function, to, from, active, machine)?
            }
            Operation::WarpBarrier { mask: register } => {
                let live = mask | self.live();
                let mask = self.mask(register, active)?;
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
                let taken = ones(&self.registers[predicate as usize]);
                let yes = active & if negated { !taken } else { taken };
                let value = match mode {
                    Vote::All => u64::from(yes == active),
                    Vote::Any => u64::from(yes != 0),
                    Vote::Uniform => u64::from(yes == 0 || yes == active),
                    Vote::Ballot => yes.into(),
                };
                self.put(to, &[value; LANES], active);
            }
            Operation::Branch { .. } | Operation::Exit | Operation::BlockBarrier | Operation::Nothing => {}
        }
        Ok(())
    }

    fn compute(&mut self, function: Function, to: Register, from: [Register; 3], flush: Flush, active: u32) {
        let [a, b, c] = from.map(|register| &self.registers[register as usize]);
        let values = match flush {
            Flush::Nothing => (function.warp)(a, b, c),
            Flush::Operands => (function.warp)(&flushed(a), &flushed(b), &flushed(c)),
            Flush::All => flushed(&(function.warp)(&flushed(a), &flushed(b), &flushed(c))),
        };
        self.put(to, &values, active);
    }

    /// The mask of a warp-wide instruction, which must name exactly the active lanes.
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
        let values = self.registers[from as usize];
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
        self.each(access, Kind::Read, active, machine, |registers, lane, bytes| {
            for (to, value) in to.iter().zip(bytes.chunks_exact(access.bytes)) {
                registers[*to as usize][lane] = number(value);
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
        self.each(access, Kind::Write, active, machine, |registers, lane, bytes| {
            for (from, value) in from.iter().zip(bytes.chunks_exact_mut(access.bytes)) {
                store(value, registers[*from as usize][lane]);
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
        self.each(access, Kind::Atomic, active, machine, |registers, lane, bytes| {
            let old = number(bytes);
            let [first, second] = from.map(|from| registers[from as usize][lane]);
            store(bytes, (function.lane)(old, first, second));
            if let Some(to) = to {
                registers[to as usize][lane] = old;
            }
        })
    }

    /// Checks each lane's access and passes its bytes to `work`, which must not change them for a
    /// read.
    fn each(
        &mut self,
        access: Access,
        kind: Kind,
        active: u32,
        machine: &mut Machine<'_>,
        mut work: impl FnMut(&mut [Lanes], usize, &mut [u8]),
    ) -> Result<(), LaneFault> {
        let size = access.bytes * access.parts;
        let mut offsets = [None; LANES];
        let mut now = machine.now;
        now.step = self.step;
        self.sectors.clear();
        for lane in lanes(active) {
            let address = self.address(access, lane);
            now.thread = (self.first_thread + lane as u32) as u16;
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
                if machine.is_counted {
                    for sector in address / SECTOR..(address + size as u64).div_ceil(SECTOR) {
                        if self.sectors.last() != Some(&(sector, index)) {
                            self.sectors.push((sector, index));
                        }
                    }
                    allocation.traffic[usize::from(kind != Kind::Read)].requested += size as u64;
                }
                allocation
            };
            if !address.is_multiple_of(size as u64) {
                let place = allocation.place(address);
                return Err(LaneFault(Fault::Misaligned { what: verb(kind), bytes: size, place }, lane));
            }
            let bytes = allocation.access(address, size, kind, &now).map_err(|fault| LaneFault(fault, lane))?;
            work(&mut self.registers, lane, bytes);
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
            // Shared addresses have 32 bits, and may have wrapped below zero.
            Space::Shared => {
                SHARED.wrapping_add_signed(i64::from(base.wrapping_add_signed(access.offset) as u32 as i32))
            }
        }
    }
}

fn number(bytes: &[u8]) -> u64 {
    match *bytes {
        [a, b] => u16::from_le_bytes([a, b]).into(),
        [a, b, c, d] => u32::from_le_bytes([a, b, c, d]).into(),
        _ => bytes.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte)),
    }
}

/// Inverse of [`number`].
fn store(bytes: &mut [u8], value: u64) {
    match bytes {
        [a, b] => [*a, *b] = (value as u16).to_le_bytes(),
        [a, b, c, d] => [*a, *b, *c, *d] = (value as u32).to_le_bytes(),
        _ => bytes.iter_mut().zip(value.to_le_bytes()).for_each(|(byte, of_value)| *byte = of_value),
    }
}

/// Flushes f32 subnormals to zeros, keeping the sign.
fn flushed(lanes: &Lanes) -> Lanes {
    let is_zero_or_subnormal = |bits: u64| bits & 0x7f80_0000 == 0;
    let mut flushed = *lanes;
    for bits in &mut flushed {
        *bits = if is_zero_or_subnormal(*bits) { *bits & 0x8000_0000 } else { *bits };
    }
    flushed
}
