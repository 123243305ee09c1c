//! In-memory samples: images (bytes) or features (floats) with their classes.

use super::batch::Row;
use super::error::DataError;
use super::images::Images;
use super::part::{Draw, EpochSize, Part, SampleError, Scratch};
use super::scale::{Size, to_square};
use super::split::{self, Block};
use bytemuck::Pod;
use switchyard_worker_contract::config::ImageShape;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// Exclusive upper bound of classes: a label in a file can be any integer, and each class is a row
/// of the model's last layer.
pub(super) const MAX_CLASSES: u32 = 1 << 16;

#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Rows<T> {
    /// Elements per sample.
    pub each: usize,
    /// The concatenated samples.
    pub data: Vec<T>,
    /// The class of each sample.
    pub labels: Vec<u32>,
}

impl<T: Pod> Rows<T> {
    pub(super) fn len(&self) -> usize {
        self.labels.len()
    }

    fn sample(&self, sample: u64) -> &[T] {
        &self.data[sample as usize * self.each..][..self.each]
    }

    /// Splits by a hash of the content, regardless of class, so that duplicates of a sample are in
    /// the same split. With a fraction of 0, all samples are for training.
    pub(super) fn divide(mut self, fraction: f64) -> Result<(Rows<T>, Option<Rows<T>>), DataError> {
        if fraction <= 0.0 {
            return Ok((self, None));
        }
        let hash = |sample| xxh3_64(bytemuck::cast_slice(self.sample(sample as u64)));
        let block = |sample| Block { range: sample..sample + 1, hash: hash(sample), validation: false };
        let mut blocks: Vec<Block> = (0..self.len()).map(block).collect();
        split::choose(&mut blocks, fraction);
        if split::balance(&mut blocks, 1).is_none() {
            let (got, sample) = (self.len() as u64, "a sample".to_owned());
            return Err(DataError::NoRoomForValidation { got, item: "samples", sample });
        }
        let mut validation = Rows { each: self.each, data: Vec::new(), labels: Vec::new() };
        let mut kept = 0;
        for (place, block) in blocks.iter().enumerate() {
            let range = place * self.each..(place + 1) * self.each;
            if block.validation {
                validation.data.extend_from_slice(&self.data[range]);
                validation.labels.push(self.labels[place]);
            } else {
                self.data.copy_within(range, kept * self.each);
                self.labels[kept] = self.labels[place];
                kept += 1;
            }
        }
        self.data.truncate(kept * self.each);
        self.labels.truncate(kept);
        self.data.shrink_to_fit();
        Ok((self, Some(validation)))
    }

    /// Hashes all samples and labels.
    pub(super) fn digest(&self, hash: &mut Xxh3) {
        for size in [self.len(), self.each] {
            hash.update(&(size as u64).to_le_bytes());
        }
        hash.update(bytemuck::cast_slice(&self.data));
        hash.update(bytemuck::cast_slice(&self.labels));
    }

    fn memory(&self) -> u64 {
        (size_of::<T>() * self.data.capacity() + 4 * self.labels.capacity()) as u64
    }
}

impl Rows<u8> {
    /// Scales all images of this shape to squares of size `side`; 0 leaves them unchanged.
    pub(super) fn scaled(self, shape: ImageShape, side: u32) -> (Rows<u8>, ImageShape) {
        if side == 0 || (shape.height, shape.width) == (side, side) {
            return (self, shape);
        }
        let [height, width, channels] = [shape.height, shape.width, shape.channels].map(|number| number as usize);
        let each = side as usize * side as usize * channels;
        let mut data = vec![0; self.len() * each];
        let mut scratch = Vec::new();
        for (image, scaled) in self.data.chunks_exact(self.each).zip(data.chunks_exact_mut(each)) {
            to_square(image, Size { height, width, channels }, side as usize, &mut scratch, scaled);
        }
        (Rows { each, data, labels: self.labels }, ImageShape { height: side, width: side, ..shape })
    }
}

impl Images for Rows<u8> {
    fn len(&self) -> u64 {
        self.labels.len() as u64
    }

    fn image<'a>(&'a self, sample: u64, _: &'a mut Scratch) -> Result<(&'a [u8], u32), SampleError> {
        Ok((self.sample(sample), self.labels[sample as usize]))
    }

    fn memory_bytes(&self) -> u64 {
        self.memory()
    }
}

impl Part for Rows<f32> {
    fn epoch_size(&self) -> EpochSize {
        EpochSize { samples: self.labels.len() as u64, slack: 0 }
    }

    fn write(&self, draw: &Draw, row: &mut Row<'_>, _: &mut Scratch) -> Result<(), SampleError> {
        row.values.copy_from_slice(self.sample(draw.sample));
        row.targets[0] = self.labels[draw.sample as usize];
        Ok(())
    }

    fn memory_bytes(&self) -> u64 {
        self.memory()
    }
}
