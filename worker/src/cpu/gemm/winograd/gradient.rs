//! The weight gradient.
#![allow(unsafe_code)]

use super::super::Gemm;
use super::super::kernel::Kernel;
use super::super::tile::{Layout, Lines, MAX_MR, MAX_NR, Sums, Tile};
use super::transform::{Kind, POSITIONS, gradient, transform};
use super::{Filter, GAP, scatter};
use crate::cpu::Cpu;
use crate::cpu::pool::Shared;
use crate::cpu::values::{Pointer, with_format};

/// Tiles transformed before each multiplication: one block of depth.
const DEPTH: usize = 64;
/// Tiles transformed per task.
const TASK: usize = 16;

/// Floats per panel.
fn panel_len(width: usize) -> usize {
    DEPTH * width + GAP
}

/// Lengths of the parts of the scratch memory.
struct Lengths {
    /// Transformed input tiles: for each position, panels of `nr` channels with [`DEPTH`] steps
    /// each.
    inputs: usize,
    /// Transformed tiles of the output gradient, in panels of `mr` outputs.
    outputs: usize,
    /// For each position, `[outputs][channels]` sums over all tiles.
    sums: usize,
    /// A transformed tile; one buffer per thread.
    tile: usize,
}

impl Lengths {
    fn new(kernel: Kernel, filter: &Filter) -> Lengths {
        Lengths {
            inputs: POSITIONS * filter.channels.div_ceil(kernel.nr) * panel_len(kernel.nr),
            outputs: POSITIONS * filter.outputs.div_ceil(kernel.mr) * panel_len(kernel.mr),
            sums: POSITIONS * (filter.outputs * filter.channels + GAP),
            tile: POSITIONS * filter.channels.max(filter.outputs),
        }
    }
}

impl Filter {
    /// Scratch floats for [`Gemm::filter_gradient`].
    pub fn gradient_scratch_len(&self, cpu: &Cpu) -> usize {
        let lengths = Lengths::new(Kernel::of(cpu.isa), self);
        lengths.inputs + lengths.outputs + lengths.sums + cpu.pool.threads() * lengths.tile
    }
}

impl Gemm {
    /// `dw` = (or +=) the weight gradient, `[outputs][3][3][channels]`.
    ///
    /// # Safety
    /// Images and weights are valid for the filter, and [`Filter::is_faster`]; nothing else uses
    /// `dw`.
    ///
    /// # Panics
    /// If the scratch memory is too short.
    pub(in crate::cpu) unsafe fn filter_gradient(
        &self,
        filter: &Filter,
        dy: Pointer,
        x: Pointer,
        dw: &mut [f32],
        accumulate: bool,
        scratch: &mut [f32],
    ) {
        let (kernel, pool) = (self.kernel, &self.cpu.pool);
        let Kernel { mr, nr, isa, .. } = kernel;
        let (channels, outputs) = (filter.channels, filter.outputs);
        let lengths = Lengths::new(kernel, filter);
        let (inputs, rest) = scratch.split_at_mut(lengths.inputs);
        let (gradients, rest) = rest.split_at_mut(lengths.outputs);
        let (sums, rest) = rest.split_at_mut(lengths.sums);
        let buffers = Shared::new(&mut rest[..pool.threads() * lengths.tile]);
        let (inputs, gradients, sums) = (Shared::new(inputs), Shared::new(gradients), Shared::new(sums));
        for first in (0..filter.tiles()).step_by(DEPTH) {
            let tiles = DEPTH.min(filter.tiles() - first);
            pool.run(tiles.div_ceil(TASK), &|task, thread| {
                // SAFETY: a task has its thread's buffer, and its own steps of the panels.
                unsafe {
                    let buffer = buffers.piece(thread * lengths.tile..(thread + 1) * lengths.tile);
                    for step in task * TASK..tiles.min((task + 1) * TASK) {
                        let tile = first + step;
                        with_format!(x.format, T => {
                            let from: [*const T; 16] = filter.images(x).read(filter.window(tile), 4);
                            transform(isa, Kind::Input, &from, channels, buffer.as_mut_ptr(), channels);
                        });
                        let (panel, panels) = (panel_len(nr), channels.div_ceil(nr));
                        scatter(nr, buffer, channels, inputs.pointer(), panel, panels * panel, step);
                        with_format!(dy.format, T => {
                            let from: [*const T; 4] = filter.outputs(dy).read(filter.corner(tile), 2);
                            transform(isa, Kind::OutputGradient, &from, outputs, buffer.as_mut_ptr(), outputs);
                        });
                        let (panel, panels) = (panel_len(mr), outputs.div_ceil(mr));
                        scatter(mr, buffer, outputs, gradients.pointer(), panel, panels * panel, step);
                    }
                }
            });
            let down = outputs.div_ceil(mr);
            // A task is some rows of a position, few enough to keep all threads busy.
            let groups = (4 * pool.threads()).div_ceil(POSITIONS).min(down);
            let each = down.div_ceil(groups);
            pool.run(POSITIONS * groups, &|task, _| {
                let (position, group) = (task / groups, task % groups);
                for i in group * each..down.min((group + 1) * each) {
                    // SAFETY: each task has its own rows of the sums; the panels were written
                    // above.
                    unsafe {
                        let a = gradients.pointer().add((position * down + i) * panel_len(mr));
                        let b = inputs.pointer().add(position * channels.div_ceil(nr) * panel_len(nr));
                        let c = sums.pointer().add(position * (outputs * channels + GAP));
                        rows(kernel, filter, tiles, (a, b, c), i * mr, first > 0);
                    }
                }
            });
        }
        let dw = Shared::new(dw);
        pool.run(outputs, &|output, _| {
            // SAFETY: each task has the taps of its output.
            let to = unsafe { dw.piece(output * 9 * channels..(output + 1) * 9 * channels) };
            let from = sums.pointer().wrapping_add(output * channels);
            // SAFETY: the sums of all positions, and the taps of one output.
            unsafe { gradient(isa, from, outputs * channels + GAP, channels, to.as_mut_ptr(), accumulate) };
        });
    }
}

/// Computes some rows of a position's sums.
///
/// # Safety
/// The panels `a` and `b` have `steps` steps, `c` holds the position's sums, and nothing else uses
/// these rows.
unsafe fn rows(
    kernel: Kernel,
    filter: &Filter,
    steps: usize,
    (a, b, c): (*const f32, *const f32, *mut f32),
    row: usize,
    more: bool,
) {
    let (nr, channels) = (kernel.nr, filter.channels);
    let mut sums = Sums([0.0; MAX_MR * MAX_NR]);
    for column in (0..channels).step_by(nr) {
        let c = c.wrapping_add(column);
        let tile = Tile {
            c: Pointer::new(c.cast_const()),
            lines: Lines::Even(channels),
            row,
            rows: kernel.mr.min(filter.outputs - row),
            columns: nr.min(channels - column),
            bias: std::ptr::null(),
            partial: if more { c.wrapping_add(row * channels) } else { std::ptr::null_mut() },
            partial_stride: channels,
            addend: None,
        };
        // SAFETY: as promised by the caller.
        unsafe { kernel.run(Layout::Columns, steps, a, b.add(column / nr * panel_len(nr)), &tile, &mut sums) };
    }
}
