//! Conversion between element formats, and from image pixels.

use super::ELEMENTS;
use super::pieces::{in_pieces, rows};
use crate::cpu::isa::per_isa;
use crate::cpu::{Cpu, Element};

#[inline(always)]
fn convert_body<A: Element, B: Element>(x: &[A], y: &mut [B]) {
    for (y, &x) in y.iter_mut().zip(x) {
        *y = B::of(x.get());
    }
}

per_isa! { fn convert_piece<A: Element, B: Element> = convert_body(x: &[A], y: &mut [B]) }

/// `y` = `x` in `y`'s format, rounded to nearest even.
pub fn convert<A: Element, B: Element>(cpu: &Cpu, x: &[A], y: &mut [B]) {
    let len = y.len();
    assert_eq!(x.len(), len, "length of x and y");
    in_pieces(cpu, len, ELEMENTS, rows(y, 1), |range, y| convert_piece(cpu.isa, &x[range], y));
}

/// The normalised value of each of the 256 values of a channel.
pub type PixelTable<E> = [E; 256];

/// `(value / 255 - mean) / deviation`, with the f32 operations of torchvision's `ToTensor` and
/// `Normalize`.
pub fn pixel_table<E: Element>(mean: f32, deviation: f32) -> PixelTable<E> {
    std::array::from_fn(|value| E::of((value as f32 / 255.0 - mean) / deviation))
}

/// `y` = normalised `pixels`, whose channels are interleaved; one table per channel.
///
/// The look-up runs at memory speed for any number of channels.
pub fn normalise<E: Element>(cpu: &Cpu, pixels: &[u8], tables: &[PixelTable<E>], y: &mut [E]) {
    let channels = tables.len();
    let count = y.len() / channels;
    assert_eq!((pixels.len(), y.len()), (count * channels, pixels.len()), "length of pixels and y");
    in_pieces(cpu, count, ELEMENTS, rows(y, channels), |range, y| {
        let pixels = pixels[range.start * channels..range.end * channels].chunks_exact(channels);
        for (y, pixel) in y.chunks_exact_mut(channels).zip(pixels) {
            for ((y, &value), table) in y.iter_mut().zip(pixel).zip(tables) {
                *y = table[usize::from(value)];
            }
        }
    });
}
