//! The flat parameter arrays, and their division into buckets.
//!
//! Weights, gradients and optimizer moments share the [`Layout`], so a gradient bucket is a range
//! of it.

use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Alignment of offsets in floats: a cache line.
const ALIGNMENT: usize = 16;

/// Initial value of a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum Initial {
    /// Normal distribution around 0 with this standard deviation.
    Normal(f32),
    /// Uniform distribution between minus and plus this value.
    Uniform(f32),
    /// The same value everywhere.
    Constant(f32),
}

/// Kind of parameter, which decides whether weight decay applies, and with mixed precision in which
/// format layers read it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Role {
    /// GEMM weights: linear layers and convolutions.
    Matrix,
    /// A table that is read row by row.
    Embedding,
    /// Biases, and the scales and shifts of norms: in f32.
    Vector,
}

/// A trainable tensor and its position in the flat arrays.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ParameterSlot {
    /// Name in checkpoints: the PyTorch model's name, if there is one.
    pub name: String,
    /// Row-major shape; linear layers are `[outputs, inputs]` as in PyTorch.
    pub shape: Vec<usize>,
    /// Index of its first element in the flat arrays.
    pub offset: usize,
    pub len: usize,
    pub role: Role,
    pub initial: Initial,
    /// Gradients that are final when backward first writes this one: several layers can add to it.
    pub written_after: usize,
    /// Axis order in other frameworks, if different: `[0, 3, 1, 2]` for convolutions.
    pub export_axes: Option<Vec<usize>>,
    /// Names in other frameworks, if different; several names refer to equal parts of the first
    /// axis.
    pub export_names: Vec<String>,
}

impl ParameterSlot {
    /// Range in the flat arrays.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.len
    }
}

/// All parameters, in the order in which backward completes their gradients. Every offset is a
/// multiple of 16 floats; the gaps between parameters are zero.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Layout {
    /// A parameter's ordinal is its index here.
    pub parameters: Vec<ParameterSlot>,
    /// Length of the flat arrays.
    pub len: usize,
}

impl Layout {
    /// Appends a parameter and returns its ordinal.
    pub fn push(&mut self, name: String, shape: &[usize], role: Role, initial: Initial) -> usize {
        let len = shape.iter().product();
        self.parameters.push(ParameterSlot {
            name,
            shape: shape.to_vec(),
            offset: self.len,
            len,
            role,
            initial,
            written_after: self.parameters.len(),
            export_axes: None,
            export_names: Vec::new(),
        });
        self.len = (self.len + len).next_multiple_of(ALIGNMENT);
        self.parameters.len() - 1
    }

    /// A parameter's elements in a flat array.
    pub fn of<'a>(&self, ordinal: usize, flat: &'a [f32]) -> &'a [f32] {
        &flat[self.parameters[ordinal].range()]
    }

    /// Number of trainable values, without gaps.
    pub fn trainable(&self) -> usize {
        self.parameters.iter().map(|p| p.len).sum()
    }
}

/// The smallest range of the flat gradient array that is reduced separately. An all-reduce covers
/// one or more consecutive buckets; sums and norms are computed per bucket, so they do not depend
/// on how many.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bucket {
    /// Floats, including gaps; together the buckets cover the whole array.
    pub range: Range<usize>,
    /// Ordinal of its first parameter.
    pub first: usize,
    /// Ordinal of its last parameter: the bucket is complete once this gradient is final.
    pub last: usize,
}

/// Cuts the layout into contiguous buckets of at most `bucket_bytes`. A parameter is never split: a
/// larger one gets its own bucket.
pub fn fuse(layout: &Layout, bucket_bytes: usize) -> Vec<Bucket> {
    let limit = bucket_bytes / size_of::<f32>();
    let mut buckets: Vec<Bucket> = Vec::new();
    for (ordinal, parameter) in layout.parameters.iter().enumerate() {
        let end = layout.parameters.get(ordinal + 1).map_or(layout.len, |next| next.offset);
        match buckets.last_mut() {
            Some(bucket) if end - bucket.range.start <= limit => {
                bucket.range.end = end;
                bucket.last = ordinal;
            }
            _ => buckets.push(Bucket { range: parameter.offset..end, first: ordinal, last: ordinal }),
        }
    }
    buckets
}

/// Receives gradients during backward.
pub trait GradientSink {
    /// Whether to add to the contents (a later micro-batch of a merged batch) instead of
    /// overwriting them.
    fn accumulate(&self) -> bool;
    /// Memory for the gradient of a parameter, exactly `len` floats.
    fn gradient(&mut self, ordinal: usize) -> &mut [f32];
    /// The gradients of two parameters at once; `a` precedes `b`.
    fn gradients2(&mut self, a: usize, b: usize) -> (&mut [f32], &mut [f32]);
    /// Marks a parameter's gradient as final for this micro-batch. Called exactly once per
    /// parameter and backward pass, in layout order.
    fn finished(&mut self, ordinal: usize);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(lens: &[usize]) -> Layout {
        let mut layout = Layout::default();
        for (i, &len) in lens.iter().enumerate() {
            layout.push(format!("p{i}"), &[len], Role::Matrix, Initial::Constant(0.0));
        }
        layout
    }

    #[test]
    fn buckets_tile_the_layout_and_split_nothing() {
        let layout = layout(&[5, 100, 16, 1, 300, 7, 7, 7]);
        assert!(layout.parameters.iter().all(|p| p.offset.is_multiple_of(16)));
        for bytes in [1, 64, 128, 512, 1 << 20] {
            let buckets = fuse(&layout, bytes);
            let mut at = 0;
            let mut next = 0;
            for bucket in &buckets {
                assert_eq!((bucket.range.start, bucket.first), (at, next));
                assert!(bucket.range.len() * 4 <= bytes || bucket.first == bucket.last);
                at = bucket.range.end;
                next = bucket.last + 1;
            }
            assert_eq!((at, next), (layout.len, layout.parameters.len()));
        }
        assert_eq!(fuse(&layout, 1 << 20).len(), 1);
        assert_eq!(fuse(&layout, 1).len(), 8);
    }
}
