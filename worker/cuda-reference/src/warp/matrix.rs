//! Warp-wide matrix loads and products. Elements are distributed over lanes as the PTX ISA
//! specifies: of an 8 x 8 matrix, lane 4 r + c holds two, in row r and columns 2 c and 2 c + 1.

use super::{LANES, LaneFault, Warp, number};
use crate::counts::conflicts;
use crate::finding::Fault;
use crate::machine::Machine;
use crate::memory::verb;
use crate::ptx::{Matrices, Product, SHARED};
use crate::race::Kind;

/// Rows and columns of a loaded matrix.
const SIDE: usize = 8;
/// Bytes per row.
const ROW: usize = 16;

/// Requires all lanes.
fn whole(active: u32) -> Result<(), LaneFault> {
    if active == u32::MAX {
        Ok(())
    } else {
        Err(LaneFault(Fault::NotWhole { active }, active.trailing_zeros() as usize))
    }
}

/// The two 16-bit values in a register.
fn halves(register: u64) -> [u16; 2] {
    [register as u16, (register >> 16) as u16]
}

impl Warp {
    /// 16 x 16 by 16 x 8 elements. A device accumulates in its own order and truncates; here each
    /// sum is rounded once.
    pub(super) fn multiply(&mut self, product: Product, active: u32) -> Result<(), LaneFault> {
        let Product { widen, to, left, right, from } = product;
        whole(active)?;
        // Indexed by the inner dimension first, so that the inner loop runs over columns, whose
        // sums are independent.
        let (mut rows, mut columns) = ([[0.0f64; 16]; 16], [[0.0f64; SIDE]; 16]);
        for lane in 0..LANES {
            let (row, pair) = (lane / 4, lane % 4 * 2);
            for (part, register) in left.into_iter().enumerate() {
                for (half, bits) in halves(self.get(register, lane)).into_iter().enumerate() {
                    rows[row + part % 2 * SIDE][pair + half + part / 2 * SIDE] = widen(bits).into();
                }
            }
            for (part, register) in right.into_iter().enumerate() {
                for (half, bits) in halves(self.get(register, lane)).into_iter().enumerate() {
                    columns[pair + half + part * SIDE][row] = widen(bits).into();
                }
            }
        }
        let mut sums = [[0.0f64; SIDE]; 16];
        let places = |lane: usize, part: usize| (lane / 4 + part / 2 * SIDE, lane % 4 * 2 + part % 2);
        for (lane, (part, from)) in
            (0..LANES).flat_map(|lane| from.into_iter().enumerate().map(move |part| (lane, part)))
        {
            let (row, column) = places(lane, part);
            sums[row][column] = f32::from_bits(self.get(from, lane) as u32).into();
        }
        for (sums, row) in sums.iter_mut().zip(&rows) {
            for (factor, column) in row.iter().zip(&columns) {
                sums.iter_mut().zip(column).for_each(|(sum, other)| *sum += factor * other);
            }
        }
        for (part, to) in to.into_iter().enumerate() {
            let of = |lane| {
                let (row, column) = places(lane, part);
                u64::from((sums[row][column] as f32).to_bits())
            };
            self.put(to, &std::array::from_fn(of), active);
        }
        Ok(())
    }

    /// Four 8 x 8 matrices, for each of which eight lanes provide the row addresses. Each element
    /// counts as read by the lane that receives it: data written by another lane needs a barrier,
    /// even if the reader did not provide the address.
    pub(super) fn load_matrices(
        &mut self,
        matrices: Matrices,
        active: u32,
        machine: &mut Machine<'_>,
    ) -> Result<(), LaneFault> {
        let Matrices { rows, is_transposed, to } = matrices;
        whole(active)?;
        let addresses: [u64; LANES] = std::array::from_fn(|lane| self.address(rows, lane));
        let mut offsets = [None; LANES];
        for (lane, offset) in offsets.iter_mut().enumerate() {
            let address = addresses[lane];
            let shared = &machine.shared;
            let place = || shared.place(address);
            let what = verb(Kind::Read);
            if shared.bytes(address, ROW).is_empty() {
                return Err(LaneFault(Fault::OutOfBounds { what, bytes: ROW, place: place() }, lane));
            }
            if !address.is_multiple_of(ROW as u64) {
                return Err(LaneFault(Fault::Misaligned { what, bytes: ROW, place: place() }, lane));
            }
            *offset = Some(address.wrapping_sub(SHARED));
        }
        for (matrix, to) in to.into_iter().enumerate() {
            let mut values = [0; LANES];
            for (row, column) in (0..SIDE).flat_map(|row| (0..SIDE).map(move |column| (row, column))) {
                let (major, minor) = if is_transposed { (column, row) } else { (row, column) };
                let (lane, half) = (4 * major + minor / 2, minor % 2);
                let address = addresses[matrix * SIDE + row] + 2 * column as u64;
                let mut now = machine.now;
                (now.thread, now.step) = ((self.first_thread + lane as u32) as u16, self.step);
                machine.shared.check(address, 2, Kind::Read, &now).map_err(|fault| LaneFault(fault, lane))?;
                values[lane] |= number(machine.shared.bytes(address, 2)) << (16 * half);
            }
            self.put(to, &values, active);
        }
        if machine.is_counted {
            machine.counts.shared.add(conflicts(&offsets, ROW, false));
        }
        Ok(())
    }
}
