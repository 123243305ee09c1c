//! Matrix products by definition, with f32 accumulation. Column-major throughout, like cuBLASLt.

use crate::gpu::Gpu;
use crate::gpu::access::Access;
use crate::numbers::{Format, decoded, encoded};
use crate::shadow::Stamp;
use std::ops::Range;
use switchyard_cuda_reference::Touched;

/// A column-major matrix in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Layout {
    pub(crate) format: Format,
    pub(crate) rows: u64,
    pub(crate) columns: u64,
    /// Elements from one column to the next.
    pub(crate) pitch: u64,
}

impl Layout {
    fn column(&self, address: u64, index: u64) -> Range<u64> {
        let start = address + index * self.pitch * self.format.bytes();
        start..start + self.rows * self.format.bytes()
    }

    /// Byte ranges of the columns, merged where they are adjacent.
    fn columns(&self, address: u64) -> Vec<Range<u64>> {
        let Layout { rows, columns, pitch, .. } = *self;
        if pitch == rows {
            return Vec::from([self.whole(address)]);
        }
        (0..columns).map(|index| self.column(address, index)).collect()
    }

    pub(crate) fn whole(&self, address: u64) -> Range<u64> {
        address..self.column(address, self.columns - 1).end
    }
}

/// Elementwise activation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Function {
    None,
    Relu,
    /// tanh approximation.
    Gelu,
}

impl Function {
    fn of(self, x: f32) -> f32 {
        match self {
            Function::None => x,
            Function::Relu => x.max(0.0),
            Function::Gelu => {
                let inner = (2.0 / std::f32::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
                0.5 * x * (1.0 + inner.tanh())
            }
        }
    }
}

/// Epilogue of a product, applied before D is written.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Epilogue {
    /// One value per row of D.
    pub(crate) bias: (Layout, u64),
    pub(crate) function: Function,
    /// Receives the activation's argument.
    pub(crate) kept: Option<(Layout, u64)>,
}

/// `D = alpha op(A) op(B) + beta C`.
#[derive(Debug, Clone)]
pub(crate) struct Product {
    pub(crate) a: (Layout, u64),
    pub(crate) b: (Layout, u64),
    pub(crate) c: (Layout, u64),
    pub(crate) d: (Layout, u64),
    pub(crate) transposed: [bool; 2],
    pub(crate) alpha: f32,
    pub(crate) beta: f32,
    /// Factors are rounded to TF32.
    pub(crate) is_tf32: bool,
    /// Addresses of the scales of A and B.
    pub(crate) scales: [Option<u64>; 2],
    pub(crate) epilogue: Option<Epilogue>,
    pub(crate) workspace: Range<u64>,
}

impl Product {
    /// `is_wrong`: see [`crate::fault`].
    pub(crate) fn run(&self, gpu: &mut Gpu, stamp: &Stamp, is_wrong: bool) -> Vec<Touched> {
        let touched = self.access().touched(gpu, stamp);
        let [a, b] = [(self.a, self.transposed[0]), (self.b, !self.transposed[1])].map(|((layout, address), flip)| {
            let mut numbers = matrix(gpu, layout, address, stamp);
            if self.is_tf32 {
                numbers.iter_mut().flatten().for_each(|number| *number = tf32(*number));
            }
            if flip { transposed(&numbers) } else { numbers }
        });
        let scales = self.scales.into_iter().flatten().map(|address| scale(gpu, address, stamp));
        let alpha = self.alpha * scales.product::<f32>();
        let old = (self.beta != 0.0).then(|| matrix(gpu, self.c.0, self.c.1, stamp));
        let (layout, to) = self.d;
        let bias = self.epilogue.map(|after| matrix(gpu, after.bias.0, after.bias.1, stamp).remove(0));
        // `a` has a column of the result's height per term, `b` one value per column of the result.
        for column in 0..layout.columns as usize {
            let mut sums = vec![0.0f32; layout.rows as usize];
            for (a, b) in a.iter().zip(&b) {
                let factor = b[column];
                sums.iter_mut().zip(a).for_each(|(sum, a)| *sum += a * factor);
            }
            sums.iter_mut().for_each(|sum| *sum *= alpha);
            if let Some(old) = &old {
                sums.iter_mut().zip(&old[column]).for_each(|(sum, old)| *sum += self.beta * old);
            }
            if let (Some(Epilogue { function, kept, .. }), Some(bias)) = (self.epilogue, &bias) {
                sums.iter_mut().zip(bias).for_each(|(sum, bias)| *sum += bias);
                if let Some((layout, to)) = kept {
                    gpu.write(layout.column(to, column as u64).start, &encoded(layout.format, &sums));
                }
                sums.iter_mut().for_each(|sum| *sum = function.of(*sum));
            }
            if is_wrong && column == 0 {
                sums[0] += 1.0;
            }
            gpu.write(layout.column(to, column as u64).start, &encoded(layout.format, &sums));
        }
        touched
    }

    fn access(&self) -> Access {
        let of = |(layout, address): (Layout, u64)| layout.columns(address);
        let mut access = Access { reads: [of(self.a), of(self.b)].concat(), ..Access::default() };
        access.reads.extend(self.scales.into_iter().flatten().map(|address| address..address + 4));
        // C may be exactly D, but must not overlap it otherwise.
        if self.beta != 0.0 && self.c == self.d {
            access.updates = of(self.d);
        } else {
            access.writes = of(self.d);
            access.reads.extend((self.beta != 0.0).then(|| of(self.c)).into_iter().flatten());
        }
        access.writes.push(self.workspace.clone());
        if let Some(Epilogue { bias, kept, .. }) = self.epilogue {
            access.reads.extend(of(bias));
            access.writes.extend(kept.into_iter().flat_map(of));
        }
        access
    }
}

/// Reads the columns of a matrix, which must be initialised.
fn matrix(gpu: &Gpu, layout: Layout, address: u64, stamp: &Stamp) -> Vec<Vec<f32>> {
    let column = |index| decoded(layout.format, &gpu.read_written(&layout.column(address, index), stamp));
    (0..layout.columns).map(column).collect()
}

/// Reads an f32 value, which must be initialised.
fn scale(gpu: &Gpu, address: u64, stamp: &Stamp) -> f32 {
    let one = Layout { format: Format::F32, rows: 1, columns: 1, pitch: 1 };
    matrix(gpu, one, address, stamp)[0][0]
}

fn transposed(columns: &[Vec<f32>]) -> Vec<Vec<f32>> {
    let rows = columns.first().map_or(0, Vec::len);
    (0..rows).map(|row| columns.iter().map(|column| column[row]).collect()).collect()
}

/// Rounds to TF32 (10-bit fraction), ties away from zero, like CUDA's conversion.
pub(crate) fn tf32(number: f32) -> f32 {
    if !number.is_finite() { number } else { f32::from_bits(number.to_bits().wrapping_add(1 << 12) & !0x1fff) }
}

#[cfg(test)]
mod tests {
    use super::tf32;

    #[test]
    fn tf32_has_a_10_bit_fraction() {
        let step = 1.0 / 1024.0;
        assert_eq!(tf32(1.0 + step), 1.0 + step);
        assert_eq!(tf32(1.0 + step / 2.0), 1.0 + step);
        assert_eq!(tf32(-1.0 - step / 4.0), -1.0);
        assert!(tf32(f32::NAN).is_nan() && tf32(f32::INFINITY).is_infinite());
    }
}
