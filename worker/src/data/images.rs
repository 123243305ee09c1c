//! Image samples: augmented for training, as bytes or as normalised floats.

use super::batch::Row;
use super::error::DataError;
use super::part::{Draw, EpochSize, Part, SampleError, Scratch};
use super::random::Random;
use switchyard_worker_contract::config::{self, ImageShape, SampleType};

/// Maximum zero padding on each side, in pixels.
const MAX_PADDING: u32 = 1024;

/// A source of images of equal size: rows of pixels with interleaved channels.
pub(super) trait Images: std::fmt::Debug + Send + Sync {
    fn len(&self) -> u64;

    fn image<'a>(&'a self, sample: u64, scratch: &'a mut Scratch) -> Result<(&'a [u8], u32), SampleError>;

    fn memory_bytes(&self) -> u64;
}

/// Per-channel mean and standard deviation of x / 255.
#[derive(Debug, Clone, PartialEq)]
pub struct Normalisation {
    /// Subtracted; one value per channel.
    pub mean: Vec<f32>,
    /// Divisor; one value per channel.
    pub deviation: Vec<f32>,
}

impl Normalisation {
    pub(super) fn new(images: &config::Images, channels: u32) -> Result<Self, DataError> {
        let each = |field, numbers, positive| {
            let numbers = one_or_each(field, numbers, channels as usize, "channels", positive)?;
            Ok::<_, DataError>(numbers.into_iter().map(|number| number as f32).collect())
        };
        Ok(Normalisation {
            mean: each("spec.engine.data.normalisation.mean", &images.mean, false)?,
            deviation: each("spec.engine.data.normalisation.deviation", &images.deviation, true)?,
        })
    }

    /// The normalised value of each byte, per channel.
    fn table(&self) -> Vec<[f32; 256]> {
        let channels = self.mean.iter().zip(&self.deviation);
        channels.map(|(mean, deviation)| std::array::from_fn(|byte| (byte as f32 / 255.0 - mean) / deviation)).collect()
    }
}

/// The number of each of `count` channels or features, if there is one for all or one for each.
pub(super) fn one_or_each(
    field: &'static str,
    numbers: &[f64],
    count: usize,
    unit: &str,
    positive: bool,
) -> Result<Vec<f64>, DataError> {
    let usable = |number: &f64| number.is_finite() && (!positive || *number > 0.0);
    match numbers {
        numbers if !numbers.iter().all(usable) => {
            let expected = if positive { "numbers above 0" } else { "finite numbers" };
            Err(DataError::value(field, format!("{numbers:?}"), expected))
        }
        [number] => Ok(vec![*number; count]),
        numbers if numbers.len() == count => Ok(numbers.to_vec()),
        numbers => {
            let expected = format!("1 or {count}, the {unit} of a sample");
            Err(DataError::value(field, format!("{} numbers", numbers.len()), expected))
        }
    }
}

/// Images and their augmentation.
#[derive(Debug)]
pub(super) struct AugmentedImages {
    images: Box<dyn Images>,
    shape: ImageShape,
    padding: usize,
    flip: bool,
    /// For normalised floats: the value of each byte, per channel.
    table: Option<Vec<[f32; 256]>>,
}

impl AugmentedImages {
    pub(super) fn new(
        images: Box<dyn Images>,
        shape: ImageShape,
        options: &config::Images,
        sample_type: SampleType,
    ) -> Result<Self, DataError> {
        let normalisation = Normalisation::new(options, shape.channels)?;
        if options.crop_padding > MAX_PADDING {
            let expected = format!("at most {MAX_PADDING}");
            return Err(DataError::value("spec.engine.data.images.cropPadding", options.crop_padding, expected));
        }
        Ok(AugmentedImages {
            images,
            shape,
            padding: options.crop_padding as usize,
            flip: options.flip,
            table: (sample_type == SampleType::Float32).then(|| normalisation.table()),
        })
    }
}

impl Part for AugmentedImages {
    fn epoch_size(&self) -> EpochSize {
        EpochSize { samples: self.images.len(), slack: 0 }
    }

    fn write(&self, draw: &Draw, row: &mut Row<'_>, scratch: &mut Scratch) -> Result<(), SampleError> {
        let (pixels, class) = self.images.image(draw.sample, scratch)?;
        row.targets[0] = class;
        let place = match draw.augment {
            true => Crop::random(self.padding, self.flip, &mut Random::new(draw.key)),
            false => Crop::default(),
        };
        let width = self.shape.width as usize;
        match (&self.table, self.shape.channels) {
            (None, 1) => place.cut(pixels, width, row.pixels, |pixel: [u8; 1]| pixel),
            (None, _) => place.cut(pixels, width, row.pixels, |pixel: [u8; 3]| pixel),
            (Some(table), 1) => place.cut(pixels, width, row.values, |[grey]| [table[0][usize::from(grey)]]),
            (Some(table), _) => place.cut(pixels, width, row.values, |pixel: [u8; 3]| {
                std::array::from_fn(|channel| table[channel][usize::from(pixel[channel])])
            }),
        }
        Ok(())
    }

    fn memory_bytes(&self) -> u64 {
        self.images.memory_bytes()
    }
}

/// The crop of a zero-padded image to take.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Crop {
    /// Rows by which the crop is shifted down; negative: up.
    down: isize,
    /// Pixels by which it is shifted right.
    right: isize,
    mirrored: bool,
}

impl Crop {
    fn random(padding: usize, flip: bool, random: &mut Random) -> Crop {
        let mut shift = || random.below(2 * padding as u64 + 1) as isize - padding as isize;
        let (down, right) = (shift(), shift());
        Crop { down, right, mirrored: flip && random.below(2) == 1 }
    }

    /// Writes the crop, pixel by pixel of `[T; C]`. `convert` receives the bytes of a pixel;
    /// outside the image they are 0.
    fn cut<T, const C: usize>(&self, image: &[u8], width: usize, to: &mut [T], convert: impl Fn([u8; C]) -> [T; C]) {
        let (image, to) = (image.as_chunks::<C>().0, to.as_chunks_mut::<C>().0);
        let height = to.len() / width;
        // The pixels of a row that lie inside the image, before mirroring.
        let (shift, count) = (self.right.unsigned_abs().min(width), width - self.right.unsigned_abs().min(width));
        let (from, start) = if self.right < 0 { (0, shift) } else { (shift, 0) };
        for (y, to) in to.chunks_exact_mut(width).enumerate() {
            let Some(row) = y.checked_add_signed(self.down).filter(|row| *row < height) else {
                to.fill_with(|| convert([0; C]));
                continue;
            };
            let row = &image[row * width + from..][..count];
            let start = if self.mirrored { width - start - count } else { start };
            to[..start].fill_with(|| convert([0; C]));
            to[start + count..].fill_with(|| convert([0; C]));
            let to = &mut to[start..start + count];
            if self.mirrored {
                to.iter_mut().zip(row.iter().rev()).for_each(|(to, pixel)| *to = convert(*pixel));
            } else {
                to.iter_mut().zip(row).for_each(|(to, pixel)| *to = convert(*pixel));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 2 rows of 3 pixels.
    const IMAGE: [u8; 6] = [1, 2, 3, 4, 5, 6];

    fn cut(down: isize, right: isize, mirrored: bool) -> Vec<u8> {
        let mut to = vec![9; 6];
        Crop { down, right, mirrored }.cut(&IMAGE, 3, &mut to, |pixel: [u8; 1]| pixel);
        to
    }

    #[test]
    fn pieces_by_hand() {
        assert_eq!(cut(0, 0, false), IMAGE);
        assert_eq!(cut(0, 0, true), [3, 2, 1, 6, 5, 4]);
        assert_eq!(cut(1, 0, false), [4, 5, 6, 0, 0, 0]);
        assert_eq!(cut(-1, 1, false), [0, 0, 0, 2, 3, 0]);
        assert_eq!(cut(0, -2, true), [1, 0, 0, 4, 0, 0]);
        assert_eq!(cut(5, 5, false), [0; 6]);
    }

    #[test]
    fn every_place_occurs() {
        let offsets: std::collections::BTreeSet<_> = (0..2000)
            .map(|key| Crop::random(2, true, &mut Random::new(key)))
            .map(|place| (place.down, place.right, place.mirrored))
            .collect();
        assert_eq!(offsets.len(), 5 * 5 * 2);
        assert!(offsets.iter().all(|(down, right, _)| (-2..=2).contains(down) && (-2..=2).contains(right)));
        assert_eq!(Crop::random(0, false, &mut Random::new(5)), Crop::default());
    }

    #[test]
    fn normalisation() {
        let options = |mean: &[f64], deviation: &[f64]| config::Images {
            size: 0,
            crop_padding: 0,
            flip: false,
            mean: mean.to_vec(),
            deviation: deviation.to_vec(),
        };
        let of = |mean: &[f64], deviation: &[f64]| Normalisation::new(&options(mean, deviation), 3);
        let table = of(&[0.5], &[0.25, 0.5, 1.0]).expect("numbers").table();
        assert_eq!((table[0][255], table[1][0], table[2][51]), (2.0, -1.0, 0.2 - 0.5));
        let text = of(&[0.5, 0.5], &[1.0]).expect_err("two of three").to_string();
        assert_eq!(
            text,
            "spec.engine.data.normalisation.mean: got 2 numbers: expected 1 or 3, the channels of a sample"
        );
        let text = of(&[0.5], &[0.0]).expect_err("nothing to divide by").to_string();
        assert_eq!(text, "spec.engine.data.normalisation.deviation: got [0.0]: expected numbers above 0");
        assert!(of(&[f64::NAN], &[1.0]).is_err() && of(&[], &[1.0]).is_err());
    }
}
