//! Packs the windows of a convolution as columns of B, for the weight gradient.
#![allow(unsafe_code)]

use super::operand::{Patches, Pixel, Run};
use super::panel::columns;
use crate::cpu::{Element, Isa};

/// Elements `first..first + len` of one row of taps, in all windows.
#[derive(Clone, Copy)]
pub(super) struct Windows<'a> {
    pub patches: &'a Patches,
    pub tap: usize,
    pub first: usize,
    pub len: usize,
}

impl Windows<'_> {
    /// The runs of the pixels from `pixel` on.
    fn walk<T: Element>(self, mut pixel: Pixel) -> impl FnMut() -> Run<T> {
        let Windows { patches, tap, first, len } = self;
        let patches = *patches;
        let mut row = patches.row::<T>(pixel, tap);
        move || {
            let run = patches.run(row, pixel).part(first, first + len);
            if patches.advance(&mut pixel) {
                row = patches.row::<T>(pixel, tap);
            }
            run
        }
    }
}

/// Packs columns of windows: `steps` pixels from `step` on.
///
/// # Safety
/// See [`super::pack::pack_b`]; the panel starts at the first of the columns.
pub(super) unsafe fn window_columns<T: Element, const PAIRS: bool>(
    isa: Isa,
    width: usize,
    windows: Windows<'_>,
    step: usize,
    steps: usize,
    panel: *mut f32,
) {
    let Windows { patches, tap, first, len } = windows;
    let pixel = patches.pixel(step);
    #[cfg(target_arch = "x86_64")]
    if isa == Isa::Avx512 && !PAIRS {
        // Walk the grid line by line: within the image the columns form a strided matrix.
        let (mut pixel, mut done) = (pixel, 0);
        while done < steps {
            let end = patches.columns.min(pixel.x + steps - done);
            let row = patches.row::<T>(pixel, tap);
            let inside = if row.is_some() { patches.inside(first, len) } else { end..end };
            let from = inside.start.clamp(pixel.x, end);
            let to = inside.end.clamp(from, end);
            for (range, whole) in [(pixel.x..from, false), (from..to, true), (to..end, false)] {
                if range.is_empty() {
                    continue;
                }
                pixel.x = range.start;
                let panel = panel.wrapping_add(done * width);
                // SAFETY: as promised by the caller; kernels only use an ISA that the CPU supports.
                unsafe {
                    if whole {
                        let start = patches.run(row, pixel).start.wrapping_add(first);
                        let depth = patches.stride * patches.channels;
                        super::pack_avx512::strided::<T, PAIRS>(width, len, len, range.len(), start, depth, panel);
                    } else {
                        columns::<T, PAIRS>(isa, width, len, range.len(), windows.walk(pixel), panel);
                    }
                }
                done += range.len();
            }
            pixel.x = end - 1;
            patches.advance(&mut pixel);
        }
        return;
    }
    // SAFETY: as promised by the caller.
    unsafe { columns::<T, PAIRS>(isa, width, len, steps, windows.walk(pixel), panel) };
}
