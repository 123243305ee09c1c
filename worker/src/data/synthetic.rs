//! Samples generated from the seed. They cost almost nothing, so training on them runs as fast as if input were free;
//! and they can be learned, so the loss of such a run falls.

use super::batch::Row;
use super::part::{Draw, Part, SampleError, Scratch, Spread};
use super::pictures::Images;
use super::random::{Random, mix};
use switchyard_worker_contract::config::ImageShape;

/// Numbers of a synthetic sample that is not an image.
pub(super) const FEATURES: u32 = 16;
/// Bands of an image.
const BANDS: usize = 64;
/// Noise is cut out of a sheet with this many bytes more than an image.
const NOISE: usize = 4096;

/// The class of a sample, and its random numbers.
fn class(seed: u64, sample: u64, classes: u32) -> (u32, Random) {
    let mut random = Random::new(mix(seed ^ mix(sample)));
    (random.below(classes.into()) as u32, random)
}

/// Images: each class has bands of its own brightness, with noise on top.
#[derive(Debug)]
pub(super) struct MadeImages {
    seed: u64,
    samples: u64,
    classes: u32,
    size: usize,
    /// Values 0 to 127, [`BANDS`] per class: the same for training and validation.
    bands: Vec<u8>,
    /// Values 0 to 127.
    noise: Vec<u8>,
}

impl MadeImages {
    pub(super) fn new(seed: u64, samples: u64, shape: ImageShape, classes: u32) -> Self {
        let size = shape.height as usize * shape.width as usize * shape.channels as usize;
        let halves = |key: u64, len: usize| {
            let mut random = Random::new(mix(key));
            (0..len).map(|_| (random.bits() >> 57) as u8).collect::<Vec<u8>>()
        };
        let bands = halves(0, BANDS * classes as usize);
        MadeImages { seed: mix(seed), samples, classes, size, bands, noise: halves(1, size + NOISE) }
    }
}

impl Images for MadeImages {
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

/// Features: each class has its own mean.
#[derive(Debug)]
pub(super) struct MadeFeatures {
    pub seed: u64,
    pub samples: u64,
    pub classes: u32,
}

impl Part for MadeFeatures {
    fn spread(&self) -> Spread {
        Spread { samples: self.samples, slack: 0 }
    }

    fn write(&self, draw: &Draw, row: &mut Row<'_>, _: &mut Scratch) -> Result<(), SampleError> {
        let (class, mut random) = class(mix(self.seed), draw.sample, self.classes);
        // Uniform in -1 to 1, in as many steps as an f32 has.
        let unit = |bits: u64| (bits >> 40) as f32 / (1 << 23) as f32 - 1.0;
        for (feature, value) in (0..).zip(&mut *row.values) {
            // The means do not depend on the seed, so validation has those of training.
            *value = unit(mix(u64::from(class) << 32 | feature)) + unit(random.bits());
        }
        row.targets[0] = class;
        Ok(())
    }

    fn memory_bytes(&self) -> u64 {
        0
    }
}
