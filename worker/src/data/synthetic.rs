//! Synthetic samples generated from the seed. They cost almost nothing, so training on them shows
//! the speed with free input; and they are learnable, so the loss falls.

use super::batch::Row;
use super::images::Images;
use super::part::{Draw, EpochSize, Part, SampleError, Scratch};
use super::random::{Random, mix};
use switchyard_worker_contract::config::ImageShape;

/// Width of a synthetic sample that is not an image.
pub(super) const FEATURES: u32 = 16;
/// Bands per image.
const BANDS: usize = 64;
/// Noise is cut from a buffer that is this many bytes larger than an image.
const NOISE: usize = 4096;

/// The class of a sample, and its random numbers.
fn class(seed: u64, sample: u64, classes: u32) -> (u32, Random) {
    let mut random = Random::new(mix(seed ^ mix(sample)));
    (random.below(classes.into()) as u32, random)
}

/// Images: each class has bands of characteristic brightness, with noise on top.
#[derive(Debug)]
pub(super) struct SyntheticImages {
    seed: u64,
    samples: u64,
    classes: u32,
    size: usize,
    /// Values 0 to 127, [`BANDS`] per class; shared by training and validation.
    bands: Vec<u8>,
    /// Values 0 to 127.
    noise: Vec<u8>,
}

impl SyntheticImages {
    pub(super) fn new(seed: u64, samples: u64, shape: ImageShape, classes: u32) -> Self {
        let size = shape.height as usize * shape.width as usize * shape.channels as usize;
        let halves = |key: u64, len: usize| {
            let mut random = Random::new(mix(key));
            (0..len).map(|_| (random.bits() >> 57) as u8).collect::<Vec<u8>>()
        };
        let bands = halves(0, BANDS * classes as usize);
        SyntheticImages { seed: mix(seed), samples, classes, size, bands, noise: halves(1, size + NOISE) }
    }
}

impl Images for SyntheticImages {
    fn len(&self) -> u64 {
        self.samples
    }

    fn image<'a>(&'a self, sample: u64, scratch: &'a mut Scratch) -> Result<(&'a [u8], u32), SampleError> {
        let (class, mut random) = class(self.seed, sample, self.classes);
        let bands = &self.bands[class as usize * BANDS..][..BANDS];
        let noise = &self.noise[random.below(NOISE as u64) as usize..][..self.size];
        scratch.pixels.resize(self.size, 0);
        let each = self.size.div_ceil(BANDS);
        for ((pixels, noise), band) in scratch.pixels.chunks_mut(each).zip(noise.chunks(each)).zip(bands) {
            for (pixel, noise) in pixels.iter_mut().zip(noise) {
                *pixel = band + noise;
            }
        }
        Ok((&scratch.pixels, class))
    }

    fn memory_bytes(&self) -> u64 {
        (self.bands.capacity() + self.noise.capacity()) as u64
    }
}

/// Features: each class has a characteristic mean.
#[derive(Debug)]
pub(super) struct SyntheticFeatures {
    pub seed: u64,
    pub samples: u64,
    pub classes: u32,
}

impl Part for SyntheticFeatures {
    fn epoch_size(&self) -> EpochSize {
        EpochSize { samples: self.samples, slack: 0 }
    }

    fn write(&self, draw: &Draw, row: &mut Row<'_>, _: &mut Scratch) -> Result<(), SampleError> {
        let (class, mut random) = class(mix(self.seed), draw.sample, self.classes);
        // Uniform in -1..1, at f32 resolution.
        let unit = |bits: u64| (bits >> 40) as f32 / (1 << 23) as f32 - 1.0;
        for (feature, value) in (0..).zip(&mut *row.values) {
            // The means do not depend on the seed, so training and validation share them.
            *value = unit(mix(u64::from(class) << 32 | feature)) + unit(random.bits());
        }
        row.targets[0] = class;
        Ok(())
    }

    fn memory_bytes(&self) -> u64 {
        0
    }
}
