//! Bilinear image scaling: each output pixel is a weighted mean of the pixels around its position,
//! with weights that fall linearly to zero. When downscaling, the filter is widened to avoid
//! aliasing.

/// Size of an image.
#[derive(Debug, Clone, Copy)]
pub(super) struct Size {
    pub height: usize,
    pub width: usize,
    /// Bytes per pixel.
    pub channels: usize,
}

/// Scales the shorter side of an image to `side` and writes the central square to `to`
/// (`[side, side, channels]`). `rows` is scratch memory.
///
/// # Panics
/// If `image` does not match its size, `to` does not match `side`, a size is 0, or a pixel does not
/// have 1 or 3 bytes.
pub(super) fn to_square(image: &[u8], size: Size, side: usize, rows: &mut Vec<f32>, to: &mut [u8]) {
    let Size { height, width, channels } = size;
    assert_eq!(image.len(), height * width * channels, "bytes of the image");
    assert_eq!(to.len(), side * side * channels, "bytes of the square");
    let shorter = height.min(width);
    let (down, across) = (Taps::new(height, shorter, side), Taps::new(width, shorter, side));
    let line = side * channels;
    let first = down.starts[0];
    let count = down.starts[side - 1] + down.each - first;
    rows.resize((count + 1) * line, 0.0);
    let (sum, rows) = rows.split_at_mut(line);
    let used = &image[first * width * channels..][..count * width * channels];
    match channels {
        1 => narrow::<1>(used, width, &across, rows),
        3 => narrow::<3>(used, width, &across, rows),
        _ => unreachable!("invariant: images have 1 or 3 channels"),
    }
    for (y, to) in to.chunks_exact_mut(line).enumerate() {
        let (start, weights) = down.of(y);
        sum.fill(0.0);
        for (row, weight) in rows[(start - first) * line..].chunks_exact(line).zip(weights) {
            for (sum, value) in sum.iter_mut().zip(row) {
                *sum += weight * value;
            }
        }
        for (to, sum) in to.iter_mut().zip(&*sum) {
            // The cast saturates.
            *to = sum.round() as u8;
        }
    }
}

/// Scales rows of `width` pixels with C channels horizontally.
fn narrow<const C: usize>(image: &[u8], width: usize, across: &Taps, rows: &mut [f32]) {
    let rows = rows.as_chunks_mut::<C>().0.chunks_exact_mut(across.starts.len());
    for (row, image) in rows.zip(image.as_chunks::<C>().0.chunks_exact(width)) {
        for (x, to) in row.iter_mut().enumerate() {
            let (start, weights) = across.of(x);
            *to = [0.0; C];
            for (pixel, weight) in image[start..].iter().zip(weights) {
                for (to, byte) in to.iter_mut().zip(pixel) {
                    *to += weight * f32::from(*byte);
                }
            }
        }
    }
}

/// One direction: the source pixels that contribute to each output pixel, and their weights.
struct Taps {
    /// First contributing pixel, for each output pixel; ascending.
    starts: Vec<usize>,
    /// Contributing pixels per output pixel.
    each: usize,
    /// Their weights, which sum to 1 for each pixel.
    weights: Vec<f32>,
}

impl Taps {
    /// Taps for the central `side` pixels, when `length` pixels are scaled by the factor that maps
    /// `shorter` to `side`.
    fn new(length: usize, shorter: usize, side: usize) -> Taps {
        let scaled = ((length as f64 * side as f64 / shorter as f64).round() as usize).max(side);
        let skip = (scaled - side) / 2;
        // Not the scale of the shorter side: this size was rounded to whole pixels.
        let step = length as f64 / scaled as f64;
        let reach = step.max(1.0);
        let each = ((2.0 * reach).ceil() as usize + 1).min(length);
        let mut taps = Taps { starts: Vec::with_capacity(side), each, weights: Vec::with_capacity(side * each) };
        for pixel in 0..side {
            let middle = ((pixel + skip) as f64 + 0.5) * step;
            let start = ((middle - reach).floor().max(0.0) as usize).min(length - each);
            let weight = |of: usize| (1.0 - (of as f64 + 0.5 - middle).abs() / reach).max(0.0);
            let total: f64 = (start..start + each).map(weight).sum();
            taps.starts.push(start);
            taps.weights.extend((start..start + each).map(|of| (weight(of) / total) as f32));
        }
        taps
    }

    fn of(&self, pixel: usize) -> (usize, &[f32]) {
        (self.starts[pixel], &self.weights[pixel * self.each..][..self.each])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn square(image: &[u8], (height, width, channels): (usize, usize, usize), side: usize) -> Vec<u8> {
        let mut to = vec![0; side * side * channels];
        to_square(image, Size { height, width, channels }, side, &mut Vec::new(), &mut to);
        to
    }

    #[test]
    fn by_hand() {
        let image: Vec<u8> = (0..12).collect();
        assert_eq!(square(&image, (2, 2, 3), 2), image, "the same size is the same image");
        assert_eq!(square(&image[..9], (3, 3, 1), 3), image[..9]);
        // The central 3 columns of 3 rows of 5.
        let wide: Vec<u8> = (0..15).collect();
        assert_eq!(square(&wide, (3, 5, 1), 3), [1, 2, 3, 6, 7, 8, 11, 12, 13]);
        assert_eq!(square(&wide, (5, 3, 1), 3), [3, 4, 5, 6, 7, 8, 9, 10, 11]);
        // Downscaling by 2: weights 1 3 3 1 of 8 in each direction, cut off at the edges (3 3 1 of
        // 7).
        let steps = [0, 0, 70, 70, 0, 0, 70, 70, 0, 0, 70, 70, 0, 0, 70, 70];
        assert_eq!(square(&steps, (4, 4, 1), 2), [10, 60, 10, 60]);
        // Upscaling by 2: a quarter of the neighbour.
        assert_eq!(square(&[0, 80, 0, 80], (2, 2, 1), 4)[..4], [0, 20, 60, 80]);
    }

    #[test]
    fn fine_stripes_become_grey_and_not_stripes() {
        let stripes: Vec<u8> = (0..64 * 64).map(|place| if place % 2 == 0 { 0 } else { 200 }).collect();
        let small = square(&stripes, (64, 64, 1), 9);
        assert!(small.iter().all(|byte| (90..=110).contains(byte)), "{small:?}");
    }

    proptest! {
        #[test]
        fn a_flat_image_stays_flat(height in 1usize..40, width in 1usize..40, side in 1usize..40, value: u8) {
            let image = vec![value; height * width * 3];
            prop_assert!(square(&image, (height, width, 3), side).iter().all(|byte| *byte == value));
        }
    }
}
