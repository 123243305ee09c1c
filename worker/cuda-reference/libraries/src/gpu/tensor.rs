//! Four-dimensional strided tensors.

use crate::gpu::Gpu;
use crate::numbers::{Format, decoded, encoded};
use crate::shadow::Stamp;
use std::ops::Range;

/// Where the elements are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    Device,
    /// A scalar in host memory.
    Host,
    /// Intermediate result of a graph, never in memory.
    Between,
}

/// A tensor with sizes and strides in elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tensor {
    pub(crate) id: i64,
    pub(crate) format: Format,
    /// Alignment of its address.
    pub(crate) alignment: u64,
    pub(crate) dimensions: [u64; 4],
    pub(crate) strides: [u64; 4],
    pub(crate) place: Place,
}

impl Tensor {
    /// Number of elements.
    pub(crate) fn len(&self) -> usize {
        self.dimensions.iter().product::<u64>() as usize
    }

    /// Axes from the longest stride to the shortest.
    fn order(&self) -> [usize; 4] {
        let mut order = [0, 1, 2, 3];
        order.sort_by_key(|axis| std::cmp::Reverse(self.strides[*axis]));
        order
    }

    /// Contiguous byte ranges in memory order, merged where they are adjacent.
    pub(crate) fn ranges(&self, address: u64) -> Vec<Range<u64>> {
        let order = self.order();
        let (lengths, strides) = (order.map(|axis| self.dimensions[axis]), order.map(|axis| self.strides[axis]));
        let size = self.format.bytes();
        let mut ranges: Vec<Range<u64>> = Vec::new();
        let mut put = |start: u64, count: u64| {
            let start = address + size * start;
            match ranges.last_mut().filter(|last| last.end == start) {
                Some(last) => last.end = start + size * count,
                None => ranges.push(start..start + size * count),
            }
        };
        for (a, b) in (0..lengths[0]).flat_map(|a| (0..lengths[1]).map(move |b| (a, b))) {
            for c in 0..lengths[2] {
                let start = a * strides[0] + b * strides[1] + c * strides[2];
                match strides[3] {
                    1 => put(start, lengths[3]),
                    stride => (0..lengths[3]).for_each(|d| put(start + d * stride, 1)),
                }
            }
        }
        ranges
    }

    /// From the first to past the last byte.
    pub(crate) fn whole(&self, address: u64) -> Range<u64> {
        let ranges = self.ranges(address);
        address..ranges.last().map_or(address, |last| last.end)
    }

    /// Reads all elements in memory order, without gaps. They must be initialised.
    pub(crate) fn read(&self, gpu: &Gpu, address: u64, stamp: &Stamp) -> Vec<f32> {
        let range = |range: Range<u64>| decoded(self.format, &gpu.read_written(&range, stamp));
        self.ranges(address).into_iter().flat_map(range).collect()
    }

    /// Writes all elements in memory order.
    pub(crate) fn write(&self, gpu: &mut Gpu, address: u64, numbers: &[f32]) {
        let mut rest = numbers;
        for range in self.ranges(address) {
            let (own, others) = rest.split_at(((range.end - range.start) / self.format.bytes()) as usize);
            gpu.write(range.start, &encoded(self.format, own));
            rest = others;
        }
    }

    /// For each element in memory order, its index in axis order.
    pub(crate) fn places(&self) -> Vec<usize> {
        let order = self.order();
        let mut steps = [1; 4];
        (0..3).rev().for_each(|axis| steps[axis] = steps[axis + 1] * self.dimensions[axis + 1] as usize);
        let mut places = vec![0];
        for axis in order {
            let along = |place: usize| (0..self.dimensions[axis] as usize).map(move |at| place + at * steps[axis]);
            places = places.into_iter().flat_map(along).collect();
        }
        places
    }

    /// Rounds to the tensor's format.
    pub(crate) fn rounded(&self, numbers: Vec<f32>) -> Vec<f32> {
        match self.format {
            Format::F32 => numbers,
            format => decoded(format, &encoded(format, &numbers)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_addressed_by_strides() {
        // Two rows of three elements, using every second element, in column-major order.
        let tensor = Tensor {
            id: 1,
            format: Format::Bf16,
            alignment: 2,
            dimensions: [1, 1, 3, 2],
            strides: [12, 12, 2, 6],
            place: Place::Device,
        };
        assert_eq!(tensor.ranges(100), [100..102, 104..106, 108..110, 112..114, 116..118, 120..122]);
        assert_eq!(tensor.places(), [0, 2, 4, 1, 3, 5]);
    }
}
