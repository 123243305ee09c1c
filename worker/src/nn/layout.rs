//! Where parameters lie in the flat arrays, and how the arrays are cut into buckets.
//!
//! Weights, gradients and optimizer moments share the [`Layout`], so that a fused bucket of gradients is a range of it.

use std::ops::Range;

/// Offsets are multiples of this many floats: a cache line.
const ALIGNMENT: usize = 16;

/// Value of a parameter before training.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Initial {
    /// Normally distributed around 0 with this standard deviation.
    Normal(f32),
    /// Uniformly distributed between minus this number and this number.
    Uniform(f32),
    /// The same number everywhere.
    Constant(f32),
}

/// What a parameter is used for; weight decay depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// Weights of a product: linear layers and convolutions.
    Matrix,
    /// A table that is read row by row.
    Embedding,
    /// Biases, scales and shifts of norms.
    Vector,
}

/// A trainable tensor and its place in the flat arrays.
#[derive(Debug, Clone, PartialEq)]
pub struct ParameterSlot {
    /// Name in checkpoints: that of PyTorch's model, if there is one.
    pub name: String,
    /// Row-major shape; linear layers are `[outputs, inputs]` as in PyTorch.
    pub shape: Vec<usize>,
    /// Index of its first float in the flat arrays.
    pub offset: usize,
    pub len: usize,
    pub role: Role,
    pub initial: Initial,
    /// Order of the axes in other frameworks, if it differs: `[0, 3, 1, 2]` for convolutions.
    pub export_axes: Option<Vec<usize>>,
    /// Names in other frameworks, if they differ; several have equal parts of the first axis.
    pub export_names: Vec<String>,
}

impl ParameterSlot {
    /// Range in the flat arrays.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.len
    }
}

/// All parameters, in the order in which backward finishes their gradients. Every offset is a multiple of 16 floats; the
/// gaps between parameters hold zeros.
#[derive(Debug, Clone, PartialEq, Default)]
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
            export_axes: None,
            export_names: Vec::new(),
        });
        self.len = (self.len + len).next_multiple_of(ALIGNMENT);
        self.parameters.len() - 1
    }

    /// The floats of a parameter in a flat array.
    pub fn of<'a>(&self, ordinal: usize, flat: &'a [f32]) -> &'a [f32] {
        &flat[self.parameters[ordinal].range()]
    }

    /// Trainable numbers, without gaps.
    pub fn trainable(&self) -> usize {
        self.parameters.iter().map(|p| p.len).sum()
    }
}

/// The smallest range of the flat gradient array that is reduced by itself. An all-reduce takes one or several in a row;
/// sums and norms are those of each bucket, so they do not depend on how many.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bucket {
    /// Floats, including gaps; together the buckets cover the whole array.
    pub range: Range<usize>,
    /// Ordinal of its first parameter.
    pub first: usize,
    /// Ordinal of its last parameter: the bucket is complete once this gradient is final.
    pub last: usize,
}

/// Cuts the layout into contiguous buckets of at most `bucket_bytes`. A parameter is never split: a larger one gets its
/// own bucket.
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

/// Where backward puts gradients.
pub trait GradientSink {
    /// True: add to the contents (a later micro-batch of a merged batch). False: overwrite them.
    fn accumulate(&self) -> bool;
    /// Memory for the gradient of a parameter, exactly `len` floats.
    fn gradient(&mut self, ordinal: usize) -> &mut [f32];
    /// The same for two parameters at once; `a` comes before `b`.
    fn gradients2(&mut self, a: usize, b: usize) -> (&mut [f32], &mut [f32]);
    /// The gradient of this parameter is final for this micro-batch. Called exactly once per parameter and backward pass,
    /// in the order of the layout.
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
