//! The F(2 x 2, 3 x 3) transforms, one vector of channels at a time.
//!
//! ```text
//! B^T = 1  0 -1  0    G = 1    0   0     A^T = 1 1  1  0
//!       0  1  1  0        1/2  1/2 1/2         0 1 -1 -1
//!       0 -1  1  0        1/2 -1/2 1/2
//!       0  1  0 -1        0    0   1
//! ```
#![allow(unsafe_code)]

use super::lanes::Lanes;
use crate::cpu::{Element, Isa};
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{__m256, __m512};

/// Channel counts are multiples of this value, the widest vector.
pub(super) const WIDE: usize = 16;
/// Positions of a transformed tile, 4 x 4.
pub(super) const POSITIONS: usize = 16;

/// Which transform to apply.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// 4 x 4 input pixels: B^T d B.
    Input,
    /// 3 x 3 weights: G g G^T.
    Weights,
    /// 2 x 2 output-gradient pixels: A y A^T.
    OutputGradient,
}

/// `B^T d` in one direction.
///
/// # Safety
/// The CPU has the instructions. The same holds for all functions below.
#[inline(always)]
unsafe fn input<L: Lanes>(d: [L; 4]) -> [L; 4] {
    // SAFETY: as promised by the caller.
    unsafe { [d[0].sub(d[2]), d[1].add(d[2]), d[2].sub(d[1]), d[1].sub(d[3])] }
}

/// A^T m in one direction.
#[inline(always)]
unsafe fn output<L: Lanes>(m: [L; 4]) -> [L; 2] {
    // SAFETY: as promised by the caller.
    unsafe { [m[0].add(m[1].add(m[2])), m[1].sub(m[2]).sub(m[3])] }
}

/// G g in one direction.
#[inline(always)]
unsafe fn weights<L: Lanes>(g: [L; 3]) -> [L; 4] {
    // SAFETY: as promised by the caller.
    unsafe {
        let (outer, middle) = (g[0].add(g[2]).half(), g[1].half());
        [g[0], outer.add(middle), outer.sub(middle), g[2]]
    }
}

/// A y in one direction: the transpose of [`output`].
#[inline(always)]
unsafe fn output_transposed<L: Lanes>(y: [L; 2]) -> [L; 4] {
    // SAFETY: as promised by the caller.
    unsafe { [y[0], y[0].add(y[1]), y[0].sub(y[1]), L::zero().sub(y[1])] }
}

/// G^T s in one direction: the transpose of [`weights`].
#[inline(always)]
unsafe fn weights_transposed<L: Lanes>(s: [L; 4]) -> [L; 3] {
    // SAFETY: as promised by the caller.
    unsafe { [s[0].add(s[1].add(s[2]).half()), s[1].sub(s[2]).half(), s[1].add(s[2]).half().add(s[3])] }
}

/// Applies a step in both directions of an N x N square; `at` loads an element, `to` consumes one
/// of the M x M results.
macro_rules! both {
    ($lanes:ident, $step:ident, $n:literal, $m:literal, |$i:ident| $at:expr, |$j:ident, $value:ident| $to:expr) => {{
        let mut half = [[$lanes::zero(); $n]; $m];
        for x in 0..$n {
            let mut column = [$lanes::zero(); $n];
            for y in 0..$n {
                let $i = $n * y + x;
                column[y] = $at;
            }
            let column = $step(column);
            for y in 0..$m {
                half[y][x] = column[y];
            }
        }
        for y in 0..$m {
            let row = $step(half[y]);
            for x in 0..$m {
                let ($j, $value) = ($m * y + x, row[x]);
                $to;
            }
        }
    }};
}

/// Defines `unsafe fn NAME(isa, arguments)`: BODY with the vectors of the instruction set, which
/// the CPU must support.
macro_rules! per_lanes {
    ($(#[$meta:meta])* fn $name:ident $(<$generic:ident>)? = $body:ident($($arg:ident: $type:ty),* $(,)?)) => {
        $(#[$meta])*
        pub(super) unsafe fn $name$(<$generic: Element>)?(isa: Isa, $($arg: $type),*) {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
                unsafe fn avx512$(<$generic: Element>)?($($arg: $type),*) {
                    // SAFETY: as promised by the caller.
                    unsafe { $body::<$($generic,)? __m512>($($arg),*) }
                }
                #[target_feature(enable = "avx2,fma")]
                unsafe fn avx2$(<$generic: Element>)?($($arg: $type),*) {
                    // SAFETY: as promised by the caller.
                    unsafe { $body::<$($generic,)? __m256>($($arg),*) }
                }
                match isa {
                    // SAFETY: as promised by the caller.
                    Isa::Avx512 => return unsafe { avx512($($arg),*) },
                    // SAFETY: as promised by the caller.
                    Isa::Avx2 => return unsafe { avx2($($arg),*) },
                    Isa::Portable => {}
                }
            }
            let _ = isa;
            // SAFETY: as promised by the caller.
            unsafe { $body::<$($generic,)? f32>($($arg),*) }
        }
    };
}

/// # Safety
/// See [`transform`].
#[inline(always)]
unsafe fn transform_body<E: Element, L: Lanes>(
    kind: Kind,
    from: &[*const E],
    channels: usize,
    to: *mut f32,
    apart: usize,
) {
    for first in (0..channels).step_by(L::WIDE) {
        // SAFETY: as promised by the caller.
        unsafe {
            let to = to.add(first);
            match kind {
                Kind::Input => {
                    both!(L, input, 4, 4, |i| L::load(from[i].add(first)), |j, value| value.store(to.add(j * apart)));
                }
                Kind::Weights => {
                    both!(L, weights, 3, 4, |i| L::load(from[i].add(first)), |j, value| value.store(to.add(j * apart)));
                }
                Kind::OutputGradient => {
                    both!(L, output_transposed, 2, 4, |i| L::load(from[i].add(first)), |j, value| value
                        .store(to.add(j * apart)));
                }
            }
        }
    }
}

per_lanes! {
    /// Transforms `channels` values (a multiple of [`WIDE`]) of a square whose elements are at
    /// `from`, row after row. Writes position `p` of the result to `to + p * apart`.
    ///
    /// # Safety
    /// The CPU has the instructions of `isa`; all addresses are valid, and nothing else uses those
    /// that are written.
    fn transform<E> = transform_body(kind: Kind, from: &[*const E], channels: usize, to: *mut f32, apart: usize)
}

/// # Safety
/// See [`pixels`].
#[inline(always)]
unsafe fn pixels_body<E: Element, L: Lanes>(
    from: *const f32,
    apart: usize,
    channels: usize,
    to: &[*mut E; 4],
    accumulate: bool,
) {
    for first in (0..channels).step_by(L::WIDE) {
        // SAFETY: as promised by the caller.
        unsafe {
            let from = from.add(first);
            both!(L, output, 4, 2, |i| L::load(from.add(i * apart)), |j, value| if !to[j].is_null() {
                let to = to[j].add(first);
                if accumulate { value.add(L::load(to.cast_const())) } else { value }.store(to);
            });
        }
    }
}

per_lanes! {
    /// Computes the 2 x 2 pixels of a tile from the products of its positions, which are `apart`
    /// floats apart; pixels with a null address are skipped.
    ///
    /// # Safety
    /// See [`transform`].
    fn pixels<E> = pixels_body(from: *const f32, apart: usize, channels: usize, to: &[*mut E; 4], accumulate: bool)
}

/// # Safety
/// See [`gradient`].
#[inline(always)]
unsafe fn gradient_body<L: Lanes>(from: *const f32, apart: usize, channels: usize, to: *mut f32, accumulate: bool) {
    for first in (0..channels).step_by(L::WIDE) {
        // SAFETY: as promised by the caller.
        unsafe {
            let from = from.add(first);
            both!(L, weights_transposed, 4, 3, |i| L::load(from.add(i * apart)), |j, value| {
                let to = to.add(j * channels + first);
                if accumulate { value.add(L::load(to.cast_const())) } else { value }.store(to);
            });
        }
    }
}

per_lanes! {
    /// Computes the gradient of the 3 x 3 taps of one output, `channels` values each, from the sums
    /// over all tiles of its positions, which are `apart` floats apart.
    ///
    /// # Safety
    /// See [`transform`].
    fn gradient = gradient_body(from: *const f32, apart: usize, channels: usize, to: *mut f32, accumulate: bool)
}
