//! Device memory: widely spaced allocations with per-byte state.

use crate::counts::Traffic;
use crate::finding::Fault;
use crate::ptx::SHARED;
use crate::race::{Cell, Kind, Now};
use std::ops::Range;

const GLOBAL: u64 = 0x7000_0000_0000;
/// Keeps an address past the end of one allocation from falling into the next.
const GAP: u64 = 1 << 20;
/// The driver's alignment.
const ALIGNMENT: u64 = 256;
/// Smallest and largest number of bytes tracked by one cell. Single bytes can only be read, because
/// threads that write the two bytes of a cell would appear to race.
const CELL: [usize; 2] = [2, 16];
/// Content of uninitialised memory: NaN in every float format.
const POISON: u8 = 0xff;

/// A range with its declared use.
#[derive(Debug, Clone)]
pub(crate) struct Declared {
    pub(crate) range: Range<u64>,
    pub(crate) reads: bool,
    pub(crate) writes: bool,
}

pub(crate) struct Allocation {
    pub(crate) name: String,
    base: u64,
    bytes: Vec<u8>,
    written: Vec<bool>,
    /// Empty if no kernel has used this memory.
    cells: Vec<Cell>,
    /// Bytes per cell: the size of the smallest access so far. Larger cells are fewer, and equally
    /// precise until then.
    cell: usize,
    /// `None` allows everything, as in shared memory.
    pub(crate) declared: Option<Vec<Declared>>,
    pub(crate) traffic: [Traffic; 2],
    /// One bit per cell that the launch has read or written, if recorded.
    touched: Option<[Vec<u64>; 2]>,
}

impl Allocation {
    pub(crate) fn shared(bytes: usize) -> Allocation {
        Allocation::new("shared memory".to_owned(), SHARED, bytes, None)
    }

    fn new(name: String, base: u64, bytes: usize, declared: Option<Vec<Declared>>) -> Allocation {
        Allocation {
            name,
            base,
            bytes: vec![POISON; bytes],
            written: vec![false; bytes],
            cells: Vec::new(),
            cell: CELL[1],
            declared,
            traffic: Default::default(),
            touched: None,
        }
    }

    /// Starts recording which cells are read and written.
    pub(crate) fn watch(&mut self) {
        self.touched = Some(Default::default());
    }

    fn touch(&mut self, cells: &Range<usize>, [reads, writes]: [bool; 2]) {
        let Some(touched) = &mut self.touched else { return };
        for (bits, _) in touched.iter_mut().zip([reads, writes]).filter(|(_, does)| *does) {
            if bits.is_empty() {
                bits.resize(self.cells.len().div_ceil(64), 0);
            }
            cells.clone().for_each(|cell| bits[cell / 64] |= 1 << (cell % 64));
        }
    }

    /// Stops recording; returns the ranges that were read and those that were written.
    pub(crate) fn touched(&mut self) -> [Vec<Range<u64>>; 2] {
        let end = self.addresses().end;
        let ranges = |bits: Vec<u64>| {
            runs(&bits).into_iter().map(|cells| {
                let address = |cell: usize| end.min(self.base + (cell * self.cell) as u64);
                address(cells.start)..address(cells.end)
            })
        };
        self.touched.take().unwrap_or_default().map(|bits| ranges(bits).collect())
    }

    /// Marks the content as uninitialised.
    pub(crate) fn clear(&mut self) {
        self.bytes.fill(POISON);
        self.written.fill(false);
        self.cells.fill(Cell::default());
    }

    fn range(&self, address: u64, bytes: usize) -> Option<Range<usize>> {
        let start = usize::try_from(address.checked_sub(self.base)?).ok()?;
        (start + bytes <= self.bytes.len()).then_some(start..start + bytes)
    }

    /// Addresses from the first byte to past the last.
    pub(crate) fn addresses(&self) -> Range<u64> {
        self.base..self.base + self.bytes.len() as u64
    }

    pub(crate) fn bytes(&self, address: u64, bytes: usize) -> &[u8] {
        self.range(address, bytes).map_or(&[], |range| &self.bytes[range])
    }

    /// Which of these bytes are initialised.
    pub(crate) fn written(&self, address: u64, bytes: usize) -> &[bool] {
        self.range(address, bytes).map_or(&[], |range| &self.written[range])
    }

    /// Like [`Allocation::write`], but some bytes may be uninitialised.
    pub(crate) fn write_some(&mut self, address: u64, bytes: &[u8], written: &[bool]) {
        if let Some(range) = self.range(address, bytes.len()) {
            self.bytes[range.clone()].copy_from_slice(bytes);
            self.written[range].copy_from_slice(written);
        }
    }

    pub(crate) fn write(&mut self, address: u64, bytes: &[u8]) {
        if let Some(range) = self.range(address, bytes.len()) {
            self.bytes[range.clone()].copy_from_slice(bytes);
            self.written[range].fill(true);
        }
    }

    /// Splits cells to this size; each part inherits the history of the larger cell.
    fn split(&mut self, cell: usize) {
        let (parts, count) = (self.cell / cell, self.bytes.len().div_ceil(cell));
        let all = self.cells.iter().flat_map(|cell| std::iter::repeat_n(*cell, parts));
        self.cells = all.take(count).collect();
        for bits in self.touched.iter_mut().flatten().filter(|bits| !bits.is_empty()) {
            let is_one = |at: usize| bits[at / parts / 64] >> (at / parts % 64) & 1;
            let word =
                |word: usize| (0..64.min(count - word * 64)).fold(0, |all, at| all | is_one(word * 64 + at) << at);
            *bits = (0..count.div_ceil(64)).map(word).collect();
        }
        self.cell = cell;
    }

    /// Checks and records an access; returns its bytes, which count as initialised if it writes.
    pub(crate) fn access(&mut self, address: u64, bytes: usize, kind: Kind, now: &Now) -> Result<&mut [u8], Fault> {
        let range = self.check(address, bytes, kind, now)?;
        if kind != Kind::Read {
            self.written[range.clone()].fill(true);
        }
        Ok(&mut self.bytes[range])
    }

    /// Checks and records an access.
    pub(crate) fn check(&mut self, address: u64, bytes: usize, kind: Kind, now: &Now) -> Result<Range<usize>, Fault> {
        let (reads, writes) = (kind != Kind::Write, kind != Kind::Read);
        if let Some(declared) = &self.declared {
            let end = address + bytes as u64;
            let holds = |one: &Declared| one.range.start <= address && end <= one.range.end;
            let allows = |one: &Declared| holds(one) && (one.reads || !reads) && (one.writes || !writes);
            if !declared.iter().any(allows) {
                return Err(Fault::Undeclared { what: verb(kind), bytes, place: self.place(address) });
            }
        }
        let Some(range) = self.range(address, bytes) else {
            return Err(Fault::OutOfBounds { what: verb(kind), bytes, place: self.place(address) });
        };
        if reads && self.written[range.clone()].contains(&false) {
            return Err(Fault::NeverWritten { bytes, place: self.place(address) });
        }
        if self.cells.is_empty() {
            self.cells = vec![Cell::default(); self.bytes.len().div_ceil(self.cell)];
        }
        if bytes < self.cell {
            self.split(bytes.max(CELL[0]));
        }
        let shift = self.cell.trailing_zeros();
        let cells = range.start >> shift..((range.end - 1) >> shift) + 1;
        self.touch(&cells, [reads, writes]);
        for cell in &mut self.cells[cells] {
            if let Some(other) = cell.touch(kind, now) {
                let did = if other.wrote { "wrote" } else { "read" };
                let (block, thread) = (other.block, u32::from(other.thread));
                return Err(Fault::Race { what: verb(kind), bytes, place: self.place(address), block, thread, did });
            }
        }
        Ok(range)
    }

    /// Describes an address.
    pub(crate) fn place(&self, address: u64) -> String {
        let Allocation { name, base, bytes, .. } = self;
        let end = base + bytes.len() as u64;
        if address < *base {
            format!("{} bytes before `{name}`", base - address)
        } else if address >= end {
            format!("at byte {} past the end of `{name}` ({} bytes)", address - end, bytes.len())
        } else {
            format!("at byte {} of `{name}` ({} bytes)", address - base, bytes.len())
        }
    }
}

pub(crate) fn verb(kind: Kind) -> &'static str {
    match kind {
        Kind::Read => "reads",
        Kind::Write => "writes",
        Kind::Atomic => "changes",
    }
}

/// Runs of set bits, as ranges of bit indices.
fn runs(words: &[u64]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for (index, word) in words.iter().enumerate() {
        let mut rest = *word;
        while rest != 0 {
            let first = rest.trailing_zeros();
            let count = (rest >> first).trailing_ones();
            let start = index * 64 + first as usize;
            let end = start + count as usize;
            match runs.last_mut() {
                Some(last) if last.end == start => last.end = end,
                _ => runs.push(start..end),
            }
            rest &= !(u64::MAX >> (64 - count) << first);
        }
    }
    runs
}

/// Global memory.
pub(crate) struct Memory {
    /// Sorted by address.
    pub(crate) allocations: Vec<Allocation>,
    /// Lowest address of the next allocation. Addresses are never reused.
    next: u64,
}

impl Default for Memory {
    fn default() -> Memory {
        Memory { allocations: Vec::new(), next: GLOBAL }
    }
}

impl Memory {
    pub(crate) fn allocate(&mut self, name: &str, bytes: usize) -> u64 {
        let base = self.next;
        self.next = (base + bytes as u64 + GAP).next_multiple_of(ALIGNMENT);
        self.allocations.push(Allocation::new(name.to_owned(), base, bytes, Some(Vec::new())));
        base
    }

    pub(crate) fn free(&mut self, base: u64) {
        self.allocations.retain(|one| one.base != base);
    }

    /// Index of the allocation at or before an address.
    fn before(&self, address: u64) -> Option<usize> {
        self.allocations.partition_point(|one| one.base <= address).checked_sub(1)
    }

    /// Index of the allocation that contains a range. `last` is tried first.
    pub(crate) fn holding(&self, address: u64, bytes: usize, last: usize) -> Option<usize> {
        let holds = |index: usize| self.allocations.get(index).is_some_and(|one| one.range(address, bytes).is_some());
        if holds(last) { Some(last) } else { self.before(address).filter(|index| holds(*index)) }
    }

    /// Describes an address outside all allocations.
    pub(crate) fn place(&self, address: u64) -> String {
        match self.before(address).or(if self.allocations.is_empty() { None } else { Some(0) }) {
            // The next allocation may be closer.
            Some(index) => match self.allocations.get(index + 1) {
                Some(next) if next.base - address < GAP / 4 => next.place(address),
                _ => self.allocations[index].place(address),
            },
            None => format!("at {address:#x}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Allocation, runs};
    use crate::finding::Fault;
    use crate::ptx::SHARED;
    use crate::race::{Kind, Now};

    #[test]
    fn a_smaller_access_splits_the_history_of_a_larger_one() {
        let now = |thread| Now { launch: 1, block: 1, epoch: 1, thread, step: 0 };
        let mut memory = Allocation::shared(70);
        memory.watch();
        for (at, bytes, thread) in [(0, 16, 0), (16, 4, 1), (22, 2, 2), (68, 2, 3)] {
            assert!(memory.access(SHARED + at, bytes, Kind::Write, &now(thread)).is_ok(), "{bytes} bytes at {at}");
        }
        for (at, bytes, writer) in [(14, 2, 0), (12, 4, 0), (18, 2, 1), (22, 2, 2), (68, 2, 3)] {
            let raced = memory.access(SHARED + at, bytes, Kind::Read, &now(9)).map(|_| ());
            assert!(matches!(raced, Err(Fault::Race { thread, .. }) if thread == writer), "{at}: {raced:?}");
        }
        let [_, written] = memory.touched();
        assert_eq!(written, [SHARED..SHARED + 20, SHARED + 22..SHARED + 24, SHARED + 68..SHARED + 70]);
    }

    #[test]
    fn runs_of_ones_cross_word_boundaries() {
        assert_eq!(runs(&[0b0110_1000, 0]), [3..4, 5..7]);
        assert_eq!(runs(&[u64::MAX, 1, 1 << 63]), [0..65, 191..192]);
        assert_eq!(runs(&[0, 0]), []);
    }
}
